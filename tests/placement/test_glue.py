from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autobalance.compat import function_modes
from autobalance.placement.glue import glue, resume, suspend
from autobalance.placement.install import Installed
from autobalance.placement.locate import DeviceLocator

Split = Callable[..., Installed]


@pytest.fixture
def root() -> nn.Module:
    """A model that registers one buffer and one parameter, on device 2."""
    module = nn.Module()
    module.register_buffer("buffer", torch.ones(3))
    module.scale = nn.Parameter(torch.ones(3))
    return module.to("simulated:2")


@pytest.fixture(autouse=True)
def glued(locator: DeviceLocator, root: nn.Module) -> Iterator[None]:
    with glue(locator, root):
        yield


def at(index: int, *values: float, requires_grad: bool = False) -> Tensor:
    return torch.tensor(values, device=f"simulated:{index}", requires_grad=requires_grad)


def where(tensor: Tensor) -> int:
    return tensor.device.index


X, Y, B = (3.0, 1.0, 2.0), (1.0, 2.0, 2.0), (1.0, 0.0, 1.0)

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "subtract a reflected number": lambda x, y: (1 - x) * y,
    "compare": lambda x, y: (x > y) | (x == y),
    "matmul": lambda x, y: x @ y,
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack((x, y, x)),
    "where": lambda x, y: torch.where(x > 1, x, y),
    "keyword": lambda x, y: torch.add(input=x, other=y, alpha=2),
    "index": lambda x, y: x[y.long()],
    "index of two dimensions": lambda x, y: x.expand(3, 3)[y.long(), y.long()],
    "mask": lambda x, y: x[y > 1],
    "gather": lambda x, y: x.gather(0, y.long()),
    "einsum": lambda x, y: torch.einsum("i,j->ij", x, y),
    "broadcast": lambda x, y: torch.broadcast_tensors(x, y[:, None])[0] + 1,
    "like the other": lambda x, y: x.view_as(y) + x.reshape_as(y) + x.expand_as(y),
    "cross entropy": lambda x, y: F.cross_entropy(x[None], y[:1].long()),
    "mse": lambda x, y: F.mse_loss(x, y),
    "layer norm": lambda x, y: F.layer_norm(x, (3,), y, y),
    "list of lists": lambda x, y: torch.block_diag(x, y),
    "foreach": lambda x, y: torch._foreach_add([x, y], [y, x])[0],
    "attention": lambda x, y: F.scaled_dot_product_attention(x.view(1, 3, 1), y.view(1, 3, 1), y.view(1, 3, 1)),
    "bound method of a number": lambda x, y: x.clamp(max=y),
    "custom operator": lambda x, y: torch.ops.aten.mul.Tensor(x, y),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_operation_on_two_devices_gives_what_the_cpu_gives(name: str) -> None:
    function = FUNCTIONS[name]
    expected = function(torch.tensor(X), torch.tensor(Y))
    result = function(at(0, *X), at(1, *Y))
    assert torch.equal(result.cpu(), expected)
    assert where(result) == 0, "it runs where its first operand is"


IN_PLACE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "method": lambda x, y: x.mul_(y),
    "augmented": lambda x, y: x.__iadd__(y),
    "item": lambda x, y: x.__setitem__(0, y[1]),
    "mask": lambda x, y: x.__setitem__(y > 1, y[y > 1]),
    "slice": lambda x, y: x.__setitem__(slice(1, None), y[:2]),
    "out": lambda x, y: torch.add(y, 1, out=x),
    "out of two operands": lambda x, y: torch.add(y, y, out=x),
    "copy": lambda x, y: x.copy_(y),
    "masked fill": lambda x, y: x.masked_fill_(y > 1, 9.0),
    "index add": lambda x, y: x.index_add_(0, y.long(), y),
    "view": lambda x, y: x[1:].add_(y[1:]),
    "foreach": lambda x, y: torch._foreach_mul_([x], [y]),
    "foreach with a tensor": lambda x, y: torch._foreach_mul_([x], y[1]),
    "two outputs": lambda x, y: torch.max(
        y.expand(2, 3), 0, out=(x, torch.empty(3, dtype=torch.long, device=y.device))
    ),
    "running statistics": lambda x, y: F.batch_norm(y.expand(2, 3), x, y.clone(), training=True),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_operation_in_place_changes_its_target_where_it_is(name: str) -> None:
    expected = torch.tensor(X)
    IN_PLACE[name](expected, torch.tensor(Y))
    target = at(0, *X)
    IN_PLACE[name](target, at(1, *Y))
    assert where(target) == 0
    torch.testing.assert_close(target.cpu(), expected)


def test_an_operation_in_place_returns_its_target() -> None:
    x, y = at(0, *X), at(1, *Y)
    assert x.mul_(y) is x
    assert torch.add(y, y, out=x) is x
    before = x
    x += y
    assert x is before


def test_lists_over_several_devices_are_changed_where_they_are() -> None:
    ours, theirs = [at(0, 1.0), at(1, 2.0)], [at(1, 10.0), at(1, 20.0)]
    torch._foreach_add_(ours, theirs)
    assert [(where(t), t.item()) for t in ours] == [(0, 11.0), (1, 22.0)]


def test_a_parameter_or_buffer_never_moves(root: nn.Module) -> None:
    assert where(at(0, *X) * root.scale) == 2
    assert where(at(0, *X) * root.buffer) == 2
    assert where(F.linear(at(0, *X)[None], root.scale[None])) == 0  # a view of it is an activation
    assert where(F.rms_norm(at(0, *X), (3,), root.scale)) == 2


def test_running_statistics_stay_home_and_change_there(root: nn.Module) -> None:
    norm, plain = nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3, affine=False)
    norm.to("simulated:2")
    root.norm = norm
    mean = norm.running_mean
    output = norm(at(0, *X, *Y).view(2, 3))
    expected = plain(torch.tensor([X, Y]))
    assert norm.running_mean is mean
    assert where(output) == where(mean) == 2
    assert torch.equal(output.cpu(), expected)
    assert torch.equal(norm.running_mean.cpu(), plain.running_mean)
    assert torch.equal(norm.running_var.cpu(), plain.running_var)


def test_a_buffer_made_anew_is_home_in_the_next_step(locator: DeviceLocator, root: nn.Module) -> None:
    suspended = suspend()
    try:
        root.buffer = at(3, *Y)
        with glue(locator, root):
            assert where(at(0, *X) + root.buffer) == 3
    finally:
        resume(suspended)


def test_a_loose_recurrent_layer_runs_where_its_weights_are(root: nn.Module) -> None:
    torch.manual_seed(0)
    plain = nn.LSTM(3, 3)
    layer = copy.deepcopy(plain).to("simulated:2")
    state = (torch.ones(1, 1, 3), torch.zeros(1, 1, 3))
    x = torch.tensor([[X], [Y]])
    output, _ = layer(x.to("simulated:0"), tuple(part.to("simulated:1") for part in state))
    assert where(output) == 2
    torch.testing.assert_close(output.cpu(), plain(x, state)[0])


def test_gradients_go_home(root: nn.Module) -> None:
    x, y = at(0, *X, requires_grad=True), at(1, *Y, requires_grad=True)
    ((x * y) * root.scale).sum().backward()
    assert (where(x.grad), where(y.grad), where(root.scale.grad)) == (0, 1, 2)
    assert x.grad.tolist() == list(Y)
    assert y.grad.tolist() == list(X)
    assert root.scale.grad.tolist() == [3.0, 2.0, 4.0]


def test_autograd_grad_takes_tensors_of_several_devices() -> None:
    x, y = at(0, *X, requires_grad=True), at(1, *Y, requires_grad=True)
    gradients = torch.autograd.grad((x * y).sum(), [x, y], create_graph=True)
    assert [(where(g), g.tolist()) for g in gradients] == [(0, list(Y)), (1, list(X))]
    torch.autograd.backward([gradients[0].sum(), gradients[1].sum()])
    assert y.grad.tolist() == [1.0, 1.0, 1.0]


def test_a_gradient_that_is_assigned_goes_to_its_tensor() -> None:
    x = at(0, *X, requires_grad=True)
    x.grad = at(1, *Y)
    assert (where(x.grad), x.grad.tolist()) == (0, list(Y))
    x.grad = None
    assert x.grad is None


def test_explicit_moves_do_what_they_say() -> None:
    x, y = at(0, *X), at(1, *Y)
    assert where(x.to(y)) == 1
    assert where(x.type_as(y)) == 1
    assert x.cpu().device.type == "cpu"
    x.data = y
    assert where(x) == 1


def test_host_tensors_are_refused_as_on_one_device() -> None:
    with pytest.raises(RuntimeError, match="simulated:0 and cpu"):
        at(0, *X) + torch.tensor(Y)
    assert (at(0, *X) + torch.tensor(1.0)).tolist() == [4.0, 2.0, 3.0]


def test_the_users_device_context_works() -> None:
    with torch.device("simulated:1"):
        made = torch.ones(3)
        assert where(made) == 1
        assert where(at(0, *X) + made) == 0
    assert torch.ones(3).device.type == "cpu"


class Product(torch.autograd.Function):
    """A product whose backward mixes what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return gradients[0] * y, gradients[0] * x


def test_a_function_of_the_users_own_works_on_one_device() -> None:
    x, y = at(1, *X, requires_grad=True), at(1, *Y)
    (at(0, *Y) + Product.apply(x, y)).sum().backward()
    assert x.grad.tolist() == list(Y)


def test_a_function_of_the_users_own_is_glue_inside_and_in_backward() -> None:
    x, y = at(0, *X, requires_grad=True), at(1, *Y, requires_grad=True)
    product = Product.apply(x, y)
    assert product.tolist() == [3.0, 2.0, 4.0]
    product.sum().backward()
    assert (x.grad.tolist(), y.grad.tolist()) == (list(Y), list(X))


def test_hooks_in_backward_are_glue() -> None:
    x, y = at(0, *X, requires_grad=True), at(1, *Y)
    doubled = x * 2
    doubled.register_hook(lambda gradient: gradient * y)
    doubled.backward(gradient=at(0, 1.0, 1.0, 1.0), retain_graph=True)
    assert x.grad.tolist() == [2.0, 4.0, 4.0]
    assert len(function_modes()) == 1


def test_a_deep_copy_keeps_ties_and_devices() -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    for index, part in enumerate(model):
        part.to(f"simulated:{index}")
    model[2].weight = model[0].weight
    twin = copy.deepcopy(model)
    assert [where(part.bias) for part in twin] == [0, 1, 2]
    assert twin[2].weight is twin[0].weight


def test_clipping_by_norm_sees_all_devices() -> None:
    x, y = at(0, *X, requires_grad=True), at(1, *Y, requires_grad=True)
    (x * 3).sum().backward()
    (y * 4).sum().backward()
    norm = nn.utils.clip_grad_norm_([x, y], 0.5)
    assert norm.item() == pytest.approx((3 * 9 + 3 * 16) ** 0.5)
    assert x.grad.norm().item() == pytest.approx(0.5 * 3 / 5, rel=1e-5)
    assert where(x.grad) == 0


def test_an_optimizer_may_step_inside() -> None:
    parameters = [nn.Parameter(at(index, *X)) for index in (0, 1)]
    plain = [nn.Parameter(torch.tensor(X)) for _ in range(2)]
    for params in (parameters, plain):
        optimizer = torch.optim.AdamW(params, lr=0.1, foreach=True)
        sum((p * p).sum().cpu() for p in params).backward()
        optimizer.step()
    for ours, theirs in zip(parameters, plain, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach())


def test_glue_within_glue_is_the_same_glue(locator: DeviceLocator, root: nn.Module) -> None:
    before = function_modes()
    with glue(locator, root):
        assert function_modes() == before
    assert function_modes() == before


def test_without_glue_devices_do_not_mix() -> None:
    suspended = suspend()
    try:
        with pytest.raises(RuntimeError, match="same device"):
            at(0, *X) + at(1, *Y)
    finally:
        resume(suspended)
    assert where(at(0, *X) + at(1, *Y)) == 0


def test_another_thread_has_no_glue_unless_it_enters_it() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function_modes()))
    thread.start()
    thread.join()
    assert found == [[]]


class Blocks(nn.Module):
    """Blocks with glue between them that reaches over devices."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(3))

    def self_balance(self) -> list[str]:
        return ["a", "b", "c"]

    def body(self, x: Tensor, skip: Tensor) -> Tensor:
        y = torch.tanh(self.b(torch.tanh(self.a(x)))) + x
        y = self.c(y) * self.scale + skip
        return torch.cat([y, self.a(y)])

    def forward(self, x: Tensor, reentrant: bool | None) -> Tensor:
        if reentrant is None:
            return self.body(x, x * 2).sum()
        return checkpoint(self.body, x, x * 2, use_reentrant=reentrant).sum()


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("glue_in_backward", [True, False])
def test_a_checkpoint_around_glue_and_blocks_recomputes_both(
    reentrant: bool | None, glue_in_backward: bool, split: Split
) -> None:
    suspended = suspend()
    try:
        model, plain = Blocks(), Blocks()
        installed = split(model, [1, 2, 3], root=3)
        x = torch.tensor([X]).requires_grad_()
        plain(x, None).backward()
        with installed.glue():
            mine = x.detach().to("simulated:3").requires_grad_()
            loss = model(mine, reentrant)
        if glue_in_backward:
            with installed.glue():
                loss.backward()
        else:
            loss.backward()
    finally:
        resume(suspended)
    torch.testing.assert_close(mine.grad.cpu(), x.grad)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)
