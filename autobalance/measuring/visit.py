"""One visit of a module to a device: its inputs are taken there, it runs, and its gradients are taken from it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autobalance.compat import storage_key
from autobalance.measuring.call import Call, with_containers_of_its_own
from autobalance.measuring.courier import Courier, all_tensors, containers
from autobalance.measuring.edges import Entry, Exit
from autobalance.measuring.meters import Meter
from autobalance.measuring.returned import Returned, Shape
from autobalance.placement.contents import Contents
from autobalance.placement.hooks import run_method
from autobalance.placement.move import Mover


class Visit:
    """A context in which a module that is on a device is given a call's inputs there.

    Args:
        module: on the device.
        call: what it is given.
        meter: of the device.
        private: whether what the module does to its containers is hidden from the caller.

    Attributes:
        inputs: the tensors on the device, in the order in which they stand in the call.
    """

    def __init__(self, module: nn.Module, call: Call, meter: Meter, private: bool = True) -> None:
        self._module = module
        self._call = with_containers_of_its_own(call) if private else call
        self._kept = [] if private else [(held, Contents.of(held)) for held in containers((call.args, call.kwargs))]
        self._device = meter.device
        self._entries: list[Entry | None] = []
        self._loss: Tensor | None = None
        self._output: Any = None
        self._differentiable: dict[int, bool] = {}
        self.inputs: list[Tensor] = []

    def __enter__(self) -> Visit:
        self._mover: Mover | None = Mover(Courier(self._take_in), self._device)
        self._args, self._kwargs = self._mover.move((self._call.args, self._call.kwargs))
        return self

    def __exit__(self, *error: Any) -> None:
        self.let_go()
        self._loss = None
        self._entries.clear()
        for parameter in self._module.parameters():
            parameter.grad = None

    def _take_in(self, tensor: Tensor) -> Tensor:
        stays = len(self.inputs) in self._call.on_host
        made = tensor.detach().to("cpu" if stays else self._device, copy=True)
        entry = None
        if self._call.grad and tensor.requires_grad:
            entry = Entry()
            made = entry.enter(made)
        self._entries.append(entry)
        self.inputs.append(made)
        return made

    @property
    def is_differentiable(self) -> bool:
        """Whether there is anything to run backward from."""
        return self._loss is not None

    @property
    def returns_gradient(self) -> tuple[bool, ...]:
        """For each input, whether backward has brought a gradient."""
        return tuple(entry is not None and entry.gradient is not None for entry in self._entries)

    def forward(self, saving: bool = True) -> None:
        """Run the module.

        Args:
            saving: whether for a backward.
        """
        call = replace(self._call, grad=self._call.grad and saving)
        with call.modes(self._device.type), _current(self._device):
            inner = vars(self._module).get(call.name)
            self._output = run_method(self._module, call.name, inner, self._args, self._kwargs)
        differentiable = [tensor for tensor in all_tensors(self._output) if tensor.requires_grad]
        if differentiable and saving:
            self._loss = Exit.apply(*differentiable)  # type: ignore[no-untyped-call]  # torch's own

    def returned(self) -> Returned:
        """What has come out, without numbers."""
        given = {storage_key(tensor.untyped_storage()): index for index, tensor in enumerate(self.inputs)}
        sizes: dict[int, int] = {}
        shapes = []

        def without_numbers(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            sizes.setdefault(key, storage.nbytes())
            like = torch.empty(0, dtype=tensor.dtype, device="meta")
            like = like.set_(
                torch.UntypedStorage(storage.nbytes(), device="meta"),
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
            )
            on_host = tensor.device.type == "cpu" != self._device.type
            shapes.append(Shape(like, tensor.requires_grad, list(sizes).index(key), given.get(key), on_host=on_host))
            return like

        template = Mover(Courier(without_numbers), "elsewhere").move(self._output)
        return Returned(template, tuple(shapes), tuple(sizes.values()))

    def outputs(self, returned: Returned) -> list[Tensor]:
        """The tensors that have come out, in the order of `returned.shapes`.

        Args:
            returned: what was found of the block before.
        """
        found = all_tensors(self._output)
        assert len(found) == len(returned.shapes)
        return found

    def taken_home(self, returned: Returned) -> Any:
        """What has come out, on the host, with what the module put into the caller's containers put there.

        Args:
            returned: what comes out of such a call, which tells what is part of a graph.
        """
        assert self._mover is not None
        found = zip(all_tensors(self._output), returned.shapes, strict=True)
        self._differentiable = {id(tensor): shape.differentiable for tensor, shape in found}
        home = Mover(Courier(self._take_home), "host")
        self._mover.carry_back(home.move)
        for container, before in self._kept:  # those that held no tensor are the caller's own
            Contents.of(container).carry(before, container, home.move)
        return home.move(self._mover.restore(self._output))

    def _take_home(self, tensor: Tensor) -> Tensor:
        made = tensor.detach().to("cpu", copy=True)
        # What is put into a container may well be part of a graph.
        differentiable = self._differentiable.get(id(tensor), tensor.is_floating_point())
        return Entry().enter(made) if self._call.grad and differentiable else made

    def let_go(self) -> None:
        """Drop inputs and outputs, which the graph may keep."""
        self._mover = self._output = self._args = self._kwargs = None
        self.inputs.clear()

    def backward(self) -> None:
        """Run backward from ones, where there is anything to differentiate."""
        loss, self._loss = self._loss, None
        if loss is not None:
            with _current(self._device):
                torch.autograd.backward(loss, torch.empty_like(loss))


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, on which kernels land that are launched past torch."""
    if device.type == "cpu":
        return nullcontext()
    context: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    return context
