"""Steps whose parts give what the batch gives are accepted, others are refused by name; either leaves no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

from autobalance.execution.batches.merging import Rule
from autobalance.execution.equivalence.equivalence import Outcome, Verdict, equivalent
from autobalance.execution.equivalence.few_samples import FewSamples, few_samples
from autobalance.simulated import simulate


class Net(nn.Module):
    """Two layers, and whatever state a test needs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(x).relu())
        return output


Batch = dict[str, Tensor]
Loss = Callable[[Any, Batch], Tensor]


def batch_of(size: int = 8) -> Batch:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 3, (size, 6), generator=generator)
    ignored = torch.arange(6) >= torch.arange(1, size + 1).clamp(max=6)[:, None]
    return {
        "x": torch.randn(size, 4, generator=generator),
        "y": torch.arange(size) % 3,
        "labels": tokens.masked_fill(ignored, -100),
        "sequence": torch.randn(size, 6, 4, generator=generator),
    }


def verdict_on(loss: Loss, module: Any = None, batch: Batch | None = None, **options: Any) -> Verdict:
    module = Net() if module is None else module
    few = few_samples(module, batch_of() if batch is None else batch)
    assert few is not None
    return equivalent(lambda part: Outcome(loss(module, part)), few, module, backward, **options)


def backward(loss: Tensor) -> None:
    loss.backward()


def mean(module: Any, batch: Batch) -> Tensor:
    return functional.cross_entropy(module(batch["x"]), batch["y"])


def total(module: Any, batch: Batch) -> Tensor:
    return functional.cross_entropy(module(batch["x"]), batch["y"], reduction="sum")


def token_mean(module: Any, batch: Batch) -> Tensor:
    return functional.cross_entropy(module(batch["sequence"]).flatten(0, 1), batch["labels"].flatten())


def dropped(module: Any, batch: Batch) -> Tensor:
    return functional.cross_entropy(functional.dropout(module(batch["x"]), 0.5), batch["y"])


def denoised(module: Any, batch: Batch) -> Tensor:
    noise = torch.randn_like(batch["x"])
    level = torch.rand(len(noise), 1)
    step = torch.randint(0, 1000, (len(noise), 1)) / 1000
    loss: Tensor = (module(batch["x"] * level + noise * (1 - level)) - step).square().mean()
    return loss


def penalised(module: Any, batch: Batch) -> Tensor:
    x = batch["x"].detach().requires_grad_()
    (slope,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    return mean(module, batch) + slope.square().sum(1).mean()


def contrastive(module: Any, batch: Batch) -> Tensor:
    code = functional.normalize(module(batch["x"]), dim=1)
    return functional.cross_entropy(code @ code.T * 5, torch.arange(len(code)))


def mixed(module: Any, batch: Batch) -> Tensor:
    other = torch.randperm(len(batch["x"]))
    share = np.random.beta(1, 1)
    x = share * batch["x"] + (1 - share) * batch["x"][other]
    logits = module(x)
    first, second = (functional.cross_entropy(logits, batch["y"][order]) for order in (slice(None), other))
    return share * first + (1 - share) * second


def centred(module: Any, batch: Batch) -> Tensor:
    code: Tensor = module(batch["x"])
    return (code - code.mean(0)).square().mean()


def same_loss_other_gradients(module: Any, batch: Batch) -> Tensor:
    loss = mean(module, batch)
    return loss + (loss - loss.detach()) * len(batch["x"])


@pytest.mark.parametrize("loss", [mean, dropped, denoised, penalised])
def test_means_over_samples_are_accepted(loss: Loss) -> None:
    assert verdict_on(loss) == Verdict(ok=True, loss_rule="mean")


def test_a_sum_over_samples_is_added_up() -> None:
    assert verdict_on(total) == Verdict(ok=True, loss_rule="sum")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("loss", [contrastive, mixed, centred])
def test_losses_that_couple_samples_are_refused(loss: Loss, precision: str) -> None:
    verdict = verdict_on(loss, precision=precision)
    assert not verdict.ok
    assert "the loss couples the samples of a batch: it is" in verdict.reason
    assert "on average over 3 and 2 apart" in verdict.reason


def test_gradients_that_couple_samples_are_refused_by_name() -> None:
    verdict = verdict_on(same_loss_other_gradients)
    assert not verdict.ok
    assert "the gradients couple the samples of a batch: that of `" in verdict.reason
    assert "though the loss does not" in verdict.reason


def test_a_mean_over_tokens_is_refused_with_the_hook_that_makes_it_right() -> None:
    verdict = verdict_on(token_mean)
    assert not verdict.ok
    assert "def loss_weight(self, batch): return (batch['labels'] != -100).sum()" in verdict.reason


def test_the_hook_is_named_where_a_part_has_nothing_to_take_the_mean_of() -> None:
    def loss(module: Any, batch: Batch) -> Tensor:
        return functional.cross_entropy(module(batch["x"]), batch["y"], ignore_index=0)

    batch = {"x": batch_of(2)["x"], "y": torch.tensor([1, 0])}
    assert verdict_on(loss, batch=batch).reason.endswith("def loss_weight(self, batch): return (batch['y'] != 0).sum()")


def test_a_mean_over_tokens_is_accepted_with_the_hook() -> None:
    class Weighted(Net):
        def loss_weight(self, batch: Batch) -> Tensor:
            return (batch["labels"] != -100).sum()

    assert verdict_on(token_mean, Weighted()) == Verdict(ok=True, loss_rule="weights")
    refused = verdict_on(mean, Weighted())
    assert not refused.ok
    assert "the loss is no mean over samples" in refused.reason or "weighted by `loss_weight`" in refused.reason


def test_batch_norm_is_set_aside_and_what_else_couples_samples_is_found() -> None:
    class Normalised(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.norm(super().forward(x))
            return output

    module = Normalised()
    assert verdict_on(mean, module).ok
    assert module.norm.training
    assert module.norm.num_batches_tracked is not None
    assert int(module.norm.num_batches_tracked) == 0
    assert not verdict_on(contrastive, module).ok


def test_autocast_is_close_enough() -> None:
    def loss(module: Any, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mean(module, batch)

    assert verdict_on(loss, precision="bf16-mixed").ok


# State.


class Stateful(Net):
    """One kind of state for each test."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.count = 0
        self.meter = Meter()
        self.average: Tensor
        self.register_buffer("average", torch.zeros(()))
        self.plain = torch.zeros(2)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.mask: Tensor | None = None
        self.generator = np.random.default_rng(0)


class Meter:
    """Not a module, but has state."""

    def __init__(self) -> None:
        self.values = {"total": 0.0}


def appends(module: Stateful, loss: Tensor) -> None:
    module.seen.append(loss.detach())


def counts(module: Stateful, loss: Tensor) -> None:
    module.count += 1


def meters(module: Stateful, loss: Tensor) -> None:
    module.meter.values["total"] += loss.item()


def averages(module: Stateful, loss: Tensor) -> None:
    module.average.lerp_(loss.detach(), 0.1)


def writes(module: Stateful, loss: Tensor) -> None:
    module.plain[0] += 1


def moves_a_teacher(module: Stateful, loss: Tensor) -> None:
    module.frozen.data = module.frozen.data * 0.9


def sets_anew(module: Stateful, loss: Tensor) -> None:
    module.newest = loss.detach()


CHANGES = {
    "seen": appends,
    "count": counts,
    "meter": meters,
    "average": averages,
    "plain": writes,
    "frozen": moves_a_teacher,
    "newest": sets_anew,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_that_changes_its_own_state_is_refused_by_the_name_of_it(name: str) -> None:
    module = nn.Module()
    module.net = inner = Stateful()

    def loss(module: Any, batch: Batch) -> Tensor:
        found = mean(module.net, batch)
        CHANGES[name](module.net, found)
        return found

    before = snapshot(inner)
    verdict = verdict_on(loss, module)
    assert not verdict.ok
    assert f"the step changes `net.{name}` of the module" in verdict.reason
    assert snapshot(inner) == before


def follows(module: Any) -> None:
    with torch.no_grad():
        torch._foreach_lerp_(list(module.teacher.parameters()), list(module.first.parameters()), 0.001)


def follows_anew(module: Any) -> None:
    for own, other in zip(module.teacher.parameters(), module.first.parameters(), strict=True):
        own.data = own.data * 0.999 + other.data * 0.001


@pytest.mark.parametrize("follow", [follows, follows_anew])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("is_copy", [True, False], ids=["a copy as yet", "on its way"])
def test_a_teacher_that_follows_in_the_step_is_refused(
    follow: Callable[[Any], None], precision: str, is_copy: bool
) -> None:
    module: Any = Net()
    module.teacher = nn.Linear(4, 6).requires_grad_(False)
    if is_copy:
        module.teacher.load_state_dict(module.first.state_dict())

    def loss(module: Any, batch: Batch) -> Tensor:
        follow(module)
        return mean(module, batch) + (module.first(batch["x"]) - module.teacher(batch["x"])).square().mean()

    before = {name: value.clone() for name, value in module.state_dict().items()}
    verdict = verdict_on(loss, module, precision=precision)
    assert "the step changes `teacher.weight` of the module" in verdict.reason
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_buffer_that_the_step_fills_with_what_it_holds_is_no_reason() -> None:
    module = Stateful()

    def loss(module: Any, batch: Batch) -> Tensor:
        module.average.zero_()
        return mean(module, batch)

    assert verdict_on(loss, module).ok


def test_state_that_is_the_same_for_whole_and_parts_is_no_reason() -> None:
    def loss(module: Any, batch: Batch) -> Tensor:
        if module.mask is None:
            module.mask = torch.ones(3)
        module.generator.random()
        return functional.cross_entropy(module(batch["x"]) * module.mask, batch["y"])

    module = Stateful()
    before = module.generator.bit_generator.state
    assert verdict_on(loss, module).ok
    assert module.mask is None
    assert module.generator.bit_generator.state == before


def test_skipped_modules_are_put_back_but_no_reason() -> None:
    module = nn.Module()
    module.net, module.metric = Net(), Stateful()

    def loss(module: Any, batch: Batch) -> Tensor:
        found = mean(module.net, batch)
        for change in CHANGES.values():
            change(module.metric, found)
        return found

    before = snapshot(module.metric)
    assert verdict_on(loss, module, skip=lambda part: isinstance(part, Stateful)).ok
    assert snapshot(module.metric) == before


def snapshot(module: Stateful) -> Any:
    """All state of a module in plain numbers."""
    state = {name: value.tolist() for name, value in module.state_dict().items()}
    own = [len(module.seen), module.count, dict(module.meter.values), module.plain.tolist(), sorted(vars(module))]
    return state, own, [id(parameter) for parameter in module.parameters()]


# Traces.


@pytest.mark.parametrize("loss", [dropped, mixed, contrastive])
def test_gradients_random_states_and_the_batch_are_as_they_were(loss: Loss) -> None:
    def changing(module: Any, batch: Batch) -> Tensor:
        batch["x"] *= 2
        random.random()
        batch.pop("labels")
        return loss(module, batch)

    module, batch = Net(), batch_of(5)
    copies = {name: value.clone() for name, value in batch.items()}
    gradients = [torch.full_like(parameter, 0.5) for parameter in module.parameters()]
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        parameter.grad = gradient
    random_states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    verdict_on(changing, module, batch)
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert bool((gradient == 0.5).all())
        assert not parameter._post_accumulate_grad_hooks
    assert torch.equal(torch.get_rng_state(), random_states[0])
    assert random.getstate() == random_states[1]
    assert str(np.random.get_state()) == random_states[2]
    assert batch.keys() == copies.keys()
    assert all(torch.equal(batch[name], copies[name]) for name in batch)


def test_an_error_is_a_reason_and_leaves_no_trace() -> None:
    def failing(module: Any, batch: Batch) -> Tensor:
        module.count += 1
        if len(batch["x"]) < 5:
            raise ZeroDivisionError("too few")
        return mean(module, batch)

    module = Stateful()
    verdict = verdict_on(failing, module)
    assert not verdict.ok
    assert (
        "a test of the step on 5 samples at once and 3 and 2 apart raised ZeroDivisionError: too few" in verdict.reason
    )
    assert module.count == 0
    assert all(parameter.grad is None for parameter in module.parameters())


def test_where_memory_does_not_suffice_for_the_test_it_is_said_that_nothing_was_tested() -> None:
    def hungry(module: Any, batch: Batch) -> Tensor:
        raise torch.OutOfMemoryError("not enough")

    verdict = verdict_on(hungry)
    assert verdict.ok
    assert "could not be tested: 5 samples at once need more memory than there is" in verdict.note


def test_where_memory_runs_out_while_a_copied_teacher_is_moved_its_numbers_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Net()
    module.teacher = nn.Linear(4, 6).requires_grad_(False)
    module.teacher.load_state_dict(module.first.state_dict())
    before = [parameter.clone() for parameter in module.teacher.parameters()]

    def following(module: Any, batch: Batch) -> Tensor:
        follows(module)
        return mean(module, batch)

    def sign(tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("not enough")

    monkeypatch.setattr(Tensor, "sign", sign)
    verdict = verdict_on(following, module)
    assert "need more memory than there is" in verdict.note
    assert all(map(torch.equal, module.teacher.parameters(), before))


def test_losses_without_a_number_are_refused() -> None:
    verdict = verdict_on(lambda module, batch: mean(module, batch) * float("nan"))
    assert not verdict.ok
    assert "gives losses of nan, nan, nan for 5 samples at once and 3 and 2 apart" in verdict.reason


# What steps return and log.


def verdict_on_outcome(outcome: Callable[[Any, Batch], Outcome], size: int = 5) -> Verdict:
    module = Net()
    few = few_samples(module, batch_of(size))
    assert few is not None
    return equivalent(lambda part: outcome(module, part), few, module, backward)


def test_rules_for_returned_values_and_logs_are_learned() -> None:
    def outcome(module: Any, batch: Batch) -> Outcome:
        logits = module(batch["x"])
        loss = functional.cross_entropy(logits, batch["y"])
        logged = {"loss": loss.detach(), "right": (logits.argmax(1) == batch["y"]).sum(), "most": logits.detach().max()}
        return Outcome(loss, {"logits": logits.detach(), "size": len(logits)}, logged)

    verdict = verdict_on_outcome(outcome)
    assert verdict.ok
    assert verdict.output_rules == {"['logits']": Rule("cat", 0), "['size']": Rule("sum")}
    assert verdict.log_rules is not None
    assert verdict.log_rules["['loss']"] == Rule("mean")
    assert verdict.log_rules["['most']"] == Rule("max")
    assert verdict.log_rules["['right']"] in (Rule("sum"), Rule("max"))


def test_returned_or_logged_values_for_which_there_is_no_rule_are_named() -> None:
    def returns(module: Any, batch: Batch) -> Outcome:
        return Outcome(mean(module, batch), {"spread": batch["x"].std()})

    def logs(module: Any, batch: Batch) -> Outcome:
        return Outcome(mean(module, batch), None, {"spread": batch["x"].std()})

    assert "what the step returns at ['spread'] couples the samples of a batch" in verdict_on_outcome(returns).reason
    assert "what the step logs at ['spread'] couples the samples of a batch" in verdict_on_outcome(logs).reason


def test_steps_without_gradients_are_compared_by_what_they_return() -> None:
    module = Net()
    few = few_samples(module, batch_of())
    assert few is not None
    with torch.inference_mode():
        verdict = equivalent(lambda part: Outcome(None, module(part["x"])), few, module)
        refused = equivalent(lambda part: Outcome(None, module(part["x"]).softmax(0)), few, module)
    assert verdict.output_rules == {"": Rule("cat", 0)}
    assert not refused.ok


def test_simulated_devices_are_tested_as_any() -> None:
    with simulate(2):
        module = Net().to("simulated:1")
        batch = {name: value.to("simulated:1") for name, value in batch_of().items()}
        assert verdict_on(dropped, module, batch).ok
        verdict = verdict_on(
            lambda module, batch: (module(batch["x"]) - module(batch["x"]).mean(0)).square().mean(), module, batch
        )
        assert "the loss couples the samples" in verdict.reason


def test_the_model_stays_one_that_can_be_averaged_and_copied() -> None:
    module = Net()
    verdict_on(mean, module)
    assert AveragedModel(module).module is not module


# Which samples.


@pytest.mark.parametrize(
    ("size", "sizes"), [(2, [1, 1]), (3, [2, 1]), (4, [2, 1]), (5, [3, 2]), (8, [3, 2]), (16, [3, 2]), (64, [3, 2])]
)
def test_a_few_samples_are_taken_as_uneven_parts(size: int, sizes: list[int]) -> None:
    few = few_samples(Net(), torch.arange(size)[:, None] * torch.ones(3))
    assert isinstance(few, FewSamples)
    assert list(few.sizes) == sizes
    assert torch.equal(torch.cat(list(few.parts)), few.whole)


def test_a_few_samples_of_a_batch_that_only_the_user_can_split() -> None:
    class Splits(Net):
        def split_batch(self, batch: list[Tensor], n: int) -> list[list[Tensor]]:
            return [batch[start::n] for start in range(min(n, len(batch)))]

    few = few_samples(Splits(), [torch.full((1,), float(number)) for number in range(7)])
    assert few is not None
    assert sorted(float(item) for part in few.parts for item in part) == sorted(map(float, few.whole))
    assert len(few.parts) == 2


def test_one_sample_cannot_be_tested() -> None:
    assert few_samples(Net(), torch.ones(1, 3)) is None


def test_samples_with_different_numbers_of_ignored_targets_are_preferred() -> None:
    labels = torch.ones(20, 4, dtype=torch.int64)
    labels[16, 1:] = -100
    few = few_samples(Net(), {"labels": labels})
    assert few is not None
    assert bool((few.whole["labels"] == -100).any())
