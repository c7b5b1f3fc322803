"""In which order the blocks of a model are called."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from autobalance.blocks import find_blocks


class FirstVisits:
    """Notes the first call of every block since `start_again`.

    Example:
        >>> visits = FirstVisits(model, plan.block_names)
        >>> loss = model(batch)
        >>> visits.other_order()
        >>> visits.remove()

    Args:
        root: the model.
        names: of its blocks, in the order that is expected.
    """

    def __init__(self, root: nn.Module, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._called: dict[int, None] = {}
        self._handles = [
            module.register_forward_pre_hook(partial(self._note, index))
            for index, modules in enumerate(find_blocks(root).ordered(names).modules)
            for module in modules
        ]

    def start_again(self) -> None:
        """Forget what was called."""
        self._called.clear()

    def other_order(self) -> str | None:
        """How the calls differ from what is expected, in words; None where they do not."""
        called = list(self._called)
        if not called:  # blocks may run by other methods than their forward
            return None
        for index, expected in zip(called, sorted(called), strict=True):
            if index != expected:
                return f"block {self._names[index]!r} was called before {self._names[expected]!r}"
        missing = [name for index, name in enumerate(self._names) if index not in self._called]
        if missing:
            shown = ", ".join(map(repr, missing[:3])) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
            return f"{len(missing)} of {len(self._names)} blocks were not called ({shown})"
        return None

    def remove(self) -> None:
        """Take the hooks off; may be called again."""
        while self._handles:
            self._handles.pop().remove()

    def _note(self, index: int, module: nn.Module, args: Any) -> None:
        self._called.setdefault(index)
