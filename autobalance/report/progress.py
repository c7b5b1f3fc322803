"""A progress bar for what may take long, with the name of the block that is at work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

DELAY = 1.0  # seconds; what is over sooner needs no bar


class ProgressBar:
    """Shows on a terminal, once a second is over, how far something is; it leaves nothing behind.

    Example:
        >>> with ProgressBar("profiling", total=len(names)) as bar:     # doctest: +SKIP
        ...     for name in names:
        ...         bar(name)

    Args:
        title: what is under way.
        total: how often it will be told of progress; more is no harm.
        console: where it shows; None: standard error, if that is a terminal.
        clock: seconds.
    """

    def __init__(
        self,
        title: str,
        total: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = Console(stderr=True) if console is None else console
        self._clock = clock
        self._begun = clock()
        self._total = total
        self._done = 0
        self._progress = Progress(
            TextColumn(title),
            BarColumn(),
            TextColumn("{task.fields[name]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=total, name="")

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._progress.live.is_started:
            self._progress.stop()

    def __call__(self, name: str) -> None:
        """Tell that work on `name` begins."""
        self._done += 1
        if not self._progress.live.is_started:
            if not self._console.is_terminal or self._clock() - self._begun < DELAY:
                return
            self._progress.start()
        self._progress.update(self._task, completed=self._done, total=max(self._total, self._done), name=name)
