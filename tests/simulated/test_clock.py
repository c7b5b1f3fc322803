"""The clock of simulated devices, against hand calculation by the rules of CUDA's streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autobalance.devices.device import LAUNCH_TIME, PLAIN_BANDWIDTH, PLAIN_FLOPS, Device
from autobalance.devices.links import LATENCY
from autobalance.devices.table import find_gpu
from autobalance.simulated import SimulatedTensor, fake_elements, simulate, using_ledger
from autobalance.simulated.clock import timing_traces

LAUNCH = 1e-3
DEVICE = Device(
    "round", 2**30, flops=1e9, bandwidth=1e9, link=1e6, host_link=2e6, launch_time=LAUNCH, rates=(("bfloat16", 4e9),)
)
PRODUCT = 2e-3
"""Seconds of a product of two matrices of 100 x 100: 2e6 operations at 1e9 a second, against 1.2e5 bytes."""
BYTES = 4e4


@pytest.fixture(autouse=True)
def round_devices() -> Iterator[None]:
    """Three devices whose rates are easy to reckon with."""
    with simulate([DEVICE] * 3):
        yield


@pytest.fixture
def clock(round_devices: None) -> Any:
    """`torch.simulated`, whose clock starts at 0 with each call of `reset_clock`."""
    return torch.get_device_module("simulated")


def matrix(index: int, size: int = 100) -> Tensor:
    return torch.ones(size, size, device=f"simulated:{index}")


def test_the_clock_is_off_until_it_is_started(clock: Any) -> None:
    with pytest.raises(RuntimeError, match=r"not running: .* starts with torch\.simulated\.reset_clock\(\)"):
        clock.elapsed()
    with simulate(1):
        clock.reset_clock()
        assert clock.elapsed() == 0.0
    with pytest.raises(RuntimeError, match="not running"):
        clock.elapsed()


def test_a_matrix_product_takes_its_launch_and_its_arithmetic(clock: Any) -> None:
    x = matrix(0)
    clock.reset_clock()
    _ = x @ x
    assert clock.elapsed() == pytest.approx(LAUNCH + PRODUCT)
    clock.reset_clock()
    _ = x + x
    assert clock.elapsed() == pytest.approx(LAUNCH + 3 * BYTES / 1e9)


def test_an_arithmetic_runs_at_its_own_rate(clock: Any) -> None:
    x = matrix(0).bfloat16()
    clock.reset_clock()
    _ = x @ x
    assert clock.elapsed() == pytest.approx(LAUNCH + PRODUCT / 4)


def test_operations_of_one_device_run_one_after_the_other_and_of_two_at_once(clock: Any) -> None:
    x, y = matrix(0), matrix(1)
    clock.reset_clock()
    for _ in range(3):
        _ = x @ x
    assert clock.elapsed() == pytest.approx(LAUNCH + 3 * PRODUCT)
    clock.reset_clock()
    _ = x @ x, y @ y
    assert clock.elapsed() == pytest.approx(2 * LAUNCH + PRODUCT)


def test_small_operations_take_as_long_as_their_launches(clock: Any) -> None:
    x = torch.ones(1, device="simulated:0")
    clock.reset_clock()
    for _ in range(10):
        x.add_(1)
    assert clock.elapsed() == pytest.approx(10 * LAUNCH, rel=1e-3)


def test_views_and_allocations_take_no_time(clock: Any) -> None:
    x = matrix(0)
    clock.reset_clock()
    _ = x.t()[2:].unsqueeze(0), x.view(-1, 10), torch.empty(3, device="simulated:0"), torch.empty_like(x)
    assert clock.elapsed() == 0.0


def test_the_host_waits_for_a_number_of_a_device(clock: Any) -> None:
    x, y = matrix(0), matrix(1)
    clock.reset_clock()
    _ = x @ x
    float(x[0, 0])
    read = LAUNCH + PRODUCT + LATENCY + 4 / 2e6
    _ = y @ y  # launched only now
    assert clock.elapsed() == pytest.approx(read + LAUNCH + PRODUCT)


@pytest.mark.parametrize(
    "wait", [lambda x: x.nonzero(), lambda x: x[x > 0], torch.unique], ids=["nonzero", "mask", "unique"]
)
def test_the_host_waits_for_shapes_that_depend_on_numbers(wait: Any, clock: Any) -> None:
    x, y = matrix(0), torch.ones(1, device="simulated:1")
    clock.reset_clock()
    _ = wait(x)
    done = clock.elapsed()
    _ = y + y
    assert clock.elapsed() == pytest.approx(done + LAUNCH, rel=1e-3)


def test_synchronize_holds_the_host_until_the_device_is_done(clock: Any) -> None:
    x, y = matrix(0), matrix(1)
    clock.reset_clock()
    _ = x @ x
    clock.synchronize(2)
    clock.synchronize(0)
    _ = y @ y
    assert clock.elapsed() == pytest.approx(2 * (LAUNCH + PRODUCT))


def test_a_plain_copy_stalls_both_devices(clock: Any) -> None:
    x, y = matrix(0), matrix(1)
    clock.reset_clock()
    _ = y @ y, y @ y
    _ = x.to("simulated:1")  # waits until device 1 is done, and holds device 0 meanwhile
    copied = LAUNCH + 2 * PRODUCT + LATENCY + BYTES / 1e6
    assert clock.elapsed() == pytest.approx(copied)
    _ = x @ x
    assert clock.elapsed() == pytest.approx(copied + PRODUCT)


def test_a_link_carries_one_copy_at_a_time_each_way(clock: Any) -> None:
    x, y = matrix(0), matrix(1)
    one = LATENCY + BYTES / 1e6
    for second, ends in ((x, LAUNCH + 2 * one), (y, 2 * LAUNCH + one)):
        clock.reset_clock()
        for tensor in (x, second):
            target = 1 - tensor.device.index
            with clock.stream(clock.Stream(tensor.device)), clock.stream(clock.Stream(target)):
                _ = tensor.to(f"simulated:{target}")
        assert clock.elapsed() == pytest.approx(ends)


def test_copies_with_the_host_hold_it_unless_its_memory_is_pinned(clock: Any) -> None:
    pageable, pinned, other = torch.ones(100, 100), torch.ones(100, 100).pin_memory(), matrix(1)
    copied = LAUNCH + LATENCY + BYTES / 2e6
    afterwards, meanwhile = copied + LAUNCH + PRODUCT, copied
    for on_host, non_blocking, ends in (
        (pageable, True, afterwards),
        (pinned, False, afterwards),
        (pinned, True, meanwhile),
    ):
        clock.reset_clock()
        x = on_host.to("simulated:0", non_blocking=non_blocking)
        assert clock.elapsed() == pytest.approx(copied)
        _ = other @ other
        assert clock.elapsed() == pytest.approx(ends)
        clock.reset_clock()
        on_host.copy_(x, non_blocking=non_blocking)
        _ = other @ other
        assert clock.elapsed() == pytest.approx(ends)


def test_words_say_how_fast_devices_are(clock: Any) -> None:
    gpu = find_gpu("H100-80GB")
    assert gpu is not None
    for devices, flops, bandwidth in (
        ("2xH100-80GB", gpu.fp32, gpu.bandwidth),
        ("2x1GiB", PLAIN_FLOPS, PLAIN_BANDWIDTH),
    ):
        with simulate(devices):
            x = matrix(0, 1000)
            clock.reset_clock()
            _ = x @ x
            assert clock.elapsed() == pytest.approx(LAUNCH_TIME + 2e9 / flops)
            clock.reset_clock()
            _ = x.neg()
            assert clock.elapsed() == pytest.approx(LAUNCH_TIME + 8e6 / bandwidth)


def training_step(device: str) -> None:
    """Autocast, a recurrent layer, dropout, a backward, clipping and an optimizer that works on lists."""
    torch.manual_seed(0)
    recurrent, head = nn.LSTM(8, 8).to(device), nn.Linear(8, 8).to("simulated:1")
    parameters = [*recurrent.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    with torch.autocast("simulated", dtype=torch.bfloat16):
        hidden, _ = recurrent(torch.ones(5, 2, 8, device=device))
        loss = head(nn.functional.dropout(hidden.to("simulated:1"), 0.1)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def test_fakes_take_as_long_as_real_numbers(clock: Any) -> None:
    times = []
    for mode in (None, FakeTensorMode()):
        clock.reset_clock()
        with fake_elements(mode):
            training_step("simulated:0")
        times.append(clock.elapsed())
    assert times[0] == pytest.approx(times[1])
    assert times[0] > 100 * LAUNCH


def test_a_backward_takes_the_time_of_its_products(clock: Any) -> None:
    x, weight = matrix(0).requires_grad_(), matrix(0).requires_grad_()
    product = x @ weight
    gradient = matrix(0)
    clock.reset_clock()
    product.backward(gradient)
    assert clock.elapsed() == pytest.approx(LAUNCH + 2 * PRODUCT)


def test_an_operation_on_lists_is_a_kernel_on_each_device(clock: Any) -> None:
    lists = [matrix(0), matrix(0), matrix(1)]
    clock.reset_clock()
    torch._foreach_add_(lists, 1)
    assert clock.elapsed() == pytest.approx(max(LAUNCH + 2 * BYTES / 1e9, 2 * LAUNCH + BYTES / 1e9))


class _Nothing:
    def allocate(self, storage: torch.UntypedStorage, nbytes: int, account: int) -> None:
        pass


def test_a_trace_takes_no_time(clock: Any) -> None:
    x = matrix(0)
    clock.reset_clock()
    with using_ledger(_Nothing()):
        y = SimulatedTensor(torch.ones(3), 0) + 1
        float(y.sum())
        (x @ x).to("simulated:1")
        clock.Stream(0).wait_stream(clock.current_stream(1))
    assert clock.elapsed() == 0.0


def test_a_trace_takes_time_where_it_is_to_be_timed(clock: Any) -> None:
    x = matrix(0)
    clock.reset_clock()
    with using_ledger(_Nothing()), timing_traces():
        _ = x @ x
    assert clock.elapsed() == pytest.approx(LAUNCH + PRODUCT)
