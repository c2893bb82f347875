"""Ops whose results on the CPU differ from those of fake tensors: sizes that shapes do not determine, and strides."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from memplan.trace.semantics.cpu.convolution import resized_transposed_result
from memplan.trace.semantics.cpu.lstm import with_both_biases, with_workspace
from memplan.trace.semantics.cpu.strides import STRIDES
from memplan.trace.semantics.kinds import Arguments, Keywords
from memplan.trace.semantics.layout import padded

_NO_REDUCTION = 0


def _reduced_loss(args: Arguments, kwargs: Keywords, result: Any, *, position: int) -> Any:
    """Result of a loss whose reduced, 0-dim result lies in the storage of the unreduced loss.

    Source: aten/src/ATen/native/BinaryOps.cpp and Loss.cpp: the loss is computed into the result, which is then reduced
    into itself; the storage keeps its size for as long as the loss lives. ``position``: of the argument ``reduction``.
    """
    reduction = args[position] if len(args) > position else kwargs.get("reduction", 1)
    if reduction == _NO_REDUCTION or result.dim():
        return result
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return result.new_empty(math.prod(shape)).as_strided((), ())


def _resized_from_operand(args: Arguments, kwargs: Keywords, result: Any) -> Any:
    """Return a result whose storage was allocated with the operand's size (Im2Col.cpp, Col2Im.cpp)."""
    operand_numel = args[0].numel()
    if result.numel() >= operand_numel:
        return result
    return result.new_empty(operand_numel).as_strided(result.shape, result.stride())


def _embedding_bag(args: Arguments, kwargs: Keywords, result: Any) -> Any:
    """Results of ``_embedding_bag`` as the CPU allocates them: ``bag_size`` has an element for each bag, and
    ``offset2bag`` is a view of a buffer that has one element more.

    Source: aten/src/ATen/native/EmbeddingBag.cpp, `make_bag_size_out` and `make_offset2bag_out`.
    """
    offsets, (output, offset2bag, _, max_indices) = args[2], result
    if offset2bag.numel():
        offset2bag = offset2bag.new_empty(offset2bag.numel() + 1)[:-1]
    return output, offset2bag, offsets.new_empty(offsets.shape), max_indices


RESULTS: dict[str, Callable[[Arguments, Keywords, Any], Any]] = {
    **STRIDES,
    "aten.convolution.default": resized_transposed_result,
    "aten._embedding_bag.default": _embedding_bag,
    "aten.col2im.default": _resized_from_operand,
    "aten.im2col.default": _resized_from_operand,
    "aten.mkldnn_rnn_layer.default": with_workspace,
    "aten.mkldnn_rnn_layer_backward.default": with_both_biases,
    "aten.mse_loss.default": partial(_reduced_loss, position=2),
    "aten.smooth_l1_loss.default": partial(_reduced_loss, position=2),
    "aten.soft_margin_loss.default": partial(_reduced_loss, position=2),
    "aten.binary_cross_entropy.default": partial(_reduced_loss, position=3),
}
"""Overload name -> (args, kwargs, result) -> the result with the kernel's sizes and strides."""


def grouped_mm(args: Arguments, kwargs: Keywords) -> Any:
    """Result of ``_grouped_mm``: fake tensors support bfloat16 only, the kernels also float32 and float16.

    Source: aten/src/ATen/native/GroupedMMUtils.h, `create_grouped_gemm_output_tensor`: rows are aligned to 16 bytes.
    """
    a, b = args[0], args[1]
    offsets: Any = args[2] if len(args) > 2 else kwargs.get("offs")
    dtype = kwargs.get("out_dtype") or a.dtype
    rows, columns = a.shape[-2], b.shape[-1]
    row_stride = padded(columns, 16 // dtype.itemsize)
    if a.dim() != b.dim():  # an operand is grouped along the rows or columns of the result
        return a.new_empty_strided((rows, columns), (row_stride, 1), dtype=dtype)
    groups = a.shape[0] if a.dim() == 3 else offsets.shape[0]
    return a.new_empty_strided((groups, rows, columns), (rows * row_stride, row_stride, 1), dtype=dtype)


def _ctc_loss(args: Arguments, kwargs: Keywords) -> Any:
    """Results of ``_ctc_loss``: the losses, and the log alphas saved for backward, as long as the longest target;
    NotImplemented if that is unknown.

    Source: aten/src/ATen/native/LossCTC.cpp, `ctc_loss_cpu_template`.
    """
    log_probs, target_lengths = args[0], args[3]
    if isinstance(target_lengths, torch.Tensor):
        constant = getattr(target_lengths, "constant", None)  # the values of a fake tensor, if torch knows them
        if constant is None:
            return NotImplemented
        target_lengths = constant.reshape(-1).tolist()
    longest = max((int(length) for length in target_lengths), default=0)
    steps, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty((batch, steps, 2 * longest + 1))


def _embedding_bag_backward(args: Arguments, kwargs: Keywords) -> Any:
    """Result of ``_embedding_bag_backward``: torch would run the real kernel on fake tensors, which have no memory.

    Source: aten/src/ATen/native/EmbeddingBag.cpp, `_embedding_bag_dense_backward_cpu`.
    """
    gradient, rows, sparse = args[0], args[6], args[9]
    return NotImplemented if sparse else gradient.new_empty((rows, gradient.shape[1]))


def _lstsq(args: Arguments, kwargs: Keywords) -> Any:
    """Results of ``linalg_lstsq`` by ``gelsy``, the default: solution, residuals, ranks and singular values.

    The solution is a view of the right side's copy, which has all rows. Source:
    aten/src/ATen/native/BatchLinearAlgebra.cpp, `linalg_lstsq_out_info`. With other drivers the residuals depend on
    the ranks, which are values.
    """
    x, right = args[0], args[1]
    driver = kwargs.get("driver", args[3] if len(args) > 3 else None)
    if driver not in (None, "gelsy") or x.dim() < 2 or x.is_complex():
        return NotImplemented
    is_vector = right.dim() < x.dim()
    right_sides = right.unsqueeze(-1) if is_vector else right
    rows, columns = x.shape[-2:]
    batch = torch.broadcast_shapes(x.shape[:-2], right_sides.shape[:-2])
    solution = x.new_empty((*batch, right_sides.shape[-1], max(rows, columns))).mT.narrow(-2, 0, columns)
    ranks = x.new_empty(batch, dtype=torch.int64)
    return solution.squeeze(-1) if is_vector else solution, x.new_empty(0), ranks, x.new_empty(0)


INSTEAD: dict[str, Callable[[Arguments, Keywords], Any]] = {
    "aten._grouped_mm.default": grouped_mm,
    "aten._embedding_bag_backward.default": _embedding_bag_backward,
    "aten.linalg_lstsq.default": _lstsq,
}
"""Overload name -> (args, kwargs) -> the result, for ops that fake tensors refuse and the CPU runs."""

OF_LENGTHS = dict.fromkeys(("aten._ctc_loss.default", "aten._ctc_loss.Tensor"), _ctc_loss)
"""Like `INSTEAD`, for ops whose result sizes depend on values that a recording may know and a graph cannot."""
