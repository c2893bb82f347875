"""Lower an op without a kernel of its own by torch's decomposition of it into ops that have one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from memplan._torch import decompositions
from memplan.errors import RecordingError
from memplan.exporting.lowering.device_graph import WAYS, Lowering, refusal
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
    if not op.target.startswith("aten.") or op.random or (op.once and not op.makes):
        return False
    found = decompositions.decomposition(
        overload(op.target),
        [_meta(low, value) for value in operands],
        lambda tensors: _call(op, dict(zip(operands, tensors, strict=True))),
        is_kept,
        own_decompositions(),
    )
    if found is None:
        return False
    # node of the decomposition -> value of the graph
    number_of: dict[Any, int] = dict(zip(found.inputs, operands, strict=True))
    for node, tensor in found.constants.items():
        number_of[node] = low.value("constant", low.values[operands[0]], shape=tuple(tensor.shape))
        low.make_constant(number_of[node], tensor)
    results = found.outputs
    for node, number in zip(results, op.outputs, strict=False):  # results without elements are left out
        if node is not None and number is not None and results.count(node) == 1:
            number_of.setdefault(node, number)
    for call in found.calls:
        try:
            _add(low, op, call, number_of, lower)
        except RecordingError as error:
            inner = short(call.target)
            do = WAYS.get(short(op.target)) or WAYS.get(inner, "")
            raise refusal(op, f", which is made of {inner}", do=do) from error
    for node, number in zip(results, op.outputs, strict=False):
        if number is not None and node is not None and number_of[node] != number:
            _same(low, op, number, number_of[node])
    return True


def _meta(low: Lowering, number: int) -> torch.Tensor:
    """Return a meta tensor with shape, strides and PyTorch's dtype of a value."""
    value = low.values[number]
    dtype = getattr(torch, low.dtypes[number])
    return torch.empty_strided(value.shape, value.stride, dtype=dtype, device="meta")


def _call(op: GraphOp, tensors: dict[int, Any]) -> tuple[Any, Any]:
    """Return (args, kwargs) of an op with tensors, by value, in place of its operands."""
    return map_refs(op.args, tensors.__getitem__), map_refs(op.kwargs, tensors.__getitem__)


def _add(low: Lowering, op: GraphOp, call: decompositions.CoreCall, number_of: dict[Any, int], lower: Lower) -> None:
    """Lower a call of op's decomposition. `number_of` has the graph's value of each node of the decomposition so far;
    those of the call's results are added to it."""
    args, kwargs = (decompositions.mapped(part, lambda node: Ref(number_of[node])) for part in (call.args, call.kwargs))
    reads = list(refs((args, kwargs)))
    base = low.values[reads[0]].base if call.is_view else None
    for node in call.outputs:
        if node is None:
            continue
        tensor = decompositions.tensor_of(node)
        dtype = str(tensor.dtype).removeprefix("torch.")
        fields = {"shape": tuple(tensor.shape), "stride": tuple(tensor.stride()), "dtype": dtype}
        if node not in number_of:
            like = low.values[next(value for value in (*op.outputs, *refs((op.args, op.kwargs))) if value is not None)]
            number_of[node] = low.value(like.name, like, op=None, **fields)
        number = number_of[node]
        size = 0 if base is not None else tensor.numel() * tensor.element_size()
        low.change(number, base=number if base is None else base, bytes=size, **fields)
        low.dtypes[number] = dtype
    outputs = tuple(None if node is None else number_of[node] for node in call.outputs)
    makes = () if call.is_view else tuple(number for number in outputs if number is not None)
    part = replace(
        op, target=call.target, args=tuple(args), kwargs=dict(kwargs), outputs=outputs, makes=makes,
        once=op.once and not call.is_view, multiple=call.multiple, reads=tuple(low.values[v].base for v in reads),
        discarded=0, scratch=0, overwrites=(), cheaper_recompute=None,
    )  # fmt: skip
    lower(low, part)


def _same(low: Lowering, op: GraphOp, number: int, of: int) -> None:
    """Make value `number`, a result of the op, a constant or an alias with the elements of value `of`."""
    if of in low.known:
        low.make_constant(number, low.known[of])
    else:
        low.change(number, stride=low.values[of].stride, dtype=low.values[of].dtype)
        low.alias(op, number, Ref(of))
