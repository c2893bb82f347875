"""Lower an op without a kernel of its own by torch's decomposition of it into ops that have one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from memplan._torch import decompositions
from memplan.errors import RecordingError
from memplan.exporting.lowering.device_graph import ALTERNATIVES, Lowering, refusal
from memplan.exporting.lowering.own_decompositions import own_decompositions
from memplan.planning.graph.joint_graph import GraphOp, Ref, map_refs, refs
from memplan.planning.graph.op_schema import overload, short

Lower = Callable[[Lowering, GraphOp], None]


def decomposed(low: Lowering, op: GraphOp, lower: Lower, is_kept: Callable[[str], bool]) -> bool:
    """Lower an op without a rule by lowering the ops of torch's decomposition of it.

    Args:
        low: the device's graph that is built.
        op: the op.
        lower: function that lowers an op of the decomposition.
        is_kept: whether an op of this name is not to be decomposed further.

    Returns:
        Whether torch has a decomposition.

    Raises:
        RecordingError: one of its calls cannot be lowered.
    """
    operands = list(dict.fromkeys(refs((op.args, op.kwargs))))
    if not op.target.startswith("aten.") or op.random or (op.must_run_once and not op.makes):
        return False
    decomposition = decompositions.decomposition(
        overload(op.target),
        [_meta(low, value) for value in operands],
        lambda tensors: _arguments_with(op, dict(zip(operands, tensors, strict=True))),
        is_kept,
        own_decompositions(),
    )
    if decomposition is None:
        return False
    # node of the decomposition -> value of the graph
    value_of: dict[Any, int] = dict(zip(decomposition.inputs, operands, strict=True))
    for node, tensor in decomposition.constants.items():
        value_of[node] = low.value("constant", low.values[operands[0]], shape=tuple(tensor.shape))
        low.make_constant(value_of[node], tensor)
    results = decomposition.outputs
    for node, output in zip(results, op.outputs, strict=False):  # results without elements are left out
        if node is not None and output is not None and results.count(node) == 1:
            value_of.setdefault(node, output)
    for call in decomposition.calls:
        try:
            _add(low, op, call, value_of, lower)
        except RecordingError as error:
            inner = short(call.target)
            do = ALTERNATIVES.get(short(op.target)) or ALTERNATIVES.get(inner, "")
            raise refusal(op, f", which is made of {inner}", do=do) from error
    # results that are an operand, a constant or another result
    for node, output in zip(results, op.outputs, strict=False):
        if output is not None and node is not None and value_of[node] != output:
            _equate(low, op, output, value_of[node])
    return True


def _meta(low: Lowering, number: int) -> torch.Tensor:
    """Return a meta tensor with shape, strides and PyTorch's dtype of a value."""
    value = low.values[number]
    dtype = getattr(torch, low.torch_dtypes[number])
    return torch.empty_strided(value.shape, value.stride, dtype=dtype, device="meta")


def _arguments_with(op: GraphOp, tensors: dict[int, Any]) -> tuple[Any, Any]:
    """Return (args, kwargs) of an op with tensors, by value, in place of its operands."""
    return map_refs(op.args, tensors.__getitem__), map_refs(op.kwargs, tensors.__getitem__)


def _add(low: Lowering, op: GraphOp, call: decompositions.CoreCall, value_of: dict[Any, int], lower: Lower) -> None:
    """Lower a call of op's decomposition. `value_of` has the graph's value of each node of the decomposition so far:
    operands, constants, and results of op or of earlier calls. Results of the call are added to it."""
    args, kwargs = (decompositions.mapped(part, lambda node: Ref(value_of[node])) for part in (call.args, call.kwargs))
    operands = list(refs((args, kwargs)))
    viewed_base = low.values[operands[0]].base if call.is_view else None
    for node in call.outputs:
        if node is not None:
            _set_result(low, op, node, viewed_base, value_of)
    outputs = tuple(None if node is None else value_of[node] for node in call.outputs)
    makes = () if call.is_view else tuple(output for output in outputs if output is not None)
    part = replace(
        op, target=call.target, args=tuple(args), kwargs=dict(kwargs), outputs=outputs, makes=makes,
        must_run_once=op.must_run_once and not call.is_view,  # else the view would be scheduled (see GraphOp.is_view)
        returns_tuple=call.multiple, reads=tuple(low.values[v].base for v in operands),
        discarded=0, scratch=0, overwrites=(), cheaper_recompute=None,
    )  # fmt: skip
    lower(low, part)


def _set_result(low: Lowering, op: GraphOp, node: Any, viewed_base: int | None, value_of: dict[Any, int]) -> None:
    """Give the value of a call's result the layout that the decomposition traced; of a view, the base `viewed_base`.

    A result of op has a value already, but torch's strides and base for it may differ from the decomposition's.
    """
    tensor = decompositions.tensor_of(node)
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = {"shape": tuple(tensor.shape), "stride": tuple(tensor.stride()), "dtype": dtype}
    if node not in value_of:  # an intermediate value: device and name as of a value of op
        like = low.values[next(value for value in (*op.outputs, *refs((op.args, op.kwargs))) if value is not None)]
        value_of[node] = low.value(like.name, like, op=None)
    value = value_of[node]
    if viewed_base is None:
        low.change(value, base=value, bytes=tensor.numel() * tensor.element_size(), **layout)
    else:
        low.change(value, base=viewed_base, bytes=0, **layout)
    low.torch_dtypes[value] = dtype


def _equate(low: Lowering, op: GraphOp, result: int, value: int) -> None:
    """Make a result of the op equal to another value: a constant if that is known at export, else an alias of it."""
    if value in low.constants:
        low.make_constant(result, low.constants[value])
    else:
        low.change(result, stride=low.values[value].stride, dtype=low.values[value].dtype)
        low.alias(op, result, Ref(value))
