"""The one kind of table that all reports are made of."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text


def grid(left: Sequence[str], right: Sequence[str]) -> Table:
    """A table without lines yet: columns of words, which may wrap, then columns of figures, which never do.

    Example:
        >>> table = grid(left=["device"], right=["peak"])

    Args:
        left: headings of the columns of words.
        right: headings of the columns of figures.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in left:
        if heading == "kind":  # a class name says enough by its beginning; a block's name has to be whole
            table.add_column(heading, overflow="ellipsis", no_wrap=True, max_width=12)
        else:
            table.add_column(heading, overflow="fold", no_wrap=heading == "device", min_width=len(heading))
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def add_line(table: Table, *cells: str) -> None:
    """Add a line whose cells show as they are: names may hold brackets, which rich would read as its markup.

    Example:
        >>> add_line(table, "gpu[0]", "1.00")

    Args:
        table: with as many columns.
        cells: one for each column.
    """
    table.add_row(*map(Text, cells))
