"""Temporaries of indexing and embedding bags on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from memplan.trace.semantics.kinds import Arguments, Formula, Keywords
from memplan.trace.semantics.layout import bytes_of, copy_bytes

_INT64 = 8
_REDUCED = (torch.bfloat16, torch.float16)


def long_indices(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp): int32 indices converted to int64."""
    index = args[2]
    return 0 if index.dtype is torch.int64 else _INT64 * index.numel()


def scatter_gather(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (ScatterGatherKernel.cpp, create_acc_buffer): a float32 buffer of the whole result in
    reduced precision; and the indices as int64."""
    index = args[2]
    buffer = 4 * result.numel() if result.dtype in _REDUCED and index.numel() else 0
    return long_indices(args, kwargs, result) + buffer


def index_add(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp, index_add_cpu_out): a contiguous index; float32 for reduced
    precision, except for vectors."""
    index = args[2]
    return copy_bytes(index) + (4 * result.numel() if result.dtype in _REDUCED and result.dim() > 1 else 0)


def index_select(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp, index_select_out_cpu_): a contiguous index."""
    index = args[2]
    return copy_bytes(index)


def _clamped_indices(indices: Any) -> int:
    """Return the bytes of clamped copies of the indices of an indexing op, which are tensors or None."""
    return sum(bytes_of(index) for index in indices if index is not None)


def masked_index(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp, _unsafe_masked_index): clamped indices, the gathered elements
    and the negated mask."""
    mask, indices = args[1:3]
    return _clamped_indices(indices) + bytes_of(result) + mask.numel()


def masked_index_put(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp, _unsafe_masked_index_put_accumulate): clamped indices, the
    masked values, and the negated mask, which is freed before the result is allocated."""
    mask, indices, values = args[1:4]
    return _clamped_indices(indices) + bytes_of(values) + max(0, mask.numel() - bytes_of(result))


def masked_scatter_backward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries: the peak of three moments.

    masked_select of the gradient counts the mask as int64; unless both are contiguous, it computes positions and their
    running sums; zeros appended for unselected elements make a copy of the result. An unknown mask counts as all true.
    """
    gradient, mask = args[0], args[1]
    constant = getattr(mask, "constant", None)  # the values of a fake tensor, if torch knows them
    selected = mask.numel() if constant is None else int(constant.sum())
    unselected_bytes = (mask.numel() - selected) * gradient.element_size()
    serial = selected == 0 or (gradient.is_contiguous() and mask.is_contiguous())
    positions = 0 if serial else 2 * _INT64 * gradient.numel() - unselected_bytes
    return max(_INT64 * (1 + mask.numel()) - bytes_of(result), positions, bytes_of(result))


def _offset2bag_bytes(indices: torch.Tensor, offset2bag: torch.Tensor) -> int:
    """Return the bytes of the bag of each index of an embedding bag, and an element more; 0 if the forward saved it
    (``offset2bag`` is not empty)."""
    return 0 if offset2bag.numel() or not indices.numel() else (indices.numel() + 1) * indices.element_size()


def bag_backward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (EmbeddingBag.cpp, _embedding_bag_dense_backward_cpu): the bag of each index (not saved for
    a sum), sorted; a copy of the gradient; weights in sorted order. For a maximum, one row of the gradient and its
    positions at a time."""
    gradient, indices, _, offset2bag, _, max_indices, _, _, mode = args[:9]
    weights = args[10] if len(args) > 10 else None
    if mode == _MAX:
        return copy_bytes(gradient) + bytes_of(max_indices) + bytes_of(gradient) + _INT64 * gradient.shape[0]
    sorted_indices, permutation = bytes_of(indices), _INT64 * indices.numel()
    sorted_bags_and_weights = bytes_of(indices) + (0 if weights is None else bytes_of(weights))
    return (
        _offset2bag_bytes(indices, offset2bag)
        + copy_bytes(gradient)
        + sorted_indices
        + permutation
        + max(permutation, sorted_bags_and_weights)  # while sorting, and after it
    )


_MAX = 2


def bag_weights_backward(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (EmbeddingBag.cpp, _embedding_bag_per_sample_weights_backward_cpu): the bag of each index,
    by running sums."""
    indices, offset2bag = args[2], args[4]
    return 2 * _offset2bag_bytes(indices, offset2bag)


_ALL_SELECTED = "masked_scatter: in its gradient, every element was taken as selected: never more"


def assumed(name: str, args: tuple[Any, ...]) -> str | None:
    """Return the assumption about unknown values that op ``name`` reads, as text for the report; None if there is
    none."""
    unknown_mask = name == "aten.masked_scatter_backward.default" and getattr(args[1], "constant", None) is None
    return _ALL_SELECTED if unknown_mask else None


_SCATTER_GATHER = (
    "gather.default",
    *(f"scatter{place}.{form}" for place in ("", "_") for form in ("src", "value", "reduce", "value_reduce")),
    *(f"scatter_add{place}.default" for place in ("", "_")),
)

FORMULAS: dict[str, Formula] = {
    **{f"aten.{name}": scatter_gather for name in _SCATTER_GATHER},
    **{f"aten.scatter_reduce{place}.two": scatter_gather for place in ("", "_")},
    **{f"aten.index_add{place}.default": index_add for place in ("", "_")},
    "aten.index_select.default": index_select,
    "aten._unsafe_masked_index.default": masked_index,
    "aten._unsafe_masked_index_put_accumulate.default": masked_index_put,
    "aten.masked_scatter_backward.default": masked_scatter_backward,
    "aten._embedding_bag_backward.default": bag_backward,
    "aten._embedding_bag_per_sample_weights_backward.default": bag_weights_backward,
}
