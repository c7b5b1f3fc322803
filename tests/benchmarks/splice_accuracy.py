"""Models split over simulated devices: the forecast against the count, and one trace replayed against tracing anew.

Run it by hand from the repository: `OMP_NUM_THREADS=1 python -m tests.benchmarks.splice_accuracy`; about half an hour.
Every model of the zoo and of the tests is split over 2 to 4 devices and really trained there; then its one trace is
replayed for random placements, each of which is traced once more with the placement installed. Exit status 1 where a
forecast is a byte off, a replay is more than 0.5 % off, or the median replay is not exact.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time

from rich.console import Console
from rich.table import Table

from tests.benchmarks.split import Subject, subjects

WORST = 0.005
VARIANTS = (("AdamW", "32-true"), ("SGD", "32-true"), ("AdamW", "bf16-mixed"))


def main() -> int:
    """Compare all, print a table, and say whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placements", type=int, default=50, help="random placements of each model (%(default)s)")
    parser.add_argument("--only", nargs="+", default=(), help="models whose names contain one of these words")
    parser.add_argument("--one-variant", action="store_true", help="AdamW in 32 bits only")
    options = parser.parse_args()
    table = Table("model", "trained with", "blocks", "forecast = count", "replay exact", "worst replay", "seconds")
    met, errors = True, []
    for subject in subjects(options.only, VARIANTS[:1] if options.one_variant else VARIANTS):
        start = time.perf_counter()
        equal, off = _forecasts(subject)
        replays = list(_replays(subject, options.placements))
        errors += replays
        worst = max(replays, key=abs, default=0.0)
        met &= equal == off and abs(worst) <= WORST
        row = (
            subject.name,
            f"{subject.optimizer}, {subject.precision}",
            str(len(subject.profile.blocks)),
            f"{equal} of {off}",
            f"{sum(error == 0 for error in replays)} of {len(replays)}",
            f"{worst:+.3%}",
            f"{time.perf_counter() - start:.0f}",
        )
        table.add_row(*row)
        print(" | ".join(row), flush=True)
    console = Console()
    console.print(table)
    median = statistics.median(map(abs, errors)) if errors else 0.0
    met &= median == 0 and bool(errors)  # nothing compared meets nothing
    worst = max(errors, key=abs, default=0.0)
    console.print(f"{len(errors)} replays: worst {worst:+.3%} (bar {WORST:.1%}), median {median:.3%} (bar 0)")
    console.print("bars met" if met else "a bar was missed")
    return 0 if met else 1


def _forecasts(subject: Subject) -> tuple[int, int]:
    """How many splits over 2 to 4 devices are forecast to the byte on every device, of how many."""
    equal = 0
    for devices in (2, 3, 4):
        where = subject.contiguous(devices)
        forecast, counted = subject.forecast(where, devices), subject.counted(where, devices)
        equal += forecast == counted
        if forecast != counted:
            print(f"  {subject.name}, {where.assignment}: forecast {forecast}, counted {counted}", flush=True)
    return equal, 3


def _replays(subject: Subject, placements: int) -> list[float]:
    """For each random placement the largest relative error of a device."""
    draw = random.Random(subject.name)
    errors = []
    for _ in range(placements):
        devices = draw.randint(2, 4)
        where = subject.anywhere(devices, draw)
        forecast, replayed = subject.forecast(where, devices), subject.replayed(where, devices)
        off = [(mine - true) / true if true else float(mine > 0) for mine, true in zip(replayed, forecast, strict=True)]
        errors.append(max(off, key=abs))
        if errors[-1]:
            print(f"  {subject.name}, {where.assignment}: replayed {replayed}, traced {forecast}", flush=True)
    return errors


if __name__ == "__main__":
    sys.exit(main())
