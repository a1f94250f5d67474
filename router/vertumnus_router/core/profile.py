"""The coefficients of the prefill-time model as measured on one device for one model.

A profile is a JSON file. It says where its numbers come from; nothing is filled in for a
degree that it does not cover.
"""

import datetime
import math
from collections.abc import Mapping

import msgspec

PROFILE_VERSION = 1


class ProfileError(ValueError):
    """The profile cannot be used; the message names the field and what it should be."""


class Coefficients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What depends on the degree C: ``d_C`` a prefill, ``a_C`` an uncached token."""

    d_s: float
    a_s_per_token: float


class DegreeFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``d_C = d0 + d1·log2 C`` and ``a_C = a0 + a1·log2 C``, for degrees that were not profiled."""

    d0_s: float
    d1_s: float
    a0_s_per_token: float
    a1_s_per_token: float

    def at(self, degree: int) -> Coefficients:
        steps = math.log2(degree)
        return Coefficients(
            d_s=self.d0_s + self.d1_s * steps,
            a_s_per_token=self.a0_s_per_token + self.a1_s_per_token * steps,
        )


class PoolKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What prefill times depend on, in the words of a pool's description: ``device`` a rank and
    what it may use of it, ``model`` the shape and the type of the weights."""

    device: str
    model: str


class ErrorSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of |predicted / measured − 1|."""

    mean: float
    p90: float
    max: float


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the coefficients of one degree rest on: the least and the most tokens that were
    measured, and how far the fit is from the medians of repetitions (``error``) and from single
    repetitions that a fit without them predicts (``held_out``)."""

    uncached_tokens: tuple[int, int]
    cached_tokens: tuple[int, int]
    samples: int
    error: ErrorSummary
    held_out: ErrorSummary | None = None

    def covers(self, uncached_tokens: int, cached_tokens: int) -> bool:
        """Whether R and P lie in what was measured."""
        return (
            self.uncached_tokens[0] <= uncached_tokens <= self.uncached_tokens[1]
            and self.cached_tokens[0] <= cached_tokens <= self.cached_tokens[1]
        )


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients of ``Ê_C(R, P) = d_C + a_C·R + b·P + (1/C)·(c·R + α·W(R, P))`` (section 4).

    ``measured`` is False for a default that nobody profiled on the machine at hand. ``kappa`` is
    the κ_C of section 6 per second and in the degree's own time: how many seconds of work Ê_C a
    worker can be given per second and still meet the SLO; degrees that were not profiled for it
    are absent. ``measured_on`` and ``measurements`` come from the profiler; a profile without
    them says nothing of where it holds.
    """

    version: int
    device: str
    model: str
    sglang_version: str
    date: str
    measured: bool
    note: str
    degrees: dict[int, Coefficients]
    b_s_per_token: float
    c_s_per_token: float
    alpha_s_per_pair: float
    fit: DegreeFit | None = None
    kappa: dict[int, float] = {}
    measured_on: PoolKind | None = None
    measurements: dict[int, Measurement] = {}

    def coefficients(self, degree: int) -> Coefficients:
        """``d_C, a_C``; ``ProfileError`` for a degree that the profile does not cover."""
        known = self.degrees.get(degree)
        if known is not None:
            return known
        if self.fit is not None:
            return self.fit.at(degree)
        raise ProfileError(
            f"the profile of {self.model} on {self.device} has no degree {degree}, only "
            f"{', '.join(map(str, sorted(self.degrees)))}: profile it, or give the profile a fit"
        )

    def misfit(self, device: str, model: str) -> str | None:
        """Why the profile is not one of pools of that ``PoolKind``, or None. What either side
        does not know, the empty string or no ``measured_on``, is not compared."""
        if self.measured_on is None:
            return None
        pairs = (("device", device), ("model", model))
        for name, there in pairs:
            measured = getattr(self.measured_on, name)
            if there and measured and there != measured:
                return f"the profile was measured on the {name} {measured!r}, not on {there!r}"
        return None

    def extrapolates(self, degree: int, uncached_tokens: int, cached_tokens: int) -> bool:
        """Whether Ê_C(R, P) lies outside what was measured. False where the profile does not
        say what was."""
        if not self.measurements:
            return False
        known = self.measurements.get(degree)
        return known is None or not known.covers(uncached_tokens, cached_tokens)


def decode_profile(data: bytes, source: str) -> Profile:
    """The profile in the JSON ``data``; ``ProfileError`` names ``source`` and what is wrong."""
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.MsgspecError as exc:
        raise ProfileError(f"{source}: not a profile: {exc}") from exc
    faults = list(_faults(profile))
    if faults:
        raise ProfileError(f"{source}: " + "; ".join(faults))
    return profile


def _faults(profile: Profile) -> list[str]:
    if profile.version != PROFILE_VERSION:
        return [f"version {profile.version}, this router reads version {PROFILE_VERSION}"]
    faults = []
    for name in ("device", "model", "sglang_version"):
        if not getattr(profile, name).strip():
            faults.append(f"{name} is empty: say where the numbers come from")
    try:
        datetime.date.fromisoformat(profile.date)
    except ValueError:
        faults.append(f"date {profile.date!r} is not YYYY-MM-DD")
    if not profile.degrees and profile.fit is None:
        faults.append("neither degrees nor a fit: no degree could be priced")
    values = {
        "b_s_per_token": profile.b_s_per_token,
        "c_s_per_token": profile.c_s_per_token,
        "alpha_s_per_pair": profile.alpha_s_per_pair,
    }
    for degree, load in profile.kappa.items():
        if profile.fit is None and degree not in profile.degrees:
            faults.append(f"kappa: degree {degree} has no coefficients")
        if not (math.isfinite(load) and load > 0):
            faults.append(f"kappa.{degree} is {load}, not a finite load above 0")
    listings: dict[str, Mapping[int, object]] = {
        "degrees": profile.degrees,
        "kappa": profile.kappa,
        "measurements": profile.measurements,
    }
    for name, listed in listings.items():
        for degree in listed:
            if degree < 1 or degree & (degree - 1):
                faults.append(f"{name}: {degree} is not a power of two")
    for degree, at in profile.degrees.items():
        values[f"degrees.{degree}.d_s"] = at.d_s
        values[f"degrees.{degree}.a_s_per_token"] = at.a_s_per_token
    if profile.fit is not None:
        fit = msgspec.structs.asdict(profile.fit)
        values |= {f"fit.{name}": value for name, value in fit.items()}
    for name, value in values.items():
        # A negative coefficient would make some prompt cost less than nothing.
        if not math.isfinite(value) or value < 0:
            faults.append(f"{name} is {value}, not a finite number of seconds >= 0")
    if not profile.c_s_per_token and not profile.alpha_s_per_pair:
        faults.append("c_s_per_token and alpha_s_per_pair are both 0: nothing to parallelise")
    return faults
