"""What a workload looks like, beside what the paper says of its own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vertumnus_sim.workloads.traces import TraceRequest


@dataclass(frozen=True, slots=True)
class Statistics:
    """``reuse``: tokens that a cache without bounds would hold when their request comes, of
    all input tokens (the paper's oracle). Percentiles by nearest rank."""

    requests: int
    mean_input: float
    p99_input: float
    mean_output: float
    p99_output: float
    reuse: float


#: Section 9 of the paper. Of the three, Tool-Agent is public.
PAPER: Mapping[str, Statistics] = {
    "l-eval": Statistics(2_369, 13_728, 68_056, 42.76, 459, 0.7961),
    "tool-agent": Statistics(23_608, 8_596, 61_671, 182, 898, 0.5856),
    "production": Statistics(22_446, 6_952, 81_724, 411, 4_227, 0.2475),
}


def statistics(requests: Sequence[TraceRequest]) -> Statistics:
    """Raises ``ValueError`` without requests."""
    if not requests:
        raise ValueError("no statistics of no requests")
    inputs = [request.input_tokens for request in requests]
    outputs = [request.output_tokens for request in requests]
    return Statistics(
        requests=len(requests),
        mean_input=sum(inputs) / len(inputs),
        p99_input=_p99(inputs),
        mean_output=sum(outputs) / len(outputs),
        p99_output=_p99(outputs),
        reuse=sum(reused_tokens(requests)) / sum(inputs),
    )


def reused_tokens(requests: Sequence[TraceRequest]) -> list[int]:
    """Of each request, the tokens of its longest prefix that an earlier one had, too."""
    seen: set[int] = set()
    found: list[int] = []
    for request in requests:
        hits = 0
        for block in request.blocks:
            if block not in seen:
                break
            hits += 1
        found.append(min(hits * request.block_tokens, request.input_tokens))
        seen.update(request.blocks[hits:])
    return found


def table(name: str, found: Statistics, paper: Statistics | None = None) -> str:
    """One row for the workload; with ``paper``, one for the paper's and one for the difference."""
    rows = [("", "requests", "input mean", "p99", "output mean", "p99", "reuse"), _row(name, found)]
    if paper is not None:
        rows += [_row("the paper's", paper), _difference(found, paper)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _row(name: str, of: Statistics) -> tuple[str, ...]:
    return (
        name,
        f"{of.requests:,}",
        f"{of.mean_input:,.0f}",
        f"{of.p99_input:,.0f}",
        f"{of.mean_output:,.2f}" if of.mean_output < 100 else f"{of.mean_output:,.0f}",
        f"{of.p99_output:,.0f}",
        f"{of.reuse:.2%}",
    )


def _difference(found: Statistics, paper: Statistics) -> tuple[str, ...]:
    pairs = (
        (found.requests, paper.requests),
        (found.mean_input, paper.mean_input),
        (found.p99_input, paper.p99_input),
        (found.mean_output, paper.mean_output),
        (found.p99_output, paper.p99_output),
        (found.reuse, paper.reuse),
    )
    return ("difference", *(f"{ours / theirs - 1:+.1%}" for ours, theirs in pairs))


def _p99(values: Sequence[int]) -> int:
    return sorted(values)[math.ceil(len(values) * 0.99) - 1]
