"""KV by slot, and the KV and output of a step that only the leader of a block computes."""

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
    return read_slots(_pool_of(runner), forward_batch.out_cache_loc)


def empty_new_kv(runner: Any, forward_batch: Any) -> torch.Tensor:
    """An uninitialised tensor of the shape and type of ``read_new_kv``."""
    return empty_slots(_pool_of(runner), len(forward_batch.out_cache_loc))


def write_new_kv(runner: Any, forward_batch: Any, received: torch.Tensor) -> None:
    """Put the leader's KV where this rank would have put its own."""
    write_slots(_pool_of(runner), forward_batch.out_cache_loc, received)


def blank_output(runner: Any, forward_batch: Any) -> Any:
    """Logits [sequences, vocabulary] to sample from; what is sampled is overwritten by the
    leader's tokens."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    model = runner.model_runner.model_config
    return LogitsProcessorOutput(
        next_token_logits=torch.zeros(forward_batch.batch_size, model.vocab_size)
    )


def read_slots(pool: Any, slots: torch.Tensor) -> torch.Tensor:
    """KV in ``slots`` [tokens] of SGLang's KV pool, [layers, 2, tokens, KV heads, head width]."""
    kv = empty_slots(pool, len(slots))
    for layer, (keys, values) in enumerate(_buffers(pool)):
        torch.index_select(keys, 0, slots, out=kv[layer, 0])
        torch.index_select(values, 0, slots, out=kv[layer, 1])
    return kv


def write_slots(pool: Any, slots: torch.Tensor, kv: torch.Tensor) -> None:
    """The inverse of ``read_slots``."""
    for layer, (keys, values) in enumerate(_buffers(pool)):
        keys.index_copy_(0, slots, kv[layer, 0])
        values.index_copy_(0, slots, kv[layer, 1])


def empty_slots(pool: Any, tokens: int) -> torch.Tensor:
    """An uninitialised tensor for the KV of so many tokens."""
    buffers = _buffers(pool)
    keys = buffers[0][0]
    return keys.new_empty(len(buffers), 2, tokens, *keys.shape[1:])


def _pool_of(runner: Any) -> Any:
    return runner.model_runner.token_to_kv_pool


def _buffers(pool: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(pool.k_buffer, pool.v_buffer, strict=True))
