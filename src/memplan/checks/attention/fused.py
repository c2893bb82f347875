"""The same step with the fused call in place of attention that is written out: recorded, so that its bytes are exact.

While the step is recorded again, kernels of ours stand above the products, in the dispatcher. The product of queries
and keys that is to go gives a stand-in for the scores instead; what scales, masks and drops of them is
remembered; the product with the values becomes the call. What the stand-in led to is left out of the recording.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # torch's own name for it

from memplan import _torch
from memplan._torch import dispatch
from memplan.checks.attention.einsum import arranged
from memplan.checks.attention.fused_call import Pending, call_of
from memplan.checks.attention.written import EMPTY, KEPT_SHAPE, SOFTMAX, VIEWS, Attention, site
from memplan.checks.op_names import base_name
from memplan.trace.recording.place import format_frame, user_frame
from memplan.trace.records import HOST, Storage
from memplan.trace.trace import Trace

_ATEN = torch.ops.aten
_STAND_IN = "aten.empty_permuted.default"
"""Nothing else makes tensors so: a stand-in is known by it, wherever it is made."""

Kernel = Callable[..., Any]


class Fusing:
    """Puts the fused call where attention is written out, for a recording.

    Args:
        trace: the recorded step.
        found: the attention to replace.
        on_card: whether the step is recorded for a card.
        weights: whether torch's own layers are to be asked for no probabilities.
    """

    def __init__(self, trace: Trace, found: Sequence[Attention], *, on_card: bool, weights: bool = False) -> None:
        self._sites = {site(trace, one.scores) for one in found}
        self._scalings = {site(trace, op) for one in found for op in one.scalings}
        self._summands = {site(trace, one.summand) for one in found if one.summand is not None}
        self._sizes = {size for _, size in self._sites | self._scalings}
        self._on_card, self._weights = on_card, weights
        self._known: dict[int, tuple[torch.Tensor, Pending]] = {}
        self._calling = False
        self._begun = self._ended = 0
        self._spoiled = False
        self.reasons: list[str] = []
        """Why the CPU's fused kernel does not take a call, for those that it does not take."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Enter it around the recording."""
        with ExitStack() as stack:
            stack.enter_context(dispatch.overridden(self._kernels(), dispatch.AUTOGRAD_CPU))
            if self._weights:
                call = F.multi_head_attention_forward
                without = lambda *args, **kwargs: call(*args, **{**kwargs, "need_weights": False})  # noqa: E731
                stack.enter_context(_torch.patched(F, multi_head_attention_forward=without))
            try:
                yield
            finally:
                self._known.clear()

    def without_matrices(self, trace: Trace) -> Trace | None:
        """Return the recording without the stand-ins and all that was made of them.

        None where something else was made of them, or no fused call could be put in their place.
        """
        if self._begun != self._ended or self._spoiled or (self._sites and not self._begun):
            return None
        gone, ops = set[int](), set[int]()
        for op in trace.ops:
            stand_in = op.name == _STAND_IN or (op.name.startswith(EMPTY) and site(trace, op) in self._summands)
            if stand_in or any(operand.storage in gone for operand in op.reads):
                name = base_name(op.name)
                if not (stand_in or name in VIEWS or name in KEPT_SHAPE or name in SOFTMAX):
                    return None
                ops.add(op.index)
                gone.update(op.writes)
        return replace(trace, storages=tuple(_nothing(s) if s.op in ops else s for s in trace.storages))

    # -- the kernels

    def _kernels(self) -> dict[str, Kernel]:
        kernels: dict[str, Kernel] = {
            "matmul": lambda a, b: self._product(_ATEN.matmul.default, a, b),
            "bmm": lambda a, b: self._product(_ATEN.bmm.default, a, b),
            "baddbmm": self._product_and_sum,
            "einsum": self._einsum,
        }
        on_scores: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(("add.Tensor", "add_.Tensor", "sub.Tensor", "sub_.Tensor"), self._added),
            **{f"masked_fill{end}": self._filled for end in (".Scalar", "_.Scalar", ".Tensor", "_.Tensor")},
            **dict.fromkeys(("_softmax", "_to_copy", "clone"), self._same),
            "mul.Tensor": self._scaled, "div.Tensor": self._scaled,
            "where.self": self._where,
            "native_dropout": self._native_dropout,
        }  # fmt: skip
        kernels |= {name: self._on_scores(_overload(name), handle) for name, handle in on_scores.items()}
        if not self._on_card:  # there the recording itself stands above it
            kernels["dropout"] = self._dropout
        return kernels

    def _on_scores(self, op: Any, handle: Callable[..., Any]) -> Kernel:
        """Return a kernel that hands an op on stand-ins to a method, and runs any other op unchanged."""

        def interposed(*args: Any, **kwargs: Any) -> Any:
            pending = self._of(*args)
            if pending is not None:
                return handle(pending, op, *args, **kwargs)
            if handle == self._scaled and self._is_at(self._scalings, _size(args[0])) and _size(args[1]) == 1:
                return _ATEN.alias.default(args[0])  # the call scales by itself
            return dispatch.whole(op, *args, **kwargs)

        return interposed

    def _of(self, *tensors: Any) -> Pending | None:
        """Return the scores that one of these goes back to."""
        if not self._known:
            return None
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                found = self._known.get(_torch.storage_key(tensor.untyped_storage()))
                if found is not None:
                    return found[1]
        return None

    def _keep(self, pending: Pending, result: torch.Tensor) -> torch.Tensor:
        self._known[_torch.storage_key(result.untyped_storage())] = (result, pending)
        return result

    def _stood_in(self, pending: Pending, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Return an op on a stand-in, without a graph: nothing is to be kept for it."""
        with torch.no_grad():
            return self._keep(pending, dispatch.whole(op, *args, **kwargs))

    def _is_at(self, sites: set[tuple[str | None, int]], size: int) -> bool:
        if size not in self._sizes or self._calling or (_torch.in_backward() and not torch.is_grad_enabled()):
            return False
        return (format_frame(user_frame()), size) in sites

    def _begin(self, left: torch.Tensor, right: torch.Tensor) -> tuple[Pending, torch.Tensor] | None:
        """Return a stand-in for a product of queries and keys, if it is one of those to go."""
        if left.dim() < 3 or right.dim() < 3:
            return None
        lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        shape = (*lead, left.shape[-2], right.shape[-1])
        if not self._is_at(self._sites, math.prod(shape)):
            return None
        pending = Pending([left, right.transpose(-2, -1)], shape)
        self._begun += 1
        with torch.no_grad():
            made = _ATEN.empty_permuted.default(shape, range(len(shape)), dtype=left.dtype)
        return pending, self._keep(pending, made)

    def _end(self, pending: Pending, values: torch.Tensor) -> torch.Tensor:
        self._ended += 1
        self._spoiled |= pending.spoiled
        self._calling = True
        try:
            call = call_of(pending, values)
            # the step itself would hold none of these for longer
            self._known = {key: known for key, known in self._known.items() if known[1] is not pending}
            pending.let_go()
            if not self._on_card:
                self.reasons += call.against_cpu()
            return call.run()
        finally:
            self._calling = False

    def _product(self, op: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        pending = self._of(left)
        if pending is not None and pending.normalized and not self._calling:
            return self._end(pending, right)
        begun = self._begin(left, right)
        if begun is not None:
            return begun[1]
        return dispatch.composite(op, left, right) if _torch.is_composite(op) else dispatch.whole(op, left, right)

    def _product_and_sum(self, added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **more: Any) -> Any:
        begun = self._begin(left, right)
        if begun is None:
            return dispatch.whole(_ATEN.baddbmm.default, added, left, right, **more)
        pending, scores = begun
        if more.get("beta", 1) != 0:
            pending.masked("add", added, scores.shape)
        return scores

    def _einsum(self, equation: str, tensors: list[torch.Tensor], **more: Any) -> torch.Tensor:
        pair = arranged(equation, tensors)
        if pair is not None:
            for one in (pair, pair.flipped):
                pending = self._of(one.left)
                if pending is not None and pending.normalized:
                    return one.result(self._end(pending, one.right))
            begun = self._begin(pair.left, pair.right)
            if begun is not None:
                return pair.result(begun[1])
        return dispatch.composite(_ATEN.einsum.default, equation, tensors, **more)

    def _scaled(self, pending: Pending, op: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        pending.spoiled |= _size(x) > 1 and _size(other) > 1
        return self._stood_in(pending, op, x, other)

    def _added(self, pending: Pending, op: Any, x: torch.Tensor, other: torch.Tensor, **more: Any) -> torch.Tensor:
        mask = other if self._of(x) is pending else x
        result = self._stood_in(pending, op, x, other, **more)
        if _size(mask) > 1:
            pending.masked("add", mask, result.shape)
        return result

    def _filled(self, pending: Pending, op: Any, x: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
        pending.masked("drop", mask, x.shape)
        return self._stood_in(pending, op, x, mask, value)

    def _where(self, pending: Pending, op: Any, keep: torch.Tensor, x: torch.Tensor, other: torch.Tensor) -> Any:
        result = self._stood_in(pending, op, keep, x, other)
        pending.masked("keep" if self._of(x) is pending else "drop", keep, result.shape)
        return result

    def _same(self, pending: Pending, op: Any, *args: Any, **more: Any) -> torch.Tensor:
        pending.normalized |= op is _ATEN._softmax.default
        return self._stood_in(pending, op, *args, **more)

    def _native_dropout(self, pending: Pending, op: Any, x: torch.Tensor, p: float, train: bool | None) -> Any:
        pending.dropout = max(pending.dropout, p)
        with torch.no_grad():
            result, mask = dispatch.whole(op, x, p, train)
        return self._keep(pending, result), mask

    def _dropout(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        pending = self._of(x)
        if pending is None:
            return dispatch.composite(_ATEN.dropout.default, x, p, train)
        pending.dropout = max(pending.dropout, p if train else 0.0)
        return x


def _nothing(storage: Storage) -> Storage:
    """Return a storage that takes nothing, neither on the CPU nor on a card."""
    return replace(storage, bytes=0, low=None, device=HOST)


def _size(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 1


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_ATEN, packet), overload or "default")
