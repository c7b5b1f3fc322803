"""Every private name of torch and Lightning still does what autobalance relies on; a failure here names what moved."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn, overrides
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import optimizer
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from autobalance import compat
from autobalance.simulated import SimulatedTensor, simulate


@pytest.fixture
def device() -> Iterator[str]:
    """A simulated device: torch's one backend written in Python is registered once a process."""
    with simulate(2):
        yield "simulated:1"


def test_python_backend_is_registered(device: str) -> None:
    assert compat.private_backend_name() == "simulated"
    assert torch.get_device_module("simulated").device_count() == 2
    assert torch.accelerator.is_available()
    with simulate(1):
        assert torch.accelerator.device_count() == 1


def test_stream_of_the_free_device_type_can_be_made(device: str) -> None:
    class Stream(torch.Stream):
        pass

    stream = compat.make_stream(Stream, 1, 7)
    assert isinstance(stream, Stream)
    assert (stream.device, stream.device_index, stream.stream_id) == (torch.device(device), 1, 7)
    torch.ones(1, device=device).record_stream(stream)


def test_wrapper_reports_what_it_was_made_like_and_can_be_reshaped(device: str) -> None:
    like = torch.zeros(4, 3).t()[1:]
    wrapper = compat.make_wrapper(SimulatedTensor, like, torch.device(device), False)
    assert (wrapper.shape, wrapper.stride(), wrapper.storage_offset()) == ((2, 4), (1, 3), 1)
    assert (wrapper.device, wrapper.dtype) == (torch.device(device), torch.float32)
    larger = torch.zeros(9, 9)[:, 2:]
    compat.reshape_wrapper(wrapper, larger, compat.make_wrapper(SimulatedTensor, larger, torch.device(device), False))
    assert (wrapper.shape, wrapper.stride(), wrapper.storage_offset()) == ((9, 7), (9, 1), 2)


def test_storages_have_an_identity() -> None:
    x, y = torch.zeros(2), torch.zeros(2)
    assert compat.storage_key(x.untyped_storage()) == compat.storage_key(x[1:].untyped_storage())
    assert compat.storage_key(x.untyped_storage()) != compat.storage_key(y.untyped_storage())


def test_tensor_is_replaced_under_its_python_object() -> None:
    x = nn.Parameter(torch.zeros(2))
    seen: list[str] = []
    x.register_hook(lambda gradient: seen.append("hook"))
    compat.replace_tensor(x, torch.ones(3).requires_grad_())
    x.sum().backward()
    assert (x.tolist(), seen) == ([1.0, 1.0, 1.0], ["hook"])
    graph = (x * 2).sum()
    compat.replace_tensor(x, torch.ones(2).requires_grad_())
    with pytest.raises(RuntimeError, match="moved to another device after the forward"):
        graph.backward()


def test_gradient_hooks_are_found_and_set_off_for_a_while() -> None:
    x, seen = nn.Parameter(torch.ones(2)), list[str]()
    handle = x.register_hook(lambda gradient: seen.append("hook"))
    x.register_post_accumulate_grad_hook(lambda parameter: seen.append("after"))
    assert (len(compat.gradient_hooks(x)), len(compat.accumulation_hooks(x))) == (1, 1)
    with compat.gradient_hooks_off([x]):
        assert not compat.gradient_hooks(x)
        x.sum().backward()
    assert seen == ["after"]
    x.sum().backward()
    assert seen == ["after", "hook", "after"]
    handle.remove()
    assert not compat.gradient_hooks(x)


def test_data_of_a_simulated_tensor_is_assigned_past_torch(device: str) -> None:
    x = nn.Parameter(torch.ones(2))
    x.data = torch.zeros(3, device=device)
    assert (str(x.device), x.shape) == (device, (3,))
    plain = nn.Parameter(torch.ones(2))
    plain.data = torch.zeros(3)
    assert plain.tolist() == [0.0, 0.0, 0.0]
    compat.assign_plain_data(plain, torch.ones(1))
    assert plain.tolist() == [1.0]


def test_autocast_can_be_excluded_and_its_exit_is_told(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "clear_autocast_cache", torch.clear_autocast_cache)
    x = torch.ones(2, 2, device=device)
    exits: list[str] = []
    compat.on_autocast_exit(lambda: exits.append("cleared"))
    with torch.autocast("simulated", torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with compat.excluded_autocast():
            assert (x @ x).dtype is torch.float32
        with torch.autocast("simulated", torch.bfloat16):
            pass
        assert exits == []
    assert exits == ["cleared"]


def test_autocast_says_whether_it_keeps_casts() -> None:
    assert not compat.autocast_keeps_casts()
    with torch.autocast("cpu", torch.bfloat16):
        assert compat.autocast_keeps_casts()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            assert not compat.autocast_keeps_casts()
        with compat.excluded_autocast():
            assert compat.autocast_keeps_casts()
    assert not compat.autocast_keeps_casts()


def test_views_are_known_to_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    assert (compat.is_view(x), compat.is_view(x[:1])) == (False, True)


def test_python_is_asked_where_torch_hides_it(device: str) -> None:
    hiding = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Python))
    with FakeTensorMode(), hiding:
        assert not compat.is_fake(torch.ones(2))
        with compat.dispatching_to_python():
            assert compat.is_fake(torch.ones(2))


def test_backward_runs_in_the_thread_that_asks_for_it(device: str) -> None:
    threads: list[int] = []
    x = torch.ones(2, device=device, requires_grad=True)
    x.register_hook(lambda gradient: threads.append(threading.get_ident()))
    (x * 2).sum().backward()
    assert threads == [threading.get_ident()]


def test_backward_of_other_devices_keeps_its_threads_where_cuda_is_in_use(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def threads_are_allowed(where: str) -> bool:
        seen: list[bool] = []
        x = torch.ones(2, device=where, requires_grad=True)
        x.register_hook(lambda gradient: seen.append(torch._C._is_multithreading_enabled()))
        (x * 2).sum().backward()
        return seen[0]

    assert (threads_are_allowed("cpu"), threads_are_allowed(device)) == (False, False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert (threads_are_allowed("cpu"), threads_are_allowed(device)) == (True, False)


def test_foreach_forms_are_chosen_by_default(device: str) -> None:
    parameter = nn.Parameter(torch.ones(2, device=device))
    assert optimizer._default_to_fused_or_foreach([parameter], differentiable=False) == (False, True)


class Counting(overrides.TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_a_function_mode_can_be_taken_from_under_another_and_put_back() -> None:
    below, above = Counting(), Counting()
    with below, above:
        assert compat.function_modes() == [below, above]
        assert compat.remove_function_mode(below) == 1
        assert compat.function_modes() == [above]
        assert compat.remove_function_mode(below) is None
        torch.ones(1) + 1
        assert (below.calls, above.calls) == (0, 2)
        compat.insert_function_mode(below, above=1)
        assert compat.function_modes() == [below, above]
    assert compat.function_modes() == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_functions_can_be_wrapped(reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_checkpoint_without_reentrant_generator", "CheckpointFunction"):
        monkeypatch.setattr(checkpoint, name, getattr(checkpoint, name))
    monkeypatch.delattr(checkpoint, "_wrapped_by_autobalance", raising=False)
    calls: list[str] = []

    def wrapping(name: str) -> Callable[..., Callable[..., torch.Tensor]]:
        def wrap(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def wrapped(*args: torch.Tensor) -> torch.Tensor:
                calls.append(name)
                return function(*args)

            return wrapped

        return wrap

    inner, outer = wrapping("inner"), wrapping("outer")
    for wrap in (inner, outer, inner):
        compat.call_at_checkpoint(wrap)
    x = torch.ones(2, requires_grad=True)
    loss = checkpoint.checkpoint(lambda x: (x * x).sum(), x, use_reentrant=reentrant)
    before = len(calls)
    loss.backward()
    assert calls[before:] == ["outer", "inner"], "the function that runs again is the wrapped one"
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]
    checkpoint.__dict__.pop("_wrapped_by_autobalance")


def test_every_backward_can_be_put_in_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", torch.autograd._engine_run_backward)
    monkeypatch.delattr(torch.autograd, "_context_of_autobalance", raising=False)
    seen: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        seen.append("enter")
        yield
        seen.append("leave")

    compat.call_around_backward(context)
    compat.call_around_backward(context)
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: seen.append("hook"))
    x.sum().backward()
    torch.autograd.grad(x.sum(), x)
    assert seen == ["enter", "hook", "leave"] * 2
    del torch.autograd.__dict__["_context_of_autobalance"]


def test_a_module_with_its_own_way_of_being_moved_is_told() -> None:
    assert compat.moves_more_than_tensors(nn.LSTM(1, 1))
    assert not compat.moves_more_than_tensors(nn.Linear(1, 1))


def test_tensors_count_their_changes() -> None:
    x = torch.ones(2)
    before = compat.version(x)
    x[:1].add_(1)
    assert compat.version(x) == before + 1


def test_a_mode_is_told_of_gradients_that_are_set() -> None:
    told: list[object] = []

    class Telling(overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            told.append(func)
            return func(*args, **(kwargs or {}))

    x, value = torch.ones(2, requires_grad=True), torch.ones(2)
    with Telling():
        x.grad = value
    assert told == [compat.gradient_setter()]


def test_workspaces_of_cublas_can_be_given_back() -> None:
    compat.drop_cuda_workspaces(torch.device("cpu"))
    if torch.backends.cuda.is_built():
        compat.drop_cuda_workspaces(torch.device("cuda", 0))


def test_order_of_attention_kernels_is_torchs_own_or_the_users() -> None:
    assert compat.attention_order(cudnn_first=False)[:3] == ["flash", "efficient", "math"]
    assert compat.attention_order(cudnn_first=True) == ["cudnn", "flash", "efficient", "math"]
    wanted = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(wanted, set_priority=True):
        assert compat.attention_order(cudnn_first=True)[:2] == ["math", "efficient"]


def test_dropped_library_takes_its_kernels_back(device: str) -> None:
    value = torch.ones(2, device=device)
    library = torch.library.Library("aten", "IMPL")
    library.impl("rms_norm", lambda *args: torch.zeros(1, device=device), "AutogradPrivateUse1")
    replaced = torch.rms_norm(value, (2,))
    compat.drop_library(library)
    assert replaced.shape == (1,)
    assert torch.rms_norm(value, (2,)).shape == (2,)


def test_fakes_of_a_trace_refuse_to_give_a_pointer() -> None:
    with compat.make_fake_mode():
        fake = torch.ones(2)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        fake.data_ptr()


def test_fakes_of_a_trace_let_go_of_storages_that_operations_were_given() -> None:
    with compat.make_fake_mode():
        fake = torch.ones(4)
        held = weakref.ref(fake.untyped_storage())
        alias = torch.empty(0).set_(fake.untyped_storage(), 0, (4,), (1,))
        assert alias.untyped_storage() is fake.untyped_storage()
        del fake, alias
    assert held() is None


def test_recurrent_layers_run_on_other_weights_for_a_while() -> None:
    layer, other = torch.nn.LSTM(2, 3), torch.nn.LSTM(2, 3)
    x = torch.ones(1, 1, 2)
    own = layer._parameters
    layer._parameters = other._parameters
    with compat.flat_weights_of(torch.nn.Sequential(layer)):
        assert torch.equal(layer(x)[0], other(x)[0])
    layer._parameters = own
    assert not torch.equal(layer(x)[0], other(x)[0])


def test_hooks_on_saved_tensors_are_seen() -> None:
    assert not compat.saved_tensor_hooks_are_active()
    with torch.autograd.graph.save_on_cpu():
        assert compat.saved_tensor_hooks_are_active()


def test_a_tensor_made_of_others_is_taken_apart_and_rebuilt() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    pair = TwoTensor(torch.ones(3), torch.zeros(3))
    parts = compat.parts_of(pair)
    assert sorted(parts) == ["a", "b"]
    other = compat.rebuilt(pair, {name: part + 1 for name, part in parts.items()})
    assert isinstance(other, TwoTensor)
    assert torch.equal(other.a, torch.full((3,), 2.0))
    assert compat.parts_of(torch.ones(3)) == {}


def test_foreach_forms_are_chosen_for_fakes_as_for_what_they_stand_for() -> None:
    def norms() -> list[str]:
        seen: list[str] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(func.__name__)
                return func(*args, **(kwargs or {}))

        with FakeTensorMode():
            parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
            for parameter in parameters:
                parameter.grad = torch.ones(2)
            with Watch():
                nn.utils.clip_grad_norm_(parameters, 1.0)
        return [name for name in seen if "norm" in name]

    with compat.foreach_on_fakes():
        assert norms()[0].startswith("_foreach_norm")
    assert not norms()[0].startswith("_foreach_norm")


def test_trials_scaler_steps_whatever_the_gradients_are() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.full((1,), torch.inf)
    scaler, plain = compat.stepping_scaler("cpu"), torch.amp.GradScaler("cpu")
    for each, steps in ((plain, False), (scaler, True)):
        each.scale(torch.ones(1))
        stepping = torch.optim.SGD([parameter], 1.0)
        before = parameter.detach().clone()
        each.step(stepping)
        assert bool(parameter.ne(before).any()) is steps


def test_transformers_takes_a_fake_for_a_graph_in_the_making_only_outside() -> None:
    utils = pytest.importorskip("transformers.utils.import_utils", minversion=None)
    with FakeTensorMode():
        fake = torch.ones(2)
    assert utils.is_tracing(fake)
    with compat.unseen_by_transformers():
        assert not utils.is_tracing(fake)
    assert utils.is_tracing(fake)


def test_an_error_of_a_backward_is_told_from_others() -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    x = torch.ones(2, requires_grad=True)
    x.register_hook(fail)
    with pytest.raises(ZeroDivisionError) as caught:
        (x * 2).sum().backward()
    assert compat.raised_in_backward(caught.value)
    with pytest.raises(ZeroDivisionError) as caught:
        fail(x)
    assert not compat.raised_in_backward(caught.value)


def test_gradients_that_autograd_adds_are_told_and_whether_another_holds_them() -> None:
    seen: list[tuple[bool, bool]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor:
                seen.append((compat.accumulates_gradients(func, args, kwargs), compat.is_last_reference(args[0])))
            return func(*args, **(kwargs or {}))

    class AddsItself(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient + gradient

    def seen_in(branches: Callable[[torch.Tensor], torch.Tensor]) -> list[tuple[bool, bool]]:
        seen.clear()
        result = branches(torch.ones(3, requires_grad=True) * 2)
        with Watch():
            result.backward(torch.ones(3))
        return seen.copy()

    assert seen_in(lambda h: h.sin() + h.cos()) == [(True, True)]
    assert seen_in(lambda h: h + h) == [(True, False)]
    assert seen_in(lambda h: torch.cat([h, h.sin()])[3:]) == [(True, False)]
    assert [told for told, _ in seen_in(AddsItself.apply)] == [False]


def test_what_a_function_gave_is_added_while_its_own_node_is_current() -> None:
    seen: list[tuple[bool, bool, bool, int]] = []

    class Copies(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient.clone()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor:
                node = compat.current_node()
                told = compat.accumulates_gradients(func, args, kwargs, lambda node: compat.is_node_of(node, Copies))
                plain = compat.accumulates_gradients(func, args, kwargs)
                seen.append((told, plain, compat.is_node_of(node, Copies), compat.number_of(node)))
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True) * 2
    copies = [Copies.apply(x), Copies.apply(x)]
    numbers = [compat.number_of(copy.grad_fn) for copy in copies]
    result = torch.stack(copies).sum()
    assert [compat.is_node_of(copy.grad_fn, Copies) for copy in copies] == [True, True]
    assert not compat.is_node_of(x.grad_fn, Copies)
    assert compat.current_node() is None
    with Watch():
        result.backward()
    assert seen == [(True, False, True, numbers[0])]  # the later one's gradient comes first


def test_autograd_numbers_its_nodes_in_the_order_of_their_making() -> None:
    x = torch.ones(2, requires_grad=True)
    first = compat.next_number()
    y = x * 2
    z = y.exp()
    assert [compat.number_of(node.grad_fn) for node in (y, z)] == [first, first + 1]
    assert compat.next_number() == first + 2


def test_normalisations_over_samples_are_told_from_those_within_one() -> None:
    over_samples = [nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2), nn.LazyBatchNorm1d()]
    within_one = [nn.InstanceNorm1d(2), nn.InstanceNorm2d(2), nn.InstanceNorm3d(2)]
    neither = [nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.Linear(2, 2)]
    assert [compat.is_batch_norm(module) for module in over_samples + within_one + neither] == [True] * 5 + [False] * 6
    assert [compat.is_instance_norm(module) for module in within_one + over_samples + neither] == [True] * 3 + [
        False
    ] * 8


def test_transforms_of_torch_func_are_known_while_they_are_at_work() -> None:
    seen: list[bool] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.in_functional_transform())
        return x * 2

    watched(torch.ones(2))
    torch.func.vmap(watched)(torch.ones(2, 2))
    torch.func.grad(watched)(torch.tensor(1.0))
    watched(torch.ones(2))
    assert seen == [False, True, True, False]


def test_tables_of_a_module_are_the_very_ones() -> None:
    module = nn.BatchNorm1d(2, track_running_stats=False)
    assert compat.buffer_table(module) == dict.fromkeys(["running_mean", "running_var", "num_batches_tracked"])
    assert compat.parameter_table(module).keys() == {"weight", "bias"}
    plain = torch.ones(2)
    compat.parameter_table(module)["weight"] = plain
    compat.buffer_table(module)["running_mean"] = plain
    assert module.weight is module.running_mean is plain


def test_modules_tell_how_they_are_initialised() -> None:
    attention = nn.MultiheadAttention(4, 2)
    assert not hasattr(attention, "reset_parameters")
    with torch.no_grad():
        attention.in_proj_bias.fill_(3)
    initialise = compat.initialiser(attention)
    assert initialise is not None
    initialise()
    assert attention.in_proj_bias.tolist() == [0] * 12
    linear = nn.Linear(2, 2)
    assert compat.initialiser(linear) == linear.reset_parameters
    assert compat.initialiser(nn.ReLU()) is None


def test_operators_tell_their_arguments_and_which_of_them_they_write_to() -> None:
    schema = compat.schema_of(torch.ops.aten.dropout_.default)
    assert schema.name == "aten::dropout_"
    assert [argument.name for argument in schema.arguments] == ["self", "p", "train"]
    assert compat.written_by(torch.ops.aten.dropout_.default) == ((0, "self"),)
    assert compat.written_by(torch.ops.aten.dropout.default) == ()
    assert compat.written_by(torch.ops.aten.add.out) == ((3, "out"),)


def test_a_dispatch_mode_sees_every_operator() -> None:
    class Seen(compat.DispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.ones(1, 2)
    with Seen() as seen:
        nn.functional.linear(x, x)
    assert seen.names == ["t.default", "mm.default"]
    assert compat.dispatch_modes() == []


def test_views_tell_their_base() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    assert compat.base_of(weight.t()) is weight
    assert compat.base_of(weight) is None


def test_tensors_of_another_class_can_be_parameters(device: str) -> None:
    tensor = torch.ones(2, device=device)
    assert not isinstance(tensor, nn.Parameter)
    setattr(tensor, compat.PARAMETER_MARK, True)
    assert isinstance(tensor, nn.Parameter)
