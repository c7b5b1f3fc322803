"""Plans against brute force on random small questions of every kind: values, feasibility, peaks and step times.

Run it by hand: `python tests/benchmarks/plan_exactness.py`. Every difference is printed with its seed, from which
`--kind` and `--seed` make the question again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from rich.console import Console  # noqa: E402 # the repository's own packages come first
from rich.table import Table  # noqa: E402

from tests.partitioning.brute_force import best  # noqa: E402
from tests.partitioning.random_questions import KINDS, differences  # noqa: E402


def main() -> int:
    """Compare, and say how many questions of each kind were answered otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="questions of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1000, help="of the first one (default: %(default)s)")
    parser.add_argument("--kind", choices=KINDS, help="only this one")
    options = parser.parse_args()
    kinds = [options.kind] if options.kind else list(KINDS)
    table = Table("kind", "instances", "of them without a plan", "mismatches", "seconds of the CPU")
    asked = wrong = 0
    for kind in kinds:
        start, mismatches, without = time.process_time(), 0, 0
        for seed in range(options.seed, options.seed + options.count):
            question = KINDS[kind](random.Random(seed))
            wanted = best(question)
            without += wanted is None
            words = differences(question, wanted)
            if words:
                mismatches += 1
                print(f"{kind}, seed {seed}, policy {question.policy}: {'; '.join(words)}")
        table.add_row(kind, *map(str, (options.count, without, mismatches)), f"{time.process_time() - start:.1f}")
        asked, wrong = asked + options.count, wrong + mismatches
    Console(width=100).print(table)
    print(f"{asked} instances, {wrong} mismatches")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
