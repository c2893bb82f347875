"""Derivative formulas that compute otherwise under a dispatch mode than without one, as without.

Source: torch/csrc/autograd/FunctionsManual.cpp, `areAnyTensorSubclassLike`, of torch 2.11, 2.13 and 2.15. Where the
form without a mode depends on values, the usual ones are taken: no zeros in a product, everything selected by a mask.
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
"""Of the arguments and the result of an op, each request by itself."""


@dataclass(frozen=True, slots=True)
class Form:
    """What stands for an op of a formula without a mode."""

    absent: bool = False
    """There is no such op: its result takes nothing."""
    beside: Bytes = lambda args, result: ()
    """Bytes that are there meanwhile, beside what the op makes; of what it takes by itself there is nothing."""
    granted: str | None = None
    """What is taken for granted of values."""


def _of_gradient(args: tuple[Any, ...], result: Any) -> tuple[int, ...]:
    """The zeros that are filled at the places of the largest elements, and the places as integers, to be counted."""
    return args[0].numel() * torch.get_default_dtype().itemsize, args[0].numel() * 8


def _of_zeros(args: tuple[Any, ...], result: Any) -> tuple[int, ...]:
    """Which elements along a dimension are zero, the same as integers, and how many these are."""
    count = result.numel()
    return count, 8 * count, 8 * count // result.shape[args[1] if len(args) > 1 else 0]


def _of_selection(args: tuple[Any, ...], result: Any) -> tuple[int, ...]:
    """TensorAdvancedIndexing.cpp, masked_select: the mask as integers, and their running sums."""
    return args[0].numel() * 8, args[0].numel() * 8


def _of_selection_on_card(args: tuple[Any, ...], result: Any) -> tuple[int, ...]:
    """cuda/IndexKernel.cpp, masked_select_out_cuda_impl: where the marked elements are, in each dimension."""
    return (result.numel() * max(1, result.dim()) * 8,)


def _turned(args: tuple[Any, ...], result: Any) -> tuple[int, ...]:
    """The running sums from behind: what is summed turned, and the sums, before these are turned."""
    size = result.numel() * result.element_size()
    return size, size


_ALL_FILLED = "masked_fill: of the gradient of what it fills with, every element was taken as filled: never more"
_ABSENT, _PLAIN = Form(absent=True), Form()
_EVENLY = {
    "aten.isnan.default": _ABSENT,
    "aten.logical_and.default": _ABSENT,
    "aten.logical_or_.default": _PLAIN,
    "aten.sum.default": Form(beside=_of_gradient),
    "aten.mul.Tensor": _PLAIN,
}
_LARGEST = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")
_WRITTEN_OUT = {"aten.logical_and.default": _ABSENT}
_LEFT_OUT = ("ones.default", "cat.default", "cumprod.default", "flip.default", "clone.default")
_PRODUCT = {f"aten.{name}": _ABSENT for name in _LEFT_OUT}
_OF_ZEROS = (
    *("ones.default", "cat.default", "prod.dim_int"),  # 2.11: a loop over the dimension
    "zeros.default", "masked_fill.Scalar", "bitwise_not.default", "max.dim", "zeros_like.default", "cumprod.default",
    "ne.Scalar", "sub.Scalar", "gather.default", "sum.dim_IntList", "new_zeros.default", "logical_and.default",
)  # fmt: skip
_RUNNING_PRODUCT: dict[str, Form | tuple[Form | None, ...]] = {
    **{f"aten.{name}": _ABSENT for name in _OF_ZEROS},
    **{f"aten.{name}": (None, _ABSENT) for name in ("mul.Tensor", "eq.Scalar")},  # the first is as it is
    **{f"aten.{name}": (_ABSENT, None) for name in ("cumsum.default", "where.self")},  # the last, the result
    "aten.stack.default": Form(beside=_turned),  # 2.11: the result of the loop
}
FORMS: Mapping[str, Mapping[str, Form | tuple[Form | None, ...]]] = {
    **dict.fromkeys(_LARGEST, _EVENLY),
    "ProdBackward0": _PRODUCT,
    "ProdBackward1": _PRODUCT | {"aten.cat.default": Form(absent=True, beside=_of_zeros)},
    "CumprodBackward0": _RUNNING_PRODUCT,
    "MaskedFillBackward1": {"aten.where.self": Form(beside=_of_selection, granted=_ALL_FILLED)},
}
"""By node of autograd and by op: of the op each time, or of its first call, the second and so on, None as it is."""
CARD_FORMS: Mapping[str, Mapping[str, Form | tuple[Form | None, ...]]] = {
    **FORMS,
    **dict.fromkeys(_LARGEST, _WRITTEN_OUT),
    "MaskedFillBackward1": {"aten.where.self": Form(beside=_of_selection_on_card, granted=_ALL_FILLED)},
}
"""The same of tensors on a card, where the gradient of a largest element is written out in either form."""
_OPS = frozenset(op for table in (FORMS, CARD_FORMS) for forms in table.values() for op in forms)
_NO_MEMORY = "aten._efficientzerotensor.default"
"""A gradient of which torch knows that it is zero."""


def form_of(
    op: str, notes: Sequence[Note], say: Callable[[str], None] | None = None, device: str = HOST
) -> Form | None:
    """Return what stands for an op that is called now, the last of the notes; None where it is as it is.

    ``say`` is told what is taken for granted; ``device`` is that of the op's results.
    """
    if op == _NO_MEMORY:
        return _ABSENT
    if op not in _OPS or not _torch.in_backward() or torch.is_grad_enabled():
        return None
    node = _torch.backward_node()
    table = CARD_FORMS if device == ON_CARD else FORMS
    form = None if node is None else table.get(node.name(), {}).get(op)
    if isinstance(form, tuple):
        form = form[min(_calls_before(op, notes), len(form) - 1)]
    if form is None or not _torch.called_by_engine():  # a hook of the user's
        return None
    if form.granted is not None and say is not None:
        say(form.granted)
    return form


def _calls_before(op: str, notes: Sequence[Note]) -> int:
    """Return how often the running node has called an op before."""
    before = 0
    for note in reversed(notes[:-1]):
        if note.sequence != notes[-1].sequence:
            break
        before += note.name == op
    return before
