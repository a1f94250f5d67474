"""What serves at a URL: a pool, a server of plain SGLang, or nothing yet."""

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from vertumnus_router import protocol
from vertumnus_router.io.plain import PlainServer, read_server_info
from vertumnus_router.protocol import PoolDescription, ProtocolError

#: ``/server_info`` asks the scheduler, which answers between two steps.
_INFO_TIMEOUT_S = 5.0

Found = PoolDescription | PlainServer


@dataclass(frozen=True, slots=True)
class Plain:
    """Servers of plain SGLang are welcome, too. ``headers`` go with what they are asked,
    ``prefill`` takes those only that prefill, ``bootstrap_port`` is theirs if they do not say."""

    headers: Mapping[str, str]
    prefill: bool = False
    bootstrap_port: int | None = None


class ServerProbe:
    """Asks the server at ``url``, which has ``timeout_s`` to answer. ``plain`` None: only a pool
    will do."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, timeout_s: float, plain: Plain | None
    ) -> None:
        self._url = url
        self._session = session
        self._timeout_s = timeout_s
        self._plain = plain

    async def describe(self) -> Found | str:
        """What serves there, or why nothing does."""
        # One of plain SGLang with --api-key answers 401 for what it does not have, too.
        headers = {} if self._plain is None else self._plain.headers
        answer = await self._get("/vertumnus/pool", headers, self._timeout_s)
        if isinstance(answer, str):
            return answer
        status, body = answer
        if status == 503:
            return f"not ready: {body[:200].decode('utf-8', 'replace').strip()}"
        if status == 404 and self._plain is not None:
            return await self._describe_plain(self._plain)
        if status != 200:
            return f"GET /vertumnus/pool answers {status}: is this a pool?"
        try:
            return protocol.decode_description(body)
        except ProtocolError as exc:
            return str(exc)

    async def _describe_plain(self, plain: Plain) -> PlainServer | str:
        unready = await self._unready(plain)
        if unready is not None:
            return unready
        answer = await self._get("/server_info", plain.headers, _INFO_TIMEOUT_S)
        if isinstance(answer, str):
            return answer
        status, body = answer
        if status != 200:
            return f"GET /server_info answers {status}: is this SGLang?"
        found = read_server_info(self._url, body, plain.bootstrap_port)
        if plain.prefill and isinstance(found, PlainServer) and found.prefill is None:
            return "it decodes as well: start it with --disaggregation-mode prefill"
        return found

    async def look(self, joined: Found, closely: bool) -> Found | str:
        """Look whether it is still there; ``closely``: and still the same. To describe itself
        costs a server of plain SGLang a round through its schedulers."""
        if self._plain is None or isinstance(joined, PoolDescription) or closely:
            return await self.describe()
        return await self._unready(self._plain) or joined

    async def _unready(self, plain: Plain) -> str | None:
        """Why the server takes no requests now, or None. ``/health`` may cost a token and a second,
        so only releases that lack ``/ready`` are asked for it."""
        for path in ("/ready", "/health"):
            answer = await self._get(path, plain.headers, self._timeout_s)
            if isinstance(answer, str):
                return answer
            status, _ = answer
            if status != 404:
                break
        return None if status == 200 else f"GET {path} answers {status}"

    async def _get(
        self, path: str, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes] | str:
        """Status and body of the answer, or why there is none."""
        try:
            async with self._session.get(
                self._url + path,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout_s),
            ) as answer:
                return answer.status, await answer.read()
        except aiohttp.ClientConnectorError as exc:
            return f"cannot connect: {exc.strerror or exc}"
        except (TimeoutError, aiohttp.ClientError, OSError) as exc:
            return f"no answer: {type(exc).__name__} {exc}".rstrip()
