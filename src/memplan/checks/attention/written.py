"""Where a step computes attention by a product, a softmax and a product, and what else reads its matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from memplan.checks.mended.savings import readers_of
from memplan.checks.op_names import base_name
from memplan.trace.records import Op, Storage
from memplan.trace.trace import Trace

SHORTEST = 16
"""Lengths below which the matrices are no matter."""
SOFTMAX = ("_softmax", "_safe_softmax")
PRODUCTS = ("bmm", "baddbmm")
INSIDE_OF_TORCH = "MultiheadAttention"
"""The layer of torch's own that writes attention out where its probabilities are asked for."""

VIEWS = frozenset({
    "view", "_unsafe_view", "reshape", "_reshape_alias", "expand", "permute", "transpose", "t", "squeeze", "unsqueeze",
})  # fmt: skip
KEPT_SHAPE = frozenset({
    "mul", "div", "add", "sub", "masked_fill", "where", "_to_copy", "clone", "copy", "native_dropout", "empty_like",
    "bernoulli",
})  # fmt: skip
"""What may stand between the products beside the softmax: scales, masks, casts and dropout."""
_SCALING = ("mul", "div")
EMPTY = "aten.empty"

Site = tuple[str | None, int]
"""``file:line`` of a product, and how many elements it makes."""


@dataclass(frozen=True, slots=True)
class Attention:
    """A product of queries and keys, a softmax over the keys, a product with the values."""

    scores: Op
    softmax: Op
    sizes: tuple[int, int]
    """Queries and keys."""
    matrices: tuple[int, ...]
    """Storages of scores, probabilities and what lies between, forward."""
    scalings: tuple[Op, ...]
    """What scaled the queries or the keys before, for this product alone."""
    summand: Op | None
    """What made an empty tensor that the product adds nothing of."""
    dropped: bool
    """Whether a dropout lies between softmax and values."""
    otherwise: Op | None = None
    """An op that uses the matrices for something else; a fused call has none to give."""
    returned: bool = False
    """Whether the model returns them."""

    @property
    def inside_of_sdpa(self) -> bool:
        """Return whether it is torch's own math path, for which `scaled_dot_product_attention` was called."""
        return base_name(self.softmax.name) == "_safe_softmax"


def attentions(trace: Trace) -> list[Attention]:
    """Return the attention of the first step's forward pass that is computed by products and a softmax, in its
    order."""
    return list(_Search(trace).found())


class _Search:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._forward = [op for op in trace.ops if op.phase == "forward" and op.step == 0]
        self._readers = readers_of(self._forward)

    def found(self) -> Iterator[Attention]:
        for op in self._forward:
            if base_name(op.name) not in SOFTMAX or not op.writes:
                continue
            shape = self._trace.storages[op.writes[0]].shape
            if len(shape) < 3 or min(shape[-2:]) < SHORTEST:
                continue
            scores = self._scores_of(op, elements(self._trace.storages[op.writes[0]]))
            attention = self._followed(scores, op) if scores is not None else None
            if attention is not None:
                yield attention

    def _scores_of(self, softmax: Op, size: int) -> Op | None:
        """Return the product that a softmax reads, scales and masks apart."""
        op = softmax
        for _ in range(12):
            whole = [self._trace.storages[operand.storage] for operand in op.reads]
            makers = [s.op for s in whole if s.op is not None and s.op < op.index and elements(s) == size]
            if not makers:
                return None
            made_by = [self._trace.ops[maker] for maker in dict.fromkeys(makers)]
            product = next((one for one in made_by if base_name(one.name) in PRODUCTS), None)
            if product is not None:
                return product
            op = made_by[0]
            if base_name(op.name) not in KEPT_SHAPE:
                return None
        return None

    def _followed(self, scores: Op, softmax: Op) -> Attention | None:
        """Follow everything that reads the matrices, up to the product with the values; None where there is none."""
        matrices, waiting = dict.fromkeys(scores.writes), [*scores.writes]
        seen: set[int] = set()
        otherwise, ended, dropped = list[Op](), False, False
        while waiting:
            for op in self._readers.get(waiting.pop(0), ()):
                if op.index in seen or op.index <= scores.index:
                    continue
                seen.add(op.index)
                name = base_name(op.name)
                if name in PRODUCTS and op.index > softmax.index and op.reads[-2].storage in matrices:
                    ended = True
                elif name in VIEWS or name in KEPT_SHAPE or name in SOFTMAX:
                    dropped = dropped or (name in ("native_dropout", "bernoulli") and op.index > softmax.index)
                    new = [storage for storage in op.writes if storage not in matrices]
                    matrices |= dict.fromkeys(new)
                    waiting += new
                else:
                    otherwise.append(op)
        if not ended:
            return None
        returned = any(view.storage in matrices for one in self._trace.returned for view in one.tensors)
        sizes = self._trace.storages[softmax.writes[0]].shape[-2:]
        first = min(otherwise, key=lambda op: op.index, default=None)
        return Attention(
            scores, softmax, (sizes[0], sizes[1]), tuple(matrices), tuple(self._scalings(scores)),
            self._summand(scores), dropped, first, returned,
        )  # fmt: skip

    def _summand(self, scores: Op) -> Op | None:
        given = self._trace.storages[scores.reads[0].storage]
        maker = self._trace.ops[given.op] if len(scores.reads) > 2 and given.op is not None else None
        alone = len(self._readers.get(given.id, ())) == 1
        return maker if maker is not None and alone and maker.name.startswith(EMPTY) else None

    def _scalings(self, scores: Op) -> Iterator[Op]:
        for operand in scores.reads[-2:]:
            storage = self._trace.storages[operand.storage]
            while storage.op is not None:
                maker = self._trace.ops[storage.op]
                alone = {op.index for op in self._readers.get(storage.id, ()) if base_name(op.name) not in VIEWS}
                large = [self._trace.storages[one.storage] for one in maker.reads]
                large = [one for one in large if elements(one) > 1]
                if len(alone) > 1 or len(large) != 1 or maker.phase != "forward":
                    break
                if base_name(maker.name) in _SCALING and maker.writes[0] == storage.id:
                    yield maker
                    break
                if base_name(maker.name) != "clone":
                    break
                storage = large[0]


def site(trace: Trace, op: Op) -> Site:
    """Return what identifies an op in another recording of the step: its line, and how much it makes."""
    return op.where, elements(trace.storages[op.writes[0]])


def elements(storage: Storage) -> int:
    """Return the number of elements of the first tensor on a storage."""
    return math.prod(storage.shape)
