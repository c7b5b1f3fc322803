"""Gradients of activations: which are one kernel on a GPU."""

from __future__ import annotations

import torch

KERNELS_OF_THEIR_OWN = (torch.ops.aten.mish_backward.default, torch.ops.aten.silu_backward.default)
"""Operators that are one kernel on a GPU, and several operations where torch knows no such kernel.

Source: aten/src/ATen/native/native_functions.yaml (math_mish_backward, math_silu_backward).
"""
