"""Settings of torch that hold for the whole process, kept apart for calls that take turns.

A call that is suspended inside of `with torch.nn.attention.sdpa_kernel(...)`, or of Lightning's context of a half
precision, would leave its settings to the others, and put back later what others have set meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.backends import cuda, cudnn

_Setting = tuple[Callable[[], Any], Callable[[Any], None]]

_OF_CUDNN = ("enabled", "benchmark", "deterministic")

_SETTINGS: tuple[_Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    *((partial(getattr, cudnn, name), partial(setattr, cudnn, name)) for name in _OF_CUDNN),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
)


class ProcessState:
    """The settings as they are now.

    Example:
        >>> before = ProcessState()
        >>> torch.set_default_dtype(torch.bfloat16)
        >>> before.put_back()
        >>> torch.get_default_dtype()
        torch.float32
    """

    def __init__(self) -> None:
        self._values = [get() for get, _ in _SETTINGS]

    def put_back(self, now: ProcessState | None = None) -> None:
        """Make them what they were.

        Args:
            now: what they are, where that is known.
        """
        present = (ProcessState() if now is None else now)._values
        if self._values == present:
            return
        for (_, put), value, other in zip(_SETTINGS, self._values, present, strict=True):
            if value != other:
                put(value)
