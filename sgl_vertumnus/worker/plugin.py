"""Entry point of ``sglang.srt.plugins``: bind the runtime and install the patches.

Inert in every SGLang process that is not part of a pool.
"""

from vertumnus_patches.install import install
from vertumnus_patches.patches import ALL_PATCHES
from vertumnus_patches.seams import seams

from sgl_vertumnus.config import PoolConfig
from sgl_vertumnus.environment import pool_config


def plugin() -> None:
    """Called once in every process that SGLang starts.

    Raises:
        SystemExit: whatever goes wrong. SGLang logs any other exception of a plugin and then
            serves without it.
    """
    try:
        config = pool_config()
        if config is not None:
            _join(config)
    except Exception as exc:
        raise SystemExit(f"sgl-vertumnus: this process cannot join its pool: {exc!r}") from exc


def _join(config: PoolConfig) -> None:
    from vertumnus_patches import cpu_attention, flashinfer_attention

    from sgl_vertumnus.worker import attention, paged_plan
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
    else:
        flashinfer_attention.register(paged_plan)
