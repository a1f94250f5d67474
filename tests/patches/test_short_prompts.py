"""Steps of any lengths through SGLang's real zigzag strategy, on every rank of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vertumnus_patches.patches import short_prompts
from vertumnus_patches.patches.short_prompts import shard_by_work

from tests.patches.conftest import Bound

zigzag = pytest.importorskip("sglang.srt.layers.cp.zigzag", reason="needs sglang")
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.layers.cp import base, utils  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

ORIGINAL = zigzag.ZigzagCPStrategy.can_apply


def can_apply(strategy: Any, num_tokens: int, forward_batch: Any) -> bool:
    return shard_by_work(ORIGINAL, strategy, num_tokens, forward_batch)


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch, bound: Bound) -> None:
    monkeypatch.setattr(zigzag.ZigzagCPStrategy, "can_apply", can_apply)
    monkeypatch.setattr(short_prompts, "_allows_empty_segments", lambda: True)
    bound.rank.shards.return_value = True


def batch_of(news: list[int], prefixes: list[int] | None = None, mode: Any = None) -> Any:
    """What the strategy reads of a ``ForwardBatch``: ``news`` new tokens behind ``prefixes``."""
    prefixes = prefixes or [0] * len(news)
    return SimpleNamespace(
        forward_mode=mode or ForwardMode.EXTEND,
        input_ids=torch.arange(sum(news)),
        extend_seq_lens_cpu=news,
        seq_lens_cpu=torch.tensor([p + n for p, n in zip(prefixes, news, strict=True)]),
        attn_cp_metadata=None,
        global_num_tokens_cpu=None,
        out_cache_loc=None,
    )


class Gathered:
    """An all-gather whose ranks have all put their part down already."""

    def __init__(self, size: int, parts: list[torch.Tensor]) -> None:
        self.world_size, self.parts = size, parts

    def all_gather_into_tensor(self, output: torch.Tensor, mine: torch.Tensor) -> None:
        rows = output.shape[0] // self.world_size
        assert mine.shape[0] == rows and all(part.shape[0] >= rows for part in self.parts)
        output.copy_(torch.cat([part[:rows] for part in self.parts]))


@contextmanager
def as_rank(size: int, rank: int, group: Any = None) -> Iterator[Any]:
    strategy = zigzag.ZigzagCPStrategy(cp_size=size)
    earlier, base._STRATEGY = base._STRATEGY, strategy
    parallel = runtime_context.get_parallel()
    values = {"enable_cp_tp_group_sharing": False, "attn_cp_size": size, "attn_cp_rank": rank}
    try:
        with parallel.override(**values, attn_cp_group=group):
            yield strategy
    finally:
        base._STRATEGY = earlier


# -- when -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("worth", [True, False])
@pytest.mark.parametrize("news", [[100, 100], [1, 100, 3], [1]])
def test_the_runtime_decides(size: int, worth: bool, news: list[int], bound: Bound) -> None:
    bound.rank.shards.return_value = worth
    batch = batch_of(news, [7] * len(news))
    with as_rank(size, 0) as strategy:
        if min(news) < 2 * size:
            assert not ORIGINAL(strategy, sum(news), batch)  # why the patch exists
        assert utils.is_cp_active(batch) is worth
    bound.rank.shards.assert_called_once_with(news, [7 + new for new in news], size)


def test_a_step_that_is_sharded_stays_sharded(bound: Bound) -> None:
    batch = batch_of([1, 100])
    with as_rank(2, 0):
        utils.prepare_cp_forward(batch)
        bound.rank.shards.return_value = False
        assert utils.is_cp_active(batch)


@pytest.mark.parametrize("mode", ["MIXED", "DECODE", "TARGET_VERIFY", "IDLE", "DRAFT_EXTEND_V2"])
def test_only_plain_prefills_are_sharded(mode: str) -> None:
    with as_rank(2, 0) as strategy:
        assert not can_apply(strategy, 101, batch_of([1, 100], mode=ForwardMode[mode]))


def test_only_for_the_backend_that_accepts_empty_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_prompts, "_allows_empty_segments", lambda: False)
    with as_rank(2, 0) as strategy:
        assert not can_apply(strategy, 101, batch_of([1, 100]))
        assert can_apply(strategy, 200, batch_of([100, 100]))


@pytest.mark.parametrize(
    ("backends", "expected"),
    [(("torch_native", "torch_native"), True), (("fa3", "fa3"), False), (("fa3", "triton"), False)],
)
def test_the_backend_is_asked_of_sglang(
    monkeypatch: pytest.MonkeyPatch, backends: tuple[str, str], expected: bool
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(runtime_context, "attention_backends", lambda: backends)
    assert short_prompts._allows_empty_segments() is expected


# -- what -----------------------------------------------------------------------------------------

sizes = st.sampled_from([2, 4, 8])
sequences = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=6
)  # (new, prefix) tokens


@given(size=sizes, lengths=sequences)
def test_every_token_is_on_one_rank_and_comes_back_in_order(
    size: int, lengths: list[tuple[int, int]]
) -> None:
    news, prefixes = [n for n, _ in lengths], [p for _, p in lengths]
    total = sum(news)
    tokens = torch.arange(total, dtype=torch.float32).unsqueeze(1) + torch.tensor([[0.0, 0.5]])
    batches, parts, kept = [], [], []
    for rank in range(size):
        batch = batch_of(news, prefixes)
        with as_rank(size, rank) as strategy:
            assert utils.is_cp_active(batch), "all ranks must decide alike"
            utils.prepare_cp_forward(batch)
            parts.append(strategy.shard_hidden_states(tokens, batch))
            own = batch.attn_cp_metadata.per_rank_logical_token[rank]
            kept.append(strategy.shard_position_ids(torch.arange(total), batch)[:own])
        batches.append(batch)

    assert len({part.shape[0] for part in parts}) == 1, "the collectives need equal lengths"
    assert sorted(torch.cat(kept).tolist()) == list(range(total))
    for rank, batch in enumerate(batches):
        with as_rank(size, rank, Gathered(size, parts)):
            assert torch.equal(utils.cp_gather_after_forward(parts[rank], batch), tokens)


@given(size=sizes, lengths=sequences)
def test_segments_name_the_keys_their_queries_see(
    size: int, lengths: list[tuple[int, int]]
) -> None:
    """The attention kernel computes, for each half, ``queries`` rows that end at key ``keys``."""
    news, prefixes = [n for n, _ in lengths], [p for _, p in lengths]
    starts = [sum(news[:i]) for i in range(len(news))]
    for rank in range(size):
        batch = batch_of(news, prefixes)
        with as_rank(size, rank) as strategy:
            utils.prepare_cp_forward(batch)
            cp = batch.attn_cp_metadata
            own = cp.per_rank_logical_token[rank]
            rows = strategy.shard_position_ids(torch.arange(sum(news)), batch)[:own].tolist()
        described: list[int] = []
        for queries, keys in (
            (cp.actual_seq_q_prev_list, cp.kv_len_prev_list),
            (cp.actual_seq_q_next_list, cp.kv_len_next_list),
        ):
            for start, prefix, new, count, end in zip(
                starts, prefixes, news, queries, keys, strict=True
            ):
                assert count >= 0 and count <= end <= prefix + new
                described += range(start + end - prefix - count, start + end - prefix)
        assert described == rows
