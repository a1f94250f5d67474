"""Four rank runtimes in four processes, through several compositions."""

import importlib.util

import pytest

from sgl_vertumnus.worker.rendezvous import open_store
from tests.patches.schedulers import Size, answer
from tests.worker.block_scenarios import (
    LAYERS,
    PROMPT,
    STEPS,
    TOKENS,
    VOCABULARY,
    moved,
    prompt,
    regrouped,
)
from tests.worker.configs import config_of
from tests.worker.ranks import run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")


def test_ranks_act_as_one_in_each_block() -> None:
    config = config_of(4, (1, 2, 4))
    store = open_store(config)
    seen = run(regrouped, [(config, number) for number in range(4)])
    del store
    for turn, degree in enumerate((1, 2, 4, 1)):
        for number in range(4):
            leader = number // degree * degree
            rank = seen[number][turn]
            assert rank["requests"] == [f"from-{leader}"]
            assert rank["ids"] == [leader, leader + 10]
            assert rank["member"] is (number != leader)
            assert rank["strategy"] == ((degree, number - leader) if degree > 1 else None)
            assert rank["computed"] == ([number] if number == leader else [])
            assert rank["kv"] == [2.0 * (leader * 100 + layer) for layer in range(2 * LAYERS)]
            assert rank["logits"] == ("logits" if number == leader else [2, VOCABULARY])


def test_requests_go_through_moves_and_say_what_they_would_have_said() -> None:
    """Over real groups, with SGLang's schedulers, trees and pools on every rank."""
    config = config_of(4, (1, 2, 4))
    store = open_store(config)
    seen = run(moved, [(config, number) for number in range(4)])
    del store
    for number, rank in enumerate(seen):
        assert rank["free"] == Size().capacity and rank["aborts"] == 0
        said = rank["said"]
        assert sorted(said) == ["r0", "r1", "r2", "r3"], "as a four it knew all of them"
        assert said[f"r{number}"] == answer(prompt(number), TOKENS)
        for home in range(4):  # what others have let go of was right as far as it went
            assert said[f"r{home}"] == answer(prompt(home), TOKENS)[: len(said[f"r{home}"])]
        for turn, (degree, steps) in enumerate(zip((1, 2, 4, 2, 1), rank["batches"], strict=True)):
            first = number // degree * degree
            homes = {f"r{home}" for home in range(first, first + degree)}
            assert {rid for rids, _ in steps for rid in rids} == homes
            lockstep = [other["batches"] for other in seen[first : first + degree]]
            assert all(batches[turn] == steps for batches in lockstep)
        # A split begins with a decode; a merge with a prefill of what is no whole page.
        _, pair, four, again, alone = rank["batches"]
        assert pair[0][1] == [PROMPT] * 2 and four[0][1] == [PROMPT] * 4
        assert all(lengths is None for _, lengths in [*again, *alone])
        assert len(pair) == STEPS, "no step is spent on the move"
