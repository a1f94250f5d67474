"""Four rank runtimes in four processes, through several compositions."""

import importlib.util

import pytest

from sgl_vertumnus.worker.rendezvous import open_store
from tests.worker.block_scenarios import LAYERS, VOCABULARY, regrouped
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
