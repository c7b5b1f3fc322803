"""One visit of a module to a device: its inputs are taken there, it runs, and its gradients are taken from it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autobalance.compat import storage_key
from autobalance.measuring.meters import Meter
from autobalance.placement.contents import Contents, is_atom, parts
from autobalance.placement.hooks import run_method
from autobalance.placement.locate import Place
from autobalance.placement.move import Mover
from autobalance.profiling.trial import HostLocator


@dataclass(frozen=True)
class Call:
    """One call of a module, as a step makes it.

    Attributes:
        name: of the method, mostly "forward".
        args, kwargs: on the host; real numbers.
        grad: whether the call is to be differentiated.
        autocast: to which type operations are cast; None: not at all.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool = True
    autocast: torch.dtype | None = None

    @classmethod
    def under_way(cls, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> Call:
        """The call that is under way on a device of this type, with the modes that are active around it."""
        cast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        return cls(name, args, kwargs, torch.is_grad_enabled(), cast)

    @contextmanager
    def modes(self, device_type: str) -> Iterator[None]:
        """The modes of the call, for a device of another type."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.autocast is not None:
                stack.enter_context(torch.autocast(device_type, dtype=self.autocast))
            yield


@dataclass(frozen=True)
class Shape:
    """A tensor that comes out of a module, without its numbers.

    Attributes:
        like: on meta, with sizes, strides, type and offset.
        differentiable: whether it is part of a graph.
        storage: number of its storage among those that come out.
        given: the input whose storage it shares; None: it is new.
        saved: whether the graph keeps it.
    """

    like: Tensor
    differentiable: bool
    storage: int
    given: int | None
    saved: bool = False


@dataclass(frozen=True)
class Returned:
    """What comes out of a module, without numbers.

    Attributes:
        template: the module's own containers, with tensors on meta.
        shapes: of those tensors, in order.
        storages: bytes of their storages.
    """

    template: Any = None
    shapes: tuple[Shape, ...] = ()
    storages: tuple[int, ...] = ()

    def keeping(self, saved: Sequence[bool]) -> Returned:
        """The same, with it said which tensors the graph keeps."""
        shapes = (replace(shape, saved=keep) for shape, keep in zip(self.shapes, saved, strict=True))
        return replace(self, shapes=tuple(shapes))

    def gradient_bytes(self, granule: int) -> int:
        """Bytes of the gradients of all that is differentiable.

        Args:
            granule: bytes to whose multiples the device's allocator rounds up.
        """
        sizes = (shape.like.numel() * shape.like.element_size() for shape in self.shapes if shape.differentiable)
        return sum(-(-size // granule) * granule for size in sizes)


class Storages:
    """Storages of tensors, which are not kept alive.

    Args:
        tensors: whose storages.
        granule: bytes to whose multiples the device's allocator rounds up.
    """

    def __init__(self, tensors: Sequence[Tensor], granule: int) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._keys = [storage_key(storage) for storage in storages]
        self._sizes = [-(-storage.nbytes() // granule) * granule for storage in storages]
        self._references = [weakref.ref(storage) for storage in storages]

    def alive(self) -> tuple[bool, ...]:
        """For each tensor, whether somebody still holds its storage."""
        return tuple(reference() is not None for reference in self._references)

    def nbytes(self, which: Sequence[bool] | None = None, without: Storages | None = None) -> int:
        """Bytes of the storages, each once: of those tensors that `which` says, and that are not in `without`."""
        chosen = [True] * len(self._keys) if which is None else which
        sizes = {key: size for key, size, wanted in zip(self._keys, self._sizes, chosen, strict=True) if wanted}
        others = set() if without is None else set(without._keys)
        return sum(size for key, size in sizes.items() if key not in others)


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
        self._call = _with_containers_of_its_own(call) if private else call
        self._kept = [] if private else [(held, Contents.of(held)) for held in _containers((call.args, call.kwargs))]
        self._device = meter.device
        self._entries: list[_Entry | None] = []
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
        made = tensor.detach().to(self._device, copy=True)
        entry = None
        if self._call.grad and tensor.requires_grad:
            entry = _Entry()
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
            self._loss = _Exit.apply(*differentiable)  # type: ignore[no-untyped-call]  # torch's own

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
            shapes.append(Shape(like, tensor.requires_grad, list(sizes).index(key), given.get(key)))
            return like

        template = Mover(Courier(without_numbers), "elsewhere").move(self._output)
        return Returned(template, tuple(shapes), tuple(sizes.values()))

    def outputs(self, returned: Returned) -> list[Tensor]:
        """The tensors that have come out, in the order of `returned.shapes`."""
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
        return _Entry().enter(made) if self._call.grad and differentiable else made

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


class _Entry:
    """Where a graph begins that has no leaf on the device, since a leaf would stay alive; takes the gradient."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None
        self.tensor: Tensor | None = None

    def enter(self, tensor: Tensor) -> Tensor:
        """`tensor` itself, from now on part of a graph."""
        self.tensor = tensor
        with torch.enable_grad():
            anchor = torch.empty(0, requires_grad=True)
            entered: Tensor = _Enter.apply(anchor, self)  # type: ignore[no-untyped-call]  # torch's own
        return entered


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, entry: _Entry) -> Any:
        ctx.entry = entry
        tensor, entry.tensor = entry.tensor, None
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (ctx.entry.gradient,) = gradients
        return None, None


class _Exit(torch.autograd.Function):
    """A loss of no bytes whose gradients are ones, made when backward asks for them."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.made_like = [(output.shape, output.dtype, output.device) for output in outputs]
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return tuple(torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.made_like)


class Courier(HostLocator):
    """Sends every tensor, wherever it is, by a function."""

    def __init__(self, send: Callable[[Tensor], Tensor]) -> None:
        self._send = send

    def place_of(self, tensor: Tensor) -> Any:
        """Never where it has to go."""
        return self

    def send(self, tensor: Tensor, place: Place) -> Tensor:
        """What the function makes of it."""
        return self._send(tensor)

    def send_object(self, value: Any, place: Place) -> Any:
        """The object with its tensors sent."""
        mover = Mover(self, place)
        for name, item in getattr(value, "__dict__", {}).items():
            object.__setattr__(value, name, mover.move(item))
        return value


def _containers(value: Any) -> list[Any]:
    """All that a module may put something into."""
    found, unread, seen = [], [value], set[int]()
    while unread:
        part = unread.pop()
        if id(part) in seen or is_atom(part) or isinstance(part, Tensor):
            continue
        seen.add(id(part))
        unread.extend(parts(part))
        if Contents.is_changeable(part):
            found.append(part)
    return found


def _with_containers_of_its_own(call: Call) -> Call:
    """The call with copies of the containers, so that a module may put things into them again and again."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in all_tensors((call.args, call.kwargs))}
    containers = _containers((call.args, call.kwargs))
    if not containers:
        return call
    try:
        args, kwargs = copy.deepcopy((call.args, call.kwargs), memo)
    except Exception:  # something that refuses to be copied, which no block then changes unseen
        return call
    return replace(call, args=args, kwargs=kwargs)


def all_tensors(value: Any) -> list[Tensor]:
    """The tensors in anything that a module may return, in a fixed order."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    Mover(Courier(collect), "nowhere").move(value)
    return found
