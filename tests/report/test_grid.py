from __future__ import annotations

from autobalance.report.grid import add_line, grid
from autobalance.report.render import render


def test_names_show_as_they_are() -> None:
    table = grid(left=["block"], right=["peak"])
    for name in ("gpu[red]", "[/x]", "a:smile:b"):
        add_line(table, name, "1")
    text = render(table, width=40)
    assert all(name in text for name in ("gpu[red]", "[/x]", "a:smile:b"))
