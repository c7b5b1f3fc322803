"""Deferred batch norm: the running statistics of parts are those of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autobalance.execution.batch_norm import DeferredBatchNorm, install_deferred
from autobalance.execution.micro_batch import MicroBatch, working_on

SHAPES: dict[type[nn.Module], tuple[int, ...]] = {
    nn.BatchNorm1d: (8, 3),
    nn.BatchNorm2d: (8, 3, 4, 2),
    nn.BatchNorm3d: (8, 3, 2, 2, 2),
}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def each(parts: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """The parts, each while it is the one under way."""
    for index, part in enumerate(parts):
        with working_on(MicroBatch(index, len(parts))):
            yield part


def assert_same_statistics(found: nn.Module, wanted: nn.Module) -> None:
    for name in STATISTICS:
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-6, atol=1e-6, msg=name)


def train(layer: nn.Module, deferred: DeferredBatchNorm, batches: list[Tensor]) -> None:
    for batch in batches:
        for piece in each(batch.split(3)):
            layer(piece).sum().backward()
        deferred.end_step()


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_running_statistics_are_those_of_the_full_batch(kind: type[nn.Module], momentum: float | None) -> None:
    torch.manual_seed(0)
    plain = kind(3, momentum=momentum)
    layer = copy.deepcopy(plain)
    batches = [5 + 2 * torch.randn(SHAPES[kind]) for _ in range(3)]
    train(layer, install_deferred(layer), batches)
    for batch in batches:
        plain(batch)
    assert_same_statistics(layer, plain)


def test_a_part_is_normalised_with_its_own_statistics() -> None:
    layer = nn.BatchNorm1d(2)
    install_deferred(layer)
    batch = torch.randn(6, 2)
    for piece in each(batch.split(3)):
        expected = (piece - piece.mean(0)) / (piece.var(0, unbiased=False) + layer.eps).sqrt()
        torch.testing.assert_close(layer(piece), expected, rtol=1e-5, atol=1e-5)


def test_nothing_is_updated_before_the_step_ends_or_by_a_step_that_failed() -> None:
    layer = nn.BatchNorm1d(2)
    deferred = install_deferred(layer)
    before = copy.deepcopy(layer.state_dict())
    for piece in each(torch.randn(6, 2).split(3)):
        layer(piece)
    deferred.forget()
    deferred.end_step()
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_a_layer_used_twice_is_updated_twice() -> None:
    plain = nn.BatchNorm1d(2, momentum=0.5)
    layer = copy.deepcopy(plain)
    deferred = install_deferred(layer)
    batch = torch.randn(5, 2)
    for piece in each(batch.split(3)):
        layer(piece)
        layer(3 * piece + 1)
    deferred.end_step()
    plain(batch)
    plain(3 * batch + 1)
    assert_same_statistics(layer, plain)


def test_recomputed_activations_are_counted_once() -> None:
    plain = nn.BatchNorm1d(2)
    layer = copy.deepcopy(plain)
    deferred = install_deferred(layer)
    batch = torch.randn(6, 2, requires_grad=True)
    runs = count()

    def run(piece: Tensor) -> Tensor:
        next(runs)
        output: Tensor = layer(piece)
        return output.sin()

    for piece in each(batch.split(3)):
        output = checkpoint(run, piece, use_reentrant=False)
        assert isinstance(output, Tensor)
        output.sum().backward()
    deferred.end_step()
    assert next(runs) == 4
    plain(batch)
    assert_same_statistics(layer, plain)


@pytest.mark.parametrize("prepare", [nn.Module.eval, lambda layer: setattr(layer, "track_running_stats", False)])
def test_a_layer_that_tracks_nothing_is_left_alone(prepare: Callable[[nn.Module], object]) -> None:
    layer = nn.BatchNorm1d(2)
    prepare(layer)
    deferred = install_deferred(layer)
    for piece in each(torch.randn(6, 2).split(3)):
        layer(piece)
    deferred.end_step()
    assert layer.num_batches_tracked is not None
    assert int(layer.num_batches_tracked) == 0


def test_outside_of_a_split_batch_torch_does_as_always() -> None:
    plain = nn.BatchNorm1d(2)
    layer = copy.deepcopy(plain)
    install_deferred(layer)
    batch = torch.randn(6, 2)
    assert torch.equal(layer(batch), plain(batch))
    assert_same_statistics(layer, plain)


def test_an_error_in_the_layer_leaves_it_as_it_was() -> None:
    layer = nn.BatchNorm1d(2)
    deferred = install_deferred(layer)
    buffers = dict(layer.named_buffers())
    with pytest.raises(ValueError, match="more than 1 value per channel"), working_on(MicroBatch(0, 2)):
        layer(torch.randn(1, 2))
    assert layer.momentum == 0.1
    assert all(value is buffers[name] for name, value in layer.named_buffers())
    deferred.end_step()
    assert layer.running_mean is not None
    assert torch.equal(layer.running_mean, torch.zeros(2))


def test_state_and_modules_are_plain_while_hooks_are_on_and_after() -> None:
    layer = nn.Sequential(nn.BatchNorm1d(2))
    names = list(layer.state_dict())
    deferred = install_deferred(layer)
    assert list(layer.state_dict()) == names
    assert type(layer[0]) is nn.BatchNorm1d
    deferred.remove()
    assert not layer[0]._forward_hooks
    assert not layer[0]._forward_pre_hooks


def test_synchronised_batch_norm_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    with pytest.raises(ValueError, match=r"cannot be used with the SyncBatchNorm '1'.*batch_norm='fallback'"):
        install_deferred(model)
