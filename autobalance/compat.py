"""Every private name of torch and Lightning that autobalance uses, so that one file tells what a new release may break.

Each function here has a test that fails loudly when the name behind it moves.
"""

from __future__ import annotations

from torch import overrides


def remove_function_mode(mode: overrides.TorchFunctionMode) -> int | None:
    """Take `mode` off the stack of torch function modes, wherever it is.

    Args:
        mode: an entered torch function mode.

    Returns:
        The number of modes above it, for `insert_function_mode`; None if it is not on the stack.
    """
    above = []
    found = False
    while overrides._len_torch_function_stack() and not found:
        top = overrides._pop_mode()
        found = top is mode
        if not found:
            above.append(top)
    for other in reversed(above):
        overrides._push_mode(other)
    return len(above) if found else None


def insert_function_mode(mode: overrides.TorchFunctionMode, above: int) -> None:
    """Put `mode` back below the `above` topmost torch function modes."""
    others = [overrides._pop_mode() for _ in range(above)]
    overrides._push_mode(mode)
    for other in reversed(others):
        overrides._push_mode(other)
