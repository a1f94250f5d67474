"""SGLang's scheduler as a rank of a prefill pool: its queues and its loop, without a network."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vertumnus_patches.patches import (
    agreed_prefix,
    home_chunks,
    home_handshake,
    home_metadata,
    home_sender,
    home_transfers,
    least_room,
    least_rows,
    request_source,
)

from tests.patches import schedulers
from tests.patches.conftest import around
from tests.patches.schedulers import Size, next_token, scheduler_with_pools

#: Groups that polls were agreed on over, in order.
BLOCK, ALONE = "the block", "this rank"


class Sender:
    """What a transfer engine would be told, and what it says; pages by their first token."""

    def __init__(self, **_: Any) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.status = int(KVPoll.Bootstrapping)
        self.pages = 0
        self.sent: list[int] = []
        self.aborted = False

    def poll(self) -> int:
        return self.status

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self.pages, self.place = num_kv_indices, aux_index

    def send(self, kv_indices: Any, state_indices: Any = None, **_: Any) -> None:
        self.sent.extend(int(index) for index in kv_indices)

    def should_send_kv_chunk(self, pages: int, last_chunk: bool) -> bool:
        return pages > 0 or last_chunk

    def get_max_transfer_tokens(self) -> None:
        return None

    def pop_decode_prefix_len(self) -> int:
        return 0

    def abort(self) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.aborted, self.status = True, int(KVPoll.Failed)

    def failure_exception(self) -> None:
        raise RuntimeError("the transfer failed")

    def clear(self) -> None:
        """It is over."""

    def get_transfer_metric(self) -> Any:
        from sglang.srt.disaggregation.base.conn import KVTransferMetric

        return KVTransferMetric()


def say(request: Any, status: str) -> None:
    """What the transfer engine knows by now: a name in ``KVPoll``."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    request.disagg_kv_sender.status = int(getattr(KVPoll, status))


@contextmanager
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """With our hooks in place; yields the groups over which ranks agreed."""
    from sglang.srt.disaggregation import utils
    from sglang.srt.disaggregation.prefill import (
        PrefillBootstrapQueue,
        SchedulerDisaggregationPrefillMixin,
    )
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.prefill_budget import PrefillBudget

    groups: list[str] = []

    def agree(polls: list[int], group: str) -> list[int]:
        groups.append(group)
        return list(polls)

    with monkeypatch.context() as patch:
        patch.setattr(utils, "_all_reduce_polls", agree)
        for owner, name, hook in (
            (PrefillBootstrapQueue, "create_sender", home_sender.send_from_home),
            (PrefillBootstrapQueue, "ensure_metadata_buffer", home_metadata.place_at_home),
            (PrefillBootstrapQueue, "pop_bootstrapped", home_handshake.pop_ready),
            (SchedulerDisaggregationPrefillMixin, "send_kv_chunk", home_chunks.send_at_home),
            (
                SchedulerDisaggregationPrefillMixin,
                "process_disagg_prefill_inflight_queue",
                home_transfers.poll_at_home,
            ),
            (Req, "_compute_max_prefix_len", agreed_prefix.within_agreed),
            (PrefillBudget, "_available_and_evictable", least_room.as_agreed),
            (Scheduler, "get_num_allocatable_reqs", least_rows.as_agreed),
        ):
            patch.setattr(owner, name, around(getattr(owner, name), hook))
        made = Scheduler._create_generation_req

        def remember(scheduler: Any, message: Any, *args: Any, **fields: Any) -> Any:
            request = made(scheduler, message, *args, **fields)
            request_source.remember_message(request, scheduler, message, *args, **fields)
            return request

        patch.setattr(Scheduler, "_create_generation_req", remember)
        yield groups


def prefill_scheduler(size: Size, places: int = 8) -> Any:
    """``places``: for the first tokens of requests that are prefilled or being sent."""
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue
    from sglang.srt.disaggregation.utils import DisaggregationMode, ReqToMetadataIdxAllocator

    scheduler = scheduler_with_pools(size)
    allocator = ReqToMetadataIdxAllocator(places)
    queue = PrefillBootstrapQueue.__new__(PrefillBootstrapQueue)
    queue.__dict__.update(
        queue=[],
        scheduler=scheduler,
        scheduler_stage_metrics=None,
        req_to_metadata_buffer_idx_allocator=allocator,
        max_input_len=size.capacity,
        bootstrap_port=1,
        pp_size=1,
        transfer_backend="a test",
        kv_manager=SimpleNamespace(kv_args=SimpleNamespace(state_types=[])),
    )
    scheduler.__dict__.update(
        disaggregation_mode=DisaggregationMode.PREFILL,
        disagg_prefill_bootstrap_queue=queue,
        disagg_prefill_inflight_queue=[],
        disagg_prefill_pending_chunk_rids=set(),
        req_to_metadata_buffer_idx_allocator=allocator,
        disagg_metadata_buffers=SimpleNamespace(set_buf=lambda request: None),
        enable_staging=False,
        kv_checksum_computer=None,
        attn_cp_cpu_group=BLOCK,
        attn_tp_cpu_group=ALONE,
        output_streamer=SimpleNamespace(stream_output=lambda *args: None),
        batch_result_processor=SimpleNamespace(
            snapshot_auxiliary_output_starts=lambda batch, result: None,
            move_logprobs_to_cpu=lambda batch, logits_output: None,
        ),
        maybe_send_health_check_signal=lambda: None,
    )
    scheduler.metrics_reporter.report_prefill_stats = lambda **_: None
    scheduler.model_config.num_key_value_heads = 1
    return scheduler


def arrive(scheduler: Any, rid: str, tokens: Sequence[int], home: int, **fields: Any) -> Any:
    """A request enters; its ``Req``, which waits for its decode server."""
    queue = scheduler.disagg_prefill_bootstrap_queue
    before = len(queue.queue)
    fields.setdefault("sampling", {"max_new_tokens": 8, "ignore_eos": True})
    message = {"bootstrap_host": "127.0.0.1", "bootstrap_room": home, "routed_dp_rank": home}
    with pytest.MonkeyPatch.context() as patch:
        from sglang.srt.disaggregation import prefill

        patch.setattr(prefill, "get_kv_class", lambda backend, kind: Sender)
        scheduler.handle_generate_request(schedulers.message_of(rid, tokens, **message, **fields))
    assert len(queue.queue) == before + 1
    return queue.queue[-1]


def handshakes(scheduler: Any) -> None:
    """Requests whose decode servers are ready go on."""
    ready = scheduler.disagg_prefill_bootstrap_queue.pop_bootstrapped()
    scheduler.waiting_queue.extend(ready)


def step(scheduler: Any) -> Any:
    """One pass of the loop of a prefill server, but for the transfers; the batch, or None."""
    plan = scheduler.get_next_disagg_prefill_batch_to_run(
        scheduler.running_batch, scheduler.last_batch
    )
    scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
    if batch is not None:
        schedulers.forward(scheduler, batch)
        scheduler.process_batch_result_disagg_prefill(batch, _result(batch))
    scheduler.last_batch = batch
    return batch


def _result(batch: Any) -> Any:
    tokens = [next_token(request.origin_input_ids) for request in batch.reqs]
    return SimpleNamespace(
        logits_output=None,
        next_token_ids=torch.tensor(tokens),
        extend_input_len_per_req=None,
        extend_logprob_start_len_per_req=None,
        copy_done=None,
        auxiliary_host_output=None,
        routed_experts_output=None,
        indexer_topk_output=None,
        next_draft_input=None,
        can_run_cuda_graph=False,
    )
