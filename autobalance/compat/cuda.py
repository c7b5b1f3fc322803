"""Private names of torch's CUDA part."""

from __future__ import annotations

from typing import Any

import torch


def drop_cuda_workspaces(device: torch.device) -> None:
    """Give back the workspaces that cuBLAS keeps on GPUs; it takes new ones when it needs them.

    Args:
        device: nothing is done for one that is no GPU.
    """
    if device.type == "cuda":
        untyped: Any = torch
        untyped._C._cuda_clearCublasWorkspaces()
