"""Temporaries of derivative formulas that run other ops under a dispatch mode than in a real run.

Source: torch/csrc/autograd/FunctionsManual.cpp, `areAnyTensorSubclassLike`, of torch 2.11, 2.13 and 2.15. Where the
formula of a real run depends on values, the usual case is assumed: no zeros in a product, a mask that selects all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan.trace.recording.ledger import Note
from memplan.trace.records import HOST, ON_CARD

Bytes = Callable[[tuple[Any, ...], Any], tuple[int, ...]]
"""(arguments, result) of an op -> bytes of each of its temporaries."""


@dataclass(frozen=True, slots=True)
class Form:
    """Allocations of a real run in place of an op that a derivative formula runs only under a dispatch mode."""

    absent: bool = False
    """Whether the real run has no such op, so that its result has no memory."""
    temporaries: Bytes = lambda args, result: ()
    """Temporaries of the op, which replace its usual workspaces."""
    assumption: str | None = None
    """Text of an assumption about values."""


def _mask_of_largest(args: tuple[Any, ...], result: Any) -> tuple[int, ...]:
    """Return the bytes of temporaries that share a gradient among equal largest elements: their mask in the default
    dtype, and the mask as int64, to count them."""
    return args[0].numel() * torch.get_default_dtype().itemsize, args[0].numel() * 8


def _zero_count(args: tuple[Any, ...], result: Any) -> tuple[int, ...]:
    """Return the bytes of temporaries of a product's gradient: the mask of zeros, the mask as int64, and its sum along
    the dimension."""
    count = result.numel()
    dim = args[1] if len(args) > 1 else 0
    return count, 8 * count, 8 * count // result.shape[dim]


def _masked_select(args: tuple[Any, ...], result: Any) -> tuple[int, ...]:
    """TensorAdvancedIndexing.cpp, masked_select: the mask as integers, and its cumulative sum."""
    return args[0].numel() * 8, args[0].numel() * 8


def _masked_select_on_card(args: tuple[Any, ...], result: Any) -> tuple[int, ...]:
    """cuda/IndexKernel.cpp, masked_select_out_cuda_impl: an index tensor for each dimension."""
    return (result.numel() * max(1, result.dim()) * 8,)


def _reversed_cumsum(args: tuple[Any, ...], result: Any) -> tuple[int, ...]:
    """Return the bytes of temporaries of a reverse cumulative sum: the flipped input, and the sums before they are
    flipped back."""
    size = result.numel() * result.element_size()
    return size, size


_ALL_FILLED = "masked_fill: of the gradient of what it fills with, every element was taken as filled: never more"
_ABSENT, _PLAIN = Form(absent=True), Form()
_SHARED_EVENLY = {
    "aten.isnan.default": _ABSENT,
    "aten.logical_and.default": _ABSENT,
    "aten.logical_or_.default": _PLAIN,
    "aten.sum.default": Form(temporaries=_mask_of_largest),
    "aten.mul.Tensor": _PLAIN,
}
_LARGEST = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")
_ON_CARD = {"aten.logical_and.default": _ABSENT}
_PROD_ABSENT = ("ones.default", "cat.default", "cumprod.default", "flip.default", "clone.default")
_PROD = {f"aten.{name}": _ABSENT for name in _PROD_ABSENT}
_CUMPROD_ABSENT = (
    *("ones.default", "cat.default", "prod.dim_int"),  # 2.11: a loop over the dimension
    "zeros.default", "masked_fill.Scalar", "bitwise_not.default", "max.dim", "zeros_like.default", "cumprod.default",
    "ne.Scalar", "sub.Scalar", "gather.default", "sum.dim_IntList", "new_zeros.default", "logical_and.default",
)  # fmt: skip
_CUMPROD: dict[str, Form | tuple[Form | None, ...]] = {
    **{f"aten.{name}": _ABSENT for name in _CUMPROD_ABSENT},
    **{f"aten.{name}": (None, _ABSENT) for name in ("mul.Tensor", "eq.Scalar")},  # the first is as it is
    **{f"aten.{name}": (_ABSENT, None) for name in ("cumsum.default", "where.self")},  # the last, the result
    "aten.stack.default": Form(temporaries=_reversed_cumsum),  # 2.11: the result of the loop
}
FORMS: Mapping[str, Mapping[str, Form | tuple[Form | None, ...]]] = {
    **dict.fromkeys(_LARGEST, _SHARED_EVENLY),
    "ProdBackward0": _PROD,
    "ProdBackward1": _PROD | {"aten.cat.default": Form(absent=True, temporaries=_zero_count)},
    "CumprodBackward0": _CUMPROD,
    "MaskedFillBackward1": {"aten.where.self": Form(temporaries=_masked_select, assumption=_ALL_FILLED)},
}
"""Autograd node -> op -> the Form of all calls, or a tuple of Forms for the first, second, ... call; None: the op runs
unchanged."""
CARD_FORMS: Mapping[str, Mapping[str, Form | tuple[Form | None, ...]]] = {
    **FORMS,
    **dict.fromkeys(_LARGEST, _ON_CARD),
    "MaskedFillBackward1": {"aten.where.self": Form(temporaries=_masked_select_on_card, assumption=_ALL_FILLED)},
}
"""`FORMS` on CUDA, where gradients of largest elements differ under a mode by a single op."""
_OPS = frozenset(op for table in (FORMS, CARD_FORMS) for forms in table.values() for op in forms)
_NO_MEMORY = "aten._efficientzerotensor.default"
"""A gradient known to be zero, without memory."""


def form_of(
    op: str, notes: Sequence[Note], report: Callable[[str], None] | None = None, device: str = HOST
) -> Form | None:
    """Return the allocations of a real run for the running op (the last of ``notes``); None if it runs the same op.

    ``report`` gets the text of the assumption, if any; ``device`` is the device of the op's results.
    """
    if op == _NO_MEMORY:
        return _ABSENT
    if op not in _OPS or not _torch.in_backward() or torch.is_grad_enabled():
        return None
    node = _torch.backward_node()
    table = CARD_FORMS if device == ON_CARD else FORMS
    form = None if node is None else table.get(node.name(), {}).get(op)
    if isinstance(form, tuple):  # of each call of this op by the node, the last also of all further calls
        form = form[min(_calls_before(op, notes), len(form) - 1)]
    if form is None or not _torch.called_by_engine():  # called by a hook, not by the formula
        return None
    if form.assumption is not None and report is not None:
        report(form.assumption)
    return form


def _calls_before(op: str, notes: Sequence[Note]) -> int:
    """Return the number of earlier calls of an op by the running autograd node, that of the last note."""
    count = 0
    for note in reversed(notes[:-1]):
        if note.sequence != notes[-1].sequence:  # of another node
            break
        count += note.name == op
    return count
