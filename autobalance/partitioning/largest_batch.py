"""The largest batch that fits: what a balanced split is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autobalance.devices.device import Device
from autobalance.errors import InfeasiblePlanError
from autobalance.profiling.profile import Profile
from autobalance.profiling.required import require_profile

if TYPE_CHECKING:
    from autobalance.partitioning.plan import Plan

# A batch so many times as large as the one that was traced is none that memory limits.
_MOST = 2**20


def largest_batch(
    profile: Profile,
    devices: str | Sequence[int | float | str | Device] | None = None,
    *,
    micro_batches: int = 1,
    schedule: str = "auto",
    **options: Any,
) -> int:
    """The most samples of a batch for which there is a plan.

    Memory grows with the batch, so that doubling finds a batch that is too large, and halving the rest finds the last
    that is not.

    Example:
        >>> largest_batch(profile, "4x24GiB", policy="balanced_low_0")
        48

    Args:
        profile: of a step whose bytes are known for any batch: made with `scalable=True`, or with
            `from_costs(batch_size=...)`.
        devices: as for `plan`.
        micro_batches: parts that the batch is run in. It is not chosen here, for with enough of them, one after the
            other, nearly any batch fits.
        schedule: as for `plan`.
        **options: of `plan`: policy, max_memory, reserve, pin, recompute, offload, excess, accumulated.

    Returns:
        Samples; 0 where not even one fits, or `micro_batches` of them.

    Raises:
        ValueError: the profile holds for its own batch only, memory does not limit the batch, or as for `plan`.
    """
    from autobalance.partitioning.search import plan

    require_profile(profile, "largest_batch")
    if options.get("policy", "auto") == "auto":
        options["policy"] = "balanced"  # which finds a plan for the same batches, sooner
    if not profile.batch_size:
        profile.scaled(1)  # says why it cannot be

    def fits(samples: int) -> bool:
        try:
            plan(
                profile.scaled(samples),
                devices,
                micro_batches=micro_batches,
                schedule=schedule,
                cache=False,
                **options,
            )
        except InfeasiblePlanError:
            return False
        return True

    least = 1 if options.get("accumulated") else micro_batches
    return last_that_fits(fits, least=least, start=max(profile.batch_size, least))


def largest_batch_of(plan: Plan) -> int:
    """The largest batch that fits when it is split by the question that a plan answers, in as many parts.

    Example:
        >>> largest_batch_of(autobalance.plan(profile, "4x24GiB"))
        48

    Args:
        plan: made in this process.

    Returns:
        Samples, as for `largest_batch`.

    Raises:
        ValueError: the plan was read from a file, where its profile is not; or as for `largest_batch`.
    """
    if plan.profile is None:
        raise ValueError(
            "this plan was read from a file or made by hand, so the profile it was made from is not there: load that "
            "profile, and ask a plan made from it, autobalance.plan(profile, devices).max_batch()"
        )
    asked: Mapping[str, Any] = {
        name: value
        for name, value in plan.question.items()
        if name not in ("profile", "devices", "cache", "micro_batches", "schedule")
    }
    return largest_batch(
        plan.profile, list(plan.devices), micro_batches=plan.micro_batches, schedule=plan.schedule, **asked
    )


def last_that_fits(fits: Callable[[int], bool], least: int, start: int) -> int:
    """The largest number for which something holds that holds for all smaller ones, too.

    Example:
        >>> last_that_fits(lambda samples: samples <= 100, least=1, start=8)
        100

    Args:
        fits: what holds.
        least: the smallest number that makes sense.
        start: where to begin to look, `least` or more.

    Returns:
        The number; 0 where it does not even hold for `least`.

    Raises:
        ValueError: it holds for numbers a million times as large as `start`.
    """
    good, bad = 0, start
    while fits(bad):
        good, bad = bad, 2 * bad
        if bad > _MOST * start:
            raise ValueError(
                f"a batch of {good:,} samples still fits: hardly a byte of the step depends on the batch, so memory "
                f"does not limit it"
            )
    while not good:
        if bad == least:
            return 0
        smaller = max(least, bad // 2)
        if fits(smaller):
            good = smaller
        else:
            bad = smaller
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good
