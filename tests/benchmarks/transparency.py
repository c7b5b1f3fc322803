"""Is a split model the model? Random models under random plans, against the same models whole on one device.

Run it by hand from the repository: `OMP_NUM_THREADS=1 python -m tests.benchmarks.transparency`; about half an hour. For
every model and schedule: the gradients of the first step, the losses of 20 optimizer steps, and the peak of each
simulated device against the plan's.

What is whole is a plain loop over whole batches. Where there is dropout and batches are in parts, masks differ from
those of whole batches by intention; the loop then runs the same parts, one after the other, and seeds as documented. So
does the strategy itself on one device, whose first loss has to be the same to the last bit.

A gradient may differ by 1e-6, or by 1e-6 of the largest of its parameter if that is more than 1; in bfloat16 by 2e-2 of
the largest of its parameter, or of a hundredth of the largest of the model if that is more. A loss may differ by as
much, for its own size. Training some models multiplies any difference: where a loss differs by more, the plain loop is
run again with weights that are one rounding away, and the loss may differ by what that makes of its own losses. Such
cases are printed, and are in rows of their own. A peak may lie 0.5 % beside the plan's, and never above the budget.
Exit status 1 where a bar is missed, or where a batch was not split as the plan says.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks.transparent_runs import Case, Run, draw_case, run_by_hand, run_on_one, run_split, run_whole

EXACT, AUTOCAST, PEAK = 1e-6, 2e-2, 0.005
TOSSES = 4  # of the coins by which weights are rounded: each is a sample of what one rounding may do
SCHEDULES = ("naive", "gpipe", "1f1b", "looped")


@dataclass(frozen=True)
class Verdict:
    """How far a split model is from the whole one.

    Attributes:
        case: what ran.
        gradient, loss: the largest difference, as a multiple of what is allowed.
        sensitivity: that of losses of plain loops whose weights are one rounding apart; 0 where no loss differs by more
            than is allowed.
        peak: the largest difference of a device, as a fraction of the plan's.
        faults: what is wrong, in words; empty where nothing is.
    """

    case: Case
    gradient: float
    loss: float
    sensitivity: float
    peak: float
    faults: tuple[str, ...]

    @property
    def tolerance(self) -> float:
        """What is allowed."""
        return AUTOCAST if self.case.recipe.autocast else EXACT


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
    split, whole = run_split(case, package, steps), _run_plain(case, steps)
    tolerance = AUTOCAST if case.recipe.autocast else EXACT
    gradient = max(_differences(split, whole, case.recipe.autocast), default=0.0) / tolerance
    loss = _largest(split.losses, whole.losses) / tolerance
    sensitivity = _of_one_rounding(case, steps, whole.losses) / tolerance if loss > 1 else 0.0
    beside = zip(split.peaks, split.plan.peaks, strict=True)
    peak = max(abs(reached - planned) / max(1, planned) for reached, planned in beside)
    faults = [*_faults(case, split, whole, gradient, peak)]
    if not loss <= max(1, sensitivity):
        faults.append(f"a loss differs by {loss:.3g} times what is allowed, and by {sensitivity:.3g} times by rounding")
    if case.is_seeded:
        alone = run_on_one(case, package, 1)
        gradient = max(gradient, *(each / tolerance for each in _differences(split, alone, case.recipe.autocast)))
        if split.losses[0] != alone.losses[0] or gradient > 1:
            faults.append(f"the first loss is {split.losses[0]}, but {alone.losses[0]} if all is on one device")
    return Verdict(case, gradient, loss, sensitivity, peak, tuple(faults))


def _run_plain(case: Case, steps: int, coins: int | None = None) -> Run:
    """The plain loop that a split model is compared with."""
    return run_by_hand(case, steps, coins) if case.is_seeded else run_whole(case.recipe, steps, coins)


def _of_one_rounding(case: Case, steps: int, losses: Sequence[float]) -> float:
    """How far the plain loop's losses are from those where its weights are one rounding away."""
    return max(_largest(_run_plain(case, steps, coins).losses, losses) for coins in range(TOSSES))


def _largest(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference, for the size of the others."""
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, others, strict=True))


def _differences(split: Run, whole: Run, is_autocast: bool) -> Iterator[float]:
    """Of each parameter's gradient, for its own size."""
    largest = {name: float(gradient.abs().max()) for name, gradient in whole.gradients.items()}
    least = max(largest.values(), default=0.0) / 100 if is_autocast else 1.0
    for name in split.gradients.keys() & whole.gradients.keys():
        difference = float((split.gradients[name] - whole.gradients[name]).abs().max())
        yield difference / max(largest[name], least)


def _faults(case: Case, split: Run, whole: Run, gradient: float, peak: float) -> Iterator[str]:
    if split.gradients.keys() != whole.gradients.keys():
        yield f"other parameters have gradients: {sorted(split.gradients.keys() ^ whole.gradients.keys())}"
    if not gradient <= 1:
        yield f"a gradient differs by {gradient:.3g} times what is allowed"
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
            verdict = _survived(draw_case(seed, schedule))
            verdicts.append(verdict)
            for said in (*verdict.faults, *_by_rounding(verdict)):
                console.print(f"{verdict.case}: {said}", highlight=False)
    console.print(_table(verdicts, schedules))
    failed = sum(bool(verdict.faults) for verdict in verdicts)
    console.print(f"{failed} of {len(verdicts)} cases missed a bar" if failed else "bars met")
    return 1 if failed else 0


def _survived(case: Case) -> Verdict:
    try:
        return judge(case)
    except Exception as error:  # the other models are judged in any case
        return Verdict(case, 0.0, 0.0, 0.0, 0.0, (f"{type(error).__name__}: {str(error).strip()[:400]}",))


def _by_rounding(verdict: Verdict) -> Iterator[str]:
    """Says which loss is beyond the bar, but not beyond what one rounding makes."""
    if 1 < verdict.loss <= verdict.sensitivity:
        yield (
            f"a loss differs by {verdict.loss * verdict.tolerance:.1e}; in the plain loop, one rounding of the weights "
            f"makes {verdict.sensitivity * verdict.tolerance:.1e}"
        )


def _table(verdicts: Sequence[Verdict], schedules: Sequence[str]) -> Table:
    table = Table("", *schedules, "all")
    columns = [[one for one in verdicts if one.case.schedule == schedule] for schedule in schedules]
    for name, figure in _FIGURES.items():
        table.add_row(name, *(figure(column) for column in [*columns, list(verdicts)]))
    return table


def _count(holds: Callable[[Verdict], bool]) -> Callable[[Sequence[Verdict]], str]:
    return lambda verdicts: str(sum(map(holds, verdicts)))


def _largest_of(
    difference: Callable[[Verdict], float], autocast: bool, by_rounding: bool | None = None
) -> Callable[[Sequence[Verdict]], str]:
    """The largest difference of models of a precision; of losses, of those beyond the bar or of the others."""

    def largest(verdicts: Sequence[Verdict]) -> str:
        mine = (one for one in verdicts if one.case.recipe.autocast == autocast)
        found = [difference(one) * one.tolerance for one in mine if by_rounding in (None, one.loss > 1)]
        return f"{max(found):.1e}" if found else "-"

    return largest


_FIGURES: dict[str, Callable[[Sequence[Verdict]], str]] = {
    "cases": lambda verdicts: str(len(verdicts)),
    "with dropout": _count(lambda one: one.case.recipe.dropout > 0),
    "saving memory": _count(lambda one: one.case.saves),
    "with shared blocks": _count(lambda one: one.case.shares),
    "in bfloat16": _count(lambda one: one.case.recipe.autocast),
    "gradients": _largest_of(lambda one: one.gradient, autocast=False),
    "gradients, bfloat16": _largest_of(lambda one: one.gradient, autocast=True),
    "losses": _largest_of(lambda one: one.loss, autocast=False, by_rounding=False),
    "losses, bfloat16": _largest_of(lambda one: one.loss, autocast=True, by_rounding=False),
    "losses beyond, by one rounding": _count(lambda one: 1 < one.loss <= one.sensitivity),
    "the largest": _largest_of(lambda one: one.loss, autocast=False, by_rounding=True),
    "the largest, bfloat16": _largest_of(lambda one: one.loss, autocast=True, by_rounding=True),
    "peaks off by a byte or more": _count(lambda one: one.peak > 0),
    "the furthest": lambda verdicts: f"{max((one.peak for one in verdicts), default=0.0):.2%}",
    "failed": _count(lambda one: bool(one.faults)),
}


if __name__ == "__main__":
    sys.exit(main())
