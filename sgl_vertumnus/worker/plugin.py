"""Entry point of ``sglang.srt.plugins``: bind the runtime and install the patches.

Inert in every SGLang process that is not part of a pool.
"""

from vertumnus_patches.install import install
from vertumnus_patches.patches import ALL_PATCHES
from vertumnus_patches.seams import seams

from sgl_vertumnus.environment import pool_config


def plugin() -> None:
    """Called once in every process that SGLang starts."""
    config = pool_config()
    if config is None:
        return
    from vertumnus_patches import cpu_attention

    from sgl_vertumnus.worker import attention
    from sgl_vertumnus.worker.front import FrontRuntime
    from sgl_vertumnus.worker.rank import RankRuntime
    from sgl_vertumnus.worker.supervisor import Supervisor

    manifest = install(ALL_PATCHES)
    seams.bind(
        rank=RankRuntime(config, manifest),
        controller=Supervisor(config),
        front=FrontRuntime(config),
    )
    if config.device == "cpu":
        cpu_attention.register(attention)
