"""Commands to the fronts of pools, and the reports that they answer with."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import aiohttp
import msgspec

from vertumnus_router.core.types import PoolId

_REASON_CHARS = 500

Report = TypeVar("Report", bound=msgspec.Struct)


class Fronts(Protocol):
    """How to reach the fronts of the pools that have joined."""

    @property
    def session(self) -> aiohttp.ClientSession: ...

    def front_url(self, pool: PoolId) -> str | None:
        """None when the pool has left."""

    def key_header(self) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True)
class NoReport:
    """Why there is no report. ``refused``: what was commanded was not begun."""

    reason: str
    refused: bool = False


async def command(
    fronts: Fronts,
    pool: PoolId,
    path: str,
    body: msgspec.Struct,
    report: type[Report],
    timeout_s: float,
) -> Report | NoReport:
    """POST ``body`` to the pool's front. 4xx means that it was not begun."""
    url = fronts.front_url(pool)
    if url is None:
        return NoReport("the pool has left", refused=True)
    try:
        async with fronts.session.post(
            f"{url}{path}",
            data=msgspec.json.encode(body),
            headers={"content-type": "application/json", **fronts.key_header()},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as answer:
            status, content = answer.status, await answer.read()
    except aiohttp.ClientConnectorError as exc:
        return NoReport(no_answer(url, exc), refused=True)
    except (TimeoutError, aiohttp.ClientError, OSError) as exc:
        return NoReport(no_answer(url, exc))
    if status != 200:
        reason = f"the pool answers {status}: {reason_in(content)}"
        return NoReport(reason, refused=400 <= status < 500)
    try:
        return msgspec.json.decode(content, type=report)
    except msgspec.MsgspecError as exc:
        return NoReport(f"its answer is not a report: {exc}")


def no_answer(url: str, exc: Exception) -> str:
    return f"no answer from {url}: {type(exc).__name__} {exc}".rstrip()


def reason_in(body: bytes) -> str:
    """The ``error`` of an error body, or the body itself."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:_REASON_CHARS]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body[:_REASON_CHARS].decode("utf-8", "replace").strip()
