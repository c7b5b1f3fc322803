"""Autocast on simulated devices is CUDA's: its lists, its rules, its cache of cast weights."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autobalance.simulated import autocast, observing

HALVES = (torch.float16, torch.bfloat16)
HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def listed(macro: str) -> set[str]:
    """Operators that torch's own header lists under a macro, as `name` or `name.overload`."""
    text = HEADER.read_text()
    body = re.search(rf"#define {macro}\(_\)\s*\\\n((?:.*\\\n)*.*\n)", text)
    assert body is not None, macro
    return {re.sub(r",\s*", ".", entry) for entry in re.findall(r"_\(([\w, ]+)\)", body[1])}


@pytest.mark.skipif(not HEADER.exists(), reason="this build of torch comes without headers")
@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", autocast.LOWER_PRECISION),
        ("AT_FORALL_FP32", autocast.FLOAT32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", autocast.FLOAT32_RESULT),
        ("AT_FORALL_PROMOTE", autocast.PROMOTE),
    ],
)
def test_lists_are_torchs(macro: str, ours: list[str]) -> None:
    assert set(ours) == listed(macro)


@pytest.mark.parametrize(
    ("name", "there"), [("conv2d", True), ("sum.dim_IntList", True), ("sum.no", False), ("no", False)]
)
def test_operators_are_looked_up(name: str, there: bool) -> None:
    assert autocast.is_operator(name) == there


def test_type_is_float16_by_default_as_on_cuda() -> None:
    with torch.autocast("simulated"):
        assert (weight(2, 2) @ weight(2, 2)).dtype is torch.float16


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(shape).to("simulated:1", dtype)


LOWER: dict[str, Callable[[], Tensor]] = {
    "linear": lambda: F.linear(weight(2, 3), weight(4, 3), weight(4)),
    "matmul": lambda: weight(2, 3) @ weight(3, 2),
    "einsum": lambda: torch.einsum("ij,jk->ik", weight(2, 3), weight(3, 2)),
    "conv2d": lambda: F.conv2d(weight(1, 2, 4, 4), weight(3, 2, 2, 2), weight(3)),
    "conv_transpose1d": lambda: F.conv_transpose1d(weight(1, 2, 4), weight(2, 3, 2)),
    "attention": lambda: F.scaled_dot_product_attention(weight(1, 1, 4, 8), weight(1, 1, 4, 8), weight(1, 1, 4, 8)),
    "prelu": lambda: F.prelu(weight(2, 3), weight(3)),
    "multi_dot": lambda: torch.linalg.multi_dot([weight(2, 3), weight(3, 2)]),
    "lstm": lambda: nn.LSTM(3, 4).to("simulated:1")(weight(2, 1, 3))[0],
    "gru": lambda: nn.GRU(3, 4).to("simulated:1")(weight(2, 1, 3))[0],
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", LOWER)
def test_operators_in_lower_precision(name: str, dtype: torch.dtype) -> None:
    with torch.autocast("simulated", dtype):
        assert LOWER[name]().dtype is dtype


RAISED: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, dim=1),
    "sum": lambda x: x.sum(),
    "sum over a dimension": lambda x: x.sum(1, keepdim=True),
    "cumsum": lambda x: x.cumsum(0),
    "prod": lambda x: x.prod(),
    "norm": lambda x: torch.norm(x),
    "norm over a dimension": lambda x: torch.norm(x, 2.0, dim=(1,)),
    "vector norm": lambda x: torch.linalg.vector_norm(x),
    "exp": torch.exp,
    "pow": lambda x: x**2,
    "pow of a number": lambda x: 2.0**x,
    "mse_loss": lambda x: F.mse_loss(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.long, device=x.device)),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
}


@pytest.mark.parametrize("name", RAISED)
def test_operators_in_float32(name: str) -> None:
    x = weight(4, 4, dtype=torch.bfloat16)
    with torch.autocast("simulated", torch.bfloat16):
        assert RAISED[name](x).dtype is torch.float32


def test_a_type_that_is_asked_for_wins() -> None:
    x = weight(4, 4, dtype=torch.bfloat16)
    with torch.autocast("simulated", torch.bfloat16):
        assert x.sum(dtype=torch.float64).dtype is torch.float64
        assert x.softmax(-1, torch.bfloat16).dtype is torch.bfloat16
        assert weight(2, 2, dtype=torch.float64).sum().dtype is torch.float64
        assert (weight(2, 2, dtype=torch.float64) @ weight(2, 2, dtype=torch.float64)).dtype is torch.float64
        assert torch.arange(3, device="simulated:1").sum().dtype is torch.int64


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.addcmul(x, x, y),
        lambda x, y: torch.atan2(x, y),
        lambda x, y: torch.dot(x[0], y[0]),
        lambda x, y: torch.tensordot(x, y),
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x.index_put((torch.tensor([0], device=x.device),), y[0]),
    ],
)
def test_operators_that_promote(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    wide, narrow = weight(3, 3), weight(3, 3, dtype=torch.float16)
    with torch.autocast("simulated", torch.float16):
        assert function(wide, narrow).dtype is torch.float32
        assert function(narrow, wide).dtype is torch.float32
        assert function(narrow, narrow).dtype is torch.float16


def test_other_operators_keep_their_type() -> None:
    with torch.autocast("simulated", torch.float16):
        assert F.relu(weight(2)).dtype is torch.float32
        assert F.gelu(weight(2, dtype=torch.float16)).dtype is torch.float16
        assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype is torch.float32  # on the host


def test_binary_cross_entropy_is_refused() -> None:
    with torch.autocast("simulated", torch.float16), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(weight(2), weight(2))


def test_nesting_and_switching_off() -> None:
    x = weight(2, 2)
    with torch.autocast("simulated", torch.float16):
        with torch.autocast("simulated", enabled=False):
            assert (x @ x).dtype is torch.float32
        with torch.autocast("simulated", torch.bfloat16):
            assert (x @ x).dtype is torch.bfloat16
        assert (x @ x).dtype is torch.float16
    assert (x @ x).dtype is torch.float32


def test_gradients_of_cast_weights_equal_the_cpus() -> None:
    def gradient(device: str) -> Tensor:
        torch.manual_seed(0)
        layer, x = nn.Linear(4, 3).to(device), torch.randn(2, 4).to(device)
        with torch.autocast(device.split(":")[0], torch.bfloat16):
            y = layer(x) + layer(2 * x)
        assert y.dtype is torch.bfloat16
        y.float().sum().backward()
        assert layer.weight.grad.dtype is torch.float32
        return layer.weight.grad.cpu()

    torch.testing.assert_close(gradient("simulated:2"), gradient("cpu"), rtol=2e-2, atol=1e-2)


class CastsOnTheHost(TorchDispatchMode):
    """Counts casts that CPU autocast, which has the same cache, makes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def casts_on_simulated(work: Callable[[str], object]) -> int:
    counted: list[Any] = []
    with observing(lambda func, *rest: counted.append(func)):
        work("simulated:0")
    return counted.count(torch.ops.aten._to_copy.default)


def layers_and_input(device: str) -> tuple[nn.Linear, Tensor]:
    return nn.Linear(3, 3, bias=False, device=device), torch.ones(2, 3, dtype=torch.bfloat16).new_ones(
        2, 3, device=device
    )


def twice(device: str) -> None:
    layer, x = layers_and_input(device)
    with torch.autocast(device.split(":")[0], torch.bfloat16):
        layer(layer(x))


def without_grad_then_with(device: str) -> None:
    layer, x = layers_and_input(device)
    with torch.autocast(device.split(":")[0], torch.bfloat16):
        with torch.no_grad():
            layer(x)
        layer(x)


def inner_block_keeps_the_cache(device: str) -> None:
    layer, x = layers_and_input(device)
    kind = device.split(":")[0]
    with torch.autocast(kind, torch.bfloat16):
        with torch.autocast(kind, torch.bfloat16):
            layer(x)
        layer(x)


def two_blocks(device: str) -> None:
    layer, x = layers_and_input(device)
    for _ in range(2):
        with torch.autocast(device.split(":")[0], torch.bfloat16):
            layer(x)


def frozen_weight(device: str) -> None:
    layer, x = layers_and_input(device)
    layer.requires_grad_(False)
    with torch.autocast(device.split(":")[0], torch.bfloat16):
        layer(layer(x))


def cache_switched_off(device: str) -> None:
    layer, x = layers_and_input(device)
    with torch.autocast(device.split(":")[0], torch.bfloat16, cache_enabled=False):
        layer(layer(x))


@pytest.mark.parametrize(
    "work",
    [twice, without_grad_then_with, inner_block_keeps_the_cache, two_blocks, frozen_weight, cache_switched_off],
)
def test_weights_are_cast_as_often_as_by_torchs_own_cache(work: Callable[[str], object]) -> None:
    with CastsOnTheHost() as host:
        work("cpu")
    assert casts_on_simulated(work) == host.count > 0


def test_cast_weights_are_freed_with_the_outermost_block() -> None:
    layer = nn.Linear(64, 64, bias=False, device="simulated:3")
    x = torch.ones(1, 64, device="simulated:3")
    gc.collect()
    before = torch.simulated.memory_allocated(3)
    with torch.autocast("simulated", torch.bfloat16):
        layer(x)
        assert torch.simulated.memory_allocated(3) - before == 64 * 64 * 2
    assert torch.simulated.memory_allocated(3) == before
