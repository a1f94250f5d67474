"""What the router costs, next to sglang-router, smg and no router at all.

    python benchmarks/router_overhead.py [--json] [--quick] [--peers DIR]

All stand before the same engine, a C program that computes nothing, and get the same load from
another one, in turns. Ours has its default policy, a tokenizer and an index of cached blocks. About
10 minutes; run it on idle cores. The last line is one JSON object:

    {vertumnus, sglang_router, smg, direct}, each with
      short      {cpu_us, p50_us, rps_c16, rps_c128}   one chat message
      prompt64k  {…}                                   64 KiB of text that the worker has cached
      stream     {cpu_us, first_event_ms, rps_c16}     16 events
      kib_per_stream                                   memory of an open stream

cpu_us is the router's, by the kernel's count, for each request at 16 clients; without a router
there is none. rps_c16 of streams is with events that follow each other at once. A router that
cannot be had is null.
"""

import argparse
import json
import tempfile
from pathlib import Path

from vertumnus_bench.figures import say
from vertumnus_bench.overhead import tokenizers
from vertumnus_bench.overhead.comparison import QUICK, Comparison, Plan, long
from vertumnus_bench.overhead.mock_pool import mock_pool
from vertumnus_bench.overhead.targets import NAMES, targets


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds")
    parser.add_argument(
        "--peers",
        type=Path,
        metavar="DIR",
        help="a virtual environment with sglang-router and smg; without it one is made in the "
        "cache",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = tokenizers.bytes_only(folder) if options.quick else tokenizers.embedded()
        plan = QUICK if options.quick else Plan()
        cached = tokenizers.shared_blocks(tokenizer, long(plan.long_bytes))
        with (
            mock_pool(folder, tokenizer, cached) as pool,
            targets(pool, folder, options.peers, say) as found,
        ):
            figures = Comparison(pool, found, plan, say).figures()
    result = {one: figures.get(one) for one in NAMES}
    if not options.json:
        print(json.dumps(result, indent=2))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
