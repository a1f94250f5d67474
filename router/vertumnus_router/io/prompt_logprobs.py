"""The log-probabilities of a prompt, which only the prefill leg knows, put into the answer of the
decode leg (``/generate`` only, as sglang-router does)."""

from collections.abc import Iterator
from typing import Any

import orjson


class PromptLogprobs:
    """Taken from the prefill leg's answer. ``ValueError`` if that, or an answer given to a method,
    is not what SGLang answers."""

    def __init__(self, answer: bytes, *, events: bool) -> None:
        self._of_prompt: dict[int, dict[str, Any]] = {}
        if events:
            outputs = list(_outputs_of_events(answer))
        else:
            content = orjson.loads(answer)
            outputs = content if isinstance(content, list) else [content]
        for at, output in enumerate(outputs):
            index = _index(output, 0 if events else at)
            self._of_prompt[index] = {
                name: value for name, value in _meta(output).items() if _is_of_prompt(name)
            }

    def into_answer(self, answer: bytes) -> bytes:
        """A complete answer with the log-probabilities in it."""
        content = orjson.loads(answer)
        for at, output in enumerate(content if isinstance(content, list) else [content]):
            _meta(output).update(self._of_prompt.get(at, {}))
        return orjson.dumps(content)

    def into_event(self, event: bytes) -> bytes:
        """One event of a stream, without the empty line that ends it. SGLang's events each carry
        all of the meta information, so each gets them."""
        data = event.removeprefix(b"data:").strip()
        if data == event or not data.startswith(b"{"):
            return event
        output = orjson.loads(data)
        if "meta_info" not in output:
            return event
        _meta(output).update(self._of_prompt.get(_index(output, 0), {}))
        return b"data: " + orjson.dumps(output)


def _outputs_of_events(stream: bytes) -> Iterator[Any]:
    for event in stream.split(b"\n\n"):
        data = event.removeprefix(b"data:").strip()
        if data.startswith(b"{"):
            yield orjson.loads(data)


def _is_of_prompt(name: str) -> bool:
    return name.startswith("input_") and "logprobs" in name


def _index(output: Any, default: int) -> int:
    index = output.get("index", default) if isinstance(output, dict) else default
    return index if isinstance(index, int) else default


def _meta(output: Any) -> dict[str, Any]:
    match output:
        case {"meta_info": dict(meta)}:
            return meta
    raise ValueError("an output without meta_info")
