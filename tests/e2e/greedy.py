"""What greedy decoding says, by transformers, and how close an answer must be to it (fp32)."""

from dataclasses import dataclass

import torch

MAX_LOGPROB_DIFFERENCE = 1e-4
NEW_TOKENS = 8

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Output:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int = 0


def transformers_output(model: torch.nn.Module, prompt: Prompt) -> Output:
    tokens, logprobs, ids, cache = [], [], torch.tensor([prompt]), None
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            step = model(ids, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            scores = torch.log_softmax(step.logits[0, -1].float(), -1)
            best = int(scores.argmax())
            tokens.append(best)
            logprobs.append(float(scores[best]))
            ids = torch.tensor([[best]])
    return Output(tuple(tokens), tuple(logprobs))


def assert_equal(actual: Output, expected: Output, what: str) -> None:
    assert actual.tokens == expected.tokens, what
    difference = max(abs(a - b) for a, b in zip(actual.logprobs, expected.logprobs, strict=True))
    assert difference <= MAX_LOGPROB_DIFFERENCE, f"{what}: {difference}"
