"""The simulation study: every policy on every workload and load. Everything is simulated.

    python benchmarks/figures.py --out DIR [--quick] [--jobs N] [--validity FILE]

Writes DIR/summary.json, DIR/tables.md, DIR/*.svg, and what is finished to DIR/points: a study that
broke off goes on where it was. The figures are the same whatever the number of jobs, but for how
fast they came. --quick is a sub-set that proves that it runs; its figures mean nothing.

Exit status: 0; 1 when the study could not be made.
"""

import argparse
import os
import sys
from pathlib import Path

import msgspec
from vertumnus_bench.figures import say
from vertumnus_bench.study.executing import Executor
from vertumnus_bench.study.loads import LOADS, origins, present
from vertumnus_bench.study.plan import Plan, full_plan, quick_plan
from vertumnus_bench.study.plots import plot_study
from vertumnus_bench.study.point import Setup
from vertumnus_bench.study.store import Store, code_digest
from vertumnus_bench.study.study import make_study
from vertumnus_bench.study.summary import Summary, read_validity
from vertumnus_bench.study.tables import tables
from vertumnus_router.profiles import load_profile, shipped
from vertumnus_sim.workloads.arguments import positive_int
from vertumnus_sim.workloads.fetch import traces_folder

PROFILE = "qwen3-30b-a3b-h20"


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        summary = _study(options)
        options.out.mkdir(parents=True, exist_ok=True)
        pretty = msgspec.json.format(msgspec.json.encode(summary))
        (options.out / "summary.json").write_bytes(pretty + b"\n")
        (options.out / "tables.md").write_text(tables(summary))
        written = ["summary.json", "tables.md"]
        written += [path.name for path in plot_study(summary, options.out)]
    except (ValueError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    say(f"simulated: {', '.join(written)} in {options.out}")
    return 0


def _study(options: argparse.Namespace) -> Summary:
    validity = None if options.validity is None else read_validity(options.validity)
    profile = load_profile(options.profile)
    setup = Setup(options.traces, options.profile)
    plan = _plan(options)
    # Of all workloads: what is finished counts, whichever of them are asked for this time.
    code = code_digest(repr(profile), repr(origins(LOADS, setup.traces)))
    store = Store(options.out / "points", setup, code, any_code=options.any_code)
    if options.fresh:
        store.clear()
    say("everything that follows is simulated" + (", and a quick run" if plan.quick else ""))
    if validity is None:
        say("no --validity: how far the simulator is from a real pool is left open")
    _, skipped = present(plan.loads, setup.traces)
    for name, why in skipped.items():
        say(f"{name} is left out: {why}")
    return make_study(plan, setup, Executor(setup, store, options.jobs), code, validity)


def _plan(options: argparse.Namespace) -> Plan:
    asked = {
        "requests": options.requests,
        "tuning_requests": options.tuning_requests,
        "seeds": options.seeds,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    make = quick_plan if options.quick else full_plan
    plan = make(**given, tune_each_load=options.tune_each_load)
    if options.workloads is not None:
        plan = plan.on(options.workloads)
    return plan if options.contenders is None else plan.of(options.contenders)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="minutes, of one core")
    parser.add_argument(
        "--jobs", type=positive_int, default=os.cpu_count() or 1, help="processes (%(default)s)"
    )
    parser.add_argument("--requests", type=positive_int, help="of each workload: 6000, quick 300")
    parser.add_argument("--tuning-requests", type=positive_int, help="3000, quick 150")
    parser.add_argument("--seeds", type=_seeds, metavar="1,2,3", help="to evaluate; quick: 1")
    parser.add_argument(
        "--workloads", type=_names, metavar="A,B", help="only these, as conversation,varying"
    )
    parser.add_argument(
        "--contenders", type=_names, metavar="A,B", help="only these, as late,fluid"
    )
    parser.add_argument(
        "--tune-each-load", action="store_true", help="not only at each workload's highest"
    )
    parser.add_argument(
        "--validity", type=Path, metavar="FILE", help="the simulator against a real pool, JSON"
    )
    parser.add_argument(
        "--profile", default=PROFILE, help=f"a file, or one of {', '.join(shipped())} (%(default)s)"
    )
    parser.add_argument(
        "--traces", type=Path, default=traces_folder(), help="public traces (%(default)s)"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what is finished in DIR")
    parser.add_argument(
        "--any-code", action="store_true", help="keep what other code has finished in DIR"
    )
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers, as 1,2,3") from None


if __name__ == "__main__":
    sys.exit(main())
