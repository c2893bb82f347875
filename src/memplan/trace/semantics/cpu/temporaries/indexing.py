"""Temporaries of indexing and embedding bags on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from memplan.trace.semantics.kinds import Formula
from memplan.trace.semantics.layout import bytes_of, copied

_INT64 = 8
_REDUCED = (torch.bfloat16, torch.float16)


def long_indices(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp): int32 indices converted to int64."""
    index = args[2]
    return 0 if index.dtype is torch.int64 else _INT64 * index.numel()


def scatter_gather(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (ScatterGatherKernel.cpp, create_acc_buffer): a float32 buffer of the whole result in
    reduced precision."""
    buffer = 4 * result.numel() if result.dtype in _REDUCED and args[2].numel() else 0
    return long_indices(args, kwargs, result) + buffer


def index_add(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp, index_add_cpu_out): a contiguous index; float32 for reduced
    precision, except for vectors."""
    return copied(args[2]) + (4 * result.numel() if result.dtype in _REDUCED and result.dim() > 1 else 0)


def index_select(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp, index_select_out_cpu_): a contiguous index."""
    return copied(args[2])


def _clamped_indices(indices: Any) -> int:
    return sum(bytes_of(index) for index in indices if index is not None)


def masked_index(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp, _unsafe_masked_index): clamped indices, the gathered elements
    and the negated mask."""
    return _clamped_indices(args[2]) + bytes_of(result) + args[1].numel()


def masked_index_put(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp, _unsafe_masked_index_put_accumulate): as `masked_index`, before
    the result is allocated."""
    mask, values = args[1], args[3]
    return _clamped_indices(args[2]) + bytes_of(values) + max(0, mask.numel() - bytes_of(result))


def masked_scatter_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """The peak of three moments: masked_select of the gradient counts the mask as int64; unless both are contiguous, it
    computes positions and their running sums; zeros appended for unselected elements make a copy of the result.

    An unknown mask counts as all true.
    """
    gradient, mask = args[0], args[1]
    constant = getattr(mask, "constant", None)
    count = mask.numel() if constant is None else int(constant.sum())
    unselected = (mask.numel() - count) * gradient.element_size()
    serial = count == 0 or (gradient.is_contiguous() and mask.is_contiguous())
    positions = 0 if serial else 2 * _INT64 * gradient.numel() - unselected
    return max(_INT64 * (1 + mask.numel()) - bytes_of(result), positions, bytes_of(result))


def _offset2bag_bytes(indices: torch.Tensor) -> int:
    return (indices.numel() + 1) * indices.element_size()


def bag_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (EmbeddingBag.cpp, _embedding_bag_dense_backward_cpu): the bag of each index (not saved for
    a sum), sorted; a copy of the gradient; weights in sorted order. For a maximum, one row of the gradient and its
    positions at a time."""
    gradient, indices, _, bags, _, max_indices, _, _, mode = args[:9]
    weights = args[10] if len(args) > 10 else None
    if mode == _MAX:
        return copied(gradient) + bytes_of(max_indices) + bytes_of(gradient) + _INT64 * gradient.shape[0]
    bag_of_each = 0 if bags.numel() or not indices.numel() else _offset2bag_bytes(indices)
    index_bytes = bytes_of(indices)
    sorted_weights = index_bytes + (0 if weights is None else bytes_of(weights))
    sorting = copied(gradient) + index_bytes + _INT64 * indices.numel() + max(_INT64 * indices.numel(), sorted_weights)
    return bag_of_each + sorting


_MAX = 2


def bag_weights_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (EmbeddingBag.cpp, _embedding_bag_per_sample_weights_backward_cpu): the bag of each index,
    by running sums."""
    indices, bags = args[2], args[4]
    return 0 if bags.numel() or not indices.numel() else 2 * _offset2bag_bytes(indices)


_ALL_SELECTED = "masked_scatter: in its gradient, every element was taken as selected: never more"


def assumed(name: str, args: tuple[Any, ...]) -> str | None:
    """Return the assumption about an op's unknown values, as text for the report; None if there is none."""
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
