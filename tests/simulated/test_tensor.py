"""A simulated tensor behaves as a tensor on an accelerator does in Python: identity, shapes, words, copies."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autobalance.simulated import SimulatedTensor

Allocated = Callable[..., int]


def on(index: int, *values: float) -> Tensor:
    return torch.tensor(values, device=f"simulated:{index}")


# Moving modules


def test_parameters_keep_their_identity() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    parameters = list(model.parameters())
    values = [parameter.detach().clone() for parameter in parameters]
    watched = weakref.ref(parameters[0])
    for device in ("simulated:1", "simulated:2", "cpu", "simulated:0"):
        model.to(device)
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        assert watched() is parameters[0]
        assert {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())} == {device}
        assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in parameters)
        assert all(torch.equal(one.detach().cpu(), other) for one, other in zip(parameters, values, strict=True))
    assert isinstance(parameters[0], SimulatedTensor)
    assert type(model.cpu()[0].weight) is nn.Parameter


def test_tied_parameters_stay_tied() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    for device in ("simulated:1", "cpu"):
        model.to(device)
        assert model["head"].weight is model["embed"].weight
        assert len(list(model.parameters())) == 1


def test_gradients_attributes_and_hooks_move_along() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.note = "kept"
    seen: list[str] = []
    weight.register_hook(lambda gradient: seen.append("tensor hook"))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    weight.grad = torch.full((2,), 3.0)
    model = nn.Module()
    model.weight = weight
    model.to("simulated:1")
    assert weight.grad.device == weight.device == torch.device("simulated:1")
    assert (weight.grad.tolist(), weight.note) == ([3.0, 3.0], "kept")
    (weight * 2).sum().backward()
    assert seen == ["tensor hook", "accumulated"]
    model.cpu()
    assert weight.grad.tolist() == [5.0, 5.0]
    assert not hasattr(weight, "elements")


def test_optimizer_made_before_the_move_trains_the_moved_parameters() -> None:
    def losses(move: bool) -> list[float]:
        torch.manual_seed(0)
        model, x = nn.Linear(3, 1), torch.randn(4, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if move:
            model, x = model.to("simulated:2"), x.to("simulated:2")
        result = []
        for _ in range(3):
            loss = model(x).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            result.append(loss.item())
        return result

    assert losses(move=True) == pytest.approx(losses(move=False), rel=1e-6)


def test_data_may_be_assigned_across_devices() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.data = weight.data.to("simulated:1")
    assert (weight.device, weight.requires_grad) == (torch.device("simulated:1"), True)
    weight.data = on(1, 5.0, 6.0, 7.0)
    assert (weight.shape, weight.tolist()) == ((3,), [5.0, 6.0, 7.0])
    weight.data = weight.data.cpu()
    assert (str(weight.device), type(weight)) == ("cpu", nn.Parameter)
    result = on(0, 1.0).requires_grad_() * 2
    with pytest.raises(RuntimeError, match="cannot move a tensor with a gradient function from simulated:0 to cpu"):
        result.data = torch.ones(1)


def test_conversion_of_type_keeps_identity_and_device() -> None:
    model = nn.Linear(2, 2).to("simulated:1")
    weight = model.weight
    model.bfloat16()
    assert model.weight is weight
    assert (weight.dtype, weight.device.index) == (torch.bfloat16, 1)
    assert model.half().float().weight.dtype is torch.float32


def test_backward_after_a_move_is_refused() -> None:
    model = nn.Linear(2, 2)
    loss = model(torch.ones(1, 2)).sum()
    model.to("simulated:0")
    with pytest.raises(RuntimeError, match="a parameter that was moved to another device after the forward"):
        loss.backward()


def test_memory_is_given_back_when_a_module_leaves(allocated: Allocated) -> None:
    model = nn.Linear(64, 64, bias=False)
    model.to("simulated:0")
    model(torch.ones(1, 64, device="simulated:0")).sum().backward()
    assert allocated() == 2 * 64 * 64 * 4
    model.to("simulated:1")
    assert (allocated(0), allocated(1)) == (0, 2 * 64 * 64 * 4)
    model.cpu()
    assert allocated(1) == 0


def test_module_can_leave_after_a_step_that_failed(allocated: Allocated) -> None:
    model = nn.Linear(64, 64).to("simulated:0")

    def step() -> None:
        loss = model(torch.ones(1, 64, device="simulated:0")).sum()
        raise ValueError(f"the graph of {loss.shape} is alive in this frame")

    with pytest.raises(ValueError, match="alive in this frame") as caught:
        step()
    model.cpu()
    assert model.weight.device.type == "cpu"
    del caught
    assert allocated() == 0


def test_lazy_modules_move_once_they_have_a_shape() -> None:
    layer = nn.LazyLinear(3)
    with pytest.raises(RuntimeError, match="call it once on the host first"):
        layer.to("simulated:1")
    layer(torch.ones(2, 5))
    assert layer.to("simulated:1")(torch.ones(2, 5, device="simulated:1")).device.index == 1


def test_parameters_become_a_vector_and_come_back() -> None:
    model = nn.Linear(2, 2).to("simulated:1")
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0 + 1, model.parameters())
    assert model.weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_averaged_models() -> None:
    model = nn.Linear(2, 2).to("simulated:1")
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    with torch.no_grad():
        model.weight.fill_(1.0)
    average.update_parameters(model)
    assert average.module.weight.device.index == 1


def test_state_dict_goes_both_ways() -> None:
    source, target = nn.Linear(2, 2).to("simulated:1"), nn.Linear(2, 2).to("simulated:2")
    target.load_state_dict(source.state_dict())
    assert target.weight.device.index == 2
    assert torch.equal(target.weight.cpu(), source.weight.cpu())
    host = nn.Linear(2, 2)
    host.load_state_dict(source.state_dict())
    source.load_state_dict(host.state_dict(), assign=False)
    assert source.weight.device.index == 1
    host.load_state_dict(source.state_dict(), assign=True)
    assert host.weight.device.index == 1


# Shapes changed in place


RESHAPES: dict[str, Callable[[Tensor], object]] = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.unsqueeze_(0).squeeze_(),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "as_strided_": lambda x: x.as_strided_((2, 2), (1, 2)),
    "resize_ smaller": lambda x: x.resize_(2, 2),
    "resize_ larger": lambda x: x.resize_(4, 4).fill_(1.0),
    "set_": lambda x: x.set_(torch.arange(20.0).to(x.device)),
    "set_ to a storage": lambda x: x.set_(x.untyped_storage(), 2, (2,), (1,)),
    "out": lambda x: torch.cat([x, x], out=x.new_empty(0)),
    "out that grows": lambda x: torch.add(x.new_ones(5, 5), 1, out=x.resize_(0)),
}


@pytest.mark.parametrize("name", RESHAPES)
def test_shapes_changed_in_place_are_reported(name: str) -> None:
    def reshaped(device: str) -> tuple[Tensor, Tensor]:
        x = torch.arange(6.0).view(2, 3).to(device)
        result = RESHAPES[name](x)
        assert isinstance(result, Tensor)
        return x, result

    for moved, expected in zip(reshaped("simulated:1"), reshaped("cpu"), strict=True):
        assert (moved.shape, moved.stride(), moved.storage_offset()) == (
            expected.shape,
            expected.stride(),
            expected.storage_offset(),
        )
        assert torch.equal((moved * 2).cpu(), expected * 2)


def test_shape_changed_in_place_inside_a_graph() -> None:
    x = torch.arange(6.0, device="simulated:0").view(2, 3).requires_grad_()
    y = (x * 2).t_()
    assert y.shape == (3, 2)
    (y * torch.arange(6.0, device="simulated:0").view(3, 2)).sum().backward()
    assert x.grad.tolist() == [[0.0, 4.0, 8.0], [2.0, 6.0, 10.0]]


# Words and numbers


def test_format_repr_and_print() -> None:
    x = on(1, 1.0, 2.5)
    assert repr(x) == "tensor([1.0000, 2.5000], device='simulated:1')"
    assert repr(x.clone().requires_grad_()).endswith("device='simulated:1', requires_grad=True)")
    assert repr(x.requires_grad_() * 2).endswith("device='simulated:1', grad_fn=<MulBackward0>)")
    assert repr(nn.Parameter(on(0, 1.0))).startswith("Parameter containing:\ntensor([1.], device='simulated:0'")
    assert f"{x[1]:.3f}|{x.sum():5.1f}|{x[0].int():d}" == "2.500|  3.5|1"
    assert f"{x.detach()}" == repr(x.detach())
    with pytest.raises(TypeError, match=r"unsupported format string"):
        f"{x:.3f}"


def test_numbers_out_of_a_tensor() -> None:
    x = on(2, 1.0, 0.0, 3.0)
    assert x.tolist() == [1.0, 0.0, 3.0]
    assert x.view(3, 1).long().tolist() == [[1], [0], [3]]
    assert (len(x), [item.item() for item in x], 3.0 in x, bool(x[0]), not x[1]) == (
        3,
        [1.0, 0.0, 3.0],
        True,
        True,
        True,
    )
    assert (float(x[2]), int(x[2]), list(range(5))[x[2].long()]) == (3.0, 3, 3)
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(x)


def test_numpy_is_refused_with_cudas_words() -> None:
    words = r"can't convert simulated:1 device type tensor to numpy. Use Tensor.cpu\(\) to copy"
    with pytest.raises(TypeError, match=words):
        on(1, 1.0).numpy()
    with pytest.raises(TypeError, match=words):
        on(1, 1.0).__array__()
    assert on(1, 1.0).numpy(force=True).tolist() == [1.0]


def test_flags() -> None:
    x = on(1, 1.0)
    assert (x.is_cuda, x.is_cpu, x.is_simulated, x.get_device(), x.device.type) == (False, False, True, 1, "simulated")
    assert x.type() == "torch.simulated.FloatTensor"
    assert not x.is_pinned()
    told = r"on simulated:1: only dense tensors in host memory.*Call `pin_memory\(\)` before"
    with pytest.raises(RuntimeError, match=told):
        x.pin_memory()
    assert x.untyped_storage().nbytes() == 4


# Copies


def test_deepcopy_of_a_tensor(allocated: Allocated) -> None:
    x = on(1, 1.0, 2.0).requires_grad_()
    x.grad = on(1, 3.0, 4.0)
    y = copy.deepcopy(x)
    x.data.add_(1)
    assert (y.tolist(), y.grad.tolist(), y.device, y.requires_grad) == ([1.0, 2.0], [3.0, 4.0], x.device, True)
    assert allocated(1) == 4 * 512
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(x * 2)


def test_deepcopy_of_a_module_keeps_ties_and_shared_storages(allocated: Allocated) -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 32, bias=False), "b": nn.Linear(32, 32, bias=False)}).to("simulated:2")
    model["b"].weight = model["a"].weight
    model.view = model["a"].weight.detach()[:4]
    before = allocated(2)
    twin = copy.deepcopy(model)
    assert twin["a"].weight is twin["b"].weight
    assert isinstance(twin["a"].weight, nn.Parameter)
    assert allocated(2) == before + 32 * 32 * 4
    twin["a"].weight.data.fill_(7.0)
    assert twin.view[0, 0].item() == 7.0
    assert model["a"].weight.max().item() < 1.0


def test_shallow_copy_shares_its_numbers() -> None:
    x = on(1, 1.0, 2.0)
    y = copy.copy(x)
    x.add_(1)
    assert (y.device.index, y.tolist()) == (1, [2.0, 3.0])


def test_hash_and_equality_are_by_identity() -> None:
    x, y = on(0, 1.0), on(0, 1.0)
    assert len({x, y, x}) == 2
    assert (x == y).tolist() == [True]
    assert torch.equal(x, y)
    assert torch.allclose(x, y)


def test_numbers_on_devices_make_a_new_tensor() -> None:
    made = torch.tensor([[on(0, 1.5).sum(), 2.0], [3.0, on(1, 4.0).sum()]])
    assert (str(made.device), made.tolist()) == ("cpu", [[1.5, 2.0], [3.0, 4.0]])
    whole = torch.tensor([on(0, 7.0).long().sum(), 8], device="simulated:1")
    assert (str(whole.device), whole.dtype, whole.tolist()) == ("simulated:1", torch.int64, [7, 8])
    assert torch.tensor([on(0, 1.0).bool().all(), False]).tolist() == [True, False]
    assert torch.tensor([on(0, 1.0).to(torch.complex64).sum()]).tolist() == [1 + 0j]
    with pytest.raises(ValueError, match="only one element tensors can be converted"):
        float(on(0, 1.0, 2.0))
