from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import CASES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autobalance
from autobalance.compat import function_modes
from autobalance.devices.device import Device
from autobalance.partitioning.plan import Plan
from autobalance.profiling.profile import BlockCost
from autobalance.profiling.timeline import ROOT


class Net(nn.Module):
    """Three blocks, a loose scale, a residual in glue, and a second method."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.norm = nn.LayerNorm(3)
        self.scale = nn.Parameter(torch.rand(3))

    def self_balance(self) -> list[object]:
        return ["a", "b", ["norm", "c"]]

    def forward_methods(self) -> dict[str, list[str]]:
        return {"": ["encode"]}

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x)))) * self.scale + x

    def forward(self, x: Tensor, kept: list[Tensor] | None = None, again: bool = False) -> Tensor:
        hidden = checkpoint(self.encode, x, use_reentrant=False) if again else self.encode(x)
        if kept is not None:
            kept.append(hidden)
        return self.c(self.norm(hidden)) + hidden


def make_plan(names: Sequence[str], assignment: Sequence[int], root: int, **options: Any) -> Plan:
    count = 4
    return Plan(
        assignment=tuple(assignment),
        blocks=tuple(BlockCost(name) for name in names),
        devices=tuple(Device(f"device {index}", 2**30) for index in range(count)),
        budgets=(2**30,) * count,
        peaks=(0,) * count,
        root=root,
        policy="balanced",
        **options,
    )


PLAN = make_plan(["a", "b", "norm+c"], [0, 1, 3], 3, loose=(("scale", 1),))
X = torch.tensor([[1.0, -2.0, 0.5]])


def gradients(model: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    model.zero_grad()
    model(x, **options).sum().backward()
    return [parameter.grad.cpu() for parameter in model.parameters()]


def assert_same_as_plain(model: nn.Module, **options: Any) -> None:
    plain = Net()
    torch.testing.assert_close(model(X).detach().cpu(), plain(X).detach())
    for ours, theirs in zip(gradients(model, X, **options), gradients(plain, X, **options), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_dispatched_model_computes_what_the_plain_one_does() -> None:
    model = Net()
    assert autobalance.dispatch(model, PLAN) is model
    assert_same_as_plain(model)
    assert str(model(X).device) == "simulated:3"


def test_every_tensor_is_where_the_plan_has_it() -> None:
    model = autobalance.dispatch(Net(), PLAN)
    assert {name: parameter.device.index for name, parameter in model.named_parameters()} == {
        "scale": 1,
        **{
            f"{name}.{kind}": index
            for name, index in (("a", 0), ("b", 1), ("norm", 3), ("c", 3))
            for kind in ("weight", "bias")
        },
    }


def test_what_is_loose_follows_its_owner_or_the_root() -> None:
    for owner, index in ((0, 0), (2, 3), (ROOT, 2)):
        plan = make_plan(["a", "b", "norm+c"], [0, 1, 3], 2, loose=(("scale", owner),))
        assert autobalance.dispatch(Net(), plan).scale.device.index == index


@pytest.mark.parametrize(
    "devices", [["simulated:2"] * 4, ["simulated:1", "simulated:1", "simulated:0", "simulated:0"], ["cpu"] * 4]
)
def test_devices_may_repeat(devices: list[str]) -> None:
    model = autobalance.dispatch(Net(), PLAN, devices=devices)
    assert {str(parameter.device) for parameter in model.parameters()} <= set(devices)
    assert_same_as_plain(model)


def test_a_checkpoint_in_the_models_forward_recomputes_after_it() -> None:
    assert_same_as_plain(autobalance.dispatch(Net(), PLAN), again=True)


def test_the_callers_list_is_the_callers() -> None:
    model = autobalance.dispatch(Net(), PLAN)
    kept = [torch.ones(1)]
    first = kept[0]
    model(X, kept)
    assert kept[0] is first
    torch.testing.assert_close(kept[1].detach().cpu(), Net().encode(X).detach())


def test_a_method_of_the_model_itself_runs_as_its_forward_does() -> None:
    model = autobalance.dispatch(Net(), PLAN)
    torch.testing.assert_close(model.encode(X).detach().cpu(), Net().encode(X).detach())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_stays_on_after_an_error(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(x: Tensor) -> Tensor:
        raise error("from a block")

    model = autobalance.dispatch(Net(), PLAN)
    monkeypatch.setattr(model.b, "forward", fail)
    with pytest.raises(error, match="from a block"):
        model(X)
    assert function_modes() == []
    assert torch.simulated.current_device() == 0
    monkeypatch.undo()
    assert_same_as_plain(model)


def test_dispatched_again_it_is_placed_anew() -> None:
    model = autobalance.dispatch(Net(), PLAN)
    hooks = [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()]
    autobalance.dispatch(model, make_plan(["a", "b", "norm+c"], [2, 2, 1], 1))
    assert hooks == [(len(part._forward_hooks), len(part._forward_pre_hooks)) for part in model.modules()]
    assert (model.a.weight.device.index, model.c.weight.device.index) == (2, 1)
    assert_same_as_plain(model)


def test_a_deep_copy_moves_inputs_of_its_own() -> None:
    model = autobalance.dispatch(Net(), PLAN)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same_as_plain(twin)
    assert model(X).tolist() == X.tolist(), "with zeros for weights only the residual is left"


def test_a_pickled_model_can_be_dispatched_again() -> None:
    model = pickle.loads(pickle.dumps(autobalance.dispatch(Net(), PLAN)))
    assert_same_as_plain(autobalance.dispatch(model, PLAN))


def test_the_state_dict_is_the_plain_models() -> None:
    model = autobalance.dispatch(Net(), PLAN)
    assert list(model.state_dict()) == list(Net().state_dict())
    model.load_state_dict(Net().state_dict())
    assert model.a.weight.device.index == 0


def test_a_dispatched_model_leaves_nothing_behind_when_it_goes() -> None:
    gc.collect()
    before = [torch.simulated.memory_allocated(index) for index in range(4)]
    model = autobalance.dispatch(Net(), PLAN)
    model(X).sum().backward()
    del model
    gc.collect()
    assert [torch.simulated.memory_allocated(index) for index in range(4)] == before


@pytest.mark.parametrize(
    ("plan", "devices", "text"),
    [
        (make_plan(["a", "b"], [0, 1], 1), None, r"the plan lacks 'norm\+c'"),
        (PLAN, ["simulated:0"], r"`devices` is \['simulated:0'\], but the plan is for 4 devices"),
        (PLAN, "simulated:0", "give a list of one torch device for each"),
        (PLAN, ["cpu", "cpu", "cpu", "simulated:0"], "mixes cpu and simulated"),
        (
            make_plan(["a", "b", "norm+c"], [0, 1, 3], 3, schedule="1f1b", micro_batches=8),
            None,
            r"this plan runs 1f1b with 8 micro-batches, which need the step's loss and its backward",
        ),
        (PLAN, ["simulated:9"] * 4, r"names 'simulated:9', but there are 4 simulated device"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_moves(plan: Plan, devices: Any, text: str) -> None:
    model = Net()
    with pytest.raises(ValueError, match=text):
        autobalance.dispatch(model, plan, devices)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert "forward" not in vars(model)


def test_too_few_devices_are_named() -> None:
    with (
        autobalance.simulate(2),
        pytest.raises(ValueError, match=r"for 4 devices, but this machine has 2 simulated device"),
    ):
        autobalance.dispatch(Net(), PLAN)


def test_a_model_on_meta_is_refused() -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ValueError, match=r"9 tensors of the model are on the meta device .* 'scale' the first"):
        autobalance.dispatch(model, PLAN)


@pytest.mark.parametrize("name", sorted(CASES))
def test_small_models_compute_what_they_do_on_the_cpu(name: str) -> None:
    case = CASES[name]
    names = case.body.block_names
    assignment = [index * 4 // len(names) for index in range(len(names))]
    if name == "tied embedding":
        assignment[-1] = assignment[0]
    if name == "changes its argument":
        assignment[1] = assignment[0]
    model = autobalance.dispatch(case.make(), make_plan(names, assignment, assignment[-1]))
    (inputs, _), plain = case.batches()[0], case.make()
    output, expected = model(inputs), plain(inputs)
    torch.testing.assert_close(output.detach().cpu(), expected.detach())
    output.sum().backward()
    expected.sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_model_of_transformers_computes_what_it_does_on_the_cpu(architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 23, "use_cache": False}
    if architecture == "gpt2":
        config = transformers.GPT2Config(n_layer=3, n_head=2, n_embd=8, n_positions=16, **small)
        names = ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1", "transformer.h.2"]
        names += ["transformer.ln_f", "lm_head"]
        assignment = [3, 0, 0, 1, 2, 3, 3]
        make = transformers.GPT2LMHeadModel
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=3, num_attention_heads=2, hidden_size=8, intermediate_size=16, **small
        )
        names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm", "lm_head"]
        assignment = [0, 0, 1, 2, 3, 3]
        make = transformers.LlamaForCausalLM
    torch.manual_seed(0)
    plain = make(config).eval()
    model = copy.deepcopy(plain)
    model.self_balance = lambda: names
    model = autobalance.dispatch(model, make_plan(names, assignment, 3))
    tokens = torch.randint(23, (2, 7))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    ours = model(input_ids=tokens, attention_mask=mask, labels=tokens)
    theirs = plain(input_ids=tokens, attention_mask=mask, labels=tokens)
    assert type(ours) is type(theirs)
    torch.testing.assert_close(ours.loss.detach().cpu(), theirs.loss.detach())
    torch.testing.assert_close(ours.logits.detach().cpu(), theirs.logits.detach())
    ours.loss.backward()
    theirs.loss.backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), other.grad, atol=1e-5, rtol=1e-4)
