from __future__ import annotations

import io

from rich.console import Console

from autobalance.report.progress import ProgressBar


def _shown(seconds_each: float, *, terminal: bool = True) -> str:
    out = io.StringIO()
    now = [0.0]
    console = Console(file=out, force_terminal=terminal, width=100)
    with ProgressBar("profiling", total=2, console=console, clock=lambda: now[0]) as bar:
        for name in ("embed", "layers[0]", "head"):
            now[0] += seconds_each
            bar(name)
            bar._progress.refresh()
    return out.getvalue()


def test_a_bar_shows_the_block_at_work_once_a_second_is_over() -> None:
    shown = _shown(0.6)
    assert "layers[0]" in shown
    assert "head" in shown
    assert "embed" not in shown


def test_what_is_over_within_a_second_shows_no_bar() -> None:
    assert "profiling" not in _shown(0.3)


def test_nothing_is_written_where_nobody_looks() -> None:
    assert _shown(2.0, terminal=False).strip() == ""
