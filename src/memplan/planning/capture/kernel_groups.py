"""Recognize groups of calls that an op of `memplan.kernels` can replace.

A group is recognized by its last call, and from there along what each call reads: the loss of a linear layer's logits,
a root-mean-square norm, a gated activation, a norm of channels with or without an activation, a softmax of masked
scores with or without dropout, the Dice loss and cross-entropy of a segmentation. Spellings differ (``x.pow(2)``,
``x * x``; ``x * rsqrt(...)``, ``x / sqrt(...)``; casts to float32 and back), the computation must be the kernel's. A
depthwise convolution is a group of a single call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from memplan._display import Printed
from memplan.kernels.launch import DTYPES
from memplan.planning.capture.call_log import OUTPUT, CallLog, LoggedCall
from memplan.planning.capture.dice_groups import dice_cross_entropy
from memplan.planning.capture.group_match import (
    CROSS_ENTROPY,
    Match,
    is_cast,
    is_inactive_dropout,
    name_of_dtype,
    without_casts,
)
from memplan.planning.capture.replaced_calls import UPDATED_OPERANDS
from memplan.planning.capture.softmax_groups import softmax_dropout
from memplan.planning.graph.joint_graph import Ref
from memplan.planning.graph.tensor_like import Like
from memplan.planning.ops.kernel_group import Group, Operand

_RESHAPES = frozenset(("view", "reshape", "flatten", "contiguous", "getitem"))
_TRANSPOSES = frozenset(("transpose", "swapaxes", "swapdims", "permute", "mT"))
_CHANNEL_NORMS: Mapping[str, tuple[str, ...]] = {
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    "instance_norm": ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
}
"""Arguments of ``F.batch_norm`` and its like; the functions of the same names under ``torch`` have others."""
_CONVOLUTIONS = frozenset(("conv1d", "conv2d", "conv3d"))
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
"""Arguments of ``F.conv2d`` and its like."""
_ACTIVATIONS = {
    "relu": "relu",
    "relu_": "relu",
    "leaky_relu": "leaky_relu",
    "leaky_relu_": "leaky_relu",
    "silu": "silu",
}


@dataclass(frozen=True)
class Refused(Printed):
    """A group that no kernel replaces."""

    kernel: str
    call: int
    """Number of its last call."""
    layer: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel}{f' of {self.layer}' if self.layer else ''}: {self.reason}"


class _NotReplaceable(Exception):
    """No kernel can replace a group; the message is the reason."""


def kernel_groups(log: CallLog) -> tuple[tuple[Group, ...], tuple[Refused, ...]]:
    """Return the groups of a trace that kernels can replace, and those that they cannot, in the order of the trace."""
    groups, refused, replaced_calls = list[Group](), list[tuple[Match, str]](), set[int]()
    for number in sorted(log.calls, reverse=True):  # from the end, as a group includes the casts of its result
        call = log.calls[number]
        for recognize in (
            _cross_entropy, _rms_norm, _gated, _channel_norm, _depthwise, softmax_dropout, dice_cross_entropy,
        ):  # fmt: skip
            match = recognize(log, call)
            if match is None or not replaced_calls.isdisjoint(inner.number for inner in match.calls):
                continue
            try:
                group = _group_of(log, match)
            except _NotReplaceable as reason:
                refused.append((match, str(reason)))
            else:
                groups.append(group)
                replaced_calls.update(group.calls)
    # Not reported: refused groups that share a call with a replaced one.
    reported = (
        Refused(match.kernel, match.calls[-1].number, match.calls[-1].layer, reason)
        for match, reason in reversed(refused) if replaced_calls.isdisjoint(call.number for call in match.calls)
    )  # fmt: skip
    return tuple(sorted(groups, key=lambda group: group.last)), tuple(reported)


def _group_of(log: CallLog, match: Match) -> Group:
    """Return the group of a match. Raises _NotReplaceable if replacing its calls would change the step."""
    if match.reason:
        raise _NotReplaceable(match.reason)
    calls = sorted({call.number: call for call in match.calls}.values(), key=lambda call: call.number)
    inside = {call.number for call in calls}
    last = calls[-1]
    (result,) = last.results
    for call in calls[:-1]:
        for tensor in call.results:
            outside_readers = log.readers[tensor] - inside
            if outside_readers:
                raise _NotReplaceable(_read_elsewhere(log, call, min(outside_readers)))
    # The kernel reads the operands at the last call, so that none may change before. The calls that the match lists as
    # in-place change results of inner calls, which are no operands.
    end = last.number if match.last_call_in_place else last.number + 1
    if any(
        log.calls[n].in_place
        for n in range(calls[0].number, end)
        if n in log.calls and n not in match.in_place_inner_calls
    ):
        raise _NotReplaceable("a call in between changes a tensor in place")
    updated_statistics = {tensor for name, (_, tensor) in match.operands.items() if name in UPDATED_OPERANDS}
    between = [log.calls[n] for n in range(calls[0].number, last.number) if n in log.calls and n not in inside]
    if any(updated_statistics.intersection(call.reads) for call in between):
        raise _NotReplaceable(
            "a call in between reads the running statistics, which the kernel updates at its last call"
        )
    if not log.tensors[result].requires_grad:
        raise _NotReplaceable("it has no gradient")
    if not _is_contiguous(log.tensors[result].like) and match.kernel not in _KEEP_INPUT_LAYOUT:
        raise _NotReplaceable("its result is not contiguous")
    for call in calls[:-1]:
        if any(log.tensors[tensor].requires_grad for tensor in call.reads) and _has_no_gradient(log, call):
            raise _NotReplaceable("a gradient stops inside of it")
    operand_dtypes = {log.tensors[tensor].like.dtype for _, tensor in match.operands.values()}
    number_dtypes = {dtype for dtype in operand_dtypes if dtype.is_floating_point or dtype.is_complex}  # no indices
    unsupported = number_dtypes - set(DTYPES)
    if unsupported:
        raise _NotReplaceable(f"it reads {' and '.join(sorted(map(name_of_dtype, unsupported)))}")
    inner_tensors = (tensor for call in calls for tensor in (*call.reads, *call.results))
    if any(log.tensors[tensor].like.dtype == torch.float64 for tensor in inner_tensors):  # kernels compute in float32
        raise _NotReplaceable("it computes in float64")
    operands = (Operand(name, call.number, call.reads.index(tensor)) for name, (call, tensor) in match.operands.items())
    return Group(match.kernel, tuple(sorted(inside)), last.name, tuple(operands), match.options, match.reshapes)


def _has_no_gradient(log: CallLog, call: LoggedCall) -> bool:
    """Return whether a call returns floating-point numbers through which no gradient flows."""
    results = (log.tensors[tensor] for tensor in call.results)
    return any(result.like.dtype.is_floating_point and not result.requires_grad for result in results)


def _read_elsewhere(log: CallLog, call: LoggedCall, reader: int) -> str:
    """Return the reason for a refusal: call ``reader`` outside of the group (or `OUTPUT`) reads the result of ``call``
    inside of it."""
    if reader == OUTPUT:
        return f"the step returns the result of {call.name} inside of it"
    other = log.calls[reader]
    return (
        f"{other.name}{f' of {other.layer}' if other.layer else ''} reads the result of {call.name} inside of it, too"
    )


# -- linear layer and cross-entropy


def _cross_entropy(log: CallLog, call: LoggedCall) -> Match | None:
    """Recognize a cross entropy of the logits of a linear layer, which the kernel computes in parts.

    Follows the logits from the loss back to the linear layer, through casts, reshapes and a soft cap.
    """
    if call.name != "cross_entropy" or not call.results:
        return None
    named = call.named(CROSS_ENTROPY)
    scores, targets = named.get("input"), named.get("target")
    if not isinstance(scores, Ref) or not isinstance(targets, Ref):
        return None
    calls, reshapes, arithmetic = [call], list[int](), list[tuple[str, float]]()
    match = Match("cross_entropy", calls, {}, {})
    tensor, reason, classes_moved = scores.value, "", False
    while True:
        producer = log.producer_of(tensor)
        if producer is None:
            return None
        if producer.name == "linear":
            break
        source = producer.reads[0] if producer.reads else None
        step = None if source is None else _step_between(log, producer, source, tensor, first=len(calls) == 1)
        if source is None or step is None:
            reason = f"its scores come from {producer.name or 'another function'}, not straight from a linear layer"
            break
        calls.append(producer)
        reshapes += [producer.number] if step == "reshape" else []
        classes_moved |= step == "transpose"
        arithmetic += [step] if isinstance(step, tuple) else []
        tensor = source
    if reason:
        calls[:] = [call]  # the refusal concerns the loss alone
        return replace(match, reason=reason)
    calls.append(producer)
    arguments = producer.named(("input", "weight", "bias"))
    for name, argument in (("hidden", "input"), ("weight", "weight"), ("bias", "bias")):
        if isinstance(arguments.get(argument), Ref):
            match.operands[name] = producer, arguments[argument].value
    match.operands["targets"] = call, targets.value
    calls.reverse()  # in the order of the trace
    like = {name: log.tensors[tensor].like for name, (_, tensor) in match.operands.items()}
    classes = like["weight"].shape[0] if len(like["weight"].shape) == 2 else 0
    match.reshapes = tuple(reversed(reshapes))
    match.options = {
        "ignore_index": named.get("ignore_index", -100), "label_smoothing": float(named.get("label_smoothing", 0.0)),
        "reduction": named.get("reduction", "mean"),
    }  # fmt: skip
    if not classes:
        return replace(match, reason="its weight is no matrix")
    # F.cross_entropy takes the second dimension as classes: of (N, C, d), it is the layer's only if it was moved there.
    if len(log.tensors[scores.value].like.shape) > 2 and not classes_moved:
        return replace(match, reason="its classes are not the linear layer's")
    if named.get("weight") is not None:
        return replace(match, reason="it weighs classes")
    if named.get("size_average") is not None or named.get("reduce") is not None:
        return replace(match, reason="it has deprecated arguments")
    if like["targets"].dtype != torch.int64:
        return replace(match, reason="its targets are no class indices")
    if arithmetic:  # from the loss back: the kernel takes cap * tanh(logits / cap)
        cap = arithmetic[0][1]
        if arithmetic != [("mul", cap), ("tanh", 0.0), ("div", cap)] or not cap > 0:
            return replace(match, reason="its scores are scaled")
        match.options["softcap"] = cap
    layer_dtypes = {like[name].dtype for name in ("hidden", "weight", "bias") if name in like}
    autocast_enabled, _ = producer.autocast
    if not autocast_enabled and len(layer_dtypes) > 1:
        return replace(match, reason="the linear layer's operands have several dtypes")
    if producer.autocast != call.autocast:
        return replace(match, reason="autocast ends between the linear layer and the loss")
    return match


def _step_between(
    log: CallLog, call: LoggedCall, source: int, result: int, *, first: bool
) -> str | tuple[str, float] | None:
    """Return what a call between a linear layer and its loss does.

    ``cast``, ``reshape`` (of rows), ``transpose`` (of classes to the second dimension, right before the loss), or
    arithmetic as (function, number), with 0 for ``tanh``; None for anything else. The call reads the tensor ``source``
    and returns ``result``; ``first``: whether it comes right before the loss.
    """
    before, after = log.tensors[source].like, log.tensors[result].like
    if is_cast(log, call, source, result):
        return "cast"
    if call.name in _RESHAPES and before.dtype == after.dtype and before.shape[-1:] == after.shape[-1:]:
        return "reshape" if call.name != "getitem" or _keeps_rows(call, len(before.shape)) else None
    if call.name in _TRANSPOSES and first and len(before.shape) == 3:
        transposed_shape = before.shape[0], before.shape[2], before.shape[1]
        transposed_stride = before.stride[0], before.stride[2], before.stride[1]
        return "transpose" if (transposed_shape, transposed_stride) == (after.shape, after.stride) else None
    if call.name == "tanh":
        return "tanh", 0.0
    numbers = [arg for arg in call.args if isinstance(arg, (int, float))]
    if call.name in ("div", "mul") and len(numbers) == 1 and not call.kwargs:
        return call.name, float(numbers[0])
    return None


def _keeps_rows(call: LoggedCall, dims: int) -> bool:
    """Return whether ``tensor[index]`` leaves the last dimension whole, and has only integers and slices as index.
    ``dims``: number of dimensions of the tensor."""
    index = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    if not all(part is None or part is Ellipsis or isinstance(part, (slice, int)) for part in index):
        return False
    after_ellipsis = index[index.index(Ellipsis) + 1 :] if Ellipsis in index else index
    parts = [part for part in after_ellipsis if part is not None]  # None adds a dimension
    indexes_last_dim = bool(parts) if Ellipsis in index else len(parts) == dims
    return not indexes_last_dim or parts[-1] == slice(None)


# -- root-mean-square norm


def _rms_norm(log: CallLog, call: LoggedCall) -> Match | None:
    """Recognize a root-mean-square norm over the last dimension, written out or torch's own."""
    if len(call.results) != 1:
        return None
    if call.name == "rms_norm":
        return _own_rms_norm(log, call)
    product, casts = without_casts(log, call.results[0])
    producer = log.producer_of(product)
    if producer is None or producer.name != "mul" or len(producer.reads) != 2:
        return None
    for scale, normalized in (producer.reads, producer.reads[::-1]):  # factors in either order
        uncast, inner_casts = without_casts(log, normalized)
        recognized = _normalized(log, uncast)
        if recognized is None:
            continue
        x, reader, eps, calls = recognized
        shape = log.tensors[x].like.shape
        if log.tensors[scale].like.shape != shape[-1:]:
            continue
        match = Match("rms_norm", [*calls, *inner_casts, producer, *casts], {}, {"eps": eps})
        match.operands = {"x": (reader, x), "weight": (producer, scale)}
        before, after = log.tensors[x].like.dtype, log.tensors[call.results[0]].like.dtype
        if before != after and casts:
            return None  # the group ends before these casts: it is recognized from an earlier call
        if before != after:
            return replace(match, reason=f"its result is {name_of_dtype(after)}, of {name_of_dtype(before)}")
        return match
    return None


def _own_rms_norm(log: CallLog, call: LoggedCall) -> Match | None:
    """Return ``F.rms_norm`` as a match."""
    named = call.named(("input", "normalized_shape", "weight", "eps"))
    x, weight, eps = named.get("input"), named.get("weight"), named.get("eps")
    if not isinstance(x, Ref):
        return None
    match = Match("rms_norm", [call], {"x": (call, x.value)}, {})
    like = log.tensors[x.value].like
    if not isinstance(weight, Ref):
        return replace(match, reason="it has no weight")
    match.operands["weight"] = call, weight.value
    if log.tensors[weight.value].like.shape != like.shape[-1:]:
        return replace(match, reason="it is over more than the last dimension")
    if eps is None and like.dtype not in (torch.float32, torch.float64):
        return replace(match, reason=f"its eps is that of {name_of_dtype(like.dtype)}")
    if (after := log.tensors[call.results[0]].like.dtype) != like.dtype:
        return replace(match, reason=f"its result is {name_of_dtype(after)}, of {name_of_dtype(like.dtype)}")
    match.options["eps"] = float(torch.finfo(like.dtype).eps if eps is None else eps)
    return match


def _normalized(log: CallLog, tensor: int) -> tuple[int, LoggedCall, float, list[LoggedCall]] | None:
    """Recognize x · 1 / sqrt(mean(x²) + eps): return x, the first call that reads it, eps and the calls."""
    producer = log.producer_of(tensor)
    if producer is None or producer.name not in ("mul", "div") or len(producer.reads) != 2:
        return None
    for values, factor in (producer.reads, producer.reads[::-1]):
        recognized = _root_mean_square(log, factor, inverse=producer.name == "mul")
        if recognized is None:
            continue
        squared, eps, calls = recognized
        x, casts_of_values = without_casts(log, values)
        squared_x, casts_of_squared = without_casts(log, squared)
        is_dividend = values == producer.reads[0]
        if x == squared_x and (producer.name == "mul" or is_dividend):
            calls = [*casts_of_values, *casts_of_squared, *calls, producer]
            reader = min((call for call in calls if x in call.reads), key=lambda call: call.number)
            return x, reader, eps, calls
    return None


def _root_mean_square(log: CallLog, tensor: int, *, inverse: bool) -> tuple[int, float, list[LoggedCall]] | None:
    """Recognize sqrt(mean(x²) + eps) over the last dimension, or its inverse: return x, eps and the calls."""
    root, calls = without_casts(log, tensor)
    producer = log.producer_of(root)
    if producer is None:
        return None
    calls.append(producer)
    is_root = producer.name == "sqrt" or (producer.name == "pow" and producer.args[1:] == (0.5,))
    is_inverse = producer.name == "rsqrt" or (producer.name == "pow" and producer.args[1:] == (-0.5,))
    if inverse and (producer.name == "reciprocal" or (producer.name == "rdiv" and producer.args[1:] in ((1,), (1.0,)))):
        square_root = log.producer_of(producer.reads[0])
        if square_root is None or square_root.name != "sqrt":
            return None
        calls.append(square_root)
        producer, is_inverse = square_root, True
    is_wanted = is_inverse if inverse else is_root
    if not producer.reads or not is_wanted:
        return None
    added = log.producer_of(producer.reads[0])
    if added is None or added.name != "add" or len(added.reads) != 1 or added.kwargs:
        return None
    eps = next((arg for arg in added.args if isinstance(arg, (int, float))), None)
    mean = log.producer_of(added.reads[0])
    if eps is None or mean is None or not _is_mean_of_rows(log, mean):
        return None
    square = log.producer_of(mean.reads[0])
    if square is None or not _is_square(square):
        return None
    return square.reads[0], float(eps), [*calls, added, mean, square]


def _is_mean_of_rows(log: CallLog, call: LoggedCall) -> bool:
    """Return whether a call is a mean over the last dimension that keeps it."""
    if call.name != "mean" or len(call.reads) != 1:
        return False
    dims = len(log.tensors[call.reads[0]].like.shape)
    named = call.named(("input", "dim", "keepdim"))
    dim = named.get("dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if named.get("dtype") not in (None, torch.float32, torch.float64):  # float64 is refused with a reason
        return False
    return dim in (-1, dims - 1) and named.get("keepdim") is True


def _is_square(call: LoggedCall) -> bool:
    if call.name == "mul":
        return len(call.args) == 2 and call.args[0] == call.args[1] and isinstance(call.args[0], Ref)
    return call.name == "square" or (call.name == "pow" and len(call.args) == 2 and call.args[1] == 2)


# -- gated activations


def _gated(log: CallLog, call: LoggedCall) -> Match | None:
    """Recognize ``activation(gate) * up``."""
    if call.name != "mul" or len(call.reads) != 2 or len(call.results) != 1:
        return None
    for activated, up in (call.reads, call.reads[::-1]):
        recognized = _activation(log, activated)
        if recognized is None:
            continue
        kernel, gate, options, calls = recognized
        reader = next(inner for inner in calls if gate in inner.reads)
        match = Match(kernel, [*calls, call], {"gate": (reader, gate), "up": (call, up)}, options)
        gate_like, up_like = log.tensors[gate].like, log.tensors[up].like
        if gate_like.shape != up_like.shape or gate_like.dtype != up_like.dtype:
            return replace(match, reason="gate and up differ in shape or dtype")
        return match
    return None


def _activation(log: CallLog, tensor: int) -> tuple[str, int, dict[str, Any], list[LoggedCall]] | None:
    """Recognize SiLU and GELU, from their result: return the kernel of the gated activation, the tensor that they read,
    the kernel's options and the calls."""
    producer = log.producer_of(tensor)
    if producer is None or not producer.reads or producer.in_place:
        return None
    if producer.name == "silu":
        return "swiglu", producer.reads[0], {}, [producer]
    if producer.name == "gelu":
        return "geglu", producer.reads[0], {"approximate": producer.kwargs.get("approximate", "none")}, [producer]
    if producer.name == "mul" and len(producer.reads) == 2:
        for gate, factor in (producer.reads, producer.reads[::-1]):  # SiLU(x) = x * sigmoid(x)
            sigmoid = log.producer_of(factor)
            if sigmoid is not None and sigmoid.name == "sigmoid" and sigmoid.reads == (gate,):
                return "swiglu", gate, {}, [sigmoid, producer]
    return None


# -- norms of channels


_KEEP_INPUT_LAYOUT = frozenset((*(f"{name}_act" for name in _CHANNEL_NORMS), "depthwise_conv"))
"""Kernels whose result has the layout of their input."""


def _channel_norm(log: CallLog, call: LoggedCall) -> Match | None:
    """Recognize a batch, group or instance norm, and the activation of its result."""
    if len(call.results) != 1:
        return None
    if call.name in _CHANNEL_NORMS:
        return _norm_of_channels(log, call)
    if call.name not in _ACTIVATIONS or not call.reads:
        return None
    dropouts, norm = list[LoggedCall](), log.producer_of(call.reads[0])
    while norm is not None and is_inactive_dropout(norm):
        dropouts.append(norm)
        norm = log.producer_of(norm.reads[0])
    if norm is None or norm.name not in _CHANNEL_NORMS or len(norm.results) != 1 or len(call.reads) > 1:
        return None
    match = _norm_of_channels(log, norm)
    if match is None:
        return None
    activation = _ACTIVATIONS[call.name]
    match.options["activation"] = activation
    if activation == "leaky_relu":
        named = call.named(("input", "negative_slope"))
        match.options["slope"] = float(named.get("negative_slope", 0.01))
    return replace(match, calls=[norm, *dropouts, call], last_call_in_place=call.in_place)


def _norm_of_channels(log: CallLog, call: LoggedCall) -> Match | None:
    """Return a norm as a match, without an activation."""
    names = _CHANNEL_NORMS[call.name]
    if len(call.args) > len(names) or not set(call.kwargs) <= set(names):
        return None
    named = call.named(names)
    x = named.get("input")
    if not isinstance(x, Ref):
        return None
    operands = {"x": (call, x.value)}
    for name in ("weight", "bias", "running_mean", "running_var"):
        if isinstance(named.get(name), Ref):
            operands[name] = call, named[name].value
    match = Match(f"{call.name}_act", [call], operands, {"activation": "none", "eps": float(named.get("eps", 1e-5))})
    if call.name == "group_norm":
        match.options["groups"] = int(named["num_groups"])
    uses_input_statistics = {
        "batch_norm": named.get("training", False),
        "instance_norm": named.get("use_input_stats", True),
        "group_norm": True,
    }[call.name]
    if uses_input_statistics is not True:
        return replace(match, reason="it has the statistics of other batches")
    if call.name == "batch_norm":
        match.options["momentum"] = float(named.get("momentum", 0.1))
    before, after = log.tensors[x.value].like, log.tensors[call.results[0]].like
    elements_per_mean = math.prod(before.shape[2:])
    if call.name == "batch_norm":
        elements_per_mean *= before.shape[0]
    elif call.name == "group_norm":
        elements_per_mean *= before.shape[1] // int(named["num_groups"])
    if elements_per_mean == 1:
        return replace(match, reason="each mean is of one element")
    if before.dtype != after.dtype:
        return replace(match, reason=f"its result is {name_of_dtype(after.dtype)}, of {name_of_dtype(before.dtype)}")
    if before.stride != after.stride or not _is_dense(before):
        return replace(match, reason="its input and result are not contiguous or channels last alike")
    return match


# -- depthwise convolutions


def _depthwise(log: CallLog, call: LoggedCall) -> Match | None:
    """Recognize a convolution with as many groups as channels."""
    if call.name not in _CONVOLUTIONS or len(call.results) != 1 or len(call.args) > len(_CONVOLUTION):
        return None
    named = call.named(_CONVOLUTION)
    operands = {
        name: (call, ref.value)
        for name, argument in (("x", "input"), ("weight", "weight"), ("bias", "bias"))
        if isinstance(ref := named.get(argument), Ref)
    }
    if not {"x", "weight"} <= operands.keys() or not set(named) <= set(_CONVOLUTION):
        return None
    x, weight = (log.tensors[operands[name][1]].like for name in ("x", "weight"))
    groups, dims = named.get("groups", 1), len(weight.shape) - 2
    if groups == 1 or weight.shape[1] != 1:
        return None
    match = Match("depthwise_conv", [call], operands, {})
    if weight.shape[0] != groups:
        return replace(match, reason=f"it has {weight.shape[0] // groups} filters for each channel")
    if len(x.shape) != dims + 2:
        return replace(match, reason="its input has no dimension of samples")
    for name in ("stride", "dilation", "padding"):
        value = named.get(name, 0 if name == "padding" else 1)
        if value == "same":  # only of padding, which comes after dilation here
            both_sides = [d * (k - 1) for d, k in zip(match.options["dilation"], weight.shape[2:], strict=True)]
            if any(total % 2 for total in both_sides):
                return replace(match, reason="it pads its sides by different numbers")
            value = [total // 2 for total in both_sides]
        sizes = [0] if value == "valid" else [value] if isinstance(value, int) else list(value)
        match.options[name] = sizes * dims if len(sizes) == 1 else sizes
    after = log.tensors[call.results[0]].like
    memory_format = torch.contiguous_format if _is_contiguous(x) else _channels_last(x)
    expected = torch.empty(after.shape, device="meta", memory_format=memory_format)
    if not _is_dense(x) or expected.stride() != after.stride:
        return replace(match, reason="its input and result are not contiguous or channels last alike")
    dtypes = {log.tensors[tensor].like.dtype for _, tensor in operands.values()}
    autocast_enabled, _ = call.autocast
    if not autocast_enabled and len(dtypes) > 1:
        return replace(match, reason="its operands have several dtypes")
    return match


def _channels_last(like: Like) -> torch.memory_format:
    """Return channels last for four and five dimensions, contiguous for others."""
    return {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(like.shape), torch.contiguous_format)


def _is_dense(like: Like) -> bool:
    """Return whether a tensor is contiguous or channels last."""
    tensor = torch.empty_strided(like.shape, like.stride, device="meta")
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=_channels_last(like))


# -- parts of the above


def _is_contiguous(like: Like) -> bool:
    return torch.empty_strided(like.shape, like.stride, device="meta").is_contiguous()
