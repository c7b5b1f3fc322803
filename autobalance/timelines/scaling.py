"""Bytes as a function of the batch: traces of one step at several batch sizes, aligned event by event.

Scaling one profile as a whole is far off, since weights do not grow and activations do; each storage by itself lies on
a line through two traces, and a third one proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil

from autobalance.profiling.profile import Profile
from autobalance.profiling.timeline import Timeline

NOT_SCALED = "bytes as a function of the batch are not known"
"""How a note begins that says why."""


def other_sizes(batch_size: int) -> tuple[int, int]:
    """Batch sizes to trace beside `batch_size`: multiples, since many a step divides the batch into parts.

    Example:
        >>> other_sizes(1)
        (2, 3)

    Args:
        batch_size: samples in the batch that is traced.
    """
    return 2 * batch_size, 3 * batch_size


def with_batch_sizes(
    profile: Profile, batch_size: int, profile_at: Callable[[int], Profile], others: Sequence[int] | None = None
) -> Profile:
    """Teach a profile its bytes as a function of the batch.

    Where that function is not found, the profile stays as it is but for a note that says why.

    Example:
        >>> profile = with_batch_sizes(profile, 8, profile_at=lambda samples: trace(model, batch[:samples]))
        >>> profile.peak(batch_size=64)

    Args:
        profile: traced with `batch_size` samples.
        batch_size: samples.
        profile_at: traces the same step with so many samples.
        others: batch sizes to trace; the first gives the function, all further ones check it.

    Returns:
        The profile, which then can be scaled.
    """
    profile = replace(profile, batch_size=batch_size)
    chosen = tuple(others) if others is not None else other_sizes(batch_size)
    traced: list[Profile] = []
    for size in chosen:
        try:
            traced.append(profile_at(size))
        except Exception as error:  # whatever the user's step raises when its batch is another one
            reason = str(error).strip().split("\n")[0]
            return unscaled(profile, f"the step does not run with {size} samples ({type(error).__name__}: {reason})")
    timelines = [each.timeline for each in (profile, *traced)]
    try:
        timeline = lines_through(timelines, (batch_size, *chosen))
    except ValueError as error:
        return unscaled(profile, str(error)) if others is not None else _with_larger(profile, traced, profile_at, error)
    return replace(profile, timeline=timeline, other_blocks=traced[0].blocks, other_batch_size=chosen[0])


def _with_larger(
    profile: Profile, traced: Sequence[Profile], profile_at: Callable[[int], Profile], error: ValueError
) -> Profile:
    """A profile that knows larger batches by themselves, where its own takes another way through the step.

    Of one sample torch copies less, and some kernels take other ways from a number of rows on.
    """
    size = profile.batch_size
    known = {2 * size: traced[0], 3 * size: traced[1]}
    for first in (2, 3):
        sizes = [factor * size for factor in range(first, first + 3)]
        try:
            for each in sizes:
                known[each] = known.get(each) or profile_at(each)
            larger = lines_through([known[each].timeline for each in sizes], sizes)
        except ValueError:
            continue
        told = replace(profile, larger=(larger,), other_blocks=known[sizes[0]].blocks, other_batch_size=sizes[0])
        if size == 1:
            return told
        note = (
            f"batches of {sizes[0]} samples and more take another way through the step than {size} ({error}): bytes of "
            f"all batches above {size} are calculated from theirs, and those of smaller ones are not known"
        )
        return replace(told, notes=(*profile.notes, note))
    return unscaled(profile, str(error))


def unscaled(profile: Profile, reason: str) -> Profile:
    """The profile with a note that it holds for its own batch only.

    Example:
        >>> unscaled(profile, "the batch holds no tensor").notes[-1]
        'bytes as a function of the batch are not known: the batch holds no tensor'

    Args:
        profile: of one batch.
        reason: why nothing more is known, for the note.
    """
    return replace(profile, notes=(*profile.notes, f"{NOT_SCALED}: {reason}"))


def lines_through(timelines: Sequence[Timeline], sizes: Sequence[int]) -> Timeline:
    """The first timeline with the bytes of each storage as `fixed + per_sample * samples`.

    Example:
        >>> lines_through([at_8, at_16, at_24], [8, 16, 24]).scaled(64, granule=512)

    Args:
        timelines: of one step at several batch sizes, with exact bytes; two give the lines, all others check them.
        sizes: samples of each.

    Raises:
        ValueError: the steps differ by more than bytes, or bytes do not lie on lines; the text says where.
    """
    first = timelines[0]
    for timeline, size in zip(timelines[1:], sizes[1:], strict=True):
        difference = _difference(first, timeline)
        if difference:
            raise ValueError(f"with {size} samples the step does something else than with {sizes[0]}: {difference}")
    lines = [
        _line([timeline.fixed[storage] for timeline in timelines], sizes, storage, storage in first.scratch)
        for storage in range(len(first.fixed))
    ]
    return replace(first, fixed=tuple(line[0] for line in lines), per_sample=tuple(line[1] for line in lines))


def _line(seen: Sequence[int], sizes: Sequence[int], storage: int, is_scratch: bool) -> tuple[int, int]:
    """(fixed, per sample) bytes of a storage; for a kernel's scratch, of which the parts are rounded each by itself and
    only the sum is known, those of a line just above all that was seen."""
    if is_scratch:
        per_sample = -(-(seen[-1] - seen[0]) // (sizes[-1] - sizes[0]))
    else:
        per_sample = (seen[1] - seen[0]) // (sizes[1] - sizes[0])
    rests = [nbytes - per_sample * size for nbytes, size in zip(seen, sizes, strict=True)]
    if max(rests) - min(rests) <= (_ROUNDING if is_scratch else 0):
        return max(rests), per_sample
    if (above := _line_above(seen, sizes)) is not None:
        return above
    told = ", ".join(f"{nbytes} bytes with {size} samples" for nbytes, size in zip(seen, sizes, strict=True))
    raise ValueError(
        f"storage {storage} does not grow evenly: {told}. Steps that compare the samples of a batch with one another, "
        f"as contrastive losses do, make such tensors"
    )


def _line_above(seen: Sequence[int], sizes: Sequence[int]) -> tuple[int, int] | None:
    """(fixed, per sample) bytes just above a line whose slope is no whole number, such as that of what a mask selects;
    None if what was seen is on no line."""
    if len(sizes) < 3:
        return None
    slope = Fraction(seen[-1] - seen[0], sizes[-1] - sizes[0])
    rests = [nbytes - slope * size for nbytes, size in zip(seen, sizes, strict=True)]
    if max(rests) - min(rests) > _ELEMENT:
        return None
    return ceil(max(rests)), ceil(slope)


_ELEMENT = 8
"""Bytes by which what grows by parts of elements may stray from a line: the widest element."""
_ROUNDING = 16 * 512
"""Bytes by which a kernel's scratch may stray from a line: a granule of CUDA's allocator for each of its parts."""


def _difference(one: Timeline, other: Timeline) -> str:
    """In which way two steps differ by more than bytes; empty where they do not."""
    if len(one.fixed) != len(one.sizes) or len(other.fixed) != len(other.sizes):
        return "a trace lacks the exact bytes"
    if len(one.sizes) != len(other.sizes):
        return f"{len(other.sizes)} storages instead of {len(one.sizes)}"
    columns = {
        "is charged to another owner": (one.owners, other.owners),
        "shares its tensor with others": (one.values, other.values),
        "is part of another tensor": (one.wholes, other.wholes),
    }
    for what, (here, there) in columns.items():
        if len(here) != len(there):
            return "parts of tensors are copied"
        if here != there:
            storage = next(index for index, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1])
            return f"storage {storage} {what}"
    if one.events != other.events:
        at = next((at for at, pair in enumerate(zip(one.events, other.events, strict=False)) if pair[0] != pair[1]), -1)
        return f"births and deaths come in another order from event {at} on"
    if [position for _, position in one.marks] != [position for _, position in other.marks]:
        return "its phases begin elsewhere"
    if one.emptied != other.emptied:
        return "cached memory is given back elsewhere"
    if one.scratch != other.scratch:
        return "kernels take other scratch memory"
    return ""
