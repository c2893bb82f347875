"""Temporaries of indexing, repeating and embedding bags on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memplan.trace.semantics.cpu.scalar_operands import of_number
from memplan.trace.semantics.layout import bytes_of, copied

Formula = Callable[[tuple[Any, ...], dict[str, Any], Any], int]
_INTEGER = 8
_REDUCED = (torch.bfloat16, torch.float16)


def long_indices(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """TensorAdvancedIndexing.cpp, ensure_nonempty and the like: indices of int32 as int64."""
    index = args[2]
    return 0 if index.dtype is torch.int64 else _INTEGER * index.numel()


def by_index(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """ScatterGatherKernel.cpp, create_acc_buffer: reduced precision is gathered and scattered in float32, all of what
    is written."""
    buffer = 4 * result.numel() if result.dtype in _REDUCED and args[2].numel() else 0
    return long_indices(args, kwargs, result) + buffer


def scatter_reduce(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """TensorAdvancedIndexing.cpp, scatter_reduce_two: of a mean how many elements each is of, which are counted as
    elements are added up."""
    x, source, reduction = args[0], args[3], args[4]
    taken = by_index(args, kwargs, result)
    if reduction != "mean":
        return taken
    none = of_number(0, x.dtype) + x.numel()
    return max(taken, bytes_of(source) + bytes_of(x) + max(taken, none))


def index_add(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """TensorAdvancedIndexing.cpp, index_add_cpu_out: the index in order; reduced precision in float32, except for
    vectors."""
    return copied(args[2]) + (4 * result.numel() if result.dtype in _REDUCED and result.dim() > 1 else 0)


def index_select(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """TensorAdvancedIndexing.cpp, index_select_out_cpu_: the index in order."""
    return copied(args[2])


def index_reduce(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """TensorAdvancedIndexing.cpp, index_reduce_func_impl: the index in order; how many elements each mean
    is of; of a vector a copy."""
    x, source, reduction = args[0], args[3], args[4]
    if reduction != "mean":
        return copied(args[2]) + (bytes_of(x) if x.dim() < 2 else 0)
    counting = bytes_of(source) + index_add(args, kwargs, result) if x.dim() > 1 else 0
    return copied(args[2]) + bytes_of(x) + max(counting, of_number(0, x.dtype) + x.numel())


def repeat(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """TensorShape.cpp, repeat: the order of the dimensions as tensors of integers (movedim's of an unfolded result)."""
    dims = len(args[1])
    if 0 in args[1]:
        return 0
    return 4 * _INTEGER * dims if dims else _INTEGER


def unfold_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """UnfoldBackward.cpp: the positions along the dimension, where windows overlap."""
    gradient, sizes, dim, size, step = args[:5]
    return 0 if step >= size or not sizes else _INTEGER * ((gradient.shape[dim] - 1) * step + size)


def _clamped(indices: Any) -> int:
    return sum(bytes_of(index) for index in indices if index is not None)


def masked_index(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """TensorAdvancedIndexing.cpp, _unsafe_masked_index: clamped indices, what they give, and the mask negated."""
    return _clamped(args[2]) + bytes_of(result) + args[1].numel()


def masked_index_put(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """TensorAdvancedIndexing.cpp, _unsafe_masked_index_put_accumulate: the same, before the result is made."""
    mask, values = args[1], args[3]
    return _clamped(args[2]) + bytes_of(values) + max(0, mask.numel() - bytes_of(result))


def selected(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the mask as integers, to be counted, then, of a gradient that is not contiguous, places and their sums.

    Of a mask that is not known, everything counts as selected; where something is not, zeros are put behind what is,
    which is as much as the result.
    """
    gradient, mask = args[0], args[1]
    known = getattr(mask, "constant", None)
    count = mask.numel() if known is None else int(known.sum())
    left = (mask.numel() - count) * gradient.element_size()
    direct = count == 0 or (gradient.is_contiguous() and mask.is_contiguous())
    places = 0 if direct else 2 * _INTEGER * gradient.numel() - left
    return max(_INTEGER * (1 + mask.numel()) - bytes_of(result), places, bytes_of(result))


def normal(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """DistributionTemplates.h, CHECK_NORMAL_TENSOR_STD: the smallest deviation is compared with zero."""
    deviation = args[1]
    return deviation.element_size() + of_number(0, deviation.dtype) + 1


def _bag_of_each(indices: torch.Tensor) -> int:
    return (indices.numel() + 1) * indices.element_size()


def bag_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """EmbeddingBag.cpp, _embedding_bag_dense_backward_cpu: bags of the indices (which no sum has kept), these sorted, a
    copy of the gradient; and weights in that order. Of a maximum, a row of the gradient and its places at a time."""
    gradient, indices, _, bags, _, places, _, _, mode = args[:9]
    weights = args[10] if len(args) > 10 else None
    if mode == _MAX:
        return copied(gradient) + bytes_of(places) + bytes_of(gradient) + _INTEGER * gradient.shape[0]
    made = 0 if bags.numel() or not indices.numel() else _bag_of_each(indices)
    integers = bytes_of(indices)
    ordered = integers + (0 if weights is None else bytes_of(weights))
    dense = copied(gradient) + integers + _INTEGER * indices.numel() + max(_INTEGER * indices.numel(), ordered)
    return made + dense


_MAX = 2


def bag_weights_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """EmbeddingBag.cpp, _embedding_bag_per_sample_weights_backward_cpu: bags of the indices, summed up."""
    indices, bags = args[2], args[4]
    return 0 if bags.numel() or not indices.numel() else 2 * _bag_of_each(indices)


def segments_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """SegmentReduce.cpp: the gradient contiguous."""
    return copied(args[0])


_SELECTED = "masked_scatter: in its gradient, every element was taken as selected: never more"


def granted(name: str, args: tuple[Any, ...]) -> str | None:
    """Return what is taken for granted of an op's values; None where nothing is."""
    of_mask = name == "aten.masked_scatter_backward.default" and getattr(args[1], "constant", None) is None
    return _SELECTED if of_mask else None


_BY_INDEX = (
    "gather.default",
    *(f"scatter{place}.{form}" for place in ("", "_") for form in ("src", "value", "reduce", "value_reduce")),
    *(f"scatter_add{place}.default" for place in ("", "_")),
)

FORMULAS: dict[str, Formula] = {
    **{f"aten.{name}": by_index for name in _BY_INDEX},
    **{f"aten.scatter_reduce{place}.two": scatter_reduce for place in ("", "_")},
    **{f"aten.index_add{place}.default": index_add for place in ("", "_")},
    **{f"aten.index_reduce{place}.default": index_reduce for place in ("", "_")},
    "aten.index_select.default": index_select,
    "aten.repeat.default": repeat,
    "aten.unfold_backward.default": unfold_backward,
    "aten._unsafe_masked_index.default": masked_index,
    "aten._unsafe_masked_index_put_accumulate.default": masked_index_put,
    "aten.masked_scatter_backward.default": selected,
    "aten.normal.Tensor_Tensor": normal,
    "aten.normal.float_Tensor": normal,
    "aten._embedding_bag_backward.default": bag_backward,
    "aten._embedding_bag_per_sample_weights_backward.default": bag_weights_backward,
    "aten._segment_reduce_backward.default": segments_backward,
}
