"""What has to be known of an operator before it can be carried out, read once from its schema."""

from __future__ import annotations

from typing import Any

import torch

from autobalance.compat import schema_of

_aten = torch.ops.aten

MOVES = {
    _aten._to_copy.default,
    _aten.copy_.default,
    _aten._copy_from.default,
    _aten._copy_from_and_resize.default,
}
"""Operators whose operands may be on different devices."""

INDEXED = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
    _aten._unsafe_index.Tensor,
    _aten._unsafe_index_put.default,
}
"""Operators whose indices, a list, may be on the host."""

READS_HOST = {
    _aten._pack_padded_sequence.default,
    _aten._ctc_loss.Tensor,
    _aten._ctc_loss_backward.Tensor,
}
"""Operators that take lengths, which are on the host."""

OVERWRITES = {_aten.zero_.default, _aten.fill_.Scalar, _aten.fill_.Tensor, _aten.copy_.default}
"""Operators whose result does not depend on what their first operand held."""


READS_SHAPES_ONLY = {
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
}
"""Operators whose result does not depend on the numbers in their operand."""


class Operation:
    """One operator.

    Args:
        func: an operator overload.

    Attributes:
        name: with its namespace, as in error messages.
        writes: positions and names of the arguments it changes.
        returns: for each result, the argument it is (in-place and `out=`), or None for a new tensor.
        reads_shapes_only: whether the result does not depend on the operands' numbers.
        reshapes: whether an argument's sizes, strides or storage may change.
        moves: whether operands may be on different devices.
        indexed: whether operands inside a list may be on the host.
        by_element: whether it works on lists, element by element (`_foreach_*`, fused optimizers).
        reads_host: whether some operands are on the host.
        random: whether its result depends on the random generator.
        needs_data: whether the result's shape, or the result as a Python number, depends on numbers.
        overwrites: whether the first argument is written without being read.
    """

    __slots__ = (
        "by_element",
        "indexed",
        "moves",
        "name",
        "needs_data",
        "overwrites",
        "random",
        "reads_host",
        "reads_shapes_only",
        "reshapes",
        "returns",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        schema = schema_of(func)
        self.name: str = schema.name
        written = [
            (position, argument)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.writes = [(position, argument.name) for position, argument in written]
        self.returns = [self._returned(result, written) for result in schema.returns]
        short = self.name.split("::")[1]
        self.reshapes = (
            torch.Tag.inplace_view in func.tags
            or short in ("resize_", "resize_as_", "set_")
            or any(argument.is_out for _, argument in written)
        )
        self.moves = func in MOVES
        self.indexed = func in INDEXED
        self.by_element = short.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
        self.reads_host = func in READS_HOST
        self.reads_shapes_only = func in READS_SHAPES_ONLY
        self.random = torch.Tag.nondeterministic_seeded in func.tags
        self.needs_data = not {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}.isdisjoint(func.tags)
        self.overwrites = func in OVERWRITES

    @staticmethod
    def _returned(result: Any, written: list[tuple[int, Any]]) -> tuple[int, str] | None:
        if result.alias_info is None or not result.alias_info.is_write:
            return None
        for position, argument in written:
            if argument.alias_info.before_set & result.alias_info.before_set:
                return position, argument.name
        return None


_operations: dict[int, Operation] = {}


def describe(func: Any) -> Operation:
    """The (cached) description of an operator overload.

    Args:
        func: an operator overload.
    """
    found = _operations.get(id(func))  # operators live as long as torch does, and hash slowly
    if found is None:
        found = _operations[id(func)] = Operation(func)
    return found


_MAKES_HOST_WAIT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def host_waits(func: Any, args: Any) -> bool:
    """Whether the host has to wait for the device to know the result of an operation, or its shape.

    Args:
        func: the operator overload.
        args: its positional arguments.
    """
    if _MAKES_HOST_WAIT.isdisjoint(func.tags):
        return False
    return func is not _aten.index.Tensor or any(_is_mask(index) for index in args[1])


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)
