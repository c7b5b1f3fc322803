"""Models built on the meta device: made block by block where they are to be, from files or by their own initialisation.

Neither the host nor any one device ever holds the whole model: files are mapped, and mapped anew for each block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from autobalance.blocks import Blocks
from autobalance.compat import initialiser

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class WeightFile:
    """A file of weights that is read tensor by tensor.

    Attributes:
        path: a file of safetensors if it is named so, else one that `torch.save` wrote.
        key: where in the file's dictionary the weights are, such as "state_dict"; None: at the top.
        weights_only: False trusts the file to make any Python object; None: torch's own default.
    """

    path: Path
    key: str | None = None
    weights_only: bool | None = None

    @contextmanager
    def opened(self) -> Iterator[tuple[frozenset[str], Read]]:
        """The names in the file, and a function that reads one tensor; the file is mapped inside only."""
        if self.path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(self.path, framework="pt", device="cpu") as file:
                yield frozenset(file.keys()), file.get_tensor
            return
        weights = torch.load(self.path, map_location="cpu", mmap=True, weights_only=self.weights_only)
        weights = weights if self.key is None else weights[self.key]
        yield frozenset(weights), weights.__getitem__


_files: weakref.WeakKeyDictionary[nn.Module, WeightFile] = weakref.WeakKeyDictionary()


def is_on_meta(module: nn.Module) -> bool:
    """Whether any parameter or buffer of `module` has no memory yet.

    Args:
        module: with those inside it.
    """
    return any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))


def load_weights(module: nn.Module, file: str | Path | WeightFile, strict: bool = True) -> None:
    """Have `module`, built on meta, filled from a file when it is placed.

    Example:
        def configure_model(self):
            with torch.device("meta"):
                self.net = Transformer()
            load_weights(self.net, "net.safetensors")

    Args:
        module: on the meta device; the file names its tensors as its `state_dict()` does.
        file: safetensors, or what `torch.save` wrote.
        strict: whether the names must be the same. If not, what the file lacks is initialised by its module.

    Raises:
        ValueError: if `module` is not on meta, or names differ.
    """
    if not is_on_meta(module):
        raise ValueError(
            f"{type(module).__name__} has its weights already: build it inside `with torch.device('meta')`, or load it "
            f"with `load_state_dict`."
        )
    weights = file if isinstance(file, WeightFile) else WeightFile(Path(file))
    with weights.opened() as (names, _):
        expected = frozenset(module.state_dict())
    missing, unexpected = sorted(expected - names), sorted(names - expected)
    if strict and (missing or unexpected):
        raise ValueError(
            f"{weights.path} is not of this {type(module).__name__}: it lacks {_few(missing)} and has "
            f"{_few(unexpected)} besides. Pass strict=False to initialise what it lacks and ignore the rest."
        )
    _files[module] = weights


def materialize(
    root: nn.Module,
    blocks: Blocks,
    devices: Sequence[torch.device],
    loose: Mapping[str, torch.device],
    root_device: torch.device,
) -> None:
    """Make what is on meta on its own device, block by block; the rest is left where it is.

    Args:
        root: the model.
        blocks: its blocks.
        devices: one per block.
        loose: device by the qualified name of a parameter or buffer outside every block.
        root_device: for what `loose` does not name.

    Raises:
        ValueError: for tensors that no file holds and whose module has no `reset_parameters()`.
    """
    if not is_on_meta(root):
        return
    parts = {id(part): (name, part) for name, part in root.named_modules()}
    _refuse_what_nobody_can_make(root, parts.values())
    maker = _Maker(root)
    inside: set[int] = set()
    for modules, device in zip(blocks.modules, devices, strict=True):
        block = {id(part): parts[id(part)] for module in modules for part in module.modules()}
        inside |= block.keys()
        maker.make(block.values(), lambda name, device=device: device)  # type: ignore[misc]  # binds the loop's device
    outside = [entry for key, entry in parts.items() if key not in inside]
    maker.make(outside, lambda name: loose.get(name, root_device))


class _Maker:
    """Makes tensors of one model, tied ones once."""

    def __init__(self, root: nn.Module) -> None:
        self._owners = [(name, _files[part]) for name, part in root.named_modules() if part in _files]
        self._made: dict[int, Tensor] = {}
        self._keep_alive: list[Tensor] = []

    def make(self, parts: Iterable[tuple[str, nn.Module]], device_of: Callable[[str], torch.device]) -> None:
        """Make the meta tensors of these modules: empty, initialised if their module can, then read from files."""
        made: dict[str, Tensor] = {}
        for prefix, part in parts:
            own = {name: tensor for name, tensor in _own(part) if tensor.is_meta}
            for name, tensor in own.items():
                full = f"{prefix}.{name}" if prefix else name
                if id(tensor) not in self._made:
                    self._made[id(tensor)] = _empty(tensor, device_of(full))
                    self._keep_alive.append(tensor)
                setattr(part, name, self._made[id(tensor)])
                made[full] = self._made[id(tensor)]
            if own:
                _initialise(part, kept={name: tensor for name, tensor in _own(part) if name not in own})
        self._read(made)

    def _read(self, made: Mapping[str, Tensor]) -> None:
        for owner, file in self._owners:
            start = f"{owner}." if owner else ""
            mine = {name[len(start) :]: tensor for name, tensor in made.items() if name.startswith(start)}
            if not mine:
                continue
            with file.opened() as (names, read), torch.no_grad():
                for name in mine.keys() & names:
                    mine[name].copy_(read(name))


def _refuse_what_nobody_can_make(root: nn.Module, parts: Iterable[tuple[str, nn.Module]]) -> None:
    held: set[str] = set()
    for owner, part in root.named_modules():
        if part in _files:
            with _files[part].opened() as (names, _):
                held |= {f"{owner}.{name}" if owner else name for name in names}
    lost = [
        f"{prefix}.{name}" if prefix else name
        for prefix, part in parts
        if initialiser(part) is None
        for name, tensor in _own(part)
        if tensor.is_meta and (f"{prefix}.{name}" if prefix else name) not in held
    ]
    if lost:
        raise ValueError(
            f"{_few(lost)} of {type(root).__name__} is on meta, in no file of weights, and its module has no "
            f"`reset_parameters()` to make it. Add that method, or build this module outside `torch.device('meta')`."
        )


def _initialise(part: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Let a module initialise its tensors, except those that have their values already."""
    initialise = initialiser(part)
    if initialise is None:
        return
    values = {name: tensor.detach().clone() for name, tensor in kept.items()}
    initialise()
    with torch.no_grad():
        for name, value in values.items():
            kept[name].copy_(value)


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(tensor, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _own(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from part.named_parameters(recurse=False, remove_duplicate=False)
    yield from part.named_buffers(recurse=False, remove_duplicate=False)


def _few(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
