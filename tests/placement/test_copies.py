from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autobalance.placement.copies import Copies
from autobalance.placement.locate import DeviceLocator


@pytest.fixture
def send(locator: DeviceLocator) -> Callable[[Tensor], Tensor]:
    return lambda tensor: locator.send(tensor, torch.device("simulated", 1))


def ones(**options: bool) -> Tensor:
    return torch.ones(1000, device="simulated:0", **options)


def held(index: int) -> int:
    gc.collect()
    return torch.simulated.memory_allocated(index)


def test_a_copy_is_made_once_while_somebody_holds_it(send: Callable[[Tensor], Tensor]) -> None:
    mask = ones()
    before = held(1)
    copies = [send(mask) for _ in range(5)]
    assert all(copy is copies[0] for copy in copies)
    assert held(1) - before == 4096  # 4000 bytes, as the allocator rounds them


def test_each_place_has_its_own_copy(locator: DeviceLocator) -> None:
    mask = ones()
    copies = [locator.send(mask, torch.device("simulated", index)) for index in (1, 2, 1)]
    assert [str(copy.device) for copy in copies] == ["simulated:1", "simulated:2", "simulated:1"]
    assert copies[0] is copies[2]


def test_nothing_is_kept_alive(send: Callable[[Tensor], Tensor]) -> None:
    before = held(0), held(1)
    mask = ones()
    copy = send(mask)
    del copy
    assert held(1) == before[1]
    del mask
    assert held(0) == before[0]


def test_a_changed_source_is_sent_again(send: Callable[[Tensor], Tensor]) -> None:
    mask = ones()
    first = send(mask)
    mask.zero_()
    assert send(mask).sum().item() == 0.0
    assert first.sum().item() == 1000.0


def test_a_changed_copy_is_not_reused(send: Callable[[Tensor], Tensor]) -> None:
    mask = ones()
    send(mask).zero_()
    first = send(mask)
    first.zero_()
    assert send(mask).sum().item() == 1000.0


def test_a_change_through_a_view_counts(send: Callable[[Tensor], Tensor]) -> None:
    mask = ones()
    view = mask[:10]
    first = send(mask)
    view.zero_()
    assert send(mask).sum().item() == 990.0
    assert first.sum().item() == 1000.0


def test_a_new_tensor_where_an_old_one_was_is_not_taken_for_it() -> None:
    copies = Copies()
    kept = []
    for value in range(200):  # some of them get an id that was used before
        source = torch.full((1,), float(value))
        kept.append(copies.get(source, "there", source.clone))
        del source
    assert [int(copy.item()) for copy in kept] == list(range(200))


def test_a_copy_made_without_gradients_is_not_taken_with_them(send: Callable[[Tensor], Tensor]) -> None:
    x = ones(requires_grad=True)
    with torch.no_grad():
        plain = send(x)
        assert not plain.requires_grad
        assert send(x) is plain
    tracked = send(x)
    assert tracked.requires_grad
    with torch.no_grad():
        assert not send(x).requires_grad


def test_gradients_of_a_shared_copy_add_up(send: Callable[[Tensor], Tensor]) -> None:
    x = ones(requires_grad=True)
    (send(x) * 2).sum().backward(retain_graph=True)
    (send(x) * 3).sum().backward()
    assert x.grad is not None
    assert x.grad[0].item() == 5.0


def test_inference_mode_makes_copies_that_count_their_changes() -> None:
    copies = Copies()
    trained = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        inferred = torch.ones(2)
        assert inferred.is_inference()
        for source in (inferred, trained):
            copy = copies.get(source, "there", source.clone)
            before = copy._version  # an inference tensor has none
            copy.add_(1)
            assert copy._version > before
            assert not copy.requires_grad


def test_a_change_of_an_inference_tensor_is_never_missed() -> None:
    copies = Copies()
    with torch.inference_mode():
        source = torch.ones(2)
        first = copies.get(source, "there", source.clone)
        source.zero_()
        assert copies.get(source, "there", source.clone).tolist() == [0.0, 0.0]
    assert first.tolist() == [1.0, 1.0]


def test_a_copy_of_inference_mode_can_take_part_in_training_later(send: Callable[[Tensor], Tensor]) -> None:
    mask = ones()
    with torch.inference_mode():
        copy = send(mask)
    weight = torch.ones(1000, device="simulated:1", requires_grad=True)
    assert send(mask) is copy
    (weight * send(mask)).sum().backward()  # saves the mask, which no inference tensor allows
    assert weight.grad is not None


def test_the_table_forgets_what_is_gone() -> None:
    copies = Copies()
    for _ in range(1000):
        source = torch.ones(1)
        copies.get(source, "there", source.clone)
    assert len(copies._entries) <= 64


def test_threads_may_share_a_table() -> None:
    copies, errors = Copies(), []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        try:
            for _ in range(2000):
                source = torch.ones(1)
                assert copies.get(source, "there", source.clone).item() == 1.0
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
