"""Metrics that micro-batches update: afterwards each is as if the whole batch had updated it once.

While micro-batches run, a metric answers with the value of their part, and keeps the state that it had before. What is
done with it is noted, call by call. Afterwards the calls are made for the whole batch: states whose sum, extreme or
list is the state of the batch are merged; of other metrics the arguments are kept until then and put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autobalance.compat import metrics as private
from autobalance.execution.batches.merging import adding_up
from autobalance.execution.micro_batch import current_micro_batch
from autobalance.strategy.parts.metric_arguments import arguments_of_whole
from autobalance.strategy.parts.pipelined import without_graph
from autobalance.strategy.trials.metrics import counts_samples, is_metric

_WATCHED = ("forward", "update", "compute", "reset")


class MetricCall:
    """The same call of one metric in all micro-batches.

    Args:
        metric: the metric.
        kind: the method's name.

    Attributes:
        pieces: by micro-batch: the state of a part, or the arguments.
        values: what the metric answered to each.
        whole: its answer for the whole batch, once that is known.
    """

    def __init__(self, metric: Any, kind: str) -> None:
        self.metric, self.kind = metric, kind
        self.pieces: dict[int, Any] = {}
        self.values: dict[int, Any] = {}
        self.whole: Any = None


class MetricParts:
    """Stands between a module's metrics and the micro-batches that use them.

    Example:
        >>> parts = MetricParts(module)                    # doctest: +SKIP
        >>> with parts.recording():                        # doctest: +SKIP
        ...     run_micro_batches()
        >>> parts.finish([0, 1], sizes=[3, 2], weights=[0.6, 0.4])   # doctest: +SKIP

    Args:
        module: whose metrics these are; without torchmetrics there is nothing to do.
    """

    def __init__(self, module: nn.Module) -> None:
        self._holders = [part for part in module.modules() if _is_of_torchmetrics(part)]
        self._calls: dict[tuple[int, str, int], MetricCall] = {}
        self._counts: dict[tuple[int, str, int], int] = {}
        self._local: dict[tuple[int, int], Any] = {}  # what a metric has seen of one micro-batch
        self._busy: Any = None
        self._originals: dict[int, dict[str, Callable[..., Any]]] = {}
        self._origins: dict[int, tuple[MetricCall, list[tuple[Any, ...]]]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While it lasts, metrics answer for micro-batches and keep the state that they have."""
        self.forget()
        units, collections = _units(self._holders)
        for metric in units:
            self._originals[id(metric)] = {name: getattr(metric, name) for name in _WATCHED}
        kept = [(part, {name: vars(part)[name] for name in _WATCHED if name in vars(part)}) for part in units]
        kept += [(part, {}) for part in collections]
        for metric in units:
            vars(metric).update({name: partial(self._call, metric, name) for name in _WATCHED})
        for collection in collections:
            vars(collection)["update"] = partial(self._update_collection, collection)
        try:
            yield
        except BaseException:
            self.forget()
            raise
        finally:
            for part, before in kept:
                for name in _WATCHED:
                    vars(part).pop(name, None)
                vars(part).update(before)

    def origin_of(self, value: Any, name: str) -> tuple[MetricCall, tuple[Any, ...]] | None:
        """The call in which a metric gave this value, and where in its answer it is.

        Args:
            value: what is logged.
            name: under which it is logged, which tells where it is if the answer holds it twice.
        """
        if id(value) not in self._origins:
            return None
        call, places = self._origins[id(value)]
        return call, next((place for place in places if place[-1:] == (name,)), places[0])

    def finish(self, numbers: Sequence[int], sizes: Sequence[int], weights: Sequence[Any]) -> None:
        """Make the calls of some micro-batches on the metrics themselves, as one call each.

        Args:
            numbers: the micro-batches.
            sizes: samples of each.
            weights: by which means among the arguments are weighted.
        """
        for call in self._calls.values():
            there = [place for place, number in enumerate(numbers) if number in call.pieces]
            if there:
                pieces = [call.pieces.pop(numbers[place]) for place in there]
                shares = [weights[place] for place in there]
                _make_whole(call, pieces, [sizes[place] for place in there], adding_up(shares))

    def forget(self) -> None:
        """Drop what was noted."""
        for seen in self._local.values():
            if isinstance(seen, nn.Module):
                private.take_apart(seen)
        for noted in (self._calls, self._counts, self._local, self._originals, self._origins):
            noted.clear()

    def _call(self, metric: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        run = self._originals[id(metric)][kind]
        if self._busy is metric:  # a metric's forward calls its own update and compute
            return run(*args, **kwargs)
        number = current_number()
        before, self._busy = self._busy, metric
        piece: Any
        try:
            if _is_merged(metric, args, kwargs) and not isinstance(self._local.get((id(metric), number)), nn.Module):
                piece, value = self._run_on_part(metric, kind, number, args, kwargs)
            else:
                value = self._run_on_copy(metric, kind, number, args, kwargs)
                piece = without_graph(args), without_graph(kwargs)
        finally:
            self._busy = before
        call = self._note(metric, kind, number)
        call.pieces[number] = piece
        call.values[number] = value  # its tensors are known by their identity, so they must live
        for place, item in _tensors(value):
            self._origins.setdefault(id(item), (call, []))[1].append(place)
        return value

    def _note(self, metric: Any, kind: str, number: int) -> MetricCall:
        count = self._counts.get((id(metric), kind, number), 0)
        self._counts[id(metric), kind, number] = count + 1
        return self._calls.setdefault((id(metric), kind, count), MetricCall(metric, kind))

    def _run_on_part(
        self, metric: Any, kind: str, number: int, args: Any, kwargs: Any
    ) -> tuple[private.MetricState | None, Any]:
        run = self._originals[id(metric)]
        seen: private.MetricState | None = self._local.get((id(metric), number))
        before = private.metric_state(metric)
        value, piece = None, None
        try:
            private.start_afresh(metric)
            if kind in ("forward", "update"):
                value = run[kind](*args, **kwargs)
                piece = _state_alone(private.metric_state(metric))
                private.set_metric_state(metric, piece)
                if seen is not None:
                    private.add_earlier_state(metric, seen)
                self._local[id(metric), number] = private.metric_state(metric)
            elif kind == "compute":
                if seen is not None:
                    private.set_metric_state(metric, seen._replace(computed=None))
                value = run[kind]()
            else:
                self._local.pop((id(metric), number), None)
        finally:
            private.set_metric_state(metric, before)
        return piece, value

    def _run_on_copy(self, metric: Any, kind: str, number: int, args: Any, kwargs: Any) -> Any:
        twin = self._local.get((id(metric), number))
        if not isinstance(twin, nn.Module):
            seen, twin = twin, private.fresh_copy(metric)
            if seen is not None:
                private.set_metric_state(twin, seen)
            self._local[id(metric), number] = twin
        return getattr(twin, kind)(*args, **kwargs)

    def _update_collection(self, collection: Any, *args: Any, **kwargs: Any) -> None:
        update = partial(type(collection).update, collection)
        number = current_number()
        if private.groups_are_to_be_formed(collection):
            with private.no_groups_formed(collection):
                update(*args, **kwargs)
        else:
            update(*args, **kwargs)
            for first, *others in private.metric_groups(collection):
                seen = self._local.get((id(first), number))
                for other in others:  # which is of another kind than a copy of the first
                    self._local[id(other), number] = private.metric_state(seen) if isinstance(seen, nn.Module) else seen
        self._note(collection, "update", number).pieces[number] = None


def current_number() -> int:
    """The number of the micro-batch that this thread works on."""
    micro_batch = current_micro_batch()
    return 0 if micro_batch is None else micro_batch.index


def _make_whole(call: MetricCall, pieces: list[Any], sizes: list[int], weights: list[Any]) -> None:
    metric, kind = call.metric, call.kind
    if _is_collection(metric):  # its metrics have been updated
        (private.form_groups if private.groups_are_to_be_formed(metric) else private.share_states)(metric)
    elif isinstance(pieces[0], private.MetricState):
        call.whole = _merge_states(metric, pieces, is_called=kind == "forward")
    elif pieces[0] is None:
        call.whole = getattr(metric, kind)()
    else:
        args, kwargs = arguments_of_whole(pieces, sizes, weights)
        call.whole = metric(*args, **kwargs) if kind == "forward" else getattr(metric, kind)(*args, **kwargs)


@torch.no_grad()
def _merge_states(metric: Any, pieces: Sequence[private.MetricState], is_called: bool) -> Any:
    """Add the state of a batch to that of a metric, and give the batch's value if it was called for one."""
    before = private.metric_state(metric)
    try:
        private.set_metric_state(metric, pieces[0])
        for piece in pieces[1:]:
            so_far = private.metric_state(metric)
            private.set_metric_state(metric, piece)
            private.add_earlier_state(metric, so_far)
        latest = before.latest
        if is_called:
            private.set_metric_state(metric, private.metric_state(metric)._replace(updates=1, computed=None))
            latest = metric.compute()
        private.add_earlier_state(metric, before)
    except BaseException:
        private.set_metric_state(metric, before)
        raise
    merged = private.metric_state(metric)
    private.set_metric_state(metric, merged._replace(updates=before.updates + 1, latest=latest, computed=None))
    return latest if is_called else None


def _is_merged(metric: Any, args: Any, kwargs: Any) -> bool:
    """Whether states are merged: those of metrics that count samples. A mean of means is none over all samples."""
    return counts_samples([*args, *kwargs.values()]) and private.states_can_be_merged(metric)


def _units(holders: Sequence[nn.Module]) -> tuple[list[Any], list[Any]]:
    """Metrics, each with what it wraps, and the collections that they are in."""
    units: dict[int, Any] = {}
    collections: dict[int, Any] = {}
    for module in (part for holder in holders for part in holder.modules()):
        if not is_metric(module):
            continue
        if _is_collection(module):
            collections[id(module)] = module
        else:
            units[id(module)] = module
    return list(units.values()), list(collections.values())


def _is_of_torchmetrics(module: nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == "torchmetrics" for base in type(module).__mro__)


def _is_collection(module: nn.Module) -> bool:
    return any(base.__name__ == "MetricCollection" for base in type(module).__mro__)


def _state_alone(state: private.MetricState) -> private.MetricState:
    return private.MetricState(without_graph(state.values), state.updates, None, None)


def _tensors(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, (*place, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _tensors(item, (*place, index))
