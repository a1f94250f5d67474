"""Figures of a profile."""

from pathlib import Path

import pytest

from sgl_vertumnus.profiling.plan import Cell
from sgl_vertumnus.profiling.plots import plot, speedups
from sgl_vertumnus.profiling.record import Sample
from tests.profiling.model_pool import true_seconds


def cell(degree: int, uncached: int, cached: int = 0) -> Cell:
    return Cell(degree=degree, uncached_tokens=uncached, cached_tokens=cached)


def test_speed_ups_compare_cold_prompts_of_one_length_with_the_smallest_degree() -> None:
    measured = {
        cell(1, 100): 1.0,
        cell(1, 200): 3.0,
        cell(2, 100): 2.0,
        cell(2, 200): 1.5,
        cell(2, 200, 64): 0.1,
        cell(2, 300): 9.0,
    }
    assert speedups(measured) == {1: [(100, 1.0), (200, 1.0)], 2: [(100, 0.5), (200, 2.0)]}


def test_both_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (extra bench)")
    pytest.importorskip("scipy", reason="needs scipy")
    samples = [
        Sample(cell=cell(d, r, p), repetition=0, seconds=true_seconds(d, r, p))
        for d in (1, 2, 4)
        for r in (32, 512, 4096)
        for p in (0, 1024)
    ]
    for path in plot(samples, tmp_path / "figures"):
        text = path.read_text()
        assert text.startswith("<?xml") and "svg" in text and len(text) > 5000
