"""What tells one model, batch, optimizer and precision from another, as a short text."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autobalance.profiling.profile import Profile

_LENGTH = 16
_BETWEEN = "; "


def fingerprint_of(profile: Profile) -> str:
    """Short text that differs where the structure of the model, the batch, the optimizer or the precision do.

    Its parts can be told apart, so that who finds two texts that differ can say in what. Bytes and seconds that a newer
    trace finds otherwise do not change it: the names, classes and weights of the blocks do.

    Example:
        >>> fingerprint_of(profile)
        'model=0f3c8a1b9d5e7f21; batch=x=float32[8,3]; step=training; optimizer=AdamW; precision=32-true'

    Args:
        profile: of a model.
    """
    blocks = [(block.name, block.kind, block.weights, block.buffers) for block in profile.blocks]
    digest = hashlib.sha256(json.dumps([blocks, profile.together]).encode()).hexdigest()
    parts = {
        "model": digest[:_LENGTH],
        "batch": profile.signature or profile.batch,
        "step": "training" if profile.training else "inference",
        "optimizer": ", ".join(profile.optimizers) or "none",
        "precision": profile.precision,
    }
    return _BETWEEN.join(f"{name}={text.replace(_BETWEEN, ', ')}" for name, text in parts.items())


def parts_of(fingerprint: str) -> dict[str, str]:
    """The parts of a fingerprint by name; of another text, none.

    Example:
        >>> parts_of("model=0f3c; step=training")["step"]
        'training'

    Args:
        fingerprint: as `fingerprint_of` makes it.
    """
    pairs = (part.partition("=") for part in fingerprint.split(_BETWEEN))
    return {name: text for name, equals, text in pairs if equals}


def differences(fingerprint: str, other: str) -> dict[str, tuple[str, str]]:
    """The parts in which two fingerprints differ.

    Example:
        >>> differences("model=0f3c; step=training", "model=0f3c; step=inference")
        {'step': ('training', 'inference')}

    Args:
        fingerprint: one.
        other: the other; nothing differs from an empty one.

    Returns:
        What each says, by the name of the part.
    """
    here, there = parts_of(fingerprint), parts_of(other)
    return {name: (here[name], there[name]) for name in here if name in there and here[name] != there[name]}
