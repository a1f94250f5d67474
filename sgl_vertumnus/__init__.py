"""Context parallelism as a live resource: pools of SGLang ranks and their router.

``launch_server`` starts a pool, ``launch_router`` a router, ``worker`` is the runtime inside
SGLang's processes. Importing this package imports neither torch nor sglang.
"""

from sgl_vertumnus.errors import (
    ConfigurationError,
    PoolStartError,
    RegroupRefused,
    SupervisorSilent,
    UnsupportedFeature,
    VertumnusError,
)

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "PoolStartError",
    "RegroupRefused",
    "SupervisorSilent",
    "UnsupportedFeature",
    "VertumnusError",
    "__version__",
]
