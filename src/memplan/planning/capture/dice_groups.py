"""Recognize the sum of a Dice loss and a cross-entropy, as MONAI's ``DiceCELoss`` and nnU-Net's ``DC_and_CE_loss``
compute it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from memplan.planning.capture.call_log import CallLog, LoggedCall
from memplan.planning.capture.group_match import CROSS_ENTROPY, Match
from memplan.planning.graph.joint_graph import Ref

_LABEL_CASTS = frozenset(("to", "long", "type"))
_LABEL_CASTS_AND_VIEWS = _LABEL_CASTS | {"squeeze", "getitem"}


class _NotThisLoss(Exception):
    """The calls compute something else."""


def dice_cross_entropy(log: CallLog, call: LoggedCall) -> Match | None:
    """Recognize the loss from the addition of its two parts, each with a factor or without."""
    if call.name != "add" or len(call.reads) != 2 or len(call.results) != 1 or call.kwargs:
        return None
    for dice, cross_entropy in (call.reads, call.reads[::-1]):
        chain = _Chain(log, [call])
        try:
            return _loss(chain, dice, cross_entropy)
        except _NotThisLoss:
            continue
    return None


class _Chain:
    """Calls of a loss, recognized from the last to the first. Tensors are numbers in the log.

    Its methods take the result of a call and return what the call reads; they raise _NotThisLoss for any other call.
    """

    def __init__(self, log: CallLog, calls: list[LoggedCall]) -> None:
        self.log, self.calls = log, calls
        self.in_place_calls = set[int]()
        """Numbers of the calls that change an operand in place."""

    def producer_of(self, tensor: int, *names: str) -> LoggedCall:
        """Return the call that returned a tensor, of a function in ``names``, and add it to the chain."""
        producer = self.log.producer_of(tensor)
        if producer is None or producer.name not in names or producer.results[:1] != (tensor,):
            raise _NotThisLoss
        self.calls.append(producer)
        if producer.in_place:
            self.in_place_calls.add(producer.number)
        return producer

    def tensor_and_number(self, tensor: int, *names: str) -> tuple[int, float]:
        """Return the operands of a call of a tensor and a number, such as ``x * 2``."""
        producer = self.producer_of(tensor, *names)
        numbers = [arg for arg in producer.args if isinstance(arg, float | int)]
        if len(numbers) != 1 or len(producer.reads) != 1 or producer.kwargs:
            raise _NotThisLoss
        return producer.reads[0], float(numbers[0])

    def two_tensors(self, tensor: int, *names: str) -> tuple[int, int]:
        """Return the operands of a call of two tensors."""
        producer = self.producer_of(tensor, *names)
        if len(producer.reads) != 2 or len(producer.args) != 2 or producer.kwargs:
            raise _NotThisLoss
        return producer.reads[0], producer.reads[1]

    def tensor_and_factor(self, tensor: int) -> tuple[int, float]:
        """Return the operands of ``x * number``; for the result of another call, itself and 1."""
        producer = self.log.producer_of(tensor)
        if producer is not None and producer.name == "mul" and len(producer.reads) == 1:
            return self.tensor_and_number(tensor, "mul")
        return tensor, 1.0

    def tensor_and_sum_dims(self, tensor: int) -> tuple[int, tuple[int, ...]]:
        """Return the operand of a sum, and the dimensions of the sum in order, from 0."""
        producer = self.producer_of(tensor, "sum")
        named = producer.named(("input", "dim"))
        dims, rank = named.pop("dim", None), len(self.log.tensors[producer.reads[0]].like.shape)
        dims = (dims,) if isinstance(dims, int) else dims
        has_other_arguments = bool(set(named) - {"input"})  # keepdim, dtype
        if len(producer.reads) != 1 or not isinstance(dims, tuple | list) or has_other_arguments:
            raise _NotThisLoss
        return producer.reads[0], tuple(sorted(dim % rank for dim in dims))


def _loss(chain: _Chain, dice_term: int, cross_entropy_term: int) -> Match:
    """Return the match of ``dice_factor * dice + cross_entropy_factor * cross_entropy``. Raises _NotThisLoss.

    Tensors are numbers in ``chain.log``: the terms are the operands of the addition, ``chain.calls[0]``.
    """
    log, addition = chain.log, chain.calls[0]
    dice, dice_factor = chain.tensor_and_factor(dice_term)
    cross_entropy, cross_entropy_factor = chain.tensor_and_factor(cross_entropy_term)
    loss = chain.producer_of(cross_entropy, "cross_entropy")
    named = loss.named(CROSS_ENTROPY)
    scores, targets = named.get("input"), named.get("target")
    # MONAI computes mean(1 - coefficient), nnU-Net -mean(coefficient).
    is_negated = (producer := log.producer_of(dice)) is not None and producer.name == "neg"
    mean = chain.producer_of(chain.producer_of(dice, "neg").reads[0] if is_negated else dice, "mean")
    if not isinstance(scores, Ref) or not isinstance(targets, Ref) or len(mean.args) != 1 or mean.kwargs:
        raise _NotThisLoss
    dice_by_class = mean.reads[0]
    producer = log.producer_of(dice_by_class)
    has_class_weights = producer is not None and producer.name == "mul" and len(producer.reads) == 2
    if has_class_weights:
        dice_by_class, _ = chain.two_tensors(dice_by_class, "mul")
    softmax, labels, options = (_coefficient if is_negated else _dice)(chain, dice_by_class)
    if softmax.reads != (scores.value,):
        raise _NotThisLoss
    factors = {"dice_factor": dice_factor, "cross_entropy_factor": cross_entropy_factor}
    label_map = _label_map(chain, targets.value, labels)
    reader = next(call for call in chain.calls if label_map in call.reads)
    operands = {"logits": (softmax, scores.value), "targets": (reader, label_map)}
    match = Match(
        "dice_cross_entropy", chain.calls, operands, {**options, **factors}, in_place_inner_calls=chain.in_place_calls
    )
    # the addition was recognized first, but is the last call of the group: the kernel takes its place
    match.calls = [call for call in chain.calls if call is not addition] + [addition]
    match.options["ignore_index"] = named.get("ignore_index", -100)
    match.reason = "it weighs classes" if has_class_weights else _reason(log, named, match)
    return match


def _reason(log: CallLog, named: dict[str, Any], match: Match) -> str:
    """Return why the kernel cannot replace a loss; empty if it may. ``named``: arguments of the cross-entropy."""
    if named.get("weight") is not None:
        return "it weighs classes"
    if named.get("label_smoothing", 0.0):
        return "it smooths labels"
    if named.get("reduction", "mean") != "mean" or named.get("size_average") is not None or named.get("reduce"):
        return "it is no mean"
    like, labels = (log.tensors[match.operands[name][1]].like for name in ("logits", "targets"))
    if labels.shape != (like.shape[0], 1, *like.shape[2:]):
        return "its targets are no label map (N, 1, ...)"
    if 0 <= match.options["ignore_index"] < like.shape[1]:  # the kernel ignores it in the Dice sums, too
        return "its cross-entropy ignores a class that the Dice loss counts"
    return ""


def _dice(chain: _Chain, tensor: int) -> tuple[LoggedCall, int, dict[str, Any]]:
    """Recognize MONAI's loss of each class, ``1 - (2 I + a) / (2 (I + (P - I) / 2 + (T - I) / 2) + b)``.

    P and T are the sums of the probabilities and of the one-hot targets over voxels, I that of their product. Without
    the halves it is the Jaccard loss. a and b: ``smooth_nr`` and ``smooth_dr``.

    Returns:
        The call of the softmax, the class indices from which the one-hot targets are scattered, the kernel's options.
    """
    coefficient, minuend = chain.tensor_and_number(tensor, "rsub")
    numerator, denominator = chain.two_tensors(coefficient, "div")
    if minuend != 1:
        raise _NotThisLoss
    options = dict[str, Any]()
    twice_intersection, options["smooth_numerator"] = chain.tensor_and_number(numerator, "add")
    intersection, intersection_factor = chain.tensor_and_number(twice_intersection, "mul")
    twice_union, options["smooth_denominator"] = chain.tensor_and_number(denominator, "add")
    union, union_factor = chain.tensor_and_number(twice_union, "mul")
    union_without_second, second = chain.two_tensors(union, "add")
    intersection_in_union, first = chain.two_tensors(union_without_second, "add")
    if (intersection_factor, union_factor) != (2, 2) or intersection_in_union != intersection:
        raise _NotThisLoss
    producers = [chain.log.producer_of(tensor) for tensor in (first, second)]
    are_halved = all(producer is not None and producer.name == "mul_" for producer in producers)
    options["jaccard"] = not are_halved
    sums = list[int]()  # P and T
    for difference in (first, second):
        if are_halved:
            difference, factor = chain.tensor_and_number(difference, "mul_")
            if factor != 0.5:
                raise _NotThisLoss
        minuend, subtrahend = chain.two_tensors(difference, "sub")
        if subtrahend != intersection:
            raise _NotThisLoss
        sums.append(minuend)
    product, dims = chain.tensor_and_sum_dims(intersection)
    probabilities, targets = chain.two_tensors(product, "mul")
    if [chain.tensor_and_sum_dims(total) for total in sums] != [(probabilities, dims), (targets, dims)]:
        raise _NotThisLoss
    return _operands_of(chain, probabilities, targets, dims, options)


def _coefficient(chain: _Chain, tensor: int) -> tuple[LoggedCall, int, dict[str, Any]]:
    """Recognize nnU-Net's coefficient of each class, ``(2 I + a) / max(T + P + b, c)``, where c is at most b: then the
    maximum is always ``T + P + b``, as T and P are not negative. Symbols and result: see `_dice`."""
    numerator, denominator = chain.two_tensors(tensor, "div")
    twice_intersection, numerator_term = chain.tensor_and_number(numerator, "add")
    intersection, factor = chain.tensor_and_number(twice_intersection, "mul")
    clipped = chain.producer_of(denominator, "clip", "clamp")
    named = clipped.named(("input", "min", "max"))
    size_sum, denominator_term = chain.tensor_and_number(clipped.reads[0], "add")
    lower_bound = named.get("min")
    if factor != 2 or named.get("max") is not None:
        raise _NotThisLoss
    if not isinstance(lower_bound, float | int) or lower_bound > denominator_term:
        raise _NotThisLoss
    product, dims = _sum_of_samples(chain, intersection)
    probabilities, targets = chain.two_tensors(product, "mul")
    sums = [_sum_of_samples(chain, total) for total in chain.two_tensors(size_sum, "add")]
    if sorted(sums) != sorted([(probabilities, dims), (targets, dims)]):
        raise _NotThisLoss
    options = {
        "smooth_numerator": numerator_term, "smooth_denominator": denominator_term, "constant": 0.0, "jaccard": False,
    }  # fmt: skip
    return _operands_of(chain, probabilities, targets, dims, options)


def _sum_of_samples(chain: _Chain, tensor: int) -> tuple[int, tuple[int, ...]]:
    """Return the operand and the dimensions of a sum. A sum over samples (dimension 0) of another sum counts as one."""
    source, dims = chain.tensor_and_sum_dims(tensor)
    if dims != (0,):
        return source, dims
    source, dims = chain.tensor_and_sum_dims(source)
    return source, (0, *dims)


def _operands_of(
    chain: _Chain, probabilities: int, targets: int, dims: tuple[int, ...], options: dict[str, Any]
) -> tuple[LoggedCall, int, dict[str, Any]]:
    """Recognize the operands of the sums: a softmax over classes and one-hot targets, both with or without class 0, the
    background. ``dims``: dimensions of the sums, which become options. Result: see `_dice`."""
    rank = len(chain.log.tensors[probabilities].like.shape)
    spatial = tuple(range(2, rank))
    if dims not in (spatial, (0, *spatial)):
        raise _NotThisLoss
    options["batch"] = dims != spatial  # whether the sums are over the samples of a batch, too
    probabilities_sliced, targets_sliced = (
        producer is not None and producer.name == "getitem"
        for producer in map(chain.log.producer_of, (probabilities, targets))
    )
    if probabilities_sliced != targets_sliced:
        raise _NotThisLoss
    options["include_background"] = not probabilities_sliced
    if probabilities_sliced:
        without_background = (slice(None), slice(1, None))  # tensor[:, 1:]
        slices = chain.producer_of(probabilities, "getitem"), chain.producer_of(targets, "getitem")
        if any(call.args[1] != without_background for call in slices):
            raise _NotThisLoss
        probabilities, targets = (call.reads[0] for call in slices)
    softmax = chain.producer_of(probabilities, "softmax")
    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    dtypes = {chain.log.tensors[tensor].like.dtype for tensor in (*softmax.reads, probabilities)}
    if dim != 1 or len(dtypes) > 1:
        raise _NotThisLoss
    scattered = chain.producer_of(targets, "scatter_")  # zeros.scatter_(1, index, 1)
    named = scattered.named(("input", "dim", "index", "value"))
    index, source = named.get("index"), named.get("input", scattered.args[0])
    if (named.get("dim"), named.get("value")) != (1, 1) or not isinstance(index, Ref) or not isinstance(source, Ref):
        raise _NotThisLoss
    zeros = chain.producer_of(source.value, "zeros", "zeros_like")
    if zeros.reads:
        raise _NotThisLoss
    return softmax, index.value, options


def _label_map(chain: _Chain, targets: int, labels: int) -> int:
    """Return the tensor of which both the targets of the cross-entropy and the class indices of the one-hot targets are
    views or casts; add the calls between."""
    sources_of_labels = dict(_sources(chain.log, labels))
    for tensor, calls in _sources(chain.log, targets):
        if tensor in sources_of_labels:
            chain.calls += [*calls, *sources_of_labels[tensor]]
            return tensor
    raise _NotThisLoss


def _sources(log: CallLog, tensor: int) -> Iterator[tuple[int, list[LoggedCall]]]:
    """Yield a tensor, then the tensor that it was cast to int64 from or a view without the second dimension of, and so
    on; each with the calls that lead from it to the first."""
    calls = list[LoggedCall]()
    yield tensor, calls
    while (
        (producer := log.producer_of(tensor)) is not None and producer.name in _LABEL_CASTS_AND_VIEWS and producer.reads
    ):
        if producer.name == "getitem" and producer.args[1] != (slice(None), 0):  # tensor[:, 0]
            return
        if producer.name in _LABEL_CASTS and log.tensors[tensor].like.dtype != torch.int64:
            return
        calls, tensor = [*calls, producer], producer.reads[0]
        yield tensor, calls
