from __future__ import annotations

import gc
import threading
import weakref

import pytest

from autobalance.execution.suspended import Suspended, hand_back
from autobalance.execution.workers import Worker, Workers
from tests.execution.test_suspended import threads


def test_one_thread_runs_calls_that_come_one_after_another() -> None:
    workers, seen = Workers(), list[int]()
    for _ in range(3):
        call = Suspended(lambda: seen.append(threading.get_ident()), workers=workers)
        call.resume()
        call.cancel()
    assert len(set(seen)) == 1
    assert seen[0] != threading.get_ident()
    workers.end()
    assert threads() == []


def test_calls_that_are_in_flight_together_have_threads_of_their_own() -> None:
    workers, seen = Workers(), list[str]()

    def run() -> None:
        seen.append(threading.current_thread().name)
        hand_back()

    calls = [Suspended(run, f"autobalance micro-batch {number}", workers) for number in range(3)]
    for call in calls:
        call.resume()
    assert sorted(threads()) == seen == [f"autobalance micro-batch {number}" for number in range(3)]
    for call in calls:
        call.cancel()
    workers.end()
    assert threads() == []


def test_a_call_that_fails_leaves_its_thread_to_the_next() -> None:
    workers, seen = Workers(), list[int]()

    def fails() -> None:
        seen.append(threading.get_ident())
        raise ValueError("of the user")

    with pytest.raises(ValueError, match="of the user"):
        Suspended(fails, workers=workers).resume()
    Suspended(lambda: seen.append(threading.get_ident()), workers=workers).resume()
    assert len(set(seen)) == 1
    workers.end()


def test_a_call_that_was_interrupted_before_it_began_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, told = Workers(), list[str]()
    plain = Worker.run

    def interrupted(worker: Worker, *args: object) -> None:
        plain(worker, *args)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(Worker, "run", interrupted)
    call = Suspended(lambda: told.append("ran"), workers=workers)
    with pytest.raises(KeyboardInterrupt):
        call.resume()
    call.cancel()
    assert call.has_ended
    del call
    assert threads() == []
    assert told == []


def test_threads_end_with_what_keeps_them() -> None:
    workers = Workers()
    Suspended(lambda: None, workers=workers).resume()
    assert threads() == ["autobalance worker"]
    del workers
    assert threads() == []


def test_an_idle_thread_holds_nothing_of_its_last_call() -> None:
    class Held:
        pass

    held, workers = Held(), Workers()
    freed = weakref.ref(held)
    Suspended(lambda held=held: None, workers=workers).resume()  # type: ignore[misc]
    del held
    gc.collect()
    assert freed() is None
    workers.end()
