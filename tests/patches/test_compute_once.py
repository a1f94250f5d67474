"""Steps that a block computes once: which ones, and that their KV arrives where it belongs."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vertumnus_patches import new_kv
from vertumnus_patches.patches import short_prompts
from vertumnus_patches.patches.compute_once import compute_once
from vertumnus_patches.patches.short_prompts import shard_by_work

from tests.patches.conftest import Bound

zigzag = pytest.importorskip("sglang.srt.layers.cp.zigzag", reason="needs sglang")
from sglang.srt.layers.cp import base  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import (  # noqa: E402
    CaptureHiddenMode,
    ForwardMode,
)

LAYERS, SLOTS, HEADS, WIDTH = 3, 16, 2, 4


def batch_of(mode: str = "DECODE", slots: tuple[int, ...] = (5, 9), **fields: Any) -> Any:
    values: dict[str, Any] = {
        "forward_mode": ForwardMode[mode],
        "batch_size": 2,
        "input_ids": torch.zeros(len(slots)),
        "out_cache_loc": torch.tensor(slots),
        "extend_seq_lens_cpu": [len(slots)],
        "seq_lens_cpu": torch.tensor([len(slots)]),
        "return_logprob": False,
        "capture_hidden_mode": CaptureHiddenMode.NULL,
        "attn_cp_metadata": None,
    }
    return SimpleNamespace(**values | fields)


@pytest.fixture
def in_block(monkeypatch: pytest.MonkeyPatch, bound: Bound) -> Bound:
    """A rank of a block of two, under the patch that decides what is sharded."""
    original = zigzag.ZigzagCPStrategy.can_apply
    monkeypatch.setattr(
        zigzag.ZigzagCPStrategy,
        "can_apply",
        lambda strategy, count, batch: shard_by_work(original, strategy, count, batch),
    )
    monkeypatch.setattr(short_prompts, "_allows_empty_segments", lambda: True)
    monkeypatch.setattr(base, "_STRATEGY", zigzag.ZigzagCPStrategy(cp_size=2))
    bound.rank.shards.return_value = False
    return bound


# -- the hook -------------------------------------------------------------------------------------


def test_the_runtime_decides_whether_the_model_runs(bound: Bound) -> None:
    original = Mock(return_value="logits")
    bound.rank.compute_once.side_effect = lambda runner, batch, compute: (runner, batch, compute())
    result = compute_once(original, "runner", "batch", "proxies", more=1)
    assert result == ("runner", "batch", "logits")
    original.assert_called_once_with("runner", "batch", "proxies", more=1)


# -- which steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["DECODE", "EXTEND"])
def test_steps_that_all_ranks_would_repeat(in_block: Bound, mode: str) -> None:
    assert new_kv.is_repeated(batch_of(mode))


def test_a_sharded_step_is_computed_by_all(in_block: Bound) -> None:
    in_block.rank.shards.return_value = True
    assert not new_kv.is_repeated(batch_of("EXTEND"))


@pytest.mark.parametrize(
    "fields",
    [
        {"return_logprob": True},
        {"capture_hidden_mode": CaptureHiddenMode.LAST},
        {"capture_hidden_mode": CaptureHiddenMode.FULL},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["DECODE", "EXTEND"])
def test_steps_whose_output_every_rank_reads(
    in_block: Bound, mode: str, fields: dict[str, Any]
) -> None:
    assert not new_kv.is_repeated(batch_of(mode, **fields))


def test_an_idle_step_is_not_waited_for(in_block: Bound) -> None:
    assert not new_kv.is_repeated(batch_of("IDLE"))


# -- their KV -------------------------------------------------------------------------------------


def runner_of(dtype: torch.dtype, fill: float) -> Any:
    pool = SimpleNamespace(
        k_buffer=[torch.full((SLOTS, HEADS, WIDTH), fill, dtype=dtype) for _ in range(LAYERS)],
        v_buffer=[torch.full((SLOTS, HEADS, WIDTH), fill, dtype=dtype) for _ in range(LAYERS)],
    )
    model = SimpleNamespace(vocab_size=11)
    return SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=pool, model_config=model))


def buffers(runner: Any) -> list[torch.Tensor]:
    pool = runner.model_runner.token_to_kv_pool
    return [*pool.k_buffer, *pool.v_buffer]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slots", [(5,), (9, 2, 7), tuple(range(SLOTS))])
def test_new_kv_is_copied_and_nothing_else(dtype: torch.dtype, slots: tuple[int, ...]) -> None:
    leader, member = runner_of(dtype, 0), runner_of(dtype, -1)
    for number, buffer in enumerate(buffers(leader)):
        buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(number)))
    batch = batch_of(slots=slots)
    received = new_kv.empty_new_kv(member, batch)
    sent = new_kv.read_new_kv(leader, batch)
    assert received.shape == sent.shape == (LAYERS, 2, len(slots), HEADS, WIDTH)
    assert received.dtype is sent.dtype is dtype and received.is_contiguous()
    new_kv.write_new_kv(member, batch, received.copy_(sent))
    untouched = [slot for slot in range(SLOTS) if slot not in slots]
    for mine, theirs in zip(buffers(leader), buffers(member), strict=True):
        assert torch.equal(mine[list(slots)], theirs[list(slots)])
        assert bool((theirs[untouched] == -1).all())


def test_a_member_has_logits_to_sample_from() -> None:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    output = new_kv.blank_output(runner_of(torch.float32, 0), batch_of())
    assert isinstance(output, LogitsProcessorOutput)
    assert output.next_token_logits.shape == (2, 11)
    assert output.next_token_logits.softmax(-1).isfinite().all()
