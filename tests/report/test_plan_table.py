from __future__ import annotations

from dataclasses import replace

import pytest

from autobalance.devices.device import Device
from autobalance.partitioning.plan import Plan
from autobalance.partitioning.stage import Stage
from autobalance.report.plan_table import held_by, plan_table
from autobalance.report.render import render

GIB = 2**30


def _words(text: str, start: str) -> str:
    """The one line that starts so, with single spaces."""
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith(start)]
    return " ".join(line.split())


def test_a_plan_has_one_line_for_each_device(pipelined: Plan) -> None:
    text = render(plan_table(pipelined), width=140)
    title = (
        "4 blocks on 2 devices (A100), policy auto, batch: training batch of 4; sizes in GiB, times of a micro-batch"
    )
    assert f"{title} in ms" in text
    heading = "device blocks weights grads optim saved peak budget use fwd ms bwd ms recv ms stage ms"
    assert _words(text, "device") == heading
    assert _words(text, "0 ") == "0 embed, layers[0] 2.00 2.00 4.00 2 x 2.00 12.50 16.00 78.1% 100 200 0 300"
    second = "1 layers<1>, head; batch, loss 2.00 2.00 4.00 1 x 2.00 10.50 16.00 65.6% 100 200 50.0 350"
    assert _words(text, "1 ") == second
    assert "memory 1.00 s = optimal" in text
    assert "head alone takes 30% of the step" in text
    assert "loss.item() was replaced" in text


def test_a_narrow_terminal_gets_sums(pipelined: Plan) -> None:
    at_80 = render(plan_table(pipelined), width=80)
    assert _words(at_80, "device") == "device blocks static saved peak budget use stage ms"
    assert _words(at_80, "0 ") == "0 embed, layers[0] 8.00 4.00 12.50 16.00 78.1% 300"


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_cut(pipelined: Plan, width: int) -> None:
    names = [f"model.decoder.transformer.layers.{index}" for index in range(4)]
    blocks = tuple(replace(block, name=name) for block, name in zip(pipelined.blocks, names, strict=True))
    devices = (Device("cuda:0", GIB), Device("cuda:1", GIB))
    saving = ("recompute", "offload", "keep", "keep")
    text = render(plan_table(replace(pipelined, blocks=blocks, devices=devices, saving=saving)), width=width)
    assert max(map(len, text.splitlines())) <= width
    table = text.partition("fits:")[0]
    assert all(table.count(figure) == 1 for figure in (" 12.50 ", " 10.50 ", " 78.1% ", " 65.6% "))


def test_a_device_that_is_visited_twice_tells_the_micro_batches_of_each_visit(pipelined: Plan) -> None:
    stages = tuple(Stage(block, block + 1, block % 2, 2 - block // 2) for block in range(4))
    looped = replace(pipelined, assignment=(0, 1, 0, 1), stages=stages, schedule="looped")
    text = render(plan_table(looped), width=120)
    # One block of 1 GiB twice in flight and one once.
    assert _words(text, "0 ") == "0 embed, layers<1> 2.00 2.00 4.00 3.00 2+1 12.50 16.00 78.1%"
    assert "devices 0, 1 are visited more than once: a forward runs on devices 0 → 1 → 0 → 1\n" in text


def test_what_saves_memory_is_marked(pipelined: Plan) -> None:
    marked = replace(pipelined, saving=("keep", "recompute", "offload", "offload"), streamed=(0,), host_optimizer=(1,))
    assert held_by(marked, 0) == "embed, layers[0]; recomputed: layers[0]; weights on the host: embed"
    assert held_by(marked, 1) == "layers<1>, head; saved on the host: all; optimizer on the host; batch, loss"


def test_an_empty_device_is_said_and_columns_of_zeros_are_left_out(pipelined: Plan) -> None:
    blocks = tuple(replace(block, optimizer=0, gradients=0, saved=0) for block in pipelined.blocks)
    plan = replace(
        pipelined, blocks=blocks, profile=None, assignment=(1,) * 4, stages=(Stage(0, 4, 1),), peaks=(0, 4 * GIB)
    )
    text = render(plan_table(plan), width=100)
    assert _words(text, "0 ") == "0 (empty) 0.00 0.00 16.00 0.0%"
    assert _words(text, "device") == "device blocks weights peak budget use"


def test_bounds_of_an_unknown_time_say_nothing(pipelined: Plan) -> None:
    untimed = replace(pipelined, bounds={"area": 0.0, "memory": 0.0}, value=0.0, step_time=0.0)
    assert "area" not in render(plan_table(untimed), width=100)
