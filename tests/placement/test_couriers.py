from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobalance.devices.device import Device
from autobalance.placement.couriers import carry, is_sending, send
from autobalance.placement.host_path import distrust, through_host
from autobalance.placement.lanes import lane_between
from autobalance.placement.ready import awaiting, mark_ready, ready, ready_event
from autobalance.simulated import simulate


def here() -> torch.device:
    return torch.device("simulated", 0)


def there() -> torch.device:
    return torch.device("simulated", 1)


@pytest.fixture
def host_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions between the two devices go through the host."""
    monkeypatch.setattr("autobalance.placement.host_path._untrusted", set())
    distrust(here(), there())
    distrust(there(), here())


def tensors() -> dict[str, Tensor]:
    """Of every kind that a block may be given, on the host."""
    base = torch.arange(24.0).reshape(2, 3, 4)
    return {
        "contiguous": base,
        "transposed": base.transpose(0, 2),
        "with gaps": base[:, ::2, 1:3],
        "expanded": torch.arange(3.0).expand(4, 3),
        "channels last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "integers": torch.arange(7),
        "booleans": torch.tensor([True, False, True]),
        "half": torch.arange(5.0).half(),
        "complex": torch.complex(torch.arange(3.0), torch.ones(3)),
        "conjugated": torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
        "odd bytes": torch.arange(251, dtype=torch.uint8)[1:],
    }


@pytest.mark.parametrize("kind", list(tensors()))
@pytest.mark.parametrize("chunk", [1, 16, 2**20])
def test_what_goes_through_the_host_arrives_as_by_to(kind: str, chunk: int) -> None:
    source = tensors()[kind].to(here())
    expected, arrived = source.to(there()), through_host(source, there(), chunk=chunk)
    assert (arrived.device, arrived.dtype, arrived.shape) == (there(), expected.dtype, expected.shape)
    assert arrived.stride() == expected.stride()
    assert torch.equal(arrived.cpu(), expected.cpu())


@pytest.mark.parametrize("kind", list(tensors()))
def test_what_is_sent_arrives_as_by_to(kind: str) -> None:
    source = tensors()[kind].to(here())
    expected, arrived = source.to(there()), send(source, there())
    assert (arrived.device, arrived.dtype, arrived.stride()) == (there(), expected.dtype, expected.stride())
    assert torch.equal(arrived.cpu(), expected.cpu())
    assert not arrived.requires_grad


@pytest.mark.parametrize("path", ["direct", "host"])
def test_gradients_come_back_as_by_to(path: str, request: pytest.FixtureRequest) -> None:
    if path == "host":
        request.getfixturevalue("host_path")
    weight = torch.randn(3, 4, device=here(), requires_grad=True)
    results = []
    for move in (send, Tensor.to):
        sent = move(weight.t() * 2, there())
        loss = (sent**3).sum()
        (first,) = torch.autograd.grad(loss, weight, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), weight)
        results.append((first.device, second.device, first.detach().cpu(), second.cpu()))
    assert results[0][:2] == (here(), here())
    assert torch.equal(results[0][2], results[1][2])
    assert torch.equal(results[0][3], results[1][3])


def test_a_gradient_that_nobody_asks_for_is_not_sent() -> None:
    class Unused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> None:
            return None

    x = torch.ones(2, device=here(), requires_grad=True)
    Unused.apply(send(x, there())).sum().backward()
    assert x.grad is None


def test_only_tensors_with_gradients_get_a_node() -> None:
    x = torch.ones(2, device=here(), requires_grad=True)
    assert is_sending(send(x, there()).grad_fn)
    assert not is_sending((x * 2).grad_fn)
    with torch.no_grad():
        assert not send(x, there()).requires_grad
    with torch.inference_mode():
        assert not send(x, there()).requires_grad


def test_what_is_sent_may_be_changed_in_place() -> None:
    x = torch.ones(2, device=here(), requires_grad=True)
    sent = send(x, there())
    sent.mul_(3)
    sent.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


def test_a_tensor_of_the_host_is_sent_by_to() -> None:
    x = torch.ones(2, requires_grad=True)
    sent = send(x, there())
    assert sent.device == there()
    assert not is_sending(sent.grad_fn)


def test_transforms_of_torch_func_go_through() -> None:
    x = torch.arange(6.0, device=here()).reshape(3, 2)
    gradients = torch.func.vmap(torch.func.grad(lambda row: (send(row, there()) ** 2).sum()))(x)
    assert torch.equal(gradients.cpu(), 2 * x.cpu())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, on its way
def test_tangents_are_sent_as_well() -> None:
    x = torch.ones(2, device=here(), requires_grad=True)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.full((2,), 4.0, device=here()))
        tangent = torch.autograd.forward_ad.unpack_dual(send(dual, there())).tangent
    assert tangent.device == there()
    assert tangent.tolist() == [4.0, 4.0]


def test_each_direction_of_each_pair_has_streams_of_its_own() -> None:
    ways = [(here(), there()), (there(), here()), (here(), torch.device("simulated", 2))]
    streams = [stream for way in ways for stream in lane_between(*way) or ()]
    assert len({(stream.device, stream.stream_id) for stream in streams}) == 6
    assert [stream.device for stream in streams[:2]] == [here(), there()]
    assert lane_between(here(), there()) is lane_between(here(), there())


# What overlaps, on the clock: a large product takes long, a copy of a small tensor does not.


def work(device: torch.device) -> Callable[[], Tensor]:
    factor = torch.ones(512, 512, device=device)
    return lambda: factor @ factor @ factor @ factor


def time_of(where: Any) -> float:
    """Seconds from the clock's start until a stream, or the computing stream of a device, is done."""
    stream = torch.simulated.current_stream(where) if isinstance(where, torch.device) else where
    start, end = (torch.simulated.Event(enable_timing=True) for _ in range(2))
    start.record(torch.simulated.Stream(stream.device))  # has had nothing to do
    end.record(stream)
    return float(start.elapsed_time(end)) / 1e3


@pytest.fixture(autouse=True)
def slow_devices() -> Iterator[None]:
    """Devices on which the work takes far longer than anything else."""
    slow = [Device(f"slow {index}", 2**40, flops=1e9) for index in range(3)]
    with simulate(slow):
        yield


@pytest.fixture
def small() -> Tensor:
    return torch.ones(8, device=here())


def test_the_source_does_not_wait_for_the_destination(small: Tensor) -> None:
    work_there = work(there())
    torch.simulated.reset_clock()
    work_there()
    carry(small, there())
    beside = time_of(here())
    small.to(there())
    assert beside < 0.1 * time_of(there())
    assert time_of(here()) >= time_of(there()), "torch's own copy holds up both"


def test_the_copy_does_not_wait_for_what_the_destination_computes(small: Tensor) -> None:
    work_there, lane = work(there()), lane_between(here(), there())
    assert lane is not None
    torch.simulated.reset_clock()
    work_there()
    carry(small, there())
    assert 0 < time_of(lane.receiving) < 0.1 * time_of(there())


def test_the_destination_waits_for_the_copy_and_the_copy_for_its_source(small: Tensor) -> None:
    work_here = work(here())
    torch.simulated.reset_clock()
    work_here()
    carry(small, there())
    assert time_of(there()) > time_of(here()) > 0


def test_a_suspended_micro_batch_does_not_wait_for_what_others_launched(small: Tensor) -> None:
    work_here = work(here())
    torch.simulated.reset_clock()
    with awaiting([small]):
        mark_ready()
        work_here()
        carry(small, there(), ready_event(small))
    assert 0 < time_of(there()) < 0.1 * time_of(here())


@pytest.mark.parametrize("why", ["changed", "another", "not suspended", "inference"])
def test_where_the_mark_may_be_too_early_all_is_awaited(why: str, small: Tensor) -> None:
    given = small
    if why == "inference":
        given = torch.ones(2, device="cpu")  # has no version on the host either
    with awaiting([given]):
        if why != "not suspended":
            mark_ready()
            assert (ready_event(given) is not None) == (given is small)
        if why == "changed":
            given.add_(1)
        assert ready_event(torch.ones(8, device=here()) if why == "another" else given) is None


def test_a_mark_counts_until_the_tensor_changes_and_in_its_thread_only(small: Tensor) -> None:
    with awaiting([small]):
        mark_ready()
    first = ready_event(small)
    with awaiting([small]):
        mark_ready()
    assert ready_event(small) is first is not None
    seen: list[Any] = []
    other = threading.Thread(target=lambda: seen.append(ready_event(small)))
    other.start()
    other.join()
    assert seen == [None]
    small.add_(1)
    assert ready_event(small) is None


def test_a_batch_is_ready_before_what_is_launched_in_the_step(small: Tensor) -> None:
    work_here = work(here())
    torch.simulated.reset_clock()
    with ready([small]):
        work_here()
        carry(small, there(), ready_event(small))
        assert 0 < time_of(there()) < 0.1 * time_of(here())
    assert ready_event(small) is None


def test_gradients_wait_for_no_other_work_of_either_device(small: Tensor) -> None:
    x = small.clone().requires_grad_()
    loss = send(x, there()).sum()
    work_here, lane = work(here()), lane_between(there(), here())
    assert lane is not None
    torch.simulated.reset_clock()
    work_here()
    before = time_of(here())
    loss.backward()
    assert time_of(there()) < 0.1 * before
    assert 0 < time_of(lane.receiving) < 0.1 * before


def test_a_parameter_arrives_as_a_tensor_with_a_way_back() -> None:
    weight = nn.Parameter(torch.ones(2, device=here()))
    sent = send(weight, there())
    assert not isinstance(sent, nn.Parameter)
    sent.sum().backward()
    assert weight.grad is not None
    assert weight.grad.device == here()
