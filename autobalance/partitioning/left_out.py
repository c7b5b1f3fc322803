"""What a plan leaves out, in words: empty devices, optimizers on the host, plans whose memory falls into pieces."""

from __future__ import annotations

from collections.abc import Sequence

from autobalance.partitioning.chains.policies import NEARLY
from autobalance.partitioning.chains.problem import Problem

EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
"""Setting of CUDA's caching allocator that joins free memory."""


def note_on_empty_devices(assignment: Sequence[int], root: int, devices: int) -> tuple[str, ...]:
    """Why devices are empty in a plan of the least step time: a user who gave them expects them to work.

    Example:
        >>> note_on_empty_devices([0, 0, 1], root=1, devices=3)
        ("device 2 stays empty: with it a step would be over 2% slower, or the fullest device no emptier; policy=...",)

    Args:
        assignment: device index per block.
        root: device index of batch and loss.
        devices: how many there are.

    Returns:
        One line; none where there are no blocks for the others.
    """
    empty = sorted(set(range(devices)) - {*assignment, root})
    if not empty or len(assignment) <= len(set(assignment)):
        return ()
    named = f"devices {', '.join(map(str, empty))} stay" if len(empty) > 1 else f"device {empty[0]} stays"
    return (
        f"{named} empty: with {'them' if len(empty) > 1 else 'it'} a step would be over {NEARLY:.0%} slower, or the "
        f"fullest device no emptier; policy='balanced' levels memory over all devices, whatever time that takes",
    )


def note_on_host(devices: Sequence[int], seconds: float) -> tuple[str, ...]:
    """What optimizers on the host take, which no micro-batch does and the step time therefore leaves out.

    Example:
        >>> note_on_host([0, 2], seconds=0.31)
        ("the optimizers of devices 0, 2 run on the host, which takes about 0.31 s once per step, apart from ...",)

    Args:
        devices: whose optimizer state is on the host.
        seconds: once per step.

    Returns:
        One line; none where no optimizer is on the host.
    """
    if not devices:
        return ()
    whose = f"optimizers of devices {', '.join(map(str, devices))} run" if len(devices) > 1 else ""
    return (
        f"the {whose or f'optimizer of device {devices[0]} runs'} on the host, which takes about {seconds:.2g} s once "
        f"per step, apart from the step time",
    )


def note_on_pieces(problem: Problem) -> tuple[str, ...]:
    """That plans were left out because allocators would run out, and what would help.

    Example:
        >>> note_on_pieces(problem)
        ("plans whose tensors fit were left out, as the caching allocator of device 0 would run out: ...",)

    Args:
        problem: after the search.

    Returns:
        One line; none where all could be served.
    """
    if not problem.ran_out:
        return ()
    return (
        f"plans whose tensors fit were left out, as the caching allocator of device "
        f"{', '.join(map(str, sorted(problem.ran_out)))} would run out: free memory lies in pieces that are too small, "
        f"which {EXPANDABLE} joins",
    )
