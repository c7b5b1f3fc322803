"""Private names of torch's dispatcher, of its choice between attention kernels, and of its compiler."""

from __future__ import annotations

import contextlib
import sys
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend

_WORDS = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
    SDPBackend.MATH: "math",
}
_DEFAULT_ORDER = ["flash", "efficient", "math", "cudnn"]


def attention_order(cudnn_first: bool) -> list[str]:
    """Attention kernels in the order in which torch tries them: "flash", "efficient", "cudnn", "math".

    Args:
        cudnn_first: whether the GPU prefers cuDNN's while the user has set no order of their own.
    """
    known = {int(backend.value): word for backend, word in _WORDS.items()}
    private: Any = torch._C
    order = [known[number] for number in private._get_sdp_priority_order() if number in known]
    if cudnn_first and order == _DEFAULT_ORDER:
        return ["cudnn", "flash", "efficient", "math"]
    return order


def schema_of(func: Any) -> Any:
    """An operator's name, arguments and results as the dispatcher knows them.

    Args:
        func: an overload, such as `torch.ops.aten.add.Tensor`.
    """
    return func._schema


@cache
def written_by(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator writes to.

    Args:
        func: an overload, such as `torch.ops.aten.add_.Tensor`.
    """
    arguments = enumerate(schema_of(func).arguments)
    return tuple((i, each.name) for i, each in arguments if each.alias_info is not None and each.alias_info.is_write)


def drop_library(library: torch.library.Library) -> None:
    """Take back what was registered through `library`.

    Args:
        library: whose kernels are to go.
    """
    library._destroy()


def as_written() -> contextlib.AbstractContextManager[Any]:
    """A context in which compiled functions and modules run as the user wrote them."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing the compiler takes seconds
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile(module)` or `module.compile()` was called.

    Args:
        module: as the user has it.
    """
    return "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
