"""Results of CPU ops on sparse tensors, with indices and values of the sizes that the kernels allocate.

The fake-tensor kernels make every sparse result an empty one. The number of elements (nnz) can depend on values:
unknown indices are assumed to be all different (at most one per row), and no element of a dense tensor to be zero. This
is the upper bound, and `assumed` reports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memplan import _torch
from memplan.errors import DataDependentError
from memplan.trace.semantics.kinds import Arguments, Keywords

Instead = Callable[[Arguments, Keywords], Any]

UNARY = (
    "abs", "asin", "asinh", "atan", "atanh", "ceil", "deg2rad", "erf", "erfinv", "expm1", "floor", "frac", "isinf",
    "isnan", "isneginf", "isposinf", "log1p", "rad2deg", "relu", "round", "sgn", "sign", "signbit", "sin", "sinh",
    "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
"""Elementwise ops that coalesce their input first. Source: aten/src/ATen/native/sparse/SparseUnaryOps.cpp."""
_COALESCE = "aten._coalesce.default"


def coo(tensor: Any) -> bool:
    """Return whether `tensor` is a sparse COO tensor."""
    return isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_coo


def compressed(tensor: Any) -> bool:
    """Return whether `tensor` is a tensor in a compressed sparse layout (CSR, CSC, BSR, BSC)."""
    return _torch.is_sparse(tensor) and tensor.layout != torch.sparse_coo


def rows_of(shape: tuple[int, ...], sparse_dim: int) -> int:
    """Return how many different indices a sparse tensor of this shape can have."""
    return math.prod(shape[:sparse_dim])


def _new(
    like: torch.Tensor,
    count: int,
    *,
    coalesced: bool,
    stored: int | None = None,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    known: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a new COO tensor like `like` with `count` elements, in storages allocated for `stored` elements."""
    indices, values = _torch.sparse_parts(like)
    stored = count if stored is None else stored
    return _torch.sparse_coo(
        indices.new_empty((indices.shape[0], stored)).narrow(1, 0, count),
        values.new_empty((stored, *values.shape[1:]), dtype=dtype).narrow(0, 0, count),
        tuple(like.shape) if shape is None else shape,
        coalesced=coalesced,
        known=known,
    )


def copied(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a copy of a sparse tensor: new indices and new values."""
    if not coo(tensor):
        *indices, values = _torch.sparse_parts(tensor)
        parts = [*(part.new_empty(part.shape) for part in indices), values.new_empty(values.shape, dtype=dtype)]
        return _torch.sparse_compressed(tensor.layout, parts, tensor.shape)
    known = _torch.known_indices(tensor)
    return _new(tensor, _torch.sparse_length(tensor), coalesced=tensor.is_coalesced(), dtype=dtype, known=known)


def is_stolen_by_engine(tensor: torch.Tensor) -> bool:
    """Return whether AccumulateGrad keeps this gradient as the parameter's `.grad` instead of cloning it.

    Under a dispatch mode it clones. Source: torch/csrc/autograd/functions/accumulate_grad.h, `accumulateGrad`.
    """
    node = _torch.backward_node() if _torch.in_backward() and not torch.is_grad_enabled() else None
    if node is None or node.name() != "torch::autograd::AccumulateGrad" or not _torch.called_by_engine():
        return False
    return all(part.is_contiguous() for part in _torch.sparse_parts(tensor))


def _copy(args: Arguments, kwargs: Keywords) -> Any:
    """SparseTensor.cpp, clone_sparse; SparseCsrTensor.cpp, clone_sparse_compressed; and dtype conversions."""
    if not _torch.is_sparse(args[0]) or kwargs.get("layout") not in (None, args[0].layout):
        return NotImplemented
    if coo(args[0]) and is_stolen_by_engine(args[0]):
        known, (indices, values) = _torch.known_indices(args[0]), _torch.sparse_parts(args[0])
        return _torch.sparse_coo(indices, values, args[0].shape, coalesced=args[0].is_coalesced(), known=known)
    return copied(args[0], kwargs.get("dtype"))


def _copy_of_argument(position: int) -> Instead:
    """Return the op whose result has the indices of argument `position` and new values."""
    return lambda args, kwargs: copied(args[position]) if coo(args[position]) else NotImplemented


def coalesced(tensor: torch.Tensor) -> torch.Tensor:
    """SparseTensor.cpp, _coalesce_sparse_cpu: storages for all elements, of which the result uses the distinct ones."""
    if tensor.is_coalesced():
        return tensor
    count, known = _torch.sparse_length(tensor), _torch.known_indices(tensor)
    if known is not None:
        known = _torch.distinct(known)
    distinct = min(count, rows_of(tensor.shape, tensor.sparse_dim())) if known is None else known.shape[1]
    return _new(tensor, distinct, stored=count, coalesced=True, known=known)


def _coalesce(args: Arguments, kwargs: Keywords) -> Any:
    return copied(args[0]) if args[0].is_coalesced() else coalesced(args[0])


def _from_parts(args: Arguments, kwargs: Keywords) -> Any:
    """A COO tensor that shares the storages of the indices and values it is built from."""
    _, _, shape, indices, values = args
    dtype = kwargs.get("dtype")
    if not isinstance(indices, torch.Tensor) or dtype not in (None, values.dtype):
        return NotImplemented
    return _torch.sparse_coo(indices, values, shape, coalesced=bool(kwargs.get("is_coalesced")))


def _elementwise(name: str) -> Instead:
    """SparseUnaryOps.cpp and SparseTensorMath.cpp, pow_out_sparse_scalar: coalesce, then compute new values."""
    op: Any = _torch.op_named(name)

    def result(args: Arguments, kwargs: Keywords) -> Any:
        tensor = args[0]
        if not _torch.is_sparse(tensor):
            return NotImplemented
        values: Any = op(_torch.sparse_parts(tensor)[-1], *args[1:], **kwargs)
        return copied(coalesced(tensor) if coo(tensor) else tensor, values.dtype)

    return result


def _added(args: Arguments, kwargs: Keywords) -> Any:
    """SparseTensorMath.cpp, add_out_sparse_cpu: the elements of both; if both are coalesced, equal indices merge."""
    left, right = args[:2]
    if compressed(left) or compressed(right):
        return _added_compressed(left, right)
    if not coo(left) or not coo(right):
        return NotImplemented
    stored, coalesced = sum(map(_torch.sparse_length, (left, right))), left.is_coalesced() and right.is_coalesced()
    count = min(stored, rows_of(left.shape, left.sparse_dim())) if coalesced else stored
    return _new(left, count, stored=stored, coalesced=coalesced, dtype=torch.result_type(left, right))


def _added_compressed(left: Any, right: Any) -> Any:
    """SparseCsrTensorMath.cpp: the sum of two matrices of which one is compressed; dense if the other is dense."""
    if not (_torch.is_sparse(left) and _torch.is_sparse(right)):
        return (right if _torch.is_sparse(left) else left).new_empty(left.shape, dtype=torch.result_type(left, right))
    if left.layout != torch.sparse_csr or right.layout != torch.sparse_csr or left.dim() != 2:
        return NotImplemented
    starts, columns, values = _torch.sparse_parts(left)
    n = min(_torch.sparse_length(left) + _torch.sparse_length(right), left.numel())
    dtype = torch.result_type(left, right)
    parts = starts.new_empty(starts.shape), columns.new_empty(n), values.new_empty(n, dtype=dtype)
    return _torch.sparse_compressed(left.layout, parts, left.shape)


def _is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or (value.layout == torch.strided and value.dim() == 0)


def _scaled(args: Arguments, kwargs: Keywords) -> Any:
    """A product with a scalar, a dense or a sparse tensor; of two sparse tensors, the elements at common indices.

    Source: SparseTensorMath.cpp, mul_out_sparse_zerodim, div_out_sparse_zerodim and mul_dense_sparse_out_cpu;
    SparseBinaryOpIntersectionCommon.h.
    """
    tensor, factor = args[:2]
    if _is_number(tensor) or (not _torch.is_sparse(tensor) and coo(factor)):
        tensor, factor = factor, tensor
    if not _torch.is_sparse(tensor) or (compressed(tensor) and not _is_number(factor)):
        return NotImplemented
    dtype = torch.result_type(*args[:2])
    if coo(factor):
        coalesced = tensor.is_coalesced() and factor.is_coalesced()
        count = min(_torch.sparse_length(tensor), _torch.sparse_length(factor))
        return _new(tensor, count, coalesced=coalesced, dtype=dtype)
    return copied(tensor, dtype)


def _divided(args: Arguments, kwargs: Keywords) -> Any:
    if not _torch.is_sparse(args[0]) or not _is_number(args[1]):
        return NotImplemented
    dtype = torch.result_type(*args[:2])
    to_float = not (dtype.is_floating_point or dtype.is_complex) and kwargs.get("rounding_mode") is None
    return copied(args[0], torch.get_default_dtype() if to_float else dtype)


def _in_place(functional: Instead) -> Instead:
    """Return the in-place version of `functional`: the first argument takes over the parts of the result."""

    def result(args: Arguments, kwargs: Keywords) -> Any:
        if args[0].layout == torch.strided and any(map(compressed, args)):
            return args[0]  # dense
        replacement = functional(args, kwargs) if coo(args[0]) else NotImplemented
        return replacement if replacement is NotImplemented else _torch.become(args[0], replacement)

    return result


def _overwritten_values(args: Arguments, kwargs: Keywords) -> Any:
    """In-place ops that write into the existing values and leave the indices alone."""
    return args[0] if _torch.is_sparse(args[0]) else NotImplemented


def _zeroed(args: Arguments, kwargs: Keywords) -> Any:
    """SparseTensorMath.cpp, zero_sparse_."""
    return _new(args[0], 0, coalesced=True)


def _copied_from(args: Arguments, kwargs: Keywords) -> Any:
    """SparseTensor.cpp, copy_sparse_."""
    return copied(args[1], args[0].dtype) if coo(args[1]) else NotImplemented


def _masked(args: Arguments, kwargs: Keywords) -> Any:
    """SparseTensor.cpp, sparse_mask, and SparseCsrTensorMath.cpp, sparse_mask_sparse_compressed."""
    tensor, mask = args[:2]
    if coo(mask):
        return tensor if tensor is mask and mask.is_coalesced() else copied(mask, tensor.dtype)
    if compressed(tensor):
        return copied(mask, tensor.dtype)
    if mask.dim() != 2 or mask.layout not in (torch.sparse_csr, torch.sparse_csc):
        return NotImplemented
    return _compressed_of_nonzero(mask.layout, _torch.sparse_length(mask), tensor)


def _transposed(args: Arguments, kwargs: Keywords) -> Any:
    """TensorShape.cpp, sparse_transpose_: a copy with two rows of the indices swapped. Compressed layouts share all
    parts."""
    tensor = args[0]
    if not coo(tensor):
        return NotImplemented
    dim0, dim1 = (int(dim) % tensor.dim() for dim in (args[1:3] or (0, tensor.dim() - 1)))
    if tensor.dim() < 2 or dim0 == dim1 or max(dim0, dim1) >= tensor.sparse_dim():
        return NotImplemented
    shape = list(tensor.shape)
    shape[dim0], shape[dim1] = shape[dim1], shape[dim0]
    return _new(tensor, _torch.sparse_length(tensor), coalesced=False, shape=tuple(shape))


def _concatenated(args: Arguments, kwargs: Keywords) -> Any:
    """SparseTensor.cpp, cat_sparse."""
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not all(coo(tensor) for tensor in tensors) or dim % tensors[0].dim() >= tensors[0].sparse_dim():
        return NotImplemented
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    count = sum(_torch.sparse_length(tensor) for tensor in tensors)
    return _new(tensors[0], count, coalesced=False, shape=tuple(shape))


def summed_dims(args: Arguments, kwargs: Keywords) -> list[int]:
    """Return the sorted dimensions that a sum reduces."""
    rank, dims = int(args[0].dim()), kwargs.get("dim", args[1] if len(args) > 1 else None)
    return sorted(range(rank) if not dims else [dim % rank for dim in ([dims] if isinstance(dims, int) else dims)])


def _summed(args: Arguments, kwargs: Keywords) -> Any:
    """SparseTensorMath.cpp, _sparse_sum: dense if all sparse dimensions are reduced, else COO and coalesced."""
    tensor = args[0]
    if not coo(tensor):
        return NotImplemented
    dims, sparse = summed_dims(args, kwargs), tensor.sparse_dim()
    dims_left = [dim for dim in range(tensor.dim()) if dim not in dims]
    sparse_left, dense_left = ([dim for dim in dims_left if (dim < sparse) is first] for first in (True, False))
    shape, values = tuple(tensor.shape[dim] for dim in dims_left), _torch.sparse_parts(tensor)[1]
    dtype = kwargs.get("dtype") or tensor.dtype
    if not sparse_left:
        return values.new_empty(shape, dtype=dtype)
    count = _torch.sparse_length(tensor)
    distinct = min(count, rows_of(shape, len(sparse_left)))
    int64_values = torch.empty_like(values, dtype=torch.int64)
    indices = int64_values.new_empty((len(sparse_left), count)).narrow(1, 0, distinct)
    values = values.new_empty((count, *(tensor.shape[dim] for dim in dense_left)), dtype=dtype).narrow(0, 0, distinct)
    return _torch.sparse_coo(indices, values, shape, coalesced=True)


def _bag_gradient(args: Arguments, kwargs: Keywords) -> Any:
    """EmbeddingBag.cpp, _embedding_bag_sparse_backward and _embedding_bag_dense_backward_cpu."""
    gradient, indices, rows, sparse = args[0], args[1], args[6], args[9]
    width = gradient.shape[-1]
    if not sparse:
        return gradient.new_empty((rows, width))
    values = gradient.new_empty((indices.numel(), width))
    return _torch.sparse_coo(indices.reshape(1, -1), values, (rows, width), coalesced=False)


def padding_left_out(args: Arguments) -> bool:
    """Return whether this indexing is how the sparse gradient of an embedding drops `padding_idx` (Embedding.cpp)."""
    indices = args[1] if len(args) > 1 else None
    if not isinstance(indices, (list, tuple)) or len(indices) != 1 or not isinstance(indices[0], torch.Tensor):
        return False
    if indices[0].dtype is not torch.bool or not _torch.in_backward():
        return False
    node = _torch.backward_node()
    return node is not None and node.name() == "EmbeddingBackward0"


def _without_padding(args: Arguments, kwargs: Keywords) -> Any:
    return args[0].new_empty(args[0].shape) if padding_left_out(args) else NotImplemented


def _compressed_of_nonzero(layout: torch.layout, count: int, like: torch.Tensor) -> torch.Tensor:
    """Return a CSR or CSC tensor whose plain indices are a view of one row of `nonzero()`'s two."""
    length = like.shape[0 if layout == torch.sparse_csr else 1] + 1
    dense = like if like.layout == torch.strided else _torch.sparse_parts(like)[-1]
    plain = dense.new_empty((2, count), dtype=torch.int64).select(0, 1)
    return _torch.sparse_compressed(layout, (plain.new_empty(length), plain, dense.new_empty(count)), like.shape)


def _to_compressed(layout: torch.layout) -> Instead:
    """Conversion to CSR or CSC.

    Source: SparseCsrTensor.cpp and TensorConversions.cpp, dense_to_sparse_compressed, coo_to_sparse_csr and
    sparse_compressed_to_flipped.
    """

    def result(args: Arguments, kwargs: Keywords) -> Any:
        tensor = args[0]
        if tensor.dim() != 2 or (compressed(tensor) and tensor.layout not in (torch.sparse_csr, torch.sparse_csc)):
            return NotImplemented
        if not coo(tensor) or layout == torch.sparse_csc:
            count = tensor.numel() if tensor.layout == torch.strided else _torch.sparse_length(tensor)
            return _compressed_of_nonzero(layout, count, tensor)
        indices, values = _torch.sparse_parts(coalesced(tensor))
        parts = indices.new_empty(tensor.shape[0] + 1), indices.select(0, 1), values
        return _torch.sparse_compressed(layout, parts, tensor.shape)

    return result


def _to_sparse(args: Arguments, kwargs: Keywords) -> Any:
    """TensorConversions.cpp, dense_to_sparse and sparse_compressed_to_sparse_coo."""
    tensor, layout = args[0], kwargs.get("layout", torch.sparse_coo)
    if layout in (torch.sparse_csr, torch.sparse_csc):
        return _to_compressed(layout)(args, kwargs)
    if layout not in (None, torch.sparse_coo) or coo(tensor):
        return NotImplemented
    if compressed(tensor):
        compressed_indices, _, values = _torch.sparse_parts(tensor)
        indices = compressed_indices.new_empty((2, values.shape[0]))
        return _torch.sparse_coo(indices, values, tensor.shape, coalesced=True)
    sparse_dim = args[1] if len(args) > 1 and isinstance(args[1], int) else tensor.dim()
    count = rows_of(tensor.shape, sparse_dim)
    indices = tensor.new_empty((sparse_dim, count), dtype=torch.int64)
    values = tensor.new_empty((count, *tensor.shape[sparse_dim:]))
    return _torch.sparse_coo(indices, values, tensor.shape, coalesced=True)


def _compressed_from_parts(args: Arguments, kwargs: Keywords) -> Any:
    """SparseCsrTensor.cpp, sparse_compressed_tensor, which shares the storages of its parts."""
    *parts, shape = args
    fake = all(isinstance(part, _torch.FakeTensor) for part in parts)
    return _torch.sparse_compressed(kwargs.get("layout", torch.sparse_csr), parts, shape) if fake else NotImplemented


def _without_size(args: Arguments, kwargs: Keywords) -> Any:
    raise DataDependentError(
        "a sparse tensor is made without its size, which then depends on the largest of its indices",
        expected="shapes that follow from the shapes of the inputs",
        do="Give the size: torch.sparse_csr_tensor(crow_indices, col_indices, values, size)",
    )


def _sampled(args: Arguments, kwargs: Keywords) -> Any:
    """SparseBlasImpl.cpp, sampled_addmm_out_sparse_csr."""
    return copied(args[0]) if compressed(args[0]) else NotImplemented


def _product(args: Arguments, kwargs: Keywords) -> Any:
    """SparseMatMul.cpp, sparse_sparse_matmul_cpu. Upper bound: each element meets a whole row of the other matrix."""
    left, right = args
    if not coo(left) or not coo(right):
        return NotImplemented
    shape = (left.shape[0], right.shape[1])
    count = min(math.prod(shape), _torch.sparse_length(left) * min(_torch.sparse_length(right), right.shape[1]))
    return _new(left, count, coalesced=True, shape=shape)


def _dense_product(first: int) -> Instead:
    """SparseBlas.cpp, addmm_out_sparse_compressed_cpu, of `args[first]` and the next argument. Fake tensors have no
    kernel for it."""

    def result(args: Arguments, kwargs: Keywords) -> Any:
        left, right = args[first : first + 2]
        if not (compressed(left) or compressed(right)) or (_torch.is_sparse(left) and _torch.is_sparse(right)):
            return NotImplemented
        dense = right if _torch.is_sparse(left) else left
        return dense.new_empty((left.shape[0], right.shape[1]))

    return result


def _reduced(args: Arguments, kwargs: Keywords) -> Any:
    """SparseBlas.cpp, _sparse_mm_reduce_impl_sparse_csr_cpu: the result, and for amax and amin the argmax that backward
    needs."""
    tensor, other, reduction = args
    result = other.new_empty((tensor.shape[0], other.shape[1]))
    needs_argmax = reduction in ("amax", "amin") and torch.is_grad_enabled()
    needs_argmax = needs_argmax and (tensor.requires_grad or other.requires_grad)
    return result, other.new_empty(result.shape if needs_argmax else (0,), dtype=torch.int64)


def _reduced_gradient(args: Arguments, kwargs: Keywords) -> Any:
    """SparseBlas.cpp, _sparse_mm_reduce_impl_backward_sparse_csr_cpu."""
    tensor, other, mask = args[0], args[2], args[5]
    return copied(tensor) if mask[0] else None, other.new_empty(other.shape) if mask[1] else None


INSTEAD: Mapping[str, Instead] = {
    "aten.clone.default": _copy,
    "aten._to_copy.default": _copy,
    "aten.neg.default": _copy,
    **{f"aten._sparse_{name}.default": _copy for name in ("softmax", "log_softmax")},
    **{f"aten._sparse_{name}_backward_data.default": _copy_of_argument(1) for name in ("softmax", "log_softmax")},
    "aten._sparse_sum_backward.default": _copy_of_argument(1),
    "aten._sparse_mask_projection.default": _copy_of_argument(1),
    _COALESCE: _coalesce,
    "aten._sparse_coo_tensor_with_dims_and_tensors.default": _from_parts,
    **{f"aten.{name}.default": _elementwise(f"aten.{name}.default") for name in UNARY},
    "aten.pow.Tensor_Scalar": _elementwise("aten.pow.Tensor_Scalar"),
    **{f"aten.{name}_.default": _overwritten_values for name in (*UNARY, "neg")},
    "aten.add.Tensor": _added,
    "aten.sub.Tensor": _added,
    "aten.mul.Tensor": _scaled,
    "aten.mul.Scalar": _scaled,
    "aten.div.Tensor": _divided,
    "aten.div.Tensor_mode": _divided,
    "aten.div_.Tensor": _overwritten_values,
    **{f"aten.{name}_.Tensor": _in_place(_added) for name in ("add", "sub")},
    "aten.mul_.Tensor": _in_place(_scaled),
    "aten.mul_.Scalar": _in_place(_scaled),
    "aten.zero_.default": _in_place(_zeroed),
    "aten.copy_.default": _in_place(_copied_from),
    "aten.sparse_mask.default": _masked,
    "aten.t.default": _transposed,
    "aten.transpose.int": _transposed,
    "aten.cat.default": _concatenated,
    "aten._sparse_sum.dim": _summed,
    "aten.sum.dim_IntList": _summed,
    "aten._embedding_bag_backward.default": _bag_gradient,
    "aten.index.Tensor": _without_padding,
    "aten._to_sparse.default": _to_sparse,
    "aten._to_sparse.sparse_dim": _to_sparse,
    "aten._to_sparse_csr.default": _to_compressed(torch.sparse_csr),
    "aten._to_sparse_csc.default": _to_compressed(torch.sparse_csc),
    "aten.sparse_compressed_tensor.comp_plain_value_size": _compressed_from_parts,
    "aten.sparse_compressed_tensor.comp_plain_value": _without_size,
    "aten.sparse_sampled_addmm.default": _sampled,
    "aten._sparse_sparse_matmul.default": _product,
    "aten.mm.default": _dense_product(0),
    "aten.addmm.default": _dense_product(1),
    "aten._sparse_addmm.default": _dense_product(1),
    "aten._sparse_mm_reduce_impl.default": _reduced,
    "aten._sparse_mm_reduce_impl_backward.default": _reduced_gradient,
}
"""Overload name -> (args, kwargs) -> the result, or NotImplemented if no sparse tensor is involved."""


_RIGHT_IN_FAKE_TENSORS = frozenset(
    f"aten.{name}.default"
    for name in ("_indices", "_values", "indices", "values", "crow_indices", "col_indices", "ccol_indices",
                 "row_indices", "detach", "alias", "t", "zeros_like", "empty_like", "_coalesced_")
) | {"aten.transpose.int"}  # fmt: skip
"""Ops whose sparse results the fake-tensor kernels get right."""
_ALL_DIFFERENT = "indices of a sparse tensor were taken as all different, or as many as there are rows: never more"
_NOT_IN_COMMON = "sparse tensors that are added were taken to have no index in common: never more"
_UPPER_BOUNDS = {
    "aten._sparse_sparse_matmul.default": "a product of sparse tensors was taken as large as it can be: never more",
    **{f"aten.{name}.Tensor": _NOT_IN_COMMON for name in ("add", "add_", "sub", "sub_")},
}
_NO_ZERO = "a dense tensor was made sparse and no element of it taken as zero: never more"


def assumed(name: str, args: Arguments, result: Any, answered: bool) -> str | None:
    """Return the assumption behind an op's sparse result, as text for the report; None if the result is exact or dense.

    ``answered``: whether the result came from `INSTEAD`.
    """
    if name.startswith("aten._foreach_") and any(map(_torch.is_sparse, args[0])):
        return _not_counted(name)
    if not _torch.is_sparse(result):
        drops_padding = name == "aten.index.Tensor" and padding_left_out(args)
        return "no index of an embedding was taken as its padding: never more" if drops_padding else None
    if name == _COALESCE:
        return None if args[0]._nnz() < 2 or _torch.known_indices(args[0]) is not None else _ALL_DIFFERENT
    if name.startswith("aten._to_sparse") and args[0].layout == torch.strided:
        return _NO_ZERO
    if name in _UPPER_BOUNDS and all(map(_torch.is_sparse, args[:2])):
        return _UPPER_BOUNDS[name]
    if answered or name in _RIGHT_IN_FAKE_TENSORS:
        return None
    return _not_counted(name)


def _not_counted(name: str) -> str:
    return f"{name.removeprefix('aten.').split('.')[0]}: what it makes of sparse tensors is not known and NOT COUNTED"
