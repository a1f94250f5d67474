"""Where servers are looked for."""

from dataclasses import dataclass
from pathlib import Path

from vertumnus_router.core.config import ConfigError

#: What Kubernetes mounts into every pod that has a service account.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

Selector = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ApiServer:
    """How Kubernetes' API is reached. ``token`` and ``ca`` are files and read again for each list,
    since Kubernetes replaces them; without ``ca`` this machine's own authorities count."""

    url: str
    token: Path | None = None
    ca: Path | None = None


@dataclass(frozen=True, slots=True)
class KubernetesDiscovery:
    """Selectors are of the labels of Services; an empty one selects none. ``prefills`` are workers
    that leave the decoding to ``decodes``. ``namespace`` None means all. ``port`` None means what
    the Service names."""

    api: ApiServer
    workers: Selector = ()
    prefills: Selector = ()
    decodes: Selector = ()
    namespace: str | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        if not (self.workers or self.prefills):
            raise ConfigError(
                "service discovery needs the labels of the workers' Service: "
                "--selector app=pool, or --prefill-selector beside --decode-selector"
            )
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ConfigError(f"--service-discovery-port {self.port}: must be 1 to 65535")


@dataclass(frozen=True, slots=True)
class FileDiscovery:
    """``path`` is read again every second."""

    path: Path


Discovery = KubernetesDiscovery | FileDiscovery
