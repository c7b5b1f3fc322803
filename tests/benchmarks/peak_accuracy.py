"""Predicted peaks against what the CPU's own allocator held, over the zoo and the ways to train it.

Run it by hand: `OMP_NUM_THREADS=1 python tests/benchmarks/peak_accuracy.py`; about ten minutes. The prediction,
`autobalance.profile(..., target="cpu")`, runs nothing; the truth is a real training run of three steps under
`torch.profiler`, whose memory events know nothing of autobalance. Exit status 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
import warnings
from dataclasses import dataclass

from cpu_truth import Counted, count
from rich.console import Console
from rich.table import Table
from zoo import VARIANTS, ZOO, Model, Variant, train

import autobalance

STEPS = (1, 2, 3)
PHASES = ("forward+backward", "optimizer")
MIB = 2**20
WORST, MEDIAN, WORST_CONVOLUTIONAL = 0.001, 0.0002, 0.015

EXCUSED = {
    "aten::mm": "oneDNN's buffers for sums of 16-bit products, which its kernels size by the machine's caches",
    "aten::addmm": "the same",
    "aten::bmm": "the same",
}
"""Operations whose scratch is not predicted. What each takes is measured by the run itself, and taken off the truth."""


@dataclass(frozen=True)
class Row:
    """One model in one variant.

    Attributes:
        model: of the zoo.
        variant: how it was trained.
        truth: what the allocator held.
        predicted: peak bytes by (step, phase).
        seconds: that the prediction took.
    """

    model: Model
    variant: Variant
    truth: Counted
    predicted: dict[tuple[int, str], int]
    seconds: float

    def errors(self, excused: bool = True) -> list[float]:
        """Of each step and phase, as a fraction of the truth; `excused`: less the scratch that is."""
        found = []
        for (step, phase), predicted in self.predicted.items():
            truth = self.truth.peak(step, phase, without_scratch=excused)
            found.append((predicted - truth) / truth)
        return found


def compare(model: Model, variant: Variant) -> Row:
    """Train for real, predict, and put both side by side."""
    drawn = model.batch(model.size)
    truth = count(lambda mark: train(variant.apply(model.make()), drawn, model, variant, len(STEPS), mark), EXCUSED)
    fresh = variant.apply(model.make())
    start = time.perf_counter()
    profile = autobalance.profile(
        fresh,
        drawn,
        optimizer=variant.optimizer,
        precision=variant.precision,
        step=model.step,
        target="cpu",
        accumulate=variant.accumulate,
        clip=variant.clip,
    )
    seconds = time.perf_counter() - start
    predicted = {(step, phase): profile.peak(step, phase=phase) for step in STEPS for phase in PHASES}
    return Row(model, variant, truth, predicted, seconds)


def worst(errors: list[float]) -> float:
    """The one that is farthest from 0, with its sign."""
    return max(errors, key=abs)


def table_of(rows: list[Row]) -> Table:
    """Truth in MiB for steps 1 and 3, and the worst error over steps 1 to 3 and both phases."""
    table = Table(title="peak bytes of the CPU's allocator, predicted against counted")
    table.add_column("model")
    table.add_column("variant")
    for title in ("step 1 fwd+bwd", "optimizer", "step 3 fwd+bwd", "worst error", "with scratch", "predicted in"):
        table.add_column(title, justify="right")
    for row in rows:
        truth = [
            f"{row.truth.peak(step, phase) / MIB:,.1f}"
            for step, phase in ((1, PHASES[0]), (1, PHASES[1]), (3, PHASES[0]))
        ]
        errors = [f"{worst(row.errors(excused)):+.4%}" for excused in (True, False)]
        table.add_row(row.model.name, row.variant.name, *truth, *errors, f"{row.seconds:.1f} s")
    return table


def scratch_of(rows: list[Row]) -> Table:
    """The most that one call of each excused operation took inside."""
    table = Table(title="excused scratch, measured")
    for title in ("operation", "most in one call, MiB", "what it is"):
        table.add_column(title)
    for name, reason in EXCUSED.items():
        most = max((row.truth.scratch.get(name, 0) for row in rows), default=0)
        table.add_row(name, f"{most / MIB:.2f}", reason)
    return table


def judge(rows: list[Row], console: Console) -> bool:
    """Print worst and median; whether every bar is met."""
    met = True
    for convolutional in (False, True):
        errors = [error for row in rows if row.model.convolutional == convolutional for error in row.errors()]
        if not errors:
            continue
        bar = WORST_CONVOLUTIONAL if convolutional else WORST
        median = statistics.median(map(abs, errors))
        kind = "convolutions" if convolutional else "all others"
        within = abs(worst(errors)) <= bar and (convolutional or median <= MEDIAN)
        wanted = f"at most {bar:.1%}" + ("" if convolutional else f", median {MEDIAN:.2%}")
        console.print(
            f"{kind}: {len(errors)} peaks, worst {worst(errors):+.4%}, median {median:.4%} ({wanted}): "
            f"{'met' if within else 'MISSED'}"
        )
        met = met and within
    return met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    console = Console(width=140)
    rows = []
    for model in arguments.models:
        for variant in arguments.variants:
            rows.append(compare(ZOO[model], VARIANTS[variant]))
            console.print(f"{model}, {variant}: {worst(rows[-1].errors()):+.4%}", style="dim")
    console.print(table_of(rows))
    console.print(scratch_of(rows))
    return 0 if judge(rows, console) else 1


if __name__ == "__main__":
    sys.exit(main())
