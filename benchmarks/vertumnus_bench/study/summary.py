"""Everything that a study found, as it is written."""

from pathlib import Path
from typing import Any

import msgspec

from vertumnus_bench.study.aggregate import Figures
from vertumnus_bench.study.components import Part
from vertumnus_bench.study.goals import Goal
from vertumnus_bench.study.point import Bin, StudyError

NOTE = (
    "Everything here is simulated: the router's own policy objects over a simulated cluster, with "
    "the prefill times of a profile. Nothing was measured on this cluster."
)
ORACLE_NOTE = (
    "oracle: policy fluid where copies, switches and the hand-over to decode take no time and "
    "every rank has room for the KV of the whole cluster. It bounds what a better cache and "
    "cheaper moves could give, by construction; it does not prove that no other order or "
    "placement does better."
)


class Series(msgspec.Struct, frozen=True):
    """TTFT over time, all seeds together; ``phases_ms`` is its mean in each phase."""

    policy: str
    bins: list[Bin]
    phases_ms: list[float | None]


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    assumption: str
    value: float
    series: str
    mean_ms: float
    p90_ms: float
    ci_ms: float | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``summary.json``. ``skipped``: workloads that were left out, and why; ``validity``: how far
    the simulator is from a real pool, as another benchmark measured it; ``code``: digest of the
    code that made the rows; ``sim_requests_per_s``: of all runs, per CPU second."""

    simulated: bool = True
    note: str = NOTE
    oracle_note: str = ORACLE_NOTE
    quick: bool
    profile: str
    gpus: int
    code: str
    seeds: list[int]
    tuning_seed: int
    requests: int
    tuning_requests: int | None
    origins: dict[str, str]
    skipped: dict[str, str]
    sim_requests_per_s: float
    sim_requests_per_s_by_policy: dict[str, float]
    validity: dict[str, Any] | None
    goals: list[Goal]
    components: list[Part]
    rows: list[Figures]
    over_time: list[Series]
    sensitivity_at: str
    sensitivity: list[Sensitivity]


def read_validity(path: Path) -> dict[str, Any]:
    """The errors of the simulator against a real pool, in percent. Raises ``StudyError``."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except OSError as exc:
        raise StudyError(f"--validity {path}: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise StudyError(f"--validity {path} is no JSON: {exc}") from exc
    for name in ("mean_err_pct", "p90_err_pct"):
        value = found.get(name) if isinstance(found, dict) else None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise StudyError(f"--validity {path}: an object with a number {name!r} is needed")
    return dict(found)
