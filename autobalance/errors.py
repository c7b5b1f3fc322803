"""Errors that carry figures a program can read beside the words a person reads."""

from __future__ import annotations

from collections.abc import Callable


class InfeasiblePlanError(ValueError):
    """No plan keeps every device within its budget.

    Example:
        >>> try:
        ...     autobalance.plan(profile, "2x8GiB")
        ... except autobalance.InfeasiblePlanError as error:
        ...     print(error.shortfall)

    What would help takes searches of its own, which are made when the text is first asked for: whoever only tries
    whether something fits does not wait for them.

    Args:
        message: what does not fit and what would help, or what finds that out.

    Attributes:
        need: bytes that each device would hold under the best plan that ignores budgets.
        budget: bytes that each device may hold.
        shortfall: bytes that each device lacks; 0 where it has enough.
        largest_block: name of the block that needs most by itself, None where the cause lies elsewhere.
    """

    def __init__(
        self,
        message: str | Callable[[], str],
        *,
        need: tuple[int, ...],
        budget: tuple[int, ...],
        largest_block: str | None = None,
    ) -> None:
        super().__init__(*([message] if isinstance(message, str) else []))
        self._message = message
        self.need = need
        self.budget = budget
        self.shortfall = tuple(max(0, wanted - given) for wanted, given in zip(need, budget, strict=True))
        self.largest_block = largest_block

    def __str__(self) -> str:
        if not isinstance(self._message, str):
            self._message = self._message()
            self.args = (self._message,)
        return self._message

    def __reduce__(self) -> tuple[object, ...]:
        # BaseException would rebuild the error from its text alone, which the keyword arguments forbid.
        return _rebuild, (str(self), self.need, self.budget, self.largest_block)


def _rebuild(
    message: str, need: tuple[int, ...], budget: tuple[int, ...], largest_block: str | None
) -> InfeasiblePlanError:
    return InfeasiblePlanError(message, need=need, budget=budget, largest_block=largest_block)
