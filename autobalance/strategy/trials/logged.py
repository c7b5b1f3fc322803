"""What Lightning keeps of the values that a step logs: in a trial, the same tensors in collections of its own."""

from __future__ import annotations

from numbers import Number
from typing import Any

import torch
from torch import Tensor

from autobalance.compat import result_collection


class LoggedValues:
    """Stands for `log`, and for the part of the Trainer that collects their values.

    Example:
        >>> logged = LoggedValues("lightning.pytorch", device)     # doctest: +SKIP
        >>> logged.begin("training_step", 0)                       # doctest: +SKIP
        >>> logged.log("loss", loss, on_epoch=True)                # doctest: +SKIP
        >>> logged.end_batch()                                     # doctest: +SKIP

    Args:
        package: the Lightning package.
        device: on which numbers become tensors.
    """

    def __init__(self, package: str, device: torch.device) -> None:
        self._package = package
        self._device = device
        self._collections: dict[str, Any] = {}
        self._latest: dict[str, Tensor] = {}
        self._trained: set[str] = set()  # names that training has logged
        self._step = ""

    def begin(self, step: str, loader: int) -> None:
        """What is logged from now on is logged in `step`, with a batch of the loader of this index."""
        self._step = step
        if step not in self._collections:
            self._collections[step] = result_collection(self._package, training=step == "training_step")
        self._collections[step].dataloader_idx = None if step == "training_step" else loader

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = torch.mean,
        enable_graph: bool = False,
        **others: Any,
    ) -> None:
        """As `LightningModule.log`; metrics keep their bytes anyway."""
        if isinstance(value, Tensor):
            value = value.clone().detach()
        elif isinstance(value, Number):
            value = torch.tensor(value, device=self._device, dtype=torch.get_default_dtype())
        if not isinstance(value, Tensor) or value.numel() != 1 or not self._step:
            return
        training = self._step == "training_step"
        self._collections[self._step].log(
            self._step,
            name,
            value.squeeze(),
            on_step=training if on_step is None else on_step,
            on_epoch=not training if on_epoch is None else on_epoch,
            reduce_fx=reduce_fx,
            enable_graph=enable_graph,
            batch_size=1,  # only weighs the values
        )

    def end_batch(self) -> None:
        """Keep the latest values, as callbacks and loggers see them."""
        self._keep(on_step=True)

    def end_epoch(self) -> None:
        """Reduce the epoch's values, keep the results, and start anew."""
        self._keep(on_step=False)
        for collection in self._collections.values():
            collection.reset(metrics=False)

    def forget(self) -> None:
        """Drop what only other steps than training have logged, as Lightning does after its check before training."""
        self._latest = {name: value for name, value in self._latest.items() if name in self._trained}

    @property
    def has_evaluated(self) -> bool:
        """Whether anything was logged outside training."""
        return any(collection for step, collection in self._collections.items() if step != "training_step")

    def _keep(self, on_step: bool) -> None:
        collection = self._collections.get(self._step)
        if collection is not None:
            values = collection.metrics(on_step)
            self._latest.update(values["callback"])
            self._latest.update(values["log"])
            if self._step == "training_step":
                self._trained.update(values["callback"], values["log"])
