"""The oracle itself: ties, and forward passes that share prefixes."""

from pathlib import Path
from typing import Any

import pytest
from vertumnus_bench.reference import Choice, Reference, check, common_prefix, first_difference
from vertumnus_bench.stream import Stream, tally
from vertumnus_bench.workload import Ask, Tokens

CLEAR, TIED = 0.5, 0.0009


def choices(*margins: float) -> list[Choice]:
    """The tokens 10, 11, ... with runners-up 20, 21, ..."""
    return [Choice(10 + n, 20 + n, margin) for n, margin in enumerate(margins)]


@pytest.mark.parametrize(
    ("output", "margins", "expected"),
    [
        ([10, 11, 12], [CLEAR, CLEAR, CLEAR], None),
        ([10, 99, 12], [CLEAR, CLEAR, CLEAR], 1),
        ([10, 21, 12], [CLEAR, CLEAR, CLEAR], 1),
        ([10, 21, 99], [CLEAR, TIED, CLEAR], None),
        ([10, 99, 12], [CLEAR, TIED, CLEAR], 1),
        ([10, 11, 99], [CLEAR, TIED, CLEAR], 2),
        ([20], [0.001], 0),
    ],
    ids=[
        "equal",
        "another token",
        "the runner-up of a clear choice",
        "the runner-up of a tie, then another text",
        "at a tie, but neither of the two",
        "as the reference at the tie, wrong later",
        "no tie any more",
    ],
)
def test_only_a_tie_excuses_a_difference(
    output: list[int], margins: list[float], expected: int | None
) -> None:
    assert first_difference(output, choices(*margins)) == expected


def test_common_prefix() -> None:
    assert common_prefix((), (1,)) == 0
    assert common_prefix((1, 2, 3), (1, 2)) == 2
    assert common_prefix((1, 2, 3), (1, 9, 3)) == 1


def greedy(model: Any, prompt: Tokens, count: int) -> Tokens:
    """One token after the other, without a cache."""
    import torch

    tokens = prompt
    for _ in range(count):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        tokens += (int(logits.argmax()),)
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def answers(random_model_path: str) -> dict[Tokens, Tokens]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(random_model_path, dtype=torch.float32).eval()
    prefix = tuple(range(40, 90))
    prompts = [(33,), prefix, (*prefix, 7, 9), (*prefix, 8), tuple(range(200, 100, -1))]
    found = {prompt: greedy(model, prompt, 6) for prompt in prompts}
    follow_up = (*prefix, *found[prefix], 77)
    return found | {follow_up: greedy(model, follow_up, 6)}


def test_choices_are_what_greedy_decoding_says(
    random_model_path: str, answers: dict[Tokens, Tokens]
) -> None:
    found = dict(Reference(Path(random_model_path)).choices(list(answers.items())))
    assert {
        prompt: tuple(choice.token for choice in at) for (prompt, _), at in found.items()
    } == answers
    assert all(choice.margin >= 0 for at in found.values() for choice in at)


def stream(prompt: Tokens, output: Tokens) -> Stream:
    return Stream(Ask(prompt, len(output)), output=list(output))


def test_a_check_marks_every_stream_with_a_wrong_token(
    random_model_path: str, answers: dict[Tokens, Tokens]
) -> None:
    prompt, output = next(iter(answers.items()))
    wrong = (*output[:3], (output[3] + 1) % 250, *output[4:])
    right = [stream(*answer) for answer in answers.items()]
    partial = stream(prompt, output[:2])
    faulty = [stream(prompt, wrong), stream(prompt, wrong)]
    silent = stream(prompt, ())
    compared = check(Path(random_model_path), [*right, partial, *faulty, silent])
    assert compared == len(answers) + 2
    assert tally([*right, partial, silent])["wrong"] == 0
    assert tally(faulty)["wrong"] == 2
