"""Predictions kept in a folder, so that a run that was stopped goes on, and several processes share the work."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import autobalance

_SCRIPTS = ("measured_training.py",)


class Cache:
    """One file for each prediction; any change of autobalance, of torch or of TIMM makes new ones.

    Args:
        folder: where; None: nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder / _state()
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """What is kept under a name, else what `make()` returns, which JSON must be able to hold."""
        if self._folder is None:
            return make()
        path = self._folder / f"{name}.json"
        if path.exists():
            return json.loads(path.read_text())
        made = make()
        # Other processes must not read half a file.
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(made))
        beside.replace(path)
        return made


def _state() -> str:
    """A name for the versions of all that predictions depend on."""
    digest = hashlib.sha256()
    package = Path(autobalance.__file__).parent
    here = Path(__file__).parent
    for path in sorted([*package.rglob("*.py"), *(here / name for name in _SCRIPTS)]):
        digest.update(path.read_bytes())
    for name in ("torch", "timm"):
        digest.update(version(name).encode())
    return digest.hexdigest()[:12]
