"""When each device works on which micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from autobalance.partitioning.plan import Plan
from autobalance.partitioning.times import clocked
from autobalance.report.markup import Markup, element, joined, percent
from autobalance.report.names import device_title
from autobalance.report.rows import axis, bar, legend, picture, row, stretched, strip
from autobalance.schedules.clock import Slot
from autobalance.schedules.launches import launch_order
from autobalance.units import format_time

_HEIGHT = 30
# Above so many slots a browser gets slow, and no slot could be pointed at: each device is drawn as one shape then.
_MOST = 3000
# A micro-batch's number needs this share of the width.
_ROOM = 0.022


def slots_of(plan: Plan) -> tuple[Slot, ...]:
    """When what runs in one step; none where the plan has no times.

    Example:
        >>> max(slot.stop for slot in slots_of(plan))

    Args:
        plan: to be shown.
    """
    stages = plan.stages
    if not any(stage.time for stage in stages):
        return ()
    devices = [stage.device for stage in stages]
    training = any(stage.backward_time for stage in stages)
    order = launch_order(plan.schedule, len(stages), plan.micro_batches, devices=devices, training=training)
    return clocked(stages, order)


def gantt(plan: Plan) -> Markup:
    """One strip of time for each device.

    Example:
        >>> gantt(plan)

    Args:
        plan: to be shown.
    """
    slots = slots_of(plan)
    if not slots:
        return element("p", "The plan has no times, so that there is no timeline to show.", class_="note")
    end = max(slot.stop for slot in slots)
    rows = [_row(plan, index, slots, end) for index in _used(plan)]
    scale, unit = next(((scale, unit) for scale, unit in ((1.0, "s"), (1e-3, "ms")) if end >= scale), (1e-6, "µs"))
    rows.append(axis(end / scale, lambda tick: f"{tick:,g}", unit))
    told = legend(_entries(plan))
    return joined(picture(*rows), told, _what_it_shows(plan, slots, end))


def _entries(plan: Plan) -> list[tuple[str, str]]:
    entries = [("forward", "forward")]
    if any(stage.backward_time for stage in plan.stages):
        entries.append(("backward", "backward"))
    if most := max(_visits(plan), default=0):
        again = " and every other one after it" if most > 2 else ""
        entries += [(f"{what} again", f"{what} in a device's second stage{again}") for what, _ in entries]
    if any(stage.receive_time for stage in plan.stages):
        entries.append(("receive", "waits for its input to arrive"))
    return entries


def _visits(plan: Plan) -> list[int]:
    """For each stage how many stages its device has before it."""
    places = [stage.device for stage in plan.stages]
    return [places[:number].count(device) for number, device in enumerate(places)]


def _used(plan: Plan) -> list[int]:
    working = {stage.device for stage in plan.stages}
    return [index for index in range(len(plan.devices)) if index in working]


def _row(plan: Plan, index: int, every: Sequence[Slot], end: float) -> Markup:
    slots, in_all = [slot for slot in every if slot.device == index], len(every)
    busy = sum(slot.stop - slot.start for slot in slots) / end
    about = f"device {index} works {busy:.0%} of the time"
    if in_all > _MOST:
        shapes: list[Markup] = [_one_shape(slots, end, backward) for backward in (False, True)]
    else:
        again = [number for number, visit in enumerate(_visits(plan)) if visit % 2]
        shapes = [shape for slot in slots for shape in _shapes(plan, slot, end, slot.stage in again)]
    class_ = "time dense" if in_all > _MOST / 5 else "time"
    return row(device_title(index, plan.devices[index].name), strip(shapes, _HEIGHT, about, class_), f"busy {busy:.0%}")


def _shapes(plan: Plan, slot: Slot, end: float, again: bool) -> list[Markup]:
    stage = plan.stages[slot.stage]
    what = "backward" if slot.backward else "forward"
    received = stage.receive_time / (2 if stage.backward_time else 1)
    visit = f", stage {slot.stage}" if len(plan.stages) > len({each.device for each in plan.stages}) else ""
    took = format_time(slot.stop - slot.start)
    of = f" of micro-batch {slot.micro_batch}" if plan.micro_batches > 1 else ""
    title = f"{what}{of}{visit}: {format_time(slot.start)} to {format_time(slot.stop)}"
    title += f", {took}" + (f", of which {format_time(received)} of transfers" if received else "")
    begun = min(slot.start + received, slot.stop)
    class_ = f"{what} again" if again else what
    shapes = [bar(begun / end, slot.stop / end, _HEIGHT - 6, class_, title, top=3)]
    if received:
        shapes.append(bar(slot.start / end, begun / end, _HEIGHT - 6, "receive", title, top=3))
    if plan.micro_batches > 1 and _is_wide(slot, end):
        middle = percent((begun + slot.stop) / 2 / end)
        shapes.append(element("text", str(slot.micro_batch), x=middle, y=_HEIGHT / 2 + 4, text_anchor="middle"))
    return shapes


def _is_wide(slot: Slot, end: float) -> bool:
    """Whether there is room for the micro-batch's number."""
    return (slot.stop - slot.start) / end >= _ROOM * (1 if slot.micro_batch < 10 else 1.5)


def _one_shape(slots: Sequence[Slot], end: float, backward: bool) -> Markup:
    boxes = (
        f"M{slot.start / end * 1000:.2f} 0H{slot.stop / end * 1000:.2f}V1H{slot.start / end * 1000:.2f}z"
        for slot in slots
        if slot.backward == backward
    )
    path = element("path", d="".join(boxes), class_="backward" if backward else "forward")
    return stretched(path, "0 0 1000 1", _HEIGHT - 6, y=3)


def _what_it_shows(plan: Plan, slots: Sequence[Slot], end: float) -> Markup:
    idle = [str(index) for index in range(len(plan.devices)) if index not in {slot.device for slot in slots}]
    numbered = plan.micro_batches > 1 and any(_is_wide(slot, end) for slot in slots) and len(slots) <= _MOST
    words = "Numbers are micro-batches. " if numbered else ""
    words += f"Forwards and backwards of one step take {format_time(end)} here"
    if plan.step_time and abs(end / plan.step_time - 1) > 5e-4:
        words += f", and {format_time(plan.step_time)} by the formula that plans are compared with"
    words += "; the step of the optimizer comes after them."
    if len(slots) > _MOST:
        words += f" {len(slots):,} stretches are too many to point at each."
    if idle:
        words += f" Without blocks: device{'s' * (len(idle) > 1)} {', '.join(idle)}."
    return element("p", words, class_="note")
