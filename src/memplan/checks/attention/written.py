"""Find attention that a step computes as a product, a softmax and a product, and what else reads its matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from memplan.checks.mended.savings import readers_of
from memplan.checks.op_names import base_name
from memplan.trace.records import Op, Storage
from memplan.trace.trace import Trace

SHORTEST = 16
"""Shorter sequences are ignored: their matrices are small."""
SOFTMAX = ("_softmax", "_safe_softmax")
PRODUCTS = ("bmm", "baddbmm")
INSIDE_OF_TORCH = "MultiheadAttention"
"""Class of torch's own layer, which writes attention out if called with ``need_weights=True``."""

VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "permute", "transpose", "t", "squeeze", "unsqueeze",
})  # fmt: skip
KEPT_SHAPE = frozenset({
    "mul", "div", "add", "sub", "masked_fill", "where", "_to_copy", "clone", "copy", "native_dropout", "empty_like",
    "bernoulli",
})  # fmt: skip
"""Ops allowed between the two products besides the softmax: scales, masks, casts and dropout."""
_SCALING = ("mul", "div")
EMPTY = "aten.empty"

Site = tuple[str | None, int]
"""``file:line`` of an op, and the number of elements of its result."""


@dataclass(frozen=True, slots=True)
class Attention:
    """A product of queries and keys, a softmax over the keys, a product with the values."""

    scores: Op
    softmax: Op
    sizes: tuple[int, int]
    """Queries and keys."""
    matrices: tuple[int, ...]
    """Storages of the forward pass, from the scores to the probabilities."""
    scalings: tuple[Op, ...]
    """Ops that scaled the queries or the keys, if nothing but this product reads their results."""
    summand: Op | None
    """Op that allocated an uninitialized tensor for baddbmm with ``beta=0``."""
    dropped: bool
    """Whether there is a dropout between softmax and values."""
    other_reader: Op | None = None
    """First op that uses the matrices for something else; a fused call never has them."""
    returned: bool = False
    """Whether the model returns them."""

    @property
    def inside_of_sdpa(self) -> bool:
        """Whether it is the math path of a call of `scaled_dot_product_attention`."""
        return base_name(self.softmax.name) == "_safe_softmax"


def attentions(trace: Trace) -> list[Attention]:
    """Return the attention in the first step's forward pass that is computed by products and a softmax, in order."""
    return list(_Search(trace).attentions())


class _Search:
    """Finds attention in the first step's forward ops: from each softmax back to the scores, and on to the values."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._forward = [op for op in trace.ops if op.phase == "forward" and op.step == 0]
        """Forward ops of the first step."""
        self._readers = readers_of(self._forward)
        """By storage: the forward ops that read it."""

    def attentions(self) -> Iterator[Attention]:
        """Yield the attention around each softmax over long rows that is computed by products."""
        for op in self._forward:
            if base_name(op.name) not in SOFTMAX or not op.writes:
                continue
            shape = self._trace.storages[op.writes[0]].shape
            if len(shape) < 3 or min(shape[-2:]) < SHORTEST:
                continue
            scores = self._scores_of(op, elements(self._trace.storages[op.writes[0]]))
            attention = self._attention(scores, op) if scores is not None else None
            if attention is not None:
                yield attention

    def _scores_of(self, softmax: Op, size: int) -> Op | None:
        """Return the product whose result a softmax reads, directly or after scales and masks. All results on the way
        have as many elements as that of the softmax: ``size``."""
        op = softmax
        for _ in range(12):  # more scales, masks and casts than any attention has
            inputs = [self._trace.storages[operand.storage] for operand in op.reads]
            indices = [s.op for s in inputs if s.op is not None and s.op < op.index and elements(s) == size]
            if not indices:
                return None
            makers = [self._trace.ops[index] for index in dict.fromkeys(indices)]
            product = next((maker for maker in makers if base_name(maker.name) in PRODUCTS), None)
            if product is not None:
                return product
            op = makers[0]
            if base_name(op.name) not in KEPT_SHAPE:
                return None
        return None

    def _attention(self, scores: Op, softmax: Op) -> Attention | None:
        """Return the attention from these scores to the product with the values; None if there is no such product. Goes
        forward over the ops that read the scores, or what views, scales, masks, dropout and softmax make of them."""
        matrices = dict.fromkeys(scores.writes)  # storages, as an ordered set
        queue = [*scores.writes]
        seen: set[int] = set()
        other_readers, has_values, dropped = list[Op](), False, False
        while queue:
            for op in self._readers.get(queue.pop(0), ()):
                if op.index in seen or op.index <= scores.index:
                    continue
                seen.add(op.index)
                name = base_name(op.name)
                after_softmax = op.index > softmax.index
                if name in PRODUCTS and after_softmax and op.reads[-2].storage in matrices:
                    has_values = True
                elif name in VIEWS or name in KEPT_SHAPE or name in SOFTMAX:
                    dropped |= after_softmax and name in ("native_dropout", "bernoulli")
                    new = [storage for storage in op.writes if storage not in matrices]
                    matrices |= dict.fromkeys(new)
                    queue += new
                else:
                    other_readers.append(op)
        if not has_values:
            return None
        returned = any(view.storage in matrices for call in self._trace.returned for view in call.tensors)
        sizes = self._trace.storages[softmax.writes[0]].shape[-2:]
        first = min(other_readers, key=lambda op: op.index, default=None)
        return Attention(
            scores, softmax, (sizes[0], sizes[1]), tuple(matrices), tuple(self._scalings(scores)),
            self._empty_summand(scores), dropped, first, returned,
        )  # fmt: skip

    def _empty_summand(self, scores: Op) -> Op | None:
        """Return the op that allocated the summand of ``baddbmm(summand, queries, keys, beta=0)``; None for other
        products. The summand is uninitialized memory, which no other op reads."""
        summand = self._trace.storages[scores.reads[0].storage]
        if len(scores.reads) < 3 or summand.op is None:  # a product of two operands has no summand
            return None
        maker = self._trace.ops[summand.op]
        is_read_once = len(self._readers.get(summand.id, ())) == 1
        return maker if is_read_once and maker.name.startswith(EMPTY) else None

    def _scalings(self, scores: Op) -> Iterator[Op]:
        """Yield the ops that multiply queries or keys by a number, directly or before a copy, if only this product
        reads their results."""
        for operand in scores.reads[-2:]:
            storage = self._trace.storages[operand.storage]
            while storage.op is not None:  # back over clones
                maker = self._trace.ops[storage.op]
                readers = [op for op in self._readers.get(storage.id, ()) if base_name(op.name) not in VIEWS]
                operands = [self._trace.storages[read.storage] for read in maker.reads]
                tensors = [tensor for tensor in operands if elements(tensor) > 1]  # a scale has a single element
                if len(readers) > 1 or len(tensors) != 1 or maker.phase != "forward":
                    break
                if base_name(maker.name) in _SCALING and maker.writes[0] == storage.id:
                    yield maker
                    break
                if base_name(maker.name) != "clone":
                    break
                storage = tensors[0]


def site(trace: Trace, op: Op) -> Site:
    """Return what identifies an op in another recording of the step: its line, and the elements of its result."""
    return op.where, elements(trace.storages[op.writes[0]])


def elements(storage: Storage) -> int:
    """Return the number of elements of the first tensor on a storage."""
    return math.prod(storage.shape)
