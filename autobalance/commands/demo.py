"""`autobalance demo`: an example trains on simulated devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import autobalance
from autobalance.commands.factories import run_file


def run(words: Sequence[str]) -> None:
    """Train a model that fits on none of four devices.

    Example:
        >>> run(["--steps", "3"])   # doctest: +SKIP

    Args:
        words: options of the example itself.
    """
    _example("char_gpt").main(list(words))


def _example(name: str) -> Any:
    """The module of an example: of the installed package, or of the repository that this package lies in."""
    package = Path(autobalance.__file__).parent
    in_repository = package.parent / "examples" / f"{name}.py"
    return run_file(in_repository if in_repository.is_file() else package / "_examples" / f"{name}.py")
