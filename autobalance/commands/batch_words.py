"""A batch in words: `input_ids=int64[8,128]` is a dict of one tensor."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_TENSOR = re.compile(r"(?:([A-Za-z_][\w.]*)\s*=\s*)?([a-z]+\d*)\s*\[\s*(\d+(?:\s*,\s*\d+)*)?\s*\]")
_SEPARATOR = re.compile(r"[\s,;]*")
# Short words for what torch calls otherwise.
_SHORT = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


def is_batch_in_words(text: str) -> bool:
    """Whether a text speaks of shapes, not of a function or a number of samples.

    Example:
        >>> is_batch_in_words("int64[8,128]"), is_batch_in_words("batches.py:make")
        (True, False)

    Args:
        text: what `--batch` was given.
    """
    return "[" in text


def batch_from_words(text: str) -> Any:
    """Tensors of zeros of the shapes that a text names.

    Zeros are a valid index, label and pixel, and memory that is never written takes no room.

    Example:
        >>> batch_from_words("input_ids=int64[8,128], labels=int64[8,128]")["labels"].shape
        torch.Size([8, 128])

    Args:
        text: NAME=DTYPE[SIZE,SIZE,...] for each tensor of a dict; without names one tensor, or a tuple of several.

    Returns:
        A dict where the tensors have names, a tensor where there is one without, a tuple where there are several.

    Raises:
        ValueError: the text is something else; the message says from where on.
    """
    named: dict[str, Tensor] = {}
    unnamed: list[Tensor] = []
    place = _skipped(text, 0)
    while place < len(text):
        match = _TENSOR.match(text, place)
        if match is None:
            raise ValueError(
                f"--batch {text!r} is not understood from {text[place:]!r} on: write NAME=DTYPE[SIZE,SIZE], such as "
                f"input_ids=int64[8,128], for each tensor"
            )
        name, dtype, sizes = match.groups()
        tensor = _zeros(dtype, [int(size) for size in (sizes or "").split(",") if size.strip()])
        if name is None:
            unnamed.append(tensor)
        else:
            named[name] = tensor
        place = _skipped(text, match.end())
    if named and unnamed:
        raise ValueError(f"--batch {text!r} names some tensors and not others: a batch is a dict or a tuple")
    if named:
        return named
    if not unnamed:
        raise ValueError("--batch is empty: write shapes such as input_ids=int64[8,128]")
    return unnamed[0] if len(unnamed) == 1 else tuple(unnamed)


def _skipped(text: str, place: int) -> int:
    match = _SEPARATOR.match(text, place)
    return place if match is None else match.end()


def _zeros(dtype: str, sizes: list[int]) -> Tensor:
    import torch

    known = getattr(torch, _SHORT.get(dtype, dtype), None)
    if not isinstance(known, torch.dtype):
        raise ValueError(
            f"torch has no data type {dtype!r}; write one of float32, float16, bfloat16, int64, int32, bool"
        )
    return torch.zeros(sizes, dtype=known, device="cpu")
