"""SGLang's ``torch_native`` attention backend on the CPU kernel of the worker runtime.

Registered under the upstream name, so that everything SGLang decides by that name holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from vertumnus_patches.causal import is_plain_causal


class Kernel(Protocol):
    """The kernel that the runtime brings: the module ``sgl_vertumnus.worker.attention``."""

    KeySlots: Any
    Segment: Any
    Workspace: Any
    extend_attention: Callable[..., torch.Tensor]
    decode_attention: Callable[..., torch.Tensor]


@dataclass(slots=True)
class _Plan:
    """The geometry of one step, shared by all layers."""

    segments: list[Any]
    sequences: list[Any]


def register(kernel: Kernel) -> None:
    """Let SGLang build this backend wherever it would build its own torch_native."""

    class CpuAttnBackend(TorchNativeAttnBackend):  # type: ignore[misc]
        """Extend and decode with work proportional to what is new."""

        def __init__(self, model_runner: Any) -> None:
            super().__init__(model_runner)
            self._plan: _Plan | None = None
            self._workspace = kernel.Workspace()

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self._plan = _plan(self.req_to_token_pool.req_to_token, forward_batch, kernel)

        def forward_extend(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
        ) -> torch.Tensor:
            sharded = forward_batch.attn_cp_metadata is not None
            if self._plan is None or not is_plain_causal(layer):
                if sharded:
                    raise NotImplementedError(
                        f"layer {layer.layer_id}: CP covers plain causal attention only"
                    )
                return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            if save_kv_cache and k is not None and v is not None:
                self._save(k, v, layer, forward_batch, sharded)
            out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
            kernel.extend_attention(
                q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
                self.token_to_kv_pool.get_key_buffer(layer.layer_id),
                self.token_to_kv_pool.get_value_buffer(layer.layer_id),
                self._plan.segments,
                scale=layer.scaling,
                out=out,
                workspace=self._workspace,
            )
            return out.view(q.shape[0], -1)

        def forward_decode(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
        ) -> torch.Tensor:
            if self._plan is None or not is_plain_causal(layer):
                return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            if save_kv_cache and k is not None and v is not None:
                self._save(k, v, layer, forward_batch, sharded=False)
            q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
            out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
            kernel.decode_attention(
                q,
                self.token_to_kv_pool.get_key_buffer(layer.layer_id),
                self.token_to_kv_pool.get_value_buffer(layer.layer_id),
                self._plan.sequences,
                scale=layer.scaling,
                out=out,
                workspace=self._workspace,
            )
            return out.view(q.shape[0], -1)

        def _save(
            self, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, sharded: bool
        ) -> None:
            if sharded:
                from sglang.srt.layers.cp.base import get_cp_strategy

                get_cp_strategy().materialize_full_kv(forward_batch, layer, k, v)
                return
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
            )

    @register_attention_backend("torch_native")  # type: ignore[untyped-decorator]
    def create(runner: Any) -> CpuAttnBackend:
        return CpuAttnBackend(runner)


def _plan(req_to_token: torch.Tensor, forward_batch: Any, kernel: Kernel) -> _Plan | None:
    """Slots of every sequence and the query segments of this rank, in q's order."""
    if forward_batch.encoder_lens is not None:
        return None
    lengths = forward_batch.seq_lens_cpu.tolist()
    rows = forward_batch.req_pool_indices.tolist()
    sequences = [
        kernel.KeySlots.of(req_to_token[row, :length])
        for row, length in zip(rows, lengths, strict=True)
    ]
    if not forward_batch.forward_mode.is_extend():
        return _Plan([], sequences)
    cp = forward_batch.attn_cp_metadata
    if cp is None:
        parts = [(list(map(int, forward_batch.extend_seq_lens_cpu)), lengths)]
    else:  # q holds the early halves of all sequences, then the late ones, then padding
        parts = [
            (cp.actual_seq_q_prev_list, cp.kv_len_prev_list),
            (cp.actual_seq_q_next_list, cp.kv_len_next_list),
        ]
    segments = [
        kernel.Segment(queries, keys, sequence)
        for query_lens, kv_lens in parts
        for queries, keys, sequence in zip(query_lens, kv_lens, sequences, strict=True)
    ]
    return _Plan(segments, sequences)
