"""Blocks that cannot run on tensors without numbers: each is measured by itself, and the rest stays traced.

Such are kernels that take raw pointers, operators without a shape function, and shapes that depend on unknown numbers.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autobalance import compat
from autobalance.blocks import Blocks
from autobalance.kernels.target import Target
from autobalance.measuring.call import Call
from autobalance.measuring.captured import on_device
from autobalance.measuring.courier import Courier, all_tensors
from autobalance.measuring.extrapolate import measured_or_extrapolated
from autobalance.measuring.meters import meter_for
from autobalance.measuring.passes import Passes, run_passes
from autobalance.measuring.signatures import signature_of, signature_of_module
from autobalance.placement.hooks import replace_method, run_method
from autobalance.placement.move import Mover
from autobalance.profiling.opaque_optimizers import OpaqueOptimizers
from autobalance.profiling.sandbox import random_state_kept
from autobalance.profiling.substitute import substitute
from autobalance.profiling.traced import Traced
from autobalance.profiling.work import Phase
from autobalance.profiling.world import World


class NotMeasured(Exception):
    """A trace has come to a call of an opaque block that was not measured yet."""


@dataclass(frozen=True)
class _Failed:
    """The call at which a trace has ended: of which block and module, and what it was given, if that is known."""

    block: str
    path: str
    call: Call | None
    key: Hashable = None


class OpaqueBlocks:
    """Finds the blocks that cannot be traced, measures them, and stands for them in the next trace.

    Example:
        >>> opaque = OpaqueBlocks(model, blocks, target)                     # doctest: +SKIP
        >>> try:
        ...     trace()                                                      # doctest: +SKIP
        ... except Exception as error:
        ...     again = opaque.learn(error)                                  # doctest: +SKIP

    Args:
        root: the user's model; not changed.
        blocks: its blocks.
        target: whose kernels the trace chooses.
        dtype: to which the trial casts the model; None: it stays as it is.

    Attributes:
        optimizers: does the same for optimizers.
    """

    def __init__(self, root: nn.Module, blocks: Blocks, target: Target, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self.optimizers = OpaqueOptimizers(target)
        self._root = root
        self._blocks = dict(zip(blocks.names, blocks.modules, strict=True))
        self._target = target
        self._reasons: dict[str, str] = {}
        self._measured: dict[Hashable, Passes] = {}
        self._failed: _Failed | None = None
        # A list of its own, since a graph that stays alive holds what its hooks hold.
        self._in_backward: list[str] = []
        self._device = ""
        self._remarks: list[str] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """Which blocks were measured, and why, in words."""
        told = []
        for reason in dict.fromkeys(self._reasons.values()):
            names = [repr(name) for name, why in self._reasons.items() if why == reason]
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            told.append(
                f"{'block' if len(names) == 1 else 'blocks'} {shown} cannot run on tensors without numbers ({reason}): "
                f"run on random ones on {self._device}, forward and backward, and measured there; the rest is traced"
            )
        return (*told, *self._remarks, *self.optimizers.notes)

    def install(self, blocks: Blocks, twins: Blocks, methods: Any, world: World, traced: Traced) -> None:
        """Stand in a trace's copy of the model for the blocks that are known as opaque, and watch the others.

        Args:
            blocks: of the model.
            twins: the same in the copy.
            methods: names of methods other than `forward` that run a block, by the name of the block or a module in it.
            world: in which the trace runs.
            traced: what is told of the work of opaque blocks.
        """
        self._failed = None
        self._in_backward.clear()
        paths = {id(module): path for path, module in self._root.named_modules()}
        for name, modules, copies in zip(blocks.names, blocks.modules, twins.modules, strict=True):
            for module, twin in zip(modules, copies, strict=True):
                path = paths[id(module)]
                for method in dict.fromkeys(("forward", *methods.get(name, ()), *methods.get(path, ()))):
                    replace_method(twin, method, _Watched(self, name, path, world, traced))

    def call(self, block: str, path: str, world: World, traced: Traced, module: nn.Module, run: Any, call: Call) -> Any:
        """One call of a block in a trace.

        Args:
            block: its name.
            path: of the module in the model.
            world: of the trace.
            traced: what is noted of it.
            module: that is called.
            run: calls it.
            call: what it is given.

        Returns:
            What the module has returned, or stands for that.

        Raises:
            NotMeasured: the block is known as opaque, but not with such inputs.
        """
        if block in self._reasons:
            key = signature_of_module(module), signature_of(call)
            passes = self._measured.get(key)
            if passes is None:
                self._failed = _Failed(block, path, _with_numbers(call, world), key)
                raise NotMeasured(f"block {block!r} was not measured with these inputs")
            charge = partial(_charge, passes, world, traced)
            return substitute(passes, call.args, call.kwargs, list(module.parameters()), charge)
        try:
            output = run()
        except Exception:
            if self._failed is None:  # the innermost block
                key = signature_of_module(module), signature_of(call)
                self._failed = _Failed(block, path, _with_numbers(call, world), key)
            raise
        for tensor in all_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(_enter_backward, self._in_backward, block))
        return output

    def learn(self, error: Exception) -> bool:
        """Measure what has ended a trace.

        Args:
            error: with which it has ended.

        Returns:
            Whether another trace will come further: False where no block is to blame, or where it cannot run either.
        """
        failed, self._failed = self._failed, None
        if failed is None and self._in_backward and compat.raised_in_backward(error):
            block = self._in_backward[-1]
            failed = None if block in self._reasons else _Failed(block, "", None)
        if failed is None:
            return self.optimizers.learn(_in_short(error))
        if failed.block not in self._reasons:
            reason = _in_short(error)
            for name in self._alike(failed.block):
                self._reasons[name] = reason
        return failed.call is None or self._measure(failed)

    def _alike(self, block: str) -> list[str]:
        """The block and those of its class: what fails in one layer fails in all of them."""
        kinds = [type(module) for module in self._blocks[block]]
        if nn.Sequential in kinds:
            return [block]
        return [name for name, modules in self._blocks.items() if [type(module) for module in modules] == kinds]

    def _measure(self, failed: _Failed) -> bool:
        assert failed.call is not None
        module = self._root.get_submodule(failed.path)
        with meter_for(self._target) as meter, random_state_kept():
            try:
                copied = on_device(module, meter.device, self._dtype)
                passes, _, notes = measured_or_extrapolated(
                    failed.call, lambda part: run_passes(copied, part, meter, repeats=0), str(meter.device)
                )
            except Exception:  # it does not run with numbers either, and the whole step will say so
                return False
        if failed.key in self._measured:  # a further trace would end at the same place
            return False
        self._measured[failed.key] = passes
        self._device = str(meter.device)
        self._remarks += [f"{failed.block}: {note}" for note in notes]
        return True


class _Watched:
    """Stands for a method of a block in a trace."""

    __slots__ = ("_block", "_opaque", "_path", "_traced", "_world")

    def __init__(self, opaque: OpaqueBlocks, block: str, path: str, world: World, traced: Traced) -> None:
        self._opaque = opaque
        self._block = block
        self._path = path
        self._world = world
        self._traced = traced

    def __call__(self, module: nn.Module, name: str, inner: Any, *args: Any, **kwargs: Any) -> Any:
        world = self._world
        call = Call.under_way(name, args, kwargs, world.devices[0].type, lambda held: world.account_of(held) is None)
        run = partial(run_method, module, name, inner, args, kwargs)
        return self._opaque.call(self._block, self._path, self._world, self._traced, module, run, call)


def _enter_backward(entered: list[str], block: str, gradient: Tensor) -> None:
    entered[:] = [block]


def _in_short(error: Exception) -> str:
    """The kind of an error and the first sentence of what it says."""
    sentence = str(error).strip().split("\n")[0].split(". ")[0]
    return f"{type(error).__name__}: {sentence}" if sentence else type(error).__name__


def _charge(passes: Passes, world: World, traced: Traced, phase: Phase, tensor: Tensor) -> None:
    account = world.account_of(tensor)
    if account is not None:
        traced.work.add(phase, account, passes.work[phase == "backward"])


def _with_numbers(call: Call, world: World) -> Call:
    """The call with numbers on the host: those that are known, else random ones, and zeros for integers."""

    def numbered(tensor: Tensor) -> Tensor:
        known = world.value_of(tensor)
        with compat.modes_disabled(), torch.no_grad():
            if known is not None:
                made = known.clone()
            elif tensor.is_floating_point() or tensor.is_complex():
                made = torch.randn(tuple(tensor.shape), dtype=tensor.dtype)
            else:
                made = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
        return made.requires_grad_(tensor.requires_grad)

    args, kwargs = Mover(Courier(numbered), "host").move((call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)
