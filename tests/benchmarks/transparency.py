"""Is a split model the model? Random models under random plans, against the same models whole on one device.

Run it by hand from the repository: `OMP_NUM_THREADS=1 python -m tests.benchmarks.transparency`; about half an hour. For
every model and schedule: the gradients of the first step, the losses of 20 optimizer steps, and the peak of each
simulated device against the plan's.

What is whole is a plain loop over whole batches. Where there is dropout and batches are in parts, masks differ from
those of whole batches by intention; the loop then runs the same parts, one after the other, and seeds as documented. So
does the strategy itself on one device, whose first loss has to be the same to the last bit.

A gradient may differ by 1e-6, or by 1e-6 of the largest of its parameter if that is more than 1; in bfloat16 by 2e-2 of
the largest of its parameter, or of a hundredth of the largest of the model if that is more. A loss may differ by as
much, for its own size, or by as much as those of two whole models whose weights are one rounding apart: training some
models multiplies any difference. A peak may lie 0.5 % beside the plan's, and never above the budget. Exit status 1
where a bar is missed, or where a batch was not split as the plan says.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks.transparent_runs import Case, Run, draw_case, run_by_hand, run_on_one, run_split, run_whole

EXACT, AUTOCAST, PEAK = 1e-6, 2e-2, 0.005
SCHEDULES = ("naive", "gpipe", "1f1b", "looped")


@dataclass(frozen=True)
class Verdict:
    """How far a split model is from the whole one.

    Attributes:
        case: what ran.
        gradient, loss: the largest difference, as a multiple of what is allowed.
        peak: the largest difference of a device, as a fraction of the plan's.
        faults: what is wrong, in words; empty where nothing is.
    """

    case: Case
    gradient: float
    loss: float
    peak: float
    faults: tuple[str, ...]


def judge(case: Case, package: str = "lightning.pytorch", steps: int = 20) -> Verdict:
    """Train split and whole, and compare.

    Example:
        >>> judge(draw_case(7, "1f1b")).faults
        ()

    Args:
        case: what to run.
        package: the Lightning package.
        steps: optimizer steps.
    """
    split = run_split(case, package, steps)
    whole = run_by_hand(case, steps) if case.is_seeded else run_whole(case.recipe, steps)
    tolerance = AUTOCAST if case.recipe.autocast else EXACT
    gradient = max(_differences(split, whole, case.recipe.autocast), default=0.0) / tolerance
    loss = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(split.losses, whole.losses, strict=True)) / tolerance
    if loss > 1:
        loss *= tolerance / max(tolerance, _of_one_rounding(case, steps))
    beside = zip(split.peaks, split.plan.peaks, strict=True)
    peak = max(abs(reached - planned) / max(1, planned) for reached, planned in beside)
    faults = [*_faults(case, split, whole, gradient, loss, peak)]
    if case.is_seeded:
        alone = run_on_one(case, package, 1)
        gradient = max(gradient, *(each / tolerance for each in _differences(split, alone, case.recipe.autocast)))
        if split.losses[0] != alone.losses[0] or gradient > 1:
            faults.append(f"the first loss is {split.losses[0]}, but {alone.losses[0]} if all is on one device")
    return Verdict(case, gradient, loss, peak, tuple(faults))


def _of_one_rounding(case: Case, steps: int) -> float:
    """How far apart the losses of the whole model are if its weights are one rounding apart."""
    one, other = (run_whole(case.recipe, steps, nudge).losses for nudge in (0.0, torch.finfo(torch.float32).eps))
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(one, other, strict=True))


def _differences(split: Run, whole: Run, is_autocast: bool) -> Iterator[float]:
    """Of each parameter's gradient, for its own size."""
    largest = {name: float(gradient.abs().max()) for name, gradient in whole.gradients.items()}
    least = max(largest.values(), default=0.0) / 100 if is_autocast else 1.0
    for name in split.gradients.keys() & whole.gradients.keys():
        difference = float((split.gradients[name] - whole.gradients[name]).abs().max())
        yield difference / max(largest[name], least)


def _faults(case: Case, split: Run, whole: Run, gradient: float, loss: float, peak: float) -> Iterator[str]:
    if split.gradients.keys() != whole.gradients.keys():
        yield f"other parameters have gradients: {sorted(split.gradients.keys() ^ whole.gradients.keys())}"
    if not gradient <= 1:
        yield f"a gradient differs by {gradient:.3g} times what is allowed"
    if not loss <= 1:
        yield f"a loss differs by {loss:.3g} times what is allowed"
    if split.parts != case.micro_batches:
        yield f"a batch ran in {split.parts} parts"
    if peak > PEAK:
        yield f"peaks were {split.peaks}, planned {list(split.plan.peaks)}"
    if any(reached > budget for reached, budget in zip(split.peaks, split.plan.budgets, strict=True)):
        yield f"peaks were {split.peaks}, budgets {list(split.plan.budgets)}"
    if case.budget is None and split.plan.assignment != case.assignment:
        yield f"blocks were on {split.plan.assignment}"


def main() -> int:
    """Judge all models under the chosen schedules, print a table, and say whether the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="how many models (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them (%(default)s)")
    parser.add_argument("--schedule", choices=SCHEDULES, action="append", help="default: all of them")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for package in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(package).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    console, schedules = Console(width=120), options.schedule or SCHEDULES
    verdicts = []
    for seed in range(options.seed, options.seed + options.count):
        for schedule in schedules:
            verdicts.append(_survived(draw_case(seed, schedule)))
            for fault in verdicts[-1].faults:
                console.print(f"{verdicts[-1].case}: {fault}", highlight=False)
    console.print(_table(verdicts, schedules))
    failed = sum(bool(verdict.faults) for verdict in verdicts)
    console.print(f"{failed} of {len(verdicts)} cases missed a bar" if failed else "bars met")
    return 1 if failed else 0


def _survived(case: Case) -> Verdict:
    try:
        return judge(case)
    except Exception as error:  # the other models are judged in any case
        return Verdict(case, 0.0, 0.0, 0.0, (f"{type(error).__name__}: {str(error).strip()[:400]}",))


def _table(verdicts: Sequence[Verdict], schedules: Iterable[str]) -> Table:
    columns = (
        "cases",
        "dropout",
        "saving memory",
        "gradients",
        "in bfloat16",
        "losses",
        "in bfloat16",
        "peaks",
        "failed",
    )
    table = Table("schedule", *columns)
    for schedule in schedules:
        mine = [verdict for verdict in verdicts if verdict.case.schedule == schedule]
        exact = [verdict for verdict in mine if not verdict.case.recipe.autocast]
        cast = [verdict for verdict in mine if verdict.case.recipe.autocast]
        table.add_row(
            schedule,
            str(len(mine)),
            str(sum(verdict.case.recipe.dropout > 0 for verdict in mine)),
            str(sum(verdict.case.saves for verdict in mine)),
            f"{EXACT * max((verdict.gradient for verdict in exact), default=0.0):.1e}",
            f"{AUTOCAST * max((verdict.gradient for verdict in cast), default=0.0):.1e}",
            f"{EXACT * max((verdict.loss for verdict in exact), default=0.0):.1e}",
            f"{AUTOCAST * max((verdict.loss for verdict in cast), default=0.0):.1e}",
            f"{max((verdict.peak for verdict in mine), default=0.0):.2%}",
            str(sum(bool(verdict.faults) for verdict in mine)),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
