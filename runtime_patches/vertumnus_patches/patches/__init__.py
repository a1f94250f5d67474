"""One file per patch; ``ALL_PATCHES`` in the order in which a request meets them."""

from vertumnus_patches.patches import (
    batch_finished,
    batch_started,
    completion_headers,
    compute_once,
    control,
    controller_leaders,
    controller_loop,
    cp_stream,
    member_idle,
    member_output,
    parallel_groups,
    process_start,
    request_mirror,
    shared_tokenizer,
    short_prompts,
    token_sync,
    topology_check,
)
from vertumnus_patches.record import Patch

ALL_PATCHES: tuple[Patch, ...] = (
    process_start.PATCH,
    shared_tokenizer.PATCH,
    completion_headers.PATCH,
    controller_loop.PATCH,
    controller_leaders.PATCH,
    parallel_groups.PATCH,
    topology_check.PATCH,
    request_mirror.PATCH,
    control.PATCH,
    member_idle.PATCH,
    batch_started.PATCH,
    compute_once.PATCH,
    short_prompts.PATCH,
    cp_stream.PATCH,
    token_sync.PATCH,
    batch_finished.PATCH,
    member_output.PATCH,
)
