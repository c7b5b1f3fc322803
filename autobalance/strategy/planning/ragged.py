"""Plans for batches whose parts only the user's `split_batch`, or the batch itself, tells: graphs, packed sequences.

How many bytes a part takes follows from no number of samples, so the parts themselves are profiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autobalance.compat import is_batch_norm, transferred_batch
from autobalance.devices.device import Device
from autobalance.errors import InfeasiblePlanError
from autobalance.execution.batch_norm import FEWEST_SAMPLES
from autobalance.execution.batches.host_parts import HostParts
from autobalance.execution.batches.splitting import parts_of
from autobalance.execution.equivalence.few_samples import Portion, slices
from autobalance.partitioning.chains.policies import NEARLY
from autobalance.partitioning.plan import Plan
from autobalance.placement.contents import elements_in, untouchable
from autobalance.profiling.copying import copy_module
from autobalance.profiling.profile import Profile
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.trial import Batch
from autobalance.strategy.options import Options
from autobalance.strategy.parts.room_for_test import FEWEST
from autobalance.strategy.planning.checked import checked_plan, searched
from autobalance.strategy.registration import lightning_root
from autobalance.strategy.summary import tell
from autobalance.strategy.trials.stand_ins import TrialTrainer

_HOST = torch.device("cpu")
_MOST_PER_DEVICE = 8
"""Parts beyond which none gain time, for each device."""


@dataclass(frozen=True)
class _Way:
    """One way to take batches: what traces them, the profile of what runs at once, and the best plan for it."""

    profiler: Profiler
    profile: Profile
    options: Options
    plan: Plan

    @property
    def is_timed(self) -> bool:
        return self.plan.objective == "step time"


def host_twin(trainer: Any) -> Any:
    """A copy of the module that shares its weights, for the user's hooks on batches to run on the host and leave no
    trace.

    Args:
        trainer: a Trainer inside `fit`, `validate`, `test` or `predict`.
    """
    package = lightning_root(trainer)
    assert package is not None
    stand_in = TrialTrainer(trainer, package)
    twin, _ = copy_module(trainer.lightning_module, lambda tensor: tensor, {id(trainer): stand_in})
    stand_in.begin(twin, _HOST)
    return twin


def on_host(twin: Any, batch: Batch) -> Any:
    """A batch as a step is given it, but on the host: after the precision's casts and the user's hooks.

    Args:
        twin: by `host_twin`.
        batch: as the loader gives it.
    """
    data = twin.trainer.precision_plugin.convert_input(untouchable(batch.data))
    return transferred_batch(twin, data, _HOST, batch.loader)


def plan_in_parts(
    trainer: Any, twin: Any, profiler: Profiler, profile: Profile, devices: Sequence[Device], options: Options
) -> Plan | str:
    """The best plan for a batch of which only parts themselves tell what they take.

    Args:
        trainer: a Trainer inside `fit`, `validate`, `test` or `predict`.
        twin: by `host_twin`.
        profiler: of the run's batches.
        profile: of the run's batches as they are.
        devices: what there is.
        options: how to plan.

    Returns:
        The plan; or why there is none with parts, in words.

    Raises:
        InfeasiblePlanError: if no plan fits.
    """
    asked = options.micro_batches
    if isinstance(asked, int):
        cut = _cut(twin, profiler, options, asked)
        made = _made(cut)
        if made == 1:
            return _not_as_many(cut, asked)
        if made < asked:
            tell(trainer, f"{_not_as_many(cut, asked)}: this is how many micro-batches there are.")
        part = _profile_of_part(cut)
        return checked_plan(cut, part, devices, replace(options, micro_batches=made))
    ways, refused = _ways(twin, profiler, profile, devices, options)
    if not ways and not refused:
        return _not_as_many(_cut(twin, profiler, options, 2), 2)
    for way in _best_first(ways):
        try:
            return checked_plan(way.profiler, way.profile, devices, way.options)
        except InfeasiblePlanError as error:
            refused.append(error)
    raise min(refused, key=_shortage)


def _ways(
    twin: Any, profiler: Profiler, profile: Profile, devices: Sequence[Device], options: Options
) -> tuple[list[_Way], list[InfeasiblePlanError]]:
    """Whole batches, and twice as many parts each time as long as that gains; beside them why others do not fit."""
    found: list[_Way] = []
    refused: list[InfeasiblePlanError] = []

    def try_way(profiler: Profiler, profile: Profile, options: Options) -> None:
        try:
            found.append(_Way(profiler, profile, options, searched(profile, devices, options)))
        except InfeasiblePlanError as error:
            refused.append(error)

    if options.schedule == "auto":
        try_way(profiler, profile, options.whole)
    made = 1
    while not _is_enough(found, made, _MOST_PER_DEVICE * len(devices)):
        cut = _cut(twin, profiler, options, 2 * made)
        if _made(cut) <= made:
            break
        made = _made(cut)
        try_way(cut, _profile_of_part(cut), replace(options, micro_batches=made))
    return found, refused


def _shortage(error: InfeasiblePlanError) -> int:
    """Bytes that are missing on all devices together."""
    return sum(max(0, need - budget) for need, budget in zip(error.need, error.budget, strict=True))


def _is_enough(found: Sequence[_Way], made: int, most: int) -> bool:
    """Whether more parts gain no time. Where nothing but memory is compared, the fewest that fit are best."""
    if not found:
        return False
    *before, last = found
    return not last.is_timed or made >= most or any(last.plan.value > way.plan.value for way in before)


def _best_first(ways: Sequence[_Way]) -> list[_Way]:
    """By time; of those that take nearly the least, the one first whose fullest device is least full."""
    least = min((way.plan.value for way in ways), default=0.0)

    def rank(way: _Way) -> tuple[bool, float]:
        is_near = way.plan.value <= (1 + NEARLY) * least
        return not is_near, max(way.plan.uses) if is_near else way.plan.value

    return sorted(ways, key=rank)


def _cut(twin: Any, profiler: Profiler, options: Options, count: int) -> Profiler:
    """The same for batches in parts."""
    return replace(profiler, batches=[_in_parts(twin, batch, options, count) for batch in profiler.batches])


def _made(cut: Profiler) -> int:
    """Parts of the first batch, which may be fewer than were asked for."""
    first = cut.batches[0].in_parts
    assert first is not None
    return len(first.parts.sizes)


def _not_as_many(cut: Profiler, asked: int) -> str:
    """How many parts there are of the first batch, in words."""
    first, made = cut.batches[0], _made(cut)
    parts = f"{made} part{'s' * (made != 1)}"
    if first.in_parts is not None and first.in_parts.parts.is_by_hook:
        return f"`split_batch` makes {parts} of the {first.name}, not {asked}"
    return f"the {first.name} has samples for {parts}, not {asked}"


def _in_parts(twin: Any, batch: Batch, options: Options, count: int) -> Batch:
    whole = on_host(twin, batch)
    defers = batch.kind == "train" and options.batch_norm == "deferred"
    has_norms = defers and any(is_batch_norm(part) and part.training for part in twin.modules())
    parts = parts_of(twin, whole, count, fewest=FEWEST_SAMPLES if has_norms else 1)
    few = None
    if max(parts.sizes) < FEWEST and len(parts.sizes) > 1:
        few = max(slices(twin, whole, None, FEWEST, Portion.of(parts)), key=elements_in)
    return replace(batch, in_parts=HostParts(whole, parts, few))


def _profile_of_part(cut: Profiler) -> Profile:
    """What the largest parts take; its batch stays the whole."""
    found = cut.profile()
    first = cut.batches[0].in_parts
    assert first is not None
    most, whole = elements_in(first.largest), elements_in(first.whole)
    note = (
        f"a batch is split as it says itself, or `split_batch` does; planned for parts as large as the largest of "
        f"{len(first.parts.sizes)}, which has {most:,} of {whole:,} elements"
    )
    largest = max(elements_in(batch.in_parts.largest) for batch in cut.batches if batch.in_parts is not None)
    return replace(found, part_elements=max(1, largest), notes=(*found.notes, note))
