from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from autobalance.blocks import Blocks
from autobalance.compat import function_modes
from autobalance.placement.install import Installed, install
from autobalance.placement.locate import DeviceLocator

Split = Callable[..., Installed]


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.log: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight

    def encode(self, x: Tensor, *, plus: Tensor) -> Tensor:
        return x * self.weight + plus

    def decode(self, x: Tensor) -> Tensor:
        return self.encode(x, plus=torch.ones_like(x)) - self.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.coder, self.norm, self.head = Coder(), Coder(), Coder()

    def self_balance(self) -> list[object]:
        return ["coder", ["norm", "head"]]


def ones(index: int = 0) -> Tensor:
    return torch.ones(2, device=f"simulated:{index}")


def traces(module: nn.Module) -> list[object]:
    """Everything a hook could leave behind."""
    return [
        (
            dict(part._forward_pre_hooks),
            dict(part._forward_hooks),
            dict(part._forward_hooks_always_called),
            sorted(vars(part)),
        )
        for part in module.modules()
    ]


def test_remove_leaves_nothing_behind(split: Split) -> None:
    model = Model()
    before = traces(model)
    installed = split(model, [1, 2], methods={"coder": ["encode", "decode"]})
    assert traces(model) != before
    installed.remove()
    assert traces(model) == before
    installed.remove()
    with pytest.raises(RuntimeError, match="same device"):
        model.coder(ones(0))


def test_methods_other_than_forward_run_at_the_blocks_place(split: Split) -> None:
    model = Model()
    installed = split(model, [1, 2], methods={"coder": ["encode", "decode"], "head": ["encode"]})
    with installed.glue():
        assert model.coder.encode(ones(0), plus=ones(3)).tolist() == [2.0, 2.0]
        assert model.coder.decode(ones(0)).tolist() == [1.0, 1.0]
        assert str(model.head.encode(ones(0), plus=ones(0)).device) == "simulated:2"
        assert len(function_modes()) == 1


def test_a_method_that_the_user_replaced_on_the_module_is_called_and_put_back(split: Split) -> None:
    model = Model()
    own = lambda x, plus: x - model.coder.weight
    model.coder.encode = own
    installed = split(model, [1, 2], methods={"coder": ["encode"]})
    assert model.coder.encode(ones(0), plus=ones(0)).tolist() == [0.0, 0.0]
    installed.remove()
    assert model.coder.encode is own


def test_a_group_lends_its_name_to_the_methods_of_its_modules(split: Split) -> None:
    model = Model()
    split(model, [1, 2], methods={"norm+head": ["encode"]})
    for module in (model.norm, model.head):
        assert str(module.encode(ones(0), plus=ones(0)).device) == "simulated:2"


def test_a_method_that_fails_leaves_everything_as_it_was(split: Split) -> None:
    model = Model()
    installed = split(model, [1, 2], methods={"coder": ["encode"]})
    with installed.glue():
        before = function_modes()
        with pytest.raises(TypeError, match="plus"):
            model.coder.encode(ones(0))
        assert function_modes() == before
        assert torch.simulated.current_device() == 0


@pytest.mark.parametrize(
    ("methods", "text"),
    [
        ({"cod": ["encode"]}, r"names 'cod', which is no block. Blocks: 'coder', 'norm\+head'"),
        ({"coder": ["enc"]}, "names 'enc' for block 'coder', but Coder has no such method"),
        ({"coder": "encode"}, r"gives 'encode' for 'coder': give a list of names, \['encode'\]"),
        ({"coder": ["weight"]}, "names 'weight' for block 'coder', but Coder has no such method"),
    ],
)
def test_wrong_methods_are_refused_before_anything_is_hooked(methods: dict, text: str, split: Split) -> None:
    model = Model()
    before = traces(model)
    with pytest.raises(ValueError, match=text):
        split(model, [1, 2], methods=methods)
    assert traces(model) == before


def test_a_copy_has_methods_of_its_own(split: Split) -> None:
    model = Model()
    split(model, [1, 2], methods={"coder": ["encode"]})
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.coder.weight.zero_()
    assert twin.coder.encode(ones(0), plus=ones(0)).tolist() == [2.0, 2.0]
    assert model.coder.encode(ones(0), plus=ones(0)).tolist() == [1.0, 1.0]


def test_an_installation_copied_with_its_model_takes_the_copys_hooks_off(split: Split) -> None:
    model = Model()
    plain = traces(copy.deepcopy(model))
    installed = split(model, [1, 2], methods={"coder": ["encode"]})
    twin, its_own = copy.deepcopy((model, installed))
    its_own.remove()
    assert traces(twin) == plain
    assert model.coder.encode(ones(0), plus=ones(0)).tolist() == [2.0, 2.0]


def test_the_state_dict_is_the_plain_models(split: Split) -> None:
    model = Model()
    names = list(model.state_dict())
    split(model, [1, 2], methods={"coder": ["encode"]})
    assert list(model.state_dict()) == names


def test_a_model_may_be_converted_after_it_is_hooked(split: Split) -> None:
    model = Model()
    installed = split(model, [1, 2])
    model.half()
    with installed.glue():
        output = model.head(model.coder(ones(0).half())) + ones(3).half()
    assert (output.dtype, str(output.device)) == (torch.float16, "simulated:2")


def test_on_the_cpu_the_doors_let_everything_pass() -> None:
    model = Model()
    blocks = Blocks.of(model, [(model.coder,), (model.norm, model.head)])
    cpu = torch.device("cpu")
    installed = install(model, blocks, [cpu, cpu], DeviceLocator([cpu, cpu]))
    x = torch.ones(2)
    with installed.glue():
        assert function_modes() == []
        assert model.coder(x).tolist() == [1.0, 1.0]
    installed.remove()


@pytest.fixture(autouse=True)
def no_modes_left() -> Iterator[None]:
    yield
    assert function_modes() == []
