"""Temporaries of the indexing, embedding, sorting and scanning kernels on CUDA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.formula import AllocationBytes, Allocations, Formula, nonzero
from memplan.trace.semantics.kinds import Arguments, Keywords, Temporary
from memplan.trace.semantics.layout import bytes_of, ceil_div, copy_bytes, padded
from memplan.trace.semantics.tensor_iterator import contiguous_strides

_FEW_INDICES = 3072
_ROWS_PER_THREAD = 10
_SHORT_SORT = 4096
_LONG_SORT = 1_000_000
_FEW_SEGMENTS = 128
_INDEX = 8
_MAXIMUM = 2
_BLOCK_SORT = 2304
"""Pairs with a 64-bit value that a single block of CUB's radix sort handles: 256 threads with 9 each, as
tuning_radix_sort.cuh scales its 19 of 32 bits."""
_SORT_TILES = {
    (7, 4): 2816, (7, 8): 2816, (8, 4): 3072, (8, 8): 3840, (9, 1): 3456, (9, 2): 5632, (9, 4): 5376, (9, 8): 4608,
}  # fmt: skip
"""(Major compute capability, bytes of a key) -> pairs with a 64-bit value per block of CUB's radix sort.

Inferred from the allocations of unmodified torch 2.11 for sorts of two lengths on emulated cards.
"""


def radix_sort_bytes(count: int, key: int, value: int, arch: Arch, bits: int | None = None) -> int:
    """Bytes of temporary storage of CUB's radix sort of ``count`` pairs of a key and a value, of these many bytes.

    ``bits``: the number of low bits of the keys to sort by; None: all. Source:
    cub/device/dispatch/dispatch_radix_sort.cuh, InvokeOnesweep: the second half of each double buffer if there are
    several passes of 8 bits; 256 bin offsets per pass, 256 counts per tile, and a counter per pass, each aligned to
    256 bytes. If the tile size is unknown, only the buffers are counted. A sort within a single block needs 1 byte.
    """
    if count <= _BLOCK_SORT and value == _INDEX:
        return 1
    tile = _SORT_TILES.get((arch.capability[0], key)) if value == _INDEX else None
    if tile is None:
        return count * (key + value)
    passes = ceil_div(8 * key if bits is None else bits, 8)
    parts = [passes * 256 * 8, ceil_div(count, tile) * 256 * 4, passes * 4]
    if passes > 1:
        parts += [count * key, count * value]
    return sum(padded(part, 256) for part in parts) + 255  # the beginning is aligned to 256 bytes, too


def embedding(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> tuple[Temporary, ...]:
    """Temporaries (Embedding.cpp): a contiguous copy of the indices, if they are not."""
    return tuple(Temporary(size, first=True) for size in nonzero(copy_bytes(args[1])))


def embedding_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> Allocations:
    """Temporaries (Embedding.cu, EmbeddingBackwardKernel.cu): contiguous copies of the operands, allocated before the
    result; for more than 3072 indices also a sort and sums by segment (`_segment_sums`)."""
    gradient, indices, rows, _, by_frequency = args[:5]
    copies = tuple(Temporary(size, first=True) for size in nonzero(copy_bytes(indices), copy_bytes(gradient)))
    if indices.numel() <= _FEW_INDICES and not by_frequency:
        return copies
    return copies + _segment_sums(gradient, indices, rows, by_frequency, arch)


def _segment_sums(
    gradient: torch.Tensor, indices: torch.Tensor, rows: int, by_frequency: bool, arch: Arch
) -> Allocations:
    """Allocations of an embedding's gradient, which sums the gradients of equal indices: a segment of the sorted
    indices.

    Allocated before the result: the sorted indices and their original positions; during the sort also the unsorted
    positions and CUB's storage. Allocated after it: where each segment begins, three arrays of partial segments, the
    counts of both; and the largest, a float32 row per partial segment. There is one partial segment per ten indices and
    one per distinct row. ``rows``: of the embedding; ``by_frequency``: whether gradients are scaled by it.
    """
    count, itemsize, accumulator = indices.numel(), indices.element_size(), max(4, gradient.element_size())
    segments = min(count, rows)
    partial_segments = count // _ROWS_PER_THREAD + segments
    # segment_offsets, partials_per_segment and its offsets, both numbers of segments, partial_segment_offset, counts
    segment_arrays = [count, segments, segments, 1, 1, partial_segments, count if by_frequency else 0]
    sort_storage = radix_sort_bytes(count, key=itemsize, value=itemsize, arch=arch)
    return (
        *(Temporary(size, first=True) for size in nonzero(count * itemsize, count * itemsize)),
        *(Temporary(size, first=True, until=0) for size in nonzero(count * itemsize, sort_storage)),
        *nonzero(*(length * itemsize for length in segment_arrays)),
        *nonzero(partial_segments * gradient.shape[-1] * accumulator),
    )


def embedding_bag_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> Allocations:
    """Temporaries (EmbeddingBag.cu, embedding_bag_backward_cuda_sum_avg): those of `embedding_backward`, for any number
    of indices; none in mode max."""
    gradient, indices, _, _, _, rows, by_frequency, mode = args[:8]
    return _bag_gradient(gradient, indices, rows, by_frequency, mode, arch)


def _bag_gradient(
    gradient: torch.Tensor, indices: torch.Tensor, rows: int, by_frequency: bool, mode: int, arch: Arch
) -> Allocations:
    """Allocations of the gradient of an embedding bag: a contiguous copy, and sums by segment unless in mode max."""
    copies = tuple(Temporary(size, first=True) for size in nonzero(copy_bytes(gradient)))
    return copies if mode == _MAXIMUM else copies + _segment_sums(gradient, indices, rows, by_frequency, arch)


def embedding_bag_backward_by_offsets(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> Allocations:
    """Temporaries (EmbeddingBag.cpp, _embedding_bag_backward_symint): the kernel of dense gradients. Sparse gradients:
    nothing."""
    gradient, indices, _, _, _, _, rows, by_frequency, mode = args[:9]
    return _bag_gradient(gradient, indices, rows, by_frequency, mode, arch) if result.layout is torch.strided else ()


def ctc_loss(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (LossCTC.cu, ctc_loss_gpu_template): the offset of each target and both lengths, as 64-bit
    integers."""
    batch = args[0].shape[1]
    return nonzero(batch * _INDEX, batch * _INDEX, batch * _INDEX)


def ctc_loss_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (LossCTC.cu, ctc_loss_backward_gpu_template): like `ctc_loss`, and backward variables as large as the
    forward ones."""
    forward_args, log_alpha = args[1:], args[6]
    return (*ctc_loss(forward_args, kwargs, result, arch), *nonzero(bytes_of(log_alpha)))


def unfold_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (UnfoldBackward.h): an index per position along the dimension, if windows overlap or leave gaps."""
    sizes, dim, size, step = args[1:5]
    return nonzero(sizes[dim] * _INDEX if step < size and sizes else 0)


def _index_copies(indices: Sequence[torch.Tensor | None]) -> Allocations:
    """Allocations before the result (TensorAdvancedIndexing.cpp, AdvancedIndex): if the strides of several indices
    differ once they are broadcast, each of them is copied that is not contiguous then. 32-bit indices are widened
    before. With masks, whose number of elements decides, nothing is counted."""
    present = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in present):
        return ()
    sizes = [_INDEX * index.numel() for index in present if index.dtype is torch.int32]
    shape = torch.broadcast_shapes(*(index.shape for index in present))
    strides = [_broadcast_strides(index, shape) for index in present]
    if any(stride != strides[0] for stride in strides):
        dense = contiguous_strides(shape)
        gaps = (any(n > 1 and s != d for n, s, d in zip(shape, stride, dense, strict=True)) for stride in strides)
        sizes += [_INDEX * prod(shape) for has_gaps in gaps if has_gaps]
    return tuple(Temporary(size, first=True) for size in nonzero(*sizes))


def _broadcast_strides(tensor: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor that is broadcast to a shape (ExpandUtils.cpp, inferExpandGeometry)."""
    missing, strides = len(shape) - tensor.dim(), [1] * (len(shape) + 1)
    for dim in reversed(range(len(shape))):
        if dim < missing:
            size, stride = 1, shape[dim + 1] * strides[dim + 1] if dim + 1 < len(shape) else 1
        else:
            size, stride = tensor.shape[dim - missing], tensor.stride(dim - missing)
        strides[dim] = stride if size == shape[dim] else 0
    return tuple(strides[:-1])


def index(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> Allocations:
    """Temporaries: `_index_copies`."""
    return _index_copies(args[1])


def index_put(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> Allocations:
    """Temporaries: `_index_copies`; or, to accumulate values and with deterministic algorithms, those of a sort
    (Indexing.cu, index_put_with_sort_kernel).

    Four lists of 64-bit indices and the storage of their sort; the values expanded to the indexed shape; and a copy of
    the tensor if it is not contiguous or the indexed dimensions are not adjacent.
    """
    x, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    indexed_dims = [dim for dim, index in enumerate(indices) if index is not None]
    has_masks = any(indices[dim].dtype in (torch.bool, torch.uint8) for dim in indexed_dims)
    uses_sort = accumulate or torch.are_deterministic_algorithms_enabled()
    if not uses_sort or not indexed_dims or has_masks:
        return _index_copies(indices)
    count = torch.broadcast_shapes(*(indices[dim].shape for dim in indexed_dims)).numel()
    slice_numel = prod(size for dim, size in enumerate(x.shape) if dim not in indexed_dims)
    adjacent = indexed_dims[-1] - indexed_dims[0] + 1 == len(indexed_dims)
    copy = 0 if adjacent and x.is_contiguous() else bytes_of(x)
    indexed_numel = count * slice_numel
    is_expanded = values.numel() != indexed_numel or not values.is_contiguous()
    expanded_values = indexed_numel * values.element_size() if is_expanded else 0
    # keys are offsets in x, in units of the elements behind the last indexed dimension
    unit = prod(x.shape[indexed_dims[-1] + 1 :]) if adjacent else indexed_numel // max(1, count)
    bits = max(1, ((x.numel() - 1) // max(1, unit)).bit_length())
    return nonzero(
        *[count * _INDEX] * 4,
        radix_sort_bytes(count, key=_INDEX, value=_INDEX, arch=arch, bits=bits),
        copy,
        expanded_values,
    )


def _sort_temporaries(segments: int, length: int, itemsize: int, arch: Arch) -> AllocationBytes:
    """Allocations of sorting ``segments`` rows of ``length`` elements of ``itemsize`` bytes, with their positions.

    Source: SortStable.cu, launch_stable_sort_kernel: row by row, all rows at once by row number, or a segmented sort.
    """
    count = segments * length
    if segments == 1 or length >= _LONG_SORT:
        return length * _INDEX, radix_sort_bytes(length, itemsize, _INDEX, arch)
    if segments < _FEW_SEGMENTS:
        return count * _INDEX, count * _INDEX, count * itemsize, radix_sort_bytes(count, itemsize, _INDEX, arch)
    return count * _INDEX, count * (itemsize + _INDEX)


def sort(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (Sort.cpp, SortStable.cu): rows of up to 4096 elements in place, with the indices of one row.

    Longer rows are copied unless ``dim`` is the last dimension of a contiguous tensor.
    """
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    if not x.dim():
        return ()
    length = x.shape[dim]
    if length <= _SHORT_SORT:
        return nonzero(length * _INDEX if x.numel() > 1 else 0)
    is_last_dim = x.stride(dim) == 1 and x.is_contiguous()
    # the operand, the sorted values and their positions, with the dimension last
    transposed = () if is_last_dim else (bytes_of(x), bytes_of(x), x.numel() * _INDEX)
    return transposed + _sort_temporaries(x.numel() // length, length, x.element_size(), arch)


def median(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> tuple[Temporary, ...]:
    """Temporaries (Sorting.cpp, median_impl): without a dimension, a copy of the input is sorted before the result is
    allocated."""
    x, count = args[0], args[0].numel()
    if not count:
        return ()
    if count <= _SHORT_SORT:
        sort_sizes = nonzero(count * _INDEX if count > 1 else 0)
    else:
        sort_sizes = _sort_temporaries(segments=1, length=count, itemsize=x.element_size(), arch=arch)
    sorting = (Temporary(size, first=True, until=0) for size in (count * _INDEX, *sort_sizes))
    return Temporary(bytes_of(x), first=True), *sorting


def topk(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (TensorTopK.cpp): a contiguous copy of the operand."""
    return nonzero(copy_bytes(args[0]))


def randperm(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (cuda/Randperm.cu, randperm_out_cuda): indices, random keys, sorted keys, and the storage of their
    sort.

    The keys have enough bits to be distinct with a probability of 0.9; 32-bit keys are used for up to 32 bits.
    """
    count = args[0]
    if count < 2:
        return ()
    bits = min(64, math.ceil(math.log2(count - (6 * count * count + 1) / (math.log(0.9) * 12))))
    key_size, value_size = 4 if bits <= 32 else 8, result.element_size()
    sort_storage = radix_sort_bytes(count, key_size, value_size, arch, bits)
    return count * value_size, count * key_size, count * key_size, sort_storage


def multinomial(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (Distributions.cpp, multinomial_out): random numbers for all of the operand; for several samples, the
    top-k values.

    MultinomialKernel.cu, with replacement: a copy, the normalized distribution and its cumulative sums.
    """
    x, samples = args[:2]
    replacement = args[2] if len(args) > 2 else kwargs.get("replacement", False)
    if replacement and samples > 1:
        return nonzero(*[bytes_of(x)] * 3, scan_bytes(x.numel(), x.dtype) if x.dim() == 1 else 0)
    top_values = result.numel() * x.element_size() if samples > 1 else 0
    validation_flags = (1, 1)
    return nonzero(bytes_of(x), top_values, *validation_flags)


_SCAN_TILES = {2: 3840, 4: 1920, 8: 896}
"""Bytes of an element -> elements per block of CUB's scan, inferred like `_SORT_TILES`, on an H100."""


def scan_bytes(count: int, dtype: torch.dtype) -> int:
    """Bytes of temporary storage of CUB's scan of one row: a state per tile, and a warp of padding states.

    Source: cub/agent/single_pass_scan_operators.cuh: state and value share a word of twice the value's size; half
    precision, a class there, has three separate lists. Each is aligned to 256 bytes.
    """
    tile = _SCAN_TILES.get(dtype.itemsize)
    if tile is None or not count:
        return 0
    states = ceil_div(count, tile) + 32
    lists = (4, 2, 2) if dtype.itemsize == 2 else (2 * dtype.itemsize,)
    return 256 + sum(padded(states * size, 256) for size in lists) + 255


def cumulative(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (ScanUtils.cuh, scan_dim): like `scan`, with the storage of CUB's scan if the tensor is a single
    row."""
    x, dim = args[:2]
    single_row = x.dim() and x.shape[dim] == x.numel() and x.numel() > 1
    scan_storage = (scan_bytes(x.numel(), result.dtype),) if single_row else ()
    return scan(args, kwargs, result, arch) + scan_storage


def scan(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (ReduceOps.cpp, impl_func_cum_ops; ScanKernels.cpp): the operand cast to the dtype of the result, or
    its contiguous copy."""
    x = args[0]
    return nonzero(copy_bytes(x) if x.dtype is result.dtype else x.numel() * result.element_size())


def masked_scatter(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (IndexKernel.cu, launch_masked_scatter_kernel): the cumulative sum of the mask, in 64 bits.

    The mask is expanded to the shape of the tensor and made contiguous.
    """
    x, mask, source = args[:3]
    count = torch.broadcast_shapes(x.shape, mask.shape).numel()
    expanded_mask = count if mask.numel() != count or not mask.is_contiguous() else 0
    return nonzero(count * _INDEX, expanded_mask, copy_bytes(source), scan_bytes(count, torch.int64))


def masked_scatter_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (FunctionsManual.cpp, masked_scatter_backward): the selected gradients and their zero padding, to
    concatenate."""
    return nonzero(bytes_of(result))


def histogram(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> tuple[Temporary, ...]:
    """Temporaries (SummaryOps.cu, _histc_cuda_template): minimum and maximum of the input, if no range was passed."""
    x = args[0]
    low = args[2] if len(args) > 2 else kwargs.get("min", 0)
    high = args[3] if len(args) > 3 else kwargs.get("max", 0)
    if low != high or not x.numel():
        return ()
    return Temporary(x.element_size(), first=True, until=0), Temporary(x.element_size(), first=True)


def flattened_copy(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (ReduceOps.cpp, argmax without a dimension): a flattened copy of the operand."""
    x, has_dim = args[0], len(args) > 1 or kwargs.get("dim") is not None or result.dim() > 0
    return () if has_dim else nonzero(copy_bytes(x))


def foreach_norm(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (ForeachReduceOp.cu, foreach_tensor_norm_cuda): per tensor, as many partial sums as the largest one
    has chunks.

    A chunk is 65,536 elements (MultiTensorApply.cuh). The slow path, for mixed dtypes or layouts, needs none.
    """
    tensors = args[0]
    if not tensors or not all(t.is_floating_point() for t in tensors):
        return ()
    chunks = max(ceil_div(t.numel(), 65536) for t in tensors)
    accumulator = 8 if tensors[0].dtype is torch.float64 else 4
    return nonzero(len(tensors) * chunks * accumulator)


FORMULAS: dict[str, Formula] = {
    "aten.embedding.default": embedding,
    "aten.embedding_dense_backward.default": embedding_backward,
    "aten._embedding_bag_dense_backward.default": embedding_bag_backward,
    "aten._embedding_bag_backward.default": embedding_bag_backward_by_offsets,
    **{f"aten._ctc_loss.{form}": ctc_loss for form in ("default", "Tensor")},
    **{f"aten._ctc_loss_backward.{form}": ctc_loss_backward for form in ("default", "Tensor")},
    "aten.index.Tensor": index,
    **{f"aten.{name}.default": index_put for name in ("_index_put_impl_", "index_put_", "index_put")},
    "aten.sort.default": sort,
    "aten.sort.stable": sort,
    "aten.argsort.default": sort,
    "aten.median.default": median,
    "aten.nanmedian.default": median,
    "aten.topk.default": topk,
    "aten.randperm.default": randperm,
    "aten.multinomial.default": multinomial,
    "aten.unfold_backward.default": unfold_backward,
    **{f"aten.{name}.default": cumulative for name in ("cumsum", "cumprod", "cumsum_")},
    "aten.logcumsumexp.default": scan,
    "aten.masked_scatter.default": masked_scatter,
    "aten.masked_scatter_.default": masked_scatter,
    "aten.masked_scatter_backward.default": masked_scatter_backward,
    "aten.histc.default": histogram,
    "aten.argmax.default": flattened_copy,
    "aten.argmin.default": flattened_copy,
    "aten._foreach_norm.Scalar": foreach_norm,
}
"""Overload name -> bytes of the allocations that are live at the kernel's peak."""
