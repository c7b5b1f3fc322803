"""Trainers that step in turn in one process, so that whatever else the machine does falls on all of them."""

from __future__ import annotations

import importlib
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any

from tests.models import loader


class Runner:
    """One Trainer in a thread, which steps when it is told to.

    Example:
        >>> runner = Runner("lightning.pytorch", Net(), batches, devices=1)
        >>> seconds = [runner.turn() for _ in batches]
        >>> runner.finish()

    Args:
        package: the Lightning package.
        module: the model.
        batches: one for each step.
        steps: for each turn.
        options: of the Trainer.

    Attributes:
        module: the model.
        trainer: the Trainer.
    """

    def __init__(self, package: str, module: Any, batches: Sequence[Any], steps: int = 1, **options: Any) -> None:
        lightning = importlib.import_module(package)
        self.module = module
        self._mine, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._ready = threading.Event()
        self._steps, self._seconds = steps, list[float]()
        self._error: BaseException | None = None
        self.trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[self._turns(lightning.Callback)],
            **options,
        )
        self._thread = threading.Thread(target=self._fit, args=(module, loader(list(batches))), daemon=True)
        self._thread.start()
        self._ready.wait()  # planning and placing are no business of two threads

    def turn(self) -> float:
        """Seconds per step of the next steps.

        Raises:
            BaseException: what ended the fit.
        """
        self._mine.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return statistics.fmean(self._seconds[-self._steps :])

    def finish(self) -> None:
        """Wait for the end of the fit."""
        self._thread.join()

    def _fit(self, module: Any, batches: Any) -> None:
        try:
            self.trainer.fit(module, batches)
        except BaseException as error:
            self._error = error
            self._ready.set()
            self._done.release()

    def _turns(self, base: type) -> Any:
        runner = self

        class Turns(base):  # type: ignore[misc, valid-type]
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
                runner._ready.set()
                if index % runner._steps == 0:
                    runner._mine.acquire()
                self.start = time.perf_counter()

            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
                runner._seconds.append(time.perf_counter() - self.start)
                if (index + 1) % runner._steps == 0:
                    runner._done.release()

        return Turns()


def in_turn(runners: Sequence[Runner], turns: int, warm: int = 2) -> list[list[float]]:
    """Seconds per step of each runner's turns, the order reversed every time; those of the first turns are left out.

    Example:
        >>> plain, hooked = in_turn([Runner(...), Runner(...)], turns=50)

    Args:
        runners: with batches for as many turns, and the warm ones.
        turns: how many count.
        warm: how many come before.
    """
    seconds: list[list[float]] = [[] for _ in runners]
    for turn in range(turns + warm):
        order = range(len(runners)) if turn % 2 else reversed(range(len(runners)))
        times = {index: runners[index].turn() for index in order}
        if turn >= warm:
            for index, mine in enumerate(seconds):
                mine.append(times[index])
    for runner in runners:
        runner.finish()
    return seconds
