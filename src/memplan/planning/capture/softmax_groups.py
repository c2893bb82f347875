"""Recognize the softmax of attention scores with what is around it: scale, mask, casts and dropout."""

from __future__ import annotations

import math
from collections.abc import Sequence

from memplan.planning.capture.call_log import CallLog, LoggedCall
from memplan.planning.capture.group_match import Match, is_cast, is_inactive_dropout, name_of_dtype, without_casts
from memplan.planning.graph.joint_graph import Ref

_DROPOUT = ("input", "p", "training", "inplace")


def softmax_dropout(log: CallLog, call: LoggedCall) -> Match | None:
    """Recognize ``dropout(softmax(scale * x + mask))``, from the dropout, the cast of the softmax, or the softmax.

    A softmax alone, or of scores that are only scaled, is not recognized: torch's own saves as little.
    """
    if len(call.results) != 1 or call.in_place:
        return None
    calls, options, tensor = list[LoggedCall](), {}, call.results[0]
    if call.name == "dropout" and not is_inactive_dropout(call):
        named = call.named(_DROPOUT)
        p = named.get("p", 0.5)
        if len(call.reads) != 1 or not isinstance(p, float | int) or named.get("inplace"):
            return None
        options["p"], tensor = float(p), call.reads[0]
        calls.append(call)
    while (producer := log.producer_of(tensor)) is not None and producer.reads:
        if not is_inactive_dropout(producer) and not is_cast(log, producer, producer.reads[0], tensor):
            break
        calls.append(producer)
        tensor = producer.reads[0]
    if producer is None or producer.name != "softmax" or len(producer.results) != 1 or len(producer.reads) != 1:
        return None
    dims = len(log.tensors[tensor].like.shape)
    if not dims or _dimension(producer) not in (-1, dims - 1):
        return None
    calls.append(producer)
    match = Match("softmax_dropout", calls, {}, options)
    _add_scores(log, match, producer)
    _, x = match.operands["x"]
    tensors = x, *(tensor for inner in calls for tensor in inner.results)
    dtypes = {log.tensors[tensor].like.dtype for tensor in tensors}
    if "p" not in options and "mask" not in match.operands and len(dtypes) == 1:
        return None
    result_dtype = log.tensors[call.results[0]].like.dtype
    if result_dtype != log.tensors[x].like.dtype:
        options["dtype"] = name_of_dtype(result_dtype)
    calls.reverse()  # in the order of the trace
    return match


def _dimension(call: LoggedCall) -> object:
    """Return the dimension of a softmax, as its caller gave it."""
    return call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)


def _add_scores(log: CallLog, match: Match, softmax: LoggedCall) -> None:
    """Add the calls before a softmax to a match, from the last to the first: casts, a mask, casts, a factor, casts."""
    reader, tensor = softmax, softmax.reads[0]

    def step_back(source: int, calls: Sequence[LoggedCall]) -> None:
        """Add calls, from the last to the first, which computed ``tensor`` from ``source``."""
        nonlocal reader, tensor
        match.calls.extend(calls)
        reader, tensor = (calls[-1] if calls else reader), source

    step_back(*without_casts(log, tensor))
    masked = log.producer_of(tensor)
    mask = None if masked is None or masked.in_place else _mask(log, masked, tensor)
    if masked is not None and mask is not None:
        x, mask_tensor, fill = mask
        match.operands["mask"] = masked, mask_tensor
        match.options |= {} if fill in (None, -math.inf) else {"fill": fill}  # -inf is the kernel's default
        step_back(x, [masked])
        step_back(*without_casts(log, tensor))
    scaled = log.producer_of(tensor)
    factor = None if scaled is None or scaled.in_place else _factor(scaled)
    if scaled is not None and factor is not None:
        match.options["scale"] = factor
        step_back(scaled.reads[0], [scaled])
        step_back(*without_casts(log, tensor))
    match.operands["x"] = reader, tensor


def _mask(log: CallLog, call: LoggedCall, result: int) -> tuple[int, int, float | None] | None:
    """Recognize the mask that a call applies to scores.

    Returns:
        The scores and the mask, as numbers of tensors; and the number that a boolean mask fills in where it is true,
        None for a mask that is added.
    """
    shape = log.tensors[result].like.shape
    if call.name == "masked_fill" and len(call.args) == 3 and len(call.reads) == 2 and not call.kwargs:
        x, mask, fill = call.args
        if not isinstance(x, Ref) or not isinstance(mask, Ref) or not isinstance(fill, float | int):
            return None
        if not (math.isfinite(fill) or fill == -math.inf) or log.tensors[x.value].like.shape != shape:
            return None
        return x.value, mask.value, float(fill)
    if call.name != "add" or len(call.reads) != 2 or len(call.args) != 2 or call.kwargs:
        return None
    not_broadcast = [tensor for tensor in call.reads if log.tensors[tensor].like.shape == shape]
    are_floating = all(log.tensors[tensor].like.dtype.is_floating_point for tensor in call.reads)
    if not not_broadcast or not are_floating or call.reads[0] == call.reads[1]:
        return None
    # If neither is broadcast, the scores are the operand with a gradient.
    x = next((tensor for tensor in not_broadcast if log.tensors[tensor].requires_grad), not_broadcast[0])
    (mask,) = (tensor for tensor in call.reads if tensor != x)
    return x, mask, None


def _factor(call: LoggedCall) -> float | None:
    """Return the number that a tensor is multiplied by; None if the call does something else."""
    numbers = [arg for arg in call.args if isinstance(arg, float | int) and not isinstance(arg, bool)]
    if call.name not in ("mul", "div") or len(numbers) != 1 or len(call.reads) != 1 or call.kwargs:
        return None
    (number,) = numbers
    if call.name == "div" and not number:
        return None
    factor = float(number) if call.name == "mul" else 1 / number
    return factor if factor and math.isfinite(factor) else None
