"""Private names of Lightning, and of torch, on the way of a batch from its loader; `package` as in `lightning`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch.utils.data import DataLoader


def request_loaders(package: str, loop: Any) -> Any:
    """What the user's loader hook or argument gives for `loop`: a loader, a collection of them, or None.

    Args:
        package: the Lightning package of the loop, "pytorch_lightning" or "lightning.pytorch".
        loop: a fit or evaluation loop of its Trainer.
    """
    source = loop._data_source
    if source.instance is None or not source.is_defined():
        return None
    return import_module(f"{package}.trainer.connectors.data_connector")._request_dataloader(source)


def data_owners(trainer: Any) -> list[Any]:
    """Where the loaders of every loop come from: loaders given to the Trainer, or the modules whose hooks make them.

    Args:
        trainer: a Trainer with its module.
    """
    loops = (
        trainer.fit_loop,
        trainer.fit_loop.epoch_loop.val_loop,
        trainer.validate_loop,
        trainer.test_loop,
        trainer.predict_loop,
    )
    owners = {id(loop._data_source.instance): loop._data_source.instance for loop in loops}
    return [owner for owner in owners.values() if owner is not None]


@contextlib.contextmanager
def loader_attachment_kept(trainer: Any) -> Iterator[None]:
    """Undo on leaving what `trainer.estimated_stepping_batches` does inside: it starts the loader of epoch 0.

    Args:
        trainer: a Trainer before its loops.
    """
    loop = vars(trainer.fit_loop)
    kept, kept_here = dict(loop), {name: vars(trainer)[name] for name in _DATA_ATTRIBUTES if name in vars(trainer)}
    try:
        yield
    finally:
        loop.clear()
        loop.update(kept)
        for name in _DATA_ATTRIBUTES:
            vars(trainer).pop(name, None)
        vars(trainer).update(kept_here)


_DATA_ATTRIBUTES = ("val_check_batch", "_train_start_time", "_last_val_time")


def fresh_iterator(loader: Any) -> Any:
    """An iterator over `loader` that leaves the persistent workers of a torch DataLoader alone.

    Args:
        loader: of any class; only those of torch have persistent workers.
    """
    return loader._get_iterator() if isinstance(loader, DataLoader) else iter(loader)


def gives_one_after_the_other(loader: Any) -> bool:
    """Whether a CombinedLoader of Lightning gives the batches of its loaders in turn, not one of each together.

    Args:
        loader: a CombinedLoader.
    """
    return bool(loader._mode == "sequential")


def transferred_batch(module: Any, batch: Any, device: torch.device, loader: int) -> Any:
    """The batch after the module's own hooks before, at and after its transfer to `device`.

    Args:
        module: a LightningModule.
        batch: as the loader yields it.
        device: where it goes.
        loader: index of the loader.
    """
    batch = module._on_before_batch_transfer(batch, dataloader_idx=loader)
    return module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=loader)
