from __future__ import annotations

import contextlib
import contextvars
import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from autobalance.execution.process_state import ProcessState
from autobalance.execution.suspended import Suspended, current_call, hand_back
from autobalance.execution.workers import Worker, Workers


def threads() -> list[str]:
    """Those of calls that are alive, apart from those that are about to end with a pipeline that nobody holds."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("autobalance"):
            thread.join(timeout=0.1)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("autobalance")]


def test_calls_run_in_turns_from_one_hand_over_to_the_next() -> None:
    told: list[str] = []

    def call(name: str) -> Callable[[], None]:
        def run() -> None:
            told.append(f"{name}1")
            hand_back()
            told.append(f"{name}2")

        return run

    one, two = Suspended(call("a")), Suspended(call("b"))
    for suspended in (one, two, two, one):
        suspended.resume()
    assert told == ["a1", "b1", "b2", "a2"]
    assert one.has_ended
    assert threads() == []


def test_handing_back_does_nothing_outside_of_a_call() -> None:
    hand_back()
    assert current_call() is None


def test_an_error_comes_with_the_traceback_of_the_users_code() -> None:
    def fails() -> None:
        raise ValueError("of the user")

    call = Suspended(fails)
    with pytest.raises(ValueError, match="of the user") as caught:
        call.resume()
    assert "fails" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert threads() == []


def test_settings_that_cannot_be_put_back_are_an_error_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(state: ProcessState) -> None:
        raise RuntimeError("not allowed to set this flag")

    monkeypatch.setattr(ProcessState, "put_back", refuses)
    call = Suspended(lambda: None)
    with pytest.raises(RuntimeError, match="not allowed to set this flag"):
        call.resume()
    assert call.has_ended
    assert threads() == []


def test_a_call_that_has_ended_cannot_be_resumed() -> None:
    call = Suspended(lambda: None)
    call.resume()
    with pytest.raises(RuntimeError, match="has ended"):
        call.resume()


def test_cancelling_runs_what_the_user_does_at_the_end() -> None:
    told: list[str] = []

    def run() -> None:
        try:
            hand_back()
        finally:
            told.append("closed")

    call = Suspended(run)
    call.resume()
    call.cancel()
    assert told == ["closed"]
    assert threads() == []


def test_a_call_that_catches_everything_is_wound_down_as_well() -> None:
    def run() -> None:
        for _ in range(3):
            with contextlib.suppress(BaseException):
                hand_back()

    call = Suspended(run)
    call.resume()
    call.cancel()
    assert call.has_ended
    assert threads() == []


def test_a_call_that_has_not_begun_is_cancelled_without_running() -> None:
    told: list[str] = []
    call = Suspended(lambda: told.append("ran"))
    call.cancel()
    assert call.has_ended
    assert told == []


def interrupted(call: Suspended, instruction: int) -> bool:
    """Resume a call up to its end, with an interrupt at an instruction of this thread; whether it came to that."""
    files, count = {method.__code__.co_filename for method in (Suspended.resume, Worker.run)}, 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == instruction:
                raise KeyboardInterrupt
        return trace if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        while not call.has_ended:
            call.resume()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_call_whose_resumption_was_interrupted_anywhere_can_be_wound_down() -> None:
    kept, instruction = Workers(), 1
    while interrupted(call := Suspended(hand_back, workers=kept), instruction):
        winding = threading.Thread(target=call.cancel, daemon=True)
        winding.start()
        winding.join(timeout=5)
        assert not winding.is_alive(), f"instruction {instruction}"
        assert call.has_ended
        instruction += 1
    assert instruction > 50
    kept.end()
    del call
    assert threads() == []


def test_what_a_call_holds_is_freed_when_it_is_cancelled() -> None:
    class Held:
        pass

    freed = threading.Event()

    def run() -> None:
        held = Held()
        weakly = weakref.finalize(held, freed.set)
        assert weakly.alive
        hand_back()

    call = Suspended(run)
    call.resume()
    call.cancel()
    assert freed.is_set()


def seen() -> dict[str, object]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        "device": torch.empty(0).device.type,
        "dtype": torch.get_default_dtype(),
    }


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: torch.autograd.set_multithreading_enabled(False),
    ],
)
def test_a_call_sees_the_state_of_the_thread_that_made_it(context: Callable[[], object]) -> None:
    found: list[dict[str, object]] = []
    with context():  # type: ignore[attr-defined]
        expected = seen()
        call = Suspended(lambda: found.append(seen()))
    call.resume()
    assert found == [expected]


def test_a_call_saves_tensors_through_the_hooks_of_the_thread_that_made_it() -> None:
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call = Suspended(lambda: torch.ones(3, requires_grad=True).exp())
    call.resume()
    assert packed == [torch.Size([3])]


def test_a_call_sees_context_variables() -> None:
    variable = contextvars.ContextVar("variable", default="outside")
    token = variable.set("inside")
    found: list[str] = []
    call = Suspended(lambda: found.append(variable.get()))
    variable.reset(token)
    call.resume()
    assert found == ["inside"]


def test_calls_do_not_mix_up_their_grad_modes() -> None:
    found: list[bool] = []

    def without() -> None:
        with torch.no_grad():
            hand_back()
            found.append(torch.is_grad_enabled())

    def with_gradients() -> None:
        hand_back()
        found.append(torch.is_grad_enabled())

    one, two = Suspended(without), Suspended(with_gradients)
    for suspended in (one, two, one, two):
        suspended.resume()
    assert found == [False, True]
    assert torch.is_grad_enabled()


def test_calls_do_not_mix_up_settings_of_the_process() -> None:
    seen: list[tuple[torch.dtype, bool, bool, bool]] = []

    def look() -> None:
        anomalies, cudnn = torch.is_anomaly_enabled(), torch.backends.cudnn.deterministic
        seen.append((torch.get_default_dtype(), torch.backends.cuda.math_sdp_enabled(), anomalies, cudnn))

    @contextlib.contextmanager
    def half() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def call() -> None:
        look()
        with (
            half(),
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION),
            torch.autograd.set_detect_anomaly(True),
            torch.backends.cudnn.flags(deterministic=True),
        ):
            look()
            hand_back()
            look()
        look()

    one, two, cancelled = (Suspended(call) for _ in range(3))
    for suspended in (one, two, cancelled, one, two):
        suspended.resume()
        look()
    cancelled.cancel()
    look()
    plain, inside = (torch.float32, True, False, False), (torch.bfloat16, False, True, True)
    assert seen == [*[plain, inside, plain] * 3, *[inside, plain, plain] * 2, plain]


def test_a_graph_made_in_one_call_has_its_backward_in_another_thread() -> None:
    layer, losses = nn.Linear(2, 1), []
    call = Suspended(lambda: losses.append(layer(torch.ones(1, 2)).sum()))
    call.resume()
    losses[0].backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[1.0, 1.0]]
