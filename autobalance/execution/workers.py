"""Threads that are kept for the next micro-batch: a new one costs the stack, the memory and the buffers of kernels."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

Job = Callable[[], None]


class Worker:
    """A thread that runs one job after another, and waits between them.

    Example:
        >>> worker = Worker()
        >>> worker.run(lambda: print("in another thread"), "autobalance micro-batch 0")
        in another thread
        >>> worker.end()
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Job, str] | None] = SimpleQueue()
        weakref.finalize(self, self._jobs.put, None).atexit = False
        # A daemon, so that user code which never comes back cannot keep the process alive.
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name="autobalance worker", daemon=True)

    def run(self, job: Job, name: str) -> None:
        """Let the thread run a job after those it was given before; it must not raise.

        Args:
            job: to run.
            name: of the thread meanwhile, for debuggers.
        """
        self._jobs.put((job, name))
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """End the thread after its jobs, and wait for that. One that nobody holds any more ends by itself."""
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join()


class Workers:
    """Those that are idle.

    Example:
        >>> workers = Workers()
        >>> worker = workers.take()
        >>> workers.give_back(worker)
        >>> workers.take() is worker
        True
    """

    def __init__(self) -> None:
        self._idle: list[Worker] = []

    def take(self) -> Worker:
        """The one that became idle last, so that as few threads are in use as micro-batches are in flight."""
        return self._idle.pop() if self._idle else Worker()

    def give_back(self, worker: Worker) -> None:
        """Keep it for the next micro-batch.

        Args:
            worker: whose jobs are done, or about to be.
        """
        self._idle.append(worker)

    def end(self) -> None:
        """End all that are idle; further ones can be taken."""
        while self._idle:
            self._idle.pop().end()


def _work(jobs: SimpleQueue[tuple[Job, str] | None]) -> None:
    thread = threading.current_thread()
    while (given := jobs.get()) is not None:
        job, thread.name = given
        del given
        job()
        del job  # with all that it holds, before the wait for the next
        thread.name = "autobalance worker"
