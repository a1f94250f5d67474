"""The controller's verdicts for operators: as JSON, as log lines, as metrics."""

import logging
from collections.abc import Iterator
from typing import Any

from vertumnus_router.core.controller import Controller
from vertumnus_router.core.moves import PricedMove
from vertumnus_router.core.verdict import Candidate, MoveOption, Verdict
from vertumnus_router.io.metrics import Sample
from vertumnus_router.lattice import Block, format_composition

log = logging.getLogger(__name__)


def controller_content(controller: Controller | None, now: float) -> dict[str, Any]:
    """The mode and the last verdicts, oldest first; ``age_s`` is how long ago each was."""
    if controller is None:
        return {"mode": "off", "last_decisions": []}
    return {
        "mode": controller.config.mode,
        "last_decisions": [_verdict(verdict, now) for verdict in controller.decisions],
    }


def log_verdict(verdict: Verdict) -> None:
    """What is done, or would be, for everyone; the other windows for those who debug."""
    chosen = verdict.chosen
    if chosen is None:
        log.debug("controller: window %d: keep: %s", verdict.window, verdict.detail)
        return
    log.info(
        "controller: window %d: %s pool %s from %s: %s",
        verdict.window,
        verdict.action.value if verdict.command else f"would {verdict.action.value}",
        chosen.pool,
        chosen.move,
        verdict.detail,
    )


def controller_samples(controller: Controller) -> Iterator[Sample]:
    """The last window as gauges, and the verdicts so far by action and reason."""
    for (action, reason), count in sorted(
        controller.counts.items(), key=lambda item: (item[0][0].value, item[0][1].value)
    ):
        labels = (("action", action.value), ("reason", reason.value))
        yield "vertumnus_controller_decisions_total", labels, count
    if not controller.decisions:
        return
    last = controller.decisions[-1]
    yield "vertumnus_controller_demand_seconds", (), last.demand_s
    if last.capacity_s is not None and last.utilisation is not None:
        yield "vertumnus_controller_capacity_seconds", (), last.capacity_s
        yield "vertumnus_controller_utilisation", (), last.utilisation


def _verdict(verdict: Verdict, now: float) -> dict[str, Any]:
    chosen = verdict.chosen
    return {
        "window": verdict.window,
        "age_s": now - verdict.at_s,
        "mode": verdict.mode,
        "action": verdict.action.value,
        "wanted": verdict.wanted.value,
        "reason": verdict.reason.value,
        "detail": verdict.detail,
        "requests": verdict.requests,
        "reference_degree": verdict.reference_degree,
        "demand_s": verdict.demand_s,
        "capacity_s": verdict.capacity_s,
        "kappa_s": {str(degree): kappa for degree, kappa in verdict.kappa_s},
        "utilisation": verdict.utilisation,
        "mean": verdict.mean,
        "peak": verdict.peak,
        "lower": verdict.lower,
        "upper": verdict.upper,
        "windows_above": verdict.windows_above,
        "windows_below": verdict.windows_below,
        "persistence": verdict.persistence,
        "patience": verdict.patience,
        "long_before": verdict.long_before,
        "long_now": verdict.long_now,
        "candidates": [_candidate(candidate) for candidate in verdict.candidates],
        "chosen": None if chosen is None else _option(chosen),
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        **_option(candidate.option),
        "capacity_s": candidate.capacity_s,
        "utilisation": candidate.utilisation,
        "peak": candidate.peak,
        "excluded": candidate.excluded,
    }


def _option(option: MoveOption) -> dict[str, Any]:
    return {"pool": option.pool, **move_content(option.priced)}


def move_content(priced: PricedMove) -> dict[str, Any]:
    """A move and what it is predicted to cost, as JSON."""
    move = priced.move
    return {
        "from": format_composition(move.before),
        "to": format_composition(move.after),
        "blocks": [block_name(block) for block in move.leaving],
        "into": [block_name(block) for block in move.arriving],
        "predicted_drain_s": priced.drain_s,
        "reconcile_tokens": priced.reconcile_tokens,
    }


def block_name(block: Block) -> str:
    """``FIRSTxDEGREE``, as in the ids of workers."""
    return f"{block.first}x{block.degree}"
