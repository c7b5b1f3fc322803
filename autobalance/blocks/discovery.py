"""Find the blocks of a model that declares none: the parts that repeat, and those around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from autobalance.blocks.declared import declared_groups
from autobalance.blocks.reading import modules_read_by

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_UNCALLABLE = (nn.ParameterList, nn.ParameterDict)


def discovered_groups(root: nn.Module) -> list[tuple[nn.Module, ...]]:
    """Find modules that can each be placed as one.

    The model is opened, and below it every `ModuleList`, `ModuleDict` and `Sequential` that repeats a kind of module,
    down to modules that repeat alike: those are the blocks, with the parts beside them. Left out, so that they go to
    the device of whoever uses them: metrics, losses, parts without tensors, and modules whose parameters are used
    without calling them. A part without tensors inside an `nn.Sequential`, such as an activation, joins the part
    before it.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed = nn.Embedding(10, 4)
        ...         self.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2) for _ in range(2))
        ...         self.loss = nn.CrossEntropyLoss()
        >>> net = Net()
        >>> discovered_groups(net) == [(net.embed,), (net.layers[0],), (net.layers[1],)]
        True

    Args:
        root: the model.

    Returns:
        The modules of each block, in the order in which `root` registers them.

    Raises:
        ValueError: if nothing can be placed on its own.
    """
    search = _Search(root)
    search.enter(root, _Role(is_item=False, has_twin=False, is_alone=True))
    if not search.groups:
        kind = type(root).__name__
        raise ValueError(
            f"found no block in {kind}: it has no module of its own that holds parameters and is called. Write a "
            f"method `self_balance(self)` of {kind} that returns the parts to place, or train on one device."
        )
    return [tuple(group) for group in search.groups]


class _Role(NamedTuple):
    """What a module is to the one that holds it."""

    #: in a container
    is_item: bool
    #: beside another one of its class and shapes
    has_twin: bool
    #: the only part with tensors
    is_alone: bool


class _Search:
    """Walks the modules of `root` and collects blocks in `groups`."""

    def __init__(self, root: nn.Module) -> None:
        self.groups: list[list[nn.Module]] = []
        self._root = root
        self._seen: set[int] = set()
        self._group_around: dict[int, list[nn.Module]] = {}
        self._read: set[int] = set()
        self._registrations = Counter(id(module) for _, module in root.named_modules(remove_duplicate=False))

    def enter(self, module: nn.Module, role: _Role) -> bool:
        """Visit `module`, once; return whether the last block found is its end."""
        if not _holds_tensors(module) or _is_loss_or_metric(module):
            return False
        if id(module) in self._seen:
            around = self._group_around.get(id(module))
            if around is not None and module not in around:
                around.append(module)  # part of a block, and called from outside it too
            return False
        self._seen.add(id(module))
        if module is not self._root and (own := declared_groups(module)) is not None:
            for group in own:
                self._found(group)
            return False
        if self._opens(module, role):
            return self._open(module)
        if isinstance(module, _UNCALLABLE) or any(id(part) in self._read for part in module.modules()):
            return False
        self._found((module,))
        return True

    def _found(self, block: Sequence[nn.Module]) -> None:
        """Add a block; blocks found before that lie inside it become one with it, being on its device anyway."""
        parts = {id(part) for member in block for part in member.modules()}
        inside = [group for group in self.groups if any(id(member) in parts for member in group)]
        merged = [member for group in inside for member in group]
        merged += [member for member in block if member not in merged]
        self.groups = [group for group in self.groups if group not in inside]
        self.groups.append(merged)
        self._seen |= parts
        self._group_around |= {id(part): merged for member in merged for part in member.modules()}

    def _opens(self, module: nn.Module, role: _Role) -> bool:
        if not any(_holds_tensors(child) for child in module.children()) or not _may_be_opened(module):
            return False
        if not _is_callable(module):
            return True
        if not _is_worth_opening(module, role):
            return False
        # torch's own encoder looks at its layers' weights, but only to choose a path
        read = [] if _is_of_torch(module) else modules_read_by(module)
        if module is not self._root and any(_is_inside_a_container(part, module) for part in read):
            return False  # its code works with the very parts that opening it would spread
        self._read.update(map(id, read))
        return True

    def _open(self, module: nn.Module) -> bool:
        children = list(module.children())
        family = [child for child in children if _holds_tensors(child) and not _is_loss_or_metric(child)]
        kinds = Counter(map(_signature, family))
        joins_neighbours = isinstance(module, nn.Sequential) and not _overrides_forward(module)
        waiting: list[nn.Module] = []  # parts without tensors since the last part with some
        follows_block = False
        for child in children:
            if joins_neighbours and not _holds_tensors(child) and self._registrations[id(child)] == 1:
                if follows_block:
                    self.groups[-1].append(child)
                else:
                    waiting.append(child)
                continue
            found = len(self.groups)
            role = _Role(
                is_item=isinstance(module, _CONTAINERS),
                has_twin=kinds[_signature(child)] > 1,
                is_alone=len(family) == 1,
            )
            follows_block = self.enter(child, role)
            if follows_block and len(self.groups) == found + 1:
                self.groups[-1][:0] = waiting
            waiting = []
        return joins_neighbours and follows_block


def _is_worth_opening(module: nn.Module, role: _Role) -> bool:
    """Whether the parts of `module` make better blocks than the whole."""
    if _is_of_torch(module) and not isinstance(module, _CONTAINERS):
        return any(_repeats(container, _is_composite) for container in _containers_in(module))
    if role.is_item:
        if isinstance(module, _CONTAINERS) and _repeats(module, _is_composite):
            return True
        return not role.has_twin and any(_repeats_alike(container) for container in _containers_in(module))
    if any(_repeats(container, _is_composite) for container in _containers_in(module)):
        return True
    if role.has_twin:
        return False
    return (
        role.is_alone
        or (isinstance(module, nn.Sequential) and _repeats(module, _has_parameters))
        or any(_repeats(container, _has_parameters, times=3) for container in _containers_in(module))
    )


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_composite(module: nn.Module) -> bool:
    return _has_parameters(module) and any(True for _ in module.children()) and not is_parametrized(module)


def _is_loss_or_metric(module: nn.Module) -> bool:
    homes = [base.__module__ for base in type(module).__mro__]
    return any(home == "torch.nn.modules.loss" or home.split(".")[0] == "torchmetrics" for home in homes)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.split(".")[0] == "torch"


def _may_be_opened(module: nn.Module) -> bool:
    return not isinstance(module, torch.jit.ScriptModule) and not is_parametrized(module)


def _overrides_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Sequential.forward


def _is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_inside_a_container(part: nn.Module, module: nn.Module) -> bool:
    return any(inner is part for container in _containers_in(module) for inner in container.modules())


def _containers_in(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if isinstance(part, _CONTAINERS))


def _repeats(container: nn.Module, counts: Callable[[nn.Module], bool], times: int = 2) -> bool:
    """Whether `container` has `times` children of one class, of those that count."""
    kinds = Counter(type(child) for child in container.children() if counts(child))
    return max(kinds.values(), default=0) >= times


def _repeats_alike(container: nn.Module) -> bool:
    """Whether two children of `container` with parts of their own are alike in class and shapes."""
    kinds = Counter(_signature(child) for child in container.children() if _is_composite(child))
    return max(kinds.values(), default=0) > 1


def _signature(module: nn.Module) -> tuple[object, ...]:
    """What modules alike have in common: their class, and the names and shapes of what they hold."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return type(module), *((name, None if is_lazy(tensor) else tuple(tensor.shape)) for name, tensor in tensors)
