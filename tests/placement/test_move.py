from __future__ import annotations

import threading
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from autobalance.placement.locate import DeviceLocator
from autobalance.placement.move import Mover

HERE, THERE = "simulated:0", "simulated:1"

Point = namedtuple("Point", ["x", "y"])


class Labelled(Point):
    """A named tuple that is made from something else than its items."""

    def __new__(cls, label: str) -> Labelled:
        return super().__new__(cls, label, torch.ones(2, device=HERE))


@dataclass
class Plain:
    value: Any
    other: str = "kept"


@dataclass(frozen=True)
class Frozen:
    value: Any
    made: list[int] = field(default_factory=list, init=False)


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    value: Any
    other: str = "kept"


class Derived(dict):
    """A dictionary with an attribute."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.note: Any = "kept"


class OwnMapping(Mapping):
    """Read-only, kept in an attribute."""

    def __init__(self, held: dict[str, Any]) -> None:
        self._held = held

    def __getitem__(self, key: str) -> Any:
        return self._held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


class Carrier:
    """An object that knows how to move itself."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.lock = threading.Lock()
        self.calls = 0

    def to(self, device: Any) -> Carrier:
        moved = Carrier(self.value.to(device))
        moved.calls = self.calls + 1
        return moved


class SelfChanging:
    """Its `.to` changes the object itself and returns nothing."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.seen = {"value": value}

    def to(self, device: Any) -> None:
        self.value = self.value.to(device)
        self.seen = {"value": self.value}


class Length:
    """Has a `.to` that has nothing to do with devices."""

    def to(self, unit: str) -> float:
        return {"m": 1.0, "km": 0.001}[unit]


def ones() -> Tensor:
    return torch.ones(2, device=HERE)


def place(tensor: Tensor) -> str:
    return str(tensor.device)


def to(locator: DeviceLocator, device: str) -> Mover:
    return Mover(locator, torch.device(device))


@pytest.fixture
def mover(locator: DeviceLocator) -> Mover:
    return to(locator, THERE)


def batch_encoding(value: Tensor) -> UserDict[str, Any]:
    return UserDict({"value": value})


NESTINGS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda t: t, lambda v: v),
    "tuple": (lambda t: (1, t), lambda v: v[1]),
    "list": (lambda t: ["a", [t]], lambda v: v[1][0]),
    "dict": (lambda t: {"a": {"b": t}}, lambda v: v["a"]["b"]),
    "ordered dict": (lambda t: OrderedDict(b=1, a=t), lambda v: v["a"]),
    "dict with an attribute": (lambda t: Derived({"a": t}), lambda v: v["a"]),
    "named tuple": (lambda t: Point(1, t), lambda v: v.y),
    "deque": (lambda t: deque([0, t], maxlen=2), lambda v: v[1]),
    "set": (lambda t: {t}, lambda v: next(iter(v))),
    "frozenset": (lambda t: frozenset([t]), lambda v: next(iter(v))),
    "dataclass": (Plain, lambda v: v.value),
    "frozen dataclass": (Frozen, lambda v: v.value),
    "frozen dataclass with slots": (FrozenSlots, lambda v: v.value),
    "namespace": (lambda t: types.SimpleNamespace(value=t), lambda v: v.value),
    "read-only view of a dict": (lambda t: types.MappingProxyType({"a": t}), lambda v: v["a"]),
    "mapping in Python": (lambda t: OwnMapping({"a": t}), lambda v: v["a"]),
    "mutable mapping in Python": (batch_encoding, lambda v: v["value"]),
    "returned by torch": (lambda t: torch.max(torch.stack([t, t]), 0), lambda v: v.values),
    "moves itself": (Carrier, lambda v: v.value),
    "moves itself in place": (SelfChanging, lambda v: v.value),
}


@pytest.mark.parametrize("name", NESTINGS)
def test_every_nesting_moves_and_keeps_its_type(name: str, mover: Mover) -> None:
    make, read = NESTINGS[name]
    value = make(ones())
    before = read(value)
    moved = mover.move(value)
    assert type(moved) is type(value)
    assert place(read(moved)) == THERE
    assert read(moved).cpu().tolist() == [1.0, 1.0]
    assert read(value) is before, "the caller's own is left as it was"
    assert place(before) == HERE


@pytest.mark.parametrize("name", NESTINGS)
def test_nothing_is_rebuilt_where_nothing_moves(name: str, locator: DeviceLocator) -> None:
    value = NESTINGS[name][0](ones())
    assert to(locator, HERE).move(value) is value


def test_what_a_rebuilt_container_has_beside_its_tensors_is_kept(mover: Mover) -> None:
    made: defaultdict[str, Any] = defaultdict(list, a=ones())
    moved = mover.move((made, deque([ones()], maxlen=3), Labelled("name"), Plain(ones())))
    assert moved[0].default_factory is list
    assert moved[1].maxlen == 3
    assert (type(moved[2]), moved[2].x, place(moved[2].y)) == (Labelled, "name", THERE)
    assert moved[3].other == "kept"


def test_attributes_that_are_no_fields_move_too(mover: Mover) -> None:
    plain, derived = Plain(1), Derived({"a": 1})
    plain.cached = ones()  # type: ignore[attr-defined]
    derived.note = [ones()]
    moved_plain, moved_derived = mover.move((plain, derived))
    assert place(moved_plain.cached) == place(moved_derived.note[0]) == THERE
    assert place(derived.note[0]) == HERE


def test_a_model_output_keeps_its_items_and_attributes_one(mover: Mover) -> None:
    modeling_outputs = pytest.importorskip("transformers.modeling_outputs")
    output = modeling_outputs.BaseModelOutputWithPast(last_hidden_state=ones(), hidden_states=(ones(), ones()))
    moved = mover.move(output)
    assert type(moved) is type(output)
    assert moved.last_hidden_state is moved["last_hidden_state"]
    assert [place(t) for t in (moved.last_hidden_state, *moved.hidden_states)] == [THERE] * 3
    assert moved.past_key_values is None
    assert place(output.last_hidden_state) == HERE


def test_a_batch_encoding_moves(mover: Mover) -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": ones()})
    moved = mover.move(encoding)
    assert type(moved) is type(encoding)
    assert place(moved["input_ids"]) == THERE
    assert place(encoding["input_ids"]) == HERE


def test_a_packed_sequence_keeps_its_batch_sizes_on_the_host(mover: Mover) -> None:
    padded = torch.arange(6.0).view(3, 2, 1).to(HERE)
    packed = pack_padded_sequence(padded, torch.tensor([1, 3]), enforce_sorted=False)
    moved, sizes = mover.move((packed, [packed.batch_sizes]))
    assert type(moved) is PackedSequence
    assert [place(moved.data), place(moved.sorted_indices), place(moved.unsorted_indices)] == [THERE] * 3
    assert moved.batch_sizes is packed.batch_sizes is sizes[0]


def test_batch_sizes_stay_even_where_host_tensors_move() -> None:
    class Everything(DeviceLocator):
        def place_of(self, tensor: Tensor) -> Any:
            return tensor.device

    packed = pack_padded_sequence(torch.ones(3, 2, 1), torch.tensor([3, 1]))
    moved = to(Everything([torch.device(THERE)]), THERE).move({"batch": packed, "sizes": packed.batch_sizes})
    assert place(moved["batch"].data) == place(moved["sizes"]) == THERE
    assert moved["batch"].batch_sizes.device.type == "cpu"


def test_host_tensors_stay_on_the_host(mover: Mover) -> None:
    lengths = torch.tensor([3, 1])
    values = [lengths, ones()]
    moved = mover.move(values)
    assert moved[0] is lengths
    assert place(moved[1]) == THERE


@pytest.mark.parametrize(
    "value",
    [
        iter([1]),
        (i for i in [1]),
        zip([1], [2], strict=True),
        range(3),
        nn.Linear(1, 1),
        Length(),
        object(),
        int,
        None,
        "text",
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_stands_for_no_data_is_left_alone(value: Any, mover: Mover) -> None:
    moved = mover.move({"it": value, "tensor": ones()})
    assert moved["it"] is value
    assert place(moved["tensor"]) == THERE


def test_a_generator_is_not_consumed(mover: Mover) -> None:
    generator = (tensor for tensor in [ones()])
    assert place(next(mover.move([generator, ones()])[0])) == HERE


def test_one_object_met_twice_stays_one(mover: Mover) -> None:
    tensor, shared = ones(), [ones()]
    moved = mover.move((tensor, {"again": tensor}, shared, Plain(shared)))
    assert moved[0] is moved[1]["again"]
    assert moved[2] is moved[3].value


def test_a_tensor_and_the_object_that_carries_it_meet(mover: Mover) -> None:
    carrier = Carrier(ones())
    moved, tensor = mover.move([carrier, carrier.value])
    assert place(tensor) == place(moved.value) == THERE
    assert moved.calls == 1


@pytest.mark.parametrize("make", [list, deque, dict, lambda: Plain(None)], ids=["list", "deque", "dict", "object"])
def test_a_container_that_contains_itself_is_moved_whole(make: Callable[[], Any], mover: Mover) -> None:
    circle = make()
    put(circle, "self", circle)
    put(circle, "pair", (circle, ones()))
    moved = mover.move(circle)
    assert moved is not circle
    assert get(moved, 0, "self") is moved
    assert get(moved, 1, "pair")[0] is moved
    assert place(get(moved, 1, "pair")[1]) == THERE
    assert get(circle, 0, "self") is circle


def put(container: Any, name: str, value: Any) -> None:
    if isinstance(container, dict):
        container[name] = value
    elif isinstance(container, Plain):
        setattr(container, name, value)
    else:
        container.append(value)


def get(container: Any, index: int, name: str) -> Any:
    if isinstance(container, dict):
        return container[name]
    return getattr(container, name) if isinstance(container, Plain) else container[index]


def test_a_tuple_in_a_circle_stays_one_tuple(mover: Mover) -> None:
    inside: list[Any] = []
    outside = (inside, ones())
    inside.append(outside)
    moved = mover.move(outside)
    assert moved[0][0] is moved
    assert place(moved[1]) == THERE


def change_list(v: Any) -> None:
    v.append("new")
    del v[0]


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Callable[[Any], Any]]] = {
    "added to a list": (lambda: ["old", ones()], lambda v: v.append(3), lambda v: (v[0], v[2], len(v))),
    "removed from a list": (lambda: ["old", ones()], lambda v: v.pop(0), len),
    "a list in a dict": (lambda: {"a": ["old", ones()]}, lambda v: change_list(v["a"]), lambda v: v["a"][1:]),
    "a list in a tuple": (lambda: (1, ["old", ones()]), lambda v: change_list(v[1]), lambda v: v[1][1:]),
    "a list that moves itself": (lambda: Carrier(ones()), lambda v: setattr(v, "calls", 9), lambda v: v.calls),
    "replaced in a dict": (lambda: {"a": 1, "b": ones()}, lambda v: v.update(a=2, c=3), lambda v: (v["a"], v["c"])),
    "removed from a dict": (lambda: {"a": 1, "b": ones()}, lambda v: v.pop("a"), list),
    "order of a dict": (lambda: OrderedDict(a=ones(), b=1), lambda v: v.move_to_end("a"), list),
    "counted": (lambda: [Counter("a"), ones()], lambda v: v[0].update("a"), lambda v: v[0]["a"]),
    "default made": (lambda: defaultdict(list, a=ones()), lambda v: v["b"].append(1), lambda v: v["b"]),
    "pushed to a full deque": (lambda: deque([1, ones()], maxlen=2), lambda v: v.append(2), lambda v: (len(v), v[1])),
    "added to a set": (lambda: {ones()}, lambda v: v.add(7), lambda v: 7 in v),
    "attribute of a dataclass": (lambda: Plain(ones()), lambda v: setattr(v, "other", "new"), lambda v: v.other),
    "attribute made": (lambda: Plain(ones()), lambda v: setattr(v, "made", 1), lambda v: v.made),
    "attribute removed": (lambda: types.SimpleNamespace(a=ones(), b=1), lambda v: delattr(v, "b"), vars),
    "attribute of a dict": (lambda: Derived({"a": ones()}), lambda v: setattr(v, "note", "new"), lambda v: v.note),
    "mapping in Python": (lambda: UserDict(a=ones()), lambda v: v.update(b=2), lambda v: v["b"]),
    "moves itself": (lambda: SelfChanging(ones()), lambda v: v.seen.update(b=2), lambda v: v.seen["b"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_block_changes_is_carried_back(name: str, mover: Mover) -> None:
    make, change, read = CHANGES[name]
    value, plain = make(), make()
    change(plain)
    moved = mover.move(value)
    change(moved)
    mover.carry_back()
    expected, seen = read(plain), read(value)
    if isinstance(expected, dict):  # tensors do not compare as one truth
        expected, seen = list(expected), list(seen)
    assert seen == expected


def test_the_caller_gets_its_own_objects_back(mover: Mover) -> None:
    x, inner = ones(), [ones()]
    cache: dict[str, Any] = {"inner": inner, "x": x}
    moved = mover.move(cache)
    moved["same"], moved["list"] = moved["x"], moved["inner"]
    made = torch.zeros(1, device=THERE)
    moved["inner"].append(made)
    mover.carry_back()
    assert cache["same"] is cache["x"] is x
    assert cache["list"] is cache["inner"] is inner
    assert inner[1] is made
    assert place(inner[0]) == HERE


def test_a_returned_container_is_the_callers_own(mover: Mover) -> None:
    cache, kept = {"a": ones()}, [ones()]
    moved_cache, moved_kept = mover.move((cache, kept))
    inside = {"kept": moved_kept, "point": Point(moved_cache, 1), "plain": Plain([moved_kept])}
    output = mover.restore((1, moved_cache, inside))
    assert output[1] is cache
    assert output[2] is inside
    assert inside["kept"] is kept
    assert (type(inside["point"]), inside["point"].x) == (Point, cache)
    assert inside["plain"].value[0] is kept


def test_an_output_in_a_circle_is_restored(mover: Mover) -> None:
    kept = [ones()]
    circle: list[Any] = [mover.move(kept)]
    circle.append(circle)
    assert mover.restore(circle)[1][0] is kept


@pytest.mark.parametrize("inference", [False, True])
def test_a_change_in_place_is_seen(inference: bool, locator: DeviceLocator) -> None:
    with torch.inference_mode(inference):
        untouched, changed = ones(), ones()
        mover = to(locator, THERE)
        mover.move([untouched, changed])[1].add_(1)
        assert [source is changed for source, _ in mover.changed_in_place()] == [True]


def test_a_change_in_place_inside_an_object_that_moves_itself_is_seen(mover: Mover) -> None:
    carrier = Carrier(ones())
    mover.move(carrier).value.mul_(2)
    assert [source is carrier.value for source, _ in mover.changed_in_place()] == [True]


def test_gradients_come_back_through_a_move(mover: Mover) -> None:
    x = ones().requires_grad_()
    moved = mover.move({"x": [x]})
    (moved["x"][0] * 3).sum().backward()
    assert x.grad is not None
    assert place(x.grad) == HERE
    assert x.grad.tolist() == [3.0, 3.0]
