"""Private names of Lightning's training loop: batches that it has not come to yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


class _Ahead:
    """An iterator that lets its next items be seen, and replaced, before they are taken."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self.items: deque[Any] = deque()

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> Any:
        return self.items.popleft() if self.items else next(self._iterator)

    def see(self, count: int) -> int:
        """Have up to `count` items at hand; returns how many there are."""
        # Not by `islice`, which would ask for `iter`: Lightning's loaders then start anew.
        while len(self.items) < count:
            try:
                self.items.append(next(self._iterator))
            except StopIteration:
                break
        return min(count, len(self.items))


def take_ahead(trainer: Any, count: int, prepare: Callable[[Any], Any]) -> list[Any]:
    """The next batches of the training loop, which then gets them as `prepare` returns them.

    Args:
        trainer: inside `fit`, at a batch.
        count: how many; there are fewer at the end of the epoch.
        prepare: called on each.
    """
    fetcher = trainer.fit_loop._data_fetcher
    if not isinstance(fetcher.iterator, _Ahead):
        fetcher.iterator = _Ahead(fetcher.iterator)
    fetched: list[Any] = getattr(fetcher, "batches", [])  # of loaders without a length, one is fetched early
    taken: list[Any] = []
    for index in range(min(count, len(fetched))):
        fetched[index] = _prepared(fetched[index], prepare, taken)
    more = fetcher.iterator.see(count - len(taken))
    for index in range(more):
        fetcher.iterator.items[index] = _prepared(fetcher.iterator.items[index], prepare, taken)
    return taken


def put_back(trainer: Any, as_loaded: Callable[[Any], Any]) -> None:
    """Let the training loop come to batches again as they were before `take_ahead` prepared them.

    Args:
        trainer: inside `fit`, or after it.
        as_loaded: what the loader gave for a batch; the batch itself where it was not prepared.
    """
    fetcher = trainer.fit_loop._data_fetcher
    ahead = getattr(fetcher, "iterator", None)
    for items in (getattr(fetcher, "batches", []), ahead.items if isinstance(ahead, _Ahead) else []):
        for index, item in enumerate(items):
            items[index] = (as_loaded(item[0]), *item[1:])


def _prepared(item: Any, prepare: Callable[[Any], Any], taken: list[Any]) -> Any:
    taken.append(prepare(item[0]))
    return (taken[-1], *item[1:])


def transferred_by_loop(trainer: Any, batch: Any) -> Any:
    """A batch of the loader after all that the training loop does to it before `on_train_batch_start`.

    Args:
        trainer: a Trainer inside `fit`.
        batch: as the loader yields it.
    """
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def leave_prepared_alone(module: Any, is_prepared: Callable[[Any], bool]) -> Callable[[], None]:
    """Have the loop not call the user's hook before the transfer again for batches that are prepared.

    Args:
        module: a LightningModule.
        is_prepared: whether a batch is.

    Returns:
        What undoes it.
    """
    vars(module)["_on_before_batch_transfer"] = partial(_before_transfer, module, is_prepared)
    return partial(vars(module).pop, "_on_before_batch_transfer", None)


def _before_transfer(module: Any, is_prepared: Callable[[Any], bool], batch: Any, dataloader_idx: int = 0) -> Any:
    if is_prepared(batch):
        return batch
    return type(module)._on_before_batch_transfer(module, batch, dataloader_idx=dataloader_idx)
