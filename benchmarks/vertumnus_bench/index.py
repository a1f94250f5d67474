"""How fast the router's prefix index is, and how large: the index alone, in this process.

    python -m vertumnus_bench.index --blocks 1000000

prints one JSON object: ``match_2048_us`` for a path of 2048 blocks, ``store_per_s`` and
``remove_per_s`` blocks, ``bytes_per_block`` and ``scan_pause_ms``, the longest that a scan of the
index by the prefix manager holds the router up at a time.
"""

import argparse
import json
import random
import time
import tracemalloc
from collections.abc import Iterator, Sequence

from vertumnus_router.core.config import PolicyConfig, PrefixConfig
from vertumnus_router.core.control import ControlPlane
from vertumnus_router.core.events import BlocksStored, PoolJoined, RankReported, Tick
from vertumnus_router.core.profile import Coefficients, Profile
from vertumnus_router.core.trie import PrefixIndex
from vertumnus_router.core.types import BlockHash, PoolId, Rank
from vertumnus_router.lattice import Block

MATCH_BLOCKS = 2048
DOCUMENT_BLOCKS = (16, 64, 256, 1024)
HEADS, HEAD_BLOCKS, HEAD_HOLDERS = 16, 64, 8

Chain = tuple[BlockHash, ...]
#: A rank stores a chain below a block.
Stored = tuple[int, BlockHash | None, Chain]


def stores(blocks: int, ranks: int, seed: int = 0) -> Iterator[Stored]:
    """Events that fill an index with ``blocks`` blocks: documents below a few shared heads, each
    at one rank, of some the first half at a second one."""
    rng = random.Random(seed)
    heads = [_chain(rng, HEAD_BLOCKS) for _ in range(HEADS)]
    for head in heads:
        for rank in rng.sample(range(ranks), min(ranks, HEAD_HOLDERS)):
            yield rank, None, head
    made = HEADS * HEAD_BLOCKS
    while made < blocks:
        head, document = rng.choice(heads), _chain(rng, rng.choice(DOCUMENT_BLOCKS))
        made += len(document)
        yield rng.randrange(ranks), head[-1], document
        if rng.random() < 0.3:
            yield rng.randrange(ranks), head[-1], document[: len(document) // 2]


def _chain(rng: random.Random, blocks: int) -> Chain:
    return tuple(BlockHash(rng.getrandbits(64) - 2**63) for _ in range(blocks))


def bytes_per_block(blocks: int, ranks: int) -> float:
    """What the index itself allocates for each block, hashes included."""
    tracemalloc.start()
    try:
        index = PrefixIndex(1 << 50)
        before, _ = tracemalloc.get_traced_memory()
        for event in stores(blocks, ranks):
            index.store(*event)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (after - before) / len(index)


def speeds(blocks: int, ranks: int) -> dict[str, float]:
    """Microseconds of a match, blocks stored and removed per second."""
    index = PrefixIndex(1 << 50)
    events = list(stores(blocks, ranks))
    stored = sum(len(chain) for _, _, chain in events)
    began = time.perf_counter()
    for event in events:
        index.store(*event)
    store_s = time.perf_counter() - began
    prompt = _chain(random.Random(-1), MATCH_BLOCKS)
    for rank in range(3):
        index.store(rank, None, prompt[: MATCH_BLOCKS - rank])
    asked = tuple(BlockHash(int(str(block))) for block in prompt)  # equal, not the same objects
    match_s = min(_timed_match(index, asked) for _ in range(200))
    began = time.perf_counter()
    for rank, _, chain in reversed(events):
        index.remove(rank, reversed(chain))
    remove_s = time.perf_counter() - began
    return {
        "match_2048_us": round(match_s * 1e6, 1),
        "store_per_s": round(stored / store_s),
        "remove_per_s": round(stored / remove_s),
    }


def _timed_match(index: PrefixIndex, blocks: Sequence[BlockHash]) -> float:
    began = time.perf_counter()
    index.match(blocks)
    return time.perf_counter() - began


def scan_pauses_ms(blocks: int, ranks: int) -> list[float]:
    """What each tick took in which a scan of so many blocks went on, as CPU time: what else runs on
    the machine is not the scan's doing."""
    config = PolicyConfig(index_mib=1e6, prefix=PrefixConfig(mode="on", scan_s=1.0))
    control = ControlPlane(config, _PROFILE)
    pool = PoolId("p")
    shape = PoolJoined(pool, ranks, (1,), 64, 1 << 20, 1 << 24, 8192, "m", kv_token_bytes=1)
    control.on_event(shape, 0.0)
    for rank in range(ranks):
        control.on_event(RankReported(Rank(pool, rank), "1", 0, Block(rank, 1), "m"), 0.0)
    for rank, parent, chain in stores(blocks, ranks):
        control.on_event(BlocksStored(Rank(pool, rank), parent, chain), 0.0)
    control.on_event(Tick(), 0.0)
    pauses: list[float] = []
    now = 1.0
    while control.scanning or not pauses:
        began = time.thread_time()
        control.on_event(Tick(), now)
        pauses.append((time.thread_time() - began) * 1e3)
        now += 0.01
    return pauses


_PROFILE = Profile(
    version=1,
    device="any",
    model="any",
    sglang_version="",
    date="2026-01-01",
    measured=False,
    note="prices play no part",
    degrees={1: Coefficients(d_s=0.01, a_s_per_token=1e-4)},
    b_s_per_token=0.0,
    c_s_per_token=0.0,
    alpha_s_per_pair=0.0,
)


def figures(blocks: int, ranks: int) -> dict[str, float]:
    """All of it, by name."""
    pauses = scan_pauses_ms(blocks, ranks)
    return speeds(blocks, ranks) | {
        "bytes_per_block": round(bytes_per_block(blocks, ranks), 1),
        "scan_pause_ms": round(max(pauses), 2),
        "scan_ticks": len(pauses),
        "scan_s": round(sum(pauses) / 1e3, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=64)
    options = parser.parse_args()
    print(json.dumps(figures(options.blocks, options.ranks), indent=2))


if __name__ == "__main__":
    main()
