"""Elements without numbers: shapes follow, small values stay known, and the rest is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from autobalance.simulated import SimulatedTensor, fake_elements, simulate, using_ledger

DEVICE = "simulated:1"


@pytest.fixture(autouse=True)
def fakes() -> Iterator[list[str]]:
    """Elements are fake in every test; the fixture is the list of placeholders that were given."""
    notes: list[str] = []
    with fake_elements(FakeTensorMode(), notes.append):
        yield notes


def unknown(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def known(tensor: Tensor) -> Tensor | None:
    assert isinstance(tensor, SimulatedTensor)
    return tensor.known


def test_elements_are_fake_whatever_makes_them() -> None:
    x = torch.ones(2, 3)
    made = [x.to(DEVICE), unknown(2, 3), torch.zeros(2, device=DEVICE), torch.tensor([1.0], device=DEVICE)]
    made += [made[0] @ made[1].T, nn.Linear(2, 3, device=DEVICE).weight, made[0].new_ones(3)]
    assert all(isinstance(tensor, SimulatedTensor) and isinstance(tensor.elements, FakeTensor) for tensor in made)


def test_no_memory_is_taken() -> None:
    x = torch.empty(1 << 40, device=DEVICE)
    assert (x + 1).numel() == 1 << 40


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.tensor([1, 2, 3], device=DEVICE), [1, 2, 3]),
        (lambda: torch.tensor([True, False]).to(DEVICE), [True, False]),
        (lambda: torch.arange(4, device=DEVICE) * 2 + 1, [1, 3, 5, 7]),
        (lambda: torch.zeros(3, device=DEVICE), [0.0, 0.0, 0.0]),
        (lambda: torch.full((2,), 7, device=DEVICE), [7, 7]),
        (lambda: torch.ones(2, 3, device=DEVICE).sum(1), [3.0, 3.0]),
        (lambda: torch.arange(6, device=DEVICE).view(2, 3)[1], [3, 4, 5]),
        (lambda: torch.ones_like(unknown(3), dtype=torch.long).cumsum(0), [1, 2, 3]),
        (lambda: torch.cat([torch.tensor([1], device=DEVICE), torch.arange(2, device=DEVICE)]), [1, 0, 1]),
        (lambda: (torch.arange(3, device=DEVICE) > 1).nonzero(), [[2]]),
        (lambda: torch.arange(3, device=DEVICE).repeat_interleave(torch.tensor([2, 0, 1], device=DEVICE)), [0, 0, 2]),
        (lambda: torch.tensor([3, 1, 3], device=DEVICE).unique(), [1, 3]),
        (lambda: torch.arange(3, device=DEVICE).to("simulated:2").cpu(), [0, 1, 2]),
        (lambda: F.one_hot(torch.tensor([1, 0], device=DEVICE)), [[0, 1], [1, 0]]),
        (lambda: torch.tensor([2, 1], device=DEVICE).sort()[0], [1, 2]),
    ],
)
def test_small_values_stay_known(make: Callable[[], Tensor], expected: object) -> None:
    result = make()
    assert result.tolist() == expected
    assert isinstance(result, SimulatedTensor)
    assert isinstance(result.elements, FakeTensor)


def test_changes_in_place_are_followed_through_views() -> None:
    x = torch.zeros(4, dtype=torch.long, device=DEVICE)
    view = x[1:3]
    x.add_(1)
    view.mul_(5)
    x[0] = 9
    assert (x.tolist(), view.tolist()) == ([9, 5, 5, 1], [5, 5])


def test_nothing_is_known_after_something_unknown_is_written() -> None:
    x = torch.zeros(4, device=DEVICE)
    view = x[1:3]
    view.copy_(unknown(2))
    assert known(x) is None
    assert known(view) is None
    x.zero_()
    assert x.tolist() == [0.0] * 4
    x.normal_()
    assert known(x) is None


def test_large_and_random_values_are_not_known() -> None:
    assert known(torch.zeros((1 << 20) + 1, dtype=torch.bool, device=DEVICE)) is None
    assert known(torch.zeros(17, device=DEVICE)) is None
    assert known(torch.randint(5, (3,), device=DEVICE)) is None
    assert known(unknown(2)) is None


def test_decisions_on_what_is_known() -> None:
    lengths = torch.tensor([2, 3], device=DEVICE)
    mask = torch.arange(3, device=DEVICE)[None] < lengths[:, None]
    assert bool(mask.any())
    assert not mask.all()
    assert int(lengths.max()) == 3
    assert torch.equal(lengths, torch.tensor([2, 3], device=DEVICE))
    assert torch.bincount(lengths).tolist() == [0, 0, 1, 1]
    assert unknown(2, 3)[mask].shape == (5,)
    assert unknown(2, 3, 7)[mask].shape == (5, 7)
    assert unknown(2, 3).masked_select(mask).shape == (5,)
    assert unknown(2, 3)[:, torch.tensor([True, False, True])].shape == (2, 2)
    x = unknown(2, 3)
    x[mask] = 0.0
    assert x.shape == (2, 3)


def test_unknown_float_gets_a_noted_placeholder(fakes: list[str]) -> None:
    loss = unknown(3).sum()
    assert (loss.item(), float(loss), f"{loss:.1f}") == (1.0, 1.0, "1.0")
    assert loss.detach().cpu().item() == 1.0
    assert fakes == ["float"] * 4


def test_unknown_integer_or_decision_is_an_error() -> None:
    with pytest.raises(DataDependentOutputException):
        unknown(3).argmax().item()
    with pytest.raises(DataDependentOutputException):
        bool(unknown(3).sum() > 0)
    x = unknown(3)
    with pytest.raises(DynamicOutputShapeException):
        x[x > 0]


def test_mixed_devices_are_refused_as_with_numbers() -> None:
    with pytest.raises(RuntimeError, match="found at least two devices, simulated:1 and simulated:2"):
        unknown(2) + torch.ones(2, device="simulated:2")
    with pytest.raises(RuntimeError, match="found at least two devices, simulated:1 and cpu"):
        unknown(2) + torch.ones(2)
    with pytest.raises(RuntimeError, match="found at least two devices, simulated:1 and cpu"):
        unknown(2) + unknown(2).cpu()


def test_host_copies_carry_on_as_host_tensors() -> None:
    x = unknown(2)
    on_host = x.cpu()
    assert str((on_host * 2 + torch.ones(2)).device) == "cpu"
    assert str((x * on_host.sum()).device) == DEVICE
    assert on_host.to(DEVICE).device == torch.device(DEVICE)


def test_capacity_holds_for_fakes_too() -> None:
    with simulate("2x1MiB"), pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 4\.00 MiB"):
        torch.empty(1 << 20, device=DEVICE)


def test_tensors_made_before_are_taken_as_they_are() -> None:
    class Nothing:
        born = 0

        def allocate(self, storage: object, nbytes: int, account: int) -> None:
            self.born += nbytes

    x = SimulatedTensor(torch.arange(3.0), 1)
    counter = Nothing()
    with using_ledger(counter):
        x.view(3, 1)
        assert counter.born == 0
        y = x * 2
        assert counter.born == 12
    assert isinstance(y, SimulatedTensor)
    assert isinstance(y.elements, FakeTensor)
    assert (x.tolist(), y.tolist()) == ([0.0, 1.0, 2.0], [0.0, 2.0, 4.0])


def test_numbers_are_there_again_afterwards() -> None:
    with fake_elements(None):
        assert (torch.ones(2, device=DEVICE) + 1).tolist() == [2.0, 2.0]
