"""Penalties of requests that go on after a retraction, against SGLang's own, fed token by token."""

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vertumnus_patches.patches.resumed_penalties import count_past_tokens

pytest.importorskip("sglang", reason="needs sglang")
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

from tests.patches.schedulers import (
    VOCABULARY,
    receive,
    scheduler_with_pools,
    sglang_context,
    step,
)

KINDS = (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
EACH = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.3},
    {"repetition_penalty": 1.8},
    {"min_new_tokens": 4},
    {"frequency_penalty": 0.5, "presence_penalty": -0.4, "repetition_penalty": 0.6}
    | {"min_new_tokens": 2},
]


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaling penalties are compiled upstream, which takes minutes on a CPU."""
    from sglang.srt.sampling.penaltylib import repetition_penalty

    compiled = repetition_penalty.apply_scaling_penalties
    plain = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    monkeypatch.setattr(repetition_penalty, "apply_scaling_penalties", plain)


def request(said: Sequence[int], **penalties: float) -> Any:
    return SimpleNamespace(
        sampling_params=SimpleNamespace(stop_token_ids={3}, **NEUTRAL | penalties),
        eos_token_ids={4},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=5),
        output_ids=list(said),
    )


class Batch:
    """As much of a batch as penalties are made from."""

    def __init__(self, reqs: list[Any], kinds: Sequence[type] = KINDS) -> None:
        self.reqs = reqs
        self.device = "cpu"
        self.sampling_info = SimpleNamespace(
            penalizer_orchestrator=BatchedPenalizerOrchestrator(VOCABULARY, self, kinds)
        )

    @property
    def penalties(self) -> Any:
        return self.sampling_info.penalizer_orchestrator


def penalised(penalties: Any, rows: int) -> torch.Tensor:
    logits = torch.linspace(-3, 3, VOCABULARY).repeat(rows, 1)
    penalties.apply(logits)
    return logits


def never_retracted(one: Any, *more: int, kinds: Sequence[type] = KINDS) -> torch.Tensor:
    """Logits of a request that SGLang has fed its tokens one by one."""
    batch = Batch([one], kinds)
    for token in (*one.output_ids, *more):
        batch.penalties.cumulate_output_tokens(torch.tensor([token]))
    return penalised(batch.penalties, 1)


def check(*requests: Any, kinds: Sequence[type] = KINDS) -> Batch:
    batch = Batch(list(requests), kinds)
    count_past_tokens(None, batch)
    found = penalised(batch.penalties, len(requests))
    expected = torch.cat([never_retracted(one, kinds=kinds) for one in requests])
    torch.testing.assert_close(found, expected)
    return batch


@pytest.mark.parametrize("penalties", EACH, ids=lambda kinds: "+".join(kinds))
def test_each_kind_of_penalty_is_what_it_would_have_been(penalties: dict[str, float]) -> None:
    check(request([7, 7, 9], **penalties))


@pytest.mark.parametrize("penalties", EACH, ids=lambda kinds: "+".join(kinds))
@pytest.mark.parametrize("place", [0, 1, 2])
def test_resumed_and_new_requests_share_a_batch(penalties: dict[str, float], place: int) -> None:
    others = [request([]), request([7, 8]), request([], frequency_penalty=2.0)]
    others.insert(place, request([7, 7, 9], **penalties))
    check(*others)


def test_requests_of_different_kinds_do_not_mix() -> None:
    check(*(request([number, 7, 7], **penalties) for number, penalties in enumerate(EACH)))


@pytest.mark.parametrize("kinds", tuple(permutations(KINDS)))
def test_penalties_that_do_not_commute_keep_their_order(kinds: Sequence[type]) -> None:
    """Repetition scales what the others shift. Upstream takes its kinds from a set, so that
    their order differs from process to process."""
    check(request([7, 7, 9], **EACH[-1]), kinds=kinds)


some_request = st.tuples(
    st.lists(st.integers(0, VOCABULARY - 1), max_size=4),
    st.fixed_dictionaries(
        {},
        optional={
            "frequency_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
            "presence_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
            "repetition_penalty": st.sampled_from([0.5, 1.5]),
            "min_new_tokens": st.integers(1, 5),
        },
    ),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(some_request, min_size=1, max_size=4), st.data())
def test_any_batch_goes_on_as_if_nothing_had_happened(
    made: list[tuple[list[int], dict[str, float]]], data: st.DataObject
) -> None:
    """Also after more tokens and after some requests have ended."""
    requests = [request(said, **penalties) for said, penalties in made]
    batch = check(*requests)
    more = data.draw(st.lists(st.integers(0, 96), min_size=len(made), max_size=len(made)))
    batch.penalties.cumulate_output_tokens(torch.tensor(more))
    expected = torch.cat(
        [never_retracted(one, token) for one, token in zip(requests, more, strict=True)]
    )
    found = penalised(batch.penalties, len(requests))
    torch.testing.assert_close(found, expected)
    stay = data.draw(st.sets(st.integers(0, len(made) - 1), min_size=1).map(sorted))
    batch.penalties.filter(torch.tensor(stay))
    batch.reqs = [requests[index] for index in stay]
    torch.testing.assert_close(penalised(batch.penalties, len(stay)), expected[stay])


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param([([], {"frequency_penalty": 1.0})], id="nobody has said anything"),
        pytest.param([([1, 2], {})], id="nobody is penalised"),
    ],
)
def test_a_batch_without_need_is_left_alone(
    requests: list[tuple[list[int], dict[str, float]]],
) -> None:
    batch = Batch([request(said, **penalties) for said, penalties in requests])
    before = batch.penalties
    count_past_tokens(None, batch)
    assert batch.penalties is before


# -- in SGLang's batch ----------------------------------------------------------------------------


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    original = ScheduleBatch.prepare_for_extend

    def prepare(batch: Any) -> None:
        count_past_tokens(original(batch), batch)

    monkeypatch.setattr(ScheduleBatch, "prepare_for_extend", prepare)
    with sglang_context():
        yield scheduler_with_pools


def test_a_merged_request_meets_the_penalties_that_it_had(
    patched: Callable[[], Any],
) -> None:
    """Before the next token, and after it has joined those that run."""
    from vertumnus_patches import in_hand

    params = {"max_new_tokens": 20, "ignore_eos": True, "frequency_penalty": 0.5}
    params |= {"presence_penalty": 0.4, "repetition_penalty": 1.5}
    seen = []
    for merges in (False, True):
        scheduler = patched()
        receive(scheduler, "runs", [1] * 20, sampling=params)
        for _ in range(4):
            step(scheduler)
        if merges:
            known = in_hand.suspend(scheduler).known()
            in_hand.resume(scheduler, [in_hand.Ticket(rid, b"", [], True) for rid in known], known)
        receive(scheduler, "new", [2] * 20, sampling=params)
        if not merges:
            step(scheduler)  # the new one's prefill, with which the other one resumes
        rows = []
        for _ in range(3):
            batch = step(scheduler)
            found = penalised(batch.sampling_info.penalizer_orchestrator, len(batch.reqs))
            for one, row in zip(batch.reqs, found, strict=True):
                rows.append((one.rid, len(one.output_ids), row))
        seen.append({(rid, said): row for rid, said, row in rows})
    common = seen[0].keys() & seen[1].keys()
    assert {rid for rid, _ in common} == {"runs", "new"}
    for key in common:
        torch.testing.assert_close(seen[0][key], seen[1][key])
