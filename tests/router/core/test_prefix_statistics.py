"""Algorithm 1: what is counted at the ends of paths says the same as the paper's sums per block."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.profile import Coefficients
from vertumnus_router.core.statistics import saved_s
from vertumnus_router.core.types import BlockHash

from tests.router.core.counted import Counted, path_to
from tests.router.core.scene import IDEAL, chain

Counts = dict[tuple[BlockHash, int], float]


def test_every_reused_block_is_accessed_once_at_the_degree_that_ran_it() -> None:
    it, prompt = Counted(), chain(1, 4)
    it.index.store(0, None, prompt)
    it.dispatch(prompt, degree=1, reused=3, preferred=1)
    assert [it.at(block, 1)[0] for block in prompt] == [1.0, 1.0, 1.0, 0.0]
    assert [it.at(block, 2)[0] for block in prompt] == [0.0] * 4


def test_matched_blocks_that_the_preferred_degree_lacks_are_missed_there() -> None:
    it, prompt = Counted(), chain(1, 5)
    it.index.store(0, None, prompt[:4])  # the degree-1 worker at rank 0
    it.index.store(2, None, prompt[:1])  # one rank of the degree-2 worker
    it.dispatch(prompt, degree=1, reused=4, preferred=2)
    # ReplicaCount(z, 2) is 1 for the first block, one rank is enough; nobody holds the fifth.
    assert [it.at(block, 2)[1] for block in prompt[:4]] == [0.0, 1.0, 1.0, 1.0]
    assert [it.at(block, 1)[1] for block in prompt[:4]] == [0.0] * 4


def test_nothing_is_missed_that_a_worker_of_the_degree_holds() -> None:
    it, prompt = Counted(), chain(1, 3)
    it.index.store(0, None, prompt)
    it.index.store(1, None, prompt[:1])
    it.dispatch(prompt, degree=1, reused=1, preferred=1)
    assert [it.at(block, 1) for block in prompt] == [(1.0, 0.0), (0.0, 0.0), (0.0, 0.0)]


def test_a_degree_that_holds_nothing_misses_from_the_root_on() -> None:
    it, prompt = Counted(), chain(1, 3)
    it.index.store(0, None, prompt)
    it.dispatch(prompt, degree=2, reused=0, preferred=2)
    assert [it.at(block, 2) for block in prompt] == [(0.0, 1.0)] * 3


def test_counts_halve_with_each_scan() -> None:
    it, prompt = Counted(), chain(1, 2)
    it.index.store(0, None, prompt)
    it.dispatch(prompt, degree=1, reused=2, preferred=1)
    it.index.tallies.scans += 2
    assert it.at(prompt[0], 1)[0] == 0.25
    it.dispatch(prompt, degree=1, reused=2, preferred=1)
    assert it.at(prompt[0], 1)[0] == 1.25
    it.index.tallies.scans += 11
    assert it.at(prompt[0], 1)[0] == 0.0  # gone, with its memory
    node = it.index.find(prompt[1])
    assert node is not None and node.tally is None


def test_what_ends_at_a_block_that_is_removed_goes_on_above_it() -> None:
    it, prompt = Counted(), chain(1, 3)
    it.index.store(0, None, prompt)
    it.dispatch(prompt, degree=1, reused=3, preferred=1)
    it.index.remove(0, prompt[:0:-1])
    assert it.at(prompt[0], 1) == (1.0, 0.0)


QUADRATIC = PrefillModel(
    type(IDEAL)(
        **{name: getattr(IDEAL, name) for name in IDEAL.__struct_fields__}
        | {
            "degrees": {c: Coefficients(d_s=0.3 * c, a_s_per_token=2e-5 * c) for c in (1, 2)},
            "b_s_per_token": 1e-6,
            "alpha_s_per_pair": 3e-9,
        }
    )
)


@given(
    before=st.integers(0, 5000),
    more=st.integers(1, 500),
    rest=st.integers(0, 100_000),
    degree=st.sampled_from([1, 2]),
)
def test_a_miss_costs_the_same_whoever_misses(
    before: int, more: int, rest: int, degree: int
) -> None:
    behind = before + more
    length = behind + rest
    paper_s = QUADRATIC.service_s(degree, length - before, before) - QUADRATIC.service_s(
        degree, length - behind, behind
    )
    assert saved_s(QUADRATIC, degree, before, behind) == pytest.approx(paper_s, rel=1e-6, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    held=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 15)), max_size=10),
    requests=st.lists(
        st.tuples(
            st.integers(1, 15), st.sampled_from([1, 2]), st.integers(0, 4), st.sampled_from([1, 2])
        ),
        max_size=10,
    ),
)
def test_counts_are_the_papers_sums(
    held: list[tuple[int, int]], requests: list[tuple[int, int, int, int]]
) -> None:
    it = Counted()
    holds: dict[int, set[BlockHash]] = defaultdict(set)
    for rank, block in held:
        it.index.store(rank, None, path_to(block))
        holds[rank].update(path_to(block))
    workers = {1: [(0,), (1,)], 2: [(2, 3)]}
    access: Counts = defaultdict(float)
    missed: Counts = defaultdict(float)
    for block, degree, reused, preferred in requests:
        path = path_to(block)
        known = [z for z in path if any(z in mine for mine in holds.values())]
        reused = min(reused, len(known))
        it.dispatch(path, degree, reused, preferred)
        for z in path[:reused]:
            access[z, degree] += 1
        for z in known:  # MatchedPath
            replicas = sum(any(z in holds[r] for r in ranks) for ranks in workers[preferred])
            if replicas == 0:
                missed[z, preferred] += 1
    for z in {z for mine in holds.values() for z in mine}:
        for degree in (1, 2):
            assert it.at(z, degree) == (access[z, degree], missed[z, degree])
