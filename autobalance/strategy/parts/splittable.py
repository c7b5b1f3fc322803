"""Why a run must not be split into micro-batches, as far as that is known before anything has run."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from autobalance.compat import (
    accumulation_hooks,
    detects_anomalies,
    gradient_hooks,
    is_batch_norm,
    is_instance_norm,
)
from autobalance.execution.batches.by_hook import samples_told_by
from autobalance.execution.batches.sample_layout import UnsplittableBatchError
from autobalance.execution.batches.splitting import parts_of
from autobalance.strategy.options import Options

_STEPS = {
    "fit": ("training_step", "validation_step"),
    "validate": ("validation_step",),
    "test": ("test_step",),
    "predict": ("predict_step",),
}
_LIBRARIES = frozenset({"builtins", "lightning", "pytorch_lightning", "torch", "torchmetrics", "typing"})
_STOPS = frozenset({"breakpoint", "set_trace"})
_SHOWN = 3


def reasons(
    trainer: Any,
    module: Any,
    options: Options,
    batch: Any = None,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> list[str]:
    """Why batches of a run must stay whole, one batch after the other, each in words.

    Example:
        >>> reasons(trainer, gan, Options())
        ['`automatic_optimization` is off: only the step itself knows when it runs backward and steps its optimizers']

    Args:
        trainer: a Trainer inside `fit`, `validate`, `test` or `predict`.
        module: its LightningModule.
        options: the strategy's.
        batch: one of the run's; None: nothing is said about batches.
        optimizers: of the run, as far as they are made yet.

    Returns:
        The reasons; none if batches may be split.
    """
    return [
        *against_overlap(trainer, module, optimizers),
        *_from_batch_norm(trainer, module, options),
        *([] if batch is None else _from_batch(trainer, module, batch)),
    ]


def against_overlap(trainer: Any, module: Any, optimizers: Sequence[torch.optim.Optimizer] = ()) -> list[str]:
    """Why no two micro-batches of a run may be under way at once, even where each is a batch of its own.

    Args:
        trainer, module, optimizers: as for `reasons`.
    """
    found = [_from_debugger(module), _from_fast_dev_run(trainer), _from_anomalies(trainer)]
    if trainer.state.fn == "fit":
        found += [_from_manual_optimization(module), _from_optimizers([*trainer.optimizers, *optimizers])]
        found.append(hooks_after_accumulation(module))
    found.append(_from_iterators(trainer, module))
    return [reason for reason in found if reason is not None]


def in_words(found: Sequence[str]) -> str:
    """What the user is told, once, where batches stay whole.

    Example:
        >>> in_words(["`fast_dev_run` is on"])
        'Batches are not split into micro-batches, and one device works at a time: `fast_dev_run` is on.'

    Args:
        found: the reasons; at least one.
    """
    reasons = "; ".join(reason.rstrip(".") for reason in found)  # errors of others may end in a full stop
    return f"Batches are not split into micro-batches, and one device works at a time: {reasons}."


def on_deferred(module: nn.Module) -> str | None:
    """What the user is told, once, of batch norms that are deferred; None if there are none in training.

    Example:
        >>> on_deferred(nn.Sequential(nn.BatchNorm1d(4)))
        '`0` (BatchNorm1d) normalises each part of a batch with its own statistics: ...'

    Args:
        module: the LightningModule.
    """
    found = [(name, part) for name, part in module.named_modules() if part.training and is_batch_norm(part)]
    if not found:
        return None
    return (
        f"{_named(found)} normalises each part of a batch with its own statistics: gradients are not those of the full "
        f"batch then, though running statistics are. batch_norm='fallback' takes batches whole."
    )


def hooks_after_accumulation(module: nn.Module) -> str | None:
    """What is said of parameters that have hooks of `register_post_accumulate_grad_hook`; None if there are none.

    Example:
        >>> layer.weight.register_post_accumulate_grad_hook(step_this_one)      # doctest: +SKIP
        >>> hooks_after_accumulation(layer)                                       # doctest: +SKIP
        '`weight` has a hook after the accumulation of its gradient, ...'

    Args:
        module: the LightningModule.
    """
    return _on_parameters(
        module,
        accumulation_hooks,
        ("has a hook after the accumulation of gradients", "have hooks after the accumulation of gradients"),
        "which would run for each part, and may change weights that other parts still need",
    )


def hooks_on_gradients(module: nn.Module) -> str | None:
    """What is said of parameters that have hooks of `register_hook`, where batches flow together.

    Args:
        module: the LightningModule.
    """
    return _on_parameters(
        module,
        gradient_hooks,
        ("has a gradient hook", "have gradient hooks"),
        "which would see the gradients of several batches at once",
    )


def _on_parameters(
    module: nn.Module, hooks_of: Callable[[nn.Parameter], Sequence[Any]], has: tuple[str, str], effect: str
) -> str | None:
    found = [name for name, parameter in module.named_parameters() if hooks_of(parameter)]
    return f"{listed(found)} {has[len(found) > 1]}, {effect}" if found else None


def listed(names: Sequence[str], closing: str = "`") -> str:
    """The first few of some names, and how many more there are.

    Args:
        names: at least one.
        closing: what ends each that is shown.
    """
    shown = ", ".join(f"`{name}{closing}" for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _from_manual_optimization(module: Any) -> str | None:
    if module.automatic_optimization:
        return None
    return "`automatic_optimization` is off: only the step itself knows when it runs backward and steps its optimizers"


def _from_debugger(module: nn.Module) -> str | None:
    """Micro-batches run in threads by turns, which debuggers show as jumps from one to the other."""
    if _is_debugged():
        return "a debugger is attached, and follows one thread best"
    owners = {owner: None for part in module.modules() for owner in type(part).__mro__}
    for owner in owners:
        if owner.__module__.partition(".")[0] in _LIBRARIES:
            continue
        for name, function in vars(owner).items():
            code = getattr(function, "__code__", None)
            if code is not None and _STOPS & set(code.co_names):
                return f"`{owner.__name__}.{name}` stops in a debugger, which follows one thread best"
    return None


def _is_debugged() -> bool:
    trace = sys.gettrace()
    if trace is not None and not _is_coverage(trace):
        return True
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    # Notebooks load it without a debugger.
    pydevd = getattr(sys.modules.get("_pydevd_bundle.pydevd_constants"), "get_global_debugger", lambda: None)
    return pydevd() is not None


def _is_coverage(trace: Any) -> bool:
    """Whether it is coverage.py that traces: its function, or an object in C."""
    return any(str(getattr(owner, "__module__", "")).startswith("coverage") for owner in (trace, type(trace)))


def _from_fast_dev_run(trainer: Any) -> str | None:
    return "`fast_dev_run` is on, which is to show errors where they arise" if trainer.fast_dev_run else None


def _from_anomalies(trainer: Any) -> str | None:
    if not (detects_anomalies(trainer) or torch.is_anomaly_enabled()):
        return None
    return "`detect_anomaly` is on, and what it tells of a failed backward is clearest where one batch runs at a time"


def _from_iterators(trainer: Any, module: Any) -> str | None:
    for name in _STEPS.get(trainer.state.fn, ()):
        step = getattr(module, name, None)
        if step is not None and "dataloader_iter" in inspect.signature(step).parameters:
            return f"`{name}` takes `dataloader_iter` and fetches its batches itself"
    return None


def _from_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> str | None:
    for optimizer in optimizers:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if isinstance(optimizer, torch.optim.LBFGS) or (closure is not None and closure.default is closure.empty):
            return f"{type(optimizer).__name__} runs the step several times for one update, as often as it sees fit"
    return None


def _from_batch_norm(trainer: Any, module: nn.Module, options: Options) -> list[str]:
    if trainer.state.fn != "fit":
        return []
    found = [(name, part) for name, part in module.named_modules() if part.training]
    over_samples = [(name, part) for name, part in found if is_batch_norm(part)]
    if options.batch_norm == "deferred":
        synchronised = [(name, part) for name, part in over_samples if isinstance(part, nn.SyncBatchNorm)]
        over_samples = []
        if synchronised:
            return [f"{_named(synchronised)} cannot be deferred: use BatchNorm2d, for all devices are in one process"]
    reasons = []
    if over_samples:
        reasons.append(
            f"{_named(over_samples)} normalises over the batch, of which a part has other statistics "
            f"(batch_norm='deferred' splits it all the same: parts are normalised by themselves, and running "
            f"statistics are those of the batch)"
        )
    tracked = [(name, part) for name, part in found if is_instance_norm(part) and part.track_running_stats]
    if tracked:
        reasons.append(f"{_named(tracked)} tracks statistics of the batch")
    return reasons


def _named(found: Sequence[tuple[str, nn.Module]]) -> str:
    return listed([f"{name}` ({type(part).__name__})" for name, part in found], closing="")


def _from_batch(trainer: Any, module: Any, batch: Any) -> list[str]:
    try:
        parts = parts_of(module, batch, 2)
    except UnsplittableBatchError as error:
        return [str(error).rstrip(".")]
    except Exception as error:  # of the user's own hooks
        said = str(error).strip().split("\n")[0].rstrip(".")
        return [f"splitting a batch, as `split_batch` and `loss_weight` say, raised {type(error).__name__}: {said}"]
    if len(parts.batches) < 2:
        return ["`split_batch` makes one part of a batch" if parts.is_by_hook else "a batch has one sample"]
    if trainer.state.fn == "predict" or not parts.is_by_hook or _are_weighed(module, parts.batches):
        return []
    return [
        "how many samples each part of a batch has is not known, and so neither how much its loss counts: give parts "
        "`num_graphs`, or define `loss_weight(self, batch)` in the LightningModule"
    ]


def _are_weighed(module: Any, parts: Sequence[Any]) -> bool:
    """Whether samples of parts that the user has made are counted, or else weighed by a hook."""
    if all(samples_told_by(part) is not None for part in parts):
        return True
    hook = getattr(module, "loss_weight", None)
    return callable(hook) and hook(parts[0]) is not None
