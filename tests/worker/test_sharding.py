"""When a step is computed in parts."""

from hypothesis import given
from hypothesis import strategies as st

from sgl_vertumnus.worker.sharding import MIN_TOKENS_PER_RANK, is_worth_sharding

HIDDEN = 576
sequences = st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 9000)), min_size=1, max_size=6)


def worth(lengths: list[tuple[int, int]], degree: int, hidden: int = HIDDEN) -> bool:
    return is_worth_sharding(
        [new for new, _ in lengths], [new + prefix for new, prefix in lengths], degree, hidden
    )


def test_by_hand() -> None:
    assert not worth([(MIN_TOKENS_PER_RANK, 0)], 2)
    assert worth([(2 * MIN_TOKENS_PER_RANK, 0)], 2)
    assert not worth([(2 * MIN_TOKENS_PER_RANK, 0)], 4)
    # 64 tokens behind 8192 others: each attends to over 8192 keys, 2.4 times its projections.
    assert worth([(64, 8192)], 2) and not worth([(64, 1024)], 2)
    assert not worth([(64, 8192)], 2, hidden=8192), "wide layers make attention small beside them"


@given(sequences)
def test_a_rank_alone_never_shards(lengths: list[tuple[int, int]]) -> None:
    assert not worth(lengths, 1)


@given(sequences, st.sampled_from([2, 4, 8]))
def test_more_work_is_never_less_worth(lengths: list[tuple[int, int]], degree: int) -> None:
    if worth(lengths, degree):
        assert worth([*lengths, (1, 0)], degree)
        assert worth([(new, prefix + 100) for new, prefix in lengths], degree)
        assert worth(lengths, degree // 2) or degree == 2


@given(sequences, st.sampled_from([2, 4]), st.randoms(use_true_random=False))
def test_the_order_does_not_matter(
    lengths: list[tuple[int, int]], degree: int, source: object
) -> None:
    mixed = list(lengths)
    source.shuffle(mixed)  # type: ignore[attr-defined]
    assert worth(mixed, degree) == worth(lengths, degree)
