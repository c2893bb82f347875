"""Temporaries of the CPU's kernels whose result size depends on values: masks, unique.

Each formula names its file under ATen/native.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from memplan.trace.semantics.kinds import Arguments, Formula, Keywords
from memplan.trace.semantics.layout import bytes_of, copy_bytes

_INDEX = 8
"""Bytes of an index."""
_GRAIN_SIZE = 32768
"""Elements from which a kernel runs on several threads (TensorIterator.h)."""


def masked_select(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp, masked_select_out_impl_cpu): the mask as int64, to be counted
    before the result is allocated; unless the kernel runs serially, the mask as int64 and its running sums."""
    x, mask = args
    numel = torch.broadcast_shapes(x.shape, mask.shape).numel()
    counting = _INDEX * (numel + 1) - bytes_of(result)
    contiguous = x.shape == mask.shape and x.is_contiguous() and mask.is_contiguous()
    serial = contiguous and (x.numel() < _GRAIN_SIZE or torch.get_num_threads() == 1)
    return max(counting, 0 if serial else 2 * _INDEX * numel)


def unique(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (Unique.cpp, unique_cpu_sorted_template): sorted elements and their permutation, and while
    sorting, before the results are allocated, a second permutation."""
    x = args[0]
    if x.dtype is torch.bool:
        return 0
    returns_counts = args[3] if len(args) > 3 else kwargs.get("return_counts", False)
    permutation = _INDEX * x.numel()
    while_sorting = bytes_of(x) + 2 * permutation - sum(map(bytes_of, result))
    counts = _INDEX * (result[0].numel() + 1) if returns_counts else 0
    return copy_bytes(x) + max(while_sorting, bytes_of(x) + permutation + counts)


def unique_dim(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (Unique.cpp, _unique_dim_cpu_template): the sorted rows, and a contiguous copy of the
    input."""
    x, dim = args[0], args[1]
    return bytes_of(x) + copy_bytes(x.movedim(dim, 0))


def index(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (IndexingUtils.h, expandTensors): each mask is converted to int64 indices, one tensor per
    dimension of the mask."""
    x, indices = args[0], args[1]
    slice_numel = x.numel() // max(1, math.prod(_indexed_sizes(x, indices)))  # elements per index
    selected = result.numel() // max(1, slice_numel)
    return _index_bytes(indices, selected)


def index_put(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp, _index_put_impl_): as `index`; one value without accumulation
    is a masked_fill."""
    x, indices, values = args[0], args[1], args[2]
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    is_single_mask = len(_masks(indices)) == len(indices) == 1
    if values.numel() == 1 and not accumulates and is_single_mask:
        return 0
    slice_dims = x.dim() - len(_indexed_sizes(x, indices))
    has_value_per_index = values.dim() > slice_dims and values.shape[0] != 1
    return _index_bytes(indices, values.shape[0] if has_value_per_index else _max_selected(indices))


def _max_selected(indices: Sequence[Any]) -> int:
    """Return how many elements the masks select: the exact number if it is known, else all."""
    masks = _masks(indices)
    if not masks:
        return 0
    constant = getattr(masks[0], "constant", None)  # the values of a fake tensor, if torch knows them
    return masks[0].numel() if constant is None else int(constant.sum())


def _index_bytes(indices: Sequence[Any], selected: int) -> int:
    """Return the bytes of the int64 indices that masks are converted to, if each selects this many elements."""
    return sum(_INDEX * mask.dim() * selected for mask in _masks(indices))


def _masks(indices: Sequence[Any]) -> list[torch.Tensor]:
    """Return the masks among the indices of an indexing op, which are tensors or None."""
    return [index for index in indices if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)]


def _indexed_sizes(x: torch.Tensor, indices: Sequence[Any]) -> list[int]:
    """Return the sizes of the indexed dimensions of ``x``: a mask indexes as many as it has, other tensors a single
    dimension."""
    sizes: list[int] = []
    dim = 0
    mask_ids = {id(mask) for mask in _masks(indices)}
    for index in indices:
        indexed = index.dim() if id(index) in mask_ids else 1
        if index is not None:
            sizes += x.shape[dim : dim + indexed]
        dim += indexed
    return sizes


def masked_scatter(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorAdvancedIndexing.cpp, masked_scatter__cpu): a contiguous copy of the source."""
    return copy_bytes(args[2])


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
