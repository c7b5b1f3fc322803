"""`score`: anybody's assignment, judged by the same replay as our own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autobalance.devices.device import Device
from autobalance.devices.words import parse_devices
from autobalance.partitioning.agreement import refuse_other_profile
from autobalance.partitioning.budgets import budgets_of
from autobalance.partitioning.judge import judge, launched
from autobalance.partitioning.micro_profiles import micro_profile
from autobalance.partitioning.plan import Plan, relative_use
from autobalance.partitioning.replay import replay_allocator
from autobalance.partitioning.stage import Stage
from autobalance.partitioning.times import optimizer_seconds
from autobalance.partitioning.transfers import crossings_of
from autobalance.profiling.profile import BlockCost, Profile
from autobalance.profiling.required import require_profile
from autobalance.schedules.launches import launch_order


@dataclass(frozen=True)
class Score:
    """How good an assignment is.

    Example:
        >>> autobalance.score(profile, {"layers": 0, "head": 1}, "2x80GiB").fits

    Attributes:
        assignment: device index per block, in call order.
        root: device index of batch, loss and metrics.
        peaks: most bytes at once on each device.
        budgets: bytes that each device may hold.
        step_time: predicted seconds of the forwards and backwards of one step.
        notes: what a reader should know.
        stages: consecutive blocks on one device, with their times and what they receive for each micro-batch.
        transferred: bytes that go from device to device in one step, gradients included.
        optimizer_times: seconds of the optimizer's step on each device.
        reserved: bytes that the caching allocator of each device takes for these peaks; empty where that was not asked.
        micro_batches: parts that the batch is split into.
        schedule: order in which they run.
    """

    assignment: tuple[int, ...]
    root: int
    peaks: tuple[int, ...]
    budgets: tuple[int, ...]
    step_time: float
    notes: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    transferred: int = 0
    optimizer_times: tuple[float, ...] = ()
    reserved: tuple[int, ...] = ()
    micro_batches: int = 1
    schedule: str = "naive"

    @property
    def fits(self) -> bool:
        """Whether every peak is within its budget."""
        return all(peak <= budget for peak, budget in zip(self.peaks, self.budgets, strict=True))

    @property
    def uses(self) -> tuple[float, ...]:
        """Peak / budget of every device."""
        return tuple(relative_use(peak, budget) for peak, budget in zip(self.peaks, self.budgets, strict=True))


def score(
    profile: Profile,
    device_map: Mapping[str, int | str] | Sequence[int] | Plan,
    devices: str | Sequence[int | float | str | Device] | None = None,
    *,
    max_memory: Mapping[int | str, int | str] | None = None,
    reserve: str | float = "auto",
    root: int | None = None,
    micro_batches: int = 1,
    schedule: str = "naive",
    reserved: bool = False,
) -> Score:
    """Judge an assignment: peak per device, whether it fits, time of a step, bytes that move.

    Example:
        >>> autobalance.score(profile, {"embed": 0, "layers": 1, "head": 1}, "2x80GiB").peaks

    Args:
        profile: what the blocks cost.
        device_map: name -> device, as accelerate has it: the name of a block, of a module that contains blocks (`""`
            for all), or of all parts of a block; the device is a position in `devices` or a name that ends in one, such
            as `"cuda:1"`. Or one position for each block, in call order; or a plan, of which the assignment and, where
            nothing else is said, devices, root, schedule and micro-batches are taken.
        devices: as for `plan`.
        max_memory: as for `plan`.
        reserve: as for `plan`.
        root: position of the device of batch and loss; None: that of the last block.
        micro_batches: parts that the batch is split into; their last may be smaller.
        schedule: `"naive"` (for the whole batch at once), `"gpipe"`, `"1f1b"` or `"looped"`.
        reserved: whether the caching allocators are replayed too, which takes seconds for many micro-batches.

    Raises:
        TypeError: a map or a profile of another type.
        ValueError: a plan for another model, batch, optimizer or precision; a block without a device, on `"cpu"` or
            `"disk"`, or split over devices; more micro-batches than samples, or of a profile that cannot be scaled;
            allocators of a profile whose devices have none.
    """
    require_profile(profile, "score")
    notes: list[str] = []
    if isinstance(device_map, Plan):
        refuse_other_profile(device_map, profile)
        devices = device_map.devices if devices is None else devices
        root = device_map.root if root is None else root
        if (micro_batches, schedule) == (1, "naive"):
            micro_batches, schedule = device_map.micro_batches, device_map.schedule
        if set(device_map.saving) - {"keep"}:
            notes.append("what the plan recomputes or offloads is kept on its device here")
        device_map = device_map.assignment
    given: object = device_map
    if isinstance(given, str) or not isinstance(given, Collection):
        raise TypeError(f"device_map is a mapping from names to devices, or a device for each block, not {given!r}")
    targets = parse_devices(devices)
    if isinstance(device_map, Mapping):
        odd = [name for name in device_map if not isinstance(name, str)]
        if odd:
            raise TypeError(f"device_map has the key {odd[0]!r}; its keys are names of modules")
        places = {name: _position(name, place, len(targets)) for name, place in device_map.items()}
        assignment = tuple(_device_of(block, places) for block in profile.blocks)
        unused = [name for name in places if not _concerns(name, profile)]
        if unused:
            notes.append(f"names that are no block and not loose do not count: {', '.join(unused)}")
    else:
        if len(device_map) != len(profile.blocks):
            raise ValueError(f"{len(device_map)} devices are given for {len(profile.blocks)} blocks")
        assignment = tuple(
            _position(block.name, place, len(targets)) for block, place in zip(profile.blocks, device_map, strict=True)
        )
    for group in profile.together:
        if len({assignment[block] for block in group}) > 1:
            names = ", ".join(profile.names[block] for block in group)
            notes.append(f"{names} must share a device; what they share is counted once, with its owner")
    home = assignment[-1] if root is None else _position("root", root, len(targets))
    part = _micro_batch(profile, micro_batches, schedule)
    judged = judge(part, assignment, home, targets, crossings_of(part), schedule=schedule, micro_batches=micro_batches)
    return Score(
        assignment,
        home,
        judged.peaks,
        budgets_of(targets, max_memory, reserve),
        judged.seconds,
        tuple(notes),
        judged.stages,
        micro_batches * sum(stage.received for stage in judged.stages),
        optimizer_seconds(profile, assignment, targets),
        _reserved(part, judged.stages, schedule, micro_batches, home, len(targets)) if reserved else (),
        micro_batches,
        schedule,
    )


def _reserved(
    profile: Profile, stages: Sequence[Stage], schedule: str, micro_batches: int, root: int, devices: int
) -> tuple[int, ...]:
    if profile.granule == 1:
        raise ValueError(
            f"the profile is of {profile.target!r}, which has no caching allocator that reserves memory; leave out "
            f"reserved=True, or make the profile with target='cuda'"
        )
    places = [stage.device for stage in stages]
    order = launch_order(schedule, len(stages), micro_batches, devices=places, training=profile.training)
    assignment = [stage.device for stage in stages for _ in stage.blocks]
    timeline = launched(profile, stages, order, micro_batches)
    return tuple(device.reserved for device in replay_allocator(timeline, assignment, root, devices))


def _micro_batch(profile: Profile, micro_batches: int, schedule: str) -> Profile:
    """The profile of the largest micro-batch."""
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches!r}; a batch is split into 1 part or more")
    if micro_batches == 1:
        return profile
    if schedule == "naive":
        raise ValueError(
            f"schedule='naive' runs the whole batch at once, not in {micro_batches} parts; choose 'gpipe' or '1f1b'"
        )
    if 0 < profile.batch_size < micro_batches:
        raise ValueError(
            f"{profile.batch_size} samples cannot be split into {micro_batches} micro-batches; choose up to "
            f"{profile.batch_size}"
        )
    return micro_profile(profile, micro_batches, schedule=schedule)


def _position(name: str, place: object, devices: int) -> int:
    text = str(place)
    if text in ("cpu", "disk", "meta"):
        raise ValueError(f"{name!r} is on {text!r}; only plans without offload are scored, so give it a device")
    tail = text.rsplit(":", 1)[-1]
    if isinstance(place, bool) or not tail.isdecimal() or int(tail) >= devices:
        raise ValueError(
            f"{name!r} is on {place!r}; devices are positions in the list of devices, here 0 to {devices - 1}"
        )
    return int(tail)


def _device_of(block: BlockCost, places: Mapping[str, int]) -> int:
    found: dict[int, str] = {}
    for member in (block.name, *block.members):  # a module's own name may hold a plus
        for name, device in _placed(member, places).items():
            found.setdefault(device, name)
    if not found:
        raise ValueError(f"device_map says nothing about block {block.name!r}")
    if len(found) > 1:
        where = " and ".join(f"{name!r} on {device}" for device, name in found.items())
        raise ValueError(f"device_map splits block {block.name!r} over devices: {where}; a block is placed as one")
    return next(iter(found))


def _placed(member: str, places: Mapping[str, int]) -> dict[str, int]:
    """What a map says about a module: its parts where they are listed, and the nearest module that contains it."""
    found = {name: device for name, device in places.items() if name.startswith(f"{member}.")}
    around = member
    while around and around not in places:
        around = around.rpartition(".")[0]
    if around in places:
        found[around] = places[around]
    return found


def _concerns(name: str, profile: Profile) -> bool:
    known = [member for block in profile.blocks for member in (block.name, *block.members)]
    known += [loose for loose, _ in profile.loose]
    return any(
        name == member or not name or member.startswith(f"{name}.") or name.startswith(f"{member}.") for member in known
    )
