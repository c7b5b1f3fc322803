"""What is noted of every operation of a trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autobalance import compat
from autobalance.kernels import cpu
from autobalance.kernels.scratch import Taken, taken_inside
from autobalance.kernels.target import SIMULATED, Target
from autobalance.profiling.gradient_sums import GradientSums
from autobalance.profiling.operands import operands_in
from autobalance.profiling.traced import ROOT_ACCOUNT, Traced
from autobalance.profiling.world import World


class Observer:
    """Sees every operation: counts its work and what its kernel takes inside, and notes what is used where it is not.

    Args:
        traced: what is seen is written there.
        target: whose kernels they are.
    """

    world: World

    def __init__(self, traced: Traced, target: Target = SIMULATED) -> None:
        self._traced = traced
        self._target = target
        self._seen = 0
        self._benchmarked: set[Any] = set()
        self._gradients = GradientSums(traced.tracer, adds_in_place=target.kind != "simulated")

    def __call__(self, func: Any, args: Any, kwargs: Any, result: Any, account: int | None) -> None:
        traced = self._traced
        traced.work(func, args, kwargs, result, account)
        self._gradients.saw(func, args, kwargs, result)
        if traced.tracer.calls is not None:
            traced.tracer.calls.saw(func, operands_in((args, kwargs)))
        if func is torch.ops.aten._to_copy.default:
            self._note_cast(args[0], result)
        self._tell_maker(func, result)
        if not traced.work.optimizing:
            traced.waits.saw(func, args)
        if account is not None and self._target.kind != "simulated":
            self._charge_scratch(func, args, kwargs, result, account)
        self._note_foreign(args)

    def _tell_maker(self, func: Any, result: Any) -> None:
        tracer = self._traced.tracer
        if len(tracer.sizes) > self._seen:
            shape = "x".join(map(str, result.shape)) if isinstance(result, Tensor) else ""
            tracer.made(self._seen, f"{func.__name__.partition('.')[0]} {shape}".rstrip())
            self._seen = len(tracer.sizes)

    def _note_cast(self, weight: Tensor, result: Tensor) -> None:
        """Autocast keeps casts of leaves to a smaller type (ATen/autocast_mode.cpp, cached_cast)."""
        is_leaf = weight.requires_grad and weight.is_leaf and not compat.in_backward()
        if is_leaf and result.element_size() < weight.element_size() and compat.autocast_keeps_casts():
            self._traced.tracer.cast(weight.untyped_storage(), result.untyped_storage())

    def _charge_scratch(self, func: Any, args: Any, kwargs: Any, result: Any, account: int) -> None:
        tracer = self._traced.tracer
        if self._target.kind == "cpu":
            taken = Taken(cpu.taken_inside(func, args, result))
        else:
            taken = taken_inside(func, args, kwargs, result, self._target)
        for name, nbytes in taken.workspaces:
            tracer.workspace(name, nbytes, account)
        maker, kind = func.__name__.partition(".")[0], "allowance" if taken.is_allowance else "scratch"
        tracer.transient(taken.transient, account, maker, kind)
        for call in taken.calls:
            if torch.backends.cudnn.benchmark and call.problem not in self._benchmarked:
                self._benchmarked.add(call.problem)
                tracer.give_back()
            tracer.transient(call.workspace, account, maker, kind)

    def _note_foreign(self, args: Any) -> None:
        traced = self._traced
        locator, inside = traced.locator, self.world.current_account
        if locator is None or inside is None or inside == ROOT_ACCOUNT or compat.in_backward():
            return
        for tensor in operands_in(args):
            home = traced.homes.get(traced.tracer.find(tensor.untyped_storage()), inside)
            if home == inside:
                continue
            if home < traced.count:
                traced.foreign.add((inside, home))
            else:
                locator.exchanges.setdefault((home, inside))
