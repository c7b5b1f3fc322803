"""A LightningModule on its devices: placed by a plan, hooked, and brought back."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autobalance.blocks import find_blocks
from autobalance.execution.batches.splitting import Parts
from autobalance.execution.pipeline import Pipeline
from autobalance.execution.running import running_of
from autobalance.execution.savings.host_optimizer import host_parameters, on_host
from autobalance.execution.savings.savings import homes_of, install_savings, pin_streamed
from autobalance.execution.seeds import SeededVisits
from autobalance.partitioning.plan import Plan
from autobalance.placement.contents import elements_in
from autobalance.placement.hooks import Remove, replace_method, run_method
from autobalance.placement.install import Installed, install
from autobalance.placement.locate import DeviceLocator
from autobalance.placement.materialize import materialize
from autobalance.placement.pairs import check_pairs
from autobalance.placement.place import place


@dataclass
class Placed:
    """A model under a plan; `place` moves it, `remove` takes the hooks off.

    Attributes:
        module: the model, held weakly.
        plan: where everything is.
        training: whether the plan covers training.
        elements: elements of the largest batch that the plan covers; None if that is not known.
        pipeline: runs micro-batches; None while nothing is placed, and where batches stay whole.
    """

    module: weakref.ref[nn.Module]
    plan: Plan
    training: bool
    elements: int | None
    pipeline: Pipeline | None = None
    _installed: Installed | None = None
    _undo: Remove | None = None
    _savings: list[Remove] = field(default_factory=list)
    _buffers: list[tuple[nn.Module, str, torch.device]] = field(default_factory=list)
    _has_warned: bool = False
    _has_warned_of_parts: bool = False
    _trainable: frozenset[str] | None = None
    _warned_of: frozenset[str] = frozenset()

    def covers(self, module: nn.Module, training: bool, elements: int) -> bool:
        """Whether a run of `module` needs no other plan.

        Args:
            module: the model of the run.
            training: whether it is to be trained.
            elements: of its largest batch.
        """
        if self.module() is not module or (training and (not self.training or self._newly_trainable())):
            return False
        return self.elements is None or elements <= self.elements

    def place(self, devices: Sequence[torch.device]) -> None:
        """Move the model to its devices, block by block, and hook it.

        Args:
            devices: the torch device of each device of the plan.

        Raises:
            ValueError: if the plan is for other blocks than the model has.
        """
        module, plan = self.module(), self.plan
        assert module is not None
        self._trainable = _trainable_names(module)
        self.remove()
        blocks = find_blocks(module).ordered(plan.block_names)
        places = [devices[index] for index in plan.assignment]
        loose = {name: devices[index] for name, index in plan.loose_map.items()}
        check_pairs((*places, devices[plan.root]))
        running = running_of(plan)
        homes = homes_of(running, places)
        materialize(module, blocks, homes, loose, devices[plan.root])
        place(module, blocks, homes, loose, devices[plan.root])
        pin_streamed(blocks, running, places)
        methods = getattr(module, "forward_methods", None)
        declared = methods() if callable(methods) else None
        exit = len(blocks) - 1, devices[plan.root]
        locator = DeviceLocator(devices)
        self._savings = install_savings(module, blocks, running, places, places, locator, declared)
        self.pipeline = running.pipeline([SeededVisits(blocks.names, places, devices[plan.root])])
        self._installed = install(module, blocks, places, locator, declared, exit, self.pipeline)
        if module not in (part for modules in blocks.modules for part in modules):
            self._undo = replace_method(module, "forward", partial(_with_glue, self._installed))
        self._buffers = [
            (part, name, buffer.device)
            for part in module.modules()
            for name, buffer in part.named_buffers(recurse=False)
        ]

    def keep_state_on_host(self, optimizers: Iterable[Optimizer], devices: Sequence[torch.device]) -> None:
        """Let optimizers have the state of parameters on the host of which the plan says so.

        Args:
            optimizers: of the placed model.
            devices: the torch device of each device of the plan.

        Raises:
            ValueError: if one of them cannot.
        """
        module = self.module()
        assert module is not None
        away = host_parameters(module, [devices[index] for index in self.plan.host_optimizer])
        self._savings += [on_host(optimizer, away) for optimizer in optimizers]

    def glue(self) -> AbstractContextManager[None]:
        """A context in which operations outside blocks run where their operands are, if the model is placed."""
        return nullcontext() if self._installed is None else self._installed.glue()

    def remove(self) -> None:
        """Take the hooks off; may be called again."""
        if self._undo is not None:
            self._undo()
        if self._installed is not None:
            self._installed.remove()
        if self.pipeline is not None:
            self.pipeline.close()
        while self._savings:
            self._savings.pop()()
        self._installed, self._undo, self._buffers, self.pipeline = None, None, [], None

    def send_buffers_home(self) -> None:
        """Move buffers that were made anew elsewhere back to their module's device."""
        for module, name, device in self._buffers:
            buffer = getattr(module, name, None)
            if isinstance(buffer, torch.Tensor) and buffer.device != device:
                setattr(module, name, buffer.to(device))

    def check_batch(self, batch: object) -> None:
        """Warn, once, about a batch that is larger than those the plan was made for.

        Args:
            batch: of the next step.
        """
        if self._has_warned or self.elements is None or (elements := elements_in(batch)) <= self.elements:
            return
        self._has_warned = True
        warnings.warn(
            f"This batch has {elements:,} elements, but the plan was made for batches of up to {self.elements:,} "
            f"({self.plan.batch}): a step may need more memory than planned. Plan for the largest batch: "
            f"SelfBalanceStrategy(worst_batch=batch), or worst_batch='scan:200' to look for it.",
            stacklevel=2,
        )

    def check_parts(self, parts: Parts) -> None:
        """Warn, once, about a part of a batch that is larger than those the plan was made for.

        Args:
            parts: of one batch; where the plan knows parts of any size, there is nothing to warn about.
        """
        planned = 0 if self.plan.profile is None else self.plan.profile.part_elements
        if self._has_warned_of_parts or not planned or (there := max(map(elements_in, parts.batches))) <= planned:
            return
        self._has_warned_of_parts = True
        warnings.warn(
            f"A part of this batch has {there:,} elements, but the plan was made for parts of up to {planned:,}: a "
            f"step may need more memory than planned. Let `split_batch` make parts of more even sizes, or plan for "
            f"the batch with the largest part: SelfBalanceStrategy(worst_batch=batch).",
            stacklevel=2,
        )

    def check_trainable(self) -> None:
        """Warn about parameters that have become trainable since the plan was made."""
        names = [name for name in self._newly_trainable() if name not in self._warned_of]
        if not names:
            return
        self._warned_of |= set(names)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        warnings.warn(
            f"{len(names)} parameter(s) have become trainable since the plan was made ({shown}): their gradients and "
            f"optimizer state are not in it, so a step may need more memory than planned. Fit again after unfreezing "
            f"to plan anew, or leave room with `reserve=`.",
            stacklevel=2,
        )

    def _newly_trainable(self) -> list[str]:
        module = self.module()
        if module is None or self._trainable is None:
            return []
        return sorted(_trainable_names(module) - self._trainable)


def _trainable_names(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, parameter in module.named_parameters() if parameter.requires_grad)


def _with_glue(
    installed: Installed, module: nn.Module, name: str, inner: Callable[..., Any] | None, *args: Any, **kwargs: Any
) -> Any:
    """The user's own `forward`, which hooks call outside of steps, too: to draw samples, or to summarise the model."""
    with installed.glue():
        return run_method(module, name, inner, args, kwargs)
