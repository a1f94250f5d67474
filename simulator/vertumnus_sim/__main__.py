"""``python -m vertumnus_sim``: a workload on a simulated cluster, under the router's own policies.

Figures are simulated, never measured. The same arguments give the same figures, bit by bit, but for
``sim_requests_per_s``.
"""

import argparse
import gc
import sys
from pathlib import Path
from typing import Any

import msgspec
from vertumnus_router.profiles import load_profile, shipped

from vertumnus_sim import settings
from vertumnus_sim.metrics import DEADLINES_S, Row
from vertumnus_sim.policies import NAMES as POLICIES
from vertumnus_sim.run import WARM_UP, Run, simulate
from vertumnus_sim.scenario import Cluster, Death, Delays, Hardware, lay_out
from vertumnus_sim.workloads import traces
from vertumnus_sim.workloads.arguments import positive, positive_int
from vertumnus_sim.workloads.arrivals import spread_ticks
from vertumnus_sim.workloads.fetch import traces_folder
from vertumnus_sim.workloads.named import NAMES as WORKLOADS
from vertumnus_sim.workloads.named import Sources, workload
from vertumnus_sim.workloads.traces import TraceRequest

PROFILE = "qwen3-30b-a3b-h20"


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        row = _run(options)
    except (ValueError, OSError, RuntimeError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    print(msgspec.json.encode(row).decode() if options.json else _text(row))
    return 0


def _run(options: argparse.Namespace) -> Row:
    profile = load_profile(options.profile)
    known = {f"hardware.{name}" for name in settings.names(Hardware())}
    known |= {f"delays.{name}" for name in settings.names(Delays())}
    given = dict(options.set or [])
    if options.pull is not None:
        given["prefix.pull"] = str(options.pull).lower()
    parts = {n: value for n, value in given.items() if n.startswith(("hardware.", "delays."))}
    if strangers := sorted(parts.keys() - known):
        raise ValueError(f"no setting {strangers[0]!r}; there are {', '.join(sorted(known))}")
    hardware = settings.apply(Hardware(), _below(parts, "hardware."))
    delays = settings.apply(Delays(), _below(parts, "delays."))
    degrees = tuple(sorted(options.degrees))
    composition = options.composition or f"{options.gpus // degrees[0]}x{degrees[0]}"
    cluster = Cluster(
        node_gpus=options.node_gpus,
        degrees=degrees,
        compositions=lay_out(composition, options.gpus, options.node_gpus, degrees),
        hardware=hardware,
        delays=delays,
        deaths=tuple(options.kill or ()),
    )
    requests = _requests(options)
    run = Run(
        workload=options.trace,
        rate=options.rate,
        policy=options.policy,
        composition=composition,
        cluster=cluster,
        profile=options.profile,
        seed=options.seed,
        settings={name: value for name, value in given.items() if name not in parts},
        deadlines_s=tuple(options.slo),
        warm_up=options.warm_up,
    )
    gc.freeze()  # the workload is there to the end: look for no garbage in it
    return simulate(run, requests[: options.requests], profile)


def _requests(options: argparse.Namespace) -> list[TraceRequest]:
    """Named workloads, or the requests of a file."""
    sources = Sources(options.traces, keep_ticks=options.keep_ticks)
    if options.trace in WORKLOADS:
        return workload(options.trace, options.seed, sources)
    block_tokens = options.block_tokens or traces.BLOCK_TOKENS[options.format]
    requests = traces.READERS[options.format](Path(options.trace), block_tokens)
    return requests if options.keep_ticks else spread_ticks(requests, options.seed)


def _below(given: dict[str, str], prefix: str) -> dict[str, str]:
    return {
        name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)
    }


def _text(row: Row) -> str:
    found = msgspec.to_builtins(row)
    lines = [f"{name:<20} {_shown(value)}" for name, value in found.items()]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vertumnus_sim",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    load = parser.add_argument_group("the workload")
    load.add_argument(
        "--trace",
        default="conversation",
        help=f"a file of requests, or one of {', '.join(WORKLOADS)} (%(default)s)",
    )
    load.add_argument("--format", choices=traces.READERS, default="mooncake")
    load.add_argument("--block-tokens", type=positive_int, help="512, of flexlb 1024")
    load.add_argument("--rate", type=positive, help="requests per second; else as they come")
    load.add_argument("--requests", type=positive_int, help="only the first so many")
    load.add_argument("--warm-up", type=_share, default=WARM_UP, help="uncounted (%(default)s)")
    load.add_argument(
        "--traces", type=Path, default=traces_folder(), help="public traces (%(default)s)"
    )
    load.add_argument(
        "--keep-ticks", action="store_true", help="do not spread a trace's equal time stamps"
    )
    load.add_argument("--seed", type=int, default=0)

    where = parser.add_argument_group("the cluster")
    where.add_argument(
        "--profile", default=PROFILE, help=f"a file, or one of {', '.join(shipped())} (%(default)s)"
    )
    where.add_argument("--gpus", type=positive_int, default=40)
    where.add_argument("--node-gpus", type=positive_int, default=8)
    where.add_argument("--degrees", type=_degrees, default=(1, 2, 4), metavar="1,2,4")
    where.add_argument("--composition", help="of the cluster, as 16x1,12x2; else the least degree")
    where.add_argument(
        "--kill",
        type=_death,
        action="append",
        metavar="SECONDS:NODE/RANK",
        help="a rank dies, so long after the start of the run; the first request comes at 1 s",
    )

    policy = parser.add_argument_group("the router")
    policy.add_argument("--policy", choices=POLICIES, default="late")
    policy.add_argument(
        "--pull",
        action=argparse.BooleanOptionalAction,
        help="short for --set prefix.pull=true, or false; by default as the router",
    )
    policy.add_argument(
        "--set",
        type=_setting,
        action="append",
        metavar="NAME=VALUE",
        help="any setting of the policy, as late.ageing=0.1; and hardware.*, delays.*",
    )
    policy.add_argument(
        "--slo", type=_deadlines, default=DEADLINES_S, metavar="S,S,S", help="below 8K, 32K, above"
    )
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    return parser


def _setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to below 1")
    return value


def _degrees(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive_int(part) for part in text.split(",")}))


def _deadlines(text: str) -> tuple[float, ...]:
    found = tuple(positive(part) for part in text.split(","))
    if len(found) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers of seconds")
    return found


def _death(text: str) -> Death:
    try:
        return Death.parse(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


if __name__ == "__main__":
    sys.exit(main())
