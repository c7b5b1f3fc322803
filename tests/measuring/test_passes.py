"""What one call takes, by hand calculation, and what a module does to its inputs seen from outside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autobalance.measuring.call import Call
from autobalance.measuring.meters import make_meter
from autobalance.measuring.passes import Passes, run_forward, run_passes
from autobalance.measuring.signatures import signature_of, signature_of_module

DEVICES = ["simulated:1", "cpu"]
BYTES = 16 * 64 * 4  # of an activation


def passes(module: nn.Module, *args: Any, device: str = "simulated:1", grad: bool = True, **kwargs: Any) -> Passes:
    return run_passes(module.to(device), Call("forward", args, kwargs, grad), make_meter(device), repeats=1)


def inputs() -> Tensor:
    return torch.ones(16, 64).requires_grad_()


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_saved_is_told_apart_into_inputs_outputs_and_others(device: str) -> None:
    linear = passes(nn.Linear(64, 64, bias=False), inputs(), device=device)
    assert (linear.saves_inputs, linear.returned.shapes[0].saved, linear.kept, linear.saved) == (
        (True,),
        False,
        0,
        BYTES,
    )
    tanh = passes(nn.Tanh(), inputs(), device=device)
    assert (tanh.saves_inputs, tanh.returned.shapes[0].saved, tanh.kept, tanh.saved) == ((False,), True, 0, BYTES)
    both = passes(nn.Sequential(nn.Tanh(), nn.Linear(64, 64, bias=False)), inputs(), device=device)
    assert (both.saves_inputs, both.returned.shapes[0].saved, both.kept, both.saved) == ((False,), False, BYTES, BYTES)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_that_are_asked_for(device: str) -> None:
    linear = nn.Linear(64, 64)
    linear.bias.requires_grad_(False)
    found = passes(linear, inputs(), device=device)
    assert (found.trains, found.returns_gradient) == ((True, False), (True,))
    assert (found.weight_gradients, found.gradients) == (64 * 64 * 4, 64 * 64 * 4 + BYTES)
    assert passes(linear, inputs().detach(), device=device).returns_gradient == (False,)
    nothing = passes(linear, inputs(), device=device, grad=False)
    assert (nothing.saved, nothing.gradients, nothing.backward_time) == (0, 0, 0.0)
    assert all(parameter.grad is None for parameter in linear.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_peaks_are_the_most_that_is_there_at_once(device: str) -> None:
    found = passes(nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh()), inputs(), device=device)
    assert found.forward_peak == 4 * BYTES
    # Backward begins with three saved outputs and a gradient, and makes one gradient more.
    assert found.backward_peak == 5 * BYTES
    assert (found.inputs, found.outputs, found.output_gradients) == (BYTES, BYTES, BYTES)


def test_work_is_counted_in_both_directions() -> None:
    found = passes(nn.Linear(64, 64, bias=False), inputs())
    assert sum(work.flops for work in found.work[0]) == 2 * 16 * 64 * 64
    assert sum(work.flops for work in found.work[1]) == 2 * 2 * 16 * 64 * 64


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.relu_(), x[:4]


def test_outputs_that_are_inputs_are_told() -> None:
    x = inputs()
    found = passes(InPlace(), x)
    assert [shape.given for shape in found.returned.shapes] == [0, 0]
    assert found.outputs == 0
    assert x.sum() == 16 * 64


@dataclass
class Box:
    tensor: Tensor
    label: str


class Fills(nn.Module):
    """Puts things into what it is given, and returns containers of every kind."""

    def forward(self, x: Tensor, into: list[Any], by_name: dict[str, Any]) -> Any:
        into.append(x * 2)
        by_name["seen"] = x
        return {"box": Box(x + 1, "kept"), "pair": (x, None)}


def test_containers_are_filled_once_with_what_is_on_the_host() -> None:
    into: list[Any] = []
    by_name: dict[str, Any] = {"before": 3}
    call = Call("forward", (inputs(), into, by_name), {})
    meter = make_meter("simulated:1")
    found = run_passes(Fills(), call, meter, repeats=2)
    assert (into, by_name) == ([], {"before": 3})
    output = run_forward(Fills(), call, meter, found.returned)
    assert [item.device.type for item in into] == ["cpu"]
    assert set(by_name) == {"before", "seen"}
    assert (output["box"].label, output["box"].tensor.device.type, output["pair"][1]) == ("kept", "cpu", None)
    assert torch.equal(output["box"].tensor, torch.full((16, 64), 2.0))
    assert output["box"].tensor.requires_grad
    output["box"].tensor.add_(1)  # no leaf: glue may change it


class Tables(nn.Module):
    """Makes something without a graph from what has one, as rotary embeddings do."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.cos(), x.sin()


def test_what_a_module_detaches_stays_detached() -> None:
    call, meter = Call("forward", (inputs(),), {}), make_meter("simulated:1")
    found = run_passes(Tables(), call, meter, repeats=0)
    assert [tensor.requires_grad for tensor in run_forward(Tables(), call, meter, found.returned)] == [False, False]
    assert found.backward_time == 0.0


class Other(nn.Module):
    def encode(self, x: Tensor) -> Tensor:
        return x.tanh()


def test_a_method_other_than_forward_is_called() -> None:
    found = run_passes(Other(), Call("encode", (inputs(),), {}), make_meter("cpu"), repeats=0)
    assert found.saved == BYTES


def test_signatures_tell_modules_and_calls_apart() -> None:
    def call(x: Tensor, **kwargs: Any) -> Any:
        return signature_of(Call("forward", (x,), kwargs))

    assert signature_of_module(nn.Linear(2, 3)) == signature_of_module(nn.Linear(2, 3))
    others = [
        nn.Linear(3, 2),
        nn.Linear(2, 3, bias=False),
        nn.Linear(2, 3).eval(),
        nn.Linear(2, 3).requires_grad_(False),
    ]
    others += [
        nn.Linear(2, 3).bfloat16(),
        nn.Sequential(nn.Linear(2, 3)),
        nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1)),
    ]
    assert len({signature_of_module(module) for module in [nn.Linear(2, 3), *others]}) == 1 + len(others)
    assert signature_of_module(nn.Dropout(0.1)) != signature_of_module(nn.Dropout(0.2))
    assert call(torch.ones(2)) == call(torch.zeros(2))
    different = [
        call(torch.ones(2)),
        call(torch.ones(3)),
        call(torch.ones(2).double()),
        call(torch.ones(2).requires_grad_()),
    ]
    different += [call(torch.ones(2), scale=2), call(torch.ones(2), scale=3), call(torch.ones(2), mask=[torch.ones(1)])]
    different += [call(torch.ones(2), box=Box(torch.ones(1), "")), call(torch.ones(2), box=Box(torch.ones(2), ""))]
    assert len(set(different)) == len(different)


class Windowed(nn.Module):
    """As a layer that attends within a window; `repr` shows none of its settings."""

    def __init__(self, layer_idx: int = 0, **settings: Any) -> None:
        super().__init__()
        self.layer_idx, self.window, self.kind, self.dtype = layer_idx, 64, "local", torch.float32
        vars(self).update(settings)
        self.linear = nn.Linear(4, 4)


def test_plain_attributes_tell_modules_apart_but_for_their_positions() -> None:
    one = signature_of_module(Windowed())
    settings = [{"window": 65}, {"window": None}, {"kind": "global"}, {"dtype": torch.float16}, {"causal": True}]
    settings += [{"causal": 1}, {"sizes": (1, 2)}, {"sizes": (1, 3)}, {"sizes": [1, 2]}, {"is_index": True}]
    others = [signature_of_module(Windowed(**setting)) for setting in settings]
    assert len({one, *others}) == 1 + len(others)
    for name in ("layer_idx", "block_index", "layer_id", "layer_number"):
        numbered = [signature_of_module(Windowed(**{name: number})) for number in (3, 4)]
        assert numbered[0] == numbered[1] == one
    assert signature_of_module(Windowed(held=object())) == one  # it says nothing in words


class Sees(nn.Module):
    """Fails unless its second argument is on the host."""

    def forward(self, x: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        assert (x.device.type, sizes.device.type) == ("simulated", "cpu")
        return x * 2, sizes + 1


def test_what_is_on_the_host_stays_there_and_takes_no_bytes_of_the_device() -> None:
    call = Call("forward", (inputs(), torch.ones(1000)), {}, on_host=frozenset({1}))
    found = run_passes(Sees(), call, make_meter("simulated:1"), repeats=0)
    assert (found.inputs, found.outputs) == (BYTES, BYTES)
    assert [shape.on_host for shape in found.returned.shapes] == [False, True]
