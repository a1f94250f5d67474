"""What a move of a live pool costs, what it loses, and what it is good for.

    python benchmarks/switch.py [--json] [--quick] [--only switch,restart,soak,varying]
    python benchmarks/switch.py --pd [--json] [--quick]

Real SGLang, four ranks, random models, on the machine at hand. Run it on idle cores; the last
line is one JSON object.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from vertumnus_bench import plots, prefill_moves, restart, soak, switching, varying
from vertumnus_bench.decoding import prefill_pool
from vertumnus_bench.figures import say
from vertumnus_bench.prefill_moves import HEAVY_FLAGS, HEAVY_MODEL, PREFILL_PLAN
from vertumnus_bench.restart import RestartPlan
from vertumnus_bench.soak import SoakPlan
from vertumnus_bench.switching import DEGREES, SIZE, SwitchPlan
from vertumnus_bench.varying import VaryingPlan

from sgl_vertumnus.demo.random_model import write_random_model
from sgl_vertumnus.demo.servers import Server, pool

SECTIONS = ("switch", "restart", "soak", "varying")

QUICK_SWITCH = SwitchPlan(moves=100, pause_s=0.05, chunk_rounds=3)
QUICK_PREFILL = replace(PREFILL_PLAN, moves=10)
QUICK_RESTART = RestartPlan(around_s=2.0, documents=4)
QUICK_SOAK = SoakPlan(minutes=0.5, move_every_s=1.0, warm_s=5.0)
QUICK_VARYING = VaryingPlan(
    window_s=1.0,
    burst=replace(varying.BURST, seconds=10.0),
    long=replace(varying.LONG, seconds=10.0),
    rounds=1,
)


@contextmanager
def started(model: Path, flags: tuple[str, ...], *, router: bool = True) -> Iterator[Server]:
    with pool(
        model, size=SIZE, degrees=DEGREES, composition=f"{SIZE}x1", router=router, flags=flags
    ) as server:
        say(f"a pool of {SIZE} ranks, ready after {server.ready_s:.0f} s")
        yield server


def measure(
    sections: tuple[str, ...], *, quick: bool, long_soak: SoakPlan, out: Path
) -> dict[str, Any]:
    """The figures of the chosen sections; see the keys of the last line."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = write_random_model(folder / "small", soak.MODEL)
        if {"switch", "soak"} & set(sections):
            with started(small, soak.FLAGS) as server:
                if "switch" in sections:
                    plan = QUICK_SWITCH if quick else SwitchPlan()
                    figures |= switching.measure(server, plan)
                if "soak" in sections:
                    long = QUICK_SOAK if quick else long_soak
                    figures["soak"] = soak.soak(server, small, long).figures()
        if "restart" in sections:
            changes = restart.compare(small, soak.FLAGS, QUICK_RESTART if quick else RestartPlan())
            figures |= {"restart_s": changes["restart"]["seconds"], "restart": changes}
        if "varying" in sections:
            load = QUICK_VARYING if quick else VaryingPlan()
            busy = write_random_model(folder / "busy", varying.MODEL)
            with started(busy, varying.FLAGS, router=False) as server:
                replays = varying.compare(server, folder, load)
            figures["varying"] = varying.figures(replays)
            plots.plot_varying(replays, load, out)
    return figures


def measure_pd(*, quick: bool) -> dict[str, Any]:
    """Whether a move of a prefill pool waits for more than the running prefill step."""
    with tempfile.TemporaryDirectory() as name:
        model = write_random_model(Path(name), HEAVY_MODEL)
        with prefill_pool(model, HEAVY_FLAGS) as (server, _):
            plan = QUICK_PREFILL if quick else PREFILL_PLAN
            return prefill_moves.under_load(server, plan, "moves, prefill pool")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--quick", action="store_true", help="smaller loads, about 5 minutes")
    parser.add_argument(
        "--only", type=_sections, default=SECTIONS, help=f"some of {','.join(SECTIONS)}"
    )
    add = parser.add_argument
    add("--pd", action="store_true", help="instead: moves of a prefill pool, under prefills")
    add("--soak-minutes", type=float, default=20.0, help="of the load with moves (20)")
    add("--soak-moves", type=int, default=200, help="in that time (200)")
    add("--still-minutes", type=float, help="cut the load without moves (as long as the other)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).with_name("figures"),
        help="folder for plots (default: benchmarks/figures)",
    )
    options = parser.parse_args()
    figures = measure_pd(quick=options.quick) if options.pd else _measure_sections(options)
    if not options.json:
        for name, value in figures.items():
            say(f"{name:22} {value}")
    print(json.dumps(figures))


def _measure_sections(options: argparse.Namespace) -> dict[str, Any]:
    long_soak = SoakPlan(
        minutes=options.soak_minutes,
        move_every_s=options.soak_minutes * 60 / (options.soak_moves + 1),
        still_minutes=options.still_minutes,
    )
    return measure(options.only, quick=options.quick, long_soak=long_soak, out=options.out)


def _sections(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if unknown := set(chosen) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"no such section: {', '.join(sorted(unknown))}")
    return chosen


if __name__ == "__main__":
    main()
