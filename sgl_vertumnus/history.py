"""A historical workload: what each of its requests left to compute."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from vertumnus_router.core.initial import PastRequest
from vertumnus_sim.workloads.traces import TraceError, TraceRequest, read_mooncake

from sgl_vertumnus.errors import ConfigurationError


def read_history(path: Path) -> list[TraceRequest]:
    """The requests of a file in Mooncake's format, by arrival. Raises ``ConfigurationError``."""
    try:
        return read_mooncake(path)
    except TraceError as exc:
        raise ConfigurationError(f"--history: {exc}") from exc


def past_requests(requests: Iterable[TraceRequest]) -> list[PastRequest]:
    """What each leaves to compute when everything that was computed before is kept."""
    seen: set[int] = set()
    found = []
    for request in requests:
        held = _common(request.blocks, seen) * request.block_tokens
        seen.update(request.blocks)
        cached = min(held, request.input_tokens - 1)
        found.append(
            PastRequest(
                at_s=request.arrival_s,
                uncached_tokens=request.input_tokens - cached,
                cached_tokens=cached,
            )
        )
    return found


def _common(ids: Sequence[int], seen: set[int]) -> int:
    return next((n for n, one in enumerate(ids) if one not in seen), len(ids))
