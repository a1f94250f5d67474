"""What a client asks for: the endpoint, and the fields of its body that the router reads.

The body itself travels on as the bytes that came.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson

from vertumnus_router.io.api_errors import ApiError

#: Where a request runs is the router's to say; SGLang would take these from anybody.
_ROUTING = (
    "routed_dp_rank",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
)
#: What may be the prompt of ``/generate``.
_PROMPTS = frozenset(("text", "input_ids", "input_embeds"))


class Endpoint(Enum):
    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    GENERATE = "/generate"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """``engine_items`` is the number of engine requests ``RID_0 … RID_n-1`` that SGLang makes
    of it, None when it is a single one under the request id itself."""

    endpoint: Endpoint
    fields: dict[str, Any]
    body_bytes: int
    engine_items: int | None
    priority: int

    @property
    def model(self) -> str | None:
        model = self.fields.get("model")
        return model if isinstance(model, str) and self.endpoint is not Endpoint.GENERATE else None

    @property
    def output_tokens(self) -> int | None:
        """The most tokens that the client allows for one answer, None if it does not say."""
        match self.endpoint:
            case Endpoint.CHAT:
                return _positive(self.fields.get("max_completion_tokens")) or _positive(
                    self.fields.get("max_tokens")
                )
            case Endpoint.COMPLETIONS:
                return _positive(self.fields.get("max_tokens"))
            case Endpoint.GENERATE:
                return _positive(_sampling(self.fields).get("max_new_tokens"))

    @property
    def default_output_tokens(self) -> int | None:
        """What SGLang generates when the client does not say, None for as much as fits."""
        match self.endpoint:
            case Endpoint.CHAT:
                return None
            case Endpoint.COMPLETIONS:
                return 16
            case Endpoint.GENERATE:
                return 128


def parse(endpoint: Endpoint, body: bytes) -> ClientRequest:
    """Read the body; ``ApiError`` 400 when it is not a JSON object, names no prompt, or says where
    it is to run."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise ApiError(400, "invalid_json", f"the body is not valid JSON: {exc}") from exc
    if not isinstance(fields, dict):
        raise ApiError(400, "invalid_json", "the body must be a JSON object")
    _refuse_routing(endpoint, fields)
    _require_prompt(endpoint, fields)
    return ClientRequest(
        endpoint=endpoint,
        fields=fields,
        body_bytes=len(body),
        engine_items=prompt_count(endpoint, fields),
        priority=_integer(fields.get("priority")),
    )


def endpoint_of(fields: dict[str, Any]) -> Endpoint:
    """Which endpoint a body is shaped for; ``ApiError`` 400 when it fits none."""
    if "messages" in fields:
        return Endpoint.CHAT
    if "prompt" in fields:
        return Endpoint.COMPLETIONS
    if not _PROMPTS.isdisjoint(fields):
        return Endpoint.GENERATE
    raise ApiError(400, "missing_prompt", "give a body with messages, prompt, text or input_ids")


def prompt_count(endpoint: Endpoint, fields: dict[str, Any]) -> int | None:
    """The number of prompts of a batch; None when the body holds one prompt, not a list."""
    match endpoint:
        case Endpoint.CHAT:
            return None
        case Endpoint.COMPLETIONS:
            prompt = fields.get("prompt")
        case Endpoint.GENERATE:
            prompt = fields.get("text")
            if prompt is None:
                prompt = fields.get("input_ids")
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return None
    return len(prompt)


def check_pairable(asked: ClientRequest) -> None:
    """``ApiError`` 400 for what SGLang cannot do with prefill and decode apart."""
    sampling = _sampling(asked.fields) if asked.endpoint is Endpoint.GENERATE else asked.fields
    n = sampling.get("n")
    if n is not None and not (type(n) is int and n == 1):
        # TokenizerManager._handle_batch_request gives all samples of a prompt the same room.
        # Only the 1 itself is sure to be read as one: SGLang takes "2" and 2.0 for 2.
        raise ApiError(
            400,
            "unsupported_with_decode_servers",
            "n other than the integer 1 does not work with separate decode servers: send the "
            "request once for each answer",
            param="n",
        )
    echoes = asked.endpoint is Endpoint.COMPLETIONS and asked.fields.get("echo")
    if echoes and asked.fields.get("logprobs"):
        raise ApiError(
            400,
            "unsupported_with_decode_servers",
            "echo with logprobs does not work with separate decode servers: ask /generate, with "
            "return_logprob and logprob_start_len",
            param="echo",
        )


def wants_prompt_logprobs(asked: ClientRequest) -> bool:
    """Whether the answer contains log-probabilities of the prompt's tokens."""
    if asked.endpoint is not Endpoint.GENERATE:
        return False
    wanted, starts = asked.fields.get("return_logprob"), asked.fields.get("logprob_start_len")
    starts = starts if isinstance(starts, list) else [starts]
    if isinstance(wanted, list):
        wanted = any(wanted)
    # Without a start SGLang gives those of the answer only.
    return bool(wanted) and any(_number(start) >= 0 for start in starts)


def _refuse_routing(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    names: tuple[str, ...] = _ROUTING
    if endpoint is Endpoint.COMPLETIONS:
        # Elsewhere a header of the router's replaces it; here the engine would take it, and mix up
        # two requests of one name.
        names = (*_ROUTING, "rid")
    for name in names:
        if fields.get(name) is not None:
            raise ApiError(
                400,
                "routing_field",
                f"{name} is not for clients: this router says where a request runs, and under "
                f"which id; leave it out",
                param=name,
            )


def _require_prompt(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    match endpoint:
        case Endpoint.CHAT:
            messages = fields.get("messages")
            if not isinstance(messages, list) or not messages:
                raise ApiError(
                    400, "missing_messages", "messages must be a non-empty list", param="messages"
                )
        case Endpoint.COMPLETIONS:
            prompt = fields.get("prompt")
            if not isinstance(prompt, str | list) or not prompt:
                raise ApiError(
                    400, "missing_prompt", "prompt must be text or a list", param="prompt"
                )
        case Endpoint.GENERATE:
            if all(fields.get(name) is None for name in _PROMPTS):
                raise ApiError(400, "missing_prompt", "give text or input_ids", param="text")


def _sampling(fields: dict[str, Any]) -> dict[str, Any]:
    sampling = fields.get("sampling_params")
    if isinstance(sampling, list) and sampling:
        sampling = sampling[0]
    return sampling if isinstance(sampling, dict) else {}


def _integer(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _number(value: Any) -> float:
    """A number as SGLang reads it, which also takes 0.0, "0" and False for 0; -1 for anything
    else. What is not whole is refused there, and need not be told apart here."""
    try:
        return float(value) if isinstance(value, int | float | str) else -1
    except (ValueError, OverflowError):
        return -1


def _positive(value: Any) -> int | None:
    number = _integer(value)
    return number if number > 0 else None
