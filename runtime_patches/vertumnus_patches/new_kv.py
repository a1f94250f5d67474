"""The KV and the output of a step that only the leader of a block computes."""

from typing import Any

import torch


def is_repeated(forward_batch: Any) -> bool:
    """Whether the ranks of a block would all compute this whole step, and only its new KV and
    its sampled tokens matter to the members."""
    from sglang.srt.layers.cp.utils import is_cp_active

    mode = forward_batch.forward_mode
    return (
        (mode.is_decode() or mode.is_extend())
        and not is_cp_active(forward_batch)
        # Results of these are read from the output on every rank.
        and not forward_batch.return_logprob
        and not forward_batch.capture_hidden_mode.need_capture()
    )


def read_new_kv(runner: Any, forward_batch: Any) -> torch.Tensor:
    """KV of the step's tokens, [layers, 2, tokens, KV heads, head width]."""
    received = empty_new_kv(runner, forward_batch)
    slots = forward_batch.out_cache_loc
    for layer, (keys, values) in enumerate(_kv_buffers(runner)):
        torch.index_select(keys, 0, slots, out=received[layer, 0])
        torch.index_select(values, 0, slots, out=received[layer, 1])
    return received


def empty_new_kv(runner: Any, forward_batch: Any) -> torch.Tensor:
    """An uninitialised tensor of the shape and type of ``read_new_kv``."""
    buffers = _kv_buffers(runner)
    keys = buffers[0][0]
    return keys.new_empty(len(buffers), 2, len(forward_batch.out_cache_loc), *keys.shape[1:])


def write_new_kv(runner: Any, forward_batch: Any, received: torch.Tensor) -> None:
    """Put the leader's KV where this rank would have put its own."""
    slots = forward_batch.out_cache_loc
    for layer, (keys, values) in enumerate(_kv_buffers(runner)):
        keys.index_copy_(0, slots, received[layer, 0])
        values.index_copy_(0, slots, received[layer, 1])


def blank_output(runner: Any, forward_batch: Any) -> Any:
    """Logits [sequences, vocabulary] to sample from; what is sampled is overwritten by the
    leader's tokens."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    model = runner.model_runner.model_config
    return LogitsProcessorOutput(
        next_token_logits=torch.zeros(forward_batch.batch_size, model.vocab_size)
    )


def _kv_buffers(runner: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pool = runner.model_runner.token_to_kv_pool
    return list(zip(pool.k_buffer, pool.v_buffer, strict=True))
