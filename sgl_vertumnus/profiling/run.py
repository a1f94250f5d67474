"""One run of the profiler, from an idle pool to a written profile."""

import datetime
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from vertumnus_router.clock import WallClock

from sgl_vertumnus.errors import ConfigurationError
from sgl_vertumnus.profiling.capacity import Slo, attainment, largest_load, poisson
from sgl_vertumnus.profiling.fit import Fit, FitError, check_cells, fit, medians
from sgl_vertumnus.profiling.live_pool import LivePool
from sgl_vertumnus.profiling.load import run_load
from sgl_vertumnus.profiling.measure import Measuring
from sgl_vertumnus.profiling.plan import Cell, Plan, composition_for
from sgl_vertumnus.profiling.progress import Progress
from sgl_vertumnus.profiling.record import RECORD_VERSION, Header, Record, Trial, open_record
from sgl_vertumnus.profiling.reports import PrefillReports, own_prefix, prefill_reports
from sgl_vertumnus.profiling.result import make_profile, report, write_profile

#: Long enough for a heartbeat after the last request of somebody who has just left.
IDLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Search:
    """How κ is looked for: prompts of ``lengths`` for ``seconds`` a trial, ``steps`` at most."""

    lengths: tuple[int, ...]
    mix: str
    slo: Slo
    seconds: float
    steps: int

    def describe(self) -> dict[str, str]:
        """What two runs must have in common."""
        return {
            "mix": self.mix,
            "deadlines_s": ",".join(f"{one:g}" for one in self.slo.deadlines_s),
            "target": f"{self.slo.target:g}",
            "seconds": f"{self.seconds:g}",
            "steps": str(self.steps),
        }


def profile_pool(
    pool: LivePool,
    plan: Plan,
    out: Path,
    *,
    time: str,
    resume: bool,
    search: Search | None,
    say: Callable[[str], None],
) -> Record:
    """Measure, fit, and write the profile to ``out``; the samples are beside it. The pool ends in
    the composition that it was in.

    Raises:
        ConfigurationError: when the run cannot be done as asked.
        PoolError: when the pool is in use, or fails.
        FitError: when what was measured does not determine the coefficients.
    """
    check_plan(plan)
    prefix = own_prefix(WallClock())
    with prefill_reports(pool.description, pool.url, prefix) as heard:
        reports = _source(time, heard)
        header = Header(
            version=RECORD_VERSION,
            pool_size=pool.description.pool_size,
            kind=pool.kind,
            sglang_version=pool.description.sglang_version,
            manifest=pool.description.manifest,
            time="ttft" if reports is None else "leader",
            plan=plan,
            search=None if search is None else search.describe(),
        )
        pool.wait_idle(IDLE_S)
        record = open_record(samples_path(out), header, resume=resume)
        try:
            with pool.put_back() as composition:
                say(f"the pool serves as {composition}, and will again")
                _measure(pool, plan, record, reports, prefix, search, say)
                model = fit(medians(record.samples))
                kappa = {} if search is None else _kappa(pool, plan, model, record, search, say)
        finally:
            record.close()
    profile = make_profile(
        pool,
        record,
        date=datetime.date.today().isoformat(),
        kappa=kappa,
        kappa_note="" if search is None else _kappa_note(search),
    )
    write_profile(profile, out)
    say(report(profile, record))
    say(f"written: {out}")
    return record


def check_plan(plan: Plan) -> None:
    """``ConfigurationError`` when a fit to it could not succeed."""
    try:
        check_cells(plan.cells(0))
    except FitError as exc:
        raise ConfigurationError(str(exc)) from exc


def samples_path(out: Path) -> Path:
    """Where the measurements of the profile ``out`` are."""
    return out.with_suffix(".samples.jsonl")


def _source(time: str, heard: PrefillReports | None) -> PrefillReports | None:
    if time == "leader" and heard is None:
        raise ConfigurationError(
            "--time leader: the pool's reports cannot be heard from here; run on its host, or "
            "take --time ttft"
        )
    return None if time == "ttft" else heard


def _measure(
    pool: LivePool,
    plan: Plan,
    record: Record,
    reports: PrefillReports | None,
    prefix: str,
    search: Search | None,
    say: Callable[[str], None],
) -> None:
    done = len(record.samples)
    if done < plan.size:
        progress = Progress(sys.stderr, plan.size, done)
        try:
            measuring = Measuring(pool, plan, record, progress, reports, prefix)
            minutes = measuring.estimate_s() / 60
            progress.say(
                f"{plan.size - done} prefills to measure by {record.header.time} time: about "
                f"{minutes:.1f} min, judged by two short prompts"
            )
            measuring.run()
        finally:
            progress.close()
    if search is not None:
        most_s = len(plan.degrees) * search.steps * (search.seconds + max(search.slo.deadlines_s))
        say(f"then κ, which takes {most_s / 60:.1f} min at most")


def _kappa(
    pool: LivePool,
    plan: Plan,
    model: Fit,
    record: Record,
    search: Search,
    say: Callable[[str], None],
) -> dict[int, float]:
    """By degree; one that misses the SLO at any load is left out, which is said."""
    found = {}
    for degree in plan.degrees:
        load = largest_load(_meets(pool, degree, plan, model, record, search, say), search.steps)
        if load is None:
            say(f"degree {degree}: no κ, it misses the SLO at any load that was tried")
        else:
            found[degree] = load
    return found


def _meets(
    pool: LivePool,
    degree: int,
    plan: Plan,
    model: Fit,
    record: Record,
    search: Search,
    say: Callable[[str], None],
) -> Callable[[float], bool]:
    def service_s(tokens: int) -> float:
        return model.seconds(Cell(degree=degree, uncached_tokens=tokens, cached_tokens=0))

    def meets(load: float) -> bool:
        trial = record.trial(degree, load)
        if trial is None:
            size, degrees = pool.description.pool_size, pool.description.degrees
            pool.move(composition_for(degree, size, degrees))
            arrivals = poisson(
                search.lengths, service_s, load=load, seconds=search.seconds, seed=plan.seed
            )
            outcomes = run_load(
                pool,
                arrivals,
                search.slo,
                prefix=own_prefix(WallClock()),
                seed=f"degree {degree} at {load} of {plan.seed}",
                highest_id=plan.highest_id,
            )
            trial = Trial(
                degree=degree,
                load=load,
                attainment=attainment(search.slo, outcomes),
                requests=len(outcomes),
            )
            record.add(trial)
        say(
            f"degree {degree} at load {load:.2f}: {trial.attainment:.1%} of the tokens of "
            f"{trial.requests} prompts in time"
        )
        return trial.attainment >= search.slo.target

    return meets


def _kappa_note(search: Search) -> str:
    deadlines = ", ".join(f"{deadline:g}" for deadline in search.slo.deadlines_s)
    return (
        f"κ: {search.slo.target:.0%} of tokens within {deadlines} s (below 8K, below 32K, longer), "
        f"cold prompts of {search.mix}."
    )


def mix_lengths(lengths: Sequence[int], most_tokens: int, seed: int) -> tuple[int, ...]:
    """A thousand lengths, each as often as gives every one of ``lengths`` the same tokens."""
    fit_in = sorted({length for length in lengths if length <= most_tokens})
    weights = [1 / length for length in fit_in]
    return tuple(Random(f"mix of {seed}").choices(fit_in, weights, k=1000))
