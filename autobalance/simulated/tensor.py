"""The tensor that says it lives on a simulated device, while its elements are an ordinary tensor on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autobalance import compat
from autobalance.simulated import backend, ledger
from autobalance.simulated.elements import numbers

HOST = -2
"""Account of a host tensor; no ledger is told of its storage."""

OWN_ATTRIBUTES = ("elements", "index", "account", "known_value", "twin", compat.PARAMETER_MARK)


class SimulatedTensor(torch.Tensor):
    """A tensor on `simulated:<index>` whose numbers are held by a CPU tensor.

    Example:
        >>> SimulatedTensor(torch.ones(2), 1).device
        device(type='simulated', index=1)

    Args:
        elements: CPU or fake tensor that holds the data; shared, not copied.
        index: of the device; None makes a host tensor, which is what copies to the CPU are while elements are fake.
        account: the ledger's account to which a storage born here is charged; None: the device's own.
        requires_grad: as for any tensor.

    Attributes:
        elements: the tensor that holds the data.
        index: of the device, or None on the host.
        account: to which its storage is charged.
    """

    elements: torch.Tensor
    index: int | None  # type: ignore[assignment] # torch.Tensor has an undocumented method of this name
    account: int
    known_value: Any

    @staticmethod
    def __new__(
        cls, elements: torch.Tensor, index: int | None, account: int | None = None, requires_grad: bool = False
    ) -> SimulatedTensor:
        tensor: SimulatedTensor
        if torch.is_inference_mode_enabled():
            # Never an inference tensor: a view of a normal tensor taken in inference mode is a normal one.
            with torch.inference_mode(False):
                tensor = compat.make_wrapper(cls, elements, backend.device(index), requires_grad)
        else:
            tensor = compat.make_wrapper(cls, elements, backend.device(index), requires_grad)
        tensor.elements = elements
        tensor.index = index
        tensor.known_value = None
        if index is None:
            tensor.account = HOST
        else:
            tensor.account = index if account is None else account
            ledger.note(elements.untyped_storage(), tensor.account)
        return tensor

    @property
    def known(self) -> torch.Tensor | None:
        """Its real value while elements are fake, where one is known: a CPU tensor or None."""
        value = self.known_value
        return None if value is None else value.tensor

    __torch_function__ = compat.without_torch_function()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch calls it as a class method, its stubs say otherwise
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.is_inference_mode_enabled():
            # Without autograd's layer an operation made of others, such as `to`, would arrive whole.
            with torch.inference_mode(False), torch.no_grad():
                return func(*args, **(kwargs or {}))
        return run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # as torch.Tensor's own
        text = repr(self.elements.detach()).rstrip()
        extra = f", device='{self.device}'"
        if self.grad_fn is not None:
            extra += f", grad_fn=<{type(self.grad_fn).__name__}>"
        elif self.requires_grad:
            extra += ", requires_grad=True"
        text = f"{text[:-1]}{extra})"
        return f"Parameter containing:\n{text}" if isinstance(self, nn.Parameter) else text

    def __format__(self, format_spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), format_spec)
        return object.__format__(self, format_spec)

    # Inside `torch.tensor([loss, other])` torch's dispatcher, asked for `item`, would not find this class.

    def __bool__(self) -> bool:
        return bool(numbers(self))

    def __int__(self) -> int:
        return int(numbers(self))

    def __index__(self) -> int:
        return numbers(self).__index__()

    def __float__(self) -> float:
        return float(numbers(self))

    def __complex__(self) -> complex:
        return complex(numbers(self))

    def tolist(self) -> Any:
        """The numbers; placeholders where they are not known."""
        return numbers(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """An array of the numbers; as on CUDA it is refused on a device, unless forced."""
        if not force and self.index is not None:
            self._refuse_numpy()
        return numbers(self).numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy().__array__(*args, **kwargs)

    def _refuse_numpy(self) -> NoReturn:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of the elements."""
        return self.elements.untyped_storage()

    def data_ptr(self) -> int:
        """Address of the elements."""
        return self.elements.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
            )
        with torch.no_grad():
            if compat.is_fake(self.elements):
                result = self.detach().clone()
            else:
                # torch's own deepcopy keeps storages shared among the copies that were shared among the originals.
                elements = copy.deepcopy(self.elements.detach(), memo)
                result = SimulatedTensor(elements, self.index, self.account)
        result = self._with_state_of_self(result, copy.deepcopy(self._user_attributes(), memo))
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = result
        return result

    def __copy__(self) -> Any:
        return self._with_state_of_self(self.detach(), self._user_attributes())

    def __reduce_ex__(self, protocol: Any) -> Any:
        if compat.is_fake(self.elements):
            raise RuntimeError("a simulated tensor whose elements are fake has no numbers that could be written")
        plain = self._with_state_of_self(self.elements.detach(), self._user_attributes())
        return plain.__reduce_ex__(protocol)

    def _user_attributes(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in OWN_ATTRIBUTES}

    def _with_state_of_self(self, tensor: torch.Tensor, attributes: dict[str, Any]) -> Any:
        """`tensor` as a parameter if self is one, with self's requires_grad."""
        if isinstance(self, nn.Parameter):
            tensor = nn.Parameter(tensor, self.requires_grad)
        else:
            tensor.requires_grad_(self.requires_grad)
        tensor.__dict__.update(attributes)
        return tensor


def _not_ready(func: Any, args: Any, kwargs: Any) -> NoReturn:
    raise AssertionError("autobalance.simulated.dispatch is not imported")


run: Callable[[Any, Any, Any], Any] = _not_ready
"""Carries out one operation; set by `dispatch`, which stands on this module."""


def involves_simulated(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `tensor.data = value` concerns a simulated tensor on either side.

    Args:
        tensor: that is assigned to.
        value: that is assigned.
    """
    return isinstance(tensor, SimulatedTensor) or isinstance(value, SimulatedTensor)


def follow_elements(tensor: SimulatedTensor) -> None:
    """Let a tensor report the sizes and strides that its elements have now, and count its storage again.

    Args:
        tensor: whose elements were reshaped.
    """
    elements = tensor.elements
    if tensor.index is not None:
        ledger.note(elements.untyped_storage(), tensor.account)
    if (
        tensor.shape != elements.shape
        or tensor.stride() != elements.stride()
        or tensor.storage_offset() != elements.storage_offset()
    ):
        device = backend.device(tensor.index)
        compat.reshape_wrapper(tensor, elements, compat.make_wrapper(SimulatedTensor, elements, device, False))


def assign_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Carry out `tensor.data = value` as on CUDA: the object, its gradient and its hooks stay, whatever the devices.

    Args:
        tensor: that is assigned to.
        value: that is assigned.

    Raises:
        RuntimeError: `tensor` is the result of an operation and would change its device, or has no shape yet.
    """
    fresh = value.detach()
    if isinstance(tensor, SimulatedTensor) and isinstance(fresh, SimulatedTensor):
        compat.assign_plain_data(tensor, fresh)
        for name in ("elements", "index", "account", "known_value"):
            setattr(tensor, name, getattr(fresh, name))
        return
    if tensor.grad_fn is not None:
        raise RuntimeError(f"cannot move a tensor with a gradient function from {tensor.device} to {value.device}")
    if is_lazy(tensor):
        raise RuntimeError(
            "a lazy module has no parameters that could be moved to a simulated device; call it once on the host first"
        )
    gradient, tensor.grad = tensor.grad, None
    fresh.requires_grad_(tensor.requires_grad)
    compat.replace_tensor(tensor, fresh)
    is_parameter = isinstance(tensor, nn.Parameter)
    old_class, old_state, new_state = type(tensor), tensor.__dict__.copy(), fresh.__dict__.copy()
    user_attributes = {name: item for name, item in old_state.items() if name not in OWN_ATTRIBUTES}
    tensor.__class__ = nn.Parameter if is_parameter and type(fresh) is torch.Tensor else type(fresh)
    _set_state(tensor, {**user_attributes, **new_state})
    if is_parameter:
        setattr(tensor, compat.PARAMETER_MARK, True)
    fresh.__class__ = old_class  # a graph that was built before may still show it to hooks
    _set_state(fresh, old_state)
    if gradient is not None:
        with torch.no_grad():
            assign_data(gradient, gradient.to(value.device))
        tensor.grad = gradient


def _set_state(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    tensor.__dict__.clear()
    tensor.__dict__.update(attributes)
