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
_OF_LABELS = _LABEL_CASTS | {"squeeze", "getitem"}


class _Another(Exception):
    """The calls compute something else."""


def dice_cross_entropy(log: CallLog, call: LoggedCall) -> Match | None:
    """Recognize the loss from the addition of its two parts, each with a factor or without."""
    if call.name != "add" or len(call.reads) != 2 or len(call.results) != 1 or call.kwargs:
        return None
    for dice, cross_entropy in (call.reads, call.reads[::-1]):
        chain = _Chain(log, [call])
        try:
            return _loss(chain, dice, cross_entropy)
        except _Another:
            continue
    return None


class _Chain:
    """Calls that were recognized, from the last to the first."""

    def __init__(self, log: CallLog, calls: list[LoggedCall]) -> None:
        self.log, self.calls = log, calls
        self.changes = set[int]()
        """Numbers of those that change an operand in place."""

    def maker(self, tensor: int, *names: str) -> LoggedCall:
        """Return the call that made a tensor, which must be one of these functions."""
        producer = self.log.maker(tensor)
        if producer is None or producer.name not in names or producer.results[:1] != (tensor,):
            raise _Another
        self.calls.append(producer)
        if producer.in_place:
            self.changes.add(producer.number)
        return producer

    def number(self, tensor: int, *names: str) -> tuple[int, float]:
        """Return the tensor and the number of a call of both, such as a product."""
        producer = self.maker(tensor, *names)
        numbers = [arg for arg in producer.args if isinstance(arg, float | int)]
        if len(numbers) != 1 or len(producer.reads) != 1 or producer.kwargs:
            raise _Another
        return producer.reads[0], float(numbers[0])

    def pair(self, tensor: int, *names: str) -> tuple[int, int]:
        """Return both tensors of a call."""
        producer = self.maker(tensor, *names)
        if len(producer.reads) != 2 or len(producer.args) != 2 or producer.kwargs:
            raise _Another
        return producer.reads[0], producer.reads[1]

    def factor(self, tensor: int) -> tuple[int, float]:
        """Return a tensor and its factor, 1 where it has none."""
        producer = self.log.maker(tensor)
        if producer is not None and producer.name == "mul" and len(producer.reads) == 1:
            return self.number(tensor, "mul")
        return tensor, 1.0

    def sum(self, tensor: int) -> tuple[int, tuple[int, ...]]:
        """Return the tensor and the dimensions of a sum."""
        producer = self.maker(tensor, "sum")
        named = producer.named(("input", "dim"))
        dims, rank = named.pop("dim", None), len(self.log.tensors[producer.reads[0]].like.shape)
        dims = (dims,) if isinstance(dims, int) else dims
        if len(producer.reads) != 1 or not isinstance(dims, tuple | list) or set(named) - {"input"}:
            raise _Another
        return producer.reads[0], tuple(sorted(dim % rank for dim in dims))


def _loss(chain: _Chain, dice: int, cross_entropy: int) -> Match:
    """Return the match of both losses, or raise _Another."""
    log, total = chain.log, chain.calls[0]
    dice, dice_factor = chain.factor(dice)
    cross_entropy, cross_entropy_factor = chain.factor(cross_entropy)
    loss = chain.maker(cross_entropy, "cross_entropy")
    named = loss.named(CROSS_ENTROPY)
    scores, targets = named.get("input"), named.get("target")
    negated = (producer := log.maker(dice)) is not None and producer.name == "neg"
    mean = chain.maker(chain.maker(dice, "neg").reads[0] if negated else dice, "mean")
    if not isinstance(scores, Ref) or not isinstance(targets, Ref) or len(mean.args) != 1 or mean.kwargs:
        raise _Another
    losses = mean.reads[0]
    weighted = (producer := log.maker(losses)) is not None and producer.name == "mul" and len(producer.reads) == 2
    if weighted:
        losses, _ = chain.pair(losses, "mul")
    softmax, labels, options = (_coefficient if negated else _dice)(chain, losses)
    if softmax.reads != (scores.value,):
        raise _Another
    factors = {"dice_factor": dice_factor, "cross_entropy_factor": cross_entropy_factor}
    label_map = _label_map(chain, targets.value, labels)
    reader = next(call for call in chain.calls if label_map in call.reads)
    operands = {"logits": (softmax, scores.value), "targets": (reader, label_map)}
    match = Match("dice_cross_entropy", chain.calls, operands, {**options, **factors}, changes=chain.changes)
    match.calls = [call for call in chain.calls if call is not total] + [total]
    match.options["ignore_index"] = named.get("ignore_index", -100)
    match.reason = "it weighs classes" if weighted else _reason(log, named, match)
    return match


def _reason(log: CallLog, named: dict[str, Any], match: Match) -> str:
    """Say why the kernel does not take a loss; empty if it may. ``named``: arguments of the cross-entropy."""
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
    """Recognize 1 - (2 I + a) / (2 (I + (P - I) / 2 + (T - I) / 2) + b): return the softmax, the class indices that the
    one-hot targets are made of, and the options."""
    share, one = chain.number(tensor, "rsub")
    numerator, denominator = chain.pair(share, "div")
    if one != 1:
        raise _Another
    options = dict[str, Any]()
    doubled, options["smooth_numerator"] = chain.number(numerator, "add")
    intersection, by = chain.number(doubled, "mul")
    doubled, options["smooth_denominator"] = chain.number(denominator, "add")
    union, by_union = chain.number(doubled, "mul")
    with_first, second = chain.pair(union, "add")
    same, first = chain.pair(with_first, "add")
    if (by, by_union) != (2, 2) or same != intersection:
        raise _Another
    halves = [chain.log.maker(tensor) for tensor in (first, second)]
    halved = all(producer is not None and producer.name == "mul_" for producer in halves)
    options["jaccard"] = not halved
    sums = list[int]()
    for tensor in (first, second):
        if halved:
            tensor, by = chain.number(tensor, "mul_")
            if by != 0.5:
                raise _Another
        whole, same = chain.pair(tensor, "sub")
        if same != intersection:
            raise _Another
        sums.append(whole)
    product, dims = chain.sum(intersection)
    probabilities, targets = chain.pair(product, "mul")
    if [chain.sum(one) for one in sums] != [(probabilities, dims), (targets, dims)]:
        raise _Another
    return _operands_of(chain, probabilities, targets, dims, options)


def _coefficient(chain: _Chain, tensor: int) -> tuple[LoggedCall, int, dict[str, Any]]:
    """Recognize (2 I + a) / max(T + P + b, c), whose maximum is the first where c is not above b. See `_dice`."""
    numerator, denominator = chain.pair(tensor, "div")
    doubled, numerator_term = chain.number(numerator, "add")
    intersection, by = chain.number(doubled, "mul")
    clipped = chain.maker(denominator, "clip", "clamp")
    named = clipped.named(("input", "min", "max"))
    sizes, denominator_term = chain.number(clipped.reads[0], "add")
    least = named.get("min")
    if by != 2 or named.get("max") is not None or not isinstance(least, float | int) or least > denominator_term:
        raise _Another
    product, dims = _sum_of_samples(chain, intersection)
    probabilities, targets = chain.pair(product, "mul")
    sums = [_sum_of_samples(chain, one) for one in chain.pair(sizes, "add")]
    if sorted(sums) != sorted([(probabilities, dims), (targets, dims)]):
        raise _Another
    options = {
        "smooth_numerator": numerator_term, "smooth_denominator": denominator_term, "constant": 0.0, "jaccard": False,
    }  # fmt: skip
    return _operands_of(chain, probabilities, targets, dims, options)


def _sum_of_samples(chain: _Chain, tensor: int) -> tuple[int, tuple[int, ...]]:
    """Return the tensor and the dimensions of a sum, or of a sum over samples of a sum."""
    source, dims = chain.sum(tensor)
    if dims != (0,):
        return source, dims
    source, dims = chain.sum(source)
    return source, (0, *dims)


def _operands_of(
    chain: _Chain, probabilities: int, targets: int, dims: tuple[int, ...], options: dict[str, Any]
) -> tuple[LoggedCall, int, dict[str, Any]]:
    """Recognize a softmax of classes and one-hot targets, both with or without class 0. See `_dice`."""
    rank = len(chain.log.tensors[probabilities].like.shape)
    spatial = tuple(range(2, rank))
    if dims not in (spatial, (0, *spatial)):
        raise _Another
    options["batch"] = dims != spatial
    sliced = [
        producer is not None and producer.name == "getitem"
        for producer in map(chain.log.maker, (probabilities, targets))
    ]
    if sliced[0] != sliced[1]:
        raise _Another
    options["include_background"] = not sliced[0]
    if sliced[0]:
        behind_first = (slice(None), slice(1, None))
        parts = chain.maker(probabilities, "getitem"), chain.maker(targets, "getitem")
        if any(part.args[1] != behind_first for part in parts):
            raise _Another
        probabilities, targets = (part.reads[0] for part in parts)
    softmax = chain.maker(probabilities, "softmax")
    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    dtypes = {chain.log.tensors[tensor].like.dtype for tensor in (*softmax.reads, probabilities)}
    if dim != 1 or len(dtypes) > 1:
        raise _Another
    scattered = chain.maker(targets, "scatter_")
    named = scattered.named(("input", "dim", "index", "value"))
    index, source = named.get("index"), named.get("input", scattered.args[0])
    if (named.get("dim"), named.get("value")) != (1, 1) or not isinstance(index, Ref) or not isinstance(source, Ref):
        raise _Another
    zeros = chain.maker(source.value, "zeros", "zeros_like")
    if zeros.reads:
        raise _Another
    return softmax, index.value, options


def _label_map(chain: _Chain, targets: int, labels: int) -> int:
    """Return the tensor of which both the targets of the cross-entropy and the class indices of the one-hot targets are
    views or casts; add the calls between."""
    sources = dict(_sources(chain.log, labels))
    for tensor, calls in _sources(chain.log, targets):
        if tensor in sources:
            chain.calls += [*calls, *sources[tensor]]
            return tensor
    raise _Another


def _sources(log: CallLog, tensor: int) -> Iterator[tuple[int, list[LoggedCall]]]:
    """Yield a tensor and what it is a cast to int64 or a view without the second dimension of, each with the calls from
    there."""
    calls = list[LoggedCall]()
    yield tensor, calls
    while (producer := log.maker(tensor)) is not None and producer.name in _OF_LABELS and producer.reads:
        if producer.name == "getitem" and producer.args[1] != (slice(None), 0):
            return
        if producer.name in _LABEL_CASTS and log.tensors[tensor].like.dtype != torch.int64:
            return
        calls, tensor = [*calls, producer], producer.reads[0]
        yield tensor, calls
