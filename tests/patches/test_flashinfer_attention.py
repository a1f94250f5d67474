"""SGLang's flashinfer backend with our plans, on every rank of a block, on a CPU.

The backend is SGLang's class without a GPU's buffers; the kernel is one in plain torch that takes
what flashinfer's takes. Metadata, shards and gathers are SGLang's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from vertumnus_bench.paged_reference import run_plan
from vertumnus_patches import flashinfer_attention
from vertumnus_patches.contract import Reliance, check
from vertumnus_patches.flashinfer_attention import RELIANCES, backend_class
from vertumnus_patches.install import resolve
from vertumnus_patches.patches import short_prompts
from vertumnus_patches.record import source_fingerprint

from sgl_vertumnus.worker import paged_plan
from tests.patches.conftest import Bound

zigzag = pytest.importorskip("sglang.srt.layers.cp.zigzag", reason="needs sglang")
flashinfer = pytest.importorskip("flashinfer", reason="needs flashinfer")
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.layers.attention import attention_registry, flashinfer_backend  # noqa: E402
from sglang.srt.layers.cp import base, utils  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

QUERY_HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 8, 0.21


# -- what is relied on ----------------------------------------------------------------------------


@pytest.mark.parametrize("reliance", RELIANCES, ids=lambda reliance: reliance.target)
def test_what_is_relied_on_is_as_expected(reliance: Reliance) -> None:
    found = source_fingerprint(resolve(reliance))
    assert found == reliance.fingerprint, f"review the upstream diff of {reliance.target}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"target": f"{flashinfer_attention._WRAPPER}.planned"}, "has no planned of its own"),
        ({"signature": ("self", "qo_indptr")}, "the patch expects"),
        ({"fingerprint": "0" * 16}, "review it"),
    ],
)
def test_what_is_not_as_expected_stops_the_process(change: dict[str, Any], reason: str) -> None:
    plan = next(r for r in RELIANCES if r.target.endswith("Wrapper.plan"))
    with pytest.raises(SystemExit, match=reason):
        check("it", [plan, replace(plan, **change)])


def test_a_rank_builds_ours_and_checks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", {"flashinfer": None})
    flashinfer_attention.register(paged_plan)
    create = attention_registry.ATTENTION_BACKENDS["flashinfer"]
    with pytest.raises(NotImplementedError, match="MLA"):
        create(SimpleNamespace(use_mla_backend=True))
    monkeypatch.setattr(
        flashinfer_attention, "RELIANCES", (replace(RELIANCES[0], fingerprint="0" * 16),)
    )
    with pytest.raises(SystemExit, match="the flashinfer backend"):
        create(SimpleNamespace(use_mla_backend=False))


# -- a block of ranks -----------------------------------------------------------------------------


class Kernel:
    """The paged prefill wrapper, in plain torch; its parameters are those of flashinfer's."""

    def __init__(self) -> None:
        self.plans: list[dict[str, Any]] = []
        self.runs = 0

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        non_blocking: bool,
    ) -> None:
        assert causal
        assert (num_qo_heads, num_kv_heads, head_dim_qk) == (QUERY_HEADS, KV_HEADS, HEAD_DIM)
        self.plans.append(
            {
                "qo_indptr": qo_indptr,
                "kv_indptr": paged_kv_indptr,
                "kv_indices": paged_kv_indices,
                "last_page_tokens": paged_kv_last_page_len,
            }
        )
        self.page_size, self.scale, self.dtypes = page_size, sm_scale, (q_data_type, kv_data_type)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        q_scale: float,
        k_scale: float | None,
        v_scale: float | None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        self.runs += 1
        k, v = paged_kv_cache
        assert k.shape[1] == self.page_size and (q.dtype, k.dtype) == self.dtypes
        # As flashinfer refuses it.
        assert len(q) == int(self.plans[-1]["qo_indptr"][-1]) and out.shape == q.shape
        scale = self.scale * q_scale * (k_scale or 1.0)
        out.copy_(run_plan(q, k, v, scale=scale, **self.plans[-1]) * (v_scale or 1.0))
        return out


class Pool:
    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.kv = k, v

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch, bound: Bound) -> None:
    original = zigzag.ZigzagCPStrategy.can_apply
    monkeypatch.setattr(
        zigzag.ZigzagCPStrategy,
        "can_apply",
        lambda *arguments: short_prompts.shard_by_work(original, *arguments),
    )
    monkeypatch.setattr(runtime_context, "attention_backends", lambda: ("flashinfer", "flashinfer"))
    bound.rank.shards.return_value = True


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What ranks hand over to be gathered; the pool of a test holds it already."""
    parts: list[torch.Tensor] = []

    def materialize_full_kv(strategy: Any, batch: Any, layer: Any, k: Any, v: Any) -> None:
        parts.append(k)

    monkeypatch.setattr(zigzag.ZigzagCPStrategy, "materialize_full_kv", materialize_full_kv)
    return parts


@contextmanager
def as_rank(size: int, rank: int) -> Iterator[Any]:
    earlier, base._STRATEGY = base._STRATEGY, zigzag.ZigzagCPStrategy(cp_size=size)
    values = {"enable_cp_tp_group_sharing": False, "attn_cp_size": size, "attn_cp_rank": rank}
    try:
        with runtime_context.get_parallel().override(**values):
            yield base._STRATEGY
    finally:
        base._STRATEGY = earlier


class Scene:
    """One layer of one step: sequences of (cached prefix, new tokens), all KV in the pool."""

    def __init__(
        self, lengths: list[tuple[int, int]], page_tokens: int, kv_dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.lengths, self.page_tokens = lengths, page_tokens
        totals = [prefix + new for prefix, new in lengths]
        pages = [-(-total // page_tokens) for total in totals]
        order = torch.randperm(sum(pages) + 2, generator=generator)
        shape = (len(order) * page_tokens, KV_HEADS, HEAD_DIM)
        self.k = torch.randn(shape, generator=generator).to(kv_dtype)
        self.v = torch.randn(shape, generator=generator).to(kv_dtype)
        self.slots = torch.zeros(len(totals), max(totals), dtype=torch.int32)
        begin = 0
        for row, (total, count) in enumerate(zip(totals, pages, strict=True)):
            own = order[begin : begin + count, None] * page_tokens + torch.arange(page_tokens)
            self.slots[row, :total] = own.flatten()[:total]
            begin += count
        new = sum(new for _, new in lengths)
        self.q = torch.randn(new, QUERY_HEADS * HEAD_DIM, generator=generator)
        self.layer = RadixAttention(QUERY_HEADS, HEAD_DIM, SCALE, KV_HEADS, layer_id=0)
        self.kernel = Kernel()
        self.backend = self._backend(kv_dtype)

    def _backend(self, kv_dtype: torch.dtype) -> Any:
        backend = object.__new__(backend_class(paged_plan))
        backend.page_size = self.page_tokens
        backend.req_to_token_pool = SimpleNamespace(req_to_token=self.slots)
        backend.token_to_kv_pool = Pool(self.k, self.v)
        backend.prefill_wrappers_paged = [self.kernel]
        backend.indices_updater_prefill = SimpleNamespace(
            num_qo_heads=QUERY_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            q_data_type=torch.float32,
            data_type=kv_dtype,
        )
        return backend

    def batch(self) -> Any:
        return SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            input_ids=torch.arange(len(self.q)),
            extend_seq_lens_cpu=[new for _, new in self.lengths],
            seq_lens_cpu=torch.tensor([prefix + new for prefix, new in self.lengths]),
            req_pool_indices=torch.arange(len(self.lengths)),
            attn_cp_metadata=None,
            global_num_tokens_cpu=None,
            out_cache_loc=None,
        )

    def sharded(self, strategy: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """A prepared batch, this rank's queries, and which new tokens they are; padding: -1."""
        batch = self.batch()
        assert utils.is_cp_active(batch)
        utils.prepare_cp_forward(batch)
        numbers = torch.arange(len(self.q)) + 1
        mine = strategy.shard_hidden_states(numbers, batch) - 1
        return batch, strategy.shard_hidden_states(self.q, batch), mine

    def attend(self, batch: Any, q: torch.Tensor) -> torch.Tensor:
        kv = torch.zeros(len(q), KV_HEADS, HEAD_DIM)
        return self.backend.forward_extend(q, kv, kv, self.layer, batch)  # type: ignore[no-any-return]

    def expected(self) -> torch.Tensor:
        """Dense attention of all new tokens, by torch."""
        outputs, begin = [], 0
        for row, (prefix, new) in enumerate(self.lengths):
            own = self.slots[row, : prefix + new].long()
            q = self.q[begin : begin + new].view(new, QUERY_HEADS, HEAD_DIM).transpose(0, 1)
            begin += new
            out = F.scaled_dot_product_attention(
                q,
                self.k[own].float().transpose(0, 1),
                self.v[own].float().transpose(0, 1),
                attn_mask=torch.ones(new, prefix + new, dtype=torch.bool).tril(prefix),
                scale=SCALE,
                enable_gqa=True,
            )
            outputs.append(out.transpose(0, 1).reshape(new, -1))
        return torch.cat(outputs)


LENGTHS = [
    [(0, 1)],
    [(48, 1)],
    [(0, 40)],
    [(33, 70)],
    [(0, 2), (31, 1), (5, 130), (16, 7)],
]


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_ranks_of_a_block_compute_the_whole(
    lengths: list[tuple[int, int]], size: int, page_tokens: int, stored: list[torch.Tensor]
) -> None:
    scene = Scene(lengths, page_tokens, torch.float32)
    whole = torch.full_like(scene.q, float("nan"))
    for rank in range(size):
        with as_rank(size, rank) as strategy:
            batch, q, mine = scene.sharded(strategy)
            scene.backend.init_forward_metadata(batch)
            out = scene.attend(batch, q)
            assert out.shape == q.shape
            assert not out[mine < 0].any()
            whole[mine[mine >= 0]] = out[mine >= 0]
    torch.testing.assert_close(whole, scene.expected(), rtol=1e-5, atol=1e-5)
    assert len(stored) == size


def test_one_plan_serves_all_layers(stored: list[torch.Tensor]) -> None:
    scene = Scene([(10, 50), (0, 20)], 16, torch.float32)
    with as_rank(2, 1) as strategy:
        batch, q, _ = scene.sharded(strategy)
        scene.backend.init_forward_metadata(batch)
        outputs = [scene.attend(batch, q) for _ in range(3)]
    assert len(scene.kernel.plans) == 1 and scene.kernel.runs == 3
    assert torch.equal(outputs[0], outputs[2])


def test_kv_of_eight_bits_keeps_its_scales(stored: list[torch.Tensor]) -> None:
    scene = Scene([(10, 50)], 16, torch.float8_e4m3fn)
    scene.layer.k_scale_float, scene.layer.v_scale_float = 0.5, 3.0
    with as_rank(2, 0) as strategy:
        batch, q, mine = scene.sharded(strategy)
        scene.backend.init_forward_metadata(batch)
        out = scene.attend(batch, q)
    scene.k, scene.v = scene.k.float() * 0.5, scene.v.float() * 3.0
    expected = scene.expected()[mine[mine >= 0]]
    torch.testing.assert_close(out[mine >= 0], expected, rtol=1e-5, atol=1e-5)


def test_steps_that_are_not_sharded_are_upstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned and computed by SGLang's own code, whatever the step before was."""
    calls: list[str] = []
    upstream = flashinfer_backend.FlashInferAttnBackend
    monkeypatch.setattr(upstream, "init_forward_metadata", lambda self, batch: calls.append("plan"))
    monkeypatch.setattr(upstream, "forward_extend", lambda self, *args: calls.append("extend"))
    monkeypatch.setattr(upstream, "forward_decode", lambda self, *args: calls.append("decode"))
    scene = Scene([(10, 50)], 16, torch.float32)
    batch = scene.batch()
    scene.backend.init_forward_metadata(batch)
    scene.attend(batch, scene.q)
    scene.backend.forward_decode(scene.q, None, None, scene.layer, batch)
    assert calls == ["plan", "extend", "decode"] and not scene.kernel.plans


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window_size": 128},
        {"is_cross_attention": True},
        {"logit_cap": 30.0},
        {"tp_q_head_num": QUERY_HEADS * 2},
        {"v_head_dim": HEAD_DIM // 2},
    ],
    ids=str,
)
def test_a_layer_that_is_not_covered_is_refused(change: dict[str, Any]) -> None:
    scene = Scene([(10, 50)], 16, torch.float32)
    for name, value in change.items():
        setattr(scene.layer, name, value)
    with as_rank(2, 0) as strategy:
        batch, q, _ = scene.sharded(strategy)
        scene.backend.init_forward_metadata(batch)
        with pytest.raises(NotImplementedError, match="layer 0: CP"):
            scene.attend(batch, q)


def test_kv_that_was_written_elsewhere_is_refused() -> None:
    """A fused kernel would have written this rank's rows into the slots of others."""
    scene = Scene([(10, 50)], 16, torch.float32)
    with as_rank(2, 0) as strategy:
        batch, q, _ = scene.sharded(strategy)
        scene.backend.init_forward_metadata(batch)
        kv = torch.zeros(len(q), KV_HEADS, HEAD_DIM)
        with pytest.raises(NotImplementedError, match="the other ranks need it"):
            scene.backend.forward_extend(q, kv, kv, scene.layer, batch, save_kv_cache=False)


# -- what is not covered --------------------------------------------------------------------------

COVERED: dict[str, Any] = {
    "num_wrappers": 1,
    "prefill_uses_dequant_workspace": False,
    "decode_uses_dequant_workspace": False,
    "kv_index_translator": SimpleNamespace(is_translating=False),
    "token_to_kv_pool": SimpleNamespace(kv_cache_layout="nhd"),
    "is_multimodal": False,
    "enable_mis": False,
    "is_dllm_model": False,
    "enable_deterministic": False,
    "use_paged": False,
    "indices_updater_prefill": SimpleNamespace(
        q_data_type=torch.bfloat16, data_type=torch.bfloat16
    ),
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_wrappers": 2}, "sliding-window"),
        ({"prefill_uses_dequant_workspace": True}, "4 bits"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "moves its pages"),
        ({"token_to_kv_pool": SimpleNamespace(kv_cache_layout="hnd")}, "NHD"),
        ({"is_multimodal": True}, "image inputs"),
        ({"enable_deterministic": True}, "deterministic"),
    ],
    ids=lambda value: str(value),
)
def test_a_configuration_that_is_not_covered_is_refused_at_start(
    change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_upstream(self: Any, runner: Any) -> None:
        vars(self).update(COVERED | runner, prefill_kv_access="", decode_kv_access="")

    upstream = flashinfer_backend.FlashInferAttnBackend
    monkeypatch.setattr(upstream, "__init__", as_upstream)
    backend_class(paged_plan)({})
    with pytest.raises(NotImplementedError, match=reason):
        backend_class(paged_plan)(change)


@pytest.mark.parametrize(
    ("kv_dtype", "use_paged"), [(torch.bfloat16, False), (torch.float8_e4m3fn, True)]
)
def test_kv_of_another_type_is_read_from_the_cache_at_every_degree(
    kv_dtype: torch.dtype, use_paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = SimpleNamespace(q_data_type=torch.bfloat16, data_type=kv_dtype)

    def as_upstream(self: Any, runner: Any) -> None:
        vars(self).update(COVERED, prefill_kv_access="", decode_kv_access="")
        self.indices_updater_prefill = shape

    monkeypatch.setattr(flashinfer_backend.FlashInferAttnBackend, "__init__", as_upstream)
    assert backend_class(paged_plan)({}).use_paged is use_paged


def test_a_kv_format_without_a_reader_is_refused_as_upstream_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def as_upstream(self: Any, runner: Any) -> None:
        quantised = SimpleNamespace(name="fp0", describe_attention_accesses=lambda phase: "none")
        vars(self).update(COVERED, kv_cache_quant_method=quantised)
        vars(self).update(prefill_kv_access="", decode_kv_access=None)

    monkeypatch.setattr(flashinfer_backend.FlashInferAttnBackend, "__init__", as_upstream)
    with pytest.raises(ValueError, match=r"fp0.*decode"):
        backend_class(paged_plan)(object())
