"""Candidates that are alike are priced together, and terms are worked out when they are read."""

import random

import pytest
from vertumnus_router.core.config import PrefixConfig
from vertumnus_router.core.effects import Dispatch
from vertumnus_router.core.pricing import pick
from vertumnus_router.core.trie import PrefixIndex
from vertumnus_router.core.types import BlockHash, RequestId

from tests.router.core.counted import members
from tests.router.core.scene import Scene, chain, request, with_overhead


def scene(policy: str) -> Scene:
    """Three workers that hold different prefixes of one document; pulls are on."""
    found = Scene(None, with_overhead(0.1), policy=policy, prefix=PrefixConfig(pull=True))
    found.launch("2x1,1x2", kv_token_bytes=1)
    for rank, depth in enumerate((0, 12, 5, 9)):
        if depth:
            found.store(rank, chain(1, depth))
    return found


def dispatches(policy: str, *, read_at_once: bool) -> list[Dispatch]:
    """Twelve requests for the document, some with more of it than anybody holds."""
    one = scene(policy)
    found: list[Dispatch] = []
    for i in range(12):
        blocks = chain(1, 8 + i)
        effects = one.arrive(f"r{i}", 100 * len(blocks) + 50, blocks=blocks)
        one.wait(0.05)
        if i % 3 == 2:
            one.store(i % 4, blocks)
            effects += one.finish(f"r{i - 2}")
        found += [effect for effect in effects if isinstance(effect, Dispatch)]
        if read_at_once:
            assert all(dispatch.decision.candidates for dispatch in found)
    return found


@pytest.mark.parametrize("policy", ["paper", "late"])
def test_a_decision_is_as_it_was_when_it_is_read_later(policy: str) -> None:
    at_once, later = (dispatches(policy, read_at_once=read) for read in (True, False))
    assert len(at_once) >= 3
    assert [one.decision for one in later] == [one.decision for one in at_once]
    assert [hash(one.decision) for one in later] == [hash(one.decision) for one in at_once]


@pytest.mark.parametrize("policy", ["paper", "late"])
def test_the_choice_alone_is_the_first_of_all(policy: str) -> None:
    for one in dispatches(policy, read_at_once=False):
        chosen = one.decision.chosen
        assert chosen == one.decision.candidates[0]
        assert chosen is not one.decision.candidates[0]  # it was read without the others
        assert chosen.worker == one.worker
        for terms in one.decision.candidates:
            parts = terms.queue_s + terms.beta * terms.service_s + terms.lam * terms.extra_gpu_s
            assert terms.total == parts, "the queue is that of before the request joined it"


@pytest.mark.parametrize("policy", ["paper", "late"])
def test_every_total_is_the_sum_of_its_terms(policy: str) -> None:
    decision = scene(policy).control.explain(request("x", 2050, blocks=chain(1, 20)), 1000.0)
    assert {terms.worker for terms in decision.candidates} == {"p/0x1", "p/1x1", "p/2x2"}
    for one in decision.candidates:
        assert one.total == one.queue_s + one.beta * one.service_s + one.lam * one.extra_gpu_s


def test_decisions_differ_where_a_term_does() -> None:
    one, other = scene("paper"), scene("paper")
    other.arrive("first", 3000)
    asked = request("x", 2050, blocks=chain(1, 20))
    assert one.control.explain(asked, 1000.0) != other.control.explain(asked, 1000.0)


def test_the_pick_is_within_the_tie_and_no_other() -> None:
    candidates = members("2x1,1x2").serving
    picked = {
        pick(RequestId(f"r{i}"), candidates, [1.0, 1.0009, 1.0011], 0.001, 0) for i in range(50)
    }
    assert picked == {0, 1}


def test_the_longest_prefix_of_each_mask_is_that_of_the_mask_alone() -> None:
    draw = random.Random(5)
    for _ in range(50):
        index = PrefixIndex(2**20)
        for slot in range(6):
            if depth := draw.randrange(8):
                index.store(slot, None, chain(1, depth))
        match = index.match((*chain(1, 7), BlockHash(-1)))
        masks = tuple(draw.randrange(1, 128) for _ in range(20))
        assert match.longest_each(masks) == [match.longest(mask) for mask in masks]
        assert match.longest_each(masks[:3]) == [match.longest(mask) for mask in masks[:3]]


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(TypeError, match="'tick' is no event"):
        scene("paper").feed("tick")  # type: ignore[arg-type]
