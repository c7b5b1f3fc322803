"""Streams and events of simulated devices, against hand calculation and the rules of `torch.cuda`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from autobalance.devices.device import Device
from autobalance.devices.links import LATENCY
from autobalance.simulated import simulate

LAUNCH = 1e-6
DEVICE = Device("round", 2**30, flops=1e9, bandwidth=1e9, link=4e7, launch_time=LAUNCH)
PRODUCT = 2e-3
COPY = LATENCY + 1e-3
"""Seconds of a matrix of 100 x 100 in float32 on the link."""


@pytest.fixture
def simulated() -> Iterator[Any]:
    """`torch.simulated` with two devices whose rates are easy to reckon with."""
    with simulate([DEVICE] * 2):
        yield torch.get_device_module("simulated")


def matrix(index: int) -> Tensor:
    return torch.ones(100, 100, device=f"simulated:{index}")


def copied(x: Tensor, simulated: Any) -> Tensor:
    """A tensor of device 0 on device 1, by streams of its own on both sides, as CUDA wants it."""
    out, into = simulated.Stream(0), simulated.Stream(1)
    out.wait_stream(simulated.current_stream(0))
    with simulated.stream(out), simulated.stream(into):
        y = x.to("simulated:1", non_blocking=True)
    x.record_stream(out)
    y.record_stream(into)
    simulated.current_stream(1).wait_event(into.record_event())
    return y


def test_copy_streams_keep_both_devices_busy(simulated: Any) -> None:
    x, y = matrix(0), matrix(1)
    simulated.reset_clock()
    first = x @ x
    for _ in range(3):
        _ = y @ y
    moved = copied(first, simulated)  # done after one product and the copy, while device 1 still works
    _ = x @ x, x @ x
    assert simulated.elapsed() == pytest.approx(2 * LAUNCH + 3 * PRODUCT)
    _ = moved @ moved
    assert simulated.elapsed() == pytest.approx(2 * LAUNCH + 4 * PRODUCT)


def test_work_on_what_is_copied_begins_after_the_copy(simulated: Any) -> None:
    x = matrix(0)
    simulated.reset_clock()
    moved = copied(x @ x, simulated)
    _ = moved @ moved
    assert simulated.elapsed() == pytest.approx(LAUNCH + PRODUCT + COPY + PRODUCT)


def test_two_streams_of_one_device_run_at_once(simulated: Any) -> None:
    x, side = matrix(0), simulated.Stream("simulated:0")
    simulated.reset_clock()
    _ = x @ x
    with simulated.stream(side):
        _ = x @ x
    assert simulated.elapsed() == pytest.approx(2 * LAUNCH + PRODUCT)
    side.wait_stream(simulated.default_stream(0))
    with simulated.stream(side):
        _ = x @ x
    assert simulated.elapsed() == pytest.approx(2 * LAUNCH + 2 * PRODUCT)


def test_the_host_waits_for_events_and_streams(simulated: Any) -> None:
    x, y, done = matrix(0), matrix(1), simulated.Event(enable_timing=True)
    for wait in (done.synchronize, simulated.current_stream(0).synchronize):
        simulated.reset_clock()
        _ = x @ x
        done.record(simulated.current_stream(0))
        _ = y @ y
        assert not done.query()
        assert not simulated.current_stream(0).query()
        wait()
        assert done.query()
        assert simulated.current_stream(0).query()
        _ = y @ y, y @ y
        assert simulated.elapsed() == pytest.approx(2 * LAUNCH + 3 * PRODUCT)


def test_the_time_between_events_is_in_milliseconds(simulated: Any) -> None:
    x, before, after = matrix(0), simulated.Event(enable_timing=True), simulated.Event(enable_timing=True)
    simulated.reset_clock()
    _ = x @ x
    before.record()
    _ = x @ x
    after.record()
    assert before.elapsed_time(after) == pytest.approx(1e3 * PRODUCT)
    simulated.reset_clock()
    before.record()
    with pytest.raises(RuntimeError, match=r"both were recorded after torch\.simulated\.reset_clock\(\)"):
        before.elapsed_time(after)


def test_an_event_from_before_the_clock_was_reset_is_past(simulated: Any) -> None:
    x, done = matrix(0), simulated.Event()
    simulated.reset_clock()
    _ = x @ x
    done.record()
    simulated.reset_clock()
    assert done.query()
    done.wait(simulated.current_stream(1))
    assert simulated.elapsed() == 0.0


def test_streams_do_nothing_while_the_clock_is_off(simulated: Any) -> None:
    moved = copied(matrix(0) @ matrix(0), simulated)
    assert moved.device == torch.device("simulated:1")
    assert torch.equal(moved.cpu(), torch.full((100, 100), 100.0))
    done = simulated.current_stream(1).record_event()
    done.synchronize()
    simulated.current_stream(1).synchronize()
    assert done.query()
    assert simulated.current_stream(1).query()


def test_a_stream_is_entered_with_its_device_and_left_with_the_one_before(simulated: Any) -> None:
    outer, inner = simulated.Stream("simulated:0"), simulated.Stream(torch.device("simulated:1"))
    assert (outer.device, inner.device) == (torch.device("simulated:0"), torch.device("simulated:1"))
    assert outer != inner
    with simulated.stream(outer):
        with simulated.stream(inner), simulated.stream(None):
            assert simulated.current_device() == 1
            assert simulated.current_stream() == inner
            assert simulated.current_stream(0) == outer
        assert simulated.current_device() == 0
        assert simulated.current_stream(1) == simulated.default_stream(1)
    assert simulated.current_stream() == simulated.default_stream(0)


def test_threads_have_streams_of_their_own(simulated: Any) -> None:
    seen: list[Any] = []
    mine = simulated.Stream(0)
    other = threading.Thread(target=lambda: seen.append(simulated.current_stream(0)))
    with simulated.stream(mine):
        other.start()
        other.join()
        assert simulated.current_stream(0) == mine
    assert seen == [simulated.default_stream(0)]


def test_a_stream_that_is_set_stays_current(simulated: Any) -> None:
    mine = simulated.Stream(1)
    try:
        simulated.set_stream(mine)
        simulated.set_stream(None)
        assert simulated.current_stream() == mine
    finally:
        simulated.set_stream(simulated.default_stream(1))
        simulated.set_device(0)


def test_a_stream_needs_a_device_that_is_there(simulated: Any) -> None:
    with pytest.raises(RuntimeError, match=r"there is no simulated:5, 2 simulated device\(s\) are configured"):
        simulated.Stream(5)


def test_an_event_on_a_stream_that_is_done_is_as_late_as_the_host(simulated: Any) -> None:
    x, y = matrix(0), matrix(1)
    before, after = simulated.Event(enable_timing=True), simulated.Event(enable_timing=True)
    simulated.reset_clock()
    _ = y @ y
    simulated.synchronize(1)
    before.record(simulated.default_stream(0))  # which has never had anything to do
    _ = x @ x
    after.record(simulated.default_stream(0))
    assert before.elapsed_time(after) == pytest.approx(1e3 * (LAUNCH + PRODUCT))
