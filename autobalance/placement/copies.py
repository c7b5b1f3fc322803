"""Copies of tensors on other devices, reused while somebody holds them.

A mask that every block receives crosses to a device once, not once per block. Nothing is kept alive by this table: a
copy that no block or autograd graph holds any more is forgotten, and made again when asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from autobalance.compat import version


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
            return _made_with_version(make)
        key = (id(tensor), place)
        entry = self._entries.get(key)
        if entry is not None and entry.source() is tensor and entry.source_version == version(tensor):
            copy: Tensor | None = entry.copy()
            wanted = torch.is_grad_enabled() and tensor.requires_grad
            if copy is not None and version(copy) == entry.copy_version and copy.requires_grad == wanted:
                return copy
        made = _made_with_version(make)
        if made is not tensor:
            if len(self._entries) >= self._sweep_at:
                self._sweep()
            self._entries[key] = _Entry(TensorWeakRef(tensor), version(tensor), TensorWeakRef(made), version(made))
        return made

    def _sweep(self) -> None:
        entries = list(self._entries.items())  # at once: another thread may add one meanwhile
        self._entries = {
            key: entry for key, entry in entries if entry.source() is not None and entry.copy() is not None
        }
        self._sweep_at = max(64, 2 * len(self._entries))

    def __deepcopy__(self, memo: dict[int, Any]) -> Copies:
        return Copies()

    def __reduce__(self) -> tuple[type[Copies], tuple[()]]:
        return Copies, ()


def _made_with_version(make: Callable[[], Tensor]) -> Tensor:
    """A copy that counts its changes in inference mode, too: else nobody could tell that a block has changed it."""
    if not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(False), torch.no_grad():
        return make()
