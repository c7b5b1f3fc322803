"""Whether batches of a run stay whole, are split, or flow together as the micro-batches of one step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from autobalance.execution.batches.splitting import parts_of
from autobalance.strategy.options import Options
from autobalance.strategy.parts.splittable import against_overlap, hooks_on_gradients, in_words, reasons
from autobalance.strategy.trials.trial import LightningTrial


class Way(Enum):
    """What a micro-batch is."""

    WHOLE = 0
    """There are none: one device works at a time."""
    PARTS = 1
    """A part of a batch."""
    WINDOW = 2
    """A batch, of those whose gradients `accumulate_grad_batches` adds up."""


@dataclass(frozen=True)
class Choice:
    """The way for a run.

    Attributes:
        way: chosen.
        why: what the user is to be told; empty: nothing.
    """

    way: Way
    why: str = ""


def choice_for(trainer: Any, options: Options, batch: Any, devices: int, trial: LightningTrial) -> Choice:
    """The way that a run allows, and that its options ask for.

    Example:
        >>> choice_for(trainer, Options(), batch, 4, trial).way
        <Way.PARTS: 1>

    Args:
        trainer: a Trainer inside `fit`, `validate`, `test` or `predict`.
        options: of the strategy.
        batch: of the run, of training where it trains.
        devices: how many there are.
        trial: that has run, so that it knows the run's optimizers.
    """
    module = trainer.lightning_module
    has_window = trainer.state.fn == "fit" and trial.window > 1
    against = against_overlap(trainer, module, trial.optimizers)
    in_windows = [said for said in [hooks_on_gradients(module)] if said is not None]
    if options.micro_batches == "accumulate":
        against += in_windows
        if not has_window:
            against.append(
                "micro_batches='accumulate' takes the batches that `accumulate_grad_batches` adds up, but it is 1"
            )
        return Choice(Way.WHOLE, in_words(against)) if against else Choice(Way.WINDOW)
    if against:
        return Choice(Way.WHOLE, in_words(against))
    found = reasons(trainer, module, options, batch, trial.optimizers)
    if not found and not (has_window and options.micro_batches == "auto"):
        return Choice(Way.PARTS)
    if has_window and options.micro_batches == "auto":
        is_too_small = bool(found) or _parts_at_most(module, batch, devices) < devices
        if is_too_small and in_windows:
            return Choice(Way.WHOLE, in_words([*found, *in_windows]))
        return Choice(Way.WINDOW if is_too_small else Way.PARTS)
    return Choice(Way.WHOLE, in_words(found))


def _parts_at_most(module: Any, batch: Any, count: int) -> int:
    try:
        return len(parts_of(module, batch, count).batches)
    except Exception:  # of the user's own hook as well: it may make two parts, and not so many
        return 1
