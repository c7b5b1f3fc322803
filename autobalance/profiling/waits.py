"""Where the host waits for the device in the middle of a step: `.item()`, an `if` on a tensor, a boolean mask.

Each of them stops the host from launching ahead, so that the devices run dry.
"""

from __future__ import annotations

import inspect
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from autobalance.simulated.operation import host_waits

_OWN = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_INSTALLED = sysconfig.get_paths()["purelib"]


class Waits:
    """Notes the lines of the user's code at which the host waits.

    Example:
        >>> waits = Waits()
        >>> waits.saw(torch.ops.aten.nonzero.default, (mask,))
        >>> waits.in_words(steps=2)

    Attributes:
        lines: how often, by "file:line".
        is_forward: whether the forward of a training step runs.
        called: the block whose forward began last in it; None: none yet.
        blocks: those in whose forward, or after it, the host waits; None: before the first.
    """

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self.is_forward = False
        self.called: int | None = None
        self.blocks: set[int | None] = set()

    def saw(self, func: Any, args: Any) -> None:
        """Take note of an operation on a device, if the host has to wait for its result."""
        if host_waits(func, args):
            if self.is_forward:
                self.blocks.add(self.called)
            line = _line_of_the_user()
            if line:
                self.lines[line] += 1

    def begin(self, phase: str) -> None:
        """A phase of a step begins, as "step 2 forward"."""
        self.is_forward = phase.endswith("forward")
        self.called = None

    def call(self, block: int) -> None:
        """The forward of a block begins."""
        if self.is_forward:
            self.called = block

    def in_words(self, steps: int, most: int = 3) -> str:
        """A sentence for the profile; empty where the host never waits.

        Args:
            steps: how many steps were seen.
            most: how many lines are named, the most frequent first.
        """
        if not self.lines:
            return ""
        named = ", ".join(f"{line} ({-(-count // steps)} a step)" for line, count in self.lines.most_common(most)) + (
            ", ..." if len(self.lines) > most else ""
        )
        return (
            f"the host waits for the device inside the step, at {named}: `.item()`, a print, an `if` on a tensor or a "
            f"boolean mask there keeps devices from working ahead"
        )


def _line_of_the_user() -> str:
    """File and line of the innermost call that is no library's, else of one that is not torch's; "" for none."""
    of_a_library = ""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, _TORCH, "<")):
            line = f"{Path(name).name}:{frame.f_lineno}"
            if not name.startswith(_INSTALLED):
                return line
            of_a_library = of_a_library or line
        frame = frame.f_back
    return of_a_library
