"""One batch of every loader that a run will meet, taken from the user's own loaders without disturbing them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from typing import Any

from autobalance.compat import fresh_iterator, gives_one_after_the_other, request_loaders
from autobalance.placement.contents import elements_in, tensors_in
from autobalance.profiling.trial import Batch
from autobalance.strategy.options import Options
from autobalance.strategy.planning.undisturbed import undisturbed
from autobalance.strategy.registration import lightning_root, overrides

_STEPS = {"train": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_LIMITS = {"train": "limit_train_batches", "validate": "limit_val_batches"}


def sample_batches(trainer: Any, options: Options, again: bool = False) -> tuple[Batch, ...]:
    """One batch of each loader that the Trainer's present run will meet.

    The loaders' own state is put back here, that of their owners by the caller.

    Args:
        trainer: a Trainer inside `fit`, `validate`, `test` or `predict`.
        options: `worst_batch` replaces the training batch, or says how many to look at for the largest.
        again: whether the run has begun: loaders that can be read only once are left alone then.

    Returns:
        The batches, those of training first.
    """
    stages = ("train", "validate") if trainer.state.fn == "fit" else (str(trainer.state.fn.value),)
    samples: list[Batch] = []
    for stage in stages:
        samples += _sample_stage(trainer, stage, options, again)
    return tuple(samples)


def describe(batch: Any) -> str:
    """The shapes of the first tensors in `batch`, in words.

    Example:
        >>> describe({"x": torch.zeros(8, 3), "y": torch.zeros(8)})
        '8x3, 8'

    Args:
        batch: any, nested or not.
    """
    shapes = ["x".join(map(str, tensor.shape)) or "scalar" for tensor in islice(tensors_in(batch, in_objects=True), 4)]
    return ", ".join(shapes[:3]) + (", ..." if len(shapes) > 3 else "") or "no tensors"


def _sample_stage(trainer: Any, stage: str, options: Options, again: bool) -> list[Batch]:
    package = lightning_root(trainer)
    assert package is not None
    runs = stage == "predict" or overrides(trainer.lightning_module, _STEPS[stage])
    if not runs or getattr(trainer, _LIMITS.get(stage, f"limit_{stage}_batches")) == 0:
        return []
    if stage == "train" and options.worst_batch is not None and not isinstance(options.worst_batch, str):
        return [Batch(f"the given worst batch ({describe(options.worst_batch)})", stage, options.worst_batch)]
    loaders = request_loaders(package, _loop(trainer, stage))
    if loaders is None:
        return []
    with undisturbed(loaders):
        return list(_sample_loaders(package, loaders, stage, options, again))


def _loop(trainer: Any, stage: str) -> Any:
    if stage == "train":
        return trainer.fit_loop
    if stage == "validate" and trainer.state.fn == "fit":
        return trainer.fit_loop.epoch_loop.val_loop
    return getattr(trainer, f"{stage}_loop")


def _sample_loaders(package: str, loaders: Any, stage: str, options: Options, again: bool) -> Iterator[Batch]:
    combined_loader = import_module(f"{package}.utilities.combined_loader").CombinedLoader
    if isinstance(loaders, combined_loader):
        combined = copy.copy(loaders)
    else:
        combined = combined_loader(loaders, "max_size_cycle" if stage == "train" else "sequential")
    sources = combined.flattened
    if again and any(map(_reads_once, sources)):
        return
    for source in sources:
        if _reads_once(source):
            warnings.warn(
                f"The {stage} loader is a {type(source).__name__} that can be read only once, so the batch that was "
                f"taken to plan with is missing from this run. Give a loader that starts anew, or `worst_batch=` a "
                f"batch.",
                stacklevel=2,
            )
    if stage == "train" or not gives_one_after_the_other(combined):
        combined.flattened = [_Fresh(source) for source in sources]
        count = options.batches_to_scan if stage == "train" else 1
        yield from _largest(stage, (batch for batch, _, _ in islice(combined, count)))
        return
    for index, source in enumerate(sources):
        for data in islice(fresh_iterator(source), 1):
            of = f" of loader {index}" if len(sources) > 1 else ""
            yield Batch(f"first {_ADJECTIVES[stage]} batch{of} ({describe(data)})", stage, data, index)


def _largest(stage: str, batches: Iterator[Any]) -> Iterator[Batch]:
    """The batch with the most elements, if there is any; the others are not kept."""
    largest, most, number, count = None, -1, 0, 0
    for count, batch in enumerate(batches, 1):
        if (elements := elements_in(batch)) > most:
            largest, most, number = batch, elements, count
    if count:
        which = "first" if count == 1 else f"largest of the first {count} (number {number})"
        yield Batch(f"{which} {_ADJECTIVES[stage]} batch ({describe(largest)})", stage, largest)


_ADJECTIVES = {"train": "training", "validate": "validation", "test": "test", "predict": "prediction"}


class _Fresh:
    """Stands for a loader and starts a new iteration each time, whatever iteration the loader itself keeps."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(fresh_iterator(self._loader))


def _reads_once(loader: Any) -> bool:
    """Whether `loader` is an iterator, which does not give again what it has given once."""
    dataset = getattr(loader, "dataset", None)
    return hasattr(loader, "__next__") or hasattr(dataset, "__next__")
