"""Some of the sequences of a packed batch, taken from its rows without padding any."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def sequences_between(packed: PackedSequence, start: int, stop: int) -> PackedSequence:
    """Some of the sequences of a packed batch, in their order.

    Which rows are theirs follows from numbers on the host, so that a device holds nothing for it but the rows
    themselves; `unpack_sequence` would pad the whole batch there.

    Example:
        >>> some = sequences_between(pack_sequence([torch.zeros(3), torch.zeros(2), torch.zeros(1)]), 1, 3)
        >>> [len(sequence) for sequence in unpack_sequence(some)]
        [2, 1]

    Args:
        packed: the batch.
        start, stop: from and up to which sequence, in the order in which they were packed.
    """
    device, sizes = packed.data.device, packed.batch_sizes
    places = torch.arange(start, stop)
    if packed.unsorted_indices is not None:
        places = packed.unsorted_indices[start:stop].cpu()
    lengths = _lengths(sizes)[places]
    order = None
    if packed.sorted_indices is not None:
        lengths, order = lengths.sort(descending=True, stable=True)
        places = places[order]
    steps = torch.arange(int(lengths[0]))
    is_there = lengths > steps[:, None]
    before = sizes.cumsum(0) - sizes
    rows = (before[steps, None] + places)[is_there]
    return PackedSequence(
        packed.data.index_select(0, rows.to(device)), is_there.sum(1), None if order is None else order.to(device)
    )


def _lengths(batch_sizes: Tensor) -> Tensor:
    """How long each sequence is, the longest first: at each step, so many are not at their end."""
    return (batch_sizes[:, None] > torch.arange(int(batch_sizes[0]))).sum(0)
