"""In whose memory a result can lie: the engine's table of forms that work in place.

A form writes an op's first result over one of its operands and gives the same bits as the op itself. Most are the
op's own: an ``out=`` overload, or the variant with an underscore, found by rule in torch's registry. Where there is
none, or one that only copies, the engine goes through the operand piece by piece (memplan.planning.ops.piecewise). What
is not in the tables here has no form: each entry is tested bit for bit.
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
    CROSS_ENTROPY,
    NUMBERS,
    _names,
    arguments_of,
    is_contiguous,
    is_dense,
    itemsize,
    overload,
)
from memplan.planning.levers.lever import Lever, PlannedStep, Reason
from memplan.planning.ops.pieces import channels, groups, piece, rows
from memplan.trace.records import HOST

ELEMENTWISE = frozenset(
    """
    abs.default acos.default acosh.default add.Scalar add.Tensor addcdiv.default addcmul.default asin.default
    asinh.default atan.default atan2.default atanh.default bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor
    bitwise_xor.Tensor ceil.default clamp.Tensor clamp.default clamp_max.Tensor clamp_max.default clamp_min.Tensor
    clamp_min.default copysign.Tensor cos.default cosh.default div.Scalar div.Tensor div.Tensor_mode elu.default
    elu_backward.default eq.Scalar eq.Tensor erf.default erfc.default exp.default exp2.default expm1.default
    floor.default fmax.default fmin.default fmod.Scalar fmod.Tensor frac.default ge.Scalar ge.Tensor gelu.default
    gelu_backward.default gt.Scalar gt.Tensor hardshrink.default hardshrink_backward.default hardsigmoid.default
    hardsigmoid_backward.default hardswish.default hardtanh.default hardtanh_backward.default
    huber_loss_backward.default le.Scalar le.Tensor leaky_relu.default leaky_relu_backward.default lerp.Scalar
    lerp.Tensor log.default log10.default log1p.default log2.default log_sigmoid_backward.default logaddexp.default
    logical_and.default logical_not.default logical_or.default logical_xor.default lt.Scalar lt.Tensor
    masked_fill.Scalar masked_fill.Tensor maximum.default minimum.default mish.default mse_loss_backward.default
    mul.Scalar mul.Tensor nan_to_num.default ne.Scalar ne.Tensor neg.default pow.Tensor_Scalar pow.Tensor_Tensor
    reciprocal.default relu.default remainder.Scalar remainder.Tensor round.default rsqrt.default sgn.default
    sigmoid.default sigmoid_backward.default sign.default silu.default silu_backward.default sin.default sinh.default
    smooth_l1_loss_backward.default softplus.default softplus_backward.default softshrink.default
    softshrink_backward.default sqrt.default square.default sub.Scalar sub.Tensor tan.default tanh.default
    tanh_backward.default threshold.default threshold_backward.default trunc.default where.self xlogy.Tensor
    """.split()  # noqa: SIM905  # a hundred quoted names are harder to read
)
"""Ops that make each element of their result of the elements at the same index: any operand may take it."""

IN_ORDER: Mapping[str, tuple[str, ...]] = {
    "_log_softmax.default": ("self",),
    "_log_softmax_backward_data.default": ("grad_output",),
    "_softmax.default": ("self",),
    "_softmax_backward_data.default": ("grad_output",),
    "cumprod.default": ("self",),
    "cumsum.default": ("self",),
    "index_add.default": ("self",),
    "index_fill.int_Scalar": ("self",),
    "index_put.default": ("self",),
    "masked_scatter.default": ("self",),
    "scatter.src": ("self",),
    "scatter.value": ("self",),
    "scatter_add.default": ("self",),
    "tril.default": ("self",),
    "triu.default": ("self",),
}
"""Other ops whose kernels read what they write over no later than they write it, and of which operands."""


WORTHWHILE = 1 << 20
"""Bytes that an operand must at least have: for less, the calls of the pieces cost more than the op."""


@dataclass(frozen=True, slots=True)
class Form:
    """How an op is called so that its first result lies in an operand's memory.

    With ``out`` it is called with the same arguments and with that operand once more under this name; without, the
    operand is changed by the call itself. What it returns has the shape of what the op returns.

    Example:
        >>> call_into("aten.threshold_backward.default", "grad_output")
        Form(target='aten.threshold_backward.grad_input', out='grad_input')
        >>> call_into("aten.relu.default", "self")
        Form(target='aten.relu_.default', out=None)
    """

    target: str
    out: str | None = None


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand whose memory an op's first result can take over."""

    name: str
    """Of the argument, as in the op's schema."""
    value: int
    """Id of the tensor that is handed in there: the base itself, or a view of all of it."""


def overwrites(
    target: str, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Value], result: int
) -> tuple[int, ...]:
    """Return the bases whose memory the first result of a call can take over, bit for bit the same, best first.

    Args:
        target: the op, as in `GraphOp`.
        args: its arguments, with Ref in place of tensors, and ``kwargs``.
        values: the graph's values.
        result: id of the op's first result.
    """
    return tuple(dict.fromkeys(values[one.value].base for one in _operands(target, args, kwargs, values, result)))


def operand(op: GraphOp, base: int, values: Sequence[Value]) -> Operand:
    """Find the operand of an op through which its first result goes into the memory of one of ``op.overwrites``."""
    found = _operands(op.target, op.args, op.kwargs, values, op.makes[0])
    return next(one for one in found if values[one.value].base == base)


def call_into(target: str, operand: str) -> Form:
    """Return how the op is called to write its first result over an operand that `overwrites` allows."""
    if target in PIECEWISE:
        return Form(PIECEWISE[target].target)
    form = _own_form(target)
    if form is None or (form.out is None and operand != _names(target)[0]):
        raise KeyError(f"{target} has no form that writes over {operand}")
    return form


def scratch_into(op: GraphOp, values: Sequence[Value]) -> int:
    """Bytes beyond results that the form of an op holds while it runs, at most. Without pieces: what the op holds."""
    piecewise = PIECEWISE.get(op.target)
    if piecewise is None:
        return op.scratch
    arguments = arguments_of(op.target, op.args, op.kwargs)
    held = piecewise.scratch(arguments, values, values[op.makes[0]])
    return max(held, op.scratch) if piecewise.whole_too else held


def _operands(
    target: str, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Value], result: int
) -> list[Operand]:
    names = _allowed(target)
    if not names:
        return []
    arguments, wanted = arguments_of(target, args, kwargs), values[result]
    found = [
        Operand(name, given.value)
        for name in names
        if isinstance(given := arguments.get(name), Ref) and _covers(values[given.value], wanted, values)
    ]
    piecewise = PIECEWISE.get(target)
    if piecewise is not None and not piecewise.suits(arguments, values, wanted):
        return []
    elementwise = target.removeprefix("aten.") in ELEMENTWISE
    return [one for one in found if _alone(one, arguments, values, elementwise)]


def _covers(value: Value, wanted: Value, values: Sequence[Value]) -> bool:
    """Whether the value is all of its base, and laid out as the result that is to lie there, which fills its own."""
    return (
        value.shape == wanted.shape
        and value.stride == wanted.stride
        and value.dtype == wanted.dtype
        and wanted.bytes == values[value.base].bytes == prod(wanted.shape) * itemsize(wanted.dtype) > 0
        and is_dense(wanted)
        and not getattr(torch, wanted.dtype).is_complex
    )


def _alone(one: Operand, arguments: Mapping[str, Any], values: Sequence[Value], elementwise: bool) -> bool:
    """Whether nothing else that the op reads lies in the same memory, or only at the same index."""
    own = values[one.value]
    for name, given in arguments.items():
        for other in refs(given):
            if name == one.name or values[other].base != own.base:
                continue
            same = values[other].shape == own.shape and values[other].stride == own.stride
            if not (elementwise and same and values[other].dtype == own.dtype):
                return False
    return True


# -- torch's own forms


@cache
def _allowed(target: str) -> tuple[str, ...]:
    """Names of the operands that a form of the op can write over."""
    if target in PIECEWISE:
        return (PIECEWISE[target].operand,)
    if target == BATCH_NORM_AGAIN:
        return ("self",)
    namespace, name = target.split(".", 1) if target.startswith("aten.") else ("", "")
    if namespace != "aten" or (name not in ELEMENTWISE and name not in IN_ORDER):
        return ()
    form = _own_form(target)
    if form is None:  # this version of torch has none
        return ()
    names = IN_ORDER.get(name) or tuple(name for _, name in _torch.tensor_arguments(overload(target)))
    return names if form.out is not None else tuple(n for n in names if n == _names(target)[0])


# mul_.Scalar rounds the number to the tensor's dtype first; mul.out, which takes numbers too, does as mul.Scalar does.
_REPLACED = {
    "aten.mul.Scalar": Form("aten.mul.out", "out"),
    BATCH_NORM_AGAIN: Form("memplan.batch_norm_again_.default"),
}


@cache
def _own_form(target: str) -> Form | None:
    """The ``out=`` overload that takes the same arguments, else the variant with an underscore.

    One that torch generates itself is none: it calls the op and copies what that returns.
    """
    if target in _REPLACED:
        return _REPLACED[target]
    _, name, _ = target.split(".")
    wanted = _signature(overload(target))
    for variant in (name, f"{name}_"):
        packet = getattr(torch.ops.aten, variant, None)
        for one in packet.overloads() if packet is not None else ():
            func = getattr(packet, one)
            written = [a for a in _torch.arguments(func) if a.alias_info is not None and a.alias_info.is_write]
            if torch.Tag.generated in func.tags or len(written) != 1:
                continue
            if written[0].kwarg_only and _signature(func, without=written[0].name) == wanted:
                return Form(f"aten.{variant}.{one}", written[0].name)
            if variant != name and written[0].name == wanted[0][0] and _signature(func) == wanted:
                return Form(f"aten.{variant}.{one}")
    return None


def _signature(func: Any, without: str = "") -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in _torch.arguments(func) if a.name != without]


# -- piece by piece


@dataclass(frozen=True, slots=True)
class Piecewise:
    """A form of the engine's own: it computes pieces of the result with the op's own kernel and copies them over."""

    target: str
    operand: str
    scratch: Callable[[Mapping[str, Any], Sequence[Value], Value], int]
    """Bytes that its pieces take, at most."""
    beside: tuple[str, ...] = ()
    """Operands that have to be laid out as the result is."""
    contiguous: bool = True
    whole_too: bool = False
    """Whether it also calls the op itself as a whole, for the results beyond the first."""
    spatial: bool = False
    """Whether a sample's channel must have more than one element: where it has one, torch's kernel takes several
    channels at once, and which ones it takes together can change the last bit."""
    on_card: bool = False
    """Whether it is used on a card, too. Norms are not: they have one block of threads for each row or channel there,
    so that a piece takes as long as the whole. Nor is what draws random numbers."""

    def suits(self, arguments: Mapping[str, Any], values: Sequence[Value], wanted: Value) -> bool:
        """Return whether it suits these arguments, and is worth it: its pieces take at most half of the saving."""
        if (self.contiguous and not is_contiguous(wanted)) or not arguments.get("output_mask", (True,))[0]:
            return False
        if not self.on_card and wanted.place != HOST:
            return False
        if self.spatial and prod(wanted.shape[2:]) == 1:
            return False
        for name in self.beside:
            given = arguments.get(name)
            if not isinstance(given, Ref):
                return False
            other = values[given.value]
            if other.shape != wanted.shape or other.stride != wanted.stride:
                return False
        return wanted.bytes >= max(WORTHWHILE, 2 * self.scratch(arguments, values, wanted))


def _of_elements(buffers: int) -> Callable[[Mapping[str, Any], Sequence[Value], Value], int]:
    def scratch(_: Mapping[str, Any], __: Sequence[Value], wanted: Value) -> int:
        return buffers * piece(prod(wanted.shape), wanted.place) * itemsize(wanted.dtype) + NUMBERS

    return scratch


def _of_rows(arguments: Mapping[str, Any], _: Sequence[Value], wanted: Value) -> int:
    """The piece, and its mean and reciprocal deviation in at most 8 bytes each."""
    trailing = len(arguments["normalized_shape"])
    count = rows(wanted.shape, trailing)[1]
    row = prod(wanted.shape[len(wanted.shape) - trailing :])
    return count * (row * itemsize(wanted.dtype) + 16)


def _of_samples(_: Mapping[str, Any], __: Sequence[Value], wanted: Value) -> int:
    count = rows(wanted.shape, len(wanted.shape) - 1, wanted.place)[1]
    return count * prod(wanted.shape[1:]) * itemsize(wanted.dtype) + NUMBERS


def _of_channels(own: int, copied: int) -> Callable[[Mapping[str, Any], Sequence[Value], Value], int]:
    """Pieces of the result, those that operands are copied to (of one sample they are views), and at most 16 small
    tensors of the statistics in at most 8 bytes a channel."""

    def scratch(_: Mapping[str, Any], __: Sequence[Value], wanted: Value) -> int:
        size = prod(wanted.shape) // wanted.shape[1] * itemsize(wanted.dtype)
        buffers = own + (copied if wanted.shape[0] > 1 else 0)
        return channels(wanted.shape) * buffers * size + wanted.shape[1] * 16 * 8

    return scratch


def _of_groups(arguments: Mapping[str, Any], _: Sequence[Value], wanted: Value) -> int:
    """The piece, and at most 8 small tensors of a channel's sums in at most 8 bytes each."""
    count = groups(wanted.shape, arguments["group"])
    size = prod(wanted.shape[1:]) // arguments["group"]
    channels = wanted.shape[1] // arguments["group"]
    return count * (size * itemsize(wanted.dtype) + channels * 8 * 8)


def _in_channels(target: str, operand: str, own: int, copied: int, *beside: str) -> Piecewise:
    return Piecewise(target, operand, _of_channels(own, copied), beside, spatial=True)


PIECEWISE: Mapping[str, Piecewise] = {
    "aten.hardswish_backward.default": Piecewise(
        "memplan.hardswish_backward_.default", "grad_output", _of_elements(1), ("self",), contiguous=False, on_card=True
    ),
    "aten.native_batch_norm_backward.default": _in_channels(
        "memplan.native_batch_norm_backward_.default", "grad_out", 2, 2, "input"
    ),
    "aten._native_batch_norm_legit_functional.default": _in_channels(
        "memplan._native_batch_norm_legit_functional_.default", "input", 1, 1
    ),
    "aten._native_batch_norm_legit.no_stats": _in_channels("memplan._native_batch_norm_legit_.no_stats", "input", 1, 1),
    "aten.native_dropout.default": Piecewise(
        "memplan.native_dropout_.default", "input", _of_elements(1), contiguous=False
    ),
    "aten.native_dropout_backward.default": Piecewise(
        "memplan.native_dropout_backward_.default",
        "grad_output",
        _of_elements(2),
        ("mask",),
        contiguous=False,
        on_card=True,
    ),
    "aten.native_group_norm.default": Piecewise("memplan.native_group_norm_.default", "input", _of_groups),
    "aten.native_layer_norm.default": Piecewise("memplan.native_layer_norm_.default", "input", _of_rows),
    "aten.native_layer_norm_backward.default": Piecewise(
        "memplan.native_layer_norm_backward_.default", "grad_out", _of_rows, ("input",), whole_too=True
    ),
    CROSS_ENTROPY: Piecewise("memplan.cross_entropy_backward_.default", "log_probs", _of_samples, on_card=True),
}
"""Forms of the engine's own. Those of norms go by the CPU's kernels, which treat rows, channels and groups each by
itself."""


class InPlace(Lever):
    """Let results lie in the memory of values that die with their op."""

    name = "in place"

    def decide(self, planned: PlannedStep) -> Reason | None:
        """Say which results take over which memory."""
        reuses = planned.reuses
        text = f"results that take over the memory of a value that dies with their op: {len(reuses)}"
        return Reason(sum(size for *_, size in reuses), text, {"reuses": list(reuses)}) if reuses else None
