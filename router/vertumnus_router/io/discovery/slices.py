"""The URLs that EndpointSlices of Kubernetes stand for (``discovery.k8s.io/v1``). Pure."""

from collections.abc import Iterable

import msgspec


class Conditions(msgspec.Struct, frozen=True):
    """What is unknown counts as ready, as the API has it. An endpoint that terminates is not ready,
    but for Services with ``publishNotReadyAddresses``."""

    ready: bool | None = None
    terminating: bool | None = None


class TargetRef(msgspec.Struct):
    uid: str | None = None


class Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str]
    conditions: Conditions = Conditions()
    target_ref: TargetRef | None = None


class Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    resource_version: str = ""


class EndpointSlice(msgspec.Struct, rename="camel"):
    metadata: Metadata
    address_type: str = "IPv4"
    endpoints: list[Endpoint] | None = None
    ports: list[Port] | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.metadata.namespace, self.metadata.name


def urls(slices: Iterable[EndpointSlice], port: int | None) -> set[str]:
    """The URLs of the endpoints that take requests.

    One pod is one URL, though a Service with two address families has it in two slices: the IPv4
    one then. During a change an endpoint may be in several slices of a family.
    """
    found: dict[str, str] = {}
    for one in sorted(slices, key=lambda one: one.address_type, reverse=True):  # IPv6 before IPv4
        number = port or port_of(one)
        if number is None:
            continue
        for endpoint in one.endpoints or ():
            state = endpoint.conditions
            if state.ready is False or state.terminating or not endpoint.addresses:
                continue
            address = endpoint.addresses[0]  # the others are of no meaning (API reference)
            pod = endpoint.target_ref and endpoint.target_ref.uid
            host = f"[{address}]" if ":" in address else address
            found[pod or address] = f"http://{host}:{number}"
    return set(found.values())


def port_of(one: EndpointSlice) -> int | None:
    """The slice's only port or the one named ``http``, None if there is no such one."""
    ports = one.ports or []
    named = [port for port in ports if port.name == "http"]
    match named or ports:
        case [only]:
            return only.port
        case _:
            return None
