"""What a router has counted, between two looks at its ``/metrics``."""

import urllib.request
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from vertumnus_router.io.ttft import PARTS

Series = tuple[str, frozenset[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class Counted:
    """Samples by name and labels."""

    samples: Mapping[Series, float]

    def total(self, name: str, **labels: str) -> float:
        """Of all samples of that name that have these labels."""
        return sum(
            value
            for (found, at), value in self.samples.items()
            if found == name and labels.items() <= dict(at).items()
        )

    def by(self, name: str, label: str) -> dict[str, int]:
        """Whole totals by the values of a label, without those that are 0."""
        totals: Counter[str] = Counter()
        for (found, at), value in self.samples.items():
            if found == name and value:
                totals[dict(at)[label]] += round(value)
        return dict(totals)

    def since(self, before: "Counted") -> "Counted":
        return Counted(
            {at: value - before.samples.get(at, 0.0) for at, value in self.samples.items()}
        )


def parse(text: str) -> Counted:
    return Counted(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )


def read(router: str) -> Counted:
    with urllib.request.urlopen(f"{router}/metrics", timeout=10) as answer:
        return parse(answer.read().decode())


def ttft_ms(counted: Counted) -> dict[str, float]:
    """The mean of each part of the TTFT, milliseconds, but for pulls, which a decode server knows
    nothing of. ``ValueError`` when there was none."""
    name = "vertumnus_ttft_part_seconds"
    found: dict[str, float] = {}
    for part in (part for part in PARTS if part != "pull"):
        count = counted.total(f"{name}_count", part=part)
        if not count:
            raise ValueError("no request with a decode server was answered")
        found[part] = round(counted.total(f"{name}_sum", part=part) / count * 1e3, 2)
    return found


def retried(counted: Counted) -> int:
    """Dispatches beyond the first of each request."""
    first = counted.total("vertumnus_queue_seconds_count")
    return round(counted.total("vertumnus_dispatches_total") - first)
