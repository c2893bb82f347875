"""Table of in-place forms: which ops can write their first result over which operand.

An in-place form gives the same bits as the op itself. Most are the op's ``out=`` overload or its variant with an
underscore, looked up in torch's registry. If there is none, or one that only copies, the engine processes the operand
piece by piece (memplan.planning.ops.piecewise). Ops that are not in these tables have no in-place form: each entry is
tested bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch

from memplan import _torch
from memplan.planning.graph.joint_graph import GraphOp, Ref, Value, refs
from memplan.planning.graph.op_schema import (
    BATCH_NORM_AGAIN,
    CHANNEL_NORM_BACKWARD,
    CLASS_SUMS_BACKWARD,
    CROSS_ENTROPY,
    ELEMENTWISE,
    MASKED_SOFTMAX_BACKWARD,
    NUMBER_TENSOR_BYTES,
    _argument_names,
    arguments_of,
    is_contiguous,
    is_dense,
    itemsize,
    overload,
)
from memplan.planning.levers.lever import Lever, PlannedStep, Reason
from memplan.planning.ops.pieces import (
    all_rows_and_rows_per_piece,
    channels_per_piece,
    elements_per_piece,
    groups_per_piece,
)
from memplan.planning.ops.tile import TILE_BACKWARD, TILE_BACKWARD_INTO, overwritten_gradient
from memplan.trace.records import HOST

READ_BEFORE_WRITTEN: Mapping[str, tuple[str, ...]] = {
    "_log_softmax_backward_data.default": ("grad_output",), "_softmax_backward_data.default": ("grad_output",),
    **dict.fromkeys(
        ("_log_softmax.default", "_softmax.default", "cumprod.default", "cumsum.default", "index_add.default",
         "index_fill.int_Scalar", "index_put.default", "masked_scatter.default", "scatter.src", "scatter.value",
         "scatter_add.default", "tril.default", "triu.default"), ("self",)),
}  # fmt: skip
"""Further ops, beside elementwise ones, that may overwrite an operand, as their kernels read each element before they
write it: the names of such operands, by op."""


SMALLEST_PIECEWISE_BYTES = 1 << 20
"""Smallest operand in bytes to process piece by piece: for smaller ones the calls cost more than the op."""


@dataclass(frozen=True, slots=True)
class InPlaceForm:
    """In-place form of an op.

    With ``out`` it is called with the same arguments and the overwritten operand as this keyword; without, the call
    changes the operand itself. It returns results of the same shapes as the op.

    Example:
        >>> call_into("aten.threshold_backward.default", "grad_output")
        InPlaceForm(target='aten.threshold_backward.grad_input', out='grad_input')
        >>> call_into("aten.relu.default", "self")
        InPlaceForm(target='aten.relu_.default', out=None)
    """

    target: str
    out: str | None = None
    """Keyword argument that takes the overwritten operand; None: the call changes its first operand."""


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand that an op's first result can overwrite."""

    name: str
    """Name of the argument in the op's schema."""
    value: int
    """Id of the argument's value: the base itself, or a view of all of it."""


def overwrites(
    target: str, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Value], result: int
) -> tuple[int, ...]:
    """Return the values that the first result of a call can overwrite, best first. The result is the same bit for bit.
    ``result`` is the id of the op's first result; tensors among the arguments are Refs, as in `GraphOp`.

    Returns:
        Ids of values that own memory (`Value.base`).
    """
    operands = _operands(target, args, kwargs, values, result)
    return tuple(dict.fromkeys(values[operand.value].base for operand in operands))


def overwritten_operand(op: GraphOp, base: int, values: Sequence[Value]) -> Operand:
    """Return the operand that an op's result overwrites if it takes over the memory of value ``base``, one of
    ``op.overwrites``."""
    operands = _operands(op.target, op.args, op.kwargs, values, op.makes[0])
    return next(operand for operand in operands if values[operand.value].base == base)


def call_into(target: str, operand: str) -> InPlaceForm:
    """Return the in-place form that writes the op's first result over an operand that `overwrites` allows. Raises
    KeyError if there is no such form."""
    if target in PIECEWISE:
        return InPlaceForm(PIECEWISE[target].target)
    if target == TILE_BACKWARD:
        return InPlaceForm(TILE_BACKWARD_INTO)
    form = _torch_form(target)
    if form is None or (form.out is None and operand != _argument_names(target)[0]):
        raise KeyError(f"{target} has no form that writes over {operand}")
    return form


def in_place_workspace(op: GraphOp, values: Sequence[Value]) -> int:
    """Return an upper bound in bytes of the workspace of an op's in-place form."""
    piecewise = PIECEWISE.get(op.target)
    if piecewise is None:  # torch's own form
        return op.scratch
    arguments = arguments_of(op.target, op.args, op.kwargs)
    of_pieces = piecewise.workspace(arguments, values, values[op.makes[0]])
    return max(of_pieces, op.scratch) if piecewise.runs_whole_op_too else of_pieces


def _operands(
    target: str, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Value], result: int
) -> list[Operand]:
    """Return the operands of a call that its first result can overwrite. Arguments: as for `overwrites`."""
    if target == TILE_BACKWARD:
        gradient = overwritten_gradient(args)
        if gradient is None or not _can_hold(values[gradient.value], values[result], values):
            return []
        read_bases = [values[value].base for value in refs(args)]
        is_read_once = read_bases.count(values[gradient.value].base) == 1
        return [Operand("gradients", gradient.value)] if is_read_once else []
    names = _overwritable_operands(target)
    if not names:
        return []
    arguments, result_value = arguments_of(target, args, kwargs), values[result]
    piecewise = PIECEWISE.get(target)
    if piecewise is not None and not piecewise.suits(arguments, values, result_value):
        return []
    named = {name: arguments.get(name) for name in names}
    operands = [Operand(name, argument.value) for name, argument in named.items() if isinstance(argument, Ref)]
    is_elementwise = target.removeprefix("aten.") in ELEMENTWISE
    return [
        operand
        for operand in operands
        if _can_hold(values[operand.value], result_value, values)
        and _has_no_alias(operand, arguments, values, is_elementwise=is_elementwise)
    ]


def _can_hold(value: Value, result: Value, values: Sequence[Value]) -> bool:
    """Return whether a value is all of its memory and has the layout and dtype of the result, without gaps."""
    if (value.shape, value.stride, value.dtype) != (result.shape, result.stride, result.dtype):
        return False
    size = prod(result.shape) * itemsize(result.dtype)
    if not size or not result.bytes == values[value.base].bytes == size:
        return False
    return is_dense(result) and not getattr(torch, result.dtype).is_complex


def _has_no_alias(
    operand: Operand, arguments: Mapping[str, Any], values: Sequence[Value], *, is_elementwise: bool
) -> bool:
    """Return whether no other argument shares the operand's memory; elementwise ops may read the same elements
    twice."""
    overwritten = values[operand.value]
    for name, argument in arguments.items():
        for other in refs(argument):
            if name == operand.name or values[other].base != overwritten.base:
                continue
            has_same_layout = values[other].shape == overwritten.shape and values[other].stride == overwritten.stride
            if not (is_elementwise and has_same_layout and values[other].dtype == overwritten.dtype):
                return False
    return True


# -- torch's own forms


@cache
def _overwritable_operands(target: str) -> tuple[str, ...]:
    """Return the names of the operands that an in-place form of the op can overwrite, whatever their layout."""
    if target in PIECEWISE:
        return (PIECEWISE[target].operand,)
    if target == BATCH_NORM_AGAIN:
        return ("self",)
    if target in _OVER_OPERANDS:
        return _OVER_OPERANDS[target]
    name = target.removeprefix("aten.")
    if name == target or (name not in ELEMENTWISE and name not in READ_BEFORE_WRITTEN):
        return ()
    form = _torch_form(target)
    if form is None:  # not in this version of torch
        return ()
    names = READ_BEFORE_WRITTEN.get(name) or tuple(name for _, name in _torch.tensor_arguments(overload(target)))
    if form.out is not None:  # it can write over any of these
        return names
    first = _argument_names(target)[0]  # the variant with an underscore writes over this
    return (first,) if first in names else ()


_OVER_OPERANDS: Mapping[str, tuple[str, ...]] = {
    CHANNEL_NORM_BACKWARD: ("d_y", "x"),
    MASKED_SOFTMAX_BACKWARD: ("d_y", "x", "y"),
    CLASS_SUMS_BACKWARD: ("logits",),
    "aten.avg_pool2d_backward.default": ("self",),
    "aten.max_pool2d_with_indices_backward.default": ("self",),
}
"""Operands over which kernels of `memplan.kernels` can write their first result, and inputs of pooling, of which the
derivative reads the sizes alone."""


# mul_.Scalar rounds the scalar to the tensor's dtype first; mul.out, which also accepts scalars, computes as
# mul.Scalar.
_SPECIAL_FORMS = {
    "aten.mul.Scalar": InPlaceForm("aten.mul.out", "out"),
    BATCH_NORM_AGAIN: InPlaceForm("memplan.batch_norm_again_.default"),
    CHANNEL_NORM_BACKWARD: InPlaceForm("memplan.channel_norm_backward_into.default", "into"),
    MASKED_SOFTMAX_BACKWARD: InPlaceForm("memplan.masked_softmax_backward_into.default", "into"),
    CLASS_SUMS_BACKWARD: InPlaceForm("memplan.class_sums_backward_into.default", "into"),
}


@cache
def _torch_form(target: str) -> InPlaceForm | None:
    """Return the ``out=`` overload with the same arguments, else the variant with an underscore, else None.

    Overloads that torch generates do not count: they call the op and copy its result.
    """
    if target in _SPECIAL_FORMS:
        return _SPECIAL_FORMS[target]
    _, name, _ = target.split(".")
    signature = _signature(overload(target))
    first_argument, _ = signature[0]
    for variant in (name, f"{name}_"):
        packet = getattr(torch.ops.aten, variant, None)
        for overload_name in packet.overloads() if packet is not None else ():
            func = getattr(packet, overload_name)
            written = [a for a in _torch.arguments(func) if a.alias_info is not None and a.alias_info.is_write]
            if torch.Tag.generated in func.tags or len(written) != 1:
                continue
            output = written[0]
            if output.kwarg_only and _signature(func, omitted=output.name) == signature:
                return InPlaceForm(f"aten.{variant}.{overload_name}", output.name)
            if variant != name and output.name == first_argument and _signature(func) == signature:
                return InPlaceForm(f"aten.{variant}.{overload_name}")
    return None


def _signature(func: Any, omitted: str = "") -> list[tuple[str, str]]:
    """Return (name, type) of an overload's arguments, without the argument ``omitted``."""
    return [(a.name, str(a.type)) for a in _torch.arguments(func) if a.name != omitted]


# -- piece by piece


_Workspace = Callable[[Mapping[str, Any], Sequence[Value], Value], int]
"""Returns an upper bound in bytes of a kernel's temporary pieces, from a call's arguments by name, all values of the
graph, and the result."""


@dataclass(frozen=True, slots=True)
class Piecewise:
    """In-place form of memplan: computes the result with the op's own kernel, a piece at a time, and copies it over."""

    target: str
    operand: str
    """Argument that it overwrites."""
    workspace: _Workspace
    same_layout: tuple[str, ...] = ()
    """Operands that must have the layout of the result."""
    needs_contiguous: bool = True
    """Whether the result must be contiguous."""
    runs_whole_op_too: bool = False
    """Whether it also calls the whole op, for the results beyond the first."""
    needs_large_channels: bool = False
    """Whether a channel of a sample must have more than a single element: otherwise torch's kernel vectorizes over
    channels, and how channels are grouped can change the last bit."""
    runs_on_card: bool = False
    """Whether it is also used on a card. Norms are not: they have a thread block for each row or channel there, so that
    a piece takes as long as the whole. Nor are ops that draw random numbers."""

    def suits(self, arguments: Mapping[str, Any], values: Sequence[Value], result: Value) -> bool:
        """Return whether this form supports the arguments of a call and saves at least half of the result's bytes."""
        if self.needs_contiguous and not is_contiguous(result):
            return False
        if not arguments.get("output_mask", (True,))[0]:  # the first result is not computed
            return False
        if not self.runs_on_card and result.place != HOST:
            return False
        if self.needs_large_channels and prod(result.shape[2:]) == 1:
            return False
        for name in self.same_layout:
            argument = arguments.get(name)
            if not isinstance(argument, Ref):
                return False
            other = values[argument.value]
            if other.shape != result.shape or other.stride != result.stride:
                return False
        return result.bytes >= max(SMALLEST_PIECEWISE_BYTES, 2 * self.workspace(arguments, values, result))


def _element_scratch(buffers: int, buffers_on_card: int | None = None) -> _Workspace:
    """Return the function for the workspace in bytes of an elementwise kernel with this number of temporary pieces.
    ``buffers_on_card``: their number there; None: as many. There, numbers take no memory."""

    def scratch(_arguments: Mapping[str, Any], _values: Sequence[Value], result: Value) -> int:
        """Return the bytes of the pieces."""
        size = elements_per_piece(prod(result.shape), result.place) * itemsize(result.dtype)
        if result.place == HOST:
            return buffers * size + NUMBER_TENSOR_BYTES
        return (buffers if buffers_on_card is None else buffers_on_card) * size

    return scratch


def _row_scratch(arguments: Mapping[str, Any], _values: Sequence[Value], result: Value) -> int:
    """Return the workspace in bytes of a kernel that works on a few rows at a time: a piece of the result, its means
    and reciprocal deviations, at most 8 bytes each."""
    trailing = len(arguments["normalized_shape"])
    _, rows_of_piece = all_rows_and_rows_per_piece(result.shape, trailing)
    row_elements = prod(result.shape[len(result.shape) - trailing :])
    return rows_of_piece * (row_elements * itemsize(result.dtype) + 2 * 8)


def _sample_scratch(_arguments: Mapping[str, Any], _values: Sequence[Value], result: Value) -> int:
    """Return the workspace in bytes of a kernel that works on a few samples at a time: a piece of the result."""
    _, samples_of_piece = all_rows_and_rows_per_piece(result.shape, len(result.shape) - 1, result.place)
    return samples_of_piece * prod(result.shape[1:]) * itemsize(result.dtype) + NUMBER_TENSOR_BYTES


def _channel_scratch(result_pieces: int, operand_pieces: int) -> _Workspace:
    """Return the function for the workspace in bytes of a kernel that works on a few channels at a time.

    It holds ``result_pieces`` pieces of the result, ``operand_pieces`` pieces of operands (views if the batch has a
    single sample), and at most 16 tensors of statistics, at most 8 bytes a channel.
    """

    def scratch(_arguments: Mapping[str, Any], _values: Sequence[Value], result: Value) -> int:
        """Return the bytes of the pieces and statistics."""
        channel_bytes = prod(result.shape) // result.shape[1] * itemsize(result.dtype)
        buffers = result_pieces + (operand_pieces if result.shape[0] > 1 else 0)
        return channels_per_piece(result.shape) * buffers * channel_bytes + result.shape[1] * 16 * 8

    return scratch


def _group_scratch(arguments: Mapping[str, Any], _values: Sequence[Value], result: Value) -> int:
    """Return the workspace in bytes of a kernel that works on a few groups of channels at a time: a piece of the
    result, and at most 8 tensors of sums, at most 8 bytes a channel each."""
    group_count = arguments["group"]
    group_bytes = prod(result.shape[1:]) // group_count * itemsize(result.dtype)
    channels_of_group = result.shape[1] // group_count
    return groups_per_piece(result.shape, group_count) * (group_bytes + channels_of_group * 8 * 8)


PIECEWISE: Mapping[str, Piecewise] = {
    "aten.hardswish_backward.default": Piecewise(
        "memplan.hardswish_backward_.default", "grad_output", _element_scratch(buffers=1), same_layout=("self",),
        needs_contiguous=False, runs_on_card=True,
    ),
    "aten.native_batch_norm_backward.default": Piecewise(
        "memplan.native_batch_norm_backward_.default", "grad_out",
        _channel_scratch(result_pieces=2, operand_pieces=2), same_layout=("input",), needs_large_channels=True,
    ),
    "aten._native_batch_norm_legit_functional.default": Piecewise(
        "memplan._native_batch_norm_legit_functional_.default", "input",
        _channel_scratch(result_pieces=1, operand_pieces=1), needs_large_channels=True,
    ),
    "aten._native_batch_norm_legit.no_stats": Piecewise(
        "memplan._native_batch_norm_legit_.no_stats", "input",
        _channel_scratch(result_pieces=1, operand_pieces=1), needs_large_channels=True,
    ),
    "aten.native_dropout.default": Piecewise(
        "memplan.native_dropout_.default", "input", _element_scratch(buffers=1), needs_contiguous=False,
    ),
    "aten.native_dropout_backward.default": Piecewise(
        "memplan.native_dropout_backward_.default", "grad_output", _element_scratch(buffers=2, buffers_on_card=1),
        same_layout=("mask",), needs_contiguous=False, runs_on_card=True,
    ),
    "aten.native_group_norm.default": Piecewise("memplan.native_group_norm_.default", "input", _group_scratch),
    "aten.native_layer_norm.default": Piecewise("memplan.native_layer_norm_.default", "input", _row_scratch),
    "aten.native_layer_norm_backward.default": Piecewise(
        "memplan.native_layer_norm_backward_.default", "grad_out", _row_scratch, same_layout=("input",),
        runs_whole_op_too=True,
    ),
    CROSS_ENTROPY: Piecewise(
        "memplan.cross_entropy_backward_.default", "log_probs", _sample_scratch, runs_on_card=True,
    ),
}  # fmt: skip
"""In-place forms of memplan, by op. Norms rely on the CPU's kernels, which compute rows, channels and groups
independently."""


class InPlace(Lever):
    """Write results over operands that no later op reads."""

    name = "in place"

    def decide(self, planned: PlannedStep) -> Reason | None:
        """Report which results overwrite which operands."""
        reuses = planned.overwritten_values
        text = f"results that take over the memory of a value that dies with their op: {len(reuses)}"
        saved_bytes = sum(size for _, _, size in reuses)
        return Reason(saved_bytes, text, {"reuses": list(reuses)}) if reuses else None
