"""How close pipelined steps come to the textbook on the clock of simulated devices, and predicted times to the clock.

Run it by hand: `OMP_NUM_THREADS=1 python tests/benchmarks/pipeline_efficiency.py` (tools: `autobalance[benchmarks]` for
`--parts predicted`, which traces twelve large models and takes a quarter of an hour). Every other figure is that of the
second step of a fit of Lightning's Trainer. Exit status 1 where a limit is not kept.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from clocked_fits import Way, clocked_fit

from autobalance.schedules.launches import SCHEDULES

EQUAL = (64,) * 8
UNEQUAL = {
    "growing": (16, 32, 48, 64, 80, 96, 112, 128),
    "one large": (32, 32, 32, 192, 32, 32, 32, 32),
    "mixed": (128, 16, 64, 96, 32, 80, 48, 112),
}
MOST_MOVING = 0.01
"""Share of a step that transfers take where they are to be left out of account."""
NEAR = 0.95
"""Share of the textbook's speed that is to be reached."""
LIGHTER = 0.35
"""Bytes held by 1F1B over those held by GPipe, at most, in the first of 4 stages with 16 micro-batches."""
ROUNDS = 1.2
"""Speed of stages that visit devices twice over that of 1F1B, at least, for 4 micro-batches on 4 devices."""
OFF = 0.1
"""Share by which a predicted time may differ from the clock's."""


@dataclass(frozen=True)
class Line:
    """One figure beside its limit.

    Attributes:
        what: was measured.
        reached: the figure.
        limit: of it.
        is_most: whether the limit is the most that is allowed, and not the least.
        note: in words.
    """

    what: str
    reached: float
    limit: float
    is_most: bool = False
    note: str = ""

    @property
    def is_kept(self) -> bool:
        """Whether the figure keeps its limit."""
        return self.reached <= self.limit if self.is_most else self.reached >= self.limit


def equal() -> Iterator[Line]:
    """1F1B and GPipe over naive on 8 equal blocks, beside K m / (m + K - 1)."""
    for devices in (2, 4, 8):
        for parts in (2 * devices, 4 * devices):
            naive = clocked_fit(EQUAL, devices, Way("naive", parts))
            ideal = devices * parts / (parts + devices - 1)
            for schedule in ("1f1b", "gpipe"):
                step = clocked_fit(EQUAL, devices, Way(schedule, parts, parts))
                what = f"{schedule} over naive, K={devices}, m={parts}"
                yield Line(what, naive.seconds / step.seconds, NEAR * ideal, note=f"textbook: {ideal:.3f}")
                yield Line(f"transfers, {schedule}, K={devices}, m={parts}", step.moving, MOST_MOVING, is_most=True)


def unequal() -> Iterator[Line]:
    """1F1B over naive on unequal blocks, beside m T / (T + (m - 1) max t), where stages take t and T together."""
    for name, hidden in UNEQUAL.items():
        for devices in (2, 4):
            parts = 4 * devices
            naive = clocked_fit(hidden, devices, Way("naive", parts))
            step = clocked_fit(hidden, devices, Way("1f1b", parts, parts))
            times = [stage.forward_time + stage.backward_time for stage in step.plan.stages]
            ideal = parts * sum(times) / (sum(times) + (parts - 1) * max(times))
            what = f"1f1b over naive, {name}, K={devices}, m={parts}"
            yield Line(what, naive.seconds / step.seconds, NEAR * ideal, note=f"textbook: {ideal:.3f}")


def memory() -> Iterator[Line]:
    """What the first of 4 stages holds of 16 micro-batches, which are large beside the weights."""
    held = [clocked_fit((8,) * 8, 4, Way(schedule, 16, 16), rows=128).held[0] for schedule in ("1f1b", "gpipe")]
    yield Line("bytes held, 1f1b over gpipe, K=4, m=16", held[0] / held[1], LIGHTER, is_most=True)


def looped() -> Iterator[Line]:
    """Stages that visit devices twice, beside those that visit them once."""
    once, twice = (clocked_fit(EQUAL, 4, Way(schedule, 4, 4)) for schedule in ("1f1b", "looped"))
    visits = len(twice.plan.stages) / len({stage.device for stage in twice.plan.stages})
    yield Line("looped over 1f1b, K=4, m=4", once.seconds / twice.seconds, ROUNDS, note=f"{visits:g} visits")


def accumulate() -> Iterator[Line]:
    """Batches of one sample that accumulate, as micro-batches of one step and one after the other."""
    naive = clocked_fit(EQUAL, 4, Way("naive", 16, 1, accumulate=16))
    ideal = 16 * 4 / 19
    for schedule in ("1f1b", "auto"):
        step = clocked_fit(EQUAL, 4, Way(schedule, 16, "accumulate", accumulate=16))
        what = f"16 batches of one on 4 devices, {schedule}, over naive"
        note = f"textbook: {ideal:.3f}, {step.plan.schedule}"
        yield Line(what, naive.seconds / step.seconds, NEAR * ideal, note=note)


def predicted(models: Sequence[str], schedules: Sequence[str], devices: int, parts: int) -> Iterator[Line]:
    """Predicted times of large models' forwards and backwards over the clock's.

    Args:
        models: their names; none: all.
        schedules: that are clocked.
        devices: how many, each with more memory than any model needs.
        parts: micro-batches, where the schedule has them.
    """
    from clocked_models import clocked_step, plan_of, traced_profile
    from large_models import LARGE

    for name in models or LARGE:
        samples = LARGE[name].samples
        profile = traced_profile(name, samples)
        for schedule in schedules:
            count = 1 if schedule == "naive" else parts
            plan = plan_of(profile, samples * count, devices, schedule, count)
            step = clocked_step(name, plan, samples * count)
            off = abs(plan.step_time / step.passes - 1)
            note = f"{plan.step_time:.4f} s predicted, {step.passes:.4f} s by the clock"
            yield Line(f"{name}, {schedule}, K={devices}, m={count}", off, OFF, is_most=True, note=note)


PARTS: dict[str, Callable[[], Iterator[Line]]] = {
    "equal": equal,
    "unequal": unequal,
    "memory": memory,
    "looped": looped,
    "accumulate": accumulate,
}


def main() -> int:
    """Measure, and say whether the limits are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, "predicted"], default=list(PARTS))
    parser.add_argument("--models", nargs="+", default=(), help="for `predicted` (default: all)")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=["naive", "1f1b"], help="for `predicted`")
    parser.add_argument("--devices", type=int, default=4, help="for `predicted` (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=8, help="for `predicted` (default: %(default)s)")
    options = parser.parse_args()
    are_kept = True
    for part in options.parts:
        if part == "predicted":
            lines = predicted(options.models, options.schedules, options.devices, options.micro_batches)
        else:
            lines = PARTS[part]()
        print(f"\n{part}", flush=True)
        for line in lines:
            limit = f"{'<=' if line.is_most else '>='} {line.limit:.3f}"
            kept = "kept" if line.is_kept else "NOT KEPT"
            print(f"  {line.what:<52}{line.reached:8.3f}  {limit:<9} {kept:<9} {line.note}".rstrip(), flush=True)
            are_kept &= line.is_kept
    return 0 if are_kept else 1


if __name__ == "__main__":
    sys.exit(main())
