"""Temporaries of the CPU's kernels that select by value: masks, distinct elements.

Each formula names the file under ATen/native it comes from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memplan.trace.semantics.layout import bytes_of, copied

Formula = Callable[[tuple[Any, ...], dict[str, Any], Any], int]
_PLACE = 8
"""Bytes of an index."""
_GRAIN = 32768
"""Elements from which a kernel runs on several threads (TensorIterator.h)."""


def masked_select(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """TensorAdvancedIndexing.cpp, masked_select_out_impl_cpu: the mask is counted as integers before the result is
    made; unless the kernel goes through both in order, it is kept as integers beside their running sums."""
    x, mask = args
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    counted = _PLACE * (math.prod(shape) + 1)
    whole = x.shape == mask.shape and x.is_contiguous() and mask.is_contiguous()
    in_order = whole and (x.numel() < _GRAIN or torch.get_num_threads() == 1)
    return max(counted - bytes_of(result), 0 if in_order else 2 * _PLACE * math.prod(shape))


def distinct(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Unique.cpp, unique_cpu_sorted_template: sorted elements and their places; while sorting, the places once more."""
    x = args[0]
    if x.dtype is torch.bool:
        return 0
    counts = args[3] if len(args) > 3 else kwargs.get("return_counts", False)
    in_order = bytes_of(x) + _PLACE * x.numel()
    beside = in_order + (_PLACE * (result[0].numel() + 1) if counts else 0)
    return copied(x) + max(in_order + _PLACE * x.numel() - sum(map(bytes_of, result)), beside)


def distinct_rows(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Unique.cpp, _unique_dim_cpu_template: the rows in order, of a copy where they do not lie so."""
    x, dim = args[0], args[1]
    return bytes_of(x) + copied(x.movedim(dim, 0))


def indexed(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """IndexingUtils.h, expandTensors: a mask is turned into places, one for each of its dimensions."""
    x, indices = args[0], args[1]
    rest = x.numel() // max(1, math.prod(_indexed_sizes(x, indices)))
    return _places(indices, result.numel() // max(1, rest))


def index_put(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """TensorAdvancedIndexing.cpp, _index_put_impl_: the same; of one value without summing a mask is filled instead."""
    x, indices, values = args[0], args[1], args[2]
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if values.numel() == 1 and not accumulates and len(_masks(indices)) == len(indices) == 1:
        return 0
    rest = x.dim() - len(_indexed_sizes(x, indices))
    whole = values.dim() > rest and values.shape[0] != 1
    return _places(indices, values.shape[0] if whole else _largest(indices))


def _largest(indices: Sequence[Any]) -> int:
    """Return how many places masks select: as many as is known, else all there are."""
    masks = _masks(indices)
    if not masks:
        return 0
    known = getattr(masks[0], "constant", None)
    return masks[0].numel() if known is None else int(known.sum())


def _places(indices: Sequence[Any], selected: int) -> int:
    return sum(_PLACE * mask.dim() * selected for mask in _masks(indices))


def _masks(indices: Sequence[Any]) -> list[torch.Tensor]:
    return [one for one in indices if isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8)]


def _indexed_sizes(x: torch.Tensor, indices: Sequence[Any]) -> list[int]:
    """Return the sizes of the dimensions that are indexed."""
    sizes: list[int] = []
    at = 0
    masks = {id(mask) for mask in _masks(indices)}
    for one in indices:
        dims = one.dim() if id(one) in masks else 1
        if one is not None:
            sizes += x.shape[at : at + dims]
        at += dims
    return sizes


def masked_scatter(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """TensorAdvancedIndexing.cpp, masked_scatter__cpu: the source in order."""
    return copied(args[2])


FORMULAS: dict[str, Formula] = {
    "aten.masked_scatter.default": masked_scatter,
    "aten.masked_scatter_.default": masked_scatter,
    "aten.masked_select.default": masked_select,
    "aten._unique.default": distinct,
    "aten._unique2.default": distinct,
    "aten.unique_dim.default": distinct_rows,
    "aten.index.Tensor": indexed,
    "aten.index_put.default": index_put,
    "aten.index_put_.default": index_put,
    "aten._unsafe_index_put.default": index_put,
    "aten._index_put_impl_.default": index_put,
}
