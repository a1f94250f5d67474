"""``python -m vertumnus_sim.workloads``: statistics of a trace, or a workload of one's own."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from vertumnus_sim.workloads import traces
from vertumnus_sim.workloads.arguments import positive, positive_int
from vertumnus_sim.workloads.arrivals import at_rate, at_speed, spread_ticks
from vertumnus_sim.workloads.conversation import TRACE, conversation_like
from vertumnus_sim.workloads.fetch import TRACES, fetched, traces_folder
from vertumnus_sim.workloads.long_documents import l_eval_like
from vertumnus_sim.workloads.production import production_like
from vertumnus_sim.workloads.statistics import PAPER, Statistics, statistics, table
from vertumnus_sim.workloads.tool_agent import tool_agent_like
from vertumnus_sim.workloads.traces import TraceRequest
from vertumnus_sim.workloads.varying import PHASES, Phase, time_varying

_EXPECTED: dict[str, Statistics] = {**PAPER, "conversation": TRACE}


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
    print(table(options.trace.name, statistics(requests), _EXPECTED.get(options.like)))


def _generate(options: argparse.Namespace) -> None:
    requests = _workload(options.workload, options)
    if options.rate is not None:
        requests = at_rate(requests, options.rate)
    elif options.speed is not None:
        requests = at_speed(requests, options.speed)
    print(table(options.workload, statistics(requests), _EXPECTED.get(options.workload)))
    if options.output is not None:
        traces.write_mooncake(options.output, requests)
        _say(f"written: {options.output}, blocks of {requests[0].block_tokens} tokens")


def _workload(name: str, options: argparse.Namespace) -> list[TraceRequest]:
    seed: int = options.seed
    if name == "conversation":
        return _conversation(options)
    if name == "tool-agent":
        return _tool_agent(options)
    if name == "production":
        return production_like(seed)
    if name == "l-eval":
        return l_eval_like(seed)
    phases = options.phase or PHASES
    names = sorted({name for phase in phases for name in phase.mix})
    if unknown := [name for name in names if name not in _EXPECTED]:
        raise ValueError(f"no workload {', '.join(unknown)}; there are {', '.join(_EXPECTED)}")
    return time_varying(phases, {name: _workload(name, options) for name in names}, seed)


def _conversation(options: argparse.Namespace) -> list[TraceRequest]:
    path = options.conversation or fetched(TRACES["conversation"], options.traces)
    if path is None:
        _say(
            "conversation: generated, as the public trace is not here (scripts/fetch_traces gets "
            "it): its lengths and reuse, not its requests"
        )
        return conversation_like(options.seed)
    _say(f"conversation: {path}")
    return _spread(traces.read_mooncake(path), options)


def _tool_agent(options: argparse.Namespace) -> list[TraceRequest]:
    path = None if options.conversation else fetched(TRACES["toolagent"], options.traces)
    if path is not None:
        _say(f"tool-agent: {path}")
        return _spread(traces.read_mooncake(path), options)
    _say("tool-agent: a surrogate, conversations and generated tool calls")
    return tool_agent_like(_conversation(options), options.seed)


def _spread(requests: list[TraceRequest], options: argparse.Namespace) -> list[TraceRequest]:
    return requests if options.keep_ticks else spread_ticks(requests, options.seed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m vertumnus_sim.workloads", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    describe = commands.add_parser("statistics", help="of a trace")
    describe.set_defaults(run=_describe)
    describe.add_argument("trace", type=Path, help=".jsonl or .jsonl.gz")
    describe.add_argument("--format", choices=traces.READERS, default="mooncake")
    describe.add_argument("--block-tokens", type=positive_int, help="512, of flexlb 1024")
    describe.add_argument("--like", choices=_EXPECTED, help="print the paper's figures beside it")

    generate = commands.add_parser("generate", help="a workload, in Mooncake's format")
    generate.set_defaults(run=_generate)
    generate.add_argument("workload", choices=(*_EXPECTED, "varying"))
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
