"""The signature of a batch: names, types and shapes of its tensors, as a short text that people can read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# A batch of more tensors, such as a list of graphs, is told by the first ones and the elements of all others.
_SHOWN = 8
_SHAPE = re.compile(r"\[([\d,]*)\]")
_REST = re.compile(r"(\d+) more of (\d+) elements")
BETWEEN_BATCHES = " | "


def signature_of(batch: Any) -> str:
    """Names, types and shapes of the tensors of a batch.

    Example:
        >>> signature_of({"input_ids": torch.zeros(8, 128, dtype=torch.int64)})
        'input_ids=int64[8,128]'

    Args:
        batch: tensors in any nesting of mappings, sequences and dataclasses.
    """
    tensors = list(_tensors(batch, ""))
    words = [f"{name}={_shape(tensor)}" if name else _shape(tensor) for name, tensor in tensors[:_SHOWN]]
    rest = [tensor.numel() for _, tensor in tensors[_SHOWN:]]
    if rest:
        words.append(f"{len(rest)} more of {sum(rest)} elements")
    return ", ".join(words)


def elements_of(signature: str) -> int:
    """Elements of all tensors of the largest batch in a signature; 0 where it tells of none.

    Example:
        >>> elements_of("x=float32[8,3], y=int64[8]")
        32

    Args:
        signature: of one batch, or of several.
    """
    return max(map(_elements, signature.split(BETWEEN_BATCHES)))


def resized(signature: str, samples: int, other: int) -> str:
    """The signature of the same batch with another number of samples.

    Example:
        >>> resized("x=float32[8,3], y=int64[8]", 8, 64)
        'x=float32[64,3], y=int64[64]'

    Args:
        signature: of batches of `samples`.
        samples: first dimension of the tensors that depend on it.
        other: what becomes of it.
    """
    return re.sub(rf"\[{samples}(?=[,\]])", f"[{other}", signature)


def _elements(signature: str) -> int:
    shapes = _SHAPE.findall(signature)
    rest = _REST.search(signature)
    known = sum(prod(int(size) for size in shape.split(",") if size) for shape in shapes)
    return known + (int(rest[2]) if rest else 0)


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of what a batch holds, in its own order, each tensor once for every place that holds it."""
    from torch import Tensor

    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}.{index}" if name else str(index))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name), f"{name}.{field.name}" if name else field.name)
