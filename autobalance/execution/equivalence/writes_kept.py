"""Tensors as they were: each is copied just before an operation first writes to it, and no other is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from autobalance.compat import DispatchMode, storage_key, written_by


class WritesKept(DispatchMode):
    """While active, operations that write to tensors of a step leave a copy on the host; `put_back` undoes the writes.

    Example:
        >>> weight = torch.ones(2)
        >>> kept = WritesKept([weight])
        >>> with kept:
        ...     _ = weight.mul_(3)
        >>> kept.put_back()
        >>> weight
        tensor([1., 1.])

    Args:
        tensors: what may be written to. Statistics that torch changes without saying so are not seen: batch norm should
            not be in training.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._positions = {id(tensor): position for position, tensor in enumerate(self._tensors)}
        # Aliases keep the storage alive, and tell it from another that `.data = ...` has put in its place.
        self._aliases = [tensor.detach() for tensor in self._tensors]
        self._by_storage: dict[int, list[int]] = defaultdict(list)
        for position, alias in enumerate(self._aliases):
            key = _storage_of(alias)
            if key is not None:
                self._by_storage[key].append(position)
        self._copies: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for position, name in written_by(func):
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, Tensor):
                    self._keep(tensor)
        return func(*args, **kwargs)

    def has_changed(self, tensor: Tensor) -> bool:
        """Whether a tensor was written to, or had other data assigned, since the mode was made or `put_back`.

        Args:
            tensor: any.
        """
        position = self._positions.get(id(tensor))
        if position is None:
            return True
        return position in self._copies or _storage_of(tensor) != _storage_of(self._aliases[position])

    def before(self, tensor: Tensor) -> Tensor | None:
        """The numbers of a tensor that has changed, as they were; None for one that has not, or is not known.

        Args:
            tensor: any.
        """
        position = self._positions.get(id(tensor))
        if position is None or not self.has_changed(tensor):
            return None
        return self._copies.get(position, self._aliases[position])

    @property
    def changed(self) -> list[Tensor]:
        """Those of the tensors that were written to, or had other data assigned."""
        return [tensor for tensor in self._tensors if self.has_changed(tensor)]

    def put_back(self) -> None:
        """Undo all writes; the mode may be entered again."""
        with torch.no_grad():
            for position, copy in self._copies.items():
                self._aliases[position].copy_(copy)
        self._copies.clear()
        for tensor, alias in zip(self._tensors, self._aliases, strict=True):
            if _storage_of(tensor) != _storage_of(alias):
                tensor.data = alias

    def _keep(self, tensor: Tensor) -> None:
        for position in self._by_storage.get(_storage_of(tensor) or 0, ()):
            if position not in self._copies:
                self._copies[position] = self._aliases[position].to("cpu", copy=True)


def _storage_of(tensor: Tensor) -> int | None:
    """The storage of a tensor; None for one that has none, such as a sparse one."""
    try:
        return storage_key(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None
