"""Temporaries of indexing, embedding, sorting and scanning kernels on CUDA."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import prod
from typing import Any

import torch

from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.kinds import Extra
from memplan.trace.semantics.layout import bytes_of, copied, padded

Formula = Callable[[tuple[Any, ...], dict[str, Any], Any, Arch], tuple[int | Extra, ...]]

_FEW_INDICES = 3072
_ROWS_PER_THREAD = 10
_SHORT_SORT = 4096
_LONG_SORT = 1_000_000
_FEW_SEGMENTS = 128
_INDEX = 8
_MAXIMUM = 2
_ONE_BLOCK = 2304
"""Pairs with a 64-bit value that one block of CUB's radix sort takes: 256 threads with 9 each, as
tuning_radix_sort.cuh scales its 19 of 32 bits."""
_SORT_TILES = {
    (7, 4): 2816, (7, 8): 2816, (8, 4): 3072, (8, 8): 3840, (9, 1): 3456, (9, 2): 5632, (9, 4): 5376, (9, 8): 4608,
}  # fmt: skip
"""Major compute capability, bytes of a key -> pairs with a 64-bit value that a block of CUB's radix sort takes.

Concluded from what the unmodified torch 2.11 asks of its allocator for sorts of two lengths on emulated cards.
"""


def _taken(*sizes: int) -> tuple[int, ...]:
    return tuple(size for size in sizes if size)


def radix_sort_bytes(count: int, key: int, value: int, arch: Arch, bits: int | None = None) -> int:
    """Return the bytes that CUB's radix sort of pairs takes, by ``bits`` of its keys, all by default.

    Source: cub/device/dispatch/dispatch_radix_sort.cuh, InvokeOnesweep: the other half of each double buffer, where
    more than one pass of 8 bits is made; for each pass the beginnings of 256 bins, for each tile its counts, and a
    counter a pass, each aligned to 256 bytes. Where the tile is not known the buffers alone are counted. What one block
    sorts by itself takes a byte.
    """
    if count <= _ONE_BLOCK and value == _INDEX:
        return 1
    tile = _SORT_TILES.get((arch.capability[0], key)) if value == _INDEX else None
    if tile is None:
        return count * (key + value)
    passes = -(-(8 * key if bits is None else bits) // 8)
    parts = (
        passes * 256 * 8,
        -(-count // tile) * 256 * 4,
        *((count * key, count * value) if passes > 1 else ()),
        passes * 4,
    )
    return sum(padded(part, 256) for part in parts) + 255


def embedding(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[Extra, ...]:
    """Embedding.cpp: the indices as one row, for which those of a slice are copied."""
    return tuple(Extra(size, first=True) for size in _taken(copied(args[1])))


def embedding_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch
) -> tuple[int | Extra, ...]:
    """Embedding.cu and EmbeddingBackwardKernel.cu: up to 3072 indices nothing, else sorted and summed by segments.

    Before the result what is not contiguous, contiguous, and both lists of the sort, the sorted indices and where each
    came from; meanwhile their numbers, and what the sort takes. Then where each segment begins, three arrays of partial
    segments and the numbers of both kinds; and the large one, a row in float32 for every partial segment: one for ten
    indices and one for every row that may occur.
    """
    gradient, indices, rows, by_frequency = args[0], args[1], args[2], args[4]
    copies = tuple(Extra(size, first=True) for size in _taken(copied(indices), copied(gradient)))
    if indices.numel() <= _FEW_INDICES and not by_frequency:
        return copies
    return copies + _segments(gradient, indices, rows, by_frequency, arch)


def _segments(
    gradient: torch.Tensor, indices: torch.Tensor, rows: int, by_frequency: bool, arch: Arch
) -> tuple[int | Extra, ...]:
    count, each, wide = indices.numel(), indices.element_size(), max(4, gradient.element_size())
    segments = min(count, rows)
    partial = count // _ROWS_PER_THREAD + segments
    counted = count * each if by_frequency else 0
    lists = [count * each, *[segments * each] * 2, each, each, partial * each]
    sorting = count * each, radix_sort_bytes(count, each, each, arch)
    return (
        *(Extra(size, first=True) for size in _taken(count * each, count * each)),
        *(Extra(size, first=True, until=0) for size in _taken(*sorting)),
        *_taken(*lists, counted, partial * gradient.shape[-1] * wide),
    )


def embedding_bag_backward(
    args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch
) -> tuple[int | Extra, ...]:
    """EmbeddingBag.cu, embedding_bag_backward_cuda_sum_avg: as for an embedding, but however few; maxima need none."""
    return _of_bags(args[0], args[1], args[5], args[6], args[7], arch)


def _of_bags(
    gradient: torch.Tensor, indices: torch.Tensor, rows: int, by_frequency: bool, mode: int, arch: Arch
) -> tuple[int | Extra, ...]:
    copies = tuple(Extra(size, first=True) for size in _taken(copied(gradient)))
    return copies if mode == _MAXIMUM else copies + _segments(gradient, indices, rows, by_frequency, arch)


def embedding_bag_backward_by_offsets(
    args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch
) -> tuple[int | Extra, ...]:
    """EmbeddingBag.cpp, _embedding_bag_backward_symint: the dense gradient's kernel; one that is sparse is not here."""
    if result.layout is not torch.strided:
        return ()
    return _of_bags(args[0], args[1], args[6], args[7], args[8], arch)


def ctc(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """LossCTC.cu, ctc_loss_gpu_template: where each target begins, and both lengths, as 64-bit integers."""
    return _taken(*[args[0].shape[1] * _INDEX] * 3)


def ctc_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """LossCTC.cu, ctc_loss_backward_gpu_template: likewise; the backward variables are as large as the forward ones."""
    return (*ctc(args[1:], kwargs, result, arch), *_taken(bytes_of(args[6])))


def unfold_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """UnfoldBackward.h: the numbers of the positions, where windows overlap or have gaps that a copy cannot fill."""
    sizes, dim, size, step = args[1:5]
    return _taken(sizes[dim] * _INDEX if step < size and sizes else 0)


def _indexed(indices: Any) -> list[int]:
    return [i for i, index in enumerate(indices) if index is not None]


def index_put(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Indexing.cu, index_put_with_sort_kernel: only where values accumulate, or algorithms are deterministic.

    Four lists of 64-bit indices and what their sort takes; the values in the shape of what they go to; a copy of the
    tensor where it is not contiguous, or where the indexed dimensions are not next to each other.
    """
    x, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not accumulate and not torch.are_deterministic_algorithms_enabled():
        return ()
    positions = _indexed(indices)
    if not positions or any(indices[i].dtype in (torch.bool, torch.uint8) for i in positions):
        return ()
    count = torch.broadcast_shapes(*(indices[i].shape for i in positions)).numel()
    whole = count * prod(n for i, n in enumerate(x.shape) if i not in positions)
    apart = positions[-1] - positions[0] + 1 != len(positions)
    moved = bytes_of(x) if apart or not x.is_contiguous() else 0
    spread = whole * values.element_size() if values.numel() != whole or not values.is_contiguous() else 0
    lists = [count * _INDEX] * 4
    inner = whole // max(1, count) if apart else prod(x.shape[positions[-1] + 1 :])
    bits = max(1, ((x.numel() - 1) // max(1, inner)).bit_length())
    return _taken(*lists, radix_sort_bytes(count, _INDEX, _INDEX, arch, bits), moved, spread)


def _sorted_pairs(segments: int, length: int, size: int, arch: Arch) -> tuple[int, ...]:
    """SortStable.cu, launch_stable_sort_kernel: one sort a segment, one of all with their segments, or segmented."""
    count = segments * length
    if segments == 1 or length >= _LONG_SORT:
        return length * _INDEX, radix_sort_bytes(length, size, _INDEX, arch)
    if segments < _FEW_SEGMENTS:
        return count * _INDEX, count * _INDEX, count * size, radix_sort_bytes(count, size, _INDEX, arch)
    return count * _INDEX, count * (size + _INDEX)


def sort(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Sort.cpp and SortStable.cu: up to 4096 in place, with the numbers of one row; a copy where the dimension is not
    the last of a dense tensor."""
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    if not x.dim():
        return ()
    length = x.shape[dim]
    if length <= _SHORT_SORT:
        return _taken(length * _INDEX if x.numel() > 1 else 0)
    last = x.stride(dim) == 1 and x.is_contiguous()
    moved = () if last else (bytes_of(x), bytes_of(x), x.numel() * _INDEX)
    return moved + _sorted_pairs(x.numel() // length, length, x.element_size(), arch)


def median(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[Extra, ...]:
    """Sorting.cpp, median_impl: without a dimension, everything is sorted; of the rest the result is made later."""
    x = args[0]
    count = x.numel()
    if count <= _SHORT_SORT:
        more = _taken(count * _INDEX if count > 1 else 0)
    else:
        more = _sorted_pairs(1, count, x.element_size(), arch)
    rest = (Extra(size, first=True, until=0) for size in _taken(count * _INDEX, *more))
    return (Extra(bytes_of(x), first=True), *rest) if count else ()


def topk(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """TensorTopK.cpp: the operand contiguous."""
    return _taken(copied(args[0]))


def randperm(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """cuda/Randperm.cu, randperm_out_cuda: numbers, random keys and their sorted list, and what their sort takes.

    The keys have as many bits as let none occur twice with a probability of 0.9; up to 32 in 32 bits.
    """
    count = args[0]
    if count < 2:
        return ()
    bits = min(64, math.ceil(math.log2(count - (6 * count * count + 1) / (math.log(0.9) * 12))))
    key, value = 4 if bits <= 32 else 8, result.element_size()
    return count * value, count * key, count * key, radix_sort_bytes(count, key, value, arch, bits)


def multinomial(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Distributions.cpp, multinomial_out: random numbers of the operand's size, and of several the largest.

    MultinomialKernel.cu, with replacement: a copy, the normalized distribution and its running sums.
    """
    x, samples = args[:2]
    replaced = args[2] if len(args) > 2 else kwargs.get("replacement", False)
    if replaced and samples > 1:
        return _taken(*[bytes_of(x)] * 3, scan_bytes(x.numel(), x.dtype) if x.dim() == 1 else 0)
    largest = result.numel() * x.element_size() if samples > 1 else 0
    return _taken(bytes_of(x), largest, 1, 1)  # the last two: whether the distribution is one


_SCAN_TILES = {2: 3840, 4: 1920, 8: 896}
"""Bytes of an element -> elements that a block of CUB's scan takes, concluded as `_SORT_TILES` was, on an H100."""


def scan_bytes(count: int, dtype: torch.dtype) -> int:
    """Return the bytes that CUB's scan of one row takes: a state for every tile, and for each of a warp before these.

    Source: cub/agent/single_pass_scan_operators.cuh: the state and its value in one word of twice the value's size; of
    half precision, which is a class there, three lists. Each is aligned to 256 bytes.
    """
    tile = _SCAN_TILES.get(dtype.itemsize)
    if tile is None or not count:
        return 0
    states = -(-count // tile) + 32
    lists = (4, 2, 2) if dtype.itemsize == 2 else (2 * dtype.itemsize,)
    return 256 + sum(padded(states * size, 256) for size in lists) + 255


def scan_of_one(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """ScanUtils.cuh, scan_dim: CUB's where one row is everything."""
    x, dim = args[0], args[1]
    alone = x.dim() and x.shape[dim] == x.numel() and x.numel() > 1
    return scan(args, kwargs, result, arch) + ((scan_bytes(x.numel(), result.dtype),) if alone else ())


def scan(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """ReduceOps.cpp, impl_func_cum_ops; ScanKernels.cpp: the operand in the result's type, contiguous."""
    x = args[0]
    if x.dtype is not result.dtype:
        return _taken(x.numel() * result.element_size())
    return _taken(copied(x))


def masked_scatter(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """IndexKernel.cu, launch_masked_scatter_kernel: for every element the number of marked ones before it, in 64 bits.

    The mask is expanded to the tensor, and then contiguous.
    """
    x, mask, source = args[:3]
    count = torch.broadcast_shapes(x.shape, mask.shape).numel()
    spread = count if mask.numel() != count or not mask.is_contiguous() else 0
    return _taken(count * _INDEX, spread, copied(source), scan_bytes(count, torch.int64))


def masked_scatter_backward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """FunctionsManual.cpp, masked_scatter_backward: what is selected, and zeros for the rest, before they are one."""
    return _taken(bytes_of(result))


def histogram(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[Extra, ...]:
    """SummaryOps.cu, _histc_cuda_template: the least and the largest value first, where no range is given."""
    low, high = (*args[2:4], *(kwargs.get(name, 0) for name in ("min", "max")[len(args[2:4]) :]))
    size = args[0].element_size()
    return (Extra(size, first=True, until=0), Extra(size, first=True)) if low == high and args[0].numel() else ()


def flat(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """ReduceOps.cpp, argmax without a dimension: the operand, flat."""
    return () if args[1:] or kwargs.get("dim") is not None or result.dim() else _taken(copied(args[0]))


def chunks_of_norm(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """ForeachReduceOp.cu, foreach_tensor_norm_cuda: for every tensor as many partial sums as the largest has chunks.

    A chunk is 65,536 elements (MultiTensorApply.cuh); the slow path, taken where dtypes or layouts differ, needs none.
    """
    tensors = args[0]
    if not tensors or any(not t.is_floating_point() for t in tensors):
        return ()
    chunks = max(math.ceil(t.numel() / 65536) for t in tensors)
    wide = 8 if tensors[0].dtype is torch.float64 else 4
    return _taken(len(tensors) * chunks * wide)


FORMULAS: dict[str, Formula] = {
    "aten.embedding.default": embedding,
    "aten.embedding_dense_backward.default": embedding_backward,
    "aten._embedding_bag_dense_backward.default": embedding_bag_backward,
    "aten._embedding_bag_backward.default": embedding_bag_backward_by_offsets,
    **{f"aten._ctc_loss.{form}": ctc for form in ("default", "Tensor")},
    **{f"aten._ctc_loss_backward.{form}": ctc_backward for form in ("default", "Tensor")},
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
    **{f"aten.{name}.default": scan_of_one for name in ("cumsum", "cumprod", "cumsum_")},
    "aten.logcumsumexp.default": scan,
    "aten.masked_scatter.default": masked_scatter,
    "aten.masked_scatter_.default": masked_scatter,
    "aten.masked_scatter_backward.default": masked_scatter_backward,
    "aten.histc.default": histogram,
    "aten.argmax.default": flat,
    "aten.argmin.default": flat,
    "aten._foreach_norm.Scalar": chunks_of_norm,
}
"""Overload name -> bytes of the allocations that live together at the kernel's worst moment."""
