"""Profile a model by a trial, and forecast the peaks of a placement by another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import psutil
from torch import nn

from autobalance.blocks import Blocks
from autobalance.execution.running import Running
from autobalance.kernels.target import SIMULATED, Target
from autobalance.profiling.asked import Refusal
from autobalance.profiling.cautions import cautions
from autobalance.profiling.costs import build_profile
from autobalance.profiling.lazy import learn_shapes
from autobalance.profiling.notes import notes_of
from autobalance.profiling.opaque import OpaqueBlocks
from autobalance.profiling.profile import Profile
from autobalance.profiling.rates import rates_for
from autobalance.profiling.signature import BETWEEN_BATCHES, signature_of
from autobalance.profiling.trace import Placement, Subject, trace_apart, trace_placed
from autobalance.profiling.traced import Traced
from autobalance.profiling.trial import Batch, Trial
from autobalance.profiling.world import Kind, whose_kernels
from autobalance.simulated.bounds import selecting
from autobalance.units import format_size

logger = logging.getLogger(__name__)


@dataclass
class Profiler:
    """One trial of one model: profiles it with every block apart, and forecasts placements.

    Attributes:
        root: the user's model; never changed.
        blocks: its blocks.
        trial: runs the steps.
        batches: one of every loader the run will meet, training first.
        training: whether the run trains.
        target: whose kernels are chosen.
        notes: what a reader of the plan should know.
        progress: told the name of each block that begins its forward in a trace.
        selected: share of its elements that a mask selects at most whose numbers are unknown; None: nothing is known.
    """

    root: nn.Module
    blocks: Blocks
    trial: Trial
    batches: Sequence[Batch]
    training: bool = True
    target: Target = SIMULATED
    notes: list[str] = field(default_factory=list)
    progress: Callable[[str], None] | None = None
    selected: float | None = None
    _kind: Kind = "fake"

    def __post_init__(self) -> None:
        self._opaque = OpaqueBlocks(self.root, self.blocks, self.target, self.trial.dtype)

    def profile(self) -> Profile:
        """Trace with every block apart."""
        for caution in cautions(self.root, self.target):
            self._note(caution)
        traced = self._trace(lambda kind: trace_apart(self._subject(self.blocks, kind)))
        for told in notes_of(traced, self.training):
            self._note(told)
        profile = build_profile(
            self.blocks,
            traced,
            batch=", ".join(batch.name for batch in self.batches),
            training=self.training,
            precision=self.trial.precision,
            target=self.target.name,
            rates=rates_for(self.target),
            notes=self.notes,
        )
        return replace(profile, signature=BETWEEN_BATCHES.join(signature_of(batch.data) for batch in self.batches))

    def forecast(
        self,
        names: Sequence[str],
        assignment: Sequence[int],
        loose: Mapping[str, int],
        root: int,
        devices: int,
        running: Running | None = None,
    ) -> list[Forecast]:
        """Trace once more with a placement installed.

        Args:
            names: block names, in the order of `assignment`.
            assignment: device index per block.
            loose: device index by the name of a tensor outside every block.
            root: device index of batch and loss.
            devices: how many there are.
            running: in how many micro-batches, and how blocks save memory; None: whole batches, all is kept.

        Returns:
            One forecast per device.
        """
        blocks = self.blocks.ordered(names)
        placement = Placement(assignment, loose, root, devices, running or Running())
        traced = self._trace(lambda kind: trace_placed(self._subject(blocks, kind), placement))
        return forecasts(traced, devices)

    def _subject(self, blocks: Blocks, kind: Kind) -> Subject:
        return Subject(self.root, blocks, self.trial, self.batches, self.target, kind, self.progress, self._opaque)

    def _trace(self, trace: Callable[[Kind], Traced]) -> Traced:
        if self.batches:
            learn_shapes(self.root, self.trial, self.batches[0])
        try:
            return self._trace_around_opaque(trace)
        except Refusal:
            raise
        except Exception as error:
            if self._kind == "real":
                raise
            reason = str(error).strip().split("\n")[0]
            self._refuse_more_than_host(error, reason)
            self._kind = "real"
            others = whose_kernels(self.target)
            kernels = f", with the kernels of {others}, not those of {self.target.name}" if others else ""
            self._note(
                f"the step cannot run on fake tensors ({type(error).__name__}: {reason}), so one real step was run on "
                f"a copy of the model in host memory{kernels}"
            )
            return trace("real")

    def _refuse_more_than_host(self, error: Exception, reason: str) -> None:
        """A model that the host cannot hold would end the process, not the step."""
        tensors = {id(tensor): tensor for tensor in (*self.root.parameters(), *self.root.buffers())}
        copies = sum(tensor.nbytes for tensor in tensors.values())
        if self.training:
            copies += sum(parameter.nbytes for parameter in self.root.parameters() if parameter.requires_grad)
        available = psutil.virtual_memory().available
        if copies > available:
            raise RuntimeError(
                f"the step cannot run on fake tensors ({type(error).__name__}: {reason}). A real step on a copy of the "
                f"model would take over {format_size(copies)} of host memory, of which {format_size(available)} are "
                f"available: mend the step if that is an error of its own, declare selected= if a mask needs numbers, "
                f"profile a smaller model of its kind, or run where there is more memory."
            ) from error

    def _trace_around_opaque(self, trace: Callable[[Kind], Traced]) -> Traced:
        """Trace again for each block that turns out to need numbers, which it is then given by itself."""
        with selecting(self.selected) as answered:
            while True:
                answered.clear()
                try:
                    traced = trace(self._kind)
                    break
                except Exception as error:
                    if self._kind == "real" or not self._opaque.learn(error):
                        raise
        for told in self._opaque.notes if self._kind == "fake" else ():
            self._note(told)
        if answered:
            self._note(
                f"masks whose numbers only real data know were taken to select {self.selected:.0%} of the elements, as "
                f"declared ({', '.join(dict.fromkeys(answered))})"
            )
        return traced

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            logger.info(text)


@dataclass(frozen=True)
class Forecast:
    """The peak of one device.

    Attributes:
        peak: bytes.
        phase: the phase in which it is reached.
    """

    peak: int
    phase: str


def forecasts(traced: Traced, devices: int) -> list[Forecast]:
    """Peaks per device of a trace whose accounts are devices, from its events.

    Args:
        traced: a trace with the placement installed.
        devices: how many there are.
    """
    tracer = traced.tracer
    used, peaks, where = [0] * devices, [0] * devices, [0] * devices
    for index, event in enumerate(tracer.events):
        storage = abs(event) - 1
        device = tracer.accounts[storage]
        used[device] += tracer.sizes[storage] if event > 0 else -tracer.sizes[storage]
        if used[device] > peaks[device]:
            peaks[device], where[device] = used[device], index
    return [
        Forecast(peak, next((name for name, start in reversed(tracer.marks) if start <= at), "placement"))
        for peak, at in zip(peaks, where, strict=True)
    ]
