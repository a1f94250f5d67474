"""Replays a trace against an endpoint, ours or another's, and says what its clients saw.

    python benchmarks/replay.py --trace T.jsonl --url http://127.0.0.1:30000
        [--api sglang|openai-completions|openai-chat] [--rate R | --speed S]
        [--limit N] [--scale-lengths F] [--warmup-s W] [--plot replay.svg]

Every request is sent at its time, whether or not those before it were answered. The last line
is one JSON object. Times are only reported when the client itself was on time.

Exit status: 0; 1 when nothing was served; 3 when the client was late.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vertumnus_bench.client import HUNG_S
from vertumnus_bench.endpoint import Endpoint, OpenAiChat, OpenAiCompletions, SglangGenerate
from vertumnus_bench.figures import say
from vertumnus_bench.replay_plot import plot_replay
from vertumnus_bench.replay_report import DEADLINES, Deadlines, report
from vertumnus_bench.replaying import ReplayPlan, replay
from vertumnus_bench.trace_prompts import Prompts, scaled
from vertumnus_bench.workload import IDS
from vertumnus_sim.workloads import traces
from vertumnus_sim.workloads.arguments import positive, positive_int
from vertumnus_sim.workloads.arrivals import at_rate, at_speed, spread_ticks
from vertumnus_sim.workloads.statistics import statistics
from vertumnus_sim.workloads.traces import TraceRequest

_APIS = ("sglang", "openai-completions", "openai-chat")
NOTHING_SERVED = 1
CLIENT_LATE = 3


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.api != "sglang" and options.model is None:
        parser.error(f"--api {options.api} needs --model, the name that the server knows")
    try:
        requests = _requests(options)
    except ValueError as exc:
        parser.error(str(exc))
    sent, block_tokens = _scaled(requests, options.scale_lengths)
    plan = ReplayPlan(
        url=options.url.rstrip("/"),
        endpoint=_endpoint(options),
        prompts=Prompts(options.token_ids, options.seed),
        exact_output=options.ignore_eos,
        max_open=options.max_open,
        timeout_s=options.timeout_s,
    )
    say(f"{len(sent)} requests over {sent[-1].arrival_s:.0f} s to {plan.url}{plan.endpoint.path}")
    replayed = asyncio.run(replay(sent, plan))
    lengths = [request.input_tokens for request in requests]
    figures = report(
        replayed,
        lengths,
        deadlines=options.deadlines,
        warmup_s=options.warmup_s,
        max_lag_s=options.max_lag_ms / 1000,
    )
    if figures["refused"] is None and options.plot is not None:
        plot_replay(replayed.answers, lengths, options.deadlines, options.warmup_s, options.plot)
    _tell(figures)
    print(json.dumps(_what(options, sent, block_tokens) | figures))
    if figures["refused"] is not None:
        return CLIENT_LATE
    return 0 if figures["served"] else NOTHING_SERVED


def _requests(options: argparse.Namespace) -> list[TraceRequest]:
    """As the trace has them, at the time they are due. Raises ``ValueError``."""
    block_tokens = options.block_tokens or traces.BLOCK_TOKENS[options.format]
    requests = traces.READERS[options.format](options.trace, block_tokens)[: options.limit]
    if not options.keep_ticks:
        requests = spread_ticks(requests, options.seed)
    if options.rate is not None:
        return at_rate(requests, options.rate)
    return at_speed(requests, options.speed)


def _scaled(requests: Sequence[TraceRequest], factor: float) -> tuple[list[TraceRequest], int]:
    """With blocks of a whole number of tokens, that number beside them."""
    block_tokens = max(1, round(requests[0].block_tokens * factor))
    return [scaled(request, block_tokens) for request in requests], block_tokens


def _endpoint(options: argparse.Namespace) -> Endpoint:
    if options.api == "sglang":
        return SglangGenerate(ignore_eos=options.ignore_eos)
    if options.api == "openai-chat":
        return OpenAiChat(options.model, ignore_eos=options.ignore_eos)
    return OpenAiCompletions(options.model, ignore_eos=options.ignore_eos, as_text=options.text)


def _what(
    options: argparse.Namespace, sent: Sequence[TraceRequest], block_tokens: int
) -> dict[str, Any]:
    """What was replayed: ``sent`` describes the prompts as they went out."""
    return {
        "trace": str(options.trace),
        "url": options.url,
        "api": options.api,
        "seed": options.seed,
        "scale_lengths": block_tokens / _original(options),
        "block_tokens": block_tokens,
        "sent": asdict(statistics(sent)),
    }


def _original(options: argparse.Namespace) -> int:
    return int(options.block_tokens or traces.BLOCK_TOKENS[options.format])


def _tell(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        say(f"{name:14} {value}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help=".jsonl or .jsonl.gz")
    parser.add_argument("--format", choices=traces.READERS, default="mooncake")
    parser.add_argument("--block-tokens", type=positive_int, help="512, of flexlb 1024")
    parser.add_argument("--url", required=True)
    parser.add_argument("--api", choices=_APIS, default="sglang")
    parser.add_argument("--model", help="for the OpenAI APIs")
    parser.add_argument("--text", action="store_true", help="completions of words, not token ids")
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument("--rate", type=positive, help="requests per second on average")
    pace.add_argument("--speed", type=positive, default=1.0, help="how many times as fast")
    parser.add_argument("--keep-ticks", action="store_true", help="equal time stamps are a burst")
    parser.add_argument("--limit", type=positive_int, help="only the first so many requests")
    parser.add_argument(
        "--scale-lengths", type=positive, default=1.0, help="prompts and outputs, as 0.05"
    )
    parser.add_argument("--warmup-s", type=float, default=0.0, help="not in the figures")
    parser.add_argument(
        "--deadlines",
        type=_deadlines,
        default=DEADLINES["qwen3-30b-a3b"],
        metavar="NAME|S,S,S",
        help=f"of the first token, below 8K, below 32K and above; {', '.join(DEADLINES)}",
    )
    parser.add_argument("--max-lag-ms", type=positive, default=50.0, help="P99 of the client's")
    parser.add_argument("--max-open", type=positive_int, default=4096)
    parser.add_argument("--timeout-s", type=positive, default=HUNG_S, help="of a request")
    parser.add_argument(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="for servers that refuse the field; answers may then be shorter",
    )
    parser.add_argument("--token-ids", type=_ids, default=IDS, metavar="FIRST:END")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="an SVG to write")
    return parser


def _ids(text: str) -> range:
    first, _, end = text.partition(":")
    ids = range(int(first), int(end))
    if not ids or ids.start < 0:
        raise argparse.ArgumentTypeError(f"{text} has no token id")
    return ids


def _deadlines(text: str) -> Deadlines:
    if text in DEADLINES:
        return DEADLINES[text]
    short, middle, long = map(float, text.split(","))
    return Deadlines((short, middle, long))


if __name__ == "__main__":
    sys.exit(main())
