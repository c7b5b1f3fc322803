"""Measure every block of a model on a real device, one block at a time: its times, and its bytes to check a trace by.

    measure(model: nn.Module, batch: Batch, blocks: Blocks, trial: Trial, device: torch.device | str)
        -> tuple[Measurement, ...]

takes what `Profiler` has; `with_measurements(profile, measurements)` puts the result into its profile.
"""

from __future__ import annotations

import gc
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autobalance import compat
from autobalance.blocks import Blocks
from autobalance.measuring.call import Call
from autobalance.measuring.captured import changed_attributes, on_device, plain_attributes, run_blocks
from autobalance.measuring.courier import Courier, all_tensors
from autobalance.measuring.extrapolate import forward_in_parts, measured_or_extrapolated
from autobalance.measuring.measurement import Measurement
from autobalance.measuring.meters import Meter, make_meter
from autobalance.measuring.passes import Passes, run_forward, run_passes
from autobalance.measuring.returned import Storages
from autobalance.measuring.signatures import signature_of, signature_of_module
from autobalance.placement.move import Mover
from autobalance.profiling.lazy import learn_shapes
from autobalance.profiling.sandbox import random_state_kept
from autobalance.profiling.trial import Batch, Trial
from autobalance.units import format_size


def measure(
    model: nn.Module, batch: Batch, blocks: Blocks, trial: Trial, device: torch.device | str
) -> tuple[Measurement, ...]:
    """Run every block of one step on a device, forward and backward, and take its times and bytes.

    The step's glue runs on the host. A copy of one block at a time is on the device, with what the step really gives
    it; blocks of equal class, parameter shapes and inputs are measured once. The model, its gradients, its buffers,
    random numbers and the device's memory are afterwards what they were.

    Example:
        >>> measure(model, Batch("train batch", "train", data), find_blocks(model), PlainTrial(), "cuda:0")

    Args:
        model: on the host or on meta; blocks on meta get random numbers.
        batch: on the host.
        blocks: of the model.
        trial: runs the step.
        device: a GPU, a simulated device, or the CPU.

    Returns:
        One measurement per block, in the blocks' order; a block that the step does not call has no times.

    Raises:
        ValueError: the device is not there.
        RuntimeError: a block's weights, or a single sample, do not fit on the device; or a block fails there.
    """
    meter = make_meter(device)
    compat.drop_cuda_workspaces(meter.device)
    learn_shapes(model, trial, batch)
    with random_state_kept():
        bench = _Bench(blocks, meter, trial.dtype)
        run_blocks(model, blocks, trial, batch, bench.run)
        measured = bench.measurements()
    del bench
    gc.collect()
    compat.drop_cuda_workspaces(meter.device)
    return measured


@dataclass(frozen=True)
class _Visited:
    """One call of a module: what it took, the samples that fitted at once, notes, and the block that was measured."""

    path: str
    passes: Passes
    samples: int
    notes: tuple[str, ...]
    block: str


class _Bench:
    """Takes blocks to the device as the step calls them.

    Args:
        blocks: of the model.
        meter: of the device.
        dtype: to which parameters and buffers are cast; None: they stay as they are.
    """

    def __init__(self, blocks: Blocks, meter: Meter, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._blocks = blocks
        self._meter = meter
        self._floor = meter.allocated()
        self._known: dict[Hashable, _Visited] = {}
        self._calls: dict[int, list[_Visited]] = {}
        self._static: dict[int, dict[str, int]] = {}

    def run(self, index: int, path: str, module: nn.Module, call: Call) -> tuple[Any, list[Tensor]]:
        """Measure one call of a block, unless an equal one was, and let the step go on with what it returns."""
        name = self._blocks.names[index]
        if self._meter.allocated() > self._floor:
            gc.collect()  # the last block's own circles of references
        before = self._meter.allocated()
        with self._meter.watching():
            copied = self._placed(name, module)
            self._static.setdefault(index, {})[path] = self._meter.allocated() - before
        signature = (signature_of_module(module), signature_of(call))
        if signature not in self._known:
            self._known[signature] = self._measured(name, path, copied, call)
        seen = self._known[signature]
        self._calls.setdefault(index, []).append(replace(seen, path=path))
        output = self._output(module, copied, call, seen)
        pairs = zip(all_tensors(output), seen.passes.returned.shapes, strict=True)
        return output, [tensor for tensor, shape in pairs if shape.on_host]

    def _placed(self, name: str, module: nn.Module) -> nn.Module:
        try:
            return on_device(module, self._meter.device, self._dtype)
        except torch.OutOfMemoryError as error:
            nbytes = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
            raise RuntimeError(
                f"block {name!r} cannot be measured on {self._meter.device}: its weights and buffers take "
                f"{format_size(nbytes)}, for which there is no room ({first_line(error)}). {_ADVICE}"
            ) from None

    def _measured(self, name: str, path: str, copied: nn.Module, call: Call) -> _Visited:
        def run(part: Call) -> Passes:
            return run_passes(copied, part, self._meter)

        try:
            passes, samples, notes = measured_or_extrapolated(call, run, str(self._meter.device))
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"block {name!r} cannot be measured on {self._meter.device}: a single sample does not fit "
                f"({first_line(error)}). {_ADVICE}"
            ) from None
        return _Visited(path, passes, samples, tuple(f"{name}: {note}" for note in notes), name)

    def _output(self, module: nn.Module, copied: nn.Module, call: Call, seen: _Visited) -> Any:
        before = plain_attributes(copied)
        returned = seen.passes.returned
        output = forward_in_parts(call, seen.samples, lambda part: run_forward(copied, part, self._meter, returned))
        home = Mover(Courier(lambda tensor: tensor.detach().to("cpu", copy=True)), "host")
        for where, key, value in changed_attributes(before, copied):
            setattr(module.get_submodule(where), key, home.move(value))
        return output

    def measurements(self) -> tuple[Measurement, ...]:
        """What was measured, block by block."""
        return tuple(map(self._combined, range(len(self._blocks))))

    def _combined(self, index: int) -> Measurement:
        """All calls of a block in one step, one after the other, then their backwards in reverse order."""
        name, called = self._blocks.names[index], self._calls.get(index, [])
        modules = dict(zip(name.split("+"), self._blocks.modules[index], strict=True))
        static = sum(self._static.get(index, {}).values())
        for path in modules.keys() - self._static.get(index, {}).keys():
            tensors = [*modules[path].parameters(), *modules[path].buffers()]
            static += Storages(tensors, self._meter.granule).nbytes()
        saved, forward_peak = 0, static
        for call in called:
            forward_peak = max(forward_peak, static + saved + call.passes.forward_peak)
            saved += call.passes.saved
        gradients, backward_peak, left, trained = 0, static, saved, set[str]()
        for call in reversed(called):
            left -= call.passes.saved
            backward_peak = max(backward_peak, static + left + gradients + call.passes.backward_peak)
            gradients += call.passes.weight_gradients if call.path not in trained else 0
            trained.add(call.path)
        return Measurement(
            name=name,
            forward_time=sum(call.passes.forward_time for call in called),
            backward_time=sum(call.passes.backward_time for call in called),
            static=static,
            saved=saved,
            forward_peak=forward_peak,
            backward_peak=backward_peak,
            exact=not any(call.notes for call in called),
            like=next((call.block for call in called if call.block != name), ""),
            notes=tuple(dict.fromkeys(note for call in called for note in call.notes)),
        )


_ADVICE = "Measure on a larger device, split the block, or profile without measuring."


def first_line(error: BaseException) -> str:
    """The first line of what an error says.

    Args:
        error: of any class.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
