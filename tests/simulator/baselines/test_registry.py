"""Baselines by name, knobs by ``KEY=VALUE``."""

import pytest
from vertumnus_sim.baselines import BASELINES, BaselineError, make_baseline, parse_knobs

from tests.router.core.scene import IDEAL


@pytest.mark.parametrize("name", BASELINES)
def test_the_grid_is_settings_that_work(name: str) -> None:
    baseline = BASELINES[name]
    assert baseline.grid
    assert len({tuple(sorted(setting.items())) for setting in baseline.grid}) == len(baseline.grid)
    for setting in baseline.grid:
        assert make_baseline(name, setting, IDEAL).rule.name == name


@pytest.mark.parametrize("name", BASELINES)
def test_every_knob_says_what_it_does(name: str) -> None:
    lines = BASELINES[name].describe().splitlines()
    assert len(lines) == len(BASELINES[name].knobs.__struct_fields__)
    for line, field in zip(lines, BASELINES[name].knobs.__struct_fields__, strict=True):
        assert line.startswith(f"  {field}=")
        assert len(line.partition(": ")[2]) > 10


def test_text_and_numbers_are_the_same() -> None:
    texts = parse_knobs(["cache_threshold=0.5", "balance_abs_threshold=8"])
    knobs = make_baseline("cache_aware", texts, IDEAL).rule._knobs
    assert (knobs.cache_threshold, knobs.balance_abs_threshold) == (0.5, 8)
    assert (
        knobs
        == make_baseline(
            "cache_aware", {"cache_threshold": 0.5, "balance_abs_threshold": 8}, IDEAL
        ).rule._knobs
    )


def test_an_unknown_baseline_names_the_choices() -> None:
    with pytest.raises(BaselineError, match="choose one of least_loaded, round_robin"):
        make_baseline("sglang", {}, IDEAL)


@pytest.mark.parametrize(
    ("name", "knobs", "words"),
    [
        ("cache_aware", {"threshold": 1}, "no knob 'threshold'"),
        ("cache_aware", {"cache_threshold": 1.5}, "<= 1.0"),
        ("cache_aware", {"cache_threshold": "nan"}, "not a finite number"),
        ("cache_aware", {"cache_threshold": "half"}, "Expected `float`"),
        ("cache_aware", {"balance_rel_threshold": 0.5}, ">= 1"),
        ("cache_aware", {"fallback": "any"}, "Invalid enum value 'any'"),
        ("static_length", {"threshold_tokens": 0}, ">= 1"),
        ("static_length", {"beta": 0}, "> 0"),
        ("dynamo_like", {"temperature": -1}, ">= 0"),
        ("least_loaded", {"measure": "seconds"}, "Invalid enum value 'seconds'"),
    ],
)
def test_a_setting_that_cannot_work_names_the_knobs(
    name: str, knobs: dict[str, float | str], words: str
) -> None:
    with pytest.raises(BaselineError) as caught:
        make_baseline(name, knobs, IDEAL)
    assert words in str(caught.value)
    for field in BASELINES[name].knobs.__struct_fields__:
        assert f"  {field}=" in str(caught.value)


def test_one_without_knobs_says_so() -> None:
    with pytest.raises(BaselineError, match="it has no knobs"):
        make_baseline("round_robin", {"step": 2}, IDEAL)


@pytest.mark.parametrize("text", ["beta", "beta=", "=3", ""])
def test_a_knob_is_key_and_value(text: str) -> None:
    with pytest.raises(BaselineError, match="KEY=VALUE"):
        parse_knobs([text])


def test_a_knob_is_set_once() -> None:
    with pytest.raises(BaselineError, match="twice"):
        parse_knobs(["beta=1", "beta=2"])
