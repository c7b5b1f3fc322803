"""Storages are recorded as they are born, grow and die."""

from __future__ import annotations

import torch

from autobalance.profiling.timeline import ROOT
from autobalance.profiling.tracer import Tracer
from autobalance.simulated import using_ledger


def test_births_and_deaths_are_recorded_in_order_with_rounded_sizes() -> None:
    tracer = Tracer()
    with using_ledger(tracer):
        first = torch.empty(100, device="simulated:0")
        second = torch.empty(200, device="simulated:1")
        del first
        view = second[:10]
        del second, view
    assert (tracer.sizes, tracer.accounts) == ([512, 1024], [0, 1])
    assert tracer.events == [1, 2, -1, -2]


def test_storage_that_grows_is_replaced_by_a_larger_one() -> None:
    tracer = Tracer()
    with using_ledger(tracer):
        grown = torch.empty(100, device="simulated:0")
        grown.resize_(300)
        assert tracer.sizes == [512, 1536]
        assert tracer.events == [1, -1, 2]
        grown.resize_(290)
    assert tracer.events == [1, -1, 2], "the storage stays as large as it is"


def test_result_is_charged_to_its_first_operand() -> None:
    tracer = Tracer()
    with using_ledger(tracer):
        one = torch.ones(4, device="simulated:2")
        _ = one + 1
    assert tracer.accounts == [2, 2]


def test_copies_of_a_copy_hold_the_same_value() -> None:
    tracer = Tracer()
    tensors = [torch.empty(4) for _ in range(4)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    for account, storage in enumerate(storages):
        tracer.allocate(storage, 16, account)
    tracer.copied(storages[1], [storages[0]])
    tracer.copied(storages[2], [storages[1]])
    assert tracer.values == [0, 0, 0, -1]
    assert tracer.copies == {1, 2}


def test_timeline_has_owners_in_place_of_accounts_and_keeps_marks() -> None:
    tracer = Tracer()
    tensors = [torch.empty(4) for _ in range(2)]
    tracer.allocate(tensors[0].untyped_storage(), 16, 7)
    tracer.mark("here")
    tracer.allocate(tensors[1].untyped_storage(), 16, 9)
    timeline = tracer.timeline({7: 3})
    assert timeline.owners == (3, ROOT)
    assert timeline.marks == (("here", 1),)


def test_scratch_is_born_and_dies_at_once() -> None:
    tracer = Tracer()
    tracer.transient(700, account=3, maker="mm")
    assert (tracer.events, tracer.sizes, tracer.nbytes, tracer.accounts) == ([1, -1], [1024], [700], [3])
    assert (tracer.kinds, tracer.makers) == (["scratch"], ["mm"])


def test_gradients_are_told_with_what_is_born_once_they_are_added() -> None:
    tracer = Tracer()
    with using_ledger(tracer):
        first, second = (torch.empty(8, device="simulated:0") for _ in range(2))
        tracer.added(first.untyped_storage())
        later = torch.empty(8, device="simulated:0")
        tracer.added(first.untyped_storage())
        tracer.added(second.untyped_storage())
    assert tracer.timeline({}).gradients == ((0, 2), (1, -1))
    del later


def test_only_casts_of_weights_are_told() -> None:
    tracer = Tracer()
    with using_ledger(tracer):
        weight, other = (torch.empty(8, device="simulated:0") for _ in range(2))
        tracer.describe(weight.untyped_storage(), "weights")
        made = [tensor.bfloat16() for tensor in (weight, other)]
        for source, cast in zip((weight, other), made, strict=True):
            tracer.cast(source.untyped_storage(), cast.untyped_storage())
    assert tracer.timeline({}).casts == (2,)


def test_a_workspace_is_kept_once_for_each_device() -> None:
    tracer = Tracer()
    for account in (0, 1, 0):
        tracer.workspace("cublas", 5000, account)
    timeline = tracer.timeline({0: 0, 1: 1})
    assert timeline.peaks([0, 0], devices=1) == [5120]
    assert timeline.peaks([0, 1], devices=2) == [5120, 5120]


def test_the_cpu_counts_every_byte() -> None:
    tracer = Tracer(granule=1)
    tracer.allocate(torch.empty(3, dtype=torch.int8).untyped_storage(), 3, account=0)
    assert tracer.sizes[0] == 3


def test_a_result_that_was_written_to_an_earlier_storage_is_that_storage() -> None:
    tracer, earlier = Tracer(), torch.zeros(256).untyped_storage()
    tracer.allocate(earlier, 1024, account=3)
    made = torch.zeros(256).untyped_storage()
    tracer.allocate(made, 1024, account=4)
    assert tracer.written_to(earlier, made)
    del earlier
    assert (tracer.sizes, tracer.accounts, tracer.events) == ([1024], [3], [1])
    del made
    assert tracer.events == [1, -1]


def test_a_storage_that_others_hold_a_copy_of_is_not_written_to() -> None:
    tracer = Tracer()
    original, copy, made = (torch.zeros(256).untyped_storage() for _ in range(3))
    for storage in (original, copy, made):
        tracer.allocate(storage, 1024, account=0)
    tracer.copied(copy, [original])
    assert not tracer.written_to(copy, made)
    assert tracer.events == [1, 2, 3]
