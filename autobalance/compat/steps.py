"""Private names of Lightning around one step: its closure, what it logs, and the scaling of its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any


def logged_values(trainer: Any, put_aside: Callable[[Any], Callable[[], Any]]) -> Callable[[], None]:
    """Take note of what the running loop of `trainer` has logged so far; returns what puts that back.

    Args:
        trainer: a Trainer inside a loop.
        put_aside: takes a value, and gives what returns it, without holding what lies on a device.
    """
    connector, results = trainer._logger_connector, trainer._results
    attributes = {name: getattr(connector, name) for name in ("_current_fx", "_first_loop_iter")}
    if results is None:
        return lambda: None
    entries = dict(results)
    inside: list[tuple[Any, dict[str, Callable[[], Any]]]] = [
        (vars(entry), {name: put_aside(value) for name, value in vars(entry).items()}) for entry in entries.values()
    ]
    batch_size = results.batch_size

    def put_back() -> None:
        vars(connector).update(attributes)
        results.clear()
        results.update(entries)
        results.batch_size = batch_size
        for now, before in inside:
            now.clear()
            now.update({name: value() for name, value in before.items()})

    return put_back


def logged_tensors(trainer: Any) -> list[Any]:
    """Whatever holds the values that the running loop of `trainer` has logged, and those that callbacks see.

    Args:
        trainer: a Trainer inside a loop.
    """
    connector, results = trainer._logger_connector, trainer._results
    entries = [] if results is None else [vars(entry) for entry in results.values()]
    return [*entries, connector._callback_metrics, connector._logged_metrics]


def call_around_closures(trainer: Any, around: Callable[[Callable[[], Any], Any], Any]) -> Callable[[], None]:
    """Have `around(closure, batch)` called for each step of automatic optimization: forward, zero_grad and backward.

    Lightning gives a strategy a say in those closures only that end in an optimizer step, and none in what follows a
    failure: while `backward` runs, the frame that holds the graph cannot be left.

    Args:
        trainer: a Trainer.
        around: calls the closure that it is given, and returns what that returns; the batch is the step's arguments.

    Returns:
        What undoes it.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    make = loop._make_closure

    def made(arguments: Any, *others: Any) -> Any:
        closure = make(arguments, *others)
        itself = weakref.proxy(closure)  # a cycle would keep batch and loss until a garbage collection
        inner = partial(type(closure).closure, itself)
        closure.closure = lambda *args, **kwargs: around(lambda: inner(*args, **kwargs), list(arguments.values()))
        return closure

    loop._make_closure = made

    def undo() -> None:
        vars(loop).pop("_make_closure", None)

    return undo


def forget_unscaling(plugin: Any, optimizer: Any) -> None:
    """Have a precision plugin's gradient scaler, if it has one, take the gradients of `optimizer` as still scaled.

    Args:
        plugin: of a Trainer.
        optimizer: whose step is to be tried again.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None:
        scaler._per_optimizer_states.pop(id(optimizer), None)
