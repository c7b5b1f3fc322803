"""One real step on the host in which somebody else runs the blocks, so that each is seen with what it is really given.

The step runs on a copy of the model that shares its parameters: no second model is held in memory. What comes out of a
block goes into the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autobalance.blocks import Blocks
from autobalance.measuring.call import Call
from autobalance.measuring.hosted import Hosted
from autobalance.measuring.one_forward import run_one_forward
from autobalance.placement.hooks import replace_method, run_method
from autobalance.profiling.copying import copy_module
from autobalance.profiling.lazy import with_shape
from autobalance.profiling.trial import Batch, Trial

Run = Callable[[int, str, nn.Module, Call], tuple[Any, Sequence[Tensor]]]
"""Runs the module of that name, all or part of the block of that index; returns what it returns, on the host, and
those of the tensors in it that it returns on the host even where it is on a device."""


def run_blocks(root: nn.Module, blocks: Blocks, trial: Trial, batch: Batch, run: Run) -> None:
    """Run the forward of one step, with every call of a block handed to `run`.

    Example:
        >>> run_blocks(model, blocks, trial, Batch("train batch", "train", data), show_call)  # doctest: +SKIP

    Args:
        root: the user's model; not changed.
        blocks: its blocks.
        trial: runs the step.
        batch: on the host.
        run: runs the blocks.
    """
    twin, _ = copy_module(root, partial(_on_host, _parameters_in(blocks), trial.dtype), trial.stand_ins(root, "real"))
    names = {id(module): name for name, module in root.named_modules()}
    hosted = Hosted()
    declared = getattr(twin, "forward_methods", None)
    methods = declared() if callable(declared) else {}
    for index, (block, modules) in enumerate(zip(blocks.names, blocks.modules, strict=True)):
        for module in modules:
            path = names[id(module)]
            for method in ("forward", *methods.get(block, ()), *methods.get(path, ())):
                replace_method(twin.get_submodule(path), method, _Stop(index, path, run, hosted))
    _keep_attributes_there(twin, hosted)
    run_one_forward(trial, twin, batch, torch.device("cpu"), hosted)


def _parameters_in(blocks: Blocks) -> set[int]:
    return {id(parameter) for modules in blocks.modules for module in modules for parameter in module.parameters()}


def _on_host(in_blocks: set[int], dtype: torch.dtype | None, tensor: Tensor) -> Tensor:
    """The copy's tensor for one of the model's: blocks run elsewhere, with copies of their own."""
    inside = id(tensor) in in_blocks
    tensor = with_shape(tensor)
    if inside:
        return tensor.detach() if tensor.device.type in ("cpu", "meta") else tensor.detach().cpu()
    made = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().to("cpu", copy=True)
    return made.to(dtype) if dtype is not None and made.is_floating_point() else made


def _keep_attributes_there(twin: nn.Module, hosted: Hosted) -> None:
    """Plain attributes stay on the host when a module is moved."""
    for part in twin.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor):
                hosted.add(value)


class _Stop:
    """Stands for a method of a block. In a copy of the block it is the method again."""

    __slots__ = ("_hosted", "_index", "_path", "_run")  # what copies a module does not look into these

    def __init__(self, index: int, path: str, run: Run, hosted: Hosted) -> None:
        self._hosted = hosted
        self._index = index
        self._path = path
        self._run = run

    def __call__(self, module: nn.Module, name: str, inner: Any, *args: Any, **kwargs: Any) -> Any:
        with self._hosted.paused():
            call = Call.under_way(name, args, kwargs, "cpu", self._hosted.holds)
            output, stayed = self._run(self._index, self._path, module, call)
            for tensor in stayed:
                self._hosted.add(tensor)
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _call_itself


def _call_itself(module: nn.Module, name: str, inner: Any, *args: Any, **kwargs: Any) -> Any:
    return run_method(module, name, inner, args, kwargs)


def on_device(module: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of a module on a device; what is on meta gets random numbers there.

    Args:
        module: on the host, or on meta.
        device: where the copy goes.
        dtype: to which floating tensors are cast; None: they stay as they are.
    """

    def moved(tensor: Tensor) -> Tensor:
        tensor = with_shape(tensor)
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if not tensor.is_meta:
            return tensor.detach().to(device, wanted, copy=True)
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device=device)
        if made.is_floating_point() or made.is_complex():
            return made.normal_(std=0.02)
        return made.zero_()

    copied, _ = copy_module(module, moved, {})
    for part in copied.modules():
        _restore_methods(part)
    return copied


def _restore_methods(part: nn.Module) -> None:
    """Undo what stopped a copy of the block; left there, it would hold the copy in a circle of references."""
    for name, stopped in list(vars(part).items()):
        if isinstance(stopped, partial) and stopped.func is _call_itself:
            _, _, inner = stopped.args
            del part.__dict__[name]
            if inner is not None:
                part.__dict__[name] = inner


def plain_attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    """What the modules inside one hold besides parameters, buffers and modules, by name of module and attribute.

    Args:
        module: with those inside it.
    """
    return {
        (name, key): value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if not key.startswith("_")
    }


def changed_attributes(before: dict[tuple[str, str], Any], module: nn.Module) -> Sequence[tuple[str, str, Any]]:
    """Those attributes that were set anew since `before`, such as an auxiliary loss that is kept for the glue.

    Args:
        before: what `plain_attributes` gave.
        module: the same.
    """
    after = plain_attributes(module)
    return [(*where, value) for where, value in after.items() if before.get(where, after) is not value]
