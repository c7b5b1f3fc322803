"""The blocks that a model declares by its own `self_balance()`."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

_UNCALLABLE = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def declared_groups(root: nn.Module) -> list[tuple[nn.Module, ...]] | None:
    """Read and check what `root.self_balance()` returns.

    Example:
        def self_balance(self):
            return ["embed", *self.layers, [self.norm, self.head]]  # a list inside the list is one block

    Args:
        root: the model.

    Returns:
        The modules of each block; None if `root` has no such method, or the method returns None.

    Raises:
        TypeError: if an entry is neither a module of its own, nor a name, nor a flat group of these.
        ValueError: if an entry is unknown, foreign, repeated, inside another or the model itself; if there is none.
    """
    declare = getattr(root, "self_balance", None)
    entries = declare() if callable(declare) else None
    if entries is None:
        return None
    where = f"`{type(root).__name__}.self_balance()`"
    reader = _Reader(root, where)
    groups = [reader.group(entry) for entry in _as_list(entries, where)]
    if not groups:
        raise ValueError(f"{where} returned no block. Return the modules to place, or None to have them found.")
    reader.refuse_overlap([module for group in groups for module in group])
    return groups


def _as_list(entries: Any, where: str) -> list[Any]:
    if isinstance(entries, (str, Tensor, dict, nn.ModuleDict)) or not isinstance(entries, Iterable):
        raise TypeError(
            f"{where} returned {_describe(entries)}. Return a list of modules or of their names, such as "
            "`[self.embed, *self.layers, self.head]`."
        )
    return list(entries)


class _Reader:
    """Turns entries into modules of `root`.

    Args:
        root: the model.
        where: the method that returned the entries, for messages.
    """

    def __init__(self, root: nn.Module, where: str) -> None:
        self._root = root
        self._where = where
        self._names = {id(module): name for name, module in root.named_modules()}
        self._by_name: dict[str, nn.Module] = dict(root.named_modules(remove_duplicate=False))

    def group(self, entry: Any) -> tuple[nn.Module, ...]:
        if isinstance(entry, (list, tuple)):
            if not entry:
                raise ValueError(f"{self._where} returned an empty group. Name the modules of that block, or drop it.")
            return tuple(self._module(member) for member in entry)
        return (self._module(entry),)

    def _module(self, entry: Any) -> nn.Module:
        module: Any = self._named(entry) if isinstance(entry, str) else entry
        if not isinstance(module, nn.Module):
            advice = {
                Tensor: " Leave it out: a tensor outside every block goes to the device of whoever uses it.",
                list: " Groups cannot be nested: a list inside the list is one block.",
                tuple: " Groups cannot be nested: a tuple inside the list is one block.",
            }
            why = next((text for kind, text in advice.items() if isinstance(entry, kind)), "")
            raise TypeError(f"{self._where} returned {_describe(entry)}, which is neither a module nor a name.{why}")
        if id(module) not in self._names:
            raise ValueError(
                f"{self._where} returned a {type(module).__name__} that is not part of the model. Return a module "
                "that the model registers: one assigned to an attribute of it, or kept in an `nn.ModuleList`."
            )
        if module is self._root:
            raise ValueError(f"{self._where} returned the model itself. Return the parts that may be placed apart.")
        if isinstance(module, _UNCALLABLE):
            raise ValueError(self._cannot_be_called(module))
        return module

    def _named(self, name: str) -> nn.Module:
        if name in self._by_name:
            return self._by_name[name]
        close = [repr(known) for known in get_close_matches(name, self._by_name)]
        first = [repr(known) for known in self._by_name if known][:6]
        advice = f"Did you mean {' or '.join(close)}?" if close else f"It has {', '.join(first)}, and so on."
        raise ValueError(f"{self._where} returned the name {name!r}, which the model does not have. {advice}")

    def _cannot_be_called(self, module: nn.Module) -> str:
        name, kind = self._names[id(module)], type(module).__name__
        if isinstance(module, nn.ModuleList):
            return (
                f"{self._where} returned '{name}', a {kind}, which is never called itself. Return its items: "
                f"`*self.{name}` for a block each, `list(self.{name})` for one block."
            )
        if isinstance(module, nn.ModuleDict):
            return (
                f"{self._where} returned '{name}', a {kind}, which is never called itself. Return its items: "
                f"`*self.{name}.values()` for a block each, `list(self.{name}.values())` for one block."
            )
        return (
            f"{self._where} returned '{name}', a {kind}, which is never called. Leave it out: parameters outside every "
            "block go to the device of whoever uses them."
        )

    def refuse_overlap(self, modules: list[nn.Module]) -> None:
        """Refuse a module that comes twice, and one that lies inside another."""
        entries = {id(module) for module in modules}
        if len(entries) < len(modules):
            names = [self._names[id(module)] for module in modules]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(
                f"{self._where} returned {', '.join(map(repr, twice))} more than once. Return each module once; one "
                "that is called several times is still one block."
            )
        for module in modules:
            for inner in module.modules():
                if inner is not module and id(inner) in entries:
                    outer_name, inner_name = self._names[id(module)], self._names[id(inner)]
                    raise ValueError(
                        f"{self._where} returned both '{outer_name}' and '{inner_name}', which lies inside it. "
                        "A block is placed as one: return either the whole or its parts."
                    )


def _describe(thing: Any) -> str:
    if isinstance(thing, str):
        return f"the text {thing!r}"
    if isinstance(thing, Tensor):
        return f"a {type(thing).__name__} of shape {tuple(thing.shape)}"
    text = repr(thing)
    kind = type(thing).__name__
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    return f"{article} {kind}" + (f" ({text})" if len(text) <= 40 and "\n" not in text else "")
