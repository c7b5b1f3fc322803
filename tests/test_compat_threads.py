"""Every private name of torch's thread-local state still does what autobalance relies on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from autobalance import compat


def in_thread(call: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def test_modes_of_one_thread_can_be_those_of_another() -> None:
    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def elsewhere() -> None:
        assert compat.dispatch_modes() == []
        with compat.with_modes([], modes):
            torch.ones(2)
        assert compat.dispatch_modes() == []

    seen: list[Any] = []
    with Seeing() as mode:  # type: ignore[no-untyped-call]
        modes = compat.dispatch_modes()
        assert modes == [mode]
        in_thread(elsewhere)
    assert seen == [torch.ops.aten.ones.default]


def test_hooks_on_saved_tensors_are_listed_and_stay_where_they_are() -> None:
    def hooks(name: str) -> saved_tensors_hooks:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(name)
            return tensor

        return saved_tensors_hooks(pack, lambda packed: packed)

    saved: list[str] = []
    assert compat.saved_tensor_hooks() == []
    with hooks("outer"), hooks("inner"):
        found = compat.saved_tensor_hooks()
        for pack, _ in found:
            pack(torch.ones(1))
        assert saved == ["outer", "inner"]
        torch.ones(1, requires_grad=True).exp()
    assert saved == ["outer", "inner", "inner"]


def test_autocast_of_one_thread_can_be_that_of_another() -> None:
    def elsewhere() -> None:
        with compat.with_autocast_state(state):
            found.append(torch.ones(2, 2) @ torch.ones(2, 2))
        found.append(torch.ones(2, 2) @ torch.ones(2, 2))

    found: list[torch.Tensor] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = compat.autocast_state()
    in_thread(elsewhere)
    assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.float32]


def test_casts_of_weights_are_kept_from_one_autocast_to_the_next() -> None:
    def casts() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = x @ weight
        assert product.grad_fn is not None
        return product.grad_fn.next_functions[1][0]

    x, weight = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    with compat.casts_kept():
        assert casts() is casts()
    compat.drop_casts()
    assert casts() is not casts()
