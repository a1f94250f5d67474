"""What the live page shows, as one JSON object: nothing that the other endpoints do not tell."""

from dataclasses import astuple
from typing import Any

from vertumnus_router.core.snapshot import WorkerSnapshot
from vertumnus_router.core.types import PoolId
from vertumnus_router.io.composition import decode_contents, worker_content
from vertumnus_router.io.prefixes import hot_content, transfer_content
from vertumnus_router.io.router import Router
from vertumnus_router.io.verdicts import controller_content
from vertumnus_router.lattice import format_composition

#: More would not be read at a glance.
_HOT = 10
_TRANSFERS = 8
_MOVES = 12


def state(router: Router) -> dict[str, Any]:
    """The moment as JSON. Times are seconds and ages, shares between 0 and 1."""
    core, config, now = router.core, router.config, router.clock.now()
    workers = core.workers(now)
    prefixes = core.prefixes(now)
    controller = controller_content(core.controller, now)
    served = router.model.description
    return {
        "model": served.model.served_name if served else None,
        "policy": config.policy.policy,
        "not_ready": router.not_ready(),
        "queued": core.queued_count,
        "pending": core.pending_count,
        "slo_ttft_s": astuple(config.observe.slo),
        "timeline": router.observer.timeline.content(now),
        "pools": _pools(router, workers),
        "decodes": decode_contents(router),
        "moves": router.moves.content(now)[:_MOVES],
        "controller": {
            "mode": controller["mode"],
            "last": controller["last_decisions"][-1] if controller["last_decisions"] else None,
        },
        "prefixes": {
            "mode": prefixes.mode,
            "pull": prefixes.pull,
            "index_bytes": prefixes.index_bytes,
            "hot": [hot_content(prefix) for prefix in prefixes.hot[:_HOT]],
            "transfers": [transfer_content(one) for one in prefixes.transfers[:_TRANSFERS]],
        },
    }


def _pools(router: Router, workers: tuple[WorkerSnapshot, ...]) -> list[dict[str, Any]]:
    """Every pool that the router was given, those that it cannot reach included."""
    joined = {pool.pool: pool for pool in router.core.pools}
    pools = []
    for link in router.pools:
        name = None if link.description is None else PoolId(link.description.pool_id)
        pool = None if name is None else joined.get(name)
        shown: dict[str, Any] = {"pool": name, "url": link.url, "trouble": link.trouble, "size": 0}
        if pool is not None:
            moving, blocks = router.core.moving(pool.pool), router.core.composition(pool.pool)
            shown |= {
                "size": pool.size,
                "prefill_only": pool.prefill_only,
                "epoch": router.core.epoch(pool.pool),
                "composition": None if blocks is None else format_composition(blocks),
                "moving": None if moving is None else format_composition(moving.after),
                "kv_capacity_tokens": pool.kv_capacity_tokens,
                "workers": [worker_content(one) for one in workers if one.pool == pool.pool],
            }
        pools.append(shown)
    return pools
