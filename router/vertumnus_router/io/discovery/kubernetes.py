"""Follow the EndpointSlices of Services: list them, then watch, then list them again.

An event may add a server; only a list takes one away. What an event would take away is listed
again first: slices are rewritten when endpoints move between them, and a server that leaves for a
moment loses what the router knows of its cache. A watch ends after a minute or two, or when the
API server says that it is too old (410), or when the connection breaks; each time everything is
listed again, so nothing that was missed stays missed.
"""

import logging
import random
import ssl

import aiohttp
import msgspec

from vertumnus_router.clock import Clock
from vertumnus_router.io.discovery.config import ApiServer, KubernetesDiscovery, Selector
from vertumnus_router.io.discovery.following import Following, Joins
from vertumnus_router.io.discovery.slices import EndpointSlice, port_of, urls
from vertumnus_router.io.fleet import Role

log = logging.getLogger(__name__)

_PAGE = 500
_LIST_TIMEOUT_S = 30.0
#: How long a watch is asked to last, and how much longer it may before it counts as stalled.
_WATCH_S, _STALLED_S = 90, 15.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 30.0
#: An event is a whole slice, which holds up to 1000 endpoints.
_LINE_BYTES = 8 * 2**20
_ERROR_BYTES = 500


class DiscoveryError(Exception):
    """The API server's answer is of no use; the message says what to do."""


class _ListMetadata(msgspec.Struct):
    version: str = msgspec.field(name="resourceVersion")
    more: str = msgspec.field(default="", name="continue")


class _Listing(msgspec.Struct):
    metadata: _ListMetadata
    items: list[EndpointSlice]


class _Status(msgspec.Struct):
    """How the API server reports an error."""

    code: int = 0
    message: str = ""


class _Event(msgspec.Struct):
    """Of type ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""

    type: str
    object: msgspec.Raw


class KubernetesSource:
    """Follows the Services that one selector names, for one role."""

    def __init__(
        self,
        config: KubernetesDiscovery,
        selector: Selector,
        role: Role,
        fleet: Joins,
        clock: Clock,
        source: random.Random,
    ) -> None:
        labels = ",".join(f"{key}={value}" for key, value in selector)
        self.name = f"services with {labels}"
        #: why nothing is heard of the API server now, None if it is
        self.trouble: str | None = "not listed yet"
        self.following = [Following(fleet, role, clock, what=self.name)]
        self._config = config
        self._labels = labels
        self._clock = clock
        self._source = source
        self._slices: dict[tuple[str, str], EndpointSlice] = {}

    async def run(self) -> None:
        """List and watch. Never returns."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                async with _session(self._config.api) as session:
                    version = await self._list(session)
                    self.trouble = None
                    await self._watch(session, version)
                    pause_s = _FIRST_PAUSE_S
            except (
                DiscoveryError,
                aiohttp.ClientError,
                msgspec.MsgspecError,
                OSError,  # TimeoutError and ssl.SSLError too
                ValueError,  # of aiohttp, for a line that is too long
            ) as exc:
                said = str(exc) or type(exc).__name__
                if said != self.trouble:
                    log.warning("%s: %s; what was found before stays", self.name, said)
                self.trouble = said
            # Half at random, so that the routers of a fleet do not ask all at once.
            await self._clock.sleep(pause_s * (0.5 + self._source.random() / 2))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _list(self, session: aiohttp.ClientSession) -> str:
        """Follow exactly what is there; the version from which on to watch."""
        slices: dict[tuple[str, str], EndpointSlice] = {}
        page = {"labelSelector": self._labels, "limit": str(_PAGE)}
        while True:
            async with session.get(
                self._path,
                params=page,
                headers=self._headers(),
                timeout=aiohttp.ClientTimeout(total=_LIST_TIMEOUT_S),
            ) as answer:
                await _check(answer)
                listing = msgspec.json.decode(await answer.read(), type=_Listing)
            slices |= {one.key: one for one in listing.items}
            if not listing.metadata.more:
                break
            page["continue"] = listing.metadata.more
        self._slices = slices
        self._complain_of_ports()
        self.following[0].replace(self._urls())
        return listing.metadata.version

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> None:
        """Follow what joins, until there is a reason to list again."""
        asked = {
            "labelSelector": self._labels,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH_S),
        }
        async with session.get(
            self._path,
            params=asked,
            headers=self._headers(),
            timeout=aiohttp.ClientTimeout(total=_WATCH_S + _STALLED_S),
        ) as answer:
            await _check(answer)
            async for line in answer.content:
                event = msgspec.json.decode(line, type=_Event)
                match event.type:
                    case "ERROR":  # 410 after all, mostly
                        status = msgspec.json.decode(event.object, type=_Status)
                        raise DiscoveryError(f"the watch ended: {status.code} {status.message}")
                    case "ADDED" | "MODIFIED" | "DELETED":
                        if not self._take(event):
                            return

    def _take(self, event: _Event) -> bool:
        """False if the event would take a server away."""
        one = msgspec.json.decode(event.object, type=EndpointSlice)
        if event.type == "DELETED":
            self._slices.pop(one.key, None)
        else:
            self._slices[one.key] = one
        now = self._urls()
        self.following[0].add(now)
        return not self.following[0].would_leave(now)

    def _urls(self) -> set[str]:
        return urls(self._slices.values(), self._config.port)

    def _complain_of_ports(self) -> None:
        if self._config.port is not None:
            return
        for one in self._slices.values():
            if one.endpoints and port_of(one) is None:
                log.error(
                    "%s: %s has not one port, nor one named http: its endpoints are left out; "
                    "say which with --service-discovery-port",
                    *(self.name, "/".join(one.key)),
                )

    @property
    def _path(self) -> str:
        where = self._config.namespace
        within = f"/namespaces/{where}" if where is not None else ""
        return f"{self._config.api.url}/apis/discovery.k8s.io/v1{within}/endpointslices"

    def _headers(self) -> dict[str, str]:
        token = self._config.api.token
        return {} if token is None else {"authorization": f"Bearer {token.read_text().strip()}"}


def _session(api: ApiServer) -> aiohttp.ClientSession:
    trust: ssl.SSLContext | bool = True
    if api.ca is not None:
        trust = ssl.create_default_context(cafile=str(api.ca))
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=trust), read_bufsize=_LINE_BYTES
    )


async def _check(answer: aiohttp.ClientResponse) -> None:
    """Raises ``DiscoveryError`` unless the answer is good."""
    if answer.status == 200:
        return
    said = (await answer.content.read(_ERROR_BYTES)).decode(errors="replace")
    hint = ""
    if answer.status in (401, 403):
        hint = (
            "; the router's service account must be allowed to list and watch endpointslices of "
            "discovery.k8s.io, in the namespace of --service-discovery-namespace or, without it, "
            "in all (deploy/kubernetes/rbac.yaml)"
        )
    raise DiscoveryError(f"the API server answered {answer.status}: {said}{hint}")
