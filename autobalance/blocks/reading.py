"""Which modules have their parameters read by code outside them, which hooks cannot see."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType

from torch import nn

_ENTRIES = ("forward", "training_step", "validation_step", "test_step", "predict_step")
_LIBRARIES = ("torch.nn.modules.module", "pytorch_lightning.", "lightning.", "lightning_fabric.")
# What may be asked of a tensor without using its values.
_METADATA = {
    *(
        "device",
        "dim",
        "dtype",
        "element_size",
        "grad",
        "is_cuda",
        "is_meta",
        "layout",
        "ndim",
        "numel",
        "requires_grad",
    ),
    *("shape", "size", "stride"),
}


def modules_read_by(module: nn.Module) -> list[nn.Module]:
    """Modules below `module` whose parameters or buffers its own code uses without calling them.

    Such a module cannot be placed on its own: nothing moves the operands of `F.linear(x, self.embed.weight)` to its
    device. The source of the methods that a step can reach is read, nothing is run, and a method without a source
    counts as reading nothing.

    Example:
        def forward(self, tokens):
            return F.linear(self.layers(self.embed(tokens)), self.embed.weight)  # reads self.embed

    Args:
        module: a module whose children may be placed apart.

    Returns:
        Its descendants that are read, in the order in which the code reads them.
    """
    read: dict[int, nn.Module] = {}
    for tree in _reachable_methods(type(module)):
        for found in _Reads(module, tree).found():
            read[id(found)] = found
    return list(read.values())


def _reachable_methods(kind: type) -> Iterator[ast.FunctionDef]:
    """Methods that the entry points of a step call on `self`, directly or not, as syntax trees."""
    waiting = [name for name in _ENTRIES if hasattr(kind, name)]
    seen = set(waiting)
    while waiting:
        tree = _parse(inspect.getattr_static(kind, waiting.pop()))
        if tree is None or not tree.args.args:
            continue
        yield tree
        this = tree.args.args[0].arg
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or node.attr in seen or not hasattr(kind, node.attr):
                continue
            if isinstance(node.value, ast.Name) and node.value.id == this:
                seen.add(node.attr)
                waiting.append(node.attr)


def _parse(member: object) -> ast.FunctionDef | None:
    if isinstance(member, property):
        member = member.fget
    member = inspect.unwrap(member) if callable(member) else member
    if not isinstance(member, FunctionType) or (member.__module__ or "").startswith(_LIBRARIES):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(member))).body[0]
    except (OSError, SyntaxError, TypeError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


class _Reads:
    """Resolves expressions such as `self.layers[0].weight` in one method against the modules that are really there.

    Args:
        module: what the method's `self` is.
        tree: the method.
    """

    def __init__(self, module: nn.Module, tree: ast.FunctionDef) -> None:
        self._tree = tree
        self._locals: dict[str, list[nn.Module]] = {tree.args.args[0].arg: [module]}
        self._module = module
        self._asked = {
            id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in _METADATA
        }
        for node in ast.walk(tree):
            if isinstance(node, (ast.For, ast.comprehension)):
                self._bind_items(node.target, node.iter)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._bind(node.targets[0], self._resolve(node.value))

    def found(self) -> Iterator[nn.Module]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in self._asked:
                for owner in self._resolve(node.value):
                    if owner is not self._module and node.attr in _tensor_names(owner):
                        yield owner

    def _resolve(self, node: ast.expr) -> list[nn.Module]:
        """The modules that an expression may stand for; none if it is anything else."""
        if isinstance(node, ast.Name):
            return self._locals.get(node.id, [])
        if isinstance(node, ast.Attribute):
            owners = self._resolve(node.value)
            return [child for owner in owners for name, child in owner.named_children() if name == node.attr]
        if isinstance(node, ast.Subscript):
            return [child for owner in self._resolve(node.value) for child in _items(owner, node.slice)]
        return []

    def _bind(self, target: ast.expr, modules: list[nn.Module]) -> None:
        if isinstance(target, ast.Name) and modules:
            self._locals.setdefault(target.id, []).extend(modules)

    def _bind_items(self, target: ast.expr, source: ast.expr) -> None:
        """Bind the variable of a loop over a container, also through `enumerate`, `zip`, `reversed` or `.items()`."""
        targets, sources = [target], [source]
        if isinstance(source, ast.Call):
            called = source.func.attr if isinstance(source.func, ast.Attribute) else getattr(source.func, "id", "")
            inner = target.elts if isinstance(target, ast.Tuple) else [target]
            if called in ("values", "children", "items") and isinstance(source.func, ast.Attribute):
                targets, sources = inner[-1:], [source.func.value]
            elif called in ("enumerate", "reversed"):
                targets, sources = inner[-1:], source.args[:1]
            elif called == "zip":
                targets, sources = inner, source.args
        for name, iterated in zip(targets, sources, strict=False):  # zip(*lists) has another number of arguments
            self._bind(name, [child for owner in self._resolve(iterated) for child in owner.children()])


def _items(owner: nn.Module, index: ast.expr) -> list[nn.Module]:
    """The children that `owner[index]` may be: one if the index is written out, else any."""
    children = dict(owner.named_children())
    if isinstance(index, ast.Constant) and str(index.value) in children:
        return [children[str(index.value)]]
    return list(children.values())


def _tensor_names(module: nn.Module) -> set[str]:
    named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return {name for name, _ in named}
