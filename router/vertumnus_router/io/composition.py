"""What operators ask about compositions, and the order to change one."""

import asyncio
from typing import Any

import msgspec
from fastapi import Request

from vertumnus_router.core.effects import DecodeTerms, PlanEnded
from vertumnus_router.core.events import PoolJoined, RegroupEnded
from vertumnus_router.core.moves import PricedMove
from vertumnus_router.core.regroups import RegroupRefused
from vertumnus_router.core.snapshot import WorkerSnapshot
from vertumnus_router.core.types import PoolId
from vertumnus_router.io.api_errors import ApiError, NotDone
from vertumnus_router.io.decodes import DecodeLink
from vertumnus_router.io.operators import order_of
from vertumnus_router.io.plain import PlainServer
from vertumnus_router.io.pool import PoolLink
from vertumnus_router.io.router import Router
from vertumnus_router.io.verdicts import block_name, controller_content, move_content
from vertumnus_router.lattice import Block, CompositionError, format_composition, parse_composition
from vertumnus_router.protocol import MoveReport, PoolComposition, Stages

_REFUSED = "not_reconfigured"


class Reconfigure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /vertumnus/reconfigure``. ``pool`` None means the only one."""

    composition: str
    pool: str | None = None
    dry_run: bool = False


async def reconfigure(router: Router, request: Request) -> dict[str, Any]:
    """Carry the order out, or with ``dry_run`` say what that would take. ``ApiError`` 400, 404,
    503 when the order makes no sense, 409 when it was not reached."""
    order = _order(await order_of(request, router.config.control_key))
    pool = _pool(router, order.pool)
    try:
        target = parse_composition(order.composition, pool.size, pool.degrees)
    except CompositionError as exc:
        raise ApiError(400, "bad_composition", str(exc), param="composition") from exc
    if order.dry_run:
        try:
            moves = router.core.plan(pool.pool, target, router.clock.now())
        except RegroupRefused as exc:
            raise NotDone(_REFUSED, str(exc), _result(router, pool.pool, ())) from exc
        return _result(router, pool.pool, moves)
    ended = await router.regrouping.reconfigure(pool.pool, target)
    result = _result(router, pool.pool, ended.moves, ended)
    if ended.reason is not None:
        raise NotDone(_REFUSED, ended.reason, result)
    return result


async def composition(router: Router) -> dict[str, Any]:
    """Every pool's composition, workers and last moves, and what the controller thinks."""
    return {
        "pools": await asyncio.gather(*(_describe(router, link) for link in router.pools)),
        "controller": controller_content(router.core.controller, router.clock.now()),
    }


def worker_content(worker: WorkerSnapshot) -> dict[str, Any]:
    """One worker as JSON."""
    return {
        "id": worker.id,
        "pool": worker.pool,
        "degree": worker.degree,
        "worker_type": "prefill" if worker.prefill_only else "regular",
        "ranks": [rank.index for rank in worker.ranks],
        "epoch": worker.epoch,
        "state": worker.state.value,
        "reason": worker.reason,
        "breaker": worker.breaker.value,
        "resting": worker.resting,
        "queue_s": worker.queue_s,
        "requests": len(worker.requests),
        "load": len(worker.requests),
        "cached_blocks": worker.cached_blocks,
        "partial_blocks": worker.partial_blocks,
        "rank_blocks": list(worker.rank_blocks),
        "running_requests": worker.running_requests,
        "waiting_requests": worker.waiting_requests,
        "rank_kv_used_tokens": list(worker.rank_kv_used_tokens),
    }


def decode_contents(router: Router) -> list[dict[str, Any]]:
    """Every decode server as JSON, live or not."""
    live = {terms.decode: terms for terms in router.core.decodes()}
    return [_decode_content(link, live.get(link.id)) for link in router.decodes]


def _decode_content(link: DecodeLink, terms: DecodeTerms | None) -> dict[str, Any]:
    reason: str | None
    if terms is not None and terms.leaving:
        state, reason = "draining", "it was told to leave"
    elif terms is not None:
        state = "serving"
        reason = "a request got no answer; it is being looked at" if terms.doubted else None
    else:
        state, reason = "refused" if link.refused else "lost", link.trouble
    return {
        "id": link.id,
        "worker_type": "decode",
        "state": state,
        "reason": reason,
        "load": 0 if terms is None else terms.rooms,
        "limit": None if terms is None else terms.limit,
    }


def _order(body: bytes) -> Reconfigure:
    try:
        return msgspec.json.decode(body, type=Reconfigure)
    except msgspec.MsgspecError as exc:
        example = '{"pool": null, "composition": "2x1,1x2", "dry_run": false}'
        raise ApiError(400, "invalid_json", f"the body must be like {example}: {exc}") from exc


def _pool(router: Router, name: str | None) -> PoolJoined:
    pools = {str(pool.pool): pool for pool in router.core.pools}
    if not pools:
        raise ApiError(503, "no_pool", "no pool has joined this router yet")
    movable = [pool for pool in pools.values() if not pool.plain]
    if name is None and len(movable) == 1:
        return movable[0]
    known = ", ".join(sorted(pools))
    if name is None:
        raise ApiError(400, "which_pool", f"name one of the pools: {known}", param="pool")
    if name not in pools:
        raise ApiError(404, "pool_not_found", f"no pool {name!r}; there is {known}", param="pool")
    if pools[name].plain:
        reason = f"{name} is a server of plain SGLang, which keeps its composition for life"
        raise ApiError(400, "plain_server", reason, param="pool")
    return pools[name]


def _result(
    router: Router, pool: PoolId, moves: tuple[PricedMove, ...], ended: PlanEnded | None = None
) -> dict[str, Any]:
    outcomes = () if ended is None else ended.ended
    done = [
        move_content(move) | _outcome(outcome)
        for move, outcome in zip(moves, outcomes, strict=False)
    ]
    workers = [w for w in router.core.workers(router.clock.now()) if w.pool == pool]
    return {
        "pool": pool,
        "moves": done + [move_content(move) for move in moves[len(done) :]],
        "composition": _in_words(router.core.composition(pool)),
        "epoch": max((worker.epoch for worker in workers), default=None),
    }


def _outcome(ended: RegroupEnded) -> dict[str, Any]:
    return {
        "epoch": ended.epoch,
        "outcome": ended.outcome.value,
        "reason": ended.reason,
        "failed": [block_name(block) for block in ended.failed],
        **_stages(ended.stages),
    }


def _past(report: MoveReport) -> dict[str, Any]:
    """A move as the pool remembers it."""
    return {
        "from": report.before,
        "to": report.after,
        "epoch": report.epoch,
        "outcome": report.outcome,
        "reason": report.reason,
        "failed": [f"{first}x{degree}" for first, degree in report.failed],
        **_stages(report.stages),
    }


def _stages(stages: Stages | None) -> dict[str, Any]:
    if stages is None:
        return {"stages_ms": None, "total_ms": None}
    times = msgspec.structs.asdict(stages)
    return {"stages_ms": times, "total_ms": sum(times.values())}


async def _describe(router: Router, link: PoolLink) -> dict[str, Any]:
    """One pool: what its ranks report, and its own memory of its last moves."""
    name = None if link.description is None else PoolId(link.description.pool_id)
    told: PoolComposition | str | None
    if name is None:
        told = link.trouble
    elif isinstance(link.description, PlainServer):
        told = None
    else:
        told = await router.regrouping.describe(link.url)
    workers = [w for w in router.core.workers(router.clock.now()) if w.pool == name]
    moving = None if name is None else router.core.moving(name)
    known = told if isinstance(told, PoolComposition) else None
    here = None if name is None else router.core.composition(name)
    return {
        "pool": name,
        "url": link.url,
        "epoch": max((worker.epoch for worker in workers), default=None),
        "composition": known.composition if known else _in_words(here),
        "workers": [worker_content(worker) for worker in workers],
        "moving": format_composition(moving.after) if moving else known and known.moving,
        "moves": [_past(report) for report in known.moves] if known else [],
        "trouble": None if known else told,
    }


def _in_words(blocks: tuple[Block, ...] | None) -> str | None:
    return None if blocks is None else format_composition(blocks)
