"""`torch.autocast("simulated")`: CUDA's lists and CUDA's cache of cast weights.

Lists and rules are those of torch's own header (ATen/autocast_mode.h, autocast_mode.cpp), torch 2.13.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from autobalance import compat
from autobalance.simulated import backend


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Names are operators, with the overload behind a dot where it is not the default one.
LOWER_PRECISION = _names("""
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm
    bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell
    rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
""")
"""Operators whose floating operands are cast to autocast's type."""

FLOAT32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
""")
"""Operators whose floating operands are cast to float32."""

FLOAT32_RESULT = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
"""Operators that are told to compute in float32 by their `dtype` argument."""

FLOAT32_APPENDED = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Operators for which another overload, with a `dtype` argument, is called."""

PROMOTE = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
"""Operators whose floating operands are cast to the widest type among them."""

_libraries: list[torch.library.Library] = []


def register() -> None:
    """Register autocast's kernels with torch; once a process."""
    _, key = backend.dispatch_keys()
    library = torch.library.Library("aten", "IMPL")
    for names, wrap in (
        (LOWER_PRECISION, _in_lower_precision),
        (FLOAT32, _in_float32),
        (FLOAT32_RESULT, _with_float32_result),
        (FLOAT32_APPENDED, _with_float32_appended),
        (PROMOTE, _promoted),
    ):
        for name in names:
            if is_operator(name):  # the lists are those of the newest torch; an older one may lack a few
                library.impl(name, wrap(name), key)
    library.impl("binary_cross_entropy", _refuse_binary_cross_entropy, key)
    everything_else = torch.library.Library("_", "IMPL")
    everything_else.fallback(torch.library.fallthrough_kernel, key)
    _libraries.extend((library, everything_else))  # a library unregisters its kernels when it dies
    compat.on_autocast_exit(_casts.clear)


def is_operator(name: str) -> bool:
    """Whether this torch has the operator overload that a name of the lists stands for.

    Args:
        name: such as "norm.ScalarOpt_dim".
    """
    packet, _, overload = name.partition(".")
    return (overload or "default") in getattr(getattr(torch.ops.aten, packet, None), "overloads", list)()


def operator(name: str) -> Any:
    """The operator overload that a name of the lists stands for.

    Args:
        name: one of which `is_operator`.
    """
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


class _CastCache:
    """Casts of float32 leaves, made once and kept until the outermost autocast exits."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self._lock = threading.RLock()

    def clear(self) -> None:
        with self._lock:
            self._casts.clear()

    def cast(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with self._lock:
            found = self._casts.get(id(value))
            if found is not None and found[0]() is value:
                return found[1]
            cast = value.to(dtype)
            self._casts[id(value)] = weakref.ref(value), cast
            return cast


_casts = _CastCache()


def _is_eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == backend.NAME
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` in `dtype` if it is a floating tensor on a simulated device; lists element by element."""
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    if not _is_eligible(value) or value.dtype is dtype:
        return value
    is_weight = value.dtype is torch.float32 and value.requires_grad and value.is_leaf and not compat.is_view(value)
    if is_weight and dtype is torch.get_autocast_dtype(backend.NAME) and torch.is_autocast_cache_enabled():
        return _casts.cast(value, dtype)
    return value.to(dtype)


def _call_with(func: Any, dtype: torch.dtype, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    args = [_cast(value, dtype) for value in args]
    return func(*args, **{name: _cast(value, dtype) for name, value in kwargs.items()})


def _in_lower_precision(name: str) -> Callable[..., Any]:
    func = operator(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with compat.excluded_autocast():
            return _call_with(func, torch.get_autocast_dtype(backend.NAME), args, kwargs)

    return kernel


def _in_float32(name: str) -> Callable[..., Any]:
    func = operator(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with compat.excluded_autocast():
            return _call_with(func, torch.float32, args, kwargs)

    return kernel


def _with_float32_result(name: str) -> Callable[..., Any]:
    func = operator(name)
    position = [argument.name for argument in compat.schema_of(func).arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with compat.excluded_autocast():
            given = args[position] if len(args) > position else kwargs.get("dtype")
            if given is None and _is_eligible(args[0]):
                return func(*args[:position], **{**kwargs, "dtype": torch.float32})
            return func(*args, **kwargs)

    return kernel


def _with_float32_appended(name: str) -> Callable[..., Any]:
    func = operator(name)
    target = operator(FLOAT32_APPENDED[name])
    names = [argument.name for argument in compat.schema_of(func).arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with compat.excluded_autocast():
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            if name == "norm.ScalarOpt_dim":
                given.setdefault("keepdim", False)
            given.setdefault("p", 2)
            dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
            return target(given.pop("self"), **given, dtype=dtype)

    return kernel


def _promoted(name: str) -> Callable[..., Any]:
    func = operator(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with compat.excluded_autocast():
            types = {value.dtype for value in _flat((*args, *kwargs.values())) if _is_eligible(value)}
            widest = torch.float32 if torch.float32 in types else torch.get_autocast_dtype(backend.NAME)
            return _call_with(func, widest, args, kwargs)

    return kernel


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _refuse_binary_cross_entropy(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
        "safe to autocast."
    )
