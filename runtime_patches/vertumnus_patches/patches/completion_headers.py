"""Let ``/v1/completions`` take request id and rank from headers, as chat and /generate do."""

from typing import Any

from vertumnus_patches.record import Kind, Patch, Process


def take_header_overrides(
    converted: tuple[Any, Any], serving: Any, request: Any, raw_request: Any = None
) -> None:
    from sglang.srt.entrypoints.request_headers import apply_header_overrides
    from sglang.srt.environ import envs

    if raw_request is not None and envs.SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES.get():
        apply_header_overrides(converted[0], raw_request.headers)


PATCH = Patch(
    id="completion-headers",
    target="sglang.srt.entrypoints.openai.serving_completions."
    "OpenAIServingCompletion._convert_to_internal_request",
    kind=Kind.AFTER,
    hook=take_header_overrides,
    processes=(Process.FRONT,),
    why="without the router's request id, prefill reports and aborts of completions cannot be "
    "matched to their requests",
    upstream="header overrides cover /generate and chat only",
    remove_when="upstream applies header overrides to completions",
    signature=("self", "request", "raw_request"),
    fingerprint="387bc064e85d9aa1",
)
