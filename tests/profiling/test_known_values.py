"""Real values beside fakes: what follows from them has the shapes of the real run, computed here with real tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from autobalance import compat
from autobalance.profiling.known_values import KnownValues

Notes = list[str]


@contextmanager
def knowing(notes: Notes | None = None) -> Iterator[Callable[[Tensor], Tensor]]:
    """Inside operations run on fakes; gives a function that makes a fake of a real tensor, known if it is no float."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    known = KnownValues(mode, (notes if notes is not None else []).append)

    def fake(value: Tensor) -> Tensor:
        made = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
        if not value.is_floating_point():
            with compat.modes_disabled():
                known.remember(made, value.clone())
        return made

    with mode, known:
        yield fake


MASK = torch.tensor([[True, False, True], [False, True, True]])
VALUES = torch.arange(6.0).reshape(2, 3)
COUNTS = torch.arange(4)


@pytest.mark.parametrize(
    "select",
    [
        lambda values, mask: mask.nonzero(),
        lambda values, mask: values[mask],
        lambda values, mask: values[:, mask[0]],
        lambda values, mask: torch.masked_select(values, mask),
        lambda values, mask: torch.masked_select(values, mask[0]),
        lambda values, mask: torch.where(mask)[0],
        lambda values, mask: torch.unique(mask.sum(0)),
        lambda values, mask: torch.repeat_interleave(mask.sum(1)),
        lambda values, mask: torch.bincount(mask.sum(0)),
    ],
)
def test_shapes_that_depend_on_known_values_are_the_real_ones(select: Callable[[Tensor, Tensor], Tensor]) -> None:
    real = select(VALUES, MASK)
    with knowing() as fake:
        made = select(fake(VALUES), fake(MASK))
    assert (made.shape, made.dtype) == (real.shape, real.dtype)


def test_assignment_through_a_known_mask_runs() -> None:
    with knowing() as fake:
        values = fake(VALUES)
        values[fake(MASK)] = 0.0
        assert values.shape == VALUES.shape


def test_unknown_mask_has_no_shape() -> None:
    with knowing() as fake, pytest.raises(DynamicOutputShapeException):
        (fake(VALUES) > 2.0).nonzero()


def test_what_is_known_follows_changes_in_place_and_views() -> None:
    with knowing() as fake:
        counts = fake(COUNTS)
        first = counts[:2]
        counts.add_(10)
        assert first.tolist() == [10, 11]
        counts.zero_()
        assert first.sum().item() == 0


def test_writing_something_unknown_forgets_all_views_of_it() -> None:
    with knowing() as fake:
        counts = fake(COUNTS)
        first = counts[:2]
        counts.copy_(fake(VALUES[0, :1]).long())
        with pytest.raises(RuntimeError):
            first[0].item()
        counts.zero_()  # and what overwrites that is known again
        assert counts[0].item() == 0


def test_shape_of_something_unknown_is_enough_for_zeros() -> None:
    with knowing() as fake:
        unknown = fake(VALUES).long()
        assert torch.zeros_like(unknown).sum().item() == 0
        with pytest.raises(RuntimeError):
            unknown.sum().item()


def test_number_that_nobody_knows_is_one_and_noted() -> None:
    notes: Notes = []
    with knowing(notes) as fake:
        assert fake(VALUES).sum().item() == 1.0
    assert notes == ["float"]


def test_unknown_gradients_are_finite_for_a_loss_scaler() -> None:
    with knowing() as fake:
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_([fake(VALUES)], found, torch.ones(1))
        assert found.item() == 0.0


def test_experts_of_unknown_scores_are_chosen_equally_often_and_noted_where_it_matters() -> None:
    notes: Notes = []
    with knowing(notes) as fake:
        chosen = fake(VALUES.repeat(3, 1)).topk(2, dim=-1).indices
        assert notes == []
        sizes = [len((chosen == expert).nonzero()) for expert in range(3)]
        rows = [sorted(row) for row in chosen.tolist()]
    assert sizes == [4, 4, 4]
    assert all(first != second for first, second in rows)
    assert set(notes) == {"choice"}


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_order_of_unknown_numbers_is_a_permutation(dim: int) -> None:
    with knowing() as fake:
        order = fake(VALUES).argsort(dim)
        back = order.argsort(dim)
        expected = torch.arange(VALUES.shape[dim])
        assert torch.tensor(order.gather(dim, back).movedim(dim, -1).tolist()).eq(expected).all()
