"""Requests as SGLang's front makes them."""

from array import array
from collections.abc import Sequence
from typing import Any


def generate_request(
    rid: str = "r", input_ids: Sequence[int] = (1, 2, 3), *, sampling: Any = None, **fields: Any
) -> Any:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    values: dict[str, Any] = {
        "rid": rid,
        "input_text": "text",
        "input_ids": array("q", input_ids),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "sampling_params": SamplingParams(**(sampling or {})),
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": True,
    }
    return TokenizedGenerateReqInput(**values | fields)
