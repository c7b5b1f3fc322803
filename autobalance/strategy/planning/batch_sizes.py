"""What a run takes with parts of its batches: the profile of its batches as a function of their samples."""

from __future__ import annotations

from dataclasses import replace

from autobalance.profiling.batches import samples_in, with_samples
from autobalance.profiling.profile import Profile
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.trial import Batch
from autobalance.timelines.scaling import unscaled, with_batch_sizes


def for_any_batch(profiler: Profiler, profile: Profile) -> Profile:
    """The run's profile with its bytes as a function of the first batch, which in `fit` is the training batch.

    Batches of other loaders grow and shrink with it. Where their bytes then lie on no line (100 samples beside 64 are
    no whole number of them for each), they are counted as they are.

    Example:
        >>> for_any_batch(profiler, profiler.profile()).scaled(4).peak()     # doctest: +SKIP

    Args:
        profiler: that made the profile.
        profile: of the run's batches as they are.

    Returns:
        The profile; where the function is not found, with a note that says why.
    """
    first, *others = profiler.batches
    try:
        samples = samples_in(first.data)
    except ValueError as error:
        return unscaled(profile, str(error))

    def known(*, others_grow: bool) -> Profile:
        def profile_at(size: int) -> Profile:
            beside = [_times(batch, size // samples) for batch in others] if others_grow else others
            return replace(profiler, batches=[_times(first, size // samples), *beside]).profile()

        return with_batch_sizes(profile, samples, profile_at)

    found = known(others_grow=True)
    return found if found.is_scalable or not others else known(others_grow=False)


def _times(batch: Batch, factor: int) -> Batch:
    """A batch with several times its samples."""
    return replace(batch, data=with_samples(batch.data, factor * samples_in(batch.data)))
