"""Prove and time zigzag prefill attention on the GPU of this machine.

    python benchmarks/gpu.py --json gpu.json

One GPU is enough: the ranks of a block compute in turn, and one rank's share is timed alone. For
prompts of 4K to 128K tokens at degrees 2, 4 and 8 it tells the largest error against a float64
reference, and the time of one plan and run of both halves, of two separate runs, of a single
rank with the whole prompt, and of the least that the device could take. Exits 2 without a GPU, 1
when an error is too large.
"""

import argparse
import json
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from vertumnus_bench.flashinfer_kernel import GpuBackend, missing
from vertumnus_bench.zigzag_kernel import Case, Shape, peak_of, report

#: Relative. Outputs are rounded to bfloat16's 8 bits, and so are the weights of the values.
TOLERANCE = 0.01

LENGTHS = tuple(1024 * k for k in (4, 8, 16, 32, 64, 128))
CASES = [
    *(Case(tokens, degree) for tokens in LENGTHS for degree in (2, 4, 8)),
    *(Case(8192, 4, prefix_tokens=prefix) for prefix in (8192, 65536)),
    *(Case(16384, 4, page_tokens=page) for page in (1, 16)),
    *(Case(tokens, 4, kv_dtype="float8_e4m3fn") for tokens in (16384, 65536)),
    Case(1, 4, prefix_tokens=4096),
]
QUICK = [Case(4096, 2), Case(16384, 4), Case(4096, 4, kv_dtype="float8_e4m3fn")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    parser.add_argument("--quick", action="store_true", help="three cases instead of all")
    options = parser.parse_args()
    if lacks := missing():
        print(f"gpu.py needs {lacks}", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name()
    shape, peak = Shape(), peak_of(name)
    rows = report(QUICK if options.quick else CASES, shape, GpuBackend(), peak)
    print(f"{name}; {shape}")
    print(
        "   new  prefix  C  page  kv dtype        error  plan ms  run ms  two ms  speed-up  least"
    )
    for row in rows:
        least = f"{row['run_of_least']:.2f}" if row["run_of_least"] else "?"
        print(
            f"{row['new_tokens']:6} {row['prefix_tokens']:7} {row['degree']:2} "
            f"{row['page_tokens']:5}  {row['kv_dtype']:13} {row['error']:7.4f} "
            f"{row['plan_s'] * 1e3:8.3f} {row['run_s'] * 1e3:7.3f} {row['two_calls_s'] * 1e3:7.3f} "
            f"{row['speedup']:9.2f} {least:>6}"
        )
    if options.json:
        document = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": name,
            "torch": torch.__version__,
            "flashinfer": version("flashinfer-python"),
            "query_heads": shape.query_heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "rows": rows,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    worst = max(row["error"] for row in rows)
    if worst > TOLERANCE:
        print(f"the largest error is {worst:.4f}, more than {TOLERANCE}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
