"""Copies of tensors on other devices, reused while somebody holds them.

A mask that every block receives crosses to a device once, not once per block. Nothing is kept alive by this table: a copy that
no block or autograd graph holds any more is forgotten, and made again when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef


class _Entry(NamedTuple):
    source: TensorWeakRef
    source_version: int
    copy: TensorWeakRef
    copy_version: int


class Copies:
    """Weak table (tensor, place) -> copy; a changed source or a changed copy is never reused.

    Example:
        >>> copies = Copies()
        >>> x = torch.ones(2)
        >>> first = copies.get(x, "there", x.clone)
        >>> copies.get(x, "there", x.clone) is first
        True
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, Any], _Entry] = {}
        self._sweep_at = 64

    def get(self, tensor: Tensor, place: Any, make: Callable[[], Tensor]) -> Tensor:
        """The copy of `tensor` at `place`, made by `make()` unless a usable one is alive.

        Args:
            tensor: the source.
            place: where the copy lives; any hashable.
            make: makes the copy.

        Returns:
            The copy, with the autograd history that this call's grad mode asks for.
        """
        if tensor.is_inference():  # has no version to compare
            return make()
        key = (id(tensor), place)
        entry = self._entries.get(key)
        if entry is not None and entry.source() is tensor and entry.source_version == tensor._version:
            copy = entry.copy()
            wanted = torch.is_grad_enabled() and tensor.requires_grad
            if copy is not None and copy._version == entry.copy_version and copy.requires_grad == wanted:
                return copy
        made = make()
        if made is not tensor and not made.is_inference():
            if len(self._entries) >= self._sweep_at:
                self._sweep()
            self._entries[key] = _Entry(TensorWeakRef(tensor), tensor._version, TensorWeakRef(made), made._version)
        return made

    def _sweep(self) -> None:
        self._entries = {k: e for k, e in self._entries.items() if e.source() is not None and e.copy() is not None}
        self._sweep_at = max(64, 2 * len(self._entries))

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        return Copies()

    def __reduce__(self) -> tuple[type[Copies], tuple[()]]:
        return Copies, ()
