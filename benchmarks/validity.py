"""Whether the simulator says what a real pool does: the same small traces on both.

    python benchmarks/validity.py [--json] [--out FILE]

Real SGLang, two ranks of a random model on the machine at hand, with a profile measured first;
then the same requests through the simulator with that profile, at the pace that the machine had
before and after them. Three policies take turns, the same trace for each, a new one every round.
About 12 minutes on idle cores. The last line is one JSON object: measured and simulated TTFT of
each policy, the largest errors, and whether both rank the policies alike.
"""

import argparse
import json
import tempfile
from pathlib import Path

from vertumnus_bench.figures import say
from vertumnus_bench.validity import TrialPlan, compare

from sgl_vertumnus.demo.random_model import RandomModelSpec, write_random_model

#: About 2000 tokens a second on one thread.
MODEL = RandomModelSpec(hidden=512, layers=6)
_PLAN = TrialPlan()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="only the last line")
    parser.add_argument("--out", type=Path, help="write it there, too")
    parser.add_argument("--rounds", type=int, default=_PLAN.rounds)
    parser.add_argument("--requests", type=int, default=_PLAN.requests, help="of each round")
    parser.add_argument("--utilisation", type=float, default=_PLAN.utilisation)
    parser.add_argument("--seed", type=int, default=_PLAN.seed)
    options = parser.parse_args()
    plan = TrialPlan(options.rounds, options.requests, options.utilisation, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder) / "model", MODEL)
        found = compare(model, Path(folder), plan)
    if not options.json:
        for row in found["policies"]:
            say(json.dumps(row))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
