import json
from pathlib import Path
from typing import Any

import pytest
from vertumnus_router.core.profile import ProfileError, decode_profile
from vertumnus_router.profiles import DEFAULT, load_profile, shipped

GOOD: dict[str, Any] = {
    "version": 1,
    "device": "a device",
    "model": "a model",
    "sglang_version": "0.5.23",
    "date": "2026-11-30",
    "measured": True,
    "note": "",
    "degrees": {"1": {"d_s": 0.02, "a_s_per_token": 1e-5}},
    "b_s_per_token": 6e-7,
    "c_s_per_token": 3e-5,
    "alpha_s_per_pair": 3e-9,
}
ERROR = {"mean": 0.02, "p90": 0.04, "max": 0.1}
MEASURED: dict[str, Any] = {
    "measured_on": {"device": "a GPU", "model": "a shape"},
    "measurements": {
        "1": {
            "uncached_tokens": [32, 8192],
            "cached_tokens": [0, 4096],
            "samples": 60,
            "error": ERROR,
            "held_out": ERROR,
        }
    },
}
FIT = {"d0_s": 0.02, "d1_s": 0.015, "a0_s_per_token": 1e-5, "a1_s_per_token": 2e-6}


def decode(**changes: Any) -> Any:
    return decode_profile(json.dumps(GOOD | changes).encode(), "here.json")


def test_a_degree_outside_the_profile_is_refused_by_name() -> None:
    with pytest.raises(ProfileError, match="no degree 4, only 1: profile it"):
        decode().coefficients(4)


def test_a_fit_covers_the_degrees_that_were_not_profiled() -> None:
    profile = decode(fit=FIT)
    assert profile.coefficients(1).d_s == 0.02  # as profiled
    assert profile.coefficients(4).d_s == pytest.approx(0.02 + 2 * 0.015)
    assert profile.coefficients(4).a_s_per_token == pytest.approx(1.4e-5)


def test_measured_loads_are_optional() -> None:
    assert decode().kappa == {}
    assert decode(kappa={"1": 0.6, "2": 0.7}, fit=FIT).kappa == {1: 0.6, 2: 0.7}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 2}, "version 2, this router reads version 1"),
        ({"device": " "}, "device is empty"),
        ({"date": "yesterday"}, "date 'yesterday' is not YYYY-MM-DD"),
        ({"degrees": {}}, "neither degrees nor a fit"),
        ({"degrees": {"3": {"d_s": 1, "a_s_per_token": 0}}}, "3 is not a power of two"),
        ({"degrees": {"1": {"d_s": -1, "a_s_per_token": 0}}}, r"degrees\.1\.d_s is -1"),
        ({"b_s_per_token": -1e-9}, "b_s_per_token is -1e-09"),
        ({"fit": FIT | {"d1_s": -1.0}}, r"fit\.d1_s is -1"),
        ({"c_s_per_token": 0, "alpha_s_per_pair": 0}, "nothing to parallelise"),
        ({"c_s_per_token": "fast"}, "c_s_per_token"),
        ({"kappa": {"1": 0}}, r"kappa\.1 is 0"),
        ({"measurements": {"3": MEASURED["measurements"]["1"]}}, "3 is not a power of two"),
        ({"measurements": {"1": {"samples": 3}}}, "not a profile"),
        ({"kappa": {"2": 0.5}}, "kappa: degree 2 has no coefficients"),
        ({"kappa": {"3": 0.5}, "fit": FIT}, "kappa: 3 is not a power of two"),
        ({"gamma": 1}, "gamma"),
        ({"measured": None}, "measured"),
    ],
)
def test_a_profile_that_cannot_be_right_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ProfileError, match=says) as caught:
        decode(**changes)
    assert str(caught.value).startswith("here.json: ")


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(ProfileError, match=r"device is empty.*date.*b_s_per_token"):
        decode(device="", date="", b_s_per_token=-1)


def test_missing_field_and_no_json() -> None:
    with pytest.raises(ProfileError, match="measured"):
        decode_profile(json.dumps({k: GOOD[k] for k in GOOD if k != "measured"}).encode(), "f")
    with pytest.raises(ProfileError, match="f: not a profile"):
        decode_profile(b"{", "f")


def test_the_default_profile_says_that_nobody_measured_it() -> None:
    profile = load_profile(DEFAULT)
    assert not profile.measured
    assert "replace it by profiling" in profile.note


def test_every_shipped_profile_loads() -> None:
    assert DEFAULT in shipped()
    for name in shipped():
        load_profile(name)


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(GOOD))
    assert load_profile(str(path)).model == "a model"
    with pytest.raises(ProfileError, match=f"neither a readable file .* nor one of.*{DEFAULT}"):
        load_profile(str(tmp_path / "none.json"))


def test_a_profile_says_what_it_was_measured_with() -> None:
    profile = decode(**MEASURED)
    assert profile.measurements[1].error.p90 == 0.04
    assert not profile.extrapolates(1, 32, 0) and not profile.extrapolates(1, 8192, 4096)
    assert profile.extrapolates(1, 31, 0) and profile.extrapolates(1, 8193, 0)
    assert profile.extrapolates(1, 100, 4097)
    assert profile.extrapolates(2, 100, 0), "not measured at all"
    assert not decode().extrapolates(1, 1, 1), "it does not say"


def test_a_profile_of_another_device_or_model_does_not_fit() -> None:
    profile = decode(**MEASURED)
    assert profile.misfit("a GPU", "a shape") is None
    assert "on the device 'a GPU', not on 'a CPU'" in str(profile.misfit("a CPU", "a shape"))
    assert "on the model 'a shape', not on 'another'" in str(profile.misfit("a GPU", "another"))
    assert profile.misfit("", "") is None, "the pool does not say"
    assert decode().misfit("a CPU", "another") is None, "the profile does not say"
