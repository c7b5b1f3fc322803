"""What a reader would not expect of a profile, in words."""

from __future__ import annotations

from collections.abc import Sequence

from autobalance.profiling.profile import Profile
from autobalance.units import format_size

_EXPECTED = ("weights", "gradients", "optimizer", "buffers")
_WORTH_TELLING = 0.05  # of the peak


def surprises(profile: Profile, most: int = 3) -> list[str]:
    """Sentences about what holds much of the peak and is no weight, gradient or optimizer state, the largest first.

    These are the bytes that a placement by weights does not see.

    Example:
        >>> surprises(profile)      # doctest: +SKIP
        ['head: addmm 8192x50257 holds 38% of the peak (1.53 GiB)']

    Args:
        profile: of a model.
        most: how many sentences.
    """
    told = [holder for holder in profile.holders if holder.what not in _EXPECTED and holder.share >= _WORTH_TELLING]
    return [
        f"{_where(holder.blocks)}: {_in_words(holder.what)} holds {holder.share:.0%} of the peak "
        f"({format_size(holder.nbytes)})"
        for holder in told[:most]
    ]


def _in_words(what: str) -> str:
    if what.startswith("_foreach_"):
        return "what the optimizer's step takes for all parameters at once (fused=True takes none, foreach=False less)"
    return what


def _where(blocks: Sequence[str]) -> str:
    if not blocks:
        return "outside the blocks (batch, loss, glue)"
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} … {blocks[-1]} ({len(blocks)} blocks)"


def certainty(profile: Profile) -> str:
    """How much of the peak is exact, modelled, or allowed for, in one line.

    Example:
        >>> certainty(profile)      # doctest: +SKIP
        'exact 3.10 GiB (tensors), modelled 41.0 MiB (inside kernels, by formula), allowance 0 bytes'

    Args:
        profile: of a model.
    """
    parts = profile.parts
    told = [f"exact {format_size(parts.exact)} (tensors)"]
    if parts.modelled:
        told.append(f"modelled {format_size(parts.modelled)} (inside kernels and libraries, by formula)")
    if parts.allowance:
        told.append(f"allowance {format_size(parts.allowance)} (inside kernels, as measured on other models)")
    return ", ".join(told)
