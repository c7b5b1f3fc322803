"""A call that runs in a thread of its own, and only while it holds the baton: it can stop in the midst of user code.

Threads and not greenlets: torch keeps grad mode, autocast and other state by thread, and interleaved calls in one
thread would mix it up. Of all threads one runs at a time, so that the order of launches is the same in every run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from autobalance.execution.carried import Carried, carried_state
from autobalance.execution.process_state import ProcessState
from autobalance.execution.workers import Worker, Workers

_PATIENCE = 0.05
"""Seconds after which it is asked again whether a call that was left running has come to rest."""


class Cancelled(BaseException):
    """Raised where a call handed the baton back, to wind it down; no error of the user's."""


class Suspended:
    """A call that stops wherever it hands the baton back, and goes on when it is resumed.

    Example:
        >>> call = Suspended(lambda: (print("one"), hand_back(), print("two")))
        >>> call.resume()
        one
        >>> call.resume()
        two
        >>> call.has_ended
        True

    Args:
        call: the code to run; it sees the thread-local state of torch and the context variables of the thread that
            makes this object.
        name: of the thread, for debuggers.
        workers: whose threads to use; None: a thread of its own, which ends with the call.

    Attributes:
        has_ended: whether the call has returned or failed.
    """

    def __init__(
        self, call: Callable[[], object], name: str = "autobalance micro-batch", workers: Workers | None = None
    ) -> None:
        self.has_ended = False
        self._name = name
        self._workers = workers
        self._worker: Worker | None = None
        self._call: Callable[[], object] | None = call
        self._carried: Carried | None = carried_state()
        self._error: BaseException | None = None
        self._outside: ProcessState | None = None
        self._is_cancelled = False
        self._goes_on, self._comes_back = _closed_gate(), _closed_gate()
        self._is_running = False
        self._is_at_rest = True

    def resume(self) -> None:
        """Let the call run until it hands the baton back or ends.

        Raises:
            BaseException: what the call raised, with its own traceback.
            RuntimeError: the call has ended.
        """
        if self.has_ended:
            raise RuntimeError("the call has ended: there is nothing to resume")
        if self._worker is None:
            worker = Worker() if self._workers is None else self._workers.take()
            worker.run(self._run, self._name)
            self._worker = worker
        self._is_running = True  # not before: an interrupt of `run` leaves nobody to wait for
        self._goes_on.release()
        self._wait()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and so would keep itself and all that the call held

    def cancel(self) -> None:
        """Wind the call down: it sees `Cancelled` where it stopped. Waits for one that an interrupt left running."""
        if self._worker is None and not self.has_ended:
            self.has_ended = self._is_cancelled = True
            self._call = self._carried = None
            self._goes_on.release()  # an interrupt may have come when a thread had just been given the call
        while self._is_running:
            # An interrupt may have come when the baton was back, but before that was noted, or before it was given.
            is_at_rest = self._is_at_rest and self._goes_on.locked()
            if self._comes_back.acquire(timeout=_PATIENCE) or (is_at_rest and self._is_at_rest):
                self._is_running = False
        self._is_cancelled = True
        while not self.has_ended:  # user code may catch everything, and go on to the next hand-over
            self._goes_on.release()
            self._wait()
        self._let_go()
        self._error = None

    def hand_back(self) -> None:
        """Stop here until resumed; only for the call's own thread.

        Raises:
            Cancelled: the call is to be wound down.
        """
        assert self._outside is not None
        inside = ProcessState()
        self._outside.put_back(inside)
        self._is_at_rest = True
        self._comes_back.release()
        self._goes_on.acquire()
        self._is_at_rest = False
        self._outside = ProcessState()
        inside.put_back(self._outside)
        if self._is_cancelled:
            raise Cancelled

    def _wait(self) -> None:
        self._comes_back.acquire()
        self._is_running = False
        if self.has_ended:
            self._let_go()

    def _let_go(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None and self._workers is not None:
            self._workers.give_back(worker)
        elif worker is not None:
            worker.end()

    def _run(self) -> None:
        self._goes_on.acquire()
        self._is_at_rest = False
        carried, call = self._carried, self._call
        self._carried = self._call = None  # what they hold is freed when the call ends, not when this object is
        if carried is not None and call is not None and not self._is_cancelled:
            self._run_carried(carried, call)
        del carried, call
        self.has_ended = self._is_at_rest = True
        self._comes_back.release()

    def _run_carried(self, carried: Carried, call: Callable[[], object]) -> None:
        _here.call = self
        try:
            self._outside = ProcessState()
            try:
                carried.run(call)
            finally:
                self._outside.put_back()
        except BaseException as error:  # whatever it is: who waits for the baton would wait forever
            self._error = error
        finally:
            _here.call = None


def _closed_gate() -> threading.Lock:
    """A lock that one thread opens for another: a semaphore would take twice the time."""
    gate = threading.Lock()
    gate.acquire()
    return gate


class _Here(threading.local):
    call: Suspended | None = None


_here = _Here()


def current_call() -> Suspended | None:
    """The suspended call whose thread this is; None in any other thread."""
    return _here.call


def hand_back() -> None:
    """Stop the call whose thread this is until it is resumed; does nothing in any other thread."""
    if _here.call is not None:
        _here.call.hand_back()
