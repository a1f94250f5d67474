"""A minute of random moves under mixed load: nothing lost, nothing changed, nothing kept.

The short version of ``benchmarks/switch.py --only soak``.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vertumnus_bench.soak import FLAGS, MODEL, SoakPlan, SoakResult, soak
from vertumnus_bench.stream import causes, hit_rate, tally

from sgl_vertumnus.demo.random_model import write_random_model
from sgl_vertumnus.demo.servers import pool

PLAN = SoakPlan(minutes=0.8, move_every_s=1.2, warm_s=8.0)
NOTHING = {"lost": 0, "hung": 0, "duplicated": 0, "wrong": 0}
#: Points of the prefix hit rate.
MAX_HITS_LOST = 0.05
#: Of four ranks together. Their allocators' arenas go on filling, up to some 40 MiB a rank; what
#: shows beyond that is a leak of some 30 KiB a request.
MAX_GROWTH_BYTES = 128 << 20


@pytest.fixture(scope="module")
def soaked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SoakResult]:
    model = write_random_model(tmp_path_factory.mktemp("soak") / "model", MODEL)
    with pool(model, size=4, degrees=(1, 2, 4), composition="4x1", flags=FLAGS) as server:
        yield soak(server, Path(model), PLAN)


def test_the_pool_moved_all_the_time(soaked: SoakResult) -> None:
    refused = [move for move in soaked.moves if not move.committed]
    assert refused == []
    assert len(soaked.moves) >= 0.9 * PLAN.minutes * 60 / PLAN.move_every_s
    assert {move.after for move in soaked.moves} == {"4x1", "2x1,1x2", "1x2,2x1", "2x2", "1x4"}


def test_every_stream_ended_once_and_said_what_the_reference_says(soaked: SoakResult) -> None:
    assert len(soaked.streams) > 5 * PLAN.mix.clients
    assert tally(soaked.streams) == NOTHING, causes(soaked.streams)
    assert tally(soaked.still) == NOTHING, causes(soaked.still)
    left = sum(stream.left for stream in soaked.streams)
    assert 0 < left < 0.2 * len(soaked.streams)


def test_moves_cost_few_prefix_hits(soaked: SoakResult) -> None:
    moving, still = hit_rate(soaked.same), hit_rate(soaked.still)
    assert still > 0.3, "the load has prefixes to share"
    assert moving > still - MAX_HITS_LOST


def test_nothing_is_held_and_memory_does_not_grow(soaked: SoakResult) -> None:
    assert soaked.kv_held_tokens == 0
    assert soaked.rss_growth_bytes < MAX_GROWTH_BYTES
