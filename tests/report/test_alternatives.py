from __future__ import annotations

from dataclasses import replace

from autobalance.partitioning.rivals.alternatives import Alternative
from autobalance.report.alternatives import alternatives_table
from autobalance.report.render import render

GIB = 2**30
DDP = Alternative("DDP", 90 * GIB, 80 * GIB, 0, 3 * GIB, 1.2, 0.05, 1, ("all weights on each", "links alone"))
FSDP = replace(
    DDP, name="FSDP full shard", peak=20 * GIB, moved=9 * GIB, step_time=1.5, parts=4, notes=("links alone",)
)
ZERO = replace(FSDP, name="ZeRO-3 with offload", peak=8 * GIB, host=200 * GIB, parts=1, notes=())


def test_each_way_has_a_line_and_what_it_takes_for_granted() -> None:
    text = render(alternatives_table([DDP, FSDP]), width=80)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "peak of each device in GiB" in lines[0]
    assert "instead peak use fits sent step optimizer" in lines
    assert "DDP 90.00 112.5% no 3.00 GiB 1.20 s 50.0 ms" in lines
    assert "FSDP full shard, 4 parts 20.00 25.0% yes 9.00 GiB 1.50 s 50.0 ms" in lines
    assert lines[-2:] == ["DDP: all weights on each", "DDP, FSDP full shard: links alone"]
    assert max(map(len, text.splitlines())) <= 80


def test_host_memory_is_shown_where_any_way_takes_some() -> None:
    text = render(alternatives_table([FSDP, ZERO]), width=100)
    assert "on host" in text
    assert "200.00 GiB" in text
    assert "on host" not in render(alternatives_table([FSDP]), width=100)
