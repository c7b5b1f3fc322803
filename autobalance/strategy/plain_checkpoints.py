"""Checkpoints of the plain model: any strategy can load them, on any number of devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from autobalance.placement.materialize import WeightFile, is_on_meta, load_weights
from autobalance.strategy.checkpoints import host_state, is_local_file, to_host, write_file

if TYPE_CHECKING:
    from pytorch_lightning.strategies import ParallelStrategy as Base
else:
    Base = object


class PlainCheckpoints(Base):
    """The part of a strategy that writes and reads checkpoints."""

    _checkpoint_file: WeightFile | None = None

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The plain model's state, on the host."""
        assert self.lightning_module is not None
        return host_state(self.lightning_module, super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state, on the host."""
        state: dict[str, Any] = to_host(super().optimizer_state(optimizer))
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint that any strategy can load on any devices: callbacks' tensors go to the host, too."""
        checkpoint = to_host(checkpoint)
        if storage_options is None and is_local_file(self.checkpoint_io, filepath):
            write_file(checkpoint, filepath)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint; if the model is on meta, map it, and read the weights when blocks are placed."""
        self._checkpoint_file = None
        module = self.lightning_module
        if module is not None and is_on_meta(module) and is_local_file(self.checkpoint_io, checkpoint_path):
            file = WeightFile(Path(checkpoint_path), "state_dict", weights_only)
            self._checkpoint_file = file
            mapped: dict[str, Any] = torch.load(
                file.path, map_location="cpu", mmap=True, weights_only=file.weights_only
            )
            return mapped
        read: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return read

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model's weights, or have them read when blocks are placed if it is on meta."""
        module = self.lightning_module
        if self._checkpoint_file is not None and module is not None and is_on_meta(module):
            load_weights(module, self._checkpoint_file, strict)
        else:
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load each optimizer's state; torch puts it where its parameters are."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
