"""Private names of torch's tensors, storages and modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _mode_utils, _python_dispatch

PARAMETER_MARK = "_is_param"
"""Attribute by which a tensor of another class than `Parameter` says that it is one."""


def without_torch_function() -> Any:
    """A `__torch_function__` for tensor subclasses that leaves everything to `__torch_dispatch__`."""
    return torch._C._disabled_torch_function_impl


def make_wrapper(cls: type, like: torch.Tensor, device: torch.device, requires_grad: bool) -> Any:
    """A tensor of class `cls` with the sizes, strides and type of `like`, on `device`, without data of its own.

    Args:
        cls: a subclass of Tensor.
        like: whose sizes, strides and type it has.
        device: that it reports.
        requires_grad: whether it does.
    """
    return torch.Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
        requires_grad=requires_grad,
    )


def reshape_wrapper(wrapper: torch.Tensor, like: torch.Tensor, fresh: torch.Tensor) -> None:
    """Change the sizes and strides that `wrapper` reports, below autograd and below its own dispatch.

    Args:
        wrapper: tensor made by `make_wrapper`.
        like: has the wanted sizes, strides and offset.
        fresh: another wrapper made for `like`; its (empty) storage is large enough, the present one may not be.
    """
    with _mode_utils.no_dispatch():
        torch._functionalize_unsafe_set(wrapper, fresh)
        before = torch._C._meta_in_tls_dispatch_include()
        torch._C._set_meta_in_tls_dispatch_include(True)
        try:
            torch.ops.aten.as_strided_.default(wrapper, like.shape, like.stride(), like.storage_offset())
        finally:
            torch._C._set_meta_in_tls_dispatch_include(before)


def storage_key(storage: torch.UntypedStorage) -> int:
    """Identity of a storage, unique among the living.

    Args:
        storage: of any device.
    """
    return int(storage._cdata)


def is_last_reference(tensor: torch.Tensor) -> bool:
    """Whether autograd alone holds a tensor that it has just given to an operation, and nothing else its storage.

    Args:
        tensor: an operand, as `__torch_dispatch__` gets it.
    """
    private: Any = tensor
    users_of_storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    # Beside autograd, the operation and this function hold the tensor, and this function its storage.
    return bool(private._use_count() == 4 and users_of_storage == 2)


def replace_tensor(tensor: torch.Tensor, fresh: torch.Tensor) -> None:
    """Let the Python object `tensor` stand for what `fresh` stands for, keeping its identity and hooks.

    Like `torch.utils.swap_tensors`, but weak references to `tensor` stay with it instead of being an error.

    Args:
        tensor: the object that others hold.
        fresh: of no use afterwards.
    """
    private: Any = tensor
    hooks, post_hooks = private._backward_hooks, private._post_accumulate_grad_hooks
    if private._use_count() > 1:  # a graph that still accumulates into what `tensor` stood for
        torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_refuse_backward)
    torch._C._swap_tensor_impl(tensor, fresh)
    if hooks is not None:
        private._backward_hooks = hooks
    if post_hooks is not None:
        private._post_accumulate_grad_hooks = post_hooks


def _refuse_backward(gradients: Any) -> None:
    raise RuntimeError(
        "backward reached a parameter that was moved to another device after the forward; move the module before "
        "the forward or after the backward"
    )


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """The hooks that a tensor has by `register_hook`, in the order of their calls.

    Args:
        tensor: any.
    """
    hooks: Any = tensor._backward_hooks
    return list(hooks.values()) if hooks else []


def accumulation_hooks(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """The hooks that a tensor has by `register_post_accumulate_grad_hook`, in the order of their calls.

    Args:
        tensor: a leaf.
    """
    private: Any = tensor
    return list((private._post_accumulate_grad_hooks or {}).values())


@contextmanager
def gradient_hooks_off(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let no backward inside call the hooks that tensors have by `register_hook`; handles stay good.

    Args:
        tensors: any.
    """
    hooks: list[tuple[Any, Any]] = [(tensor, tensor._backward_hooks) for tensor in tensors if tensor._backward_hooks]
    for tensor, _ in hooks:
        tensor._backward_hooks = None
    try:
        yield
    finally:
        for tensor, its_own in hooks:
            tensor._backward_hooks = its_own


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd tracks a tensor as a view of another.

    Args:
        tensor: any.
    """
    return bool(tensor._is_view())


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that autograd tracks a tensor as a view of; None if it is none.

    Args:
        tensor: any.
    """
    return tensor._base


def set_data_hook(handles: Callable[[torch.Tensor, torch.Tensor], bool], replace: Callable[..., None]) -> None:
    """Let `replace(tensor, value)` carry out `tensor.data = value` wherever `handles(tensor, value)`.

    `Module.to` and its like then keep parameters as they do on CUDA, since they assign to `.data` too.

    Args:
        handles: whether an assignment is the caller's business.
        replace: carries it out.
    """
    untyped: Any = torch
    plain = untyped._C.TensorBase.data
    compatible = untyped._has_compatible_shallow_copy_type

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(value, torch.Tensor) and handles(tensor, value):
            replace(tensor, value)
        else:
            plain.__set__(tensor, value)

    @wraps(compatible)  # torch's compiler looks at the signature
    def is_compatible(tensor: torch.Tensor, value: torch.Tensor) -> bool:
        return handles(tensor, value) or bool(compatible(tensor, value))

    untyped.Tensor.data = property(plain.__get__, assign)
    untyped._has_compatible_shallow_copy_type = is_compatible


def assign_plain_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """torch's own `tensor.data = value`, past `set_data_hook`.

    Args:
        tensor: that is changed.
        value: on the same kind of device.
    """
    base: Any = torch._C.TensorBase
    base.data.__set__(tensor, value)


class _FakeMode(FakeTensorMode):
    """Keeps no storage alive: torch remembers operations with their arguments, those that are storages, too."""

    def _cache_key(self, state: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if any(isinstance(value, torch.UntypedStorage) for value in args):
            raise fake_tensor._BypassDispatchCache("storage argument")
        return super()._cache_key(state, func, args, kwargs)


def make_fake_mode(**options: Any) -> FakeTensorMode:
    """A mode whose fakes refuse to give a pointer to numbers: a kernel that got 0 would crash the process.

    Args:
        options: as `FakeTensorMode` has them.
    """
    mode = _FakeMode(**options)
    mode._allow_unsafe_data_ptr_access = False
    return mode


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has sizes only, no numbers.

    Args:
        tensor: any.
    """
    return isinstance(tensor, FakeTensor)


def moves_more_than_tensors(module: nn.Module) -> bool:
    """Whether a module has its own idea of being moved, as metrics do, whose state is in plain attributes.

    Args:
        module: of any class.
    """
    return type(module)._apply is not nn.Module._apply


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; one made in inference mode does not count.

    Args:
        tensor: not made in inference mode.
    """
    return tensor._version


def gradient_setter() -> Any:
    """What a torch function mode is told that `tensor.grad = value` calls."""
    return vars(torch._C.TensorBase)["grad"].__set__


def constant_of(fake: torch.Tensor) -> torch.Tensor | None:
    """The real value that torch itself keeps beside a fake made from a number, None for any other.

    Args:
        fake: a fake tensor.
    """
    constant: torch.Tensor | None = getattr(fake, "constant", None)
    return constant


def parts_of(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a tensor subclass without storage of its own is made of, by attribute; empty for any other.

    Quantised weights are of that kind: their numbers and scales are tensors inside.

    Args:
        tensor: any.
    """
    subclass: Any = tensor
    if not _python_dispatch.is_traceable_wrapper_subclass(subclass):
        return {}
    names, _ = subclass.__tensor_flatten__()
    return {name: getattr(subclass, name) for name in names}


def rebuilt(tensor: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """A tensor subclass like `tensor` that is made of other parts.

    Args:
        tensor: one that has parts.
        parts: by attribute, as `parts_of` gives them.
    """
    subclass: Any = tensor
    _, context = subclass.__tensor_flatten__()
    made: torch.Tensor = type(subclass).__tensor_unflatten__(parts, context, subclass.size(), subclass.stride())
    return made
