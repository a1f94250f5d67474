"""What operators ask about cached prefixes, and the orders to copy and to delete one.

Block hashes are 64-bit integers, which JavaScript cannot hold: they are written as strings, and
read as either.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Request

from vertumnus_router.core.effects import Copy, TransferRefused
from vertumnus_router.core.events import CopyEnded, TransferOutcome
from vertumnus_router.core.snapshot import (
    HotPrefix,
    LinkSnapshot,
    PrefixDecision,
    TransferSnapshot,
)
from vertumnus_router.core.types import BlockHash, Rank, WorkerId
from vertumnus_router.io.api_errors import ApiError, NotDone
from vertumnus_router.io.operators import order_of
from vertumnus_router.io.router import Router
from vertumnus_router.io.transfers import Transferred

_MOST = 1000


class Order(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /vertumnus/replicate`` and ``/vertumnus/reclaim``: the last block of a
    prefix, and a worker's id."""

    tip: int | str
    worker: str


def prefixes(router: Router, request: Request) -> dict[str, Any]:
    """What is hot and who holds it, what is in flight, what was decided. ``?limit=`` shortens the
    lists. ``ApiError`` 400 if it is no number."""
    limit = _limit(request.query_params.get("limit"))
    now = router.clock.now()
    found = router.core.prefixes(now)
    return {
        "mode": found.mode,
        "pull": found.pull,
        "scans": found.scans,
        "scanning": found.scanning,
        "index": {"blocks": found.index_blocks, "bytes": found.index_bytes},
        "hot": [hot_content(prefix) for prefix in found.hot[:limit]],
        "transfers": [transfer_content(one) for one in found.transfers[:limit]],
        "decisions": [_decision(one, now) for one in found.decisions[-limit:]],
        "bandwidth": {"same_pool": _link(found.local), "other_pool": _link(found.remote)},
    }


async def replicate(router: Router, request: Request) -> dict[str, Any]:
    """Copy a prefix to a worker; answers when that has ended. ``ApiError`` 400 for a body that
    makes no sense, 409 when it was not done."""
    tip, worker = await _order(router, request)
    began_s = router.clock.now()
    ended = await router.transfers.replicate(tip, worker)
    return _result("not_replicated", tip, worker, ended, router.clock.now() - began_s)


async def reclaim(router: Router, request: Request) -> dict[str, Any]:
    """Delete a block and what is below it at a worker, as ``replicate``."""
    tip, worker = await _order(router, request)
    began_s = router.clock.now()
    ended = await router.transfers.reclaim(tip, worker)
    return _result("not_reclaimed", tip, worker, ended, router.clock.now() - began_s)


async def _order(router: Router, request: Request) -> tuple[BlockHash, WorkerId]:
    body = await order_of(request, router.config.control_key)
    try:
        order = msgspec.json.decode(body, type=Order)
    except msgspec.MsgspecError as exc:
        example = '{"tip": "-8023104560125521733", "worker": "pool/0x1"}'
        raise ApiError(400, "invalid_json", f"the body must be like {example}: {exc}") from exc
    return _hash(order.tip), WorkerId(order.worker)


def _hash(tip: int | str) -> BlockHash:
    try:
        value = int(tip)
        value.to_bytes(8, "big", signed=True)
    except (ValueError, OverflowError) as exc:
        raise ApiError(
            400,
            "bad_tip",
            f"tip {tip!r} is no block hash: give one of the tips that GET /vertumnus/prefixes "
            "lists, a signed 64-bit integer",
            param="tip",
        ) from exc
    return BlockHash(value)


def _limit(text: str | None) -> int:
    if text is None:
        return _MOST
    digits = len(str(_MOST))  # of more than 4300 Python makes no number
    if text.isascii() and text.isdigit() and len(text) <= digits and 1 <= int(text) <= _MOST:
        return int(text)
    raise ApiError(
        400, "bad_limit", f"limit {text!r}: give a number from 1 to {_MOST}", param="limit"
    )


def _result(
    code: str,
    tip: BlockHash,
    worker: WorkerId,
    found: tuple[Transferred, ...] | TransferRefused,
    seconds: float,
) -> dict[str, Any]:
    """All that the order took, as JSON; ``seconds`` from the order to the end of the last."""
    content: dict[str, Any] = {"tip": str(tip), "worker": worker}
    if isinstance(found, TransferRefused):
        raise NotDone(code, found.reason, {**content, "transfers": []})
    content |= {
        "outcome": TransferOutcome.DONE.value,
        "blocks": sum(one.ended.blocks for one in found),
        "bytes": sum(one.ended.bytes for one in found if isinstance(one.ended, CopyEnded)),
        "seconds": seconds,
        "transfers": [_transferred(one) for one in found],
    }
    failed = [one.ended for one in found if one.ended.outcome is not TransferOutcome.DONE]
    if failed:
        outcome = failed[0].outcome.value
        message = f"{failed[0].transfer} {outcome}: {failed[0].reason or 'no reason given'}"
        raise NotDone(code, message, {**content, "outcome": outcome})
    return content


def _transferred(one: Transferred) -> dict[str, Any]:
    order, ended = one.order, one.ended
    content: dict[str, Any] = {
        "transfer": order.transfer,
        "outcome": ended.outcome.value,
        "reason": ended.reason,
        "blocks": ended.blocks,
    }
    if isinstance(order, Copy):
        content |= {"source": str(order.source.rank), "rank": str(order.destination.rank)}
    else:
        content |= {"rank": str(order.holder.rank)}
    if isinstance(ended, CopyEnded):
        content |= {
            "bytes": ended.bytes,
            "seconds": ended.seconds,
            "transfer_s": ended.transfer_s,
        }
    return content


def hot_content(prefix: HotPrefix) -> dict[str, Any]:
    """A hot prefix as JSON."""
    return {
        "tip": str(prefix.tip),
        "tokens": prefix.tokens,
        "ranks": [str(rank) for rank in prefix.ranks],
        "workers": list(prefix.workers),
        "accesses": _by_degree(prefix.accesses),
        "missed_s": _by_degree(prefix.missed_s),
    }


def _by_degree(figures: Mapping[int, float]) -> dict[str, float]:
    return {str(degree): figure for degree, figure in sorted(figures.items())}


def transfer_content(one: TransferSnapshot) -> dict[str, Any]:
    """A copy or a deletion under way as JSON."""
    return {
        "transfer": one.transfer,
        "cause": one.cause.value,
        "source": _rank(one.source),
        "rank": str(one.target),
        "tip": str(one.tip),
        "blocks": one.blocks,
        "age_s": one.age_s,
    }


def _decision(one: PrefixDecision, now: float) -> dict[str, Any]:
    return {
        "age_s": now - one.at_s,
        "cause": one.cause.value,
        "degree": one.degree,
        "tip": str(one.tip),
        "depth": one.depth,
        "blocks": one.blocks,
        "level": one.level,
        "replicas": one.replicas,
        "missed_s": one.missed_s,
        "source": _rank(one.source),
        "rank": _rank(one.target),
        "transfer": one.transfer,
        "reason": one.reason,
    }


def _rank(rank: Rank | None) -> str | None:
    return None if rank is None else str(rank)


def _link(link: LinkSnapshot) -> dict[str, Any]:
    return {
        "latency_s": link.latency_s,
        "bytes_per_s": link.bytes_per_s,
        "copies": link.copies,
    }
