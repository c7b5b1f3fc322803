"""Text of what rich can draw."""

from __future__ import annotations

import io
import shutil

from rich.console import Console, RenderableType


def render(drawing: RenderableType, width: int | None = None) -> str:
    """Plain text of a table or another thing that rich draws.

    Example:
        >>> print(render(plan_table(plan), width=100))

    Args:
        drawing: what to draw.
        width: columns; None: those of the terminal, 100 where there is none.
    """
    columns = shutil.get_terminal_size(fallback=(100, 24)).columns if width is None else width
    out = io.StringIO()
    Console(file=out, width=columns, color_system=None, force_terminal=False, highlight=False).print(drawing)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().split("\n"))
