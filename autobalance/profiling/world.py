"""The world of a trial: what its tensors are made of, on which devices, and to whom their bytes are charged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from autobalance.kernels.target import Target
from autobalance.profiling.tracer import Tracer

Kind = Literal["fake", "real"]
Observe = Callable[[Any, Any, Any, Any, int | None], None]


class World(Protocol):
    """A context in which the operations of a trial run.

    Attributes:
        devices: of the trial, by index; in a world where all are one, that one.
    """

    devices: Sequence[torch.device]

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...

    def on_device(self, tensor: Tensor, index: int, account: int) -> Tensor:
        """The trial's own tensor for one of the model's, on a device, charged to an account.

        Args:
            tensor: one of the model's.
            index: of the device.
            account: who pays.
        """

    def on_host(self, tensor: Tensor) -> Tensor:
        """The trial's own tensor for one that stays on the host.

        Args:
            tensor: a plain attribute of a module.
        """

    def account_of(self, tensor: Tensor) -> int | None:
        """To whom the bytes of `tensor` are charged; None if it is on no device of the trial.

        Args:
            tensor: of this world.
        """

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """The numbers of one of the trial's tensors, on the CPU; None where they are not known.

        Args:
            tensor: of this world.
        """

    def copied(self, tensor: Tensor, account: int) -> Tensor:
        """A copy of one of the trial's tensors, without autograd, charged to another account.

        Args:
            tensor: of this world.
            account: who pays.
        """

    def charging(self, account: int | None) -> AbstractContextManager[None]:
        """Charge what is made from nothing to an account.

        Args:
            account: who pays; None: nobody.
        """

    @property
    def current_account(self) -> int | None:
        """To whom it is charged what is made from nothing; None: to its device."""


def make_world(
    kind: Kind, target: Target, devices: int, tracer: Tracer, note: Callable[[str], None], observe: Observe
) -> World:
    """The world in which a trial for a target can run.

    Simulated devices take torch's one free device type, which a process that uses CUDA must not: there fake tensors
    say themselves that they are on `cuda:N`.

    Args:
        kind: "fake" elements need no memory; "real" ones are a copy of the model on the CPU.
        target: whose kernels are chosen.
        devices: how many.
        tracer: is told of every storage.
        note: told of each number that only real elements know.
        observe: called after each operation.
    """
    on_cuda = target.is_emulated and torch.cuda.is_available()
    if target.kind != "cpu" and not on_cuda:
        from autobalance.profiling.simulated_world import SimulatedWorld

        return SimulatedWorld(kind, target, devices, tracer, note, observe)
    from autobalance.profiling.watched_world import WatchedWorld

    there = [torch.device("cpu")]
    if on_cuda and kind == "fake":
        there = [torch.device("cuda", index) for index in range(devices)]
    return WatchedWorld(kind, target, there, tracer, note, observe)


def whose_kernels(target: Target) -> str:
    """Whose kernels run on real elements of a trial for a target, in words; "" where they are the target's own.

    Args:
        target: whose kernels are wanted.
    """
    if not target.is_emulated:
        return ""
    return "the CPU" if torch.cuda.is_available() else "simulated devices"


def on_host(tensor: Tensor) -> Tensor:
    """A copy of a tensor that stays on the host; of a large one only its shape is kept, as a tensor on meta.

    Args:
        tensor: on the host.
    """
    detached = tensor.detach()
    if detached.device.type == "meta":
        return torch.zeros_like(detached, device="cpu")
    return detached.cpu().clone()
