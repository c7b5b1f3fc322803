"""What is told of a batch that ran out of memory: as it goes on, and at the end if nothing has helped."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from autobalance.strategy.recovery.shortage import Shortage
from autobalance.strategy.registration import lightning_root

_HELP = (
    "What helps: a smaller batch, more devices, `reserve=` to leave room on each device for what planning cannot see, "
    "or `worst_batch=` if some batches are larger than others."
)


class Story:
    """The failures of one batch, and what was done about each.

    Args:
        strategy: whose batch it is.
    """

    def __init__(self, strategy: Any) -> None:
        self.shortages: list[Shortage] = []
        self._strategy = strategy
        self._first: BaseException | None = None
        self._lines: list[str] = []

    def add(self, error: BaseException, shortage: Shortage) -> None:
        """Another failure.

        Args:
            error: what was raised.
            shortage: what it tells.
        """
        if self._first is None:
            self._first = error
        self.shortages.append(shortage)
        self._lines.append(shortage.told(self._strategy.parallel_devices))

    def say(self, done: str) -> None:
        """Say once what was done about the last failure.

        Args:
            done: in words.
        """
        self._lines[-1] += f": {done}"
        trainer = self._strategy.lightning_module.trainer
        warn = import_module(f"{lightning_root(trainer)}.utilities.rank_zero").rank_zero_warn
        warn(f"Out of memory in {_where(trainer)}. {self._lines[-1]}. Nothing of the run is lost.")

    def error(self, why: str) -> BaseException:
        """The first error, with the story in its text.

        Args:
            why: the run cannot go on.
        """
        assert self._first is not None
        lines = "\n".join(f"  {number}. {line}" for number, line in enumerate(self._lines, 1))
        where = _where(self._strategy.lightning_module.trainer)
        # Tuners and others know the error by its class, its only argument and the words at its beginning.
        self._first.args = (f"{self._first}\n\nOut of memory in {where}:\n{lines}\n{why}\n{_HELP}",)
        return self._first

    def close(self) -> None:
        """Let the errors go, whose tracebacks hold frames."""
        self._first = None


def half_updated(trainer: Any) -> str:
    """Why a run cannot go on after a failure in the midst of an optimizer step, and from where it can.

    Args:
        trainer: a Trainer in `fit`.
    """
    return (
        "The optimizer step had begun: some weights or optimizer state are updated and others are not, so going on "
        f"would train another model. {_last_checkpoint(trainer)}"
    )


def _last_checkpoint(trainer: Any) -> str:
    paths = {
        Path(path)
        for callback in trainer.checkpoint_callbacks
        for path in (getattr(callback, "last_model_path", ""), getattr(callback, "best_model_path", ""))
        if path
    }
    there = [path for path in paths if path.exists()]
    if not there:
        return "No checkpoint has been written in this run: start again, and write some with ModelCheckpoint."
    last = max(there, key=lambda path: path.stat().st_mtime_ns)
    return f"The last checkpoint is whole: trainer.fit(model, ckpt_path={str(last)!r}) continues from it."


def _where(trainer: Any) -> str:
    if trainer.training:
        return f"training batch {trainer.fit_loop.epoch_loop.batch_idx} of epoch {trainer.current_epoch}"
    return f"a batch of {trainer.state.stage.value}"
