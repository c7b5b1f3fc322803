from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest

from autobalance.devices.device import Device
from autobalance.partitioning.plan import Plan

GIB = 2**30


def test_a_figure_stacks_memory_against_the_budget(pipelined: Plan) -> None:
    pytest.importorskip("matplotlib")
    figure, axes = pipelined.plot()
    widths = {
        bars.get_label(): [bar.get_width() for bar in bars]  # type: ignore[attr-defined]  # containers of bars
        for bars in axes.containers
    }
    assert widths == {
        "weights and buffers": [2.0, 2.0],
        "gradients": [2.0, 2.0],
        "optimizer state": [4.0, 4.0],
        "saved for backward, in flight": [4.0, 2.0],
        "the rest": [0.5, 0.5],
    }
    assert axes.get_xlabel() == "peak in GiB"
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0 A100", "1 A100"]
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    png = io.BytesIO()
    figure.savefig(png)
    assert png.getvalue().startswith(b"\x89PNG")


def test_names_are_no_formulas(pipelined: Plan) -> None:
    pytest.importorskip("matplotlib")
    figure, _ = replace(pipelined, devices=(Device("$\\frac$", GIB), Device("b", GIB))).plot()
    figure.savefig(io.BytesIO())


def test_without_matplotlib_the_way_out_is_told(pipelined: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'autobalance\[plot\]'.*plan\.report\('plan\.html'\)"):
        pipelined.plot()
