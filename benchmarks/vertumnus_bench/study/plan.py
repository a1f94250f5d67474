"""What a study simulates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from vertumnus_bench.study.contenders import CONTENDERS, OVER_TIME, Contender
from vertumnus_bench.study.loads import LOADS, QUICK_LOADS, VARYING, Load
from vertumnus_bench.study.point import Point, StudyError
from vertumnus_bench.study.sensitivity import Variant, variants
from vertumnus_bench.study.tuning import Case, Choice, Trial

#: Of no seed that is evaluated.
TUNING_SEED = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``seeds`` are evaluated on the first ``requests`` of each workload, a varying one to its
    end. Contenders are tuned at the highest load of a workload, with ``tune_each_load`` at each.
    """

    loads: tuple[Load, ...]
    seeds: tuple[int, ...]
    requests: int
    trial: Trial
    quick: bool = False
    tune_each_load: bool = False
    contenders: tuple[Contender, ...] = CONTENDERS
    over_time: tuple[Contender, ...] = OVER_TIME
    variants: tuple[Variant, ...] = ()
    variant_case: Case = ("conversation", 26)

    def __post_init__(self) -> None:
        if self.trial.seed in self.seeds:
            raise StudyError(f"seed {self.trial.seed} is the one for tuning: evaluate with others")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise StudyError("the seeds are one or more different numbers")

    def on(self, workloads: Sequence[str]) -> Self:
        """The plan for some of its workloads. Raises ``StudyError`` for one that it has not."""
        _check("workload", workloads, [load.workload for load in self.loads])
        return replace(self, loads=tuple(load for load in self.loads if load.workload in workloads))

    def of(self, contenders: Sequence[str]) -> Self:
        """The plan for some of its contenders, and whom these take their settings from; who is
        compared over time stays. Raises ``StudyError`` for one that it has not."""
        _check("contender", contenders, [one.name for one in self.contenders])
        asked = {one.name: one.like for one in self.contenders if one.name in contenders}
        names = {*asked, *asked.values()}
        return replace(
            self,
            contenders=tuple(one for one in self.contenders if one.name in names),
            variants=tuple(one for one in self.variants if one.contender in names),
        )

    @property
    def cases(self) -> list[Case]:
        return [(load.workload, rate) for load in self.loads for rate in load.rates]

    def tuning_case(self, case: Case) -> Case:
        """Where the choices for ``case`` are made."""
        if self.tune_each_load:
            return case
        (load,) = (load for load in self.loads if load.workload == case[0])
        return case[0], load.rates[-1]

    def point(self, contender: Contender, case: Case, choice: Choice, seed: int) -> Point:
        workload, rate = case
        varying = workload == VARYING
        return Point.of(
            workload,
            rate,
            choice.settings,
            requests=None if varying else self.requests,
            seed=seed,
            policy=contender.policy,
            composition=choice.composition,
            phase_share=self.trial.phase_share if varying else 1.0,
            over_time=varying,
        )


def _check(kind: str, asked: Sequence[str], known: Sequence[str]) -> None:
    for name in asked:
        if name not in known:
            raise StudyError(f"no {kind} {name!r}: there are {', '.join(known)}")


def full_plan(
    *,
    requests: int = 6_000,
    tuning_requests: int = 3_000,
    seeds: tuple[int, ...] = (1, 2, 3),
    tune_each_load: bool = False,
) -> Plan:
    return Plan(
        loads=LOADS,
        seeds=seeds,
        requests=requests,
        trial=Trial(tuning_requests, TUNING_SEED, 1.0),
        tune_each_load=tune_each_load,
        variants=tuple(variants(quick=False)),
    )


def quick_plan(
    *,
    requests: int = 300,
    tuning_requests: int = 150,
    seeds: tuple[int, ...] = (1,),
    tune_each_load: bool = False,
) -> Plan:
    """Proves that it runs; its figures mean nothing."""
    return Plan(
        loads=QUICK_LOADS,
        seeds=seeds,
        requests=requests,
        trial=Trial(tuning_requests, TUNING_SEED, 0.03, grid_limit=2),
        quick=True,
        tune_each_load=tune_each_load,
        variants=tuple(variants(quick=True)),
    )
