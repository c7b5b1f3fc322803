"""Whole training steps: every optimizer, clipping over devices, loss scaling, pinned loaders."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autobalance.simulated import observing, pinning, simulate

Optimizer = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: list[tuple[Optimizer, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    *((torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, kind: True}) for kind in ("foreach", "fused")),
    *((torch.optim.Adam, {kind: True}) for kind in ("foreach", "fused")),
    (torch.optim.AdamW, {}),
    *((torch.optim.AdamW, {"foreach": kind}) for kind in (True, False)),
    (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    (torch.optim.AdamW, {"capturable": True}),
    *((torch.optim.Adagrad, {kind: True}) for kind in ("foreach", "fused")),
    *(
        (cls, {"foreach": kind})
        for cls in (torch.optim.RMSprop, torch.optim.NAdam, torch.optim.RAdam)
        for kind in (True, False)
    ),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adafactor, {}),
]


def test_training_with_line_search_equals_training_on_the_cpu() -> None:
    def one_device(device: str) -> list[Tensor]:
        return trained((device, device), torch.optim.LBFGS, {"line_search_fn": "strong_wolfe"})

    for one, other in zip(one_device("simulated:1"), one_device("cpu"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def halves(devices: tuple[str, str]) -> list[nn.Module]:
    torch.manual_seed(0)
    first, second = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8)), nn.Linear(8, 4)
    return [first.to(devices[0]), second.to(devices[1])]


def trained(devices: tuple[str, str], optimizer: Optimizer, options: dict[str, Any]) -> list[Tensor]:
    """Losses and weights after three steps of a model whose halves are on `devices`."""
    first, second = halves(devices)
    x = torch.randn(5, 6)
    updates = optimizer([*first.parameters(), *second.parameters()], **options)
    losses = []

    def step() -> Tensor:
        updates.zero_grad()
        loss = second(first(x.to(devices[0])).to(devices[1])).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        losses.append(updates.step(step).detach().cpu())
    return [*losses, *(parameter.detach().cpu() for parameter in (*first.parameters(), *second.parameters()))]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_training_on_two_devices_equals_training_on_the_cpu(optimizer: Optimizer, options: dict[str, Any]) -> None:
    reference = {name: value for name, value in options.items() if name != "capturable"}
    moved = trained(("simulated:0", "simulated:1"), optimizer, options)
    for one, other in zip(moved, trained(("cpu", "cpu"), optimizer, reference), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_optimizers_choose_their_foreach_form_as_on_cuda() -> None:
    parameter = nn.Parameter(torch.ones(2, device="simulated:0"))
    parameter.grad = torch.ones(2, device="simulated:0")
    seen: list[str] = []
    with observing(lambda func, *rest: seen.append(func.name())):
        torch.optim.AdamW([parameter]).step()
        nn.utils.clip_grad_norm_([parameter], 1.0)
    assert {"aten::_foreach_lerp_.Scalar", "aten::_foreach_norm.Scalar"} <= set(seen)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_over_devices(foreach: bool | None) -> None:
    def clipped(devices: tuple[str, str]) -> tuple[float, list[Tensor]]:
        first, second = halves(devices)
        parameters = [*first.parameters(), *second.parameters()]
        second(first(torch.ones(5, 6, device=devices[0])).to(devices[1])).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(parameters, 0.1, foreach=foreach)
        nn.utils.clip_grad_value_(parameters, 0.01, foreach=foreach)
        return norm.item(), [parameter.grad.cpu() for parameter in parameters]

    norm, gradients = clipped(("simulated:0", "simulated:2"))
    expected_norm, expected = clipped(("cpu", "cpu"))
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


def scaled_steps(device: str, gradients: list[float]) -> tuple[list[float], list[float]]:
    """Weights and scales after one step for each gradient."""
    weight = nn.Parameter(torch.ones(2).to(device))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = torch.amp.GradScaler(device.split(":")[0], init_scale=4.0, growth_interval=2)
    scales = []
    for gradient in gradients:
        optimizer.zero_grad()
        scaler.scale((weight * gradient).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([weight], 10.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return weight.tolist(), scales


def test_loss_scaling_skips_infinite_gradients_and_grows() -> None:
    gradients = [1.0, 1.0, float("inf"), 1.0]
    weights, scales = scaled_steps("simulated:1", gradients)
    assert (weights, scales) == scaled_steps("cpu", gradients)
    assert scales == [4.0, 8.0, 4.0, 4.0]
    assert weights == [-0.5, -0.5]


def test_memory_of_training_is_weights_gradients_and_state(allocated: Callable[..., int]) -> None:
    model = nn.Linear(64, 64, bias=False, device="simulated:0")  # 16 KiB
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 64, device="simulated:0")).sum().backward()
        assert allocated() in (2 * 16384, 4 * 16384)
        optimizer.step()
        assert allocated() == 4 * 16384
    del optimizer
    model.zero_grad()
    assert allocated() == 16384


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_running_out_of_memory_leaves_everything_usable(where: str, allocated: Callable[..., int]) -> None:
    gc.collect()
    model = nn.Linear(64, 64, bias=False, device="simulated:0")
    optimizer = torch.optim.Adam(model.parameters())
    base = torch.simulated.memory_allocated(0)
    room = {"forward": 100 * 256, "backward": 16384 + 100 * 256, "optimizer": 2 * 16384}[where]

    def step(rows: int) -> None:
        loss = model(torch.ones(rows, 64, device="simulated:0")).sum()
        loss.backward()
        optimizer.step()

    with simulate([base + room]):
        with pytest.raises(torch.OutOfMemoryError, match="simulated:0 out of memory"):
            step(4 if where == "optimizer" else 100)
        gc.collect()
        optimizer.zero_grad()
        model.zero_grad()
        assert allocated() <= 16384 + 16384
    optimizer = torch.optim.Adam(model.parameters())  # its state may be half made, as on CUDA
    step(100)
    assert model.weight.grad is not None


@pytest.mark.parametrize("workers", [0, 1])
def test_pinning_of_loaders_is_switched_off_and_said_once(workers: int, caplog: pytest.LogCaptureFixture) -> None:
    pinning.forget_that_it_was_said()
    data = TensorDataset(torch.arange(6.0).view(6, 1))
    with caplog.at_level(logging.INFO, logger="autobalance"):
        batches = [
            batch for _ in range(2) for (batch,) in DataLoader(data, batch_size=2, num_workers=workers, pin_memory=True)
        ]
    assert [batch.flatten().tolist() for batch in batches[:3]] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert all(batch.device.type == "cpu" and not batch.is_pinned() for batch in batches)
    assert [record.message for record in caplog.records] == [
        "Host memory is not pinned while devices are simulated: pinned memory is for faster copies to a GPU."
    ]
