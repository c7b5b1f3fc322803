"""What micro-batches give is merged into what a step on the whole batch gives: steps here run both ways."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from autobalance.execution.batches.merge_rules import Mismatch, guess, learn
from autobalance.execution.batches.merging import Rule, UnmergeableError, apply, merge
from autobalance.execution.batches.splitting import parts_of

Output = namedtuple("Output", ["loss", "logits"])


@dataclass(frozen=True)
class Record:
    total: Tensor
    names: list[str]


def batch(samples: int = 5) -> dict[str, Any]:
    torch.manual_seed(0)
    names = [f"image {index}" for index in range(samples)]
    return {"x": torch.randn(samples, 3), "y": torch.arange(samples) % 3, "names": names}


def run(step: Callable[[Any], Any], samples: int = 5, count: int = 2) -> tuple[Any, list[Any], Any]:
    """What the whole batch gives, what its parts give, and the parts."""
    parts = parts_of(None, batch(samples), count)
    return step(batch(samples)), [step(part) for part in parts.batches], parts


def same(one: Any, other: Any) -> bool:
    try:
        torch.testing.assert_close(one, other)
    except AssertionError:
        return False
    return True


STEPS: dict[str, Callable[[Any], Any]] = {
    "loss": lambda b: cross_entropy(b["x"], b["y"]),
    "dict": lambda b: {"loss": cross_entropy(b["x"], b["y"]), "logits": b["x"], "names": b["names"], "nothing": None},
    "named tuple": lambda b: Output(b["x"].mean(), b["x"] * 2),
    "tuple": lambda b: (b["y"], "word", 3, 0.5),
    "losses": lambda b: (b["x"].mean(), b["x"]),
    "list": lambda b: [b["x"].argmax(1)],
    "time first": lambda b: b["x"].t().contiguous(),
    "array": lambda b: b["x"].numpy(),
    "count": lambda b: {"n": len(b["y"])},
    "strings": lambda b: [name.upper() for name in b["names"]],
    "different lengths": lambda b: [torch.ones(int(label) + 1) for label in b["y"]],
    "nothing": lambda b: None,
    "half": lambda b: b["x"].half().mean(),
    "flags": lambda b: {"ready": True, "mask": b["y"] > 1},
}


@pytest.mark.parametrize("samples", [5, 4])
@pytest.mark.parametrize("name", STEPS)
def test_what_steps_return_is_merged_by_guess_and_by_learning(name: str, samples: int) -> None:
    whole, parts, split = run(STEPS[name], samples)
    learned = learn(whole, parts, split.sizes, tolerance=1e-3)
    assert not isinstance(learned, Mismatch)
    for rules in (guess(parts, split.sizes), learned):
        merged = merge(parts, split.sizes, rules)
        assert type(merged) is type(whole)
        if name == "half":
            assert merged.dtype is torch.float16
            assert float(merged) == pytest.approx(float(whole), rel=2e-2)
        else:
            assert plain(merged) == pytest.approx(plain(whole), rel=1e-5)


def plain(value: Any) -> Any:
    """A flat list of numbers, so that values are compared whatever they are nested in."""
    if isinstance(value, Tensor):
        return value.flatten().tolist()
    if isinstance(value, np.ndarray):
        return value.flatten().tolist()
    if isinstance(value, dict):
        return [number for item in value.values() for number in plain(item)]
    if isinstance(value, (list, tuple)):
        return [number for item in value for number in plain(item)]
    return [float(hash(value)) if isinstance(value, str) else float(value or 0)]


LEARNED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "sum": (lambda b: b["x"].pow(2).sum(), "sum"),
    "max": (lambda b: b["x"].max(), "max"),
    "min": (lambda b: b["x"].min(), "min"),
    "mean": (lambda b: b["x"].mean(), "mean"),
    "equal": (lambda b: torch.tensor(3.0), "equal"),
    "cat": (lambda b: b["x"].sum(1), "cat"),
    "gram": (lambda b: b["x"].t() @ b["x"], "sum"),
    "largest of each": (lambda b: b["x"].amax(0), "max"),
}


@pytest.mark.parametrize("name", LEARNED)
def test_a_rule_is_learned_from_the_whole(name: str) -> None:
    step, kind = LEARNED[name]
    whole, parts, split = run(step)
    rules = learn(whole, parts, split.sizes)
    assert not isinstance(rules, Mismatch)
    assert rules[""].kind == kind
    assert same(merge(parts, split.sizes, rules), whole)


def test_the_rule_of_one_batch_merges_others() -> None:
    step = LEARNED["sum"][0]
    whole, parts, split = run(step)
    rules = learn(whole, parts, split.sizes)
    assert not isinstance(rules, Mismatch)
    other, others, resplit = run(step, samples=7, count=3)
    assert same(merge(others, resplit.sizes, rules), other)


def test_a_mean_is_weighted_by_what_the_parts_weigh() -> None:
    values = [torch.tensor(1.0), torch.tensor(5.0)]
    assert float(merge(values, [3, 1], {"": Rule("mean")})) == 2.0
    assert float(merge(values, [3, 1], {"": Rule("mean")}, [torch.tensor(0.5), torch.tensor(0.5)])) == 3.0


def test_dataclasses_are_rebuilt() -> None:
    whole, parts, split = run(lambda b: Record(b["x"].sum(), b["names"]))
    rules = learn(whole, parts, split.sizes)
    assert not isinstance(rules, Mismatch)
    merged = merge(parts, split.sizes, rules)
    assert isinstance(merged, Record)
    assert merged.names == whole.names
    assert same(merged.total, whole.total)


def test_mappings_of_transformers_keep_keys_and_attributes() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    whole, parts, split = run(lambda b: outputs.CausalLMOutput(loss=b["x"].mean(), logits=b["x"]))
    merged = merge(parts, split.sizes, guess(parts, split.sizes))
    assert type(merged) is type(whole)
    assert same(merged.logits, whole.logits)
    assert same(merged["loss"], whole.loss)


def test_predictions_keep_the_order_of_samples() -> None:
    whole, parts, split = run(lambda b: {"y": b["y"], "pairs": [(name, 1) for name in b["names"]]}, 7, 3)
    merged = merge(parts, split.sizes, guess(parts, split.sizes))
    assert merged["pairs"] == whole["pairs"]
    assert merged["y"].tolist() == whole["y"].tolist()


def test_a_value_that_parts_cannot_give_is_named() -> None:
    whole, parts, split = run(lambda b: {"loss": b["x"].mean(), "spread": b["x"].std()})
    found = learn(whole, parts, split.sizes)
    assert isinstance(found, Mismatch)
    assert found.name == "['spread']"
    assert f"no rule gives {float(whole['spread']):.6g} from" in found.reason


def test_parts_of_another_kind_are_named() -> None:
    with pytest.raises(UnmergeableError, match=r"different types at \['a'\]: NoneType, Tensor"):
        guess([{"a": torch.ones(2)}, {"a": None}], [2, 2])
    with pytest.raises(UnmergeableError, match=r"of type object at \[0\], for which there is no rule"):
        guess([[object()], [object()]], [2, 2])
    with pytest.raises(UnmergeableError, match="something else than before"):
        merge([{"b": 1}, {"b": 1}], [1, 1], {"['a']": Rule("equal")})


def test_a_part_that_weighs_nothing_counts_nothing_though_its_mean_is_no_number() -> None:
    values = [torch.tensor(float("nan")), torch.tensor(4.0)]
    for weights in ([0.0, 1.0], [torch.tensor(0.0), torch.tensor(1.0)]):
        assert float(apply(Rule("mean"), values, weights)) == 4.0
        assert apply(Rule("mean"), [float("nan"), 4.0], weights) == 4.0
