"""The router's flags for finding servers. The Kubernetes ones are named as sglang-router's."""

import argparse
from pathlib import Path

from vertumnus_router.core.config import ConfigError
from vertumnus_router.io.discovery.config import (
    SERVICE_ACCOUNT,
    ApiServer,
    Discovery,
    FileDiscovery,
    KubernetesDiscovery,
    Selector,
)

from sgl_vertumnus.environment import kubernetes_api

_SELECTORS = ("selector", "prefill_selector", "decode_selector")


def add_discovery_flags(parser: argparse.ArgumentParser) -> None:
    """A group of their own."""
    add = parser.add_argument_group("discovery").add_argument
    add(
        "--discovery-file",
        type=Path,
        metavar="FILE",
        help="follow the servers named in FILE, which may change: one URL of a worker a line, or "
        'JSON, a list of URLs or {"workers": [], "prefill": [], "decode": []}. Replace it by '
        "renaming another onto it",
    )
    add(
        "--service-discovery",
        action="store_true",
        help="follow the ready endpoints of Kubernetes Services, by the API that this pod's "
        "service account reaches",
    )
    labels = {"nargs": "+", "type": _label, "default": [], "metavar": "KEY=VALUE"}
    add("--selector", **labels, help="labels of the Services of workers")  # type: ignore[arg-type]
    add(
        "--prefill-selector",
        **labels,  # type: ignore[arg-type]
        help="labels of the Services of workers that prefill only",
    )
    add("--decode-selector", **labels, help="labels of the Services of decode servers")  # type: ignore[arg-type]
    add(
        "--service-discovery-namespace",
        metavar="NAMESPACE",
        help="where to look for Services (default: in all, which a role in one does not allow)",
    )
    add(
        "--service-discovery-port",
        type=int,
        metavar="PORT",
        help="the servers' port (default: the Service's only one, or that named http)",
    )


def discovery_config(options: argparse.Namespace) -> tuple[Discovery, ...]:
    """What the options say. Raises ``ConfigError``."""
    found: list[Discovery] = []
    if options.discovery_file is not None:
        found.append(FileDiscovery(options.discovery_file))
    if options.service_discovery:
        found.append(
            KubernetesDiscovery(
                api=_in_cluster(),
                workers=_selector(options.selector),
                prefills=_selector(options.prefill_selector),
                decodes=_selector(options.decode_selector),
                namespace=options.service_discovery_namespace,
                port=options.service_discovery_port,
            )
        )
    elif any(getattr(options, name) for name in _SELECTORS):
        raise ConfigError("selectors need --service-discovery")
    return tuple(found)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals and value) or any(char in text for char in ", !()"):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value")
    return key, value


def _selector(labels: list[tuple[str, str]]) -> Selector:
    if len(dict(labels)) != len(labels):
        raise ConfigError("a selector names a label twice")
    return tuple(labels)


def _in_cluster() -> ApiServer:
    address = kubernetes_api()
    if address is None:
        raise ConfigError(
            "--service-discovery works in a pod of Kubernetes only (KUBERNETES_SERVICE_HOST is "
            "not set here); elsewhere use --discovery-file"
        )
    host, port = address
    return ApiServer(
        url=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        token=SERVICE_ACCOUNT / "token",
        ca=SERVICE_ACCOUNT / "ca.crt",
    )
