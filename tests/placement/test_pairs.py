from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from models import CASES
from torch import Tensor

import autobalance
from autobalance.devices.device import Device
from autobalance.partitioning.plan import Plan
from autobalance.placement import couriers, host_path, pairs
from autobalance.profiling.profile import BlockCost


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fresh process."""
    monkeypatch.setattr(pairs, "_checked", set())
    monkeypatch.setattr(host_path, "_untrusted", set())


def devices(*indices: int) -> list[torch.device]:
    return [torch.device("simulated", index) for index in indices]


class Fault:
    """Stands for the copy from device 0 to device 1, of which one byte in 4096 arrives wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, int]] = []
        self._copied = couriers._copied
        monkeypatch.setattr(couriers, "_copied", self)

    def __call__(self, tensor: Tensor, place: torch.device) -> Tensor:
        copied = self._copied(tensor, place)
        way = tensor.device.index, place.index
        self.seen.append(way)
        if way == (0, 1) and copied.numel() > 0:
            with torch.no_grad():
                copied.view(-1)[::4096] = 0 if copied.dtype == torch.uint8 else 1e3
        return copied


def test_every_pair_is_tested_both_ways_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, Any]] = []
    monkeypatch.setattr(pairs, "_corrupted", lambda *pair: seen.append(pair))
    pairs.check_pairs(devices(0, 1, 1, 0))
    zero, one, two = devices(0, 1, 2)
    assert seen == [(zero, one), (one, zero)]
    pairs.check_pairs(devices(1, 2))
    assert seen[2:] == [(one, two), (two, one)]
    pairs.check_pairs([torch.device("cpu"), torch.device("cpu")])
    assert len(seen) == 4


def test_nothing_is_said_of_pairs_that_work() -> None:
    pairs.check_pairs(devices(0, 1, 2))
    assert not host_path._untrusted


def test_a_pair_that_corrupts_is_named_and_goes_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Fault(monkeypatch)
    with pytest.warns(UserWarning, match="arrive corrupted") as caught:
        pairs.check_pairs(devices(0, 1))
    assert len(caught) == 1
    text = str(caught[0].message)
    for part in ("from simulated:0 to simulated:1", "1 of 1 bytes", "host's pinned memory", "IOMMU", "ACS", "driver"):
        assert part in text
    fault.seen.clear()
    x = torch.arange(10.0, device="simulated:0")
    assert couriers.carry(x, devices(1)[0]).tolist() == x.tolist()
    assert couriers.carry(x.to("simulated:1"), devices(0)[0]).tolist() == x.tolist()
    assert fault.seen == [(1, 0)], "only the way that is broken is left"


def test_a_fault_that_writes_nothing_is_seen_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(couriers, "_copied", lambda tensor, place: torch.empty_like(tensor, device=place))
    with pytest.warns(UserWarning, match="arrive corrupted") as caught:
        pairs.check_pairs(devices(0, 1))
    assert len(caught) == 2, "one for each way"


def test_a_machine_that_corrupts_on_the_host_path_too_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Fault(monkeypatch)
    monkeypatch.setattr(
        couriers, "through_host", lambda tensor, place, lane=None: torch.zeros_like(tensor, device=place)
    )
    with pytest.raises(RuntimeError, match=r"from simulated:0 to simulated:1 .*directly .*through the host"):
        pairs.check_pairs(devices(0, 1))


def test_training_is_right_on_a_pair_that_corrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["gpt"]
    names = case.body.block_names
    assignment = tuple(index * 2 // len(names) for index in range(len(names)))
    plan = Plan(
        assignment=assignment,
        blocks=tuple(BlockCost(block) for block in names),
        devices=tuple(Device(f"simulated:{index}", 2**30) for index in range(2)),
        budgets=(2**30,) * 2,
        peaks=(0,) * 2,
        root=1,
        policy="balanced",
    )
    Fault(monkeypatch)
    plain = case.make()
    with pytest.warns(UserWarning, match="from simulated:0 to simulated:1"):
        model = autobalance.dispatch(case.make(), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = autobalance.dispatch(case.make(), plan)  # said once
    del again
    optimizers = [module.configure_optimizers() for module in (model, plain)]
    for inputs, targets in case.batches(3):
        losses = []
        for module, optimizer, place in zip((model, plain), optimizers, ("simulated:1", "cpu"), strict=True):
            optimizer.zero_grad()
            loss = module.training_step((inputs.to(place), targets.to(place)), 0)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
