"""Temporaries of the indexing, embedding, sorting and scanning kernels on CUDA."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.formula import Formula, nonzero
from memplan.trace.semantics.kinds import Temporary
from memplan.trace.semantics.layout import bytes_of, copied

_FEW_INDICES = 3072
_ROWS_PER_THREAD = 10
_SHORT_SORT = 4096
_LONG_SORT = 1_000_000
_FEW_SEGMENTS = 128
_INDEX = 8
_MAXIMUM = 2


def radix_sort_bytes(count: int, key: int, value: int, bits: int | None = None) -> int:
    """Bytes of temporary storage of CUB's radix sort of pairs, by the lowest ``bits`` of the keys (default: all): the
    second half of each double buffer if there are several passes of 8 bits.

    Source: cub/device/dispatch/dispatch_radix_sort.cuh, InvokeOnesweep, whose counters of bins and tiles, less than 4 %
    of that, are left out.
    """
    return count * (key + value) if (8 * key if bits is None else bits) > 8 else 0


def embedding(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[Temporary, ...]:
    """Temporaries (Embedding.cpp): a contiguous copy of the indices, if they are not."""
    return tuple(Temporary(size, first=True) for size in nonzero(copied(args[1])))


def embedding_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch
) -> tuple[int | Temporary, ...]:
    """Temporaries (Embedding.cu, EmbeddingBackwardKernel.cu): nothing up to 3072 indices, else a sort and sums by
    segment.

    Allocated before the result: contiguous copies of operands, the sorted indices and their original positions; during
    the sort also the unsorted positions and CUB's storage. Allocated after it: where each segment begins, three arrays
    of partial segments, the counts of both; and the largest, a float32 row per partial segment. There is one partial
    segment per ten indices and one per distinct row.
    """
    gradient, indices, rows, by_frequency = args[0], args[1], args[2], args[4]
    copies = tuple(Temporary(size, first=True) for size in nonzero(copied(indices), copied(gradient)))
    if indices.numel() <= _FEW_INDICES and not by_frequency:
        return copies
    return copies + _segment_sums(gradient, indices, rows, by_frequency)


def _segment_sums(
    gradient: torch.Tensor, indices: torch.Tensor, rows: int, by_frequency: bool
) -> tuple[int | Temporary, ...]:
    """Allocations of an embedding's gradient by sorted indices: see `embedding_backward`."""
    count, itemsize, accumulator = indices.numel(), indices.element_size(), max(4, gradient.element_size())
    segments = min(count, rows)
    partial = count // _ROWS_PER_THREAD + segments
    count_bytes = count * itemsize if by_frequency else 0
    segment_arrays = [count * itemsize, *[segments * itemsize] * 2, itemsize, itemsize, partial * itemsize]
    during_sort = count * itemsize, radix_sort_bytes(count, itemsize, itemsize)
    return (
        *(Temporary(size, first=True) for size in nonzero(count * itemsize, count * itemsize)),
        *(Temporary(size, first=True, until=0) for size in nonzero(*during_sort)),
        *nonzero(*segment_arrays, count_bytes, partial * gradient.shape[-1] * accumulator),
    )


def embedding_bag_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch
) -> tuple[int | Temporary, ...]:
    """Temporaries (EmbeddingBag.cu, embedding_bag_backward_cuda_sum_avg): those of
    `embedding_backward`, for any number of indices; none in mode max."""
    return _bag_gradient(args[0], args[1], args[5], args[6], args[7])


def _bag_gradient(
    gradient: torch.Tensor, indices: torch.Tensor, rows: int, by_frequency: bool, mode: int
) -> tuple[int | Temporary, ...]:
    copies = tuple(Temporary(size, first=True) for size in nonzero(copied(gradient)))
    return copies if mode == _MAXIMUM else copies + _segment_sums(gradient, indices, rows, by_frequency)


def embedding_bag_backward_by_offsets(
    args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch
) -> tuple[int | Temporary, ...]:
    """Temporaries (EmbeddingBag.cpp, _embedding_bag_backward_symint): the kernel of dense gradients. Sparse gradients:
    nothing."""
    if result.layout is not torch.strided:
        return ()
    return _bag_gradient(args[0], args[1], args[6], args[7], args[8])


def ctc_loss_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (LossCTC.cu, ctc_loss_backward_gpu_template): backward variables as large as the forward ones."""
    return nonzero(bytes_of(args[6]))


def index_put(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (Indexing.cu, index_put_with_sort_kernel): only used to accumulate values, or with deterministic
    algorithms.

    Four lists of 64-bit indices and the storage of their sort; the values expanded to the indexed shape; and a copy of
    the tensor if it is not contiguous or the indexed dimensions are not adjacent.
    """
    x, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not accumulate and not torch.are_deterministic_algorithms_enabled():
        return ()
    positions = [i for i, index in enumerate(indices) if index is not None]
    if not positions or any(indices[i].dtype in (torch.bool, torch.uint8) for i in positions):
        return ()
    count = torch.broadcast_shapes(*(indices[i].shape for i in positions)).numel()
    indexed_numel = count * prod(n for i, n in enumerate(x.shape) if i not in positions)
    nonadjacent = positions[-1] - positions[0] + 1 != len(positions)
    copy = bytes_of(x) if nonadjacent or not x.is_contiguous() else 0
    expanded_values = (
        indexed_numel * values.element_size() if values.numel() != indexed_numel or not values.is_contiguous() else 0
    )
    lists = [count * _INDEX] * 4
    inner = indexed_numel // max(1, count) if nonadjacent else prod(x.shape[positions[-1] + 1 :])
    bits = max(1, ((x.numel() - 1) // max(1, inner)).bit_length())
    return nonzero(*lists, radix_sort_bytes(count, _INDEX, _INDEX, bits), copy, expanded_values)


def _sort_temporaries(segments: int, length: int, size: int) -> tuple[int, ...]:
    """Allocations of sorting ``segments`` rows of ``length`` elements of ``size`` bytes, with their positions.

    Source: SortStable.cu, launch_stable_sort_kernel: row by row, all rows at once by row number, or a segmented sort.
    """
    count = segments * length
    if segments == 1 or length >= _LONG_SORT:
        return length * _INDEX, radix_sort_bytes(length, size, _INDEX)
    if segments < _FEW_SEGMENTS:
        return count * _INDEX, count * _INDEX, count * size, radix_sort_bytes(count, size, _INDEX)
    return count * _INDEX, count * (size + _INDEX)


def sort(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (Sort.cpp, SortStable.cu): up to 4096 elements in place, with the indices of one row.

    Larger ones are copied unless ``dim`` is the last dimension of a contiguous tensor.
    """
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    if not x.dim():
        return ()
    length = x.shape[dim]
    if length <= _SHORT_SORT:
        return nonzero(length * _INDEX if x.numel() > 1 else 0)
    last = x.stride(dim) == 1 and x.is_contiguous()
    transposed = () if last else (bytes_of(x), bytes_of(x), x.numel() * _INDEX)
    return transposed + _sort_temporaries(x.numel() // length, length, x.element_size())


def scan(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (ReduceOps.cpp, impl_func_cum_ops; ScanKernels.cpp): the operand cast to the dtype of the result, or
    its contiguous copy."""
    x = args[0]
    if x.dtype is not result.dtype:
        return nonzero(x.numel() * result.element_size())
    return nonzero(copied(x))


def masked_scatter(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (IndexKernel.cu, launch_masked_scatter_kernel): the cumulative sum of the mask, in 64 bits.

    The mask is expanded to the shape of the tensor and made contiguous.
    """
    x, mask, source = args[:3]
    count = torch.broadcast_shapes(x.shape, mask.shape).numel()
    expanded_mask = count if mask.numel() != count or not mask.is_contiguous() else 0
    return nonzero(count * _INDEX, expanded_mask, copied(source))


def masked_scatter_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (FunctionsManual.cpp, masked_scatter_backward): the selected gradients and their zero padding, to
    concatenate."""
    return nonzero(bytes_of(result))


FORMULAS: dict[str, Formula] = {
    "aten.embedding.default": embedding,
    "aten.embedding_dense_backward.default": embedding_backward,
    "aten._embedding_bag_dense_backward.default": embedding_bag_backward,
    "aten._embedding_bag_backward.default": embedding_bag_backward_by_offsets,
    **{f"aten._ctc_loss_backward.{form}": ctc_loss_backward for form in ("default", "Tensor")},
    **{f"aten.{name}.default": index_put for name in ("_index_put_impl_", "index_put_", "index_put")},
    "aten.sort.default": sort,
    "aten.sort.stable": sort,
    "aten.argsort.default": sort,
    **{f"aten.{name}.default": scan for name in ("cumsum", "cumprod", "cumsum_", "logcumsumexp")},
    "aten.masked_scatter.default": masked_scatter,
    "aten.masked_scatter_.default": masked_scatter,
    "aten.masked_scatter_backward.default": masked_scatter_backward,
}
"""Overload name -> bytes of the allocations that are live at the kernel's peak."""
