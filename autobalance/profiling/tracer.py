"""The trace as it grows: which storage is born and dies when, and whose it is.

A `Tracer` is a ledger as `autobalance.simulated` means it: told of every storage of simulated work, it has no limit.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from autobalance.compat import storage_key
from autobalance.profiling.growing_calls import GrowingCalls
from autobalance.profiling.growing_fans import GrowingFans
from autobalance.profiling.timeline import ROOT, Timeline
from autobalance.simulated.ledger import GRANULE

NO_TENSORS = ("scratch", "allowance", "workspace")
"""Kinds of storages that kernels and libraries take for themselves."""


class Tracer:
    """Records births and deaths of storages with their account and kind.

    Example:
        >>> tracer = Tracer()
        >>> with using_ledger(tracer): ...           # doctest: +SKIP
        >>> tracer.timeline(owner_of={})             # doctest: +SKIP

    Args:
        granule: bytes to whose multiples the device's allocator rounds up.

    Attributes:
        granule: as given.
        sizes: bytes per storage, rounded as the allocator does.
        nbytes: bytes per storage, not rounded.
        accounts: to whom each storage is charged.
        values: storages with the same non-negative number hold the same tensor.
        kinds: what each storage is: "weights", "gradients", "scratch", ..., or "".
        makers: the operation that made each storage, and the shape of what it made; "" where nobody said.
        events: +(index + 1) a birth, -(index + 1) a death.
        copies: storages that were made by copying a tensor to another place.
        wholes: by copy of a part of a storage, and by copy of such a copy: what it was copied from.
        fans: tensors that went to several blocks, and how their gradients met.
        gradients: for each storage that is a parameter's gradient how many storages there were when it was added.
        casts: storages of weights' casts that autocast keeps until its context ends.
        marks: named moments, as (name, number of events before).
        emptied: numbers of events before the moments at which cached memory is given back.
        calls: of blocks; None where blocks are not at home in places of their own.
    """

    def __init__(self, granule: int = GRANULE) -> None:
        self.granule = granule
        self.sizes: list[int] = []
        self.nbytes: list[int] = []
        self.accounts: list[int] = []
        self.values: list[int] = []
        self.kinds: list[str] = []
        self.makers: list[str] = []
        self.events: list[int] = []
        self.marks: list[tuple[str, int]] = []
        self.emptied: list[int] = []
        self.copies: set[int] = set()
        self.wholes: dict[int, int] = {}
        self.fans = GrowingFans()
        self.gradients: dict[int, int] = {}
        self.casts: list[int] = []
        self.calls: GrowingCalls | None = None
        self._live: dict[int, int] = {}
        self._next_value = 0
        self._workspaces: dict[str, int] = {}
        self._has_workspace: set[tuple[str, int]] = set()

    def allocate(self, storage: torch.UntypedStorage, nbytes: int, account: int) -> None:
        """Record a storage that was born, or that grew.

        Args:
            storage: the storage.
            nbytes: its size now, not rounded.
            account: whose it is.
        """
        size = self._rounded(nbytes)
        key = storage_key(storage)
        known = self._live.get(key)
        if known is not None:
            if self.sizes[known] == size:
                self.nbytes[known] = nbytes
                return
            account = self.accounts[known]
            self._die(key, known)
        if size == 0:
            return
        index = self._born(size, nbytes, account)
        self._live[key] = index
        weakref.finalize(storage, self._die, key, index).atexit = False

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.granule) * self.granule

    def _born(self, size: int, nbytes: int, account: int, kind: str = "") -> int:
        index = len(self.sizes)
        self.sizes.append(size)
        self.nbytes.append(nbytes)
        self.accounts.append(account)
        self.values.append(-1)
        self.kinds.append(kind)
        self.makers.append("")
        self.events.append(index + 1)
        return index

    def transient(self, nbytes: int, account: int, maker: str = "", kind: str = "scratch") -> None:
        """Record what a kernel takes inside and gives back before it ends.

        Args:
            nbytes: its size, not rounded.
            account: whose it is.
            maker: the operation.
            kind: "scratch" by a formula, or "allowance".
        """
        if nbytes:
            index = self._born(self._rounded(nbytes), nbytes, account, kind)
            self.makers[index] = maker
            self.events.append(-(index + 1))

    def give_back(self) -> None:
        """Record that what is cached is given back to the device here.

        That is what torch does each time cuDNN has tried its kernels, since those may have taken much
        (aten/src/ATen/native/cudnn/Conv_v8.cpp, run_single_conv).
        """
        self.emptied.append(len(self.events))

    def workspace(self, name: str, nbytes: int, account: int) -> None:
        """Record what a library keeps on a device for ever from its first use on; once a device.

        Accounts that share a device share it too: their workspaces of one name are one tensor's copies, as it were.

        Args:
            name: of the workspace.
            nbytes: its size, not rounded.
            account: whose operation needs it.
        """
        if (name, account) in self._has_workspace:
            return
        self._has_workspace.add((name, account))
        index = self._born(self._rounded(nbytes), nbytes, account, "workspace")
        self.makers[index] = name
        if name not in self._workspaces:
            self._workspaces[name] = self._next_value
            self._next_value += 1
        self.values[index] = self._workspaces[name]

    def written_to(self, earlier: torch.UntypedStorage, made: torch.UntypedStorage) -> bool:
        """Record that the storage which was just born is none: the result was written to an earlier one.

        Args:
            earlier: nothing else holds it, and it dies with the operation.
            made: the storage of the result.

        Returns:
            Whether that can be: both are as large, and no other live storage holds the same tensor as the earlier one.
        """
        before, index = self.find(earlier), self.find(made)
        if before is None or index is None or self.events[-1] != index + 1 or self.nbytes[before] != self.nbytes[index]:
            return False
        value = self.values[before]
        if value >= 0 and any(self.values[other] == value for other in self._live.values() if other != before):
            return False
        self.events.pop()
        for column in (self.sizes, self.nbytes, self.accounts, self.values, self.kinds, self.makers):
            column.pop()
        key = storage_key(made)
        del self._live[storage_key(earlier)]
        self._live[key] = before
        weakref.finalize(made, self._die, key, before).atexit = False
        return True

    def made(self, since: int, maker: str) -> None:
        """Say which operation made the storages from index `since` on."""
        for index in range(since, len(self.makers)):
            if not self.makers[index]:
                self.makers[index] = maker

    def _die(self, key: int, index: int) -> None:
        if self._live.get(key) == index:
            del self._live[key]
            self.events.append(-(index + 1))

    def mark(self, name: str) -> None:
        """Name this moment, such as the start of a phase.

        Args:
            name: of the moment.
        """
        self.marks.append((name, len(self.events)))

    def find(self, storage: torch.UntypedStorage) -> int | None:
        """The index of a live storage.

        Args:
            storage: any.
        """
        return self._live.get(storage_key(storage))

    def maker_of(self, storage: torch.UntypedStorage) -> str:
        """The operation that made a live storage, "" where nobody said.

        Args:
            storage: any.
        """
        index = self.find(storage)
        return "" if index is None else self.makers[index]

    def describe(self, storage: torch.UntypedStorage, kind: str) -> None:
        """Say what a live storage is: "weights", "gradients", "optimizer", ...

        Args:
            storage: any.
            kind: such as "gradients".
        """
        index = self.find(storage)
        if index is not None:
            self.kinds[index] = kind

    def added(self, gradient: torch.UntypedStorage) -> None:
        """Record that autograd has added to a parameter's gradient, or made it the gradient."""
        index = self.find(gradient)
        if index is not None:
            self.gradients.setdefault(index, len(self.sizes))

    def cast(self, weight: torch.UntypedStorage, made: torch.UntypedStorage) -> None:
        """Record that a storage was made by casting another, if that one is a weight's.

        Args:
            weight: that was cast.
            made: with the other type.
        """
        source, index = self.find(weight), self.find(made)
        if source is not None and index is not None and self.kinds[source] == "weights":
            self.casts.append(index)

    def copied(
        self,
        copy: torch.UntypedStorage,
        same: list[torch.UntypedStorage],
        maker: str = "",
        source: torch.UntypedStorage | None = None,
    ) -> None:
        """Record that a storage was made by copying a tensor to another place.

        Args:
            copy: the new storage.
            maker: the operation that made the original.
            same: storages that on one device would be one with it: its source if it is a copy of the whole of it, other
                copies of the same tensor.
            source: the storage that was copied, in whole if it is among `same`, else in part.
        """
        made, whole = self.find(copy), None if source is None else self.find(source)
        if made is not None:
            self.copies.add(made)
            self.makers[made] = maker
            if whole is not None and (all(other is not source for other in same) or whole in self.wholes):
                self.wholes[made] = whole
        self._same_value([copy, *same])

    def _same_value(self, storages: list[torch.UntypedStorage]) -> None:
        indices = [index for index in map(self.find, storages) if index is not None]
        if len(indices) < 2:
            return
        value = next((self.values[index] for index in indices if self.values[index] >= 0), self._next_value)
        self._next_value = max(self._next_value, value + 1)
        for index in indices:
            self.values[index] = value

    def timeline(self, owner_of: Mapping[int, int]) -> Timeline:
        """The finished trace.

        Args:
            owner_of: owner (block index, ROOT or HOST) by account; an account that is not in it belongs to ROOT.
        """
        return Timeline(
            sizes=tuple(self.sizes),
            owners=tuple(owner_of.get(account, ROOT) for account in self.accounts),
            values=tuple(self.values),
            events=tuple(self.events),
            marks=tuple(self.marks),
            fixed=tuple(self.nbytes),
            wholes=tuple(self.wholes.get(index, -1) for index in range(len(self.sizes))) if self.wholes else (),
            casts=tuple(self.casts),
            scratch=tuple(index for index, kind in enumerate(self.kinds) if kind in NO_TENSORS),
            emptied=tuple(self.emptied),
            fans=self.fans.finished(),
            gradients=tuple((index, then if then < len(self.sizes) else -1) for index, then in self.gradients.items()),
            calls=() if self.calls is None else self.calls.finished(owner_of),
        )
