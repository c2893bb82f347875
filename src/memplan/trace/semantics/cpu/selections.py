"""Temporaries of the CPU's kernels whose result size depends on values: masks, unique.

Each formula names its file under ATen/native.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memplan.trace.semantics.kinds import Formula
from memplan.trace.semantics.layout import bytes_of, copied

_INDEX = 8
"""Bytes of an index."""
_GRAIN_SIZE = 32768
"""Elements from which a kernel runs on several threads (TensorIterator.h)."""


def masked_select(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp, masked_select_out_impl_cpu): the mask as int64, to be counted
    before the result is allocated; unless the kernel runs serially, the mask as int64 and its running sums."""
    x, mask = args
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    count_scratch = _INDEX * (math.prod(shape) + 1)
    contiguous = x.shape == mask.shape and x.is_contiguous() and mask.is_contiguous()
    serial = contiguous and (x.numel() < _GRAIN_SIZE or torch.get_num_threads() == 1)
    return max(count_scratch - bytes_of(result), 0 if serial else 2 * _INDEX * math.prod(shape))


def unique(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (Unique.cpp, unique_cpu_sorted_template): sorted elements and their permutation, and while
    sorting a second one."""
    x = args[0]
    if x.dtype is torch.bool:
        return 0
    counts = args[3] if len(args) > 3 else kwargs.get("return_counts", False)
    sorted_bytes = bytes_of(x) + _INDEX * x.numel()
    with_counts = sorted_bytes + (_INDEX * (result[0].numel() + 1) if counts else 0)
    return copied(x) + max(sorted_bytes + _INDEX * x.numel() - sum(map(bytes_of, result)), with_counts)


def unique_dim(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (Unique.cpp, _unique_dim_cpu_template): the sorted rows, and a contiguous copy of the
    input."""
    x, dim = args[0], args[1]
    return bytes_of(x) + copied(x.movedim(dim, 0))


def index(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (IndexingUtils.h, expandTensors): each mask is converted to int64 indices, one tensor per
    dimension of the mask."""
    x, indices = args[0], args[1]
    slice_numel = x.numel() // max(1, math.prod(_indexed_sizes(x, indices)))
    return _index_bytes(indices, result.numel() // max(1, slice_numel))


def index_put(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp, _index_put_impl_): as `index`; one value without accumulation
    is a masked_fill."""
    x, indices, values = args[0], args[1], args[2]
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if values.numel() == 1 and not accumulates and len(_masks(indices)) == len(indices) == 1:
        return 0
    slice_dims = x.dim() - len(_indexed_sizes(x, indices))
    value_per_index = values.dim() > slice_dims and values.shape[0] != 1
    return _index_bytes(indices, values.shape[0] if value_per_index else _max_selected(indices))


def _max_selected(indices: Sequence[Any]) -> int:
    """Return how many elements the masks select: the exact number if it is known, else all."""
    masks = _masks(indices)
    if not masks:
        return 0
    known = getattr(masks[0], "constant", None)
    return masks[0].numel() if known is None else int(known.sum())


def _index_bytes(indices: Sequence[Any], selected: int) -> int:
    """Return the bytes of the int64 indices that masks are converted to, if each selects this many elements."""
    return sum(_INDEX * mask.dim() * selected for mask in _masks(indices))


def _masks(indices: Sequence[Any]) -> list[torch.Tensor]:
    return [index for index in indices if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)]


def _indexed_sizes(x: torch.Tensor, indices: Sequence[Any]) -> list[int]:
    """Return the sizes of the indexed dimensions."""
    sizes: list[int] = []
    dim = 0
    masks = {id(mask) for mask in _masks(indices)}
    for index in indices:
        dims = index.dim() if id(index) in masks else 1
        if index is not None:
            sizes += x.shape[dim : dim + dims]
        dim += dims
    return sizes


def masked_scatter(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp, masked_scatter__cpu): a contiguous copy of the source."""
    return copied(args[2])


FORMULAS: dict[str, Formula] = {
    "aten.masked_scatter.default": masked_scatter,
    "aten.masked_scatter_.default": masked_scatter,
    "aten.masked_select.default": masked_select,
    "aten._unique.default": unique,
    "aten._unique2.default": unique,
    "aten.unique_dim.default": unique_dim,
    "aten.index.Tensor": index,
    "aten.index_put.default": index_put,
    "aten.index_put_.default": index_put,
    "aten._unsafe_index_put.default": index_put,
    "aten._index_put_impl_.default": index_put,
}
