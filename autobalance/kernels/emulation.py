"""The choice between kernels that torch would make on the target, made where the target is not.

Composite operations choose between kernels by the device of their tensors. Their own choice is replaced for the time
of a trace, in torch's dispatcher and behind its autocast: callers in Python and in C++ see it alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from autobalance import compat
from autobalance.kernels import activations, attention, norms, recurrent
from autobalance.kernels.target import Target
from autobalance.kernels.versions import is_assumed, release
from autobalance.simulated import dispatch, elements
from autobalance.simulated.tensor import SimulatedTensor

_aten = torch.ops.aten
_GROUP_NORM, _GROUP_NORM_BACKWARD = _aten.group_norm.default, _aten.native_group_norm_backward.default
Targets = Target | Mapping[int, Target]


@contextlib.contextmanager
def emulating(targets: Targets, backend: str) -> Iterator[None]:
    """Inside, composite operations on fake tensors choose the kernels that a GPU would choose.

    Example:
        >>> with emulating(find_target("A100-80GB"), "PrivateUse1"):  # doctest: +SKIP
        ...     scaled_dot_product_attention(query, key, value)

    Args:
        targets: whose kernels; by the index of the device for a box of different GPUs.
        backend: torch's name for the device type of the tensors: "PrivateUse1" or "CUDA".
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        # Fakes that say themselves that they are on CUDA get the rest from torch's own rules.
        elsewhere = backend == "PrivateUse1"
        for func, emulated in {**EMULATED, **(ELSEWHERE if elsewhere else {})}.items():
            library.impl(func, _choosing(func, emulated, targets), f"Autograd{backend}")
        for func in (*activations.KERNELS_OF_THEIR_OWN, *norms.KERNELS_OF_THEIR_OWN) if elsewhere else ():
            library.impl(func, _without_parts(func), backend)
        copying = {_GROUP_NORM_BACKWARD: _group_norm_backward(targets)} if elsewhere else {}
        with dispatch.standing_in(STANDING_IN if elsewhere else {}), dispatch.carrying_out(copying):
            yield
    finally:
        compat.drop_library(library)


@contextlib.contextmanager
def as_assumed(target: Target) -> Iterator[None]:
    """Inside, torch's operations on simulated devices do as in the release of torch that is assumed.

    Only an older release can be assumed: what a newer one leaves out of its operations cannot be taken out of these.

    Example:
        >>> with assuming((2, 13)), as_assumed(SIMULATED): ...

    Args:
        target: simulated devices; for a GPU `emulating` does the same.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        if is_assumed():
            library.impl(_GROUP_NORM, _choosing(_GROUP_NORM, _group_norm, target), "AutogradPrivateUse1")
        with dispatch.carrying_out({_GROUP_NORM_BACKWARD: _group_norm_backward(target)} if is_assumed() else {}):
            yield
    finally:
        compat.drop_library(library)


def target_of(targets: Targets, index: int | None) -> Target:
    """The target of one device.

    Args:
        targets: one for all, or by index.
        index: of the device; None: the first.
    """
    return targets if isinstance(targets, Target) else targets[index or 0]


def _choosing(func: Any, emulated: Callable[..., Any], targets: Targets) -> Callable[..., Any]:
    def kernel(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _has_fake_elements(first):
            return func.decompose(first, *args, **kwargs)
        return emulated(target_of(targets, first.device.index), first, *args, **kwargs)

    return kernel


def _without_parts(func: Any) -> Callable[..., Any]:
    """A kernel for an operator, so that torch does not take it apart into those that it is made of elsewhere."""
    return lambda *args, **kwargs: dispatch.run(func, args, kwargs)


def _has_fake_elements(tensor: Tensor) -> bool:
    """Real tensors keep their kernels: there is no GPU that could run others."""
    return compat.is_fake(tensor) or (isinstance(tensor, SimulatedTensor) and elements.fake_mode is not None)


def _attention(
    target: Target,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    call = attention.Attention(
        query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, target=target, release=release()
    )
    return attention.attend(call, scale)


def _rms_norm(
    target: Target, value: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if norms.is_rms_norm_fused(target, release(), value, weight):
        result: Tensor = _aten._fused_rms_norm(value, normalized_shape, weight, eps)[0]
        return result
    plain: Tensor = _aten.rms_norm.default.decompose(value, normalized_shape, weight, eps)
    return plain


def _group_norm(target: Target, value: Tensor, *rest: Any, **options: Any) -> Tensor:
    return norms.group_norm(target, release(), value, *rest, **options)


def _group_norm_backward(targets: Targets) -> Callable[[Any, Any, Any], Any]:
    """The copies that the formula of the gradient makes before the kernel (tools/autograd/derivatives.yaml)."""
    carry_out = dispatch.carrier_of(_GROUP_NORM_BACKWARD)

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        gradient, value, *rest = args
        if norms.copies_group_norm(target_of(targets, value.device.index), release()):
            gradient, value = _made_contiguous(gradient), _made_contiguous(value)
        return carry_out(func, (gradient, value, *rest), kwargs)

    return run


def _made_contiguous(tensor: Tensor) -> Tensor:
    """As `contiguous()`, which arrives whole below autograd, where it is not one kernel."""
    return tensor if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)


EMULATED: dict[Any, Callable[..., Any]] = {
    _aten.scaled_dot_product_attention.default: _attention,
    _aten.rms_norm.default: _rms_norm,
    _GROUP_NORM: _group_norm,
}
"""Composite operations, and what takes their place: called with the target and the operation's arguments."""

ELSEWHERE = recurrent.EMULATED
"""The same for operations that torch takes to the right kernel by itself where tensors say that they are on CUDA."""


def _on_fakes(func: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel for fakes, the operator's own for real numbers."""

    def run(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (kernel if compat.is_fake(first) else func)(first, *args, **kwargs)

    return run


STANDING_IN = {
    func: _on_fakes(func, kernel) for func, kernel in (*norms.STANDING_IN.items(), *recurrent.STANDING_IN.items())
}
"""Operators, and kernels on the elements of simulated tensors that leave what a GPU's leave."""
