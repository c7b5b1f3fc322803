"""Parts of a batch that were made on the host: only there are the numbers that tell graphs or sequences apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autobalance.execution.batches.splitting import Parts
from autobalance.placement.contents import elements_in


@dataclass(frozen=True)
class HostParts:
    """A batch in parts, for a trial that knows no numbers.

    Attributes:
        whole: the batch as a step is given it, but on the host.
        parts: of it.
        few: the samples that the test before the first batch runs at once, where it takes more than a part has; None:
            no more.
    """

    whole: Any
    parts: Parts
    few: Any = None

    @property
    def largest(self) -> Any:
        """The part with the most elements."""
        return max(self.parts.batches, key=elements_in)
