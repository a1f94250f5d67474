"""Many streams through the router for a long time: errors, drift, and what it adds to each event.

    python benchmarks/router_load.py [--json] [--quick] [--streams N] [--seconds S]

1,000 streams for 10 minutes unless told otherwise, of 50 events each, 100 ms apart, from an engine
that computes nothing, on loopback. The last line is one JSON object:

    requests, errors, lost_events   errors and lost_events are to be 0
    added_event_ms                  from the engine's sending an event to its arrival at the client,
                                    beyond what it takes without a router: {p50, p99}
    added_first_event_ms            the same of the first one, from the sending of the request
    rss_mib, descriptors            {early, late, drift}: medians of a fifth of the run each
    cpu_share                       of one core
"""

import argparse
import json
import tempfile
from pathlib import Path

from vertumnus_bench.figures import say
from vertumnus_bench.overhead import tokenizers
from vertumnus_bench.overhead.endurance import Plan, endure
from vertumnus_bench.overhead.mock_pool import mock_pool
from vertumnus_bench.overhead.targets import ours


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 100 streams for 3 s")
    parser.add_argument("--streams", type=int, default=Plan().streams, help="(%(default)s)")
    parser.add_argument("--seconds", type=float, default=Plan().seconds, help="(%(default)s)")
    options = parser.parse_args()
    plan = Plan(streams=options.streams, seconds=options.seconds)
    if options.quick:
        plan = Plan(streams=100, seconds=3.0, events=20, gap_us=20_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = tokenizers.bytes_only(folder) if options.quick else tokenizers.embedded()
        with mock_pool(folder, tokenizer) as pool, ours(pool, folder) as target:
            assert target.router is not None
            result = endure(pool, target.router, plan, say)
    if not options.json:
        print(json.dumps(result, indent=2))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
