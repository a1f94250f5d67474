"""``python -m vertumnus_sim.workloads``: statistics of a trace, or a workload of one's own."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from vertumnus_sim.workloads import traces
from vertumnus_sim.workloads.arguments import positive, positive_int
from vertumnus_sim.workloads.arrivals import at_rate, at_speed
from vertumnus_sim.workloads.fetch import traces_folder
from vertumnus_sim.workloads.named import EXPECTED, NAMES, Sources, workload
from vertumnus_sim.workloads.statistics import statistics, table
from vertumnus_sim.workloads.varying import PHASES, Phase


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        run: Callable[[argparse.Namespace], None] = options.run
        run(options)
    except (ValueError, OSError) as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0


def _describe(options: argparse.Namespace) -> None:
    block_tokens = options.block_tokens or traces.BLOCK_TOKENS[options.format]
    requests = traces.READERS[options.format](options.trace, block_tokens)
    print(table(options.trace.name, statistics(requests), EXPECTED.get(options.like)))


def _generate(options: argparse.Namespace) -> None:
    sources = Sources(options.traces, options.conversation, options.keep_ticks)
    phases = tuple(options.phase) if options.phase else PHASES
    requests = workload(options.workload, options.seed, sources, phases)
    if options.rate is not None:
        requests = at_rate(requests, options.rate)
    elif options.speed is not None:
        requests = at_speed(requests, options.speed)
    print(table(options.workload, statistics(requests), EXPECTED.get(options.workload)))
    if options.output is not None:
        traces.write_mooncake(options.output, requests)
        _say(f"written: {options.output}, blocks of {requests[0].block_tokens} tokens")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vertumnus_sim.workloads", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    describe = commands.add_parser("statistics", help="of a trace")
    describe.set_defaults(run=_describe)
    describe.add_argument("trace", type=Path, help=".jsonl or .jsonl.gz")
    describe.add_argument("--format", choices=traces.READERS, default="mooncake")
    describe.add_argument("--block-tokens", type=positive_int, help="512, of flexlb 1024")
    describe.add_argument("--like", choices=EXPECTED, help="print the paper's figures beside it")

    generate = commands.add_parser("generate", help="a workload, in Mooncake's format")
    generate.set_defaults(run=_generate)
    generate.add_argument("workload", choices=NAMES)
    generate.add_argument("-o", "--output", type=Path, help=".jsonl or .jsonl.gz")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument(
        "--traces", type=Path, default=traces_folder(), help="public traces (%(default)s)"
    )
    generate.add_argument("--conversation", type=Path, help="a conversation trace of one's own")
    generate.add_argument(
        "--keep-ticks", action="store_true", help="do not spread a trace's equal time stamps"
    )
    generate.add_argument(
        "--phase",
        action="append",
        type=_phase,
        metavar="SECONDS:RATE:NAME=SHARE[,NAME=SHARE]",
        help="of varying, in order",
    )
    pace = generate.add_mutually_exclusive_group()
    pace.add_argument("--rate", type=positive, help="requests per second on average")
    pace.add_argument("--speed", type=positive, help="how many times as fast")
    return parser


def _phase(text: str) -> Phase:
    try:
        return Phase.parse(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


def _say(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
