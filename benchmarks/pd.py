"""What a prefill pool with a decode server costs, and what it loses when it regroups.

    python benchmarks/pd.py [--json] [--quick]

Real SGLang, four ranks that prefill, one server that decodes, KV over Mooncake's TCP, random
models, on the machine at hand; about 10 minutes. Run it on idle cores; the last line is one
JSON object.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from vertumnus_bench import hand_over, lossless, prefill_moves
from vertumnus_bench.decoding import QUEUE_TIMEOUT_S, prefill_pool
from vertumnus_bench.figures import say
from vertumnus_bench.hand_over import HandOverPlan
from vertumnus_bench.lossless import KILLED, QUIET_S, LosslessPlan
from vertumnus_bench.prefill_moves import MIXED_FLAGS, MIXED_MODEL, QUICK_MOVES, MovePlan
from vertumnus_bench.switching import DEGREES, SIZE

from sgl_vertumnus.demo.random_model import write_random_model
from sgl_vertumnus.demo.servers import pool
from sgl_vertumnus.transfer import transfer_backend

QUICK_HAND_OVER = HandOverPlan(rounds=2, warm=1, lengths=(256, 1024), compositions=("4x1",))


def measure(folder: Path) -> dict[str, Any]:
    """All figures; see the keys of the last line."""
    large = write_random_model(folder / "large", hand_over.MODEL)
    with prefill_pool(large, hand_over.FLAGS) as (server, _):
        figures = hand_over.measure(server, hand_over.MODEL, HandOverPlan())
    small = write_random_model(folder / "small", MIXED_MODEL)
    with pool(
        small, size=SIZE, degrees=DEGREES, composition=f"{SIZE}x1", flags=MIXED_FLAGS
    ) as colocated:
        at_home = prefill_moves.under_load(colocated, MovePlan(), "moves, colocated")
    with prefill_pool(small, MIXED_FLAGS) as (server, decode):
        apart = prefill_moves.under_load(server, MovePlan(), "moves, prefill pool")
        regrouped = lossless.run(server, decode, small, LosslessPlan()).figures()
        killed = lossless.run(server, decode, small, KILLED).figures()
    return figures | _moved(apart, at_home) | _counted(regrouped, killed)


def smoke(folder: Path) -> dict[str, Any]:
    """One small pool for everything."""
    small = write_random_model(folder / "small", MIXED_MODEL)
    with prefill_pool(small, (*MIXED_FLAGS, *hand_over.LOG_FLAGS)) as (server, decode):
        figures = hand_over.measure(server, MIXED_MODEL, QUICK_HAND_OVER)
        moved = prefill_moves.under_load(server, QUICK_MOVES, "moves, prefill pool")
        regrouped = lossless.run(server, decode, small, lossless.QUICK).figures()
    return figures | _moved(moved, None) | _counted(regrouped, None)


def _moved(apart: dict[str, Any], colocated: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "move_ms": apart["move_ms"],
        "move_ms_colocated": colocated and colocated["move_ms"],
        "moves": {"prefill": apart, "colocated": colocated},
    }


def _counted(regrouped: dict[str, Any], killed: dict[str, Any] | None) -> dict[str, Any]:
    """The totals of both loads, and each."""
    loads = [regrouped] if killed is None else [regrouped, killed]
    kinds = ("requests", "lost", "hung", "wrong", "duplicated")
    return {
        **{kind: sum(load[kind] for load in loads) for kind in kinds},
        "hung_of": f"open when nothing had come on any stream for {QUIET_S:g} s, with all "
        "requests sent, the decode server up and no more moves",
        "queue_timeout_s": QUEUE_TIMEOUT_S,
        "regrouped": regrouped,
        "decode_killed": killed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a smoke run of about a minute: few requests, no comparison, no killed server",
    )
    options = parser.parse_args()
    transfer_backend("mooncake_tcp", device="cpu")
    with tempfile.TemporaryDirectory() as name:
        figures = (smoke if options.quick else measure)(Path(name))
    if not options.json:
        for name, value in figures.items():
            say(f"{name:22} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
