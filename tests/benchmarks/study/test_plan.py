"""Who runs where: names, settings and compositions that work."""

import pytest
from vertumnus_bench.study.contenders import CONTENDERS, LATE, OVER_TIME, Contender, Role
from vertumnus_bench.study.loads import LOADS, QUICK_LOADS
from vertumnus_bench.study.plan import TUNING_SEED, full_plan, quick_plan
from vertumnus_bench.study.point import DEGREES, GPUS, NODE_GPUS, StudyError
from vertumnus_bench.study.sensitivity import BANDWIDTH, MEMORY, SWITCH, variants
from vertumnus_bench.study.tuning import Choice
from vertumnus_router.profiles import load_profile
from vertumnus_sim import settings
from vertumnus_sim.policies import make_router
from vertumnus_sim.scenario import Delays, Hardware, lay_out

_ALL = (*CONTENDERS, *OVER_TIME)
_BY_NAME = {contender.name: contender for contender in _ALL}


def check(of: Contender, given: dict[str, str]) -> None:
    """Raises ``ValueError`` unless the simulator takes these settings."""

    def own(prefix: str) -> dict[str, str]:
        return {n.removeprefix(prefix): v for n, v in given.items() if n.startswith(prefix)}

    settings.apply(Delays(), own("delays."))
    hardware = settings.apply(Hardware(), own("hardware."))
    policy = {n: v for n, v in given.items() if not n.startswith(("hardware.", "delays."))}
    make_router(of.policy, policy, load_profile("qwen3-30b-a3b-h20"), hardware, 0)


@pytest.mark.parametrize("name", _BY_NAME)
def test_the_simulator_takes_all_that_a_contender_may_be(name: str) -> None:
    of = _BY_NAME[name]
    assert (of.like is None) == bool(of.compositions)
    for mix in of.compositions:
        lay_out(mix, GPUS, NODE_GPUS, DEGREES)
    for knobs in ({}, *of.grid):
        check(of, {**of.settings, **{n: str(v) for n, v in knobs.items()}})


def test_names_are_unique_and_ours_have_one_setting() -> None:
    assert len(_BY_NAME) == len(_ALL)
    ours = [of for of in _ALL if of.role in (Role.OURS, Role.BOUND)]
    assert all(len(of.compositions) == 1 and not of.grid for of in ours)
    assert all(of.like in _BY_NAME for of in _ALL if of.like)


def test_the_simulator_takes_all_variants() -> None:
    for variant in variants(quick=False):
        of = _BY_NAME[variant.contender]
        check(of, {**of.settings, **variant.settings})


def test_quick_is_a_part_of_the_whole() -> None:
    def points(quick: bool) -> set[tuple[str, float, str]]:
        return {(v.assumption, v.value, v.series) for v in variants(quick=quick)}

    assert points(True) < points(False)
    assert {v for a, v, _ in points(False) if a == SWITCH} == {0, 20, 50, 100, 200}
    assert {v for a, v, _ in points(False) if a == BANDWIDTH} == {1, 2, 5, 20}
    whole = {load.workload: load.rates for load in LOADS}
    assert all(set(load.rates) <= set(whole[load.workload]) for load in QUICK_LOADS)


def test_what_is_called_without_pull_does_not_pull() -> None:
    pulling = {
        variant.series: variant.settings.get("prefix.pull") for variant in variants(quick=True)
    }
    assert pulling["fluid without pull"] == "false"
    assert pulling["fluid"] is None and _BY_NAME["fluid"].settings["prefix.pull"] == "true"


def test_layouts_of_kv_differ_in_one_thing_at_both_sizes_of_memory() -> None:
    found = {(v.series, v.value): v for v in variants(quick=False) if v.assumption == MEMORY}
    others = [(series, value) for series, value in found if ", " in series]
    assert len(others) == 6
    for series, value in others:
        plain, other = found[series.partition(", ")[0], value], found[series, value]
        assert plain.contender == other.contender
        assert len(other.settings.items() - plain.settings.items()) == 1
        assert plain.settings.items() < other.settings.items()


def test_a_part_of_the_workloads() -> None:
    plan = full_plan().on(["varying", "conversation"])
    assert [load.workload for load in plan.loads] == ["conversation", "varying"]
    assert plan.contenders == full_plan().contenders
    with pytest.raises(StudyError, match="no workload 'chat': there are conversation, tool-agent"):
        full_plan().on(["chat"])


def test_a_part_of_the_contenders() -> None:
    plan = full_plan().of(["late", "late_best_mix"])
    assert [one.name for one in plan.contenders] == ["paper", "late_best_mix", "late"]
    assert {one.contender for one in plan.variants} == {"paper", "late"}
    assert plan.over_time == full_plan().over_time
    with pytest.raises(StudyError, match="no contender 'luck': there are homogeneous_1"):
        full_plan().of(["luck"])


def test_contenders_are_tuned_at_the_highest_load_or_at_each() -> None:
    lowest, *_, highest = next(one.rates for one in LOADS if one.workload == "conversation")
    asked = ("conversation", lowest)
    assert full_plan().tuning_case(asked) == ("conversation", highest)
    assert full_plan(tune_each_load=True).tuning_case(asked) == asked
    assert quick_plan().variant_case in quick_plan().cases


def test_a_varying_workload_is_run_to_its_end_and_over_time() -> None:
    plan, choice = quick_plan(requests=7), Choice("40x1", {})
    varying = plan.point(_BY_NAME[LATE], ("varying", None), choice, 1)
    assert (varying.requests, varying.over_time, varying.phase_share) == (None, True, 0.03)
    other = plan.point(_BY_NAME[LATE], ("conversation", 20), choice, 1)
    assert (other.requests, other.over_time, other.phase_share) == (7, False, 1.0)


@pytest.mark.parametrize("seeds", [(), (1, 1), (1, TUNING_SEED)])
def test_seeds_that_would_mean_nothing_are_refused(seeds: tuple[int, ...]) -> None:
    with pytest.raises(StudyError, match="seed"):
        full_plan(seeds=seeds)
