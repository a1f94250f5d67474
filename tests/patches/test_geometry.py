"""The CP geometry in all of SGLang's places: refreshed, restored, and none forgotten."""

import ast
import inspect
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vertumnus_patches.cp_group import CpGroup
from vertumnus_patches.engine import apply_geometry
from vertumnus_patches.patches.topology_check import check_apart_from_cp

from tests.patches.replica import group, launched, scheduler_of

pytest.importorskip("sglang", reason="needs sglang")
import sglang.srt
from sglang.srt import runtime_context
from sglang.srt.layers.cp import base

ORIGINAL = runtime_context._validate_parallel


@pytest.fixture
def launch_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's context as a replica at tp = cp = 1 leaves it after its start."""
    parallel = runtime_context.get_parallel()
    earlier = dict(parallel._stamp)
    alone = launched()
    monkeypatch.setattr(
        runtime_context,
        "_validate_parallel",
        lambda context, source: check_apart_from_cp(ORIGINAL, context, source),
    )
    yield alone
    parallel._stamp = earlier
    base._STRATEGY = None


def as_dict(scheduler: Any) -> dict[str, Any]:
    return {
        **{k: v for k, v in vars(scheduler).items() if not isinstance(v, SimpleNamespace)},
        "cp": scheduler.attn_cp_group,
        "tree": dict(vars(scheduler.tree_cache)),
        "grammar": dict(vars(scheduler.grammar_manager)),
    }


@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (4, 3)])
def test_every_holder_is_refreshed_and_restored(launch_group: Any, size: int, rank: int) -> None:
    scheduler, members = scheduler_of(launch_group), group(size, rank)
    before = as_dict(scheduler)
    parallel = runtime_context.get_parallel()
    assert base.get_cp_strategy() is None

    apply_geometry(scheduler, group=members)
    assert (parallel.attn_cp_size, parallel.attn_cp_rank) == (size, rank)
    assert parallel.attn_cp_group is scheduler.attn_cp_group is members
    assert scheduler.attn_cp_cpu_group is members.cpu_group
    assert scheduler.tree_cache.attn_cp_group is members.cpu_group
    assert vars(scheduler.grammar_manager) == {
        "grammar_sync_group": members.cpu_group,
        "grammar_sync_size": size,
        "grammar_sync_entry": 0,
        "is_grammar_sync_entry": rank == 0,
    }
    strategy = base.get_cp_strategy()
    assert strategy is not None
    assert (strategy.name, strategy.cp_size, strategy.cp_rank) == ("zigzag", size, rank)
    assert (parallel.tp_size, parallel.tp_group) == (1, launch_group), "weights stay whole"

    apply_geometry(scheduler, group=None)
    assert (parallel.attn_cp_size, parallel.attn_cp_rank) == (1, 0)
    assert parallel.attn_cp_group is launch_group
    assert base.get_cp_strategy() is None
    assert as_dict(scheduler) == before


def test_degrees_follow_each_other_without_a_stop_at_one(launch_group: Any) -> None:
    scheduler = scheduler_of(launch_group)
    for size in (2, 4, 2):
        apply_geometry(scheduler, group=group(size, 1))
        strategy = base.get_cp_strategy()
        assert strategy is not None and strategy.cp_size == size


def test_a_tree_cache_without_a_group_gets_none(launch_group: Any) -> None:
    scheduler = scheduler_of(launch_group)
    scheduler.tree_cache = SimpleNamespace()
    apply_geometry(scheduler, group=group(2, 0))
    assert vars(scheduler.tree_cache) == {}


def test_without_its_patch_sglang_refuses_and_nothing_has_changed(
    launch_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_context, "_validate_parallel", ORIGINAL)
    scheduler = scheduler_of(launch_group)
    before = as_dict(scheduler)
    with pytest.raises(ValueError, match="tp_size == "):
        apply_geometry(scheduler, group=group(2, 1))
    assert as_dict(scheduler) == before
    assert runtime_context.get_parallel().attn_cp_size == 1


def test_the_tree_cache_can_use_the_group_it_gets(launch_group: Any) -> None:
    """On real process groups: SGLang asks torch for the group's size, a coordinator has none."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    members = CpGroup(
        name="test_geometry",
        store=torch.distributed.HashStore(),
        size=1,
        rank=0,
        device=torch.device("cpu"),
        timeout=timedelta(seconds=20),
    )
    scheduler = scheduler_of(launch_group)
    scheduler.tree_cache = SimpleNamespace(
        attn_cp_group=None, attn_tp_group=None, tp_world_size=1, tp_group=None
    )
    apply_geometry(scheduler, group=members)
    counts = torch.tensor([3])
    UnifiedRadixCache._all_reduce_attn_groups(
        scheduler.tree_cache, counts, torch.distributed.ReduceOp.MIN
    )
    assert counts.tolist() == [3]


# -- none forgotten -------------------------------------------------------------------------------

SRT = Path(sglang.srt.__path__[0])
SCANNED = (
    "managers",
    "mem_cache",
    "constrained",
    "model_executor",
    "sampling",
    "layers/sampler.py",
    "layers/logits_processor.py",
    "layers/radix_attention.py",
    "layers/attention/torch_native_backend.py",
)
NOT_SCANNED = ("mem_cache/storage", "mem_cache/hybrid_cache")  # HiCache; refused at start
GEOMETRY = ("attn_cp_", "cp_strategy", "enable_prefill_cp", "is_cp_enabled", "cp_sync_group")

LIVE = "reads the context whenever it runs"
REFRESHED = "keeps it; apply_geometry refreshes it"
REFUSED = "part of a feature that preflight refuses"
LAUNCH = "runs before the first regroup, and a rank alone is right for what it decides"
OWN = "decides what a rank does for itself, in every block: its sockets, events and metrics"
STEP = "belongs to one step"

#: Every function that reads the CP geometry, and why it is right after a regroup.
REVIEWED = {
    "layers/sampler.py": {
        "Sampler.__init__": REFUSED,  # a group only with DP attention
        "Sampler._build_sampling_mask_output": REFUSED,
    },
    "managers/cache_controller.py": {
        "HiCacheController.__init__": REFUSED,
        "HiCacheController._create_sync_groups": REFUSED,
        "HiCacheController._generate_storage_config": REFUSED,
        "HiCacheController.get_attn_cp_rank_and_size": REFUSED,
    },
    "managers/data_parallel_controller.py": {
        "DataParallelController._make_worker_port_handshake": REFUSED,
        "DataParallelController.launch_dp_attention_schedulers": REFUSED,
        "DataParallelController.launch_tensor_parallel_group": LAUNCH,
        "WorkerPortHandshake": REFUSED,
    },
    "managers/prefill_delayer.py": {"PrefillDelayer.__init__": REFUSED},
    "managers/schedule_batch.py": {"ScheduleBatch.prepare_for_decode": STEP},
    "managers/scheduler.py": {
        "Scheduler.__init__": OWN,  # every rank publishes the KV events of its own tree
        "Scheduler._hosts_rust_server": LIVE,
        "Scheduler.ingest_requests": LIVE,
        "Scheduler.init_idle_sleeper": OWN,
        "Scheduler.init_ipc_channels": OWN,
        "Scheduler.init_model_worker": REFRESHED,
        "Scheduler.init_rank_consensus_checker": LAUNCH,  # a debugging aid; compares a rank alone
        "Scheduler.open_session": LIVE,
        "configure_scheduler_process": LAUNCH,  # the name in the log
    },
    "managers/scheduler_components/dp_attn.py": {
        "_local_prefill_cuda_graph_vote": REFUSED,
        "prepare_mlp_sync_batch_raw": REFUSED,
    },
    "managers/scheduler_components/metrics_reporter.py": {
        "SchedulerMetricsReporter.__post_init__": OWN,
    },
    "managers/scheduler_components/request_receiver.py": {
        "SchedulerRequestReceiver._broadcast_reqs_across_ranks": LIVE,
        "SchedulerRequestReceiver._finalize_shm_features": LIVE,
        "SchedulerRequestReceiver._pull_raw_reqs": LIVE,
    },
    "managers/scheduler_pp_mixin.py": {
        "SchedulerPPMixin._pp_recv_pyobj_from_prev_stage": REFUSED,
        "SchedulerPPMixin._pp_send_pyobj_to_next_stage": REFUSED,
        "SchedulerPPMixin.get_rids": REFUSED,
    },
    "mem_cache/cache_init_params.py": {"CacheInitParams": REFRESHED},  # in the tree cache
    "mem_cache/dsa_cache_layer_split.py": {
        "LayerSplitDSATokenToKVPool._broadcast_tensor_from_owner": REFUSED,
        "LayerSplitDSATokenToKVPool._init_layer_broadcast_comm": REFUSED,
    },
    "mem_cache/hicache_key_scheme.py": {"plan_unified_kv": REFUSED},
    "mem_cache/hicache_storage.py": {
        "HiCacheFile.__init__": REFUSED,
        "HiCacheStorageConfig": REFUSED,
    },
    "mem_cache/kv_cache_builder.py": {"build_kv_cache": REFRESHED},  # in the tree cache
    "mem_cache/mla_host_dedup.py": {
        "_prebuild_prefetch_sync_groups": REFUSED,
        "maybe_create_mla_host_dedup_context": REFUSED,
    },
    "mem_cache/page_interleave.py": {"get_kv_shard_group": LAUNCH},  # every rank holds whole pages
    "mem_cache/unified_cache/storage_attachment.py": {
        "StorageAttachment._resolve_metrics_collector": REFUSED,
    },
    "mem_cache/unified_radix_cache.py": {
        "UnifiedRadixCache.__init__": REFRESHED,
        "UnifiedRadixCache._all_reduce_attn_groups": REFRESHED,
    },
    "model_executor/cuda_graph_buffer_registry.py": {
        "build_decode_registry._num_token_non_padded_post_fill": LAUNCH,  # decode is not sharded
        "build_prefill_registry._prefill_num_token_non_padded_post_fill": LAUNCH,
    },
    "model_executor/forward_batch_info.py": {
        "ForwardBatch": STEP,
        "ForwardBatch.moe_num_token_non_padded": STEP,
        "prefill_graph_tolerates_sum_len": LIVE,
    },
    "model_executor/model_runner.py": {
        "ModelRunner._prepare_eager_forward_batch": STEP,
        "_prefill_cuda_graph_allows_context_parallel": LIVE,  # no graph once there is a strategy
    },
    "model_executor/model_runner_components/cuda_graph_setup.py": {
        "ElasticCudaGraphConfig": REFUSED,
        "ElasticCudaGraphConfig.signature": REFUSED,
        "capture_prefill_graph": LAUNCH,
        "resolve_elastic_cuda_graph_config": REFUSED,
    },
    "model_executor/model_runner_components/startup_weight_load.py": {
        "StartupWeightLoadManager._get_unsupported_reason": LAUNCH,
        "StartupWeightLoadOptions": LAUNCH,
        "StartupWeightLoadOptions.from_published_config": LAUNCH,
    },
    "model_executor/runner/base_runner.py": {"BaseRunner._dummy_run": LAUNCH},
    "model_executor/runner/decode_cuda_graph_runner.py": {
        "DecodeCudaGraphRunner.__init__": LAUNCH,  # for DSA and MLA, and those are refused
        "DecodeCudaGraphRunner.capture_prepare": LAUNCH,
    },
    "model_executor/runner/eager_runner.py": {
        "EagerRunner._execute_extend": STEP,
        "EagerRunner.execute": LIVE,
    },
    "model_executor/runner/prefill_cuda_graph_runner.py": {
        "PrefillCudaGraphRunner.__init__": LAUNCH,
    },
}


def geometry_reads(srt: Path, scanned: tuple[str, ...]) -> set[tuple[str, str]]:
    """(file, function) of every name or attribute below ``srt`` that holds CP geometry."""
    found: set[tuple[str, str]] = set()

    def walk(node: ast.AST, file: str, scope: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*scope, child.name)
            name = getattr(child, "attr", None) or getattr(child, "id", None)
            if isinstance(name, str) and any(part in name for part in GEOMETRY):
                found.add((file, ".".join(scope)))
            walk(child, file, inner)

    for root in scanned:
        paths = [srt / root] if root.endswith(".py") else sorted((srt / root).rglob("*.py"))
        for path in paths:
            file = path.relative_to(srt).as_posix()
            if not file.startswith(NOT_SCANNED) and "/test" not in file:
                walk(ast.parse(path.read_text()), file, ())
    return found


def test_every_reader_of_the_geometry_has_been_reviewed() -> None:
    found = geometry_reads(SRT, SCANNED)
    reviewed = {(file, scope) for file, scopes in REVIEWED.items() for scope in scopes}
    new, gone = sorted(found - reviewed), sorted(reviewed - found)
    assert not new, (
        f"SGLang reads the CP geometry in places that nobody has reviewed: {new}. Read each: if "
        "it keeps what it read (an attribute set at construction), refresh it in "
        "vertumnus_patches.engine.apply_geometry or refuse its feature in preflight; then add "
        "it to REVIEWED with the reason"
    )
    assert not gone, f"SGLang no longer reads the CP geometry in {gone}; drop them from REVIEWED"


def test_a_new_reader_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "managers").mkdir()
    (tmp_path / "managers" / "new.py").write_text(
        "class New:\n"
        "    def __init__(self):\n"
        "        self.width = get_parallel().attn_cp_size\n"
        "    def unrelated(self):\n"
        "        return get_parallel().tp_size\n"
    )
    assert geometry_reads(tmp_path, ("managers",)) == {("managers/new.py", "New.__init__")}


def test_the_grammar_manager_holds_what_is_refreshed(launch_group: Any) -> None:
    from sglang.srt.constrained.grammar_manager import GrammarManager

    held = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(GrammarManager).lstrip()))
        if isinstance(node, ast.Attribute) and "grammar_sync" in node.attr
    }
    assert held == set(vars(scheduler_of(launch_group).grammar_manager)), (
        "GrammarManager keeps another part of its sync group: refresh it in apply_geometry"
    )
