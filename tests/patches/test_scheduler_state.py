"""What a scheduler remembers from step to step: reset when blocks merge, and none forgotten.

Ranks that merge have had different steps behind them. From then on they decide alike only if
nothing that they decide by is left of those.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="needs sglang")
import sglang.srt

MANAGERS = Path(sglang.srt.__path__[0]) / "managers"

RESET = "vertumnus_patches.in_hand resets it"
SETTLED = "vertumnus_patches.in_hand settles it: no step is under way at a merge"
ALIKE = "control messages change it, which all ranks get"
OWN = "counts or reports; no step depends on it"
REFUSED = "part of a feature that preflight refuses"
LAUNCH = "the same from the start of the event loop on"

#: Everything that SGLang's scheduler and its policy change while they serve, and why the ranks of
#: a merged block may go on with it.
REVIEWED = {
    "scheduler.py": {
        "_engine_paused": ALIKE,
        "_event_loop_should_restart": REFUSED,  # a change of roles in a disaggregated pool
        "_last_logged_elastic_radix_namespace": OWN,
        "_last_stall_publish_ts": OWN,
        "_pause_started_at": OWN,
        "_pending_chunked_abort_req": SETTLED,
        "_prefill_decode_interval_remaining": RESET,
        "_prev_prefill_end_ts": OWN,
        "_prev_step": OWN,
        "_sched_idled": OWN,
        "_war_barrier_enabled": LAUNCH,
        "batch_record_ct": OWN,
        "chunked_req": SETTLED,
        "chunked_req.inflight_middle_chunks": SETTLED,
        "cur_batch_for_debug": SETTLED,
        "disagg_decode_prealloc_queue.retracted_queue": REFUSED,
        "enable_hicache_storage": REFUSED,
        "enable_skip_finishing_decode": LAUNCH,
        "forward_ct": OWN,  # decides in SGLang's own tests of retractions only
        "forward_sleep_time": ALIKE,
        "gracefully_exit": ALIKE,
        "last_batch": SETTLED,
        "max_prefill_bs": REFUSED,  # the prefill delayer
        "processed_tokens_counter": RESET,
        "result_queue": SETTLED,
        "running_batch": SETTLED,
        "running_batch.batch_is_full": SETTLED,
        "running_batch.reqs": SETTLED,
        "schedule_stream": LAUNCH,
        "schedule_stream.synchronize": LAUNCH,
        "total_prefill_busy_us": OWN,
        "total_prefill_uncached_tokens": OWN,
        "waiting_queue": SETTLED,
        "new_token_ratio_tracker.current": RESET,
        "metrics_reporter.last_gen_throughput": OWN,
        "metrics_reporter.metrics_collector.last_log_time": OWN,
        "metrics_reporter.num_retracted_reqs": OWN,
    },
    "schedule_policy.py": {
        "_shortest_prefill_calls": REFUSED,  # a policy that orders by what a rank has cached
        "_waiting_prefix_refresh_calls": OWN,  # touches prefixes, which each rank evicts by itself
    },
}


def changed_while_serving(source: str, class_name: str) -> set[str]:
    """Attributes, dotted, that methods of the class assign to outside of its construction."""
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    return {
        name
        for method in found.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        and not method.name.startswith(("__init__", "init_", "maybe_init_"))
        for name in _assigned(method)
    }


def _assigned(method: ast.AST) -> Iterator[str]:
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            path = ast.unparse(node)
            if path.startswith("self."):
                yield path.removeprefix("self.")


@pytest.mark.parametrize(
    ("file", "class_name"),
    [("scheduler.py", "Scheduler"), ("schedule_policy.py", "SchedulePolicy")],
)
def test_all_that_a_scheduler_remembers_has_been_reviewed(file: str, class_name: str) -> None:
    found = changed_while_serving((MANAGERS / file).read_text(), class_name)
    new, gone = sorted(found - REVIEWED[file].keys()), sorted(REVIEWED[file].keys() - found)
    assert not new, (
        f"{class_name} changes what nobody has reviewed: {new}. If it decides which requests a "
        "step takes or what is done when memory runs out, reset it in "
        "vertumnus_patches.in_hand; then add it to REVIEWED with the reason"
    )
    assert not gone, f"{class_name} no longer changes {gone}; drop them from REVIEWED"


def test_something_new_would_be_found() -> None:
    source = (
        "class Scheduler:\n"
        "    def __init__(self):\n"
        "        self.given = 0\n"
        "    def init_more(self):\n"
        "        self.more = 0\n"
        "    def step(self):\n"
        "        self.counter += 1\n"
        "        self.a, local = 1, 2\n"
        "        self.tracker.current = local\n"
        "        other.field = self.given\n"
    )
    assert changed_while_serving(source, "Scheduler") == {"counter", "a", "tracker.current"}
