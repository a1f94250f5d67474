"""The controller in a running router: it moves a pool, or says that it would, and why."""

import logging
from typing import Any

import pytest
from vertumnus_router.core.config import ControllerConfig, PolicyConfig
from vertumnus_router.core.types import PoolId

from tests.router.io.fake_pool import FakePool
from tests.router.io.harness import Running, run, running, until
from tests.router.io.test_reconfigure import all_serve, composition

#: So little capacity that any request is an overload.
HASTY: dict[str, Any] = {"window_s": 0.2, "persistence": 1, "rho": 1e-6}


def policy(mode: str) -> PolicyConfig:
    return PolicyConfig(queue_timeout_s=2.0, controller=ControllerConfig(mode=mode, **HASTY))


async def overloaded(it: Running) -> dict[str, Any]:
    """The decision to split."""
    assert (await it.chat()).status == 200
    controller = it.router.core.controller
    assert controller is not None
    await until(lambda: any(one.chosen for one in controller.decisions), "a decision")
    answer = (await composition(it))["controller"]
    return next(one for one in answer["last_decisions"] if one["chosen"])


def test_on_it_moves_the_pool_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with FakePool(2, "1x2") as pool, running(pool.url, policy=policy("on")) as it:
            await all_serve(it, 2)
            decision = await overloaded(it)
            await all_serve(it, 1, 1)
            assert [command.composition for command, _ in pool.regroups] == ["2x1"]
            assert (decision["mode"], decision["action"]) == ("on", "split")
            assert (decision["reason"], decision["requests"]) == ("overload", 1)
            assert decision["utilisation"] > decision["upper"] == 0.75
            move = {
                "pool": "fake",
                "from": "1x2",
                "to": "2x1",
                "blocks": ["0x2"],
                "into": ["0x1", "1x1"],
                "reconcile_tokens": 0,
            }
            assert decision["chosen"] == move | {"predicted_drain_s": 0.0}
            (candidate,) = decision["candidates"]
            assert move.items() <= candidate.items()
            assert candidate["excluded"] is None
            assert candidate["capacity_s"] > decision["capacity_s"]
            assert set(decision["kappa_s"]) == {"1", "2", "4"}  # of all that is priced
            assert decision["age_s"] >= 0
            await until(lambda: it.router.core.moving(PoolId("fake")) is None, "it is over")
            assert (await composition(it))["controller"]["mode"] == "on"

    run(scenario())
    assert "split pool fake from 1x2 to 2x1: demand is " in caplog.text


def test_observing_it_leaves_the_pool_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        async with FakePool(2, "1x2") as pool, running(pool.url, policy=policy("observe")) as it:
            await all_serve(it, 2)
            decision = await overloaded(it)
            assert (decision["action"], decision["chosen"]["to"]) == ("split", "2x1")
            assert pool.regroups == []
            assert (await composition(it))["controller"]["mode"] == "observe"

    run(scenario())
    assert "would split pool fake from 1x2 to 2x1" in caplog.text


def test_its_decisions_are_metrics() -> None:
    async def scenario() -> None:
        async with FakePool(2, "1x2") as pool, running(pool.url, policy=policy("observe")) as it:
            await all_serve(it, 2)
            decision = await overloaded(it)
            samples = await it.samples()
            split = 'vertumnus_controller_decisions_total{action="split",reason="overload"}'
            assert samples[split] == 1.0
            assert samples["vertumnus_controller_capacity_seconds"] == decision["capacity_s"]
            assert samples["vertumnus_controller_demand_seconds"] >= 0
            assert samples["vertumnus_controller_utilisation"] >= 0

    run(scenario())


def test_off_there_is_nothing_of_it() -> None:
    async def scenario() -> None:
        off = policy("off")
        async with FakePool(2, "1x2") as pool, running(pool.url, policy=off) as it:
            await all_serve(it, 2)
            assert (await it.chat()).status == 200
            assert (await composition(it))["controller"] == {"mode": "off", "last_decisions": []}
            assert not any("controller" in name for name in await it.samples())

    run(scenario())
