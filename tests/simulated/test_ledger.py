"""Bytes are counted by storage, rounded as CUDA's allocator rounds them, and freed with the storage."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable

import pytest
import torch
from pytorch_lightning.utilities.memory import is_oom_error

from autobalance.simulated import charging, simulate, using_ledger

MIB = 2**20
Allocated = Callable[..., int]


def test_bytes_are_rounded_up_to_512(allocated: Allocated) -> None:
    one = torch.zeros(1, device="simulated:1")
    assert allocated(1) == 512
    many = torch.zeros(129, device="simulated:1")
    assert allocated(1) == 512 + 1024
    del one, many
    assert allocated(1) == 0


def test_views_and_in_place_changes_are_not_counted(allocated: Allocated) -> None:
    x = torch.zeros(1024, device="simulated:0")
    views = [x.view(32, 32), x[3:], x.t(), x.detach(), x.expand(4, 1024), x.add_(1), x.view(32, 32).t_()]
    assert allocated() == 4096
    del x
    assert allocated() == 4096
    del views
    assert allocated() == 0


def test_peak_is_the_most_at_once() -> None:
    torch.simulated.reset_peak_memory_stats(2)
    base = torch.simulated.memory_allocated(2)
    x = torch.zeros(MIB // 4, device="simulated:2")
    y = x + x
    del x
    z = y * 2
    del y, z
    assert torch.simulated.max_memory_allocated(2) - base == 2 * MIB
    torch.simulated.reset_peak_memory_stats(2)
    assert torch.simulated.max_memory_allocated(2) == torch.simulated.memory_allocated(2)


def test_out_of_memory_says_how_much_was_wanted_and_is_recognised(allocated: Allocated) -> None:
    with simulate("2x1MiB"):
        x = torch.ones(MIB // 8, device="simulated:1")
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.cat([x, x, x])
        message = str(caught.value)
        assert "simulated:1 out of memory" in message
        assert "Tried to allocate 1.50 MiB" in message
        assert "total capacity of 1.00 MiB" in message
        assert "512.00 KiB is in use" in message
        assert is_oom_error(caught.value)
        assert allocated(1) == MIB // 2
        assert x.sum().item() == MIB // 8
        fits = x + 1
        assert torch.simulated.mem_get_info(1) == (0, MIB)
        del fits


def test_results_counted_before_the_one_that_failed_are_not_kept() -> None:
    with simulate("1x1MiB"):
        x = torch.ones(100_000, device="simulated:0")
        held = torch.simulated.memory_allocated(0)
        with pytest.raises(torch.OutOfMemoryError):
            torch.sort(x)  # values (400 kB) fit, indices (800 kB) do not
        assert torch.simulated.memory_allocated(0) == held


def test_storage_that_grows_is_counted_again(allocated: Allocated) -> None:
    x = torch.zeros(4, device="simulated:0")
    x.resize_(1024)
    assert allocated() == 4096
    assert x.shape == (1024,)
    with simulate([4096 + torch.simulated.memory_allocated(0)]):
        with pytest.raises(torch.OutOfMemoryError):
            x.resize_(1 << 20)
        assert x.shape == (1024,)
        assert allocated() == 4096


class Births:
    """A ledger that keeps a list of what it was told."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def allocate(self, storage: torch.UntypedStorage, nbytes: int, account: int) -> None:
        self.seen.append((nbytes, account))


def test_another_ledger_is_told_of_births_instead(allocated: Allocated) -> None:
    births = Births()
    x = torch.zeros(256, device="simulated:0")
    with using_ledger(births):
        y = x + 1
        y.view(16, 16).add_(1)
    assert births.seen == [(1024, 0)]
    assert allocated() == 1024
    y.add_(1)
    assert allocated() == 1024


def test_accounts_follow_the_first_operand_through_autograd() -> None:
    births = Births()
    with using_ledger(births):
        with charging(7):
            w = torch.ones(256, device="simulated:0").requires_grad_()
        x = torch.ones(512, device="simulated:0")
        births.seen.clear()
        y = w * 2
        z = torch.cat([x, y])
        assert (w.account, x.account, y.account, z.account) == (7, 0, 7, 0)
        assert y[3:].account == 7
        assert births.seen == [(1024, 7), (3072, 0)]
        y.sum().backward()
        assert w.grad.account == 7


def test_outputs_of_list_operations_belong_to_the_same_element_of_the_first_list() -> None:
    with using_ledger(Births()):
        tensors = []
        for account in (3, 4, 5):
            with charging(account):
                tensors.append(torch.ones(4, device="simulated:0"))
        assert [t.account for t in torch._foreach_mul(tensors, 2.0)] == [3, 4, 5]
        assert [t.account for t in torch._foreach_add(tensors, tensors)] == [3, 4, 5]


def test_bytes_of_a_failed_step_are_free_once_the_error_is_forgotten(allocated: Allocated) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to("simulated:0")
    held = allocated()
    try:
        loss = model(torch.ones(8, 64, device="simulated:0")).sum()
        loss.backward()
        raise ValueError("in the step")
    except ValueError:
        pass
    model.zero_grad()
    del loss
    assert allocated() == held
    model.cpu()
    assert allocated() == 0


def test_pickled_tensor_takes_no_device_memory(allocated: Allocated) -> None:
    text = pickle.dumps(torch.ones(256, device="simulated:3"))
    gc.collect()
    assert allocated(3) == 0
    assert pickle.loads(text).device.type == "cpu"
