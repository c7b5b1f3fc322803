"""Does it fit? The verdict of the forecast against really running, or running out, near the limit.

Run it by hand from the repository: `OMP_NUM_THREADS=1 python -m tests.benchmarks.verdict`; about ten minutes. Random
chains and the models of the tests, with random batch sizes, are placed on 1 to 4 simulated devices whose capacities lie
within 2 % of the predicted peaks. The forecast is a trace with the placement installed; beside it stands one profile,
scaled to the batch size and replayed, which traces nothing of the case itself. Exit status 1 where the forecast is
right in less than 99 %, or wrong farther than 0.5 % from the limit.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from autobalance.profiling.batches import samples_in, with_samples
from autobalance.profiling.profile import Profile
from autobalance.timelines.scaling import with_batch_sizes
from tests.benchmarks.split import Subject, random_chains, subjects

NEAR = 0.02
RIGHT, MARGIN = 0.99, 0.005
LEAST = 1024  # bytes of the smallest device
PLACED, SCALED = "traced as placed", "scaled and replayed"


@dataclass(frozen=True)
class Judged:
    """One case.

    Attributes:
        name: model, batch and placement, in words.
        fits: whether the run came to its end.
        peaks: per device, by forecast.
        capacities: per device.
    """

    name: str
    fits: bool
    peaks: dict[str, list[int]]
    capacities: list[int]

    def is_right(self, forecast: str) -> bool:
        """Whether the forecast's verdict is what happened."""
        return self.says_fits(forecast) == self.fits

    def says_fits(self, forecast: str) -> bool:
        """Whether every peak is within the capacity."""
        return all(peak <= most for peak, most in zip(self.peaks[forecast], self.capacities, strict=True))

    def distance(self, forecast: str) -> float:
        """How far the device that decides is from its limit, as a fraction of the limit."""
        return max(
            (peak - most) / most for peak, most in zip(self.peaks[forecast], self.capacities, strict=True) if peak
        )


def main() -> int:
    """Judge all cases, print a table, and say whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    judged = list(_cases(options.cases, options.seed))
    console, met = Console(), True
    table = Table("forecast", "cases", "of which fit", "right", "wrong, with their distance from the limit")
    for forecast in (PLACED, SCALED):
        wrong = [case for case in judged if not case.is_right(forecast)]
        right = 1 - len(wrong) / len(judged)
        if forecast == PLACED:
            met &= right >= RIGHT and all(abs(case.distance(forecast)) <= MARGIN for case in wrong)
        table.add_row(
            forecast,
            str(len(judged)),
            str(sum(case.fits for case in judged)),
            f"{right:.1%}",
            "\n".join(f"{case.name}: {case.distance(forecast):+.2%}" for case in wrong) or "none",
        )
    console.print(table)
    console.print("bars met" if met else "a bar was missed")
    return 0 if met else 1


def _cases(count: int, seed: int) -> Iterator[Judged]:
    draw = random.Random(seed)
    pool = [*random_chains(20, seed), *subjects(["test: "], [("AdamW", "32-true"), ("SGD", "32-true")])]
    profiles: dict[int, Profile] = {}
    for number in range(count):
        chosen = draw.randrange(len(pool))
        subject = pool[chosen]
        if chosen not in profiles:
            profiles[chosen] = _scalable(subject)
        samples, devices = draw.randint(2, 40), draw.randint(1, 4)
        case = replace(subject, batch=with_samples(subject.batch, samples))
        where = subject.anywhere(devices, draw)
        timeline = profiles[chosen].scaled(samples).timeline
        scaled = replace(subject)
        scaled.profile = replace(profiles[chosen], timeline=timeline)
        peaks = {
            SCALED: scaled.replayed(where, devices),
            PLACED: case.forecast(where, devices),
        }
        capacities = [max(LEAST, int(peak * draw.uniform(1 - NEAR, 1 + NEAR))) for peak in peaks[SCALED]]
        if draw.random() < 0.5:  # with several devices, one is mostly too small: let every second case have a chance
            capacities = [max(LEAST, int(peak * draw.uniform(1, 1 + NEAR))) for peak in peaks[SCALED]]
        name = f"{subject.name}, {samples} samples on {where.assignment}"
        yield Judged(name, case.runs_within(where, capacities), peaks, capacities)
        print(f"{number + 1} of {count}: {name}", flush=True)


def _scalable(subject: Subject) -> Profile:
    """The subject's profile, with its bytes as a function of the batch."""
    batch: torch.Tensor = subject.batch
    return with_batch_sizes(
        subject.profile,
        samples_in(batch),
        lambda samples: replace(subject, batch=with_samples(batch, samples)).profile,
    )


if __name__ == "__main__":
    sys.exit(main())
