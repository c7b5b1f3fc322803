"""Threads that are left behind, whatever others run: progress bars and autograd's engine keep some for good."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_thread_left() -> Iterator[None]:
    """Every thread that is started inside has ended in the end."""
    before = set(threading.enumerate())
    yield
    left = {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)} - before
    assert not left
