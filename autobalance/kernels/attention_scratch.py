"""Memory that attention kernels take inside.

Sources in aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp (mha_fwd, set_params_splitkv,
num_splits_heuristic, mha_bwd), attention_backward.cu (_flash_attention_backward, _efficient_attention_backward),
mem_eff_attention/kernel_forward.h (kNeedsOutputAccumulatorBuffer), kernel_backward.h (workspace_size) and
kernels/cutlassB.h (the kernels in the order of their trial).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autobalance.kernels import table
from autobalance.kernels.bytes import FLOAT, buffer, copied, rounded, up
from autobalance.kernels.target import Target

_HALF = (torch.float16, torch.bfloat16)
_ROWS_OF_QUERIES = 128
_MOST_SPLITS = 128
_WIDEST_IN_REGISTERS = 128


def flash_forward(
    target: Target,
    release: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    *rest: Any,
    **options: Any,
) -> int:
    """Partial results of a forward that splits the keys, which it does where there is too little else to share out.

    Args:
        target, release: whose kernel it is, and of which torch.
        query, key, value: `[batch, heads, length, width]`.
        dropout: rate.
        rest, options: further arguments of the operator.

    Returns:
        Bytes.
    """
    batch, heads, queries, head = query.shape
    keys = key.shape[2]
    tile = 256 if head <= 64 else (128 if head <= 128 else 64)
    shares = batch * heads * math.ceil(queries / 64)
    splits = _splits(shares, 2 * table.PROCESSORS.value(target, release), math.ceil(keys / tile))
    if dropout > 0 or splits <= 1:
        return 0
    scores = (splits, batch, heads, queries)
    return buffer(scores, FLOAT) + buffer((*scores, _wide_head(head)), FLOAT)


def _splits(shares: int, processors: int, tiles: int) -> int:
    """Into how many parts flash attention splits the keys: the fewest that keep the GPU about as busy as the best."""
    if shares >= 0.8 * processors:
        return 1
    candidates = range(1, min(_MOST_SPLITS, processors, tiles) + 1)
    eligible = [n for n in candidates if n == 1 or math.ceil(tiles / n) != math.ceil(tiles / (n - 1))]
    busy = {n: shares * n / processors / math.ceil(shares * n / processors) for n in eligible}
    best = max(busy.values(), default=0.0)
    return next((n for n in eligible if busy[n] >= 0.85 * best), 1)


def _wide_head(head: int) -> int:
    return up(head, 32 if head <= 128 else 64)


def flash_backward(
    target: Target,
    release: tuple[int, int],
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    *rest: Any,
    **options: Any,
) -> int:
    """The queries' gradient in float32, a number for each row, and with fewer key heads the gradients of each head.

    Args:
        target, release: whose kernel it is, and of which torch.
        gradient, query, key, value, out: `[batch, heads, length, width]`.
        rest, options: further arguments of the operator.

    Returns:
        Bytes.
    """
    batch, heads, queries, head = query.shape
    rows = up(queries, _ROWS_OF_QUERIES)
    parts = 1
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        parts = math.ceil(table.PROCESSORS.value(target, release) / (batch * heads))
    taken = buffer((batch, heads, rows), FLOAT) + buffer((parts, batch, rows, heads, _wide_head(head)), FLOAT)
    if key.shape[1] != heads:
        taken += 2 * buffer((batch, key.shape[2], heads, head), key.itemsize)
    return taken + copied(gradient.transpose(1, 2)) + copied(out.transpose(1, 2))


def cudnn_backward(target: Target, release: tuple[int, int], *args: Any, **options: Any) -> int:
    """As flash attention's: cuDNN does not say how it uses the workspace that it asks for.

    Args:
        target, release: whose kernel it is, and of which torch.
        args, options: arguments of the operator.

    Returns:
        Bytes.
    """
    return flash_backward(target, release, *args, **options)


@dataclass(frozen=True)
class Tiles:
    """One compiled kernel of the efficient backward.

    Attributes:
        queries, keys: rows of a tile.
        head: the widest head.
        needs_large_memory: whether only a GPU with much shared memory runs it.
    """

    queries: int
    keys: int
    head: int
    needs_large_memory: bool = False


_WIDEST = 65536
_SMALL = (Tiles(64, 64, 32), Tiles(64, 64, 64))
_AMPERE_HALF = (
    *_SMALL,
    Tiles(128, 128, 128, needs_large_memory=True),
    Tiles(64, 64, 128),
    Tiles(128, 64, _WIDEST, needs_large_memory=True),
    Tiles(64, 64, _WIDEST),
)
_AMPERE_FLOAT = (
    *_SMALL,
    Tiles(128, 64, 128, needs_large_memory=True),
    Tiles(64, 64, 128),
    Tiles(128, 64, _WIDEST, needs_large_memory=True),
    Tiles(64, 64, _WIDEST),
)
_OLD_FLOAT = (*_SMALL, Tiles(64, 64, 128), Tiles(64, 64, _WIDEST))
_OLD_HALF = _AMPERE_FLOAT


def _tiles(target: Target, release: tuple[int, int], kind: torch.dtype, head: int) -> Tiles:
    ampere = target.capability >= (8, 0)
    kernels: tuple[Tiles, ...] = _AMPERE_FLOAT if ampere else _OLD_FLOAT
    if kind in _HALF:
        kernels = _AMPERE_HALF if ampere else _OLD_HALF
    large = table.SHARED_MEMORY.value(target, release)
    return next(tiles for tiles in kernels if tiles.head >= head and (large or not tiles.needs_large_memory))


def efficient_forward(
    target: Target, release: tuple[int, int], query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any
) -> int:
    """The result in float32, where heads are too wide for registers and the result is of half precision.

    Args:
        target, release: whose kernel it is, and of which torch.
        query, key, value: `[batch, heads, length, width]`.
        rest, options: further arguments of the operator.

    Returns:
        Bytes.
    """
    batch, heads, queries, head = query.shape
    of_value = value.shape[-1]
    if query.dtype not in _HALF or max(head, of_value) <= _WIDEST_IN_REGISTERS:
        return 0
    return buffer((batch, queries, heads, of_value), FLOAT)


def efficient_backward(
    target: Target,
    release: tuple[int, int],
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *rest: Any,
    **options: Any,
) -> int:
    """A number for each row, the workspace, and with fewer key heads the gradients of each head.

    Args:
        target, release: whose kernel it is, and of which torch.
        gradient, query, key, value, out: `[batch, heads, length, width]`.
        bias: added to the scores, if any.
        rest, options: further arguments of the operator.

    Returns:
        Bytes.
    """
    batch, heads, queries, head = query.shape
    of_value = value.shape[-1]
    half = query.dtype in _HALF
    rows = buffer((batch, heads, queries), FLOAT)
    products = 0 if half else buffer((batch, queries, heads, of_value), FLOAT)
    tiles = _tiles(target, release, query.dtype, max(head, of_value))
    taken = max(products + rows, rows + _workspace(tiles, half, query, key, of_value))
    if key.shape[1] != heads:
        taken += buffer((batch, key.shape[2], heads, head), key.itemsize)
        taken += buffer((batch, key.shape[2], heads, of_value), value.itemsize)
    return taken + copied(gradient.transpose(1, 2))


def _workspace(tiles: Tiles, half: bool, query: Tensor, key: Tensor, of_value: int) -> int:
    """Bytes of `workspace_size`: tiles of the queries' gradient with their locks, and of keys' and values' where those
    of a whole head do not fit into registers."""
    batch, heads, queries, head = query.shape
    splits = _key_splits(tiles, batch * heads, key.shape[2], spills := half and tiles.head > tiles.queries)
    of_queries = math.ceil(queries / tiles.queries) * math.ceil(head / tiles.keys) * (4 + tiles.queries * tiles.keys)
    of_keys = sum(splits * tiles.keys * up(width, tiles.queries) for width in (head, of_value)) if spills else 0
    return rounded(batch * heads * up(of_queries + of_keys, 4) * FLOAT)


def _key_splits(tiles: Tiles, heads: int, keys: int, spills: bool) -> int:
    splits = math.ceil(keys / tiles.keys)
    if heads >= 256 and keys <= 2 * tiles.keys:
        splits = 1
    if spills:
        splits = min(splits, 200 // heads)
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        splits = 1
    return max(splits, 1)
