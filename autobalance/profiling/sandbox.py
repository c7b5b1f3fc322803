"""Keep random numbers as they were: a trial may draw as many as it likes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def random_state() -> Callable[[], None]:
    """Take note of Python's, NumPy's and torch's random state (CPU and every initialised GPU).

    Example:
        >>> put_back = random_state()
        >>> first = torch.rand(3)
        >>> put_back()
        >>> torch.equal(torch.rand(3), first)
        True

    Returns:
        What puts it back; may be called again.
    """
    python_state = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    torch_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back() -> None:
        random.setstate(python_state)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)

    return put_back


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore Python's, NumPy's and torch's random state (CPU and every initialised GPU) on exit.

    Example:
        >>> with random_state_kept():
        ...     _ = torch.rand(3)
    """
    put_back = random_state()
    try:
        yield
    finally:
        put_back()
