"""What tells one model, batch, optimizer and precision from another, as a short text."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autobalance.profiling.profile import Profile

_LENGTH = 16


def fingerprint_of(profile: Profile) -> str:
    """Short text that differs where the structure of the model, the batch, the optimizer or the precision do.

    Bytes and seconds that a newer trace finds otherwise do not change it: the names, classes and weights of the blocks
    do.

    Example:
        >>> fingerprint_of(profile)
        '0f3c8a1b9d5e7f21'

    Args:
        profile: of a model.
    """
    blocks = [(block.name, block.kind, block.weights, block.buffers) for block in profile.blocks]
    content = [blocks, profile.batch, profile.training, profile.precision, profile.optimizers, profile.together]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:_LENGTH]
