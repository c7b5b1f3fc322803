"""Private names of torchmetrics, which nothing here imports: it need not be installed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn


class MetricState(NamedTuple):
    """What a metric knows.

    Attributes:
        values: its states by name, the very tensors and lists.
        updates: how many there were.
        latest: the value of the latest call.
        computed: the value over all updates, if it was asked for since the latest.
    """

    values: dict[str, Any]
    updates: int
    latest: Any
    computed: Any


def metric_state(metric: Any) -> MetricState:
    """The state of a metric, not copied.

    Args:
        metric: of torchmetrics.
    """
    values = {name: getattr(metric, name) for name in metric._defaults}
    return MetricState(values, metric._update_count, metric._forward_cache, metric._computed)


def set_metric_state(metric: Any, state: MetricState) -> None:
    """Give a metric a state.

    Args:
        metric: of torchmetrics.
        state: of one like it.
    """
    for name, value in state.values.items():
        setattr(metric, name, value)
    metric._update_count, metric._forward_cache, metric._computed = state.updates, state.latest, state.computed


def start_afresh(metric: Any) -> None:
    """Give a metric a state without updates, and leave the lists of the one that it has as they are.

    Args:
        metric: of torchmetrics.
    """
    for name, default in metric._defaults.items():
        if isinstance(default, list):
            setattr(metric, name, [])
    metric.reset()


def fresh_copy(metric: Any) -> Any:
    """A copy of a metric, and of those that it wraps, without updates.

    Args:
        metric: of torchmetrics, with whatever state.
    """
    inside = [part for part in metric.modules() if hasattr(part, "_defaults")]
    before = [metric_state(part) for part in inside]
    watchers = [{name: vars(part).pop(name) for name in _BY_CLASS if name in vars(part)} for part in inside]
    try:
        for part in inside:  # what was listed or answered so far may be large, or have a graph that cannot be copied
            lists: dict[str, Any] = {name: [] for name, value in part._defaults.items() if isinstance(value, list)}
            set_metric_state(part, MetricState(lists, 0, None, None))
        twin = copy.deepcopy(metric)
    finally:
        for part, state, watching in zip(inside, before, watchers, strict=True):
            set_metric_state(part, state)
            vars(part).update(watching)
    twin.reset()
    return twin


def take_apart(twin: Any) -> None:
    """Let a copy of a metric go at once: methods that it wraps and keeps refer to it in a circle.

    Args:
        twin: of no use any more.
    """
    for part in twin.modules():
        for name in ("update", "compute"):
            vars(part).pop(name, None)


_BY_CLASS = ("forward", "reset")
"""Methods that a metric has only from its class, unless it is watched; it leaves its own others out of copies."""


def add_earlier_state(metric: Any, earlier: MetricState) -> None:
    """Merge a state into that of a metric whose states can be, as if its updates had come first.

    Args:
        metric: one of which `states_can_be_merged`.
        earlier: the state before its first update.
    """
    metric._reduce_states(earlier.values)


def states_can_be_merged(metric: Any) -> bool:
    """Whether the state after several updates is the sum, the extreme or the list of those after each of them.

    One update with all samples then gives the same.

    Args:
        metric: of torchmetrics.
    """
    base = next(cls for cls in type(metric).__mro__ if cls.__name__ == "Metric" and _is_torchmetrics(cls))
    if metric.full_state_update is not False or metric.dist_sync_on_step or next(metric.children(), None) is not None:
        return False
    if any(getattr(type(metric), name) is not getattr(base, name) for name in ("forward", "reset", "_reduce_states")):
        return False
    if not _updates_by_sample(type(metric).update):
        return False
    return all(_reduces_in_parts(metric, name, reduction) for name, reduction in metric._reductions.items())


def _updates_by_sample(update: Any) -> bool:
    """Whether an update is known to take each sample for itself.

    Others may look at all that they are given: scores are taken for probabilities where none is below 0 or above 1
    (`normalize_logits_if_needed` of torchmetrics/utilities/compute.py), and the range of an image is that of the batch.
    """
    return update.__qualname__ in _BY_SAMPLE or str(update.__module__).startswith(_WHERE_BY_SAMPLE)


_BY_SAMPLE = tuple(f"Multiclass{kind}.update" for kind in ("StatScores", "ConfusionMatrix", "ExactMatch"))
_WHERE_BY_SAMPLE = tuple(f"torchmetrics.{kind}" for kind in ("aggregation", "regression", "text"))


def _reduces_in_parts(metric: Any, name: str, reduction: Any) -> bool:
    if reduction is None:
        return isinstance(metric._defaults[name], list)
    return getattr(reduction, "__name__", "") in _IN_PARTS and _is_torchmetrics(reduction)


_IN_PARTS = ("dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat")


def _is_torchmetrics(value: Any) -> bool:
    return str(value.__module__).partition(".")[0] == "torchmetrics"


def groups_are_to_be_formed(collection: Any) -> bool:
    """Whether the next update of a collection finds out which of its metrics share their state.

    Args:
        collection: a MetricCollection.
    """
    return bool(collection._enable_compute_groups) and not collection._groups_checked


@contextmanager
def no_groups_formed(collection: Any) -> Iterator[None]:
    """While it lasts, updates of a collection do not compare its metrics.

    Args:
        collection: a MetricCollection.
    """
    wanted, collection._enable_compute_groups = collection._enable_compute_groups, False
    try:
        yield
    finally:
        collection._enable_compute_groups = wanted


def form_groups(collection: Any) -> None:
    """Have a collection find out which of its metrics share their state, as after its first update.

    Args:
        collection: a MetricCollection whose metrics have all been updated.
    """
    collection._merge_compute_groups()
    share_states(collection)
    collection._groups_checked = True


def share_states(collection: Any) -> None:
    """Give each metric of a collection the state of the one of its group that is updated.

    Args:
        collection: a MetricCollection whose groups are formed.
    """
    collection._state_is_copy = False
    collection._compute_groups_create_state_ref()


def metric_groups(collection: Any) -> list[list[nn.Module]]:
    """The metrics of a collection that share their state; the first of each group is the one that is updated.

    Args:
        collection: a MetricCollection; before its groups are formed it has none.
    """
    if not collection._groups_checked:
        return []
    return [[getattr(collection, name) for name in names] for names in collection._groups.values()]
