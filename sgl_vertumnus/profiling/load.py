"""An open-loop load on one worker of a live pool."""

import asyncio
from collections.abc import Sequence
from random import Random

import aiohttp
from vertumnus_router.clock import Clock, WallClock

from sgl_vertumnus.profiling.capacity import Outcome, Slo
from sgl_vertumnus.profiling.live_pool import LivePool

_SETTLE_S = 120.0


def run_load(
    pool: LivePool,
    arrivals: Sequence[tuple[float, int]],
    slo: Slo,
    *,
    prefix: str,
    seed: str,
    highest_id: int,
) -> list[Outcome]:
    """Send cold prompts to the worker at rank 0 at their times, until each was answered or is
    late; the pool is idle before and after, and its caches are emptied before. ``prefix`` begins
    the request ids, ``seed`` gives the tokens.

    Raises:
        PoolError: when the pool does not become idle again.
    """
    pool.flush()
    try:
        return asyncio.run(_run(pool, arrivals, slo, WallClock(), prefix, seed, highest_id))
    finally:
        pool.abort_all()
        pool.wait_idle(_SETTLE_S)


async def _run(
    pool: LivePool,
    arrivals: Sequence[tuple[float, int]],
    slo: Slo,
    clock: Clock,
    prefix: str,
    seed: str,
    highest_id: int,
) -> list[Outcome]:
    # Drawn before the clock starts: that takes longer than a gap between short prompts.
    source = Random(seed)
    prompts = [source.choices(range(5, highest_id + 1), k=tokens) for _, tokens in arrivals]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=pool.headers) as session:
        began_s = clock.now()

        async def one(number: int) -> Outcome:
            at_s, tokens = arrivals[number]
            due_s = began_s + at_s
            await clock.sleep(max(0.0, due_s - clock.now()))
            body = pool.body(prompts[number], f"{prefix}{number}")
            try:
                async with session.post(f"{pool.url}/generate", json=body) as answer:
                    await answer.read()
                    in_time = clock.now() - due_s if answer.status == 200 else None
            except aiohttp.ClientError:
                in_time = None
            return Outcome(tokens, in_time)

        tasks = [asyncio.create_task(one(number)) for number in range(len(arrivals))]
        over_s = began_s + max(at_s + slo.deadline_s(tokens) for at_s, tokens in arrivals)
        await asyncio.wait(tasks, timeout=max(0.0, over_s - clock.now()))
        # A late one stays until all are decided: that it were gone would help the others.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [
        Outcome(tokens, None) if task.cancelled() else task.result()
        for task, (_, tokens) in zip(tasks, arrivals, strict=True)
    ]
