"""Finds what suits a contender: first a composition, then on the best of them the settings."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from vertumnus_bench.study.contenders import Contender
from vertumnus_bench.study.point import Point, Result

#: A workload and its rate.
Case = tuple[str, float | None]
Run = Callable[[str, Iterable[Point]], Mapping[Point, Result]]


@dataclass(frozen=True, slots=True)
class Choice:
    """``mean_ms`` of mean TTFT where it was tuned, None if there was nothing to choose."""

    composition: str
    settings: Mapping[str, str]
    mean_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """How a choice is tried: on the first ``requests``, with a seed that is used for nothing
    else."""

    requests: int | None
    seed: int
    phase_share: float
    grid_limit: int | None = None

    def point(self, contender: Contender, case: Case, choice: Choice) -> Point:
        workload, rate = case
        return Point.of(
            workload,
            rate,
            choice.settings,
            # Its first requests are not like its others.
            requests=self.requests if rate is not None else None,
            seed=self.seed,
            policy=contender.policy,
            composition=choice.composition,
            phase_share=self.phase_share if rate is None else 1.0,
        )


def tune(
    contenders: Sequence[Contender], cases: Sequence[Case], trial: Trial, run: Run
) -> dict[tuple[str, Case], Choice]:
    """The choice of every contender, by its name, in every case. The lowest mean TTFT wins among
    those that refused the fewest requests, of equal ones the first."""
    free = [contender for contender in contenders if contender.like is None]
    pairs = [(contender, case) for contender in free for case in cases]
    rough = _best(
        "compositions",
        {
            (contender, case): [
                Choice(mix, dict(contender.settings)) for mix in contender.compositions
            ]
            for contender, case in pairs
        },
        trial,
        run,
    )
    fine = _best(
        "settings",
        {
            (contender, case): [
                rough[contender.name, case],
                *(
                    Choice(
                        rough[contender.name, case].composition,
                        {**contender.settings, **{name: str(v) for name, v in knobs.items()}},
                    )
                    for knobs in contender.grid[: trial.grid_limit]
                ),
            ]
            for contender, case in pairs
        },
        trial,
        run,
    )
    for contender in contenders:
        if contender.like is None:
            continue
        for case in cases:
            other = fine[contender.like, case]
            taken = other.settings if contender.inherits else {}
            fine[contender.name, case] = Choice(other.composition, {**taken, **contender.settings})
    return fine


def _best(
    title: str,
    choices: Mapping[tuple[Contender, Case], Sequence[Choice]],
    trial: Trial,
    run: Run,
) -> dict[tuple[str, Case], Choice]:
    tried = {
        (contender, case): [(choice, trial.point(contender, case, choice)) for choice in among]
        for (contender, case), among in choices.items()
        if len(among) > 1
    }
    results = run(f"tuning, {title}", [point for pairs in tried.values() for _, point in pairs])
    best: dict[tuple[str, Case], Choice] = {}
    for (contender, case), among in choices.items():
        best[contender.name, case] = among[0]
        if pairs := tried.get((contender, case)):
            choice, point = min(pairs, key=lambda pair: _rank(results[pair[1]]))
            mean_ms = results[point].row.mean_ms
            best[contender.name, case] = Choice(choice.composition, choice.settings, mean_ms)
    return best


def _rank(result: Result) -> tuple[int, float]:
    return result.row.refused, result.row.mean_ms
