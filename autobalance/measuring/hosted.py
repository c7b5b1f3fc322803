"""Which tensors of a step on the host would be there too if the model were on a device, such as lengths of sequences.

Where everything is on the host, that cannot be read off a tensor: it follows from how the step came by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from autobalance.measuring.courier import all_tensors


class Hosted(TorchFunctionMode):
    """A mode in which glue runs on the host that is written for a device.

    On the host are what `.cpu()` or `.to("cpu")` brings there, what is made without a device, and what is computed from
    such tensors alone. A device that is read off another tensor is the one where the model would be.

    Example:
        >>> with Hosted() as hosted:
        ...     hosted.holds(torch.ones(2)), hosted.holds(torch.ones(2, device=batch.device))  # doctest: +SKIP
        (True, False)
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: Any = WeakIdKeyDictionary()
        self._paused = False

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor would be on the host."""
        return tensor in self._held

    def add(self, tensor: Tensor) -> None:
        """From now on, `tensor` is on the host."""
        self._held[tensor] = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, tensors really are where they say."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._paused or not isinstance(result, (Tensor, tuple, list)):
            return result
        if func in (Tensor.cpu, Tensor.to) and isinstance(result, Tensor):
            return self._moved(func, result, args, kwargs)
        given = all_tensors((args, kwargs))
        if all(map(self.holds, given)) if given else kwargs.get("device") is None:
            for tensor in all_tensors(result):
                self.add(tensor)
        return result

    def _moved(self, func: Any, result: Tensor, args: Any, kwargs: Any) -> Tensor:
        source = args[0]
        where = [*args[1:2], kwargs.get("device"), kwargs.get("other")]
        to_device = any(isinstance(item, torch.device) for item in where)
        to_device |= any(isinstance(item, Tensor) and not self.holds(item) for item in where)
        to_host = func is Tensor.cpu or "cpu" in [item for item in where if isinstance(item, str)]
        is_on_host = to_host or (self.holds(source) and not to_device)
        if result is source and is_on_host != self.holds(source):
            result = result.clone()  # between a device and the host it would be another tensor
        if is_on_host:
            self.add(result)
        return result
