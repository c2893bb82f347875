"""Temporaries of CUDA kernels: what an op allocates besides its results.

Elementwise kernels cast while they read and write (TensorIterator's dynamic casting), so they make no operand-sized
casts as on the CPU: an op that is not listed allocates nothing. The exceptions, which cast whole operands: sums of
integers and booleans, scans, `where` of two dtypes. Left out is what stays below 64 KiB or 2 % of the op's own tensors,
such as the metadata of `cat`; that of foreach ops and fused optimizers is passed by value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memplan.trace.semantics.cuda import attention_kernels, cublas, cudnn_convolution, distances, indexing, norms
from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.formula import AllocationBytes, Allocations, Formula, nonzero
from memplan.trace.semantics.cuda.norms import copies_of
from memplan.trace.semantics.cuda.reductions import FORMULAS as REDUCTIONS
from memplan.trace.semantics.cuda.reductions import staging_buffer
from memplan.trace.semantics.kinds import Arguments, Keywords, Temporary
from memplan.trace.semantics.layout import bytes_of, copy_bytes, suggests_channels_last

_REDUCED = (torch.bfloat16, torch.float16)
_NO_REDUCTION = 0


def copy_in_own_format(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries: a copy of the operand, unless it is contiguous in the memory format that it suggests."""
    return nonzero(copy_bytes(args[0], suggests_channels_last(args[0])))


def pool_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (DilatedMaxPool2d.cu, AveragePool2d.cu): copies of gradient and indices in the input's memory
    format."""
    gradient, x, *others = args
    indices = [other for other in others if isinstance(other, torch.Tensor) and other.dtype is torch.int64]
    return nonzero(*(copy_bytes(tensor, suggests_channels_last(x)) for tensor in (gradient, *indices)))


def pool2d_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (DilatedMaxPool2d.cu, AveragePool2d.cu): as `pool_backward`, and a copy of the input, whose elements
    are not read."""
    x = args[1]
    return (*nonzero(copy_bytes(x, suggests_channels_last(x))), *pool_backward(args, kwargs, result, arch))


def _reduction(args: Arguments, kwargs: Keywords, position: int) -> int:
    """Return the number of a loss's reduction, an argument at ``position`` or by name: 0 none, 1 mean, 2 sum."""
    return args[position] if len(args) > position else kwargs.get("reduction", 1)


def reduced_loss(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (Loss.cpp, mse_loss, smooth_l1_loss, huber_loss): the unreduced loss, if it is then reduced, and the
    staging buffer of that.

    In mse_loss and smooth_l1_loss, the reduced result has the storage of another unreduced loss.
    """
    if _reduction(args, kwargs, position=2) == _NO_REDUCTION:
        return ()
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    unreduced = args[0] if args[0].shape == shape else args[0].new_empty(shape)
    return (*nonzero(shape.numel() * result.element_size()), *_staging(unreduced, result, arch))


def _staging(unreduced: torch.Tensor, result: torch.Tensor, arch: Arch) -> AllocationBytes:
    """Bytes of the staging buffer with which a loss is reduced to a single element. ``unreduced``: a tensor of the
    unreduced loss's shape and layout."""
    return staging_buffer(unreduced, [], max(4, result.element_size()), arch)


def soft_margin(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (Loss.cpp, soft_margin_loss_out): the reduced loss, a single element, which is then copied into the
    result, and the staging buffer of the reduction.

    The result's storage is that of the unreduced loss.
    """
    if _reduction(args, kwargs, position=2) == _NO_REDUCTION:
        return ()
    return (result.element_size(), *_staging(args[0], result, arch))


def soft_margin_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (Loss.cpp, soft_margin_loss_backward_out): two factors per element."""
    return nonzero(bytes_of(result), bytes_of(result))


def binary_cross_entropy_with_logits(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (Loss.cpp, binary_cross_entropy_with_logits): log-sigmoid, and the loss before reduction or its
    positive weight."""
    logits = args[0]
    pos_weight = args[3] if len(args) > 3 else kwargs.get("pos_weight")
    if _reduction(args, kwargs, position=4) == _NO_REDUCTION and pos_weight is None:
        return nonzero(bytes_of(logits))
    return nonzero(bytes_of(logits), bytes_of(logits))


def _concatenated(first: Formula, second: Formula) -> Formula:
    """Return a formula with the allocations of both formulas."""
    return lambda args, kwargs, result, arch: (*first(args, kwargs, result, arch), *second(args, kwargs, result, arch))


def sum_cast(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (ReduceOpsUtils.h, make_reduction): a copy of an operand of another dtype, cast to the result's.

    For a float32 result, the kernel itself reads half precision.
    """
    x = args[0]
    if x.dtype is result.dtype or (x.dtype in _REDUCED and result.dtype is torch.float32):
        return ()
    return nonzero(x.numel() * result.element_size())


def where(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (TensorCompare.cpp, where_self_out): casts of operands to the dtype of the result.

    Not of 0-dim operands: they can be on the CPU, and are cast there.
    """
    cast_operands = [x for x in args[1:3] if x.dim() and x.dtype is not result.dtype]
    return nonzero(*(x.numel() * result.element_size() for x in cast_operands))


def im2col(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (Im2Col.cu and Col2Im.cu): a contiguous copy of the operand, and the result's first storage.

    The result is allocated by ``empty_like`` of the operand, then resized; if it is larger, it gets a new storage.
    """
    x = args[0]
    return nonzero(copy_bytes(x), bytes_of(x) if result.numel() > x.numel() else 0)


def roll(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (TensorTransformations.cu, roll_cuda): over one dimension, a contiguous copy of the operand.

    Several dimensions are rolled one after the other: each result but the last is a temporary.
    """
    x, dims = args[0], args[2] if len(args) > 2 else kwargs.get("dims", ())
    return (bytes_of(result),) * (len(dims) - 1) if len(dims) > 1 else nonzero(copy_bytes(x))


def is_infinite(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (TensorCompare.cpp, isinf): the absolute values of floating-point operands."""
    return nonzero(bytes_of(args[0])) if args[0].is_floating_point() else ()


_MOST_CHANNELS = 1024


def grid_sample(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> Allocations:
    """Temporaries of grid sampling (GridSampler.cpp): cuDNN gets copies of expanded operands, and a contiguous grid.

    Other kernels need no copies.
    """
    return _cudnn_grid_copies(args[:2], *args[2:5])


def grid_sample_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> Allocations:
    """Temporaries of grid sampling's backward: as of `grid_sample`, also of the gradient."""
    return _cudnn_grid_copies(args[:3], *args[3:6])


def _cudnn_grid_copies(operands: Sequence[torch.Tensor], mode: int, padding: int, align_corners: bool) -> Allocations:
    """Copies for cuDNN's grid sampling: of expanded operands, and of the grid (the last) unless it is contiguous.

    cuDNN only runs bilinear interpolation (``mode`` 0) with zero padding (``padding`` 0) and aligned corners.
    """
    x, grid = operands[-2:]
    supported = x.dtype in (torch.float32, torch.float64, torch.float16) and x.shape[1] <= _MOST_CHANNELS
    if not (torch.backends.cudnn.enabled and supported and align_corners and mode == padding == 0):
        return ()
    expanded = [bytes_of(t) for t in operands[:-1] if 0 in t.stride() and t.numel()]
    return tuple(Temporary(size, first=True) for size in nonzero(*expanded, copy_bytes(grid)))


def logsumexp(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (ReduceOps.cpp, logsumexp_out_impl): the exponentials, and the maximum of each row."""
    return nonzero(bytes_of(args[0]), bytes_of(result))


_SUMS = ("sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "prod.default", "prod.dim_int")
_BY_FORMAT = """
    max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d max_pool3d_with_indices
    upsample_nearest2d upsample_bilinear2d _upsample_nearest_exact2d upsample_nearest2d_backward
    upsample_bilinear2d_backward _upsample_nearest_exact2d_backward
"""
_CONTIGUOUS = """
    avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d upsample_nearest1d upsample_linear1d upsample_nearest3d
    upsample_trilinear3d upsample_bicubic2d reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d nll_loss_forward nll_loss2d_forward upsample_nearest3d_backward
    upsample_trilinear3d_backward log_sigmoid_forward upsample_bicubic2d_backward avg_pool3d_backward
    _adaptive_avg_pool3d_backward max min _upsample_nearest_exact1d _upsample_nearest_exact3d _upsample_bilinear2d_aa
    _upsample_bicubic2d_aa upsample_nearest1d_backward upsample_linear1d_backward _upsample_nearest_exact1d_backward
    _upsample_nearest_exact3d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward
    reflection_pad1d_backward reflection_pad2d_backward adaptive_max_pool3d_backward fractional_max_pool2d_backward
    multi_margin_loss_backward multilabel_margin_loss_backward
"""
_POOL_BACKWARD = "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d_backward", "max_pool3d_with_indices_backward"

FORMULAS: dict[str, Formula] = {
    **{f"aten.{name}.default": reduced_loss for name in ("mse_loss", "smooth_l1_loss", "huber_loss")},
    "aten.soft_margin_loss.default": soft_margin,
    "aten.soft_margin_loss_backward.default": soft_margin_backward,
    "aten.binary_cross_entropy_with_logits.default": binary_cross_entropy_with_logits,
    **{f"aten.{name}": sum_cast for name in _SUMS},
    "aten.linalg_vector_norm.default": sum_cast,
    "aten.where.self": where,
    "aten.logsumexp.default": logsumexp,
    **{f"aten.{name}.default": copy_in_own_format for name in _BY_FORMAT.split()},
    **{f"aten.{name}.default": copies_of(0) for name in _CONTIGUOUS.split()},
    **{f"aten.{name}.default": im2col for name in ("im2col", "col2im")},
    "aten.roll.default": roll,
    "aten.isinf.default": is_infinite,
    "aten.grid_sampler_2d.default": grid_sample,
    "aten.grid_sampler_2d_backward.default": grid_sample_backward,
    "aten.nll_loss_backward.default": copies_of(0, 1),
    "aten.nll_loss2d_backward.default": copies_of(1),
    **{f"aten.{name}.default": pool_backward for name in _POOL_BACKWARD},
    "aten.avg_pool2d_backward.default": pool2d_backward,
    "aten.max_pool2d_with_indices_backward.default": pool2d_backward,
    **cublas.FORMULAS,
    **norms.FORMULAS,
    **indexing.FORMULAS,
    **distances.FORMULAS,
    **attention_kernels.FORMULAS,
    **cudnn_convolution.FORMULAS,
}
FORMULAS.update(
    {name: _concatenated(FORMULAS[name], staged) if name in FORMULAS else staged for name, staged in REDUCTIONS.items()}
)
"""Overload name -> (args, kwargs, result, arch) -> bytes of the allocations that are live at the kernel's peak, beyond
inputs and results; each element is one request to the caching allocator, unrounded."""
