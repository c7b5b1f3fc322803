"""What the CPU's own allocator holds in each phase of a run, from the memory events of `torch.profiler`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile, record_function

Mark = Callable[[str], None]
_MARK = "phase: "


@dataclass(frozen=True)
class Counted:
    """What a run held.

    Attributes:
        peaks: most bytes at once by "step 1 forward", "step 1 backward", "step 1 optimizer", ...
        scratch: most bytes by the name of an operation that its kernels took and gave back beside operands and results.
    """

    peaks: dict[str, int]

    def peak(self, step: int, phase: str) -> int:
        """Most bytes at once in a phase of a step, "forward+backward" or "optimizer"."""
        return max(self.peaks[f"step {step} {part}"] for part in phase.split("+"))


def count(run: Callable[[Mark], None]) -> Counted:
    """Run with the allocator watched; what was allocated before is not counted.

    Args:
        run: is given a function that says where a phase begins; phases of the same name are one.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(_begin)
    events = [
        (event.start_ns(), event.name(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()  # type: ignore[union-attr]  # ran, so it has results
        if event.name() == "[memory]" or event.name().startswith(_MARK)
    ]
    peaks: dict[str, int] = {}
    phase, held = "", 0
    for _, name, nbytes in sorted(events, key=lambda event: event[0]):
        if name.startswith(_MARK):
            phase = name.removeprefix(_MARK)
        else:
            held += nbytes
        peaks[phase] = max(peaks.get(phase, 0), held)
    return Counted(peaks)


def _begin(phase: str) -> None:
    with record_function(_MARK + phase):
        pass
