"""SGLang's ``flashinfer`` attention backend with zigzag context-parallel prefill.

Upstream accepts CP with this backend and computes something else: each rank would attend to its
own part of a sequence only. Here a sharded step is one plan of the paged kernel, whose requests
are the halves of all sequences (``sgl_vertumnus/worker/paged_plan.py``), and one run per layer.
What is not sharded, decodes among it, goes to upstream's code unchanged.

Proven on a CPU, with a kernel in plain torch; ``tests/gpu`` and ``benchmarks/gpu.py`` are for
machines that have a GPU.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from vertumnus_patches.contract import Reliance, check

NAME = "flashinfer"
_BACKEND = "sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend"
_WRAPPER = "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper"
_ZIGZAG = "sglang.srt.layers.cp.zigzag.ZigzagCPStrategy"

#: Of SGLang, and of the flashinfer that it pins.
RELIANCES: tuple[Reliance, ...] = (
    Reliance(
        "sglang.srt.layers.attention.attention_registry.create_flashinfer_backend",
        ("runner",),
        "a17e498dc480d521",
    ),
    Reliance(
        f"{_BACKEND}.__init__",
        (
            "self",
            "model_runner",
            "skip_prefill",
            "kv_indptr_buf",
            "kv_last_page_len_buf",
            "init_new_workspace",
        ),
        "34a3ca965dc39a85",
    ),
    Reliance(
        f"{_BACKEND}._check_kv_attention_access",
        ("self", "phase", "access"),
        "6eb72ee8fdd288b9",
    ),
    Reliance(
        f"{_BACKEND}.init_forward_metadata",
        ("self", "forward_batch"),
        "d60a24d7ba6b18c6",
    ),
    Reliance(
        f"{_BACKEND}.forward_extend",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
        "a91484f6706fdae7",
    ),
    Reliance(
        f"{_ZIGZAG}.build_metadata",
        ("self", "num_tokens", "seqs_len", "extend_seqs_len"),
        "07dcd9d0d180162e",
    ),
    Reliance(
        f"{_ZIGZAG}.materialize_full_kv",
        ("self", "forward_batch", "layer", "k", "v", "swa_loc"),
        "1a5be09370e6aebd",
    ),
    Reliance(
        f"{_WRAPPER}.plan",
        (
            "self",
            "qo_indptr",
            "paged_kv_indptr",
            "paged_kv_indices",
            "paged_kv_last_page_len",
            "num_qo_heads",
            "num_kv_heads",
            "head_dim_qk",
            "page_size",
            "head_dim_vo",
            "custom_mask",
            "packed_custom_mask",
            "causal",
            "pos_encoding_mode",
            "use_fp16_qk_reduction",
            "sm_scale",
            "window_left",
            "logits_soft_cap",
            "rope_scale",
            "rope_theta",
            "q_data_type",
            "kv_data_type",
            "o_data_type",
            "non_blocking",
            "prefix_len_ptr",
            "token_pos_in_items_ptr",
            "token_pos_in_items_len",
            "max_item_len_ptr",
            "seq_lens",
            "seq_lens_q",
            "block_tables",
            "max_token_per_sequence",
            "max_sequence_kv",
            "fixed_split_size",
            "disable_split_kv",
        ),
        "5072f5eb2c78137c",
    ),
    Reliance(
        f"{_WRAPPER}.run",
        (
            "self",
            "q",
            "paged_kv_cache",
            "args",
            "q_scale",
            "k_scale",
            "v_scale",
            "out",
            "lse",
            "return_lse",
            "lse_base",
            "lse_layout",
            "enable_pdl",
            "window_left",
            "sinks",
            "kv_cache_sf",
            "skip_softmax_threshold_scale_factor",
            "use_fp16_softmax",
            "uses_spcompress",
        ),
        "3f22508f139691e8",
    ),
)


class Planner(Protocol):
    """What the runtime brings: the module ``sgl_vertumnus.worker.paged_plan``."""

    zigzag_segments: Callable[..., Any]
    paged_plan: Callable[..., Any]


def check_installed() -> None:
    """Look at what the adapter relies on; needs no GPU.

    Raises:
        SystemExit: listing all that is not as the adapter expects.
    """
    check(f"the {NAME} backend", RELIANCES)


def register(planner: Planner) -> None:
    """Let SGLang build this backend wherever it would build its own flashinfer.

    Nothing is imported before that: only ranks build one.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend(NAME)  # type: ignore[untyped-decorator]
    def create(runner: Any) -> Any:
        if runner.use_mla_backend:
            raise NotImplementedError("zigzag CP of a pool does not cover MLA attention")
        check_installed()
        return backend_class(planner)(runner, init_new_workspace=runner.init_new_workspace)


def backend_class(planner: Planner) -> Any:
    """Upstream's backend class with sharded steps computed by plans of ``planner``."""
    from sglang.srt.layers.attention.flashinfer_backend import (
        FlashInferAttnBackend,
        PrefillMetadata,
    )
    from sglang.srt.layers.cp.base import get_cp_strategy

    from vertumnus_patches.causal import is_plain_causal

    class ZigzagFlashInferBackend(FlashInferAttnBackend):  # type: ignore[misc]
        """Plans once per step; a layer neither plans nor waits for the device."""

        def __init__(self, model_runner: Any, **options: Any) -> None:
            super().__init__(model_runner, **options)
            # Upstream asks for itself only, not for what derives from it.
            self._check_kv_attention_access("prefill", self.prefill_kv_access)
            self._check_kv_attention_access("decode", self.decode_kv_access)
            if problems := list(_uncovered(self)):
                raise NotImplementedError(f"CP with {NAME}: {'; '.join(problems)}")
            self._zigzag_plan: Any = None
            # Steps that are not sharded would attend to a chunk's own KV before it is rounded to
            # the cache's type, sharded ones after: what is said would depend on the degree.
            shape = self.indices_updater_prefill
            if shape.data_type != shape.q_data_type:
                self.use_paged = True

        def init_forward_metadata(self, forward_batch: Any) -> None:
            cp = forward_batch.attn_cp_metadata
            if cp is None:
                self._zigzag_plan = None
                super().init_forward_metadata(forward_batch)
                return
            plan = planner.paged_plan(
                planner.zigzag_segments(
                    cp.actual_seq_q_prev_list,
                    cp.kv_len_prev_list,
                    cp.actual_seq_q_next_list,
                    cp.kv_len_next_list,
                ),
                self.req_to_token_pool.req_to_token,
                forward_batch.req_pool_indices,
                page_tokens=self.page_size,
            )
            self._zigzag_plan = plan
            # Upstream's own wrapper, which its next unsharded step plans again.
            self.forward_metadata = PrefillMetadata(
                self.prefill_wrappers_paged, use_ragged=False, extend_no_prefix=False
            )
            if plan.query_tokens:
                self._plan_on_device(plan)

        def _plan_on_device(self, plan: Any) -> None:
            shape = self.indices_updater_prefill
            self.prefill_wrappers_paged[0].plan(
                plan.qo_indptr,
                plan.kv_indptr,
                plan.kv_indices,
                plan.last_page_tokens,
                shape.num_qo_heads,
                shape.num_kv_heads,
                shape.head_dim,
                plan.page_tokens,
                causal=True,
                # The scale is a layer's: it comes with each run, as that of its queries.
                sm_scale=1.0,
                q_data_type=shape.q_data_type,
                kv_data_type=shape.data_type,
                non_blocking=True,
            )

        def forward_extend(
            self,
            q: Any,
            k: Any,
            v: Any,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
        ) -> Any:
            if forward_batch.attn_cp_metadata is None:
                return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            shape = self.indices_updater_prefill
            if not is_plain_causal(layer) or layer.logit_cap:
                raise NotImplementedError(
                    f"layer {layer.layer_id}: CP covers plain causal attention only"
                )
            if layer.tp_q_head_num != shape.num_qo_heads or layer.v_head_dim != layer.head_dim:
                raise NotImplementedError(
                    f"layer {layer.layer_id}: CP needs layers with heads of one number and width"
                )
            if k is None or v is None or not save_kv_cache:
                raise NotImplementedError(
                    f"layer {layer.layer_id}: its new KV does not pass through attention, and "
                    f"the other ranks need it"
                )
            get_cp_strategy().materialize_full_kv(forward_batch, layer, k, v)
            q = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
            out = q.new_empty(q.shape)
            tokens = self._zigzag_plan.query_tokens
            out[tokens:].zero_()  # the rows that pad a rank's share
            if tokens:
                self.prefill_wrappers_paged[0].run(
                    q[:tokens],
                    tuple(
                        _in_pages(cache, self.page_size)
                        for cache in self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
                    ),
                    q_scale=layer.scaling,
                    k_scale=layer.k_scale_float,
                    v_scale=layer.v_scale_float,
                    out=out[:tokens],
                )
            return out.view(len(q), -1)

    return ZigzagFlashInferBackend


def _in_pages(cache: Any, page_tokens: int) -> Any:
    """A pool [S, H, D] as [pages, tokens of a page, H, D], in place."""
    pages = cache.shape[0] // page_tokens
    return cache[: pages * page_tokens].view(pages, page_tokens, *cache.shape[1:])


def _uncovered(backend: Any) -> Iterator[str]:
    """Why this configuration of SGLang's backend is not covered by the plans."""
    if backend.num_wrappers != 1:
        yield "sliding-window and cross attention are not covered"
    if backend.prefill_uses_dequant_workspace or backend.decode_uses_dequant_workspace:
        yield "KV caches of 4 bits are not covered; use --kv-cache-dtype auto or fp8_e4m3"
    if backend.kv_index_translator.is_translating:
        yield "a KV pool that moves its pages is not covered; do not ask for a unified pool"
    if getattr(backend.token_to_kv_pool, "kv_cache_layout", None) != "nhd":
        yield "the KV layout must be NHD; unset SGLANG_USE_HND_KVCACHE"
    if backend.is_multimodal or backend.enable_mis or backend.is_dllm_model:
        yield "image inputs, multi-item scoring and block diffusion are not covered"
    if backend.enable_deterministic:
        yield "deterministic inference fixes how one rank splits a sequence, not how several do"
