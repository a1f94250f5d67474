"""What the prefix manager gains, and what its copies cost.

    python benchmarks/prefix.py [--json] [--quick]

Real SGLang, four ranks as 2x1,1x2, a random model, on the machine at hand; about 15 minutes.
Run it on idle cores; the last line is one JSON object.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from vertumnus_bench import hot_prefixes, index, prefix_copies
from vertumnus_bench.figures import say
from vertumnus_bench.hot_prefixes import BurstPlan, HotPlan
from vertumnus_bench.moves import reconfigure
from vertumnus_bench.pool_state import drain, flush
from vertumnus_bench.prefix_copies import COMPOSITION, CopyPlan
from vertumnus_bench.profiling import profile

from sgl_vertumnus.demo.random_model import RandomModelSpec, write_random_model
from sgl_vertumnus.demo.servers import pool, router

#: Heavy enough for a prefix to be worth copying: about 2000 tokens a second on one thread.
MODEL = RandomModelSpec(hidden=512, layers=6)
FLAGS = ("--dtype", "float32", "--chunked-prefill-size", "2048", "--max-total-tokens", "49152")
DEGREES = (1, 2)
#: Of the cluster whose index is measured.
RANKS = 64


def measure(
    folder: Path, copies: CopyPlan, hot: HotPlan, burst: BurstPlan, nodes: int
) -> dict[str, Any]:
    """All figures; see the keys of the last line."""
    model = write_random_model(folder / "model", MODEL)
    path = folder / "profile.json"
    with pool(
        model, size=4, degrees=DEGREES, composition=COMPOSITION, router=False, flags=FLAGS
    ) as server:
        with router(server.url) as before:
            path.write_text(json.dumps(profile(before, DEGREES)))
            reconfigure(before.router_url or "", COMPOSITION)
            flush(server)
            rows = prefix_copies.measure(before, copies)
            flush(server)
            beside = prefix_copies.beside(before, copies)
        drain(server)
        flags = ("--profile", str(path), "--controller", "off")
        load = hot_prefixes.compare(server, flags, hot)
        computed = hot_prefixes.bursts(server, flags, burst)
    return {
        "copy": rows,
        **{key: load[key] for key in ("ttft_ms", "hit_pct")},
        "trie": index.figures(nodes, RANKS),
        "burst_tokens": computed,
        "burst_prompt_tokens": burst.requests * (burst.document_tokens + burst.question_tokens),
        "prefill_beside_a_copy": beside,
        "hot": {key: load[key] for key in load if key not in ("ttft_ms", "hit_pct")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    parser.add_argument("--quick", action="store_true", help="a smoke run of about a minute")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if options.quick:
            figures = measure(
                Path(name),
                prefix_copies.QUICK,
                hot_prefixes.QUICK,
                hot_prefixes.QUICK_BURST,
                20_000,
            )
        else:
            figures = measure(Path(name), CopyPlan(), HotPlan(), BurstPlan(), 1_000_000)
    if not options.json:
        for key, value in figures.items():
            say(f"{key:22} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
