"""Mixed precision on simulated devices: Lightning would ask for CUDA's, and so silently for none at all."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch


def mixed_precision(package: str, precision: str) -> Any:
    """Lightning's mixed-precision plugin for simulated devices, with a gradient scaler of their own.

    Args:
        package: the Lightning package that is to use it.
        precision: "16-mixed" or "bf16-mixed".
    """
    plugin = import_module(f"{package}.plugins.precision").MixedPrecision
    scaler = torch.amp.GradScaler("simulated") if precision == "16-mixed" else None
    return plugin(precision, device="simulated", scaler=scaler)


def match_device(plugin: Any) -> None:
    """Make a mixed-precision plugin that the user made for another device work on simulated ones.

    Args:
        plugin: the Trainer's.
    """
    if getattr(plugin, "device", "simulated") == "simulated" or not hasattr(plugin, "autocast_context_manager"):
        return
    plugin.device = "simulated"
    if getattr(plugin, "scaler", None) is not None:
        plugin.scaler = torch.amp.GradScaler("simulated")
