"""The lists of a scan against Algorithm 2 taken literally, block by block."""

from hypothesis import given, settings
from hypothesis import strategies as st
from vertumnus_router.core.config import PrefixConfig
from vertumnus_router.core.model import PrefillModel
from vertumnus_router.core.scan import Best, Run, Scan
from vertumnus_router.core.types import BlockHash

from tests.router.core.counted import Counted, path_to
from tests.router.core.scene import IDEAL

CONFIG = PrefixConfig(theta_inter_s=0.12, theta_intra=1.5, theta_reclaim=0.8, per_scan=1000)
#: Two workers of degree 1 and one of degree 2, by ranks.
WORKERS = {1: [{0}, {1}], 2: [{2, 3}]}
BLOCKS = range(1, 16)


def blocks_of(run: Run) -> tuple[BlockHash, ...]:
    return path_to(run.tip.block)[run.start :]


def test_the_best_are_kept_and_of_equals_the_first() -> None:
    best: Best[str] = Best(3)
    for rank, item in ((1, "a"), (5, "b"), (1, "c"), (3, "d"), (3, "e"), (0, "f")):
        best.offer((float(rank),), item)
    assert best.items() == ["b", "d", "e"]


@settings(max_examples=150, deadline=None)
@given(
    held=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 15)), min_size=1, max_size=8),
    requests=st.lists(
        st.tuples(
            st.integers(1, 15), st.sampled_from([1, 2]), st.integers(0, 4), st.sampled_from([1, 2])
        ),
        max_size=12,
    ),
)
def test_the_lists_are_the_papers(
    held: list[tuple[int, int]], requests: list[tuple[int, int, int, int]]
) -> None:
    it = Counted()
    holders: dict[int, set[int]] = {block: set() for block in BLOCKS}
    for rank, block in held:
        it.index.store(rank, None, path_to(block))
        for above in path_to(block):
            holders[above].add(rank)
    for block, degree, reused, preferred in requests:
        known = [z for z in path_to(block) if holders[z]]
        it.dispatch(path_to(block), degree, min(reused, len(known)), preferred)
    scan = Scan(CONFIG, it.index, it.membership, PrefillModel(IDEAL))
    assert sum(scan.steps()) > 0

    def replicas(z: int, degree: int) -> int:
        return sum(bool(ranks & holders[z]) for ranks in WORKERS[degree])

    here = [z for z in BLOCKS if holders[z]]
    counts = {(z, c): it.at(BlockHash(z), c) for z in here for c in WORKERS}
    intra = {(z, w.degree) for w in scan.intra.items() for z in blocks_of(w.run)}
    inter = {(w.run.tip.block, w.degree): w for w in scan.inter.items()}
    reclaim = {(w.run.tip.block, w.degree) for w in scan.reclaim.items()}
    for degree, workers in WORKERS.items():
        for z in here:
            r, (accesses, _) = replicas(z, degree), counts[z, degree]
            wanted = 0 < r < len(workers) and accesses > r * CONFIG.theta_intra
            assert ((z, degree) in intra) == wanted
            # 100 tokens at 1000 a second and degree.
            missed_s = sum(
                counts[above, degree][1] * 0.1 / degree
                for above in path_to(z)
                if not replicas(above, degree)
            )
            missed = not r and counts[z, degree][1] > 0 and missed_s > CONFIG.theta_inter_s
            if (z, degree) in inter:
                assert missed
                assert abs(inter[z, degree].missed_s - missed_s) < 1e-9
            elif missed:
                # Its run goes on below it.
                assert any(
                    z in blocks_of(wish.run) and wish.degree == degree for wish in inter.values()
                )
            if (z, degree) in reclaim:
                assert r and sum(counts[z, degree]) < r * CONFIG.theta_reclaim
                assert len(holders[z]) > 1
