"""Let a request that goes on after a retraction be penalised for the tokens that it has."""

from typing import Any

from vertumnus_patches.record import Kind, Patch, Process


class _Some:
    """As much of a batch as penalties are made from."""

    def __init__(self, reqs: list[Any], device: Any) -> None:
        self.reqs = reqs
        self.device = device


def count_past_tokens(result: None, batch: Any) -> None:
    import torch  # here: a router lists the patches without it

    penalties = batch.sampling_info.penalizer_orchestrator
    if not penalties.is_required or not any(request.output_ids for request in batch.reqs):
        return
    # In the batch's own order, which is the order in which they change the logits.
    vocabulary, kinds = penalties.vocab_size, list(penalties.penalizers)
    so_far = _Some([], batch.device)
    merged: Any = None
    for request in batch.reqs:
        alone = _Some([request], batch.device)
        own = type(penalties)(vocabulary, alone, kinds)
        for token in request.output_ids:
            own.cumulate_output_tokens(torch.tensor([token], device=batch.device))
        if merged is None:
            merged = own
        else:
            merged.merge(own)
        # Merging prepares what was not needed so far, for the requests so far.
        so_far.reqs.append(request)
        merged.batch = so_far
    merged.batch = batch
    batch.sampling_info.penalizer_orchestrator = merged


PATCH = Patch(
    id="resumed-penalties",
    target="sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
    kind=Kind.AFTER,
    hook=count_past_tokens,
    processes=(Process.RANK,),
    why="requests are retracted and go on when their block merges, and their tokens must be "
    "those that they would have been",
    upstream="a retracted request starts again without frequency, presence and repetition "
    "penalties for what it has said",
    remove_when="upstream restores penalties after a retraction",
    signature=("self",),
    fingerprint="fa20f429824aa4ee",
)
