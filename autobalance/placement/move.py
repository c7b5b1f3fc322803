"""Move what a block is given to the block's place, whatever it is nested in.

Containers keep their type and are rebuilt only if a tensor in them moves; one object met twice stays one object; what a
block then changes in a container that had to be rebuilt is carried back to the caller's own.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from autobalance.compat import version
from autobalance.placement.contents import Contents, attributes, is_atom, moves_itself, parts
from autobalance.placement.locate import Locator, Place


class _Sent(NamedTuple):
    source: Tensor
    copy: Tensor
    version: int


class _Rebuilt(NamedTuple):
    original: Any
    stand_in: Any
    contents: Contents


class Mover:
    """Moves the arguments of one call to one place.

    Example:
        >>> mover = Mover(locator, torch.device("cuda", 1))  # doctest: +SKIP
        >>> args, kwargs = mover.move((args, kwargs))        # doctest: +SKIP
        >>> mover.carry_back()                               # doctest: +SKIP

    Args:
        locator: knows where tensors are and sends them.
        place: where everything goes.
    """

    def __init__(self, locator: Locator, place: Place) -> None:
        self._locator = locator
        self._place = place
        self._holders: set[int] = set()
        self._stand_ins: dict[int, tuple[Any, Any]] = {}  # id of the original -> (original, what stands for it)
        self._rebuilt: list[_Rebuilt] = []
        self._sent: list[_Sent] = []

    def move(self, value: Any) -> Any:
        """`value` with every tensor at the place: the same object if nothing in it had to move.

        Args:
            value: of any kind.
        """
        self._holders = self._find_holders(value)
        return self._moved(value)

    def to_send(self, value: Any) -> list[Tensor]:
        """The tensors in `value`, however deep, that have to move.

        Args:
            value: of any kind.
        """
        return self._find_elsewhere(value)[0]

    def changed_in_place(self) -> list[tuple[Tensor, Tensor]]:
        """Pairs (source, copy) of the copies that were changed in place since they were handed over."""
        return [(sent.source, sent.copy) for sent in self._sent if version(sent.copy) != sent.version]

    def carry_back(self, take_home: Callable[[Any], Any] = lambda value: value) -> None:
        """Bring what the block changed in rebuilt containers and objects back to the caller's own.

        Args:
            take_home: what to do with each value that the block put in and that the caller did not have.
        """
        originals = {id(stand_in): original for original, stand_in in self._stand_ins.values()}

        def own(value: Any) -> Any:
            return originals[id(value)] if id(value) in originals else take_home(value)

        for rebuilt in self._rebuilt:
            Contents.of(rebuilt.stand_in).carry(rebuilt.contents, rebuilt.original, own)

    def restore(self, output: Any) -> Any:
        """`output` with each container that stood in for the caller's own replaced by the caller's own.

        Args:
            output: what a block or function has returned.
        """
        originals = {id(rebuilt.stand_in): rebuilt.original for rebuilt in self._rebuilt}
        return _put_originals(output, originals, set()) if originals else output

    def _is_whole(self, value: Any) -> bool:
        """Whether a value is moved or left as one, so that nothing in it is looked at."""
        return isinstance(value, Tensor)

    def _find_holders(self, root: Any) -> set[int]:
        """Ids of what has to move and of all that holds some of it, however deep, in circles too."""
        elsewhere, inside = self._find_elsewhere(root)
        found = list(map(id, elsewhere))
        holders: set[int] = set()
        while found:
            holder = found.pop()
            if holder not in holders:
                holders.add(holder)
                found += inside.get(holder, ())
        return holders

    def _find_elsewhere(self, root: Any) -> tuple[list[Any], dict[int, list[int]]]:
        """What has to move, and the ids of what holds each value, by its id."""
        if is_atom(root):
            return [], {}
        inside: dict[int, list[int]] = {}
        seen = {id(root): root}
        unread, found = [root], []
        while unread:
            value = unread.pop()
            if self._is_whole(value):
                if self._locator.place_of(value) not in (None, self._place):
                    found.append(value)
                continue
            for part in parts(value):
                if is_atom(part):
                    continue
                inside.setdefault(id(part), []).append(id(value))
                if id(part) not in seen:
                    seen[id(part)] = part
                    unread.append(part)
        return found, inside

    def _moved(self, value: Any) -> Any:
        if id(value) not in self._holders or is_atom(value):
            return value
        known = self._stand_ins.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, Tensor):
            return self._keep(value, self._send(value))
        if isinstance(value, tuple):
            return self._move_tuple(value)
        if isinstance(value, frozenset):
            return self._keep(value, type(value)(self._moved(item) for item in value))
        if moves_itself(value):
            return self._move_object(value)
        return self._move_container(value)

    def _keep(self, original: Any, stand_in: Any) -> Any:
        self._stand_ins[id(original)] = original, stand_in
        return stand_in

    def _send(self, tensor: Tensor) -> Tensor:
        sent = self._locator.send(tensor, self._place)
        self._note_sent(tensor, sent)
        return sent

    def _note_sent(self, source: Tensor, sent: Tensor) -> None:
        if not sent.is_inference():  # has no version to compare
            self._sent.append(_Sent(source, sent, version(sent)))

    def _move_tuple(self, value: tuple[Any, ...]) -> Any:
        # The batch sizes of a packed sequence are on the host wherever it is.
        stay = {id(value.batch_sizes)} if isinstance(value, PackedSequence) else set()
        items = [item if id(item) in stay else self._moved(item) for item in value]
        known = self._stand_ins.get(id(value))
        if known is not None:  # a list inside held the tuple itself
            return known[1]
        if hasattr(type(value), "n_sequence_fields"):  # what torch's own operations return
            moved: Any = type(value)(items)
        else:  # `__new__` of named tuples and others may want something else
            moved = tuple.__new__(type(value), items)
        self._keep(value, moved)
        self._move_attributes(value, moved)
        return moved

    def _move_container(self, value: Any) -> Any:
        if not Contents.is_changeable(value):  # a read-only mapping: made from a dict by convention
            return self._keep(value, type(value)({key: self._moved(item) for key, item in value.items()}))
        moved = copy.copy(value)  # keeps a default factory, a length limit, attributes, the order
        self._keep(value, moved)
        if isinstance(value, dict):
            for key, item in value.items():
                if id(item) in self._holders:
                    moved[key] = self._moved(item)
        elif isinstance(value, (list, deque)):
            for index, item in enumerate(value):
                moved[index] = self._moved(item)
        elif isinstance(value, set):
            moved.clear()
            moved.update(self._moved(item) for item in value)
        self._move_attributes(value, moved)
        self._rebuilt.append(_Rebuilt(value, moved, Contents.of(moved)))
        return moved

    def _move_attributes(self, value: Any, moved: Any) -> None:
        for name, item in attributes(value).items():
            after = self._moved(item)
            if after is not getattr(moved, name, None):
                object.__setattr__(moved, name, after)  # frozen dataclasses refuse the ordinary way

    def _move_object(self, value: Any) -> Any:
        shell = copy.copy(value)  # many a `.to` changes the object itself
        moved = self._locator.send_object(shell, self._place)
        moved = self._keep(value, shell if moved is None else moved)
        after = attributes(moved)
        for name, source in attributes(value).items():
            sent = after.get(name)
            if sent is source or type(sent) is not type(source):
                continue
            if isinstance(source, Tensor) and isinstance(sent, Tensor):
                self._note_sent(source, sent)
                self._stand_ins.setdefault(id(source), (source, sent))
            elif Contents.is_changeable(source):
                self._rebuilt.append(_Rebuilt(source, sent, Contents.of(sent)))
        self._rebuilt.append(_Rebuilt(value, moved, Contents.of(moved)))
        return moved


def _put_originals(value: Any, originals: dict[int, Any], seen: set[int]) -> Any:
    """Replace stand-ins in what a block returns: what it made anew is changed in place, tuples are made again."""
    if id(value) in originals:
        return originals[id(value)]
    if is_atom(value) or isinstance(value, Tensor) or id(value) in seen:
        return value
    seen.add(id(value))
    if isinstance(value, tuple):
        items = [_put_originals(item, originals, seen) for item in value]
        if all(a is b for a, b in zip(value, items, strict=True)) or hasattr(type(value), "n_sequence_fields"):
            return value
        return tuple.__new__(type(value), items)
    if isinstance(value, dict):
        for key, item in list(value.items()):
            after = _put_originals(item, originals, seen)
            if after is not item:
                value[key] = after
    elif isinstance(value, (list, deque)):
        for index, item in enumerate(value):
            value[index] = _put_originals(item, originals, seen)
    elif Contents.is_changeable(value):
        for name, item in attributes(value).items():
            after = _put_originals(item, originals, seen)
            if after is not item:
                object.__setattr__(value, name, after)
    return value
