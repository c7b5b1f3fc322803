"""Random numbers held constant, so that a batch and its parts can be compared: what no sample can tell from another's.

A permutation is the one exception: it is the reverse, so that a step which mixes samples gives other results on parts.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autobalance.compat import DispatchMode, schema_of

Arguments = Mapping[str, Any]

_UNIFORM = 0.5625  # near the middle, on neither side of `rand() < 0.5` by a rounding, and exact in every dtype
_NORMAL = 0.75
_SEED = 0


@contextmanager
def constant_random() -> Iterator[None]:
    """Let every random operation of torch inside give the same constant for every sample, on any device.

    Dropout keeps everything, `rand` gives one number, `randn` another, `randint` its lower end, `bernoulli` whether the
    probability is at least a half, `multinomial` the likeliest, `randperm` the reverse. Generators do not advance.
    Python's and NumPy's own random numbers start from the same seed at each entry; `random_state_kept` puts them back.

    Example:
        >>> with constant_random():
        ...     torch.equal(torch.randn(3, 4)[:2], torch.randn(2, 4)), torch.randperm(4).tolist()
        (True, [3, 2, 1, 0])
    """
    random.seed(_SEED)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(_SEED)
    torch.manual_seed(_SEED)  # for operations that are not known here
    with _ConstantMode():
        yield


class _ConstantMode(DispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        stand_in = _stand_in(func)
        return func(*args, **kwargs) if stand_in is None else stand_in(func, args, kwargs, self)


StandIn = Callable[[Any, "tuple[Any, ...]", "dict[str, Any]", DispatchMode], Any]


@cache
def _stand_in(func: Any) -> StandIn | None:
    """What runs instead of an operator; None for one that draws nothing."""
    space, _, name = schema_of(func).name.partition("::")
    draws = torch.Tag.nondeterministic_seeded in func.tags
    if space == "aten" and name in _PAIRS:
        return _pair
    if space == "aten" and name.rstrip("_") in _CONSTANTS:
        return _constant
    if (draws or name.endswith("_backward")) and any(given.name in _RATES for given in schema_of(func).arguments):
        return _without_dropout
    return _decomposed if draws else None


def _constant(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: DispatchMode) -> Any:
    """Give the constant where the operator would: in a new tensor, in place, or in `out`."""
    given = _bound(func, args, kwargs)
    name = schema_of(func).name.partition("::")[2]
    value = _CONSTANTS[name.rstrip("_")](given)
    out = given["self"] if name.endswith("_") else given.get("out")
    if out is None:
        return value if isinstance(value, Tensor) else _filled(given, value)
    if isinstance(value, Tensor):
        return (out if name.endswith("_") else out.resize_(value.shape)).copy_(value)
    if "size" in given:
        out.resize_(given["size"])
    elif "out" in given and isinstance(given.get("self"), Tensor):
        out.resize_(given["self"].shape)
    return out.fill_(value)


def _without_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: DispatchMode) -> Any:
    """Run fused attention or a recurrent kernel, or its backward, at a dropout rate of 0."""
    given = list(args)
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name in _RATES and position < len(given):
            given[position] = 0.0
    return func(*given, **{name: 0.0 if name in _RATES else value for name, value in kwargs.items()})


def _pair(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: DispatchMode) -> Any:
    """Operators that return what they kept, too."""
    given = _bound(func, args, kwargs)
    return _PAIRS[schema_of(func).name.partition("::")[2]](func, given)


def _decomposed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: DispatchMode) -> Any:
    """An operator made of others that are known here; one that is not draws as it always does."""
    with mode:
        result = func.decompose(*args, **kwargs)
    return func(*args, **kwargs) if result is NotImplemented else result


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, defaults included."""
    given = dict(kwargs)
    for position, argument in enumerate(schema_of(func).arguments):
        if position < len(args):
            given[argument.name] = args[position]
        elif argument.name not in given and argument.has_default_value():
            given[argument.name] = argument.default_value
    return given


def _filled(given: Arguments, value: Any) -> Tensor:
    """A new tensor as the operator would make it."""
    options = {name: given[name] for name in ("dtype", "layout", "device") if given.get(name) is not None}
    if "size" not in given:
        return torch.full_like(given["self"], value, **options)
    options.setdefault("dtype", torch.get_default_dtype())
    if isinstance(options["dtype"], int):  # a schema's default is the number of a dtype; all of those are int64
        options["dtype"] = torch.int64
    return torch.full(given["size"], value, pin_memory=bool(given.get("pin_memory")), **options)


def _reversed(given: Arguments) -> Tensor:
    where = given["out"].device if "out" in given else given.get("device")
    dtype = given.get("dtype")
    dtype = dtype if isinstance(dtype, torch.dtype) else torch.int64
    return torch.arange(given["n"] - 1, -1, -1, dtype=dtype, device=where)


def _bernoulli(given: Arguments) -> Any:
    probability = given.get("p", given["self"])
    if not isinstance(probability, Tensor):  # of a mask that keeps most, or few: all of it is kept
        return float(probability > 0)
    return (probability >= 0.5).to(given["self"].dtype).expand(given["self"].shape).contiguous()


def _likeliest(given: Arguments) -> Tensor:
    weights: Tensor = given["self"]
    count: int = given["num_samples"]
    if given.get("replacement"):
        return weights.argmax(-1, keepdim=True).expand(*weights.shape[:-1], count).contiguous()
    return weights.float().topk(count, dim=-1).indices


def _dirichlet(given: Arguments) -> Tensor:
    share: Tensor = given["self"] / given["self"].sum(-1, keepdim=True)
    return share


_CONSTANTS: dict[str, Callable[[Arguments], Any]] = {
    "rand": lambda given: _UNIFORM,
    "rand_like": lambda given: _UNIFORM,
    "uniform": lambda given: given["from"] + _UNIFORM * (given["to"] - given["from"]),
    "randn": lambda given: _NORMAL,
    "randn_like": lambda given: _NORMAL,
    "normal": lambda given: given["mean"] + _NORMAL * given["std"],
    "log_normal": lambda given: _NORMAL,
    "cauchy": lambda given: given["median"],
    "exponential": lambda given: 1.0 / given["lambd"],
    "geometric": lambda given: 1,
    "randint": lambda given: given.get("low", 0),
    "randint_like": lambda given: given.get("low", 0),
    "random": lambda given: given.get("from") or 0,
    "randperm": _reversed,
    "bernoulli": _bernoulli,
    "multinomial": _likeliest,
    "poisson": lambda given: given["self"].round(),
    "binomial": lambda given: (given["count"] * given["prob"]).round(),
    "_standard_gamma": lambda given: given["self"].clone(),
    "_sample_dirichlet": _dirichlet,
    "dropout": lambda given: given["input"].clone(),
    "alpha_dropout": lambda given: given["input"].clone(),
}


def _native_dropout(func: Any, given: Arguments) -> Any:
    rate = given["p"] if given["train"] is not False else 0.0
    kept = torch.ones_like(given["input"], dtype=torch.bool)
    return given["input"] * (1.0 / (1.0 - rate) if rate < 1 else 0.0), kept


def _fused_dropout(func: Any, given: Arguments) -> Any:
    kept = torch.ones_like(given["self"], dtype=torch.uint8)
    return given["self"] / given["p"], kept  # here p is the share that is kept


def _rrelu(func: Any, given: Arguments) -> Any:
    """The slope is the mean one; backward reads it from `noise`."""
    value, noise = given["self"], given["noise"]
    slope = (given["lower"] + given["upper"]) / 2
    noise.copy_(torch.where(value > 0, 1.0, slope))
    if schema_of(func).name.endswith("_"):
        return value.mul_(noise)
    return given["out"].copy_(value * noise) if "out" in given else value * noise


_PAIRS: dict[str, Callable[[Any, Arguments], Any]] = {
    "native_dropout": _native_dropout,
    "_fused_dropout": _fused_dropout,
    "rrelu_with_noise": _rrelu,
    "rrelu_with_noise_": _rrelu,
}
_RATES = frozenset({"dropout", "dropout_p"})
