"""Long columns of whole numbers as short text: byte planes of the numbers or of their differences, compressed."""

from __future__ import annotations

import binascii
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence

import numpy as np

PLAIN, DIFFERENCES = "zlib", "zlib of differences"
# Bytes that a text may unpack to: a hundred million numbers, which no profile has.
_MOST = 8 * 10**8


def pack(numbers: Sequence[int]) -> str:
    """Text that stands for numbers.

    Layers of a model repeat, and so do their columns; numbers that rise from layer to layer have repeating differences.

    Example:
        >>> unpack(pack([512, 1024, 1536]))
        (512, 1024, 1536)

    Args:
        numbers: of 64 bits.
    """
    column = np.array(numbers, dtype=np.int64)
    kinds = {PLAIN: column, DIFFERENCES: np.diff(column, prepend=np.int64(0))}
    packed = {kind: zlib.compress(_planes(entries), 9) for kind, entries in kinds.items()}
    kind = min(packed, key=lambda kind: len(packed[kind]))
    return f"{kind}: {b64encode(packed[kind]).decode('ascii')}"


def unpack(text: str) -> tuple[int, ...]:
    """The numbers that a text stands for.

    Args:
        text: what `pack` returned.

    Raises:
        ValueError: it was not made by `pack`, or is damaged.
    """
    kind, _, encoded = text.partition(": ")
    if kind not in (PLAIN, DIFFERENCES):
        raise ValueError(f"starts neither with {PLAIN!r} nor with {DIFFERENCES!r}")
    try:
        reader = zlib.decompressobj()
        content = reader.decompress(b64decode(encoded, validate=True), _MOST)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"cannot be unpacked ({error})") from error
    if not reader.eof or reader.unused_data or len(content) % 8:
        raise ValueError("is cut off, or has something behind its end")
    planes = np.frombuffer(content, dtype=np.uint8).reshape(8, -1)
    column = np.ascontiguousarray(planes.T).view("<i8").ravel()
    numbers: list[int] = (np.cumsum(column) if kind == DIFFERENCES else column).tolist()
    return tuple(numbers)


def _planes(column: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bytes:
    """First all lowest bytes, then all next ones: high bytes are nearly all alike."""
    planes: bytes = column.astype("<i8").view(np.uint8).reshape(-1, 8).T.tobytes()
    return planes
