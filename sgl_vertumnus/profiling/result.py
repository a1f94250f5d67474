"""The profile from what was measured, and what it says in a table."""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import msgspec
from vertumnus_router.core.profile import (
    PROFILE_VERSION,
    Measurement,
    Profile,
    decode_profile,
)

from sgl_vertumnus.profiling.fit import Fit, fit, held_out, medians, relative_errors, summary
from sgl_vertumnus.profiling.live_pool import LivePool
from sgl_vertumnus.profiling.record import Record


def make_profile(
    pool: LivePool, record: Record, *, date: str, kappa: Mapping[int, float], kappa_note: str
) -> Profile:
    """Raises ``FitError`` when the samples do not determine the coefficients."""
    model = fit(medians(record.samples))
    header, description = record.header, pool.description
    time = "the leader's own report" if header.time == "leader" else "the time to the first token"
    note = f"Medians of {header.plan.repetitions} by {time}; {len(record.dropped)} dropped."
    return Profile(
        version=PROFILE_VERSION,
        device=description.device or "unknown",
        model=f"{description.model.served_name} ({description.model.shape or 'unknown'})",
        sglang_version=description.sglang_version,
        date=date,
        measured=True,
        note=f"{note} {kappa_note}".rstrip(),
        degrees=dict(model.degrees),
        b_s_per_token=model.b_s_per_token,
        c_s_per_token=model.c_s_per_token,
        alpha_s_per_pair=model.alpha_s_per_pair,
        kappa=dict(kappa),
        measured_on=pool.kind,
        measurements=_measurements(model, record),
    )


def write_profile(profile: Profile, path: Path) -> None:
    """As JSON that people read, checked as a router will."""
    data = msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"
    decode_profile(data, str(path))
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(data)
    partial.rename(path)


def report(profile: Profile, record: Record) -> str:
    """Errors by degree, and the spread of the repetitions."""
    spread = _spread(record)
    lines = ["degree  samples  spread  error mean   p90   max   held out mean   p90   max"]
    for degree, one in sorted(profile.measurements.items()):
        errors = [one.error.mean, one.error.p90, one.error.max]
        if one.held_out is not None:
            errors += [one.held_out.mean, one.held_out.p90, one.held_out.max]
        widths = (10, 6, 6, 16, 6, 6)
        cells = "".join(f"{e:{w}.1%}" for e, w in zip(errors, widths, strict=False))
        lines.append(f"{degree:6}  {one.samples:7}  {spread[degree]:6.1%}  {cells}")
    lines += [f"kappa at degree {degree}: {load:.2f}" for degree, load in profile.kappa.items()]
    return "\n".join(lines)


def _measurements(model: Fit, record: Record) -> dict[int, Measurement]:
    cells, kept_out = medians(record.samples), held_out(record.samples)
    found = {}
    for degree in model.degrees:
        mine = {cell: seconds for cell, seconds in cells.items() if cell.degree == degree}
        uncached = [cell.uncached_tokens for cell in mine]
        cached = [cell.cached_tokens for cell in mine]
        found[degree] = Measurement(
            uncached_tokens=(min(uncached), max(uncached)),
            cached_tokens=(min(cached), max(cached)),
            samples=sum(sample.cell.degree == degree for sample in record.samples),
            error=summary(relative_errors(model, mine.items())),
            held_out=kept_out.get(degree),
        )
    return found


def _spread(record: Record) -> dict[int, float]:
    """By degree: the mean over cells of (largest − smallest) / median of the repetitions."""
    by_cell = defaultdict(list)
    for sample in record.samples:
        by_cell[sample.cell].append(sample.seconds)
    by_degree = defaultdict(list)
    for cell, seconds in by_cell.items():
        by_degree[cell.degree].append((max(seconds) - min(seconds)) / statistics.median(seconds))
    return {degree: statistics.fmean(spreads) for degree, spreads in by_degree.items()}
