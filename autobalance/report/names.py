"""Names of many blocks in few words."""

from __future__ import annotations

from collections.abc import Sequence


def block_ranges(blocks: Sequence[int], names: Sequence[str]) -> str:
    """Blocks in words; three or more consecutive ones as a range.

    Example:
        >>> block_ranges([0, 1, 2, 4], ["layers.0", "layers.1", "layers.2", "norm", "head"])
        'layers.0 … 2, head'

    Args:
        blocks: indices, in call order.
        names: of all blocks.
    """
    parts: list[str] = []
    start = 0
    while start < len(blocks):
        stop = start + 1
        while stop < len(blocks) and blocks[stop] == blocks[stop - 1] + 1:
            stop += 1
        run = [names[block] for block in blocks[start:stop]]
        parts += [name_range(run[0], run[-1])] if len(run) > 2 else run
        start = stop
    return ", ".join(parts)


def name_range(first: str, last: str) -> str:
    """From one name to another; what both have in common is said once.

    Example:
        >>> name_range("model.layers.3", "model.layers.5")
        'model.layers.3 … 5'

    Args:
        first, last: names of blocks.
    """
    parent, _, child = last.rpartition(".")
    return f"{first} … {child if first.rpartition('.')[0] == parent else last}"


def device_title(index: int, name: str) -> str:
    """A device as it is called where nothing around it says that it is one.

    Example:
        >>> device_title(1, "A100-80GB"), device_title(1, "device 1")
        ('1 A100-80GB', 'device 1')

    Args:
        index: position of the device.
        name: of the device.
    """
    return name if name == f"device {index}" else f"{index} {name}"


def device_label(index: int, name: str) -> str:
    """A device in a column of devices: its position, and its name where that says more.

    Example:
        >>> device_label(1, "A100-80GB"), device_label(1, "device 1")
        ('1 A100-80GB', '1')

    Args:
        index, name: as for `device_title`.
    """
    return str(index) if name == f"device {index}" else f"{index} {name}"
