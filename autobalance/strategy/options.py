"""The strategy's options, checked as soon as they are given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autobalance.schedules.launches import SCHEDULES


@dataclass(frozen=True)
class Options:
    """How to plan and run; see `SelfBalanceStrategy` for the meaning of each.

    Raises:
        ValueError: for a value that does not exist, saying which do.
    """

    policy: str = "auto"
    max_memory: dict[int | str, int | str] | None = None
    reserve: int | str | float = "auto"
    pin: dict[str, int] | None = None
    micro_batches: int | str = "auto"
    schedule: str = "auto"
    batch_norm: str = "fallback"
    recompute: bool | str = "auto"
    offload: bool = False
    worst_batch: Any = None
    retry_on_oom: bool = True
    rebalance: bool = False

    def __post_init__(self) -> None:
        _one_of("policy", self.policy, _POLICIES)
        self._check_micro_batches()
        _one_of("schedule", self.schedule, ("auto", *SCHEDULES))
        _one_of("batch_norm", self.batch_norm, ("fallback", "deferred"))
        _one_of("recompute", self.recompute, ("auto", True, False))
        _one_of("offload", self.offload, (True, False))
        _one_of("retry_on_oom", self.retry_on_oom, (True, False))
        _one_of("rebalance", self.rebalance, (True, False))
        _ = self.batches_to_scan

    def _check_micro_batches(self) -> None:
        if type(self.micro_batches) is not int or self.micro_batches < 1:
            _one_of("micro_batches", self.micro_batches, ("auto", "accumulate"), or_else="a number from 1 on")
        if self.schedule == "naive" and self.micro_batches not in ("auto", 1):
            raise ValueError(
                f"`micro_batches={self.micro_batches!r}` needs a schedule that overlaps micro-batches, but "
                f"schedule='naive' takes batches whole, one after the other. Choose '1f1b', 'gpipe' or 'looped', or "
                f"'auto'."
            )

    @property
    def may_split(self) -> bool:
        """Whether a batch may be split into micro-batches."""
        return self.micro_batches != 1 and self.schedule != "naive"

    @property
    def whole(self) -> Options:
        """The same options for batches that are not split."""
        return replace(self, micro_batches="auto", schedule="naive")

    @property
    def batches_to_scan(self) -> int:
        """How many training batches to look at for the largest: 1, unless `worst_batch="scan:N"`."""
        if not isinstance(self.worst_batch, str):
            return 1
        word, _, count = self.worst_batch.partition(":")
        if word != "scan" or not count.isdigit() or int(count) < 1:
            raise ValueError(
                f"`worst_batch={self.worst_batch!r}` is no way to find a batch. Give the batch itself, or 'scan:200' "
                f"for the largest of the first 200 training batches."
            )
        return int(count)


_POLICIES = ("auto", "balanced", "balanced_low_0", "minimize_first_gpu_memory", "sequential")


def _one_of(name: str, value: object, known: tuple[object, ...], or_else: str = "") -> None:
    # By type too: 1 == True, but `micro_batches=True` is a mistake.
    if not any(type(value) is type(choice) and value == choice for choice in known):
        choices = ", ".join([*map(repr, known), *filter(None, [or_else])])
        raise ValueError(f"`{name}={value!r}` does not exist. Choose from: {choices}.")
