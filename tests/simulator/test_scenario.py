"""Clusters, deaths, settings and figures: small values in, small values out."""

import math
from array import array
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vertumnus_router.core.config import ConfigError
from vertumnus_router.lattice import Block, format_composition
from vertumnus_sim import settings
from vertumnus_sim.metrics import figures, percentile, slo_attainment
from vertumnus_sim.policies import make_router, policy_config
from vertumnus_sim.scenario import Cluster, Death, Delays, Hardware, ScenarioError, lay_out
from vertumnus_sim.simulation import Outcome
from vertumnus_sim.timeline import Timeline

from tests.simulator.scene import HARDWARE, PROFILE, cluster

# -- the cluster ---------------------------------------------------------------------------------


def test_a_composition_is_dealt_out_evenly() -> None:
    nodes = lay_out("16x1,12x2", 40, 8, (1, 2, 4))
    assert [format_composition(node) for node in nodes] == [
        "3x2,2x1",
        "3x2,2x1",
        "2x2,4x1",
        "2x2,4x1",
        "2x2,4x1",
    ]
    assert lay_out("2x4,8x1", 16, 8, (1, 4)) == lay_out("8X1, 1x4 ,1x4", 16, 8, (1, 4))


@given(st.integers(1, 4), st.data())
def test_every_rank_of_every_node_is_in_one_block(nodes: int, data: st.DataObject) -> None:
    left, terms = 8 * nodes, []
    for degree in (8, 4, 2):
        count = data.draw(st.integers(0, left // degree))
        left -= count * degree
        terms.append(f"{count}x{degree}")
    found = lay_out(",".join([*terms, f"{left}x1"]), 8 * nodes, 8, (1, 2, 4, 8))
    for node in found:
        assert sorted(rank for block in node for rank in block.ranks) == list(range(8))
    for degree, term in zip((8, 4, 2), terms, strict=True):
        counts = [sum(block.degree == degree for block in node) for node in found]
        assert f"{sum(counts)}x{degree}" == term
        if degree == 8:
            assert max(counts) <= 1


@pytest.mark.parametrize(
    ("composition", "gpus", "node_gpus", "degrees", "message"),
    [
        ("6x1", 6, 6, (1,), "a node of 6 GPUs: nodes have a power of two"),
        ("12x1", 12, 8, (1,), "12 GPUs are no whole number of nodes of 8"),
        ("0x1", 0, 8, (1,), "0 GPUs are no whole number of nodes of 8"),
        ("8x1", 8, 8, (1, 3), "a degree is a power of two"),
        ("1x16", 16, 8, (16,), "larger than the pool of 8 rank"),
        ("7x1", 8, 8, (1,), "'7x1' has 7 GPUs, not 8"),
        ("9x1", 8, 8, (1,), "'9x1' has 9 GPUs, not 8"),
        ("2x4", 8, 8, (1, 2), "'2x4' is not COUNTxDEGREE with a degree of 1, 2"),
        ("", 8, 8, (1, 2), "'' is not COUNTxDEGREE"),
        ("8", 8, 8, (1, 2), "'8' is not COUNTxDEGREE"),
        ("-8x1", 8, 8, (1, 2), "'-8x1' is not COUNTxDEGREE"),
    ],
)
def test_what_cannot_be_laid_out_is_said(
    composition: str, gpus: int, node_gpus: int, degrees: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ScenarioError, match=message):
        lay_out(composition, gpus, node_gpus, degrees)


def test_a_death_is_read_from_text() -> None:
    assert Death.parse("120:0/3") == Death(120.0, 0, 3)
    assert Death.parse("0.5:12/0") == Death(0.5, 12, 0)
    for text in ("", "120", "120:0", "120:0/x", "x:0/1", "-1:0/1", "1:-1/0", "1:0/-1", "1:0/1/2"):
        with pytest.raises(ValueError, match="is not SECONDS:NODE/RANK, as in 120:0/3"):
            Death.parse(text)


@pytest.mark.parametrize("text", ["nan:0/1", "inf:0/1"])
def test_a_death_has_a_time(text: str) -> None:
    with pytest.raises(ValueError, match="is not SECONDS:NODE/RANK"):
        Death.parse(text)


def test_only_ranks_that_are_there_die() -> None:
    where = cluster("8x1", gpus=8)
    assert (where.gpus, len(where.compositions)) == (8, 2)
    assert replace(where, deaths=(Death(1.0, 1, 3),)).deaths
    for death in (Death(1.0, 2, 0), Death(1.0, 0, 4)):
        with pytest.raises(ScenarioError, match="to die: there are 2 nodes of 4, counted from 0"):
            replace(where, deaths=(death,))
    assert isinstance(where, Cluster) and Block(0, 1) in where.compositions[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_blocks", 0),
        ("chunk_tokens", -1),
        ("remote_bytes_per_s", 0.0),
        ("local_bytes_per_s", math.nan),
        ("noise", -0.1),
        ("noise", math.nan),
        ("copy_latency_s", -1.0),
    ],
)
def test_hardware_that_cannot_be_is_refused(name: str, value: float) -> None:
    with pytest.raises(ScenarioError, match=f"{name} {value}: must be"):
        replace(Hardware(), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("dispatch_s", -0.1), ("tick_s", 0.0)])
def test_delays_that_cannot_be_are_refused(name: str, value: float) -> None:
    with pytest.raises(ScenarioError, match=f"{name} {value}: must be"):
        replace(Delays(), **{name: value})


# -- the timeline --------------------------------------------------------------------------------


def test_acts_come_by_time_and_then_as_they_were_planned() -> None:
    timeline, found = Timeline(), list[tuple[float, str]]()

    def act(name: str) -> None:
        found.append((timeline.now, name))
        if name == "b":
            timeline.after(0.0, act, "last at 1")
            timeline.at(1.5, act, "d")

    for when_s, name in ((2.0, "e"), (1.0, "b"), (1.0, "c"), (0.0, "a")):
        timeline.at(when_s, act, name)
    timeline.run()
    order = [(0.0, "a"), (1.0, "b"), (1.0, "c"), (1.0, "last at 1"), (1.5, "d"), (2.0, "e")]
    assert found == order
    with pytest.raises(ValueError, match=r"it is 2.0 s, 1.0 s has passed"):
        timeline.at(1.0, act, "late")


# -- settings by name ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Inner:
    share: float = 0.5
    on: bool = False


@dataclass(frozen=True, slots=True)
class Outer:
    count: int = 1
    name: str = "x"
    limit: float | None = None
    inner: Inner = field(default_factory=Inner)
    pair: tuple[int, int] = (1, 2)

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ConfigError("count: must be 0 or more")


def test_settings_reach_every_part_and_nothing_else_changes() -> None:
    given_ = {"count": "7", "inner.on": "true", "inner.share": "0.25", "name": "y", "limit": "2"}
    assert settings.apply(Outer(), given_) == Outer(7, "y", 2.0, Inner(0.25, True))
    assert settings.apply(Outer(limit=3.0), {"limit": "none"}) == Outer()
    assert settings.apply(Outer(), {}) == Outer()
    assert settings.names(Outer()) == ["count", "name", "limit", "inner.share", "inner.on", "pair"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("size", "1", "no setting 'size'"),
        ("inner.size", "1", "no setting 'inner.size'"),
        ("count.size", "1", "no setting 'count.size'"),
        ("", "1", "no setting ''"),
        ("count", "1.5", "count=1.5: not a value of type int"),
        ("inner.share", "half", "inner.share=half: not a value of type float"),
        ("inner.on", "yes", "inner.on=yes: not a value of type bool"),
        ("limit", "nothing", "limit=nothing: not a value of type float"),
        ("inner", "1", "inner is no single value: set its parts"),
        ("pair", "1,2", "pair is no single value"),
        ("count", "-1", "count: must be 0 or more"),
    ],
)
def test_settings_that_cannot_be_are_refused(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings.apply(Outer(), {name: value})


def test_settings_that_only_go_together_may_be_given_in_any_order() -> None:
    below, above = ("prefix.theta_reclaim", "9"), ("prefix.theta_intra", "10")  # below 8 until then
    for given_ in (dict([below, above]), dict([above, below])):
        config = policy_config("late", given_, HARDWARE, 0).prefix
        assert (config.theta_reclaim, config.theta_intra) == (9.0, 10.0)
    with pytest.raises(ValueError, match=r"theta_reclaim 9.0: must be below theta_intra 8.0"):
        policy_config("late", dict([below]), HARDWARE, 0)


def test_a_policy_has_the_live_router_s_settings() -> None:
    given_ = {"late.ageing": "0.1", "prefix.pull": "true", "controller.mode": "on", "lam": "0.2"}
    config = policy_config("late", given_, HARDWARE, 3)
    assert (config.policy, config.seed, config.late.ageing, config.lam) == ("late", 3, 0.1, 0.2)
    assert config.prefix.pull and config.controller.mode == "on"
    assert config.prefix.local_bytes_per_s == HARDWARE.local_bytes_per_s
    default = policy_config("paper", {}, HARDWARE, 0)
    assert (default.prefix.mode, default.controller.mode) == ("off", "off")
    with pytest.raises(
        ValueError, match=r"policy late: no setting 'agein'. Its settings are .*lam"
    ):
        policy_config("late", {"agein": "1"}, HARDWARE, 0)
    with pytest.raises(ValueError, match=r"controller.mode 'loud': choose one of off, observe, on"):
        policy_config("late", {"controller.mode": "loud"}, HARDWARE, 0)
    for name in ("policy", "seed"):
        with pytest.raises(ValueError, match=f"{name} is not a setting of a policy"):
            policy_config("late", {name: "1"}, HARDWARE, 0)
    with pytest.raises(ValueError, match=r"policy 'best': choose one of .*paper, .*late"):
        make_router("best", {}, PROFILE, HARDWARE, 0)


# -- figures -------------------------------------------------------------------------------------


def test_percentiles_by_nearest_rank() -> None:
    ten = [float(n) for n in range(1, 11)]
    found = {percent: percentile(ten, percent) for percent in (0, 1, 10, 11, 50, 90, 91, 99, 100)}
    assert found == {0: 1, 1: 1, 10: 1, 11: 2, 50: 5, 90: 9, 91: 10, 99: 10, 100: 10}
    assert percentile([7.0], 50) == 7.0
    with pytest.raises(ValueError, match="no percentile of no values"):
        percentile([], 50)


def test_slo_attainment_weighs_by_tokens_and_has_a_deadline_per_length() -> None:
    # 8191 are short, 8192 and 32767 medium, 32768 long; a TTFT of just the deadline meets it.
    tokens = [8_191, 8_192, 32_767, 32_768]
    assert slo_attainment([1.0, 5.0, 5.0, 10.0], tokens, (1, 5, 10)) == 1.0
    assert slo_attainment([1.1, 5.1, 5.1, 10.1], tokens, (1, 5, 10)) == 0.0
    found = slo_attainment([0.5, 9.0, 2.0], [1_000, 10_000, 9_000], (1, 5, 10))
    assert found == pytest.approx(10_000 / 20_000)


def test_a_row_is_worked_out_by_hand() -> None:
    outcome = Outcome(
        ttft_s=array("d", [2.0, 0.5, 1.5, 4.0]),
        input_tokens=array("q", [1_000, 1_000, 2_000, 36_000]),
        cached_tokens=array("q", [0, 500, 1_500, 18_000]),
        requests_by_degree={2: 1, 1: 3},
        refused={"too large": 2, "no worker": 1},
        gpu_s=6.0,
        ended_s=10.0,
        moves=1,
        copies=2,
        copied_blocks=3,
        pulls=4,
        reclaims=5,
        extrapolated=6,
    )
    assert figures(outcome, 4, (1.0, 5.0, 10.0)) == {
        "requests": 4,
        "refused": 3,
        "mean_ms": 2_000.0,
        "p50_ms": 1_500.0,
        "p90_ms": 4_000.0,
        "p99_ms": 4_000.0,
        "slo_pct": pytest.approx(100 * 37_000 / 40_000),
        "hit_pct": 50.0,
        "gpu_s": 6.0,
        "utilisation_pct": 15.0,
        "by_degree": {1: 3, 2: 1},
        "moves": 1,
        "copies": 2,
        "pulls": 4,
        "copied_blocks": 3,
        "reclaims": 5,
        "extrapolated": 6,
    }


def test_without_a_request_there_are_no_figures() -> None:
    with pytest.raises(ValueError, match="that counts: fewer to warm up, or more requests"):
        figures(Outcome(), 4, (1.0, 5.0, 10.0))
    refused = Outcome(refused={"too_long": 2, "no_worker": 1})
    with pytest.raises(
        ValueError, match=r"that counts \(2 refused: too_long, 1 refused: no_worker"
    ):
        figures(refused, 4, (1.0, 5.0, 10.0))
