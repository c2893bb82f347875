"""Ops whose results on the CPU differ from those of fake tensors: sizes that shapes do not determine, and strides."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from memplan.trace.semantics.cpu.convolution import resized_transposed_result
from memplan.trace.semantics.cpu.lstm import with_both_biases, with_workspace
from memplan.trace.semantics.cpu.strides import STRIDES

_NO_REDUCTION = 0


def _reduced_loss(position: int) -> Callable[[tuple[Any, ...], dict[str, Any], Any], Any]:
    """Return the correction of a loss whose reduced, 0-dim result lies in the storage of the unreduced loss.

    Source: aten/src/ATen/native/BinaryOps.cpp and Loss.cpp: the loss is computed into the result, which is then reduced
    into itself; the storage keeps its size for as long as the loss lives.
    """

    def corrected(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        reduction = args[position] if len(args) > position else kwargs.get("reduction", 1)
        if reduction == _NO_REDUCTION or result.dim():
            return result
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return result.new_empty(math.prod(shape)).as_strided((), ())

    return corrected


def _resized_from_operand(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Return a result whose storage was allocated with the operand's size (Im2Col.cpp, Col2Im.cpp)."""
    if result.numel() >= args[0].numel():
        return result
    return result.new_empty(args[0].numel()).as_strided(result.shape, result.stride())


def _embedding_bag(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """Results of ``_embedding_bag`` as the CPU allocates them: ``bag_size`` has an element for each bag, and
    ``offset2bag`` is a view of a buffer that has one element more.

    Source: aten/src/ATen/native/EmbeddingBag.cpp, `make_bag_size_out` and `make_offset2bag_out`.
    """
    output, offset2bag, _, max_indices = result
    if offset2bag.numel():
        offset2bag = offset2bag.new_empty(offset2bag.numel() + 1)[:-1]
    return output, offset2bag, args[2].new_empty(args[2].shape), max_indices


RESULTS: dict[str, Callable[[tuple[Any, ...], dict[str, Any], Any], Any]] = {
    **STRIDES,
    "aten.convolution.default": resized_transposed_result,
    "aten._embedding_bag.default": _embedding_bag,
    "aten.col2im.default": _resized_from_operand,
    "aten.im2col.default": _resized_from_operand,
    "aten.mkldnn_rnn_layer.default": with_workspace,
    "aten.mkldnn_rnn_layer_backward.default": with_both_biases,
    "aten.mse_loss.default": _reduced_loss(2),
    "aten.smooth_l1_loss.default": _reduced_loss(2),
    "aten.soft_margin_loss.default": _reduced_loss(2),
    "aten.binary_cross_entropy.default": _reduced_loss(3),
}
"""Overload name -> (args, kwargs, result) -> the result with the kernel's sizes and strides."""


def grouped_mm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Result of ``_grouped_mm``: fake tensors support bfloat16 only, the kernels also float32 and float16.

    Source: aten/src/ATen/native/GroupedMMUtils.h, `create_grouped_gemm_output_tensor`: rows are aligned to 16 bytes.
    """
    a, b = args[0], args[1]
    offsets: Any = args[2] if len(args) > 2 else kwargs.get("offs")
    rows, columns = a.shape[-2], b.shape[-1]
    dtype = kwargs.get("out_dtype") or a.dtype
    shape = (rows, columns)
    if a.dim() == 3 and b.dim() == 3:
        shape = (a.shape[0], rows, columns)
    elif a.dim() == 2 and b.dim() == 2:
        shape = (offsets.shape[0], rows, columns)
    alignment = 16 // dtype.itemsize
    row_stride = -(-columns // alignment) * alignment
    return a.new_empty_strided(shape, (rows * row_stride, row_stride, 1)[-len(shape) :], dtype=dtype)


def _ctc_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Results of ``_ctc_loss``: the losses, and the log alphas saved for backward, as long as the longest target;
    NotImplemented if that is unknown.

    Source: aten/src/ATen/native/LossCTC.cpp, `ctc_loss_cpu_template`.
    """
    log_probs, lengths = args[0], _known_lengths(args[3])
    if lengths is None:
        return NotImplemented
    longest = max(lengths, default=0)
    batch = log_probs.shape[1]
    return log_probs.new_empty(batch), log_probs.new_empty((batch, log_probs.shape[0], 2 * longest + 1))


def _known_lengths(lengths: Any) -> list[int] | None:
    """Return lengths passed as integers, or as a tensor with known values; else None."""
    if isinstance(lengths, torch.Tensor):
        constant = getattr(lengths, "constant", None)
        return None if constant is None else constant.reshape(-1).tolist()
    return [int(length) for length in lengths]


def _embedding_bag_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Result of ``_embedding_bag_backward``: torch would run the real kernel on fake tensors, which have no memory.

    Source: aten/src/ATen/native/EmbeddingBag.cpp, `_embedding_bag_dense_backward_cpu`.
    """
    gradient, rows, sparse = args[0], args[6], args[9]
    return NotImplemented if sparse else gradient.new_empty((rows, gradient.shape[1]))


def _lstsq(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Results of ``linalg_lstsq`` by ``gelsy``, the default: the solution is a view of the right side's copy, which has
    all rows.

    Source: aten/src/ATen/native/BatchLinearAlgebra.cpp, `linalg_lstsq_out_info`. With other drivers the residuals
    depend on the ranks, which are values.
    """
    x, right = args[0], args[1]
    driver = kwargs.get("driver", args[3] if len(args) > 3 else None)
    if driver not in (None, "gelsy") or x.dim() < 2 or x.is_complex():
        return NotImplemented
    vector = right.dim() < x.dim()
    batch, (rows, columns) = x.shape[:-2], x.shape[-2:]
    sides = right.unsqueeze(-1) if vector else right
    batch = torch.broadcast_shapes(batch, sides.shape[:-2])
    solution = x.new_empty((*batch, sides.shape[-1], max(rows, columns))).mT.narrow(-2, 0, columns)
    empty = x.new_empty(0)
    rank = x.new_empty(batch, dtype=torch.int64)
    return solution.squeeze(-1) if vector else solution, empty, rank, x.new_empty(0)


INSTEAD: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    "aten._grouped_mm.default": grouped_mm,
    "aten._embedding_bag_backward.default": _embedding_bag_backward,
    "aten.linalg_lstsq.default": _lstsq,
}
"""Overload name -> (args, kwargs) -> the result, for ops that fake tensors refuse and the CPU runs."""

OF_LENGTHS = dict.fromkeys(("aten._ctc_loss.default", "aten._ctc_loss.Tensor"), _ctc_loss)
"""Like `INSTEAD`, for ops whose result sizes depend on values that a recording may know and a graph cannot."""
