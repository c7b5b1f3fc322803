"""Profile a plain module: the public way in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from autobalance.blocks import find_blocks
from autobalance.kernels.present import target_of
from autobalance.measuring.efficiency import learn_efficiency
from autobalance.measuring.measure import measure as measure_blocks
from autobalance.measuring.measurement import with_measurements
from autobalance.placement.contents import tensors_in
from autobalance.profiling.asked import RefusedValue, check_model
from autobalance.profiling.batches import samples_in, with_samples
from autobalance.profiling.beside import beside
from autobalance.profiling.cautions import cautions_of_mode
from autobalance.profiling.profile import Profile
from autobalance.profiling.profiler import Profiler
from autobalance.profiling.trial import Batch, PlainTrial, Step
from autobalance.report.progress import ProgressBar
from autobalance.timelines.scaling import unscaled, with_batch_sizes


def profile(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    precision: str = "32-true",
    step: Step | None = None,
    training: bool = True,
    target: str | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    scalable: bool = False,
    measure: torch.device | str | None = None,
    selected: float | None = None,
) -> Profile:
    """Find out what every block of a plain module costs, without running it on real numbers.

    Example:
        >>> profile = autobalance.profile(model, batch, optimizer=torch.optim.AdamW)  # doctest: +SKIP
        >>> print(autobalance.plan(profile, "4x24GiB"))                               # doctest: +SKIP

    Args:
        model: its blocks are what its `self_balance()` returns, else found. Not changed. One built under
            `torch.device("meta")` takes no memory.
        batch: one batch, on the host. A dict is passed as keywords, a tuple as positionals.
        optimizer: class or callable on parameters; None: weights and gradients without optimizer state.
        precision: "32-true", "bf16-mixed", "16-mixed" (with a gradient scaler), "bf16-true" or "16-true".
        step: `step(model, batch) -> loss`; default: the output's `.loss`, else the sum of its floating outputs.
        training: False profiles a forward pass without gradients; with `step`, such as
            `lambda model, batch: model.generate(**batch)`, whatever it does.
        target: whose kernels are counted: "cuda" (of the GPU that is there, else of an A100), a GPU's name such as
            "V100-16GB", "cpu", or "simulated"; None: of the devices of this process, which are its GPU, else simulated
            devices where some are configured, else an A100.
        accumulate: batches whose gradients are added before a step of the optimizer.
        clip: largest norm of the gradients, to which they are clipped before a step; None: they are not.
        scalable: whether to trace the step at twice and three times the batch too, so that the profile knows its
            bytes for a batch of any size.
        measure: a device on which every block is run as well, one at a time, to measure its times and check its
            bytes; None: times are calculated.
        selected: share of its elements, from 0 to 1, that a mask selects at most whose numbers depend on the weights
            (`x[x > 0]`, `nonzero`, `masked_select`, `unique`); None: a block that selects so is run and measured.

    Returns:
        The profile, in call order.

    Raises:
        TypeError: for a model, batch, optimizer or step of another kind, or a step that returns no tensor.
        ValueError: for a target or precision that is not supported, an `accumulate`, `clip` or `selected` that makes
            no sense, a loss without a backward, or a device to measure on that is not there.
    """
    check_model(model, batch)
    if selected is not None and not (isinstance(selected, (int, float)) and 0 <= selected <= 1):
        raise ValueError(f"selected={selected!r} is no share: it is from 0 (nothing) to 1 (everything)")
    kernels = target_of(target)
    trial = PlainTrial(optimizer, step, precision, training, accumulate, clip)
    kind = "train" if training else "predict"
    sampled = Batch(f"{kind} batch", kind, batch)
    blocks = find_blocks(model)

    def traced(sampled: Batch) -> Profile:
        passes = PlainTrial.STEPS * accumulate * len(blocks)
        with ProgressBar("profiling", total=passes) as bar, _host_by_default():
            notes = [*beside(model, step), *cautions_of_mode(model, training)]
            with _told_of_meta(sampled.data):
                return Profiler(
                    model, blocks, trial, [sampled], training, kernels, notes, progress=bar, selected=selected
                ).profile()

    found = traced(sampled)
    if scalable:
        found = _for_any_batch(found, sampled, traced)
    if measure is not None:
        measurements = measure_blocks(model, sampled, blocks, trial, measure)
        learn_efficiency(found, measurements, str(measure))
        found = with_measurements(found, measurements)
    return found


def _host_by_default() -> AbstractContextManager[Any]:
    """What the step makes without a device is on the host, as in the run, though the model was built on meta around."""
    return torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()


@contextmanager
def _told_of_meta(batch: Any) -> Iterator[None]:
    """A step that reads values of a batch on meta is told of that, not of a copy inside."""
    try:
        yield
    except NotImplementedError as error:
        empty = next((tensor for tensor in tensors_in(batch) if tensor.is_meta), None)
        if empty is None or "meta tensor" not in str(error):
            raise
        raise RefusedValue(
            f"the step reads values of the batch, but a tensor of it is on meta (shape {list(empty.shape)}, "
            f"{empty.dtype}) and has none: make the batch on the CPU, as with torch.zeros(..., device='cpu'); only the "
            f"model may be on meta."
        ) from error


def _for_any_batch(found: Profile, sampled: Batch, traced: Callable[[Batch], Profile]) -> Profile:
    """The profile with its bytes as a function of the batch, or a note that says why there is none."""
    try:
        samples = samples_in(sampled.data)
    except ValueError as error:
        return unscaled(found, str(error))
    return with_batch_sizes(
        found, samples, lambda size: traced(Batch(sampled.name, sampled.kind, with_samples(sampled.data, size)))
    )
