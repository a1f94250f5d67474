"""Greedy outputs against transformers, in float32, on the same checkpoint.

One forward pass over prompt and output tells what greedy decoding would have said at every
position. Passes go in the order of the tokens, so that common prefixes are computed once.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vertumnus_bench.stream import Stream
from vertumnus_bench.workload import Tokens

#: Logits closer than this are a tie: rounding decides, and both tokens are right.
TIE = 1e-3


@dataclass(frozen=True, slots=True)
class Choice:
    """The likeliest token at one position, the next one, and how far their logits differ."""

    token: int
    runner_up: int
    margin: float


def first_difference(output: Sequence[int], choices: Sequence[Choice]) -> int | None:
    """Where ``output`` is wrong first, or None. After a tie that it decided otherwise, the
    choices belong to another text: nothing more is compared."""
    for position, (token, choice) in enumerate(zip(output, choices, strict=True)):
        if token != choice.token:
            tied = choice.margin < TIE and token == choice.runner_up
            return None if tied else position
    return None


def check(model: Path, streams: Iterable[Stream]) -> int:
    """Mark streams whose output is not greedy's, those of clients that left included.

    Returns how many distinct outputs were compared.
    """
    by_output: dict[tuple[Tokens, Tokens], list[Stream]] = {}
    for stream in streams:
        if stream.output:
            key = (stream.ask.prompt, tuple(stream.output))
            by_output.setdefault(key, []).append(stream)
    for (prompt, output), choices in Reference(model).choices(by_output):
        position = first_difference(output, choices)
        if position is not None:
            for stream in by_output[prompt, output]:
                stream.differs(position, choices[position].token)
    return len(by_output)


class Reference:
    """The model at ``path`` in transformers."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        # Passes over a small model are too short to be shared by threads.
        torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._model: Any = model.eval()

    def choices(
        self, asked: Collection[tuple[Tokens, Tokens]]
    ) -> Iterator[tuple[tuple[Tokens, Tokens], list[Choice]]]:
        """The choices at every position of each output, for pairs of prompt and output."""
        import torch
        from transformers import DynamicCache

        cache, computed = DynamicCache(), Tokens()
        for prompt, output in sorted(asked, key=lambda pair: pair[0] + pair[1]):
            tokens = prompt + output[:-1]
            # The prompt's last token is computed again: it says what the output begins with.
            kept = min(common_prefix(computed, tokens), len(prompt) - 1)
            if kept == 0:
                cache = DynamicCache()
            elif kept < len(computed):
                cache.crop(kept - len(computed))  # negative: so many tokens fewer
            with torch.inference_mode():
                logits = self._model(
                    torch.tensor([tokens[kept:]]),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=len(output),
                ).logits[0]
            computed = tokens
            values, ids = logits.topk(2)
            yield (
                (prompt, output),
                [
                    Choice(first, second, best - next_best)
                    for (first, second), (best, next_best) in zip(
                        ids.tolist(), values.tolist(), strict=True
                    )
                ],
            )


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens the two share."""
    for position, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return position
    return min(len(a), len(b))
