"""Memory that libraries keep on a device from their first call on.

cuBLAS gets a workspace from torch for each handle, and a handle belongs to a thread: the one that runs the forward and
the optimizer, and autograd's thread of the device. Source: aten/src/ATen/cuda/CublasHandlePool.cpp.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch

from autobalance.kernels import table
from autobalance.kernels.target import Target

_aten = torch.ops.aten
_LT_WORKSPACE = 2**20

MULTIPLYING = frozenset(
    (
        _aten.addbmm.default,
        _aten.addmm.default,
        _aten.addmv.default,
        _aten.baddbmm.default,
        _aten.bmm.default,
        _aten.dot.default,
        _aten.mm.default,
        _aten.mv.default,
    )
)
"""Operators that call cuBLAS."""

_WITH_BIAS = frozenset((_aten.addmm.default,))


def kept_by(
    func: Any, backward: bool, target: Target, release: tuple[int, int], environment: Mapping[str, str] = os.environ
) -> tuple[tuple[str, int], ...]:
    """Name and bytes of the workspaces that an operator's library keeps from now on.

    Args:
        func: operator overload.
        backward: whether autograd's thread runs it.
        target: the GPU.
        release: of torch.
        environment: its CUBLAS_WORKSPACE_CONFIG and TORCH_CUBLASLT_UNIFIED_WORKSPACE are honoured, as torch does.
    """
    if func not in MULTIPLYING:
        return ()
    thread = "backward" if backward else "forward"
    taken = [(f"cuBLAS workspace ({thread})", cublas_workspace(target, release, environment))]
    if func in _WITH_BIAS and environment.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE") == "0":
        taken.append((f"cuBLASLt workspace ({thread})", _lt_workspace(environment)))
    return tuple(taken)


def cublas_workspace(target: Target, release: tuple[int, int], environment: Mapping[str, str] = os.environ) -> int:
    """Bytes of one workspace of cuBLAS.

    Args:
        target: the GPU.
        release: of torch.
        environment: `CUBLAS_WORKSPACE_CONFIG=:4096:8:16:8` means 8 buffers of 4096 KiB and 8 of 16 KiB.
    """
    buffers = re.findall(r":([0-9]+):([0-9]+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if buffers:
        return sum(int(kib) * 1024 * int(count) for kib, count in buffers)
    default: int = table.CUBLAS_WORKSPACE.value(target, release)
    return default


def _lt_workspace(environment: Mapping[str, str]) -> int:
    size = environment.get("CUBLASLT_WORKSPACE_SIZE", "")
    return int(size) * 1024 if size.isdigit() else _LT_WORKSPACE
