"""A busy evening for the live page: five pools of eight ranks, of which not all are well.

``python -m tests.router.io.ui_scene docs/ui.png`` takes the picture of the README.
"""

import asyncio
import contextlib
import math
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from aiohttp import web
from vertumnus_router.core.config import ControllerConfig, PolicyConfig, PrefixConfig
from vertumnus_router.core.snapshot import PrefixesSnapshot, WorkerSnapshot
from vertumnus_router.core.types import BlockHash, RequestId, WorkerState
from vertumnus_router.io.hashing import block_hashes
from vertumnus_router.io.observe.timeline import STEP_S, STEPS, Timeline
from vertumnus_router.io.observe.trail import Trail
from vertumnus_router.profiles import DEFAULT, load_profile

from tests.router.io import chromium, fake_pool
from tests.router.io.chat_cases import SMOL, write_model
from tests.router.io.fake_pool import BLOCK_TOKENS, FakePool, Seen
from tests.router.io.harness import Running, run, running, until

COMPOSITIONS = ("8x1", "4x1,2x2", "2x2,1x4", "1x8", "2x1,1x2,1x4")
WORKERS = 8 + 6 + 3 + 1 + 4
REQUESTS = 36
ANSWERED = 12
#: Documents that many requests begin with, tokens.
DOCUMENTS = (1200, 2000, 400, 3200)
#: Who holds each of them, pool and rank.
HELD_BY = (
    ("a0", "a5", "b0"),
    ("d0", "d1", "d2", "d3", "d4", "d5", "d6", "d7"),
    ("e7",),
    ("c4", "c5", "c6", "c7"),
)
NEVER = "http://127.0.0.1:1"


@contextlib.asynccontextmanager
async def busy(folder: Path) -> AsyncIterator[tuple[Running, list[FakePool]]]:
    """Pools ``a`` to ``e`` and one that cannot be reached. ``a`` is in the middle of a merge, ``b``
    has done one, a rank of ``c`` has died. Files go to ``folder``."""
    tokenizer = str(write_model(folder, SMOL))
    pools = [
        FakePool(
            8,
            composition,
            pool_id=name,
            tokenizer_path=tokenizer,
            context_tokens=1 << 17,
            copies=True,
        )
        for name, composition in zip("abcde", COMPOSITIONS, strict=True)
    ]
    policy = PolicyConfig(
        # Workers have queues, and documents stay where the scene puts them.
        policy="paper",
        prefix=PrefixConfig(mode="observe", pull=False, scan_s=0.5),
        controller=ControllerConfig(mode="observe", window_s=0.5),
    )
    urls = [pool.url for pool in pools]
    profile = profile_with_all_degrees(folder / "profile.json")
    async with fake_pool.pools(*pools), running(*urls, NEVER, policy=policy, profile=profile) as it:
        await it.ready()
        await until(lambda: len(workers(it)) == WORKERS, "workers")
        await until(lambda: it.router.tokenizer.settled, "the tokenizer")
        fill_timeline(it.router.observer.timeline, it.router.clock.now())
        await have_cached(it, pools)
        tasks: list[asyncio.Task[None]] = []
        for pool in pools:
            pool.answer = answer_and_report
        await asyncio.gather(*(ask(it, number) for number in range(ANSWERED)))
        for pool in pools:
            pool.answer = fake_pool.hang
        tasks += [asyncio.create_task(ask(it, number)) for number in range(REQUESTS)]
        await until(lambda: sum(len(pool.running) for pool in pools) == REQUESTS, "busy")
        await reconfigure(it, "b", "2x1,3x2")
        pools[0].regroup = fake_pool.answer_late
        tasks.append(asyncio.create_task(reconfigure(it, "a", "6x1,1x2")))
        pools[2].lose_rank(2, "its process ended with status -9 (out of memory?)")
        await until(lambda: prefixes(it).hot, "hot prefixes")
        await until(lambda: len(workers(it)) != WORKERS or lost(it), "the lost rank")
        try:
            yield it, pools
        finally:
            pools[0].may_regroup.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def answer_and_report(pool: FakePool, request: web.Request, seen: Seen) -> web.StreamResponse:
    """As an engine that found most of what it should have."""
    tokens = len(seen.fields["input_ids"])
    pool.prefill_started(seen)
    pool.prefill_finished(seen, input_tokens=tokens, cached_tokens=tokens * 5 // 8)
    return await fake_pool.stream(pool, request, seen)


def profile_with_all_degrees(path: Path) -> str:
    """The shipped one, eight times as fast, and for degree 8 what degree 4 takes."""
    shipped = load_profile(DEFAULT)
    faster = msgspec.structs.replace(
        shipped,
        degrees={**shipped.degrees, 8: shipped.degrees[4]},
        c_s_per_token=shipped.c_s_per_token / 8,
        alpha_s_per_pair=shipped.alpha_s_per_pair / 8,
    )
    path.write_bytes(msgspec.json.encode(faster))
    return str(path)


def workers(it: Running) -> tuple[WorkerSnapshot, ...]:
    return it.router.core.workers(it.router.clock.now())


def lost(it: Running) -> bool:
    return any(worker.state is WorkerState.LOST for worker in workers(it))


def prefixes(it: Running) -> PrefixesSnapshot:
    return it.router.core.prefixes(it.router.clock.now())


async def have_cached(it: Running, pools: list[FakePool]) -> None:
    """Ranks hold documents, some of them all of it, and use their memory to different degrees."""
    source = random.Random(7)
    blocks = [block_hashes(document(number), BLOCK_TOKENS) for number in range(len(DOCUMENTS))]
    for pool in pools:
        for rank in pool.ranks:
            rank.load = {"kv_used_tokens": source.randrange(8_000, 120_000)}
            rank.store([BlockHash(source.getrandbits(62)) for _ in range(8)])
    for document_blocks, homes in zip(blocks, HELD_BY, strict=True):
        for home in homes:
            pools["abcde".index(home[0])].ranks[int(home[1])].store(document_blocks)
    most = sum(map(len, blocks))
    await until(lambda: it.router.core.index_nodes >= most, "the index")


def fill_timeline(timeline: Timeline, now: float) -> None:
    """Ten minutes up to ``now`` that look like a day's: a swell, and a bad minute."""
    source = random.Random(3)
    for step in range(STEPS):
        at_s = now - (STEPS - 1 - step) * STEP_S
        trouble = 3.0 * math.exp(-(((step - 74) / 5) ** 2))
        swell = 0.35 + 0.15 * math.sin(step / 17)
        for _ in range(30):
            seconds = (swell + trouble) * source.lognormvariate(0, 0.45)
            tokens = source.choice((900, 3000, 6000, 12_000))
            met = seconds <= (1.0 if tokens < 8192 else 5.0)
            timeline.first_token(at_s, seconds, tokens, met=met)
            bad = trouble > 2 and source.random() < 0.05
            timeline.ended(at_s, trail(tokens, "worker_lost" if bad else "ok"))


def trail(tokens: int, outcome: str) -> Trail:
    made = Trail(RequestId("r"), b"r", "POST", "/generate", 0.0)
    made.outcome = outcome
    return made


async def ask(it: Running, number: int) -> None:
    tokens = document(number % len(DOCUMENTS)) + [number] * (200 + 150 * (number % 7))
    body = {"input_ids": tokens, "stream": True, "sampling_params": {"max_new_tokens": 8}}
    with contextlib.suppress(asyncio.CancelledError):
        async with it.client.post("/generate", json=body) as response:
            await response.read()


async def reconfigure(it: Running, pool: str, composition: str) -> None:
    order = {"pool": pool, "composition": composition}
    with contextlib.suppress(asyncio.CancelledError):
        async with it.client.post("/vertumnus/reconfigure", json=order) as response:
            await response.read()


def document(number: int) -> list[int]:
    return [100 * (number + 1) + place % 97 for place in range(DOCUMENTS[number])]


async def take_picture(port: int, folder: Path, to: Path, scheme: str) -> None:
    async with busy(folder) as (it, _), chromium.page(port, f"{it.url}/ui") as page:
        await page.scheme(scheme)
        await page.until("document.querySelectorAll('.hot tbody tr').length > 2")
        await page.screenshot(to)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made, chromium.browser() as devtools:
        scheme = sys.argv[2] if len(sys.argv) > 2 else "light"
        run(take_picture(devtools, Path(made), Path(sys.argv[1]), scheme))
