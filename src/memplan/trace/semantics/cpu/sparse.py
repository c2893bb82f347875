"""Temporaries of the CPU's kernels on sparse tensors.

Each formula names the file under ATen/native it comes from. Bytes of the elements count, ``n`` of them: 8 for each
index in each sparse dimension. Of indices in a compressed layout, an entry for each row (or column) counts, and one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan.trace.semantics.cpu.sparse_results import UNARY, compressed, coo, padding_left_out, summed_dims
from memplan.trace.semantics.layout import bytes_of

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
Formula = Callable[[Arguments, Keywords, Any], int]
_INDEX, _MKL_INDEX = 8, 4


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a tensor with coordinates is made of, in bytes."""

    count: int
    dims: int
    indices: int
    values: int
    contiguous: bool
    coalesced: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Parts:
        indices, values = _torch.sparse_parts(tensor)
        return cls(
            values.shape[0], indices.shape[0], bytes_of(indices), bytes_of(values), values.is_contiguous(),
            tensor.is_coalesced(),
        )  # fmt: skip

    @property
    def whole(self) -> int:
        return self.indices + self.values

    @property
    def sorting(self) -> int:
        """SparseTensor.cpp, _coalesce_sparse_cpu: the indices in order, their places, the places before; indices of
        several dimensions as one; the values in one piece."""
        if self.coalesced or self.count < 2:
            return 0
        flat = _INDEX * self.count if self.dims > 1 else 0
        return 3 * _INDEX * self.count + flat + (0 if self.contiguous else self.values)

    @property
    def coalescing(self) -> int:
        """Return the same, and what is made."""
        return 0 if self.coalesced else self.whole + self.sorting


def _coalesce(args: Arguments, kwargs: Keywords, result: Any) -> int:
    return _Parts.of(args[0]).sorting


def _of_coalesced(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseUnaryOps.cpp, coalesced_unary_ufunc: what is coalesced first."""
    if not coo(args[0]):
        return 0
    parts = _Parts.of(args[0])
    return 0 if parts.coalesced else max(parts.coalescing - _bytes_in(result), parts.whole)


def _norm(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseTensorMath.cpp, norm_sparse."""
    return _Parts.of(args[0]).coalescing if coo(args[0]) else 0


def _bytes_in(tensor: torch.Tensor) -> int:
    return sum(bytes_of(part) for part in _torch.sparse_parts(tensor))


def _added(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseTensorMath.cpp, add_out_dense_sparse_cpu: where the elements cannot be added one by one, they are coalesced
    first; values of another dtype are cast."""
    if compressed(result) and all(map(compressed, args[:2])):
        return _added_by_rows(args[0], args[1], result)
    if coo(result) or not coo(args[1]):
        return 0
    parts = _Parts.of(args[1])
    if not parts.coalesced and not (parts.contiguous and result.is_contiguous()):
        return parts.coalescing
    return 0 if args[1].dtype is result.dtype else parts.values // args[1].element_size() * result.element_size()


def _added_by_rows(one: torch.Tensor, other: torch.Tensor, result: torch.Tensor) -> int:
    """SparseBlasImpl.cpp, add_out_sparse_csr: a result like the first, whose parts are replaced; MKL's indices."""
    n, before, beside = (_torch.sparse_length(tensor) for tensor in (result, one, other))
    old = before * result.element_size()
    if _torch.sparse_parts(one)[0].dtype is not torch.int64:
        return _MKL_INDEX * before + max(0, old - _MKL_INDEX * n)
    rows = _MKL_INDEX * _length(result)
    mkl = _MKL_INDEX * (2 * before + beside) + 3 * rows
    first = old + mkl - _INDEX * n
    return _INDEX * before + max(first, mkl - _MKL_INDEX * n, rows + _MKL_INDEX * n)


def _scaled(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseTensorMath.cpp, mul_dense_sparse_out_cpu: the dense elements at the indices;
    SparseBinaryOpIntersectionCommon.h: a table of the indices of one, and where those of the other are in it."""
    one, other = args[:2]
    if coo(one) and coo(other):
        counts = sorted((_torch.sparse_length(one), _torch.sparse_length(other)))
        both = one.is_coalesced() and other.is_coalesced()
        return 0 if both else _INDEX * (4 * counts[1] + 2 * counts[0])
    dense = one if coo(other) else other
    if not coo(result) or not isinstance(dense, torch.Tensor) or not dense.dim():
        return 0
    return _Parts.of(result).values


def _masked(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseTensor.cpp, sparse_mask: of a dense tensor the elements at the indices, of a sparse one a table;
    SparseCsrTensorMath.cpp: a mask of ones, and all as coordinates."""
    tensor, mask = args[:2]
    if result is tensor:
        return 0
    if compressed(result) and not compressed(tensor):
        every, n = tensor.numel(), _torch.sparse_length(result)
        made = _INDEX * (2 * n + _length(result)) + n * result.element_size()
        return every + max(_INDEX * n, _as_places(result) - made)
    if compressed(result):
        n, rows = _torch.sparse_length(result), _length(result)
        if not n:
            return 0
        return 2 * n * result.element_size() + 7 * _INDEX * n + 2 * _INDEX * rows
    if not coo(tensor):
        return _Parts.of(result).values + mask.element_size()
    parts = _Parts.of(tensor)
    table = 2 * _INDEX * (parts.count + _torch.sparse_length(mask))
    return table if parts.coalesced else table + parts.whole


def _turned(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """TensorShape.cpp, sparse_transpose_: a row of indices."""
    return _INDEX * _torch.sparse_length(result) if coo(result) else 0


def _summed(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseTensorMath.cpp, _sparse_sum: the values summed over dense dimensions, or a copy of them; what is left of
    the indices, to be coalesced."""
    if not coo(args[0]):
        return 0
    parts = _Parts.of(args[0])
    if coo(result):
        indices, values = _torch.sparse_parts(result)
        made = _Parts(parts.count, indices.shape[0], 0, 0, True, False)
        return made.sorting + sum(part.untyped_storage().nbytes() for part in (indices, values))
    over_dense = any(dim >= args[0].sparse_dim() for dim in summed_dims(args, kwargs))
    kept = parts.values
    if over_dense:
        dense = [dim for dim in summed_dims(args, kwargs) if dim >= args[0].sparse_dim()]
        kept //= math.prod(args[0].shape[dim] for dim in dense)
    return kept


def _bag_gradient(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """EmbeddingBag.cpp, _embedding_bag_backward and _embedding_bag_sparse_backward: the bag of each index, where the
    forward pass has not kept it; of a mean, the sizes as numbers, their inverses, and these for each index."""
    indices, bags, sizes, mode, sparse = args[1], args[3], args[4], args[8], args[9]
    if not sparse:
        return 0
    of_each = _INDEX * (indices.numel() + 1) if bags.numel() != indices.numel() else 0
    if mode != _MEAN:
        return of_each
    return of_each + (2 * sizes.numel() + indices.numel()) * args[0].element_size()


_MEAN = 1


def _without_padding(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """TensorAdvancedIndexing.cpp, index: where the mask is true."""
    return _INDEX * args[0].shape[0] if padding_left_out(args) else 0


def _length(tensor: torch.Tensor) -> int:
    """Return how many compressed indices a tensor has."""
    return _torch.sparse_parts(tensor)[0].shape[-1]


def _flipping(tensor: torch.Tensor) -> tuple[int, int]:
    """TensorConversions.cpp, sparse_compressed_to_flipped: return what is made, and what is there beside it at the
    most: the old indices as coordinates, in order; the new ones counted."""
    n, old = _torch.sparse_length(tensor), _length(tensor)
    new = sum(tensor.shape) + 2 - old
    made = _INDEX * (2 * n + new) + n * tensor.element_size()
    return made, _INDEX * (4 * n + old + 2 * new)


def _to_compressed(rows: bool) -> Formula:
    """TensorConversions.cpp, dense_to_sparse_compressed: which elements are not zero, and one half of their indices
    again; a tensor with coordinates is coalesced, for columns after it was turned."""

    def formula(args: Arguments, kwargs: Keywords, result: Any) -> int:
        tensor = args[0]
        if tensor.layout == torch.strided:
            return tensor.numel() * (1 + _INDEX)
        if compressed(tensor):
            return _flipping(tensor)[1]
        parts, made = _Parts.of(tensor), _INDEX * _length(result)
        if rows:
            return max(0, parts.sorting - made)
        sorting = 4 * _INDEX * parts.count
        return parts.whole + max(0, sorting - made)

    return formula


def _to_sparse(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """TensorConversions.cpp, dense_to_sparse: the indices and the values once more; where a dimension stays dense,
    unique_dim first tells which of the indices differ."""
    tensor = args[0]
    if result.layout in (torch.sparse_csr, torch.sparse_csc):
        return _to_compressed(result.layout == torch.sparse_csr)(args, kwargs, result)
    if compressed(tensor):
        return 0
    parts, every = _Parts.of(result), _INDEX * tensor.dim() * tensor.numel()
    if not result.dense_dim():
        return every + parts.values
    n, dims = tensor.numel(), result.sparse_dim()
    copies = 2 if dims > 1 else 1
    telling = _INDEX * n * (copies * dims + 2) - parts.values
    return every + max(telling, parts.values)


def _to_dense(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """TensorConversions.cpp, sparse_compressed_to_dense: the indices as coordinates, then as places in a row."""
    return _as_places(args[0]) if compressed(args[0]) else 0


def _as_places(tensor: torch.Tensor) -> int:
    n, length = _torch.sparse_length(tensor), _length(tensor)
    return _INDEX * (n + length + max(7 * n, 3 * (length - 1))) if n else 0


def _product(first: int) -> Formula:
    """Return what a product takes of which ``args[first]`` and the next are the operands.

    SparseTensorMath.cpp, s_addmm_out_sparse_dense_cpu; SparseBlasImpl.cpp, addmm_sparse_input_dense_result: MKL's
    indices, an operand in order by rows, and rows instead of columns. Without something to add, zeros are made for it.
    """

    def formula(args: Arguments, kwargs: Keywords, result: Any) -> int:
        one, other = args[first : first + 2]
        if result.layout != torch.strided:
            return 0
        zeros = bytes_of(result) if first == 0 else 0
        sparse, dense = (other, one) if _torch.is_sparse(other) else (one, other)
        if coo(sparse):
            turned = _bytes_in(sparse) if sparse is other else 0
            row = _INDEX * _torch.sparse_length(sparse) if turned else 0
            return turned + max(zeros, row)
        return _by_rows(sparse, dense, zeros, bytes_of(result), turned=sparse is other)

    return formula


def _by_rows(sparse: torch.Tensor, dense: torch.Tensor, zeros: int, result: int, *, turned: bool) -> int:
    """SparseBlasImpl.cpp, addmm_sparse_input_dense_result."""
    if not _torch.sparse_length(sparse) or not dense.numel():
        return zeros
    length, at_once, made = _length(sparse), 0, 0
    if (sparse.layout == torch.sparse_csr) == turned:
        made, beside = _flipping(sparse)
        length = sum(sparse.shape) + 2 - length
        # of a product with what is dense first, the result is there already
        at_once = made + beside + (zeros if turned else -result)
    index = _torch.sparse_parts(sparse)[0].dtype
    taken = _MKL_INDEX * (length + _torch.sparse_length(sparse)) if index is torch.int64 else 0
    if turned:
        dense = dense.transpose(-2, -1)
    rows = dense.stride(-1) == 1 and (dense.dim() < 2 or dense.stride(0) >= max(1, dense.shape[1]))
    return max(at_once, made + zeros + taken + (0 if rows else bytes_of(dense)))


def _vector_product(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseBlasImpl.cpp, addmv_out_sparse_csr: MKL's indices; with coordinates, zeros to be added to."""
    return bytes_of(result) if coo(args[0]) else _by_rows(args[0], args[1], 0, 0, turned=False)


def _sampled(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseBlasImpl.cpp, sampled_addmm_sparse_input: the first by rows, the second by columns."""
    return sum(0 if one.is_contiguous() else bytes_of(one) for one in (args[1], args[2].transpose(-2, -1)))


def _sparse_product(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseMatMul.cpp, sparse_matmul_kernel: both by rows."""
    if not all(coo(one) for one in args[:2]):
        return 0
    parts = [_Parts.of(one) for one in args[:2]]
    rows = _INDEX * (2 * (args[0].shape[0] + 1) + args[1].shape[0] + 1)
    return rows + sum(0 if one.coalesced else one.whole for one in parts)


def _reduced_gradient(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseBlas.cpp, _sparse_mm_reduce_impl_backward_sparse_csr_cpu: the indices by columns, in order, and what
    belongs to them; gradients by rows."""
    tensor, gradient, reduction, wanted = args[0], args[1], args[3], args[5]
    n, columns = _torch.sparse_length(tensor), tensor.shape[1] + 1
    by_column = _INDEX * (3 * n + columns)
    sorting = 6 * _INDEX * n
    copy = 0 if gradient.is_contiguous() else bytes_of(gradient)
    made = sum(_bytes_in(one) if _torch.is_sparse(one) else bytes_of(one) for one in result if one is not None)
    of_each = bytes_of(gradient) if reduction in ("amax", "amin") else (_INDEX + tensor.element_size()) * n
    return max(by_column + copy + (of_each if wanted[1] else 0), sorting - made)


FORMULAS: dict[str, Formula] = {
    "aten._coalesce.default": _coalesce,
    **{f"aten.{name}.default": _of_coalesced for name in UNARY},
    "aten.pow.Tensor_Scalar": _of_coalesced,
    "aten.norm.ScalarOpt_dim": _norm,
    "aten.norm.ScalarOpt_dim_dtype": _norm,
    **{f"aten.{name}.Tensor": _added for name in ("add", "add_", "sub", "sub_")},
    "aten.mul.Tensor": _scaled,
    "aten.mul_.Tensor": _scaled,
    "aten.sparse_mask.default": _masked,
    "aten._sparse_mask_projection.default": _masked,
    "aten.t.default": _turned,
    "aten.transpose.int": _turned,
    "aten._sparse_sum.dim": _summed,
    "aten.sum.dim_IntList": _summed,
    "aten._embedding_bag_backward.default": _bag_gradient,
    "aten.index.Tensor": _without_padding,
    "aten._to_sparse.default": _to_sparse,
    "aten._to_sparse.sparse_dim": _to_sparse,
    "aten._to_sparse_csr.default": _to_compressed(True),
    "aten._to_sparse_csc.default": _to_compressed(False),
    "aten._to_dense.default": _to_dense,
    "aten.mm.default": _product(0),
    "aten.addmm.default": _product(1),
    "aten._sparse_addmm.default": _product(1),
    "aten.mv.default": _vector_product,
    "aten.sparse_sampled_addmm.default": _sampled,
    "aten._sparse_sparse_matmul.default": _sparse_product,
    "aten._sparse_mm_reduce_impl_backward.default": _reduced_gradient,
}
"""Overload name -> (args, kwargs, result) -> bytes, where an operand or a result is sparse."""


def concerns(name: str, args: Arguments, result: Any) -> bool:
    """Return whether an op reads or makes a sparse tensor, so that its temporaries are these."""
    values = args[0] if args and isinstance(args[0], (list, tuple)) else args
    if _torch.is_sparse(result) or any(_torch.is_sparse(value) for value in values):
        return True
    return name == "aten.index.Tensor" and padding_left_out(args)


def transient_bytes(name: str, args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the bytes that the kernel holds at its worst moment beyond what was there before and its results."""
    formula = FORMULAS.get(name)
    return 0 if formula is None else max(0, formula(args, kwargs, result))
