"""Temporaries of the CPU's kernels on sparse tensors.

Each formula names its file under ATen/native. ``n`` is the number of stored elements (nnz); an index takes 8 bytes per
sparse dimension. The compressed indices of a matrix have one entry per row (or column) and one more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from memplan import _torch
from memplan.trace.semantics.cpu.sparse_results import UNARY, compressed, coo, padding_left_out, summed_dims
from memplan.trace.semantics.kinds import Arguments, Formula, Keywords
from memplan.trace.semantics.layout import bytes_of, copied

_INDEX, _MKL_INDEX = 8, 4


@dataclass(frozen=True, slots=True)
class _CooSizes:
    """Sizes in bytes of the indices and values of a COO tensor."""

    count: int
    dims: int
    indices: int
    values: int
    contiguous: bool
    coalesced: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _CooSizes:
        indices, values = _torch.sparse_parts(tensor)
        return cls(
            values.shape[0], indices.shape[0], bytes_of(indices), bytes_of(values), values.is_contiguous(),
            tensor.is_coalesced(),
        )  # fmt: skip

    @property
    def total(self) -> int:
        return self.indices + self.values

    @property
    def coalesce_scratch(self) -> int:
        """Scratch bytes of _coalesce_sparse_cpu (SparseTensor.cpp): sorted indices, their permutation and the unsorted
        indices; indices of several dimensions flattened; a contiguous copy of the values."""
        if self.coalesced or self.count < 2:
            return 0
        flat = _INDEX * self.count if self.dims > 1 else 0
        return 3 * _INDEX * self.count + flat + (0 if self.contiguous else self.values)

    @property
    def coalesce_bytes(self) -> int:
        """Bytes of the coalesced tensor and the scratch to make it; 0 if the tensor is coalesced."""
        return 0 if self.coalesced else self.total + self.coalesce_scratch


def _coalesce(args: Arguments, kwargs: Keywords, result: Any) -> int:
    return _CooSizes.of(args[0]).coalesce_scratch


def _unary(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseUnaryOps.cpp, coalesced_unary_ufunc: the input is coalesced first."""
    if not coo(args[0]):
        return 0
    parts = _CooSizes.of(args[0])
    return 0 if parts.coalesced else max(parts.coalesce_bytes - _bytes_of_parts(result), parts.total)


def _norm(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseTensorMath.cpp, norm_sparse."""
    return _CooSizes.of(args[0]).coalesce_bytes if coo(args[0]) else 0


def _bytes_of_parts(tensor: torch.Tensor) -> int:
    return sum(bytes_of(part) for part in _torch.sparse_parts(tensor))


def _added(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseTensorMath.cpp, add_out_dense_sparse_cpu: unless its values and the result are contiguous, an uncoalesced
    operand is coalesced first; values of another dtype are cast."""
    if compressed(result) and all(map(compressed, args[:2])):
        return _added_csr(args[0], args[1], result)
    if coo(result) or not coo(args[1]):
        return 0
    parts = _CooSizes.of(args[1])
    if not parts.coalesced and not (parts.contiguous and result.is_contiguous()):
        return parts.coalesce_bytes
    return 0 if args[1].dtype is result.dtype else parts.values // args[1].element_size() * result.element_size()


def _added_csr(left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> int:
    """SparseBlasImpl.cpp, add_out_sparse_csr: the result starts as a copy of the left operand, whose parts are
    replaced; MKL works on int32 copies of the indices."""
    n, n_left, n_right = (_torch.sparse_length(tensor) for tensor in (result, left, right))
    old_values = n_left * result.element_size()
    if _torch.sparse_parts(left)[0].dtype is not torch.int64:
        return _MKL_INDEX * n_left + max(0, old_values - _MKL_INDEX * n)
    rows = _MKL_INDEX * _compressed_length(result)
    mkl = _MKL_INDEX * (2 * n_left + n_right) + 3 * rows
    with_old_values = old_values + mkl - _INDEX * n
    return _INDEX * n_left + max(with_old_values, mkl - _MKL_INDEX * n, rows + _MKL_INDEX * n)


def _scaled(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseTensorMath.cpp, mul_dense_sparse_out_cpu: the dense elements at the indices;
    SparseBinaryOpIntersectionCommon.h: a hash table of one operand's indices, and the matches of the other's."""
    left, right = args[:2]
    if coo(left) and coo(right):
        counts = sorted((_torch.sparse_length(left), _torch.sparse_length(right)))
        coalesced = left.is_coalesced() and right.is_coalesced()
        return 0 if coalesced else _INDEX * (4 * counts[1] + 2 * counts[0])
    dense = left if coo(right) else right
    if not coo(result) or not isinstance(dense, torch.Tensor) or not dense.dim():
        return 0
    return _CooSizes.of(result).values


def _masked(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseTensor.cpp, sparse_mask: a dense tensor is gathered at the indices, a sparse one looked up in a table of
    indices; SparseCsrTensorMath.cpp: for a compressed mask, a mask of ones and both tensors in COO."""
    tensor, mask = args[:2]
    if result is tensor:
        return 0
    if compressed(result) and not compressed(tensor):
        ones, n = tensor.numel(), _torch.sparse_length(result)
        result_bytes = _INDEX * (2 * n + _compressed_length(result)) + n * result.element_size()
        return ones + max(_INDEX * n, _flat_indices(result) - result_bytes)
    if compressed(result):
        n, rows = _torch.sparse_length(result), _compressed_length(result)
        if not n:
            return 0
        return 2 * n * result.element_size() + 7 * _INDEX * n + 2 * _INDEX * rows
    if not coo(tensor):
        return _CooSizes.of(result).values + mask.element_size()
    parts = _CooSizes.of(tensor)
    table = 2 * _INDEX * (parts.count + _torch.sparse_length(mask))
    return table if parts.coalesced else table + parts.total


def _transposed(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """TensorShape.cpp, sparse_transpose_: a copy of one row of indices."""
    return _INDEX * _torch.sparse_length(result) if coo(result) else 0


def _summed(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseTensorMath.cpp, _sparse_sum: the values summed over dense dimensions, or a copy of them; the remaining
    indices, and the scratch to coalesce them."""
    if not coo(args[0]):
        return 0
    parts = _CooSizes.of(args[0])
    if coo(result):
        indices, values = _torch.sparse_parts(result)
        uncoalesced = _CooSizes(parts.count, indices.shape[0], 0, 0, True, False)
        return uncoalesced.coalesce_scratch + sum(part.untyped_storage().nbytes() for part in (indices, values))
    dense = [dim for dim in summed_dims(args, kwargs) if dim >= args[0].sparse_dim()]
    return parts.values // math.prod(args[0].shape[dim] for dim in dense)


def _bag_gradient(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """EmbeddingBag.cpp, _embedding_bag_backward and _embedding_bag_sparse_backward: the bag of each index, unless saved
    by the forward; for a mean, the bag sizes as floats, their inverses, and an inverse per index."""
    indices, bags, sizes, mode, sparse = args[1], args[3], args[4], args[8], args[9]
    if not sparse:
        return 0
    bag_of_each = _INDEX * (indices.numel() + 1) if bags.numel() != indices.numel() else 0
    if mode != _MEAN:
        return bag_of_each
    return bag_of_each + (2 * sizes.numel() + indices.numel()) * args[0].element_size()


_MEAN = 1


def _without_padding(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """TensorAdvancedIndexing.cpp, index: the int64 positions where the mask is true."""
    return _INDEX * args[0].shape[0] if padding_left_out(args) else 0


def _compressed_length(tensor: torch.Tensor) -> int:
    """Return the length of the compressed indices."""
    return _torch.sparse_parts(tensor)[0].shape[-1]


def _flipped(tensor: torch.Tensor) -> tuple[int, int]:
    """TensorConversions.cpp, sparse_compressed_to_flipped (CSR to CSC and back): bytes of the result, and of the most
    that is allocated with it: the old indices in COO, sorted, and the counts of the new ones."""
    n, old = _torch.sparse_length(tensor), _compressed_length(tensor)
    new = sum(tensor.shape) + 2 - old
    result = _INDEX * (2 * n + new) + n * tensor.element_size()
    return result, _INDEX * (4 * n + old + 2 * new)


def _to_compressed(rows: bool) -> Formula:
    """TensorConversions.cpp, dense_to_sparse_compressed: the nonzero mask and a copy of one row of indices. A COO
    tensor is coalesced first; for columns it is transposed before."""

    def formula(args: Arguments, kwargs: Keywords, result: Any) -> int:
        tensor = args[0]
        if tensor.layout == torch.strided:
            return tensor.numel() * (1 + _INDEX)
        if compressed(tensor):
            return _flipped(tensor)[1]
        parts, compressed_indices = _CooSizes.of(tensor), _INDEX * _compressed_length(result)
        if rows:
            return max(0, parts.coalesce_scratch - compressed_indices)
        scratch = 4 * _INDEX * parts.count
        return parts.total + max(0, scratch - compressed_indices)

    return formula


def _to_sparse(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """TensorConversions.cpp, dense_to_sparse: a copy of the indices and of the values; with dense dimensions,
    unique_dim finds the distinct indices first."""
    tensor = args[0]
    if result.layout in (torch.sparse_csr, torch.sparse_csc):
        return _to_compressed(result.layout == torch.sparse_csr)(args, kwargs, result)
    if compressed(tensor):
        return 0
    parts, nonzero = _CooSizes.of(result), _INDEX * tensor.dim() * tensor.numel()
    if not result.dense_dim():
        return nonzero + parts.values
    n, dims = tensor.numel(), result.sparse_dim()
    copies = 2 if dims > 1 else 1
    unique = _INDEX * n * (copies * dims + 2) - parts.values
    return nonzero + max(unique, parts.values)


def _to_dense(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """TensorConversions.cpp, sparse_compressed_to_dense: the indices in COO, then flattened."""
    return _flat_indices(args[0]) if compressed(args[0]) else 0


def _flat_indices(tensor: torch.Tensor) -> int:
    n, length = _torch.sparse_length(tensor), _compressed_length(tensor)
    return _INDEX * (n + length + max(7 * n, 3 * (length - 1))) if n else 0


def _product(first: int) -> Formula:
    """Return the formula of the matrix product of ``args[first]`` and the next argument.

    SparseTensorMath.cpp, s_addmm_out_sparse_dense_cpu; SparseBlasImpl.cpp, addmm_sparse_input_dense_result: MKL's int32
    indices, a row-major copy of the dense operand, and CSC converted to CSR. `mm` adds to a tensor of zeros.
    """

    def formula(args: Arguments, kwargs: Keywords, result: Any) -> int:
        left, right = args[first : first + 2]
        if result.layout != torch.strided:
            return 0
        zeros = bytes_of(result) if first == 0 else 0
        sparse, dense = (right, left) if _torch.is_sparse(right) else (left, right)
        if coo(sparse):
            transposed = _bytes_of_parts(sparse) if sparse is right else 0
            row = _INDEX * _torch.sparse_length(sparse) if transposed else 0
            return transposed + max(zeros, row)
        return _csr_product(sparse, dense, zeros, bytes_of(result), transposed=sparse is right)

    return formula


def _csr_product(sparse: torch.Tensor, dense: torch.Tensor, zeros: int, result: int, *, transposed: bool) -> int:
    """SparseBlasImpl.cpp, addmm_sparse_input_dense_result."""
    if not _torch.sparse_length(sparse) or not dense.numel():
        return zeros
    length, while_flipping, flipped = _compressed_length(sparse), 0, 0
    if (sparse.layout == torch.sparse_csr) == transposed:
        flipped, scratch = _flipped(sparse)
        length = sum(sparse.shape) + 2 - length
        # Of dense @ sparse, the result is allocated before.
        while_flipping = flipped + scratch + (zeros if transposed else -result)
    index = _torch.sparse_parts(sparse)[0].dtype
    mkl_indices = _MKL_INDEX * (length + _torch.sparse_length(sparse)) if index is torch.int64 else 0
    if transposed:
        dense = dense.transpose(-2, -1)
    row_major = dense.stride(-1) == 1 and (dense.dim() < 2 or dense.stride(0) >= max(1, dense.shape[1]))
    return max(while_flipping, flipped + zeros + mkl_indices + (0 if row_major else bytes_of(dense)))


def _vector_product(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseBlasImpl.cpp, addmv_out_sparse_csr: MKL's int32 indices; in COO, zeros that the product is added to."""
    return bytes_of(result) if coo(args[0]) else _csr_product(args[0], args[1], 0, 0, transposed=False)


def _sampled(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseBlasImpl.cpp, sampled_addmm_sparse_input: the left operand row-major, the right one column-major."""
    return copied(args[1]) + copied(args[2].transpose(-2, -1))


def _sparse_product(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseMatMul.cpp, sparse_matmul_kernel: both operands coalesced and converted to CSR."""
    if not all(map(coo, args[:2])):
        return 0
    operands = [_CooSizes.of(operand) for operand in args[:2]]
    compressed_indices = _INDEX * (2 * (args[0].shape[0] + 1) + args[1].shape[0] + 1)
    return compressed_indices + sum(0 if operand.coalesced else operand.total for operand in operands)


def _reduced_gradient(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """SparseBlas.cpp, _sparse_mm_reduce_impl_backward_sparse_csr_cpu: the indices sorted by column with their rows and
    permutation; a contiguous copy of the gradient; the gradient per element."""
    tensor, gradient, reduction, mask = args[0], args[1], args[3], args[5]
    n, columns = _torch.sparse_length(tensor), tensor.shape[1] + 1
    by_column = _INDEX * (3 * n + columns)
    sort_scratch = 6 * _INDEX * n
    results = sum(
        _bytes_of_parts(grad) if _torch.is_sparse(grad) else bytes_of(grad) for grad in result if grad is not None
    )
    per_element = bytes_of(gradient) if reduction in ("amax", "amin") else (_INDEX + tensor.element_size()) * n
    return max(by_column + copied(gradient) + (per_element if mask[1] else 0), sort_scratch - results)


FORMULAS: dict[str, Formula] = {
    "aten._coalesce.default": _coalesce,
    **{f"aten.{name}.default": _unary for name in UNARY},
    "aten.pow.Tensor_Scalar": _unary,
    "aten.norm.ScalarOpt_dim": _norm,
    "aten.norm.ScalarOpt_dim_dtype": _norm,
    **{f"aten.{name}.Tensor": _added for name in ("add", "add_", "sub", "sub_")},
    "aten.mul.Tensor": _scaled,
    "aten.mul_.Tensor": _scaled,
    "aten.sparse_mask.default": _masked,
    "aten._sparse_mask_projection.default": _masked,
    "aten.t.default": _transposed,
    "aten.transpose.int": _transposed,
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
"""Overload name -> (args, kwargs, result) -> bytes, of ops with a sparse operand or result."""


def concerns(name: str, args: Arguments, result: Any) -> bool:
    """Return whether an op reads or returns a sparse tensor, so that the formulas of this module apply."""
    values = args[0] if args and isinstance(args[0], (list, tuple)) else args
    if _torch.is_sparse(result) or any(_torch.is_sparse(value) for value in values):
        return True
    return name == "aten.index.Tensor" and padding_left_out(args)


def transient_bytes(name: str, args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the peak bytes that the kernel allocates beyond its results."""
    formula = FORMULAS.get(name)
    return 0 if formula is None else max(0, formula(args, kwargs, result))
