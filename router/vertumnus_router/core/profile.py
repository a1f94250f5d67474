"""The coefficients of the prefill-time model as measured on one device for one model.

A profile is a JSON file. It says where its numbers come from; nothing is filled in for a
degree that it does not cover.
"""

import datetime
import math

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


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coefficients of ``Ê_C(R, P) = d_C + a_C·R + b·P + (1/C)·(c·R + α·W(R, P))`` (section 4).

    ``measured`` is False for a default that nobody profiled on the machine at hand.
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
    for degree, at in profile.degrees.items():
        if degree < 1 or degree & (degree - 1):
            faults.append(f"degrees: {degree} is not a power of two")
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
