"""Workspaces that cuBLAS keeps, by CublasHandlePool.cpp."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import autobalance
from autobalance.kernels.target import find_target
from autobalance.kernels.workspaces import cublas_workspace, kept_by
from tests.kernels.tracing import operand, trace

MIB = 2**20
_aten = torch.ops.aten


@pytest.mark.parametrize(
    ("gpu", "mib"), [("V100-16GB", 8.125), ("A100-80GB", 8.125), ("RTX4090", 8.125), ("H100-80GB", 32), ("H200", 32)]
)
def test_size_follows_the_gpu(gpu: str, mib: float) -> None:
    assert cublas_workspace(find_target(gpu), (2, 13), {}) == mib * MIB


def test_size_is_what_the_environment_says() -> None:
    given = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8:16:8"}
    assert cublas_workspace(find_target("H100-80GB"), (2, 13), given) == (4096 * 8 + 16 * 8) * 1024
    assert cublas_workspace(find_target("H100-80GB"), (2, 13), {"CUBLAS_WORKSPACE_CONFIG": "none"}) == 32 * MIB


def test_each_thread_that_multiplies_has_its_own() -> None:
    seen = trace("A100-80GB", lambda: F.relu(torch.mm(operand(4, 4), operand(4, 4))))
    assert seen.taken["mm"].workspaces == (("cuBLAS workspace (backward)", int(8.125 * MIB)),)
    assert seen.taken["relu"].workspaces == ()
    forward = trace("A100-80GB", lambda: torch.mm(operand(4, 4), operand(4, 4)), backward=False)
    assert forward.taken["mm"].workspaces == (("cuBLAS workspace (forward)", int(8.125 * MIB)),)


def test_separate_workspace_of_cublaslt_where_the_user_asks_for_it() -> None:
    target, apart = find_target("A100-80GB"), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}
    assert kept_by(_aten.addmm.default, False, target, (2, 13), apart)[1] == ("cuBLASLt workspace (forward)", MIB)
    assert len(kept_by(_aten.addmm.default, False, target, (2, 13), {})) == 1
    assert len(kept_by(_aten.mm.default, False, target, (2, 13), apart)) == 1


def test_profile_counts_two_workspaces_once_each() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    peaks = [autobalance.profile(model, torch.zeros(8, 64), target=target).peak() for target in ("simulated", "cuda")]
    assert peaks[1] - peaks[0] == 2 * 8.125 * MIB
