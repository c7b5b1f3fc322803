"""Autocast's casts of weights, made once for all micro-batches of a step."""

from __future__ import annotations

from autobalance import compat


class KeptCasts:
    """Keeps autocast's casts of weights from one micro-batch to the next, until the last forward has ended."""

    def __init__(self) -> None:
        self._kept = compat.casts_kept()
        self._is_kept = False

    def __enter__(self) -> KeptCasts:
        self._kept.__enter__()
        self._is_kept = True
        return self

    def drop(self) -> None:
        """The forwards are done."""
        if self._is_kept:
            self._is_kept = False
            self._kept.__exit__(None, None, None)
            compat.drop_casts()

    def __exit__(self, *error: object) -> None:
        self.drop()
