import math

import pytest
from vertumnus_router.core.model import CorrectionConfig, PrefillModel
from vertumnus_router.core.profile import Coefficients, DegreeFit, Profile, ProfileError
from vertumnus_router.profiles import DEFAULT, load_profile

from tests.router.core.scene import IDEAL

FULL = Profile(
    version=1,
    device="paper and pencil",
    model="none",
    sglang_version="0.5.23",
    date="2026-01-01",
    measured=False,
    note="",
    degrees={
        1: Coefficients(d_s=0.5, a_s_per_token=0.01),
        2: Coefficients(d_s=0.7, a_s_per_token=0.02),
    },
    b_s_per_token=0.001,
    c_s_per_token=0.04,
    alpha_s_per_pair=0.0002,
)


def test_the_formula_by_hand() -> None:
    # R = 10, P = 100: W = 10·100 + 10·11/2 = 1055
    model = PrefillModel(FULL)
    at_1 = 0.5 + 0.01 * 10 + 0.001 * 100 + (0.04 * 10 + 0.0002 * 1055)
    at_2 = 0.7 + 0.02 * 10 + 0.001 * 100 + (0.04 * 10 + 0.0002 * 1055) / 2
    assert model.service_s(1, 10, 100) == pytest.approx(at_1)
    assert model.service_s(2, 10, 100) == pytest.approx(at_2)


def test_short_prompts_lose_at_a_large_degree_and_long_ones_win() -> None:
    model = PrefillModel(FULL)
    assert model.service_s(2, 1, 0) > model.service_s(1, 1, 0)
    assert model.service_s(2, 1000, 0) < model.service_s(1, 1000, 0)


def test_a_degree_outside_the_profile_is_never_free() -> None:
    model = PrefillModel(FULL)
    with pytest.raises(ProfileError, match="no degree 4"):
        model.service_s(4, 10, 0)
    assert "no degree 4" in (model.fault(4) or "")
    assert model.fault(2) is None


def test_a_fit_prices_the_other_degrees() -> None:
    fit = DegreeFit(d0_s=0.5, d1_s=0.2, a0_s_per_token=0.0, a1_s_per_token=0.0)
    fields = {f: getattr(IDEAL, f) for f in IDEAL.__struct_fields__}
    model = PrefillModel(Profile(**fields | {"fit": fit}))
    assert model.service_s(8, 8000, 0) == pytest.approx(0.5 + 0.2 * 3 + 8.0 / 8)


def test_negative_tokens_are_a_bug() -> None:
    with pytest.raises(ValueError, match="-1 uncached"):
        PrefillModel(FULL).service_s(1, -1, 0)
    with pytest.raises(ValueError, match="-5 cached"):
        PrefillModel(FULL).service_s(1, 1, -5)


def test_reports_pull_the_estimate_towards_what_is_measured() -> None:
    model = PrefillModel(IDEAL, CorrectionConfig(gain=0.5))
    assert model.service_s(1, 1000, 0) == pytest.approx(1.0)
    model.observe(1, 1000, 0, 4.0)
    assert model.service_s(1, 1000, 0) == pytest.approx(2.0)  # half the way, in powers
    assert model.corrections()[1].samples == 1
    for _ in range(50):
        model.observe(1, 1000, 0, 4.0)
    assert model.service_s(1, 2000, 0) == pytest.approx(8.0)
    assert model.profiled_s(1, 2000, 0) == pytest.approx(2.0)


def test_each_degree_has_its_own_correction() -> None:
    model = PrefillModel(IDEAL, CorrectionConfig(gain=1.0))
    model.observe(2, 1000, 0, 1.0)
    assert model.service_s(2, 1000, 0) == pytest.approx(1.0)
    assert model.service_s(1, 1000, 0) == pytest.approx(1.0)
    assert set(model.corrections()) == {2}


def test_a_degree_that_was_never_tried_is_compared_by_its_nearest_neighbour() -> None:
    model = PrefillModel(IDEAL, CorrectionConfig(gain=1.0))
    assert model.compared_s(4, 1000, 0) == pytest.approx(0.25)
    model.observe(1, 1000, 0, 3.0)
    assert [model.compared_s(c, 1000, 0) for c in (1, 2, 4)] == pytest.approx([3.0, 1.5, 0.75])
    model.observe(4, 1000, 0, 0.5)
    assert model.compared_s(1, 1000, 0) == pytest.approx(3.0)
    assert model.compared_s(2, 1000, 0) == pytest.approx(1.5)  # as near to 4, which is larger
    assert model.compared_s(4, 1000, 0) == pytest.approx(0.5)


def test_too_slow_and_too_fast_cancel_out() -> None:
    model = PrefillModel(IDEAL, CorrectionConfig(gain=0.1))
    for _ in range(200):
        model.observe(1, 1000, 0, 2.0)
        model.observe(1, 1000, 0, 0.5)
    assert abs(math.log(model.corrections()[1].factor)) < 0.1


def test_an_absurd_report_is_bounded() -> None:
    model = PrefillModel(IDEAL, CorrectionConfig(gain=1.0, limit=10.0))
    model.observe(1, 1000, 0, 1e9)
    assert model.corrections()[1].factor == pytest.approx(10.0)
    model.observe(1, 1000, 0, 1e-9)
    assert model.corrections()[1].factor == pytest.approx(0.1)


@pytest.mark.parametrize(("uncached", "compute_s"), [(0, 1.0), (-3, 1.0), (10, 0.0), (10, -1.0)])
def test_a_report_that_says_nothing_is_left_out(uncached: int, compute_s: float) -> None:
    model = PrefillModel(IDEAL)
    model.observe(1, uncached, 0, compute_s)
    assert model.corrections() == {}


def test_gain_zero_switches_the_correction_off() -> None:
    model = PrefillModel(IDEAL, CorrectionConfig(gain=0.0))
    model.observe(1, 1000, 0, 9.0)
    assert model.service_s(1, 1000, 0) == 1.0


@pytest.mark.parametrize("bad", [{"gain": -0.1}, {"gain": 1.1}, {"limit": 0.5}])
def test_correction_settings_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="correction"):
        CorrectionConfig(**bad)


def test_the_default_profile_has_the_shape_that_was_seen() -> None:
    model = PrefillModel(load_profile(DEFAULT))
    at_1, at_2 = model.service_s(1, 1024, 0), model.service_s(2, 1024, 0)
    assert at_1 == pytest.approx(5.0, rel=0.02)
    assert at_1 / at_2 == pytest.approx(1.8, rel=0.02)
    assert model.service_s(2, 1, 0) > model.service_s(1, 1, 0)
    assert model.service_s(1, 24, 1000) < 0.05 * at_1
