"""Record a step with `scaled_dot_product_attention` in place of attention that is written out, for its exact bytes.

During the recording, Python kernels override the ops of attention in the dispatcher. The product of queries and keys
returns a placeholder for the scores instead; scaling, masks and dropout on it are noted; the product with the values
becomes the fused call. Placeholders and what is computed from them are removed from the recording.
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
from memplan.trace.records import HOST
from memplan.trace.trace import Trace

_ATEN = torch.ops.aten
_PLACEHOLDER = "aten.empty_permuted.default"
"""Nothing else in a step calls this op: placeholders are recognized by it."""

Kernel = Callable[..., Any]


class Fusing:
    """Replaces attention that is written out by the fused call, during a recording. ``on_card``: whether the step is
    recorded for a card. ``weights``: whether to call torch's own layers with ``need_weights=False``."""

    def __init__(self, trace: Trace, attention: Sequence[Attention], *, on_card: bool, weights: bool = False) -> None:
        """``attention``: what `trace` computes by single ops, and a fused call is to compute."""
        self._score_sites = {site(trace, block.scores) for block in attention}
        """(``file:line``, elements of the result) of each product of queries and keys."""
        self._scaling_sites = {site(trace, op) for block in attention for op in block.scalings}
        """(``file:line``, elements of the result) of each scaling of queries or keys."""
        self._summand_sites = {site(trace, block.summand) for block in attention if block.summand is not None}
        """(``file:line``, elements) of each empty tensor that ``baddbmm`` gets as its summand."""
        self._sizes = {size for _, size in self._score_sites | self._scaling_sites}
        """Elements of the products' and scalings' results: ops with other sizes are passed on at once."""
        self._on_card, self._weights = on_card, weights
        """Whether the step is recorded for a card; whether torch's own layers are called with need_weights=False."""
        self._placeholders: dict[int, tuple[torch.Tensor, Pending]] = {}
        """Storage of a placeholder, or of a tensor computed from it -> that tensor, and the scores it stands for."""
        self._calling = False
        """Whether a fused call is running."""
        self._started = self._fused = 0
        """How many products of queries and keys were replaced by placeholders, and how many of these led to a fused
        call."""
        self._unsupported = False
        """Whether any of them did what a fused call does not compute."""
        self.reasons: list[str] = []
        """Why the CPU's fused kernel refuses a call, for calls that it refuses."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace attention within this context: the recording's."""
        with ExitStack() as stack:
            stack.enter_context(dispatch.overridden(self._kernels(), dispatch.AUTOGRAD_CPU))
            if self._weights:
                call = F.multi_head_attention_forward
                without = lambda *args, **kwargs: call(*args, **(kwargs | {"need_weights": False}))  # noqa: E731
                stack.enter_context(_torch.patched(F, multi_head_attention_forward=without))
            try:
                yield
            finally:
                self._placeholders.clear()

    def without_matrices(self, trace: Trace) -> Trace | None:
        """Return the recorded step with its placeholders, and what is computed from them, at 0 bytes. None if no
        attention was replaced, not all of it, or if another op reads a placeholder."""
        if self._started != self._fused or self._unsupported or (self._score_sites and not self._started):
            return None
        storages, ops = set[int](), set[int]()  # placeholders and what is computed from them; the ops that do so
        for op in trace.ops:
            is_summand = op.name.startswith(EMPTY) and site(trace, op) in self._summand_sites
            is_placeholder = op.name == _PLACEHOLDER or is_summand
            if is_placeholder or any(operand.storage in storages for operand in op.reads):
                name = base_name(op.name)
                if not (is_placeholder or name in VIEWS or name in KEPT_SHAPE or name in SOFTMAX):
                    return None
                ops.add(op.index)
                storages.update(op.writes)
        return replace(
            trace,
            storages=tuple(replace(s, bytes=0, low=None, device=HOST) if s.op in ops else s for s in trace.storages),
        )

    # -- the kernels

    def _kernels(self) -> dict[str, Kernel]:
        """Return the Python kernels that override torch's, by the op's name. Those of matrix products begin and end
        attention. The others act on the scores between the two products."""
        kernels: dict[str, Kernel] = {
            "matmul": lambda a, b: self._product(_ATEN.matmul.default, a, b),
            "bmm": lambda a, b: self._product(_ATEN.bmm.default, a, b),
            "baddbmm": self._baddbmm,
            "einsum": self._einsum,
        }
        on_scores: dict[str, Callable[..., Any]] = {
            **dict.fromkeys(("add.Tensor", "add_.Tensor", "sub.Tensor", "sub_.Tensor"), self._add),
            **{f"masked_fill{end}": self._masked_fill for end in (".Scalar", "_.Scalar", ".Tensor", "_.Tensor")},
            **dict.fromkeys(("_softmax", "_to_copy", "clone"), self._pass_through),
            "mul.Tensor": self._scale, "div.Tensor": self._scale,
            "where.self": self._where,
            "native_dropout": self._native_dropout,
        }  # fmt: skip
        kernels |= {name: self._for_scores(_overload(name), method) for name, method in on_scores.items()}
        if not self._on_card:  # a recording for a card overrides dropout itself
            kernels["dropout"] = self._dropout
        return kernels

    def _for_scores(self, op: Any, method: Callable[..., Any]) -> Kernel:
        """Return a kernel that calls ``method(scores, op, *args)`` if an operand is a placeholder of scores. Otherwise
        the kernel runs the op unchanged, except for a scaling of queries or keys: it is left out."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            pending = self._pending(*args)
            if pending is not None:
                return method(pending, op, *args, **kwargs)
            scales_heads = method == self._scale and _size(args[1]) == 1
            if scales_heads and self._is_at(self._scaling_sites, _size(args[0])):
                return _ATEN.alias.default(args[0])  # the fused call scales by itself
            return dispatch.whole(op, *args, **kwargs)

        return kernel

    def _pending(self, *operands: Any) -> Pending | None:
        """Return the scores that the first placeholder among these operands stands for; None without a placeholder."""
        for operand in operands if self._placeholders else ():
            if isinstance(operand, torch.Tensor):
                key = _torch.storage_key(operand.untyped_storage())
                if key in self._placeholders:
                    _, pending = self._placeholders[key]
                    return pending
        return None

    def _register(self, pending: Pending, placeholder: torch.Tensor) -> torch.Tensor:
        """Remember that this tensor is a placeholder for these scores, and return it."""
        self._placeholders[_torch.storage_key(placeholder.untyped_storage())] = (placeholder, pending)
        return placeholder

    def _run_without_graph(self, pending: Pending, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an op on a placeholder under no_grad, so that autograd saves nothing; its result is a placeholder."""
        with torch.no_grad():
            return self._register(pending, dispatch.whole(op, *args, **kwargs))

    def _is_at(self, sites: set[tuple[str | None, int]], size: int) -> bool:
        """Return whether the op that runs is at one of the sites: it has the ``file:line`` of one, and ``size``
        elements in its result."""
        in_derivative = _torch.in_backward() and not torch.is_grad_enabled()  # recomputed forward ops have grad enabled
        if size not in self._sizes or self._calling or in_derivative:  # before the frame is looked for, which is slow
            return False
        return (format_frame(user_frame()), size) in sites

    def _start(self, left: torch.Tensor, right: torch.Tensor) -> tuple[Pending, torch.Tensor] | None:
        """If ``left @ right`` is a product of queries and keys to replace, return its scores and their placeholder."""
        if left.dim() < 3 or right.dim() < 3:
            return None
        lead = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        shape = (*lead, left.shape[-2], right.shape[-1])
        if not self._is_at(self._score_sites, math.prod(shape)):
            return None
        pending = Pending([left, right.transpose(-2, -1)], shape)
        self._started += 1
        with torch.no_grad():
            placeholder = _ATEN.empty_permuted.default(shape, range(len(shape)), dtype=left.dtype)
        return pending, self._register(pending, placeholder)

    def _fuse(self, pending: Pending, values: torch.Tensor) -> torch.Tensor:
        """Return what the product of these probabilities with the values would give, by the fused call."""
        self._fused += 1
        self._unsupported |= pending.unsupported
        self._calling = True
        try:
            call = call_of(pending, values)
            # drop the references first: a step with the fused call does not keep these tensors alive
            self._placeholders = {key: entry for key, entry in self._placeholders.items() if entry[1] is not pending}
            pending.release()
            if not self._on_card:
                self.reasons += call.cpu_refusals()
            return call.run()
        finally:
            self._calling = False

    def _product(self, op: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Kernel of matmul and bmm: the fused call for probabilities times values, a placeholder for queries times
        keys, and the unchanged op for other products."""
        pending = self._pending(left)
        if pending is not None and pending.normalized and not self._calling:
            return self._fuse(pending, right)
        started = self._start(left, right)
        if started is not None:
            _, placeholder = started
            return placeholder
        return dispatch.composite(op, left, right) if _torch.is_composite(op) else dispatch.whole(op, left, right)

    def _baddbmm(self, summand: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **kwargs: Any) -> Any:
        """Kernel of baddbmm: a placeholder for queries times keys, with the summand as a mask unless ``beta`` is 0."""
        started = self._start(left, right)
        if started is None:
            return dispatch.whole(_ATEN.baddbmm.default, summand, left, right, **kwargs)
        pending, scores = started
        if kwargs.get("beta", 1) != 0:
            pending.add_mask("add", summand, scores.shape)
        return scores

    def _einsum(self, equation: str, tensors: list[torch.Tensor], **kwargs: Any) -> torch.Tensor:
        """Kernel of einsum: as `_product` if the equation is a batched product, in either order of its operands."""
        product = arranged(equation, tensors)
        if product is not None:
            for pair in (product, product.flipped):
                pending = self._pending(pair.left)
                if pending is not None and pending.normalized:
                    return pair.result(self._fuse(pending, pair.right))
            started = self._start(product.left, product.right)
            if started is not None:
                _, placeholder = started
                return product.result(placeholder)
        return dispatch.composite(_ATEN.einsum.default, equation, tensors, **kwargs)

    def _scale(self, pending: Pending, op: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Kernel of products of the scores with a number; the fused call cannot scale by a tensor of more elements."""
        pending.unsupported |= _size(x) > 1 and _size(other) > 1
        return self._run_without_graph(pending, op, x, other)

    def _add(self, pending: Pending, op: Any, x: torch.Tensor, other: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Kernel of additions to the scores: the other operand is a mask (a number changes no softmax)."""
        mask = other if self._pending(x) is pending else x
        result = self._run_without_graph(pending, op, x, other, **kwargs)
        if _size(mask) > 1:
            pending.add_mask("add", mask, result.shape)
        return result

    def _masked_fill(self, pending: Pending, op: Any, x: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
        """Kernel of masked_fill on the scores: a mask of the scores to drop."""
        pending.add_mask("drop", mask, x.shape)
        return self._run_without_graph(pending, op, x, mask, value)

    def _where(self, pending: Pending, op: Any, condition: torch.Tensor, x: torch.Tensor, other: torch.Tensor) -> Any:
        """Kernel of ``where(condition, x, other)``, of which ``x`` or ``other`` are the scores: a mask."""
        result = self._run_without_graph(pending, op, condition, x, other)
        pending.add_mask("keep" if self._pending(x) is pending else "drop", condition, result.shape)
        return result

    def _pass_through(self, pending: Pending, op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Kernel of softmax, casts and copies of the scores."""
        pending.normalized |= op is _ATEN._softmax.default
        return self._run_without_graph(pending, op, *args, **kwargs)

    def _native_dropout(self, pending: Pending, op: Any, x: torch.Tensor, p: float, train: bool | None) -> Any:
        """Kernel of dropout on a card: on probabilities it becomes an argument of the fused call."""
        pending.dropout = max(pending.dropout, p)
        with torch.no_grad():
            result, mask = dispatch.whole(op, x, p, train)
        return self._register(pending, result), mask

    def _dropout(self, x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        """Kernel of dropout on the CPU: on probabilities it becomes an argument of the fused call."""
        pending = self._pending(x)
        if pending is None:
            return dispatch.composite(_ATEN.dropout.default, x, p, train)
        pending.dropout = max(pending.dropout, p if train else 0.0)
        return x


def _size(value: Any) -> int:
    """Return the elements of a tensor; 1 for a number."""
    return value.numel() if isinstance(value, torch.Tensor) else 1


def _overload(name: str) -> Any:
    """Return the aten op of a name such as ``add.Tensor`` or ``clone``."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(_ATEN, packet), overload or "default")
