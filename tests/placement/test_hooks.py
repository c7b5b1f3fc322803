from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from autobalance.compat import function_modes
from autobalance.placement import hooks
from autobalance.placement.glue import GlueMode
from autobalance.placement.install import Installed

Split = Callable[..., Installed]


class Block(nn.Module):
    """Runs `self.act(self, *args, **kwargs)`; its weight says where it must run."""

    def __init__(self, act: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.act = act

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.act(self, *args, **kwargs)

    def encode(self, x: Tensor) -> Tensor:
        return x * self.weight + 10


class Model(nn.Module):
    """Blocks `a` and `b`; the test calls them as glue would."""

    def __init__(self, act_a: Callable[..., Any], act_b: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.a, self.b = Block(act_a), Block(act_b or act_a)

    def self_balance(self) -> list[str]:
        return ["a", "b"]


def add(block: Block, x: Tensor, **kwargs: Any) -> Tensor:
    return x + block.weight


def ones(index: int = 0) -> Tensor:
    return torch.ones(2, device=f"simulated:{index}")


def state() -> tuple[Any, ...]:
    """What a block must leave as it was."""
    return torch.simulated.current_device(), function_modes(), len(hooks._visits.stack)


def test_inputs_move_and_the_output_stays(split: Split) -> None:
    model = Model(add)
    split(model, [1, 2])
    output = model.b(model.a(ones()))
    assert str(output.device) == "simulated:2"
    assert output.tolist() == [3.0, 3.0]


def test_keyword_arguments_move(split: Split) -> None:
    model = Model(lambda block, *, x, options: x + options["y"][0] + block.weight)
    split(model, [1, 1])
    assert model.a(x=ones(0), options={"y": [ones(2)]}).tolist() == [3.0, 3.0]


def test_the_blocks_device_is_current_inside_and_glue_is_off(split: Split) -> None:
    seen: list[Any] = []

    def look(block: Block, x: Tensor) -> Tensor:
        seen.append((torch.simulated.current_device(), [type(mode) for mode in function_modes()]))
        return x + block.weight

    model = Model(look)
    installed = split(model, [1, 2])
    with installed.glue():
        before = state()
        model.b(model.a(ones()))
        assert state() == before
    assert seen == [(1, []), (2, [])]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_everything_as_it_was(error: type[BaseException], split: Split) -> None:
    def fail(block: Block, x: Tensor) -> Tensor:
        raise error("from the block")

    model = Model(fail, lambda block, x: model.a(x))
    installed = split(model, [1, 2])
    before = state()
    with pytest.raises(error, match="from the block"), installed.glue():
        model.b(ones())
    assert state() == before


def test_a_caught_exception_leaves_the_glue_on(split: Split) -> None:
    def fail(block: Block, x: Tensor) -> Tensor:
        raise ValueError("from the block")

    model = Model(fail)
    installed = split(model, [1, 2])
    with installed.glue():
        inside = state()
        with pytest.raises(ValueError, match="from the block"):
            model.a(ones())
        assert state() == inside
        assert (ones(0) + ones(1)).tolist() == [2.0, 2.0]


def test_the_blocks_own_error_comes_first(split: Split) -> None:
    def change_and_fail(block: Block, x: Tensor) -> Tensor:
        x.add_(1)
        raise ValueError("from the block")

    model = Model(change_and_fail)
    split(model, [1, 1])
    with pytest.raises(ValueError, match="from the block"):
        model.a(ones())


def test_an_interrupted_block_does_not_look_like_a_caller_later(split: Split) -> None:
    def interrupt(block: Block, x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model = Model(interrupt, add)
    installed = split(model, [1, 2])
    with installed.glue(), pytest.raises(KeyboardInterrupt):
        model.a(ones())
    with installed.glue():
        assert str(model.b(ones()).device) == "simulated:2"


def test_a_hook_that_fails_before_the_block_is_entered(split: Split) -> None:
    model = Model(add)
    installed = split(model, [1, 2])

    def refuse(module: nn.Module, args: Any) -> None:
        raise ValueError("refused")

    handle = model.a.register_forward_pre_hook(refuse, prepend=True)
    before = state()
    with pytest.raises(ValueError, match="refused"), installed.glue():
        model.a(ones())
    assert state() == before
    handle.remove()
    assert model.a(ones()).tolist() == [2.0, 2.0]


def test_an_argument_changed_in_place_is_refused_by_name(split: Split) -> None:
    model = Model(lambda block, x: x.mul_(2) + block.weight)
    split(model, [1, 1])
    message = r"block 'a' on simulated:1 changed one of its arguments in place \(shape \(2,\), torch.float32\)"
    with pytest.raises(RuntimeError, match=message) as caught:
        model.a(ones())
    assert "that tensor lives on simulated:0" in str(caught.value)
    assert "a list inside the list that `self_balance()` returns" in str(caught.value)


def test_an_argument_changed_in_place_is_refused_in_inference_mode_too(split: Split) -> None:
    model = Model(lambda block, cache: cache["keys"].add_(1))
    split(model, [1, 1])
    with torch.inference_mode(), pytest.raises(RuntimeError, match="block 'a'"):
        model.a({"keys": ones()})


def test_it_is_refused_while_another_exception_is_handled(split: Split) -> None:
    model = Model(lambda block, x: x.mul_(2))
    split(model, [1, 1])
    try:
        raise KeyError("handled")
    except KeyError:
        with pytest.raises(RuntimeError, match="block 'a'"):
            model.a(ones())


def test_an_argument_at_home_may_be_changed_in_place(split: Split) -> None:
    model = Model(lambda block, x: x.mul_(2) + block.weight)
    split(model, [1, 1])
    x = ones(1)
    assert model.a(x).tolist() == [3.0, 3.0]
    assert x.tolist() == [2.0, 2.0]


def test_what_a_block_appends_arrives_even_if_it_fails(split: Split) -> None:
    def append(block: Block, x: Tensor, kept: list[Any]) -> None:
        kept.append("seen")
        raise ValueError("from the block")

    model = Model(append)
    split(model, [1, 1])
    kept: list[Any] = [ones()]
    with pytest.raises(ValueError, match="from the block"):
        model.a(ones(), kept)
    assert kept[1] == "seen"


def test_a_block_that_calls_another_gets_its_output_where_it_is(split: Split) -> None:
    def outer(block: Block, x: Tensor, kept: list[Any]) -> Tensor:
        inner = model.b(x, kept)
        return inner + block.weight + kept[-1]

    def inner(block: Block, x: Tensor, kept: list[Any]) -> Tensor:
        kept.append(x * 5)
        return x + block.weight

    model = Model(outer, inner)
    installed = split(model, [1, 2])
    kept = [ones()]
    with installed.glue():
        output = model.a(ones(), kept)
    assert str(output.device) == "simulated:1"
    assert output.tolist() == [8.0, 8.0]
    assert kept[1].tolist() == [5.0, 5.0]
    output.sum().backward()
    assert model.b.weight.grad is not None
    assert model.b.weight.grad.tolist() == [1.0, 1.0]


def test_a_block_may_change_what_an_inner_block_returned(split: Split) -> None:
    model = Model(lambda block, x: model.b(x).mul_(3) + block.weight, add)
    split(model, [1, 2])
    assert model.a(ones()).tolist() == [7.0, 7.0]


def test_a_block_that_calls_itself(split: Split) -> None:
    def recurse(block: Block, x: Tensor, depth: int) -> Tensor:
        return x if depth == 0 else block(x + block.weight, depth - 1)

    model = Model(recurse)
    installed = split(model, [1, 2])
    before = state()
    with installed.glue():
        assert model.a(ones(), 3).tolist() == [4.0, 4.0]
    assert state() == before


def test_the_users_hooks_run_as_on_one_device(split: Split) -> None:
    model = Model(add)
    order: list[str] = []

    def before(module: Any, args: Any) -> Any:
        order.append(f"early pre {args[0].device}")
        return (args[0] + module.weight,)

    def late(module: Any, args: Any) -> Any:
        order.append("late pre")
        return (args[0] + module.weight,)

    def after(module: Any, args: Any, output: Tensor) -> Tensor:
        order.append("early post")
        return output * module.weight

    model.a.register_forward_pre_hook(before)
    model.a.register_forward_hook(after)
    split(model, [1, 2])
    model.a.register_forward_pre_hook(late)
    model.a.register_forward_hook(lambda module, args, output: output + args[0])
    assert model.a(ones()).tolist() == [7.0, 7.0]  # 1 + 1 + 1, + weight, + its input after the pre-hooks
    assert order == ["early pre simulated:1", "late pre", "early post"]


def test_full_backward_hooks_see_the_gradients(split: Split) -> None:
    model = Model(add)
    split(model, [1, 2])
    seen: list[str] = []
    model.a.register_full_backward_hook(lambda module, before, after: seen.append(str(after[0].device)))
    x = ones().requires_grad_()
    model.b(model.a(x)).sum().backward()
    assert seen == ["simulated:1"]
    assert x.grad is not None
    assert str(x.grad.device) == "simulated:0"


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_block_has_the_same_gradients(reentrant: bool, split: Split) -> None:
    def act(block: Block, x: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(x * block.weight) * mask

    def run(model: Model, x: Tensor, mask: Tensor, wrap: bool) -> list[list[float]]:
        for block in (model.a, model.b):
            x = checkpoint(block, x, mask, use_reentrant=reentrant) if wrap else block(x, mask)
        x.sum().backward()
        return [parameter.grad.tolist() for parameter in model.parameters()]

    model, plain = Model(act), Model(act)
    installed = split(model, [1, 2])
    x, mask = torch.tensor([0.3, 0.4], requires_grad=True), torch.tensor([1.0, 2.0])
    with installed.glue():
        gradients = run(model, x.detach().to("simulated:0").requires_grad_(), mask.to("simulated:0"), True)
    assert gradients == run(plain, x, mask, False)


def test_one_mask_crosses_once_to_each_device_while_it_is_held(split: Split, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    held: list[Tensor] = []

    def act(block: Block, x: Tensor, mask: Tensor) -> Tensor:
        held.append(mask)
        return x * mask * block.weight

    model = Model(act)
    installed = split(model, [1, 1])
    mask = ones()
    with installed.glue():
        x = ones(1)
        for block in (model.a, model.b, model.a):
            x = block(x, mask)
    sent += [str(tensor.device) for tensor in held]
    assert sent == ["simulated:1"] * 3
    assert len({id(tensor) for tensor in held}) == 1


def test_two_threads_may_run_the_model_at_once(split: Split) -> None:
    meet = threading.Barrier(2, timeout=20)

    def act(block: Block, x: Tensor) -> Tensor:
        meet.wait()  # both are inside
        assert not any(isinstance(mode, GlueMode) for mode in function_modes())
        return x + block.weight

    model = Model(act)
    installed = split(model, [1, 2])
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        try:
            with installed.glue():
                results[number] = (model.b(model.a(ones() * number)) + ones()).tolist()
        except BaseException as error:
            results[number] = error
            meet.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [4.0, 4.0], 5: [8.0, 8.0]}


def test_modes_of_the_user_stay_where_they_were(split: Split) -> None:
    class Counting(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += 1
            return func(*args, **(kwargs or {}))

    model = Model(add)
    installed = split(model, [1, 2])
    with installed.glue(), Counting() as mode:
        before = function_modes()
        calls = mode.calls
        model.a(ones(0))
        assert mode.calls > calls + 1
        assert function_modes() == before


def test_a_device_context_of_the_user_holds_inside_blocks(split: Split) -> None:
    model = Model(lambda block, x: torch.zeros(2).to(x.device) + x, lambda block, x: torch.zeros(2))
    installed = split(model, [1, 2])
    with installed.glue():
        with torch.device("simulated:3"):
            assert str(torch.zeros(1).device) == "simulated:3"
            assert str(model.b(ones()).device) == "simulated:3"
            model.a(ones())
            assert str(torch.zeros(1).device) == "simulated:3"
        assert torch.zeros(1).device.type == "cpu"
    assert function_modes() == []


def test_a_copied_model_moves_on_its_own(split: Split) -> None:
    model = Model(add)
    split(model, [1, 2])
    twin = copy.deepcopy(model)
    model.a.weight.data.zero_()
    assert twin.b(twin.a(ones())).tolist() == [3.0, 3.0]
    assert model.b(model.a(ones())).tolist() == [2.0, 2.0]


class Named(Block):
    """A block that pickle can find."""

    def __init__(self) -> None:
        super().__init__(add)


def test_a_pickled_block_still_has_its_door(split: Split) -> None:
    model = Model(add)
    model.a = Named()
    split(model, [0, 2], methods={"a": ["encode"]})
    twin = pickle.loads(pickle.dumps(model.a)).to("simulated:0")  # simulated tensors are pickled as plain ones
    assert twin(ones(3)).tolist() == [2.0, 2.0]
    assert twin.encode(ones(3)).tolist() == [11.0, 11.0]
    assert str(twin.encode(ones(3)).device) == "simulated:0"
