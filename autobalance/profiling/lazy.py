"""Lazy modules, whose parameters have no shape before the first batch: one dry pass finds the shapes.

The user's module stays lazy; what is found is kept beside its parameters for as long as they live.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from autobalance import compat
from autobalance.kernels.target import Target
from autobalance.measuring.one_forward import run_one_forward
from autobalance.profiling.copying import copy_module
from autobalance.profiling.sandbox import random_state_kept
from autobalance.profiling.tracer import Tracer
from autobalance.profiling.trial import Batch, Trial
from autobalance.profiling.world import World, make_world

_shapes = WeakIdKeyDictionary()
"""A tensor on meta for each lazy parameter and buffer whose shape was found."""


def learn_shapes(root: nn.Module, trial: Trial, batch: Batch) -> None:
    """Find the shapes of lazy parameters and buffers by one forward on tensors without numbers.

    Example:
        >>> learn_shapes(model, trial, Batch("train batch", "train", data))   # doctest: +SKIP

    Args:
        root: the user's model; its lazy modules stay lazy.
        trial: runs the step.
        batch: on the host.

    Raises:
        ValueError: some stay without a shape, since the step does not call their module, or fails before.
    """
    lazy = {name: tensor for name, tensor in _tensors(root).items() if is_lazy(tensor) and tensor not in _shapes}
    if not lazy:
        return
    failure = _run_dry(root, trial, batch, lazy)
    lacking = [name for name, tensor in lazy.items() if tensor not in _shapes]
    if lacking:
        shown = ", ".join(lacking[:3]) + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
        why = "the step does not call the modules that hold them" if failure is None else f"the step failed: {failure}"
        raise ValueError(
            f"{len(lacking)} lazy parameter(s) or buffer(s) got no shape from a dry pass of one batch ({shown}): {why}."
            f" Call the model once on a real batch, or give these modules their sizes."
        )


def with_shape(tensor: Tensor) -> Tensor:
    """The tensor; for one that is lazy, one on meta of the shape that was found.

    Args:
        tensor: a parameter or buffer of the user's model.

    Raises:
        ValueError: no shape was found.
    """
    if not is_lazy(tensor):
        return tensor
    found: Tensor | None = _shapes.get(tensor)
    if found is None:
        raise ValueError(
            "the model holds a lazy parameter whose shape nobody knows; call the model once on a real batch"
        )
    return found


def _tensors(root: nn.Module) -> dict[str, Tensor]:
    return dict([*root.named_parameters(), *root.named_buffers()])


def _run_dry(root: nn.Module, trial: Trial, batch: Batch, lazy: Mapping[str, Tensor]) -> str | None:
    """One forward on a copy; returns what it failed with."""
    world = make_world("fake", Target("cpu", "cpu"), 1, Tracer(), _ignore, _ignore)
    registered = {id(tensor) for tensor in _tensors(root).values()}

    def replace(tensor: Tensor) -> Tensor:
        if is_lazy(tensor) and tensor not in _shapes:
            lazy_class: Any = UninitializedParameter if isinstance(tensor, nn.Parameter) else UninitializedBuffer
            with compat.modes_disabled():
                made: Tensor = lazy_class(requires_grad=tensor.requires_grad, dtype=tensor.dtype)
            return made
        if id(tensor) not in registered:
            return world.on_host(tensor)
        return world.on_device(_as_in_trial(with_shape(tensor), trial), 0, 0)

    with random_state_kept(), world:
        twin, _ = copy_module(root, replace, trial.stand_ins(root, "fake"))
        for name, tensor in lazy.items():
            path, _, key = name.rpartition(".")
            stand_in = _tensors(twin)[name]
            stand_in.materialize = partial(_materialize, world, trial, twin.get_submodule(path), key, tensor)  # type: ignore[attr-defined]
        try:
            run_one_forward(trial, twin, batch, world.devices[0])
        except Exception as error:  # harmless if all shapes are known by then
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return None


def _materialize(
    world: World,
    trial: Trial,
    module: nn.Module,
    name: str,
    lazy: Tensor,
    shape: Any,
    device: Any = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Stands for `materialize` of a lazy parameter, which cannot become a tensor without numbers itself."""
    with compat.modes_disabled():
        found = torch.empty(shape, dtype=dtype or lazy.dtype, device="meta")
        cast = _as_in_trial(found, trial)
    _shapes[lazy] = found
    made = world.on_device(cast, 0, 0)
    is_parameter = isinstance(lazy, nn.Parameter)
    setattr(module, name, nn.Parameter(made, requires_grad=lazy.requires_grad) if is_parameter else made)


def _as_in_trial(tensor: Tensor, trial: Trial) -> Tensor:
    return tensor.to(trial.dtype) if trial.dtype is not None and tensor.is_floating_point() else tensor


def _ignore(*told: Any) -> None:
    """Nobody asks what happens in a dry pass."""
