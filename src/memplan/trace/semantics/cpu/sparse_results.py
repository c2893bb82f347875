"""Results of ops on sparse tensors, with the memory that the CPU's kernels give them.

A fake tensor's kernels make every sparse result an empty one. How many elements a result holds can depend on values: of
indices that are not known all are taken to be different, as many as there are rows, and of a dense tensor no element
is taken to be zero. That is the most that it can be, and `assumed` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memplan import _torch
from memplan.errors import DataDependentError

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
Instead = Callable[[Arguments, Keywords], Any]

UNARY = (
    "abs", "asin", "asinh", "atan", "atanh", "ceil", "deg2rad", "erf", "erfinv", "expm1", "floor", "frac", "isinf",
    "isnan", "isneginf", "isposinf", "log1p", "rad2deg", "relu", "round", "sgn", "sign", "signbit", "sin", "sinh",
    "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
"""Ops on the values of what is coalesced first. Source: aten/src/ATen/native/sparse/SparseUnaryOps.cpp."""
_COALESCE = "aten._coalesce.default"


def coo(tensor: Any) -> bool:
    """Return whether something is a sparse tensor with coordinates."""
    return isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_coo


def compressed(tensor: Any) -> bool:
    """Return whether something is a tensor in a compressed sparse layout."""
    return _torch.is_sparse(tensor) and tensor.layout != torch.sparse_coo


def rows_of(shape: tuple[int, ...], sparse_dim: int) -> int:
    """Return how many different indices there are."""
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
    """Return a new sparse tensor of ``count`` elements, in storages made for ``stored`` of them."""
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
    """Return a sparse tensor like another, all of it new."""
    if not coo(tensor):
        *indices, values = _torch.sparse_parts(tensor)
        parts = [*(one.new_empty(one.shape) for one in indices), values.new_empty(values.shape, dtype=dtype)]
        return _torch.sparse_compressed(tensor.layout, parts, tensor.shape)
    known = _torch.known_indices(tensor)
    return _new(tensor, _torch.sparse_length(tensor), coalesced=tensor.is_coalesced(), dtype=dtype, known=known)


def taken_over(tensor: torch.Tensor) -> bool:
    """Return whether the engine takes a gradient for a parameter's as it is. Under a dispatch mode it copies it.

    Source: torch/csrc/autograd/functions/accumulate_grad.h, `accumulateGrad`.
    """
    node = _torch.backward_node() if _torch.in_backward() and not torch.is_grad_enabled() else None
    if node is None or node.name() != "torch::autograd::AccumulateGrad" or not _torch.called_by_engine():
        return False
    return all(part.is_contiguous() for part in _torch.sparse_parts(tensor))


def _copy(args: Arguments, kwargs: Keywords) -> Any:
    """SparseTensor.cpp, clone_sparse; SparseCsrTensor.cpp, clone_sparse_compressed; and conversions of values."""
    if not _torch.is_sparse(args[0]) or kwargs.get("layout") not in (None, args[0].layout):
        return NotImplemented
    if coo(args[0]) and taken_over(args[0]):
        known, (indices, values) = _torch.known_indices(args[0]), _torch.sparse_parts(args[0])
        return _torch.sparse_coo(indices, values, args[0].shape, coalesced=args[0].is_coalesced(), known=known)
    return copied(args[0], kwargs.get("dtype"))


def _like(position: int) -> Instead:
    """Return an op that makes a tensor like one of its operands: as many elements at the same indices."""
    return lambda args, kwargs: copied(args[position]) if coo(args[position]) else NotImplemented


def coalesced(tensor: torch.Tensor) -> torch.Tensor:
    """SparseTensor.cpp, _coalesce_sparse_cpu: made for as many elements as there were, of which fewer may be left."""
    if tensor.is_coalesced():
        return tensor
    count, known = _torch.sparse_length(tensor), _torch.known_indices(tensor)
    if known is not None:
        known = _torch.distinct(known)
    kept = min(count, rows_of(tensor.shape, tensor.sparse_dim())) if known is None else known.shape[1]
    return _new(tensor, kept, stored=count, coalesced=True, known=known)


def _coalesce(args: Arguments, kwargs: Keywords) -> Any:
    return copied(args[0]) if args[0].is_coalesced() else coalesced(args[0])


def _made(args: Arguments, kwargs: Keywords) -> Any:
    """A sparse tensor of indices and values, which it keeps."""
    _, _, shape, indices, values = args
    dtype = kwargs.get("dtype")
    if not isinstance(indices, torch.Tensor) or dtype not in (None, values.dtype):
        return NotImplemented
    return _torch.sparse_coo(indices, values, shape, coalesced=bool(kwargs.get("is_coalesced")))


def _elementwise(name: str) -> Instead:
    """SparseUnaryOps.cpp and SparseTensorMath.cpp, pow_out_sparse_scalar: new values of what is coalesced first."""
    op: Any = _torch.op_named(name)

    def result(args: Arguments, kwargs: Keywords) -> Any:
        tensor = args[0]
        if not _torch.is_sparse(tensor):
            return NotImplemented
        made: Any = op(_torch.sparse_parts(tensor)[-1], *args[1:], **kwargs)
        return copied(coalesced(tensor) if coo(tensor) else tensor, made.dtype)

    return result


def _added(args: Arguments, kwargs: Keywords) -> Any:
    """SparseTensorMath.cpp, add_out_sparse_cpu: the elements of both, of which some may become one."""
    one, other = args[:2]
    if compressed(one) or compressed(other):
        return _added_by_rows(one, other)
    if not coo(one) or not coo(other):
        return NotImplemented
    stored, both = sum(map(_torch.sparse_length, (one, other))), one.is_coalesced() and other.is_coalesced()
    count = min(stored, rows_of(one.shape, one.sparse_dim())) if both else stored
    return _new(one, count, stored=stored, coalesced=both, dtype=torch.result_type(one, other))


def _added_by_rows(one: Any, other: Any) -> Any:
    """Return the sum of two matrices of which one is compressed; what is dense stays so (SparseCsrTensorMath.cpp)."""
    if not (_torch.is_sparse(one) and _torch.is_sparse(other)):
        return (other if _torch.is_sparse(one) else one).new_empty(one.shape, dtype=torch.result_type(one, other))
    if one.layout != torch.sparse_csr or other.layout != torch.sparse_csr or one.dim() != 2:
        return NotImplemented
    starts, plain, values = _torch.sparse_parts(one)
    n = min(_torch.sparse_length(one) + _torch.sparse_length(other), one.numel())
    parts = starts.new_empty(starts.shape), plain.new_empty(n), values.new_empty(n, dtype=torch.result_type(one, other))
    return _torch.sparse_compressed(one.layout, parts, one.shape)


def _is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or (value.layout == torch.strided and value.dim() == 0)


def _scaled(args: Arguments, kwargs: Keywords) -> Any:
    """SparseTensorMath.cpp, mul_out_sparse_zerodim and div_out_sparse_zerodim; mul_dense_sparse_out_cpu, and
    SparseBinaryOpIntersectionCommon.h for two that are sparse: the elements that both have."""
    one, other = args[:2]
    if _is_number(one) or (not _torch.is_sparse(one) and coo(other)):
        one, other = other, one
    if not _torch.is_sparse(one) or (compressed(one) and not _is_number(other)):
        return NotImplemented
    dtype = torch.result_type(*args[:2])
    if coo(other):
        both = one.is_coalesced() and other.is_coalesced()
        return _new(one, min(_torch.sparse_length(one), _torch.sparse_length(other)), coalesced=both, dtype=dtype)
    return copied(one, dtype)


def _divided(args: Arguments, kwargs: Keywords) -> Any:
    if not _torch.is_sparse(args[0]) or not _is_number(args[1]):
        return NotImplemented
    dtype = torch.result_type(*args[:2])
    whole = not (dtype.is_floating_point or dtype.is_complex) and kwargs.get("rounding_mode") is None
    return copied(args[0], torch.get_default_dtype() if whole else dtype)


def _in_place(functional: Instead) -> Instead:
    """Return an op that gives its first argument the parts of what the functional one makes."""

    def result(args: Arguments, kwargs: Keywords) -> Any:
        if args[0].layout == torch.strided and any(map(compressed, args)):
            return args[0]  # dense
        made = functional(args, kwargs) if coo(args[0]) else NotImplemented
        return made if made is NotImplemented else _torch.become(args[0], made)

    return result


def _same(args: Arguments, kwargs: Keywords) -> Any:
    """An op in place that writes over the values."""
    return args[0] if _torch.is_sparse(args[0]) else NotImplemented


def _emptied(args: Arguments, kwargs: Keywords) -> Any:
    """SparseTensorMath.cpp, zero_sparse_."""
    return _new(args[0], 0, coalesced=True)


def _of_other(args: Arguments, kwargs: Keywords) -> Any:
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
    return _one_by_one(mask.layout, _torch.sparse_length(mask), tensor)


def _turned(args: Arguments, kwargs: Keywords) -> Any:
    """TensorShape.cpp, sparse_transpose_: a copy, whose indices change places. Compressed layouts share all."""
    tensor = args[0]
    if not coo(tensor):
        return NotImplemented
    one, other = (int(dim) % tensor.dim() for dim in (args[1:3] or (0, tensor.dim() - 1)))
    if tensor.dim() < 2 or one == other or max(one, other) >= tensor.sparse_dim():
        return NotImplemented
    shape = list(tensor.shape)
    shape[one], shape[other] = shape[other], shape[one]
    return _new(tensor, _torch.sparse_length(tensor), coalesced=False, shape=tuple(shape))


def _joined(args: Arguments, kwargs: Keywords) -> Any:
    """SparseTensor.cpp, cat_sparse."""
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not all(coo(one) for one in tensors) or dim % tensors[0].dim() >= tensors[0].sparse_dim():
        return NotImplemented
    shape = list(tensors[0].shape)
    shape[dim] = sum(one.shape[dim] for one in tensors)
    return _new(tensors[0], sum(_torch.sparse_length(one) for one in tensors), coalesced=False, shape=tuple(shape))


def summed_dims(args: Arguments, kwargs: Keywords) -> list[int]:
    """Return the dimensions that a sum runs over."""
    every, dims = int(args[0].dim()), kwargs.get("dim", args[1] if len(args) > 1 else None)
    return sorted(range(every) if not dims else [dim % every for dim in ([dims] if isinstance(dims, int) else dims)])


def _summed(args: Arguments, kwargs: Keywords) -> Any:
    """SparseTensorMath.cpp, _sparse_sum: dense where all sparse dimensions go; else sparse and coalesced."""
    tensor = args[0]
    if not coo(tensor):
        return NotImplemented
    dims, sparse = summed_dims(args, kwargs), tensor.sparse_dim()
    left = [dim for dim in range(tensor.dim()) if dim not in dims]
    sparse_left, dense_left = ([dim for dim in left if (dim < sparse) is first] for first in (True, False))
    shape, values = tuple(tensor.shape[dim] for dim in left), _torch.sparse_parts(tensor)[1]
    dtype = kwargs.get("dtype") or tensor.dtype
    if not sparse_left:
        return values.new_empty(shape, dtype=dtype)
    count = _torch.sparse_length(tensor)
    kept, places = min(count, rows_of(shape, len(sparse_left))), torch.empty_like(values, dtype=torch.int64)
    indices = places.new_empty((len(sparse_left), count)).narrow(1, 0, kept)
    values = values.new_empty((count, *(tensor.shape[dim] for dim in dense_left)), dtype=dtype).narrow(0, 0, kept)
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
    """Return whether the gradient of an embedding leaves out what the padding index has (Embedding.cpp)."""
    chosen = args[1] if len(args) > 1 else None
    if not isinstance(chosen, (list, tuple)) or len(chosen) != 1 or not isinstance(chosen[0], torch.Tensor):
        return False
    if chosen[0].dtype is not torch.bool or not _torch.in_backward():
        return False
    node = _torch.backward_node()
    return node is not None and node.name() == "EmbeddingBackward0"


def _without_padding(args: Arguments, kwargs: Keywords) -> Any:
    return args[0].new_empty(args[0].shape) if padding_left_out(args) else NotImplemented


def _one_by_one(layout: torch.layout, count: int, like: torch.Tensor) -> torch.Tensor:
    """Return a compressed tensor whose plain indices are one of two rows that say where the elements are."""
    length = like.shape[0 if layout == torch.sparse_csr else 1] + 1
    dense = like if like.layout == torch.strided else _torch.sparse_parts(like)[-1]
    plain = dense.new_empty((2, count), dtype=torch.int64).select(0, 1)
    return _torch.sparse_compressed(layout, (plain.new_empty(length), plain, dense.new_empty(count)), like.shape)


def _compressed_as(layout: torch.layout) -> Instead:
    """SparseCsrTensor.cpp and TensorConversions.cpp, dense_to_sparse_compressed, coo_to_sparse_csr and
    sparse_compressed_to_flipped."""

    def result(args: Arguments, kwargs: Keywords) -> Any:
        tensor = args[0]
        if tensor.dim() != 2 or (compressed(tensor) and tensor.layout not in (torch.sparse_csr, torch.sparse_csc)):
            return NotImplemented
        if not coo(tensor) or layout == torch.sparse_csc:
            return _one_by_one(
                layout, tensor.numel() if tensor.layout == torch.strided else _torch.sparse_length(tensor), tensor
            )
        indices, values = _torch.sparse_parts(coalesced(tensor))
        parts = indices.new_empty(tensor.shape[0] + 1), indices.select(0, 1), values
        return _torch.sparse_compressed(layout, parts, tensor.shape)

    return result


def _to_sparse(args: Arguments, kwargs: Keywords) -> Any:
    """TensorConversions.cpp, dense_to_sparse and sparse_compressed_to_sparse_coo."""
    tensor, layout = args[0], kwargs.get("layout", torch.sparse_coo)
    if layout in (torch.sparse_csr, torch.sparse_csc):
        return _compressed_as(layout)(args, kwargs)
    if layout not in (None, torch.sparse_coo) or coo(tensor):
        return NotImplemented
    if compressed(tensor):
        compressing, _, values = _torch.sparse_parts(tensor)
        indices = compressing.new_empty((2, values.shape[0]))
        return _torch.sparse_coo(indices, values, tensor.shape, coalesced=True)
    sparse = args[1] if len(args) > 1 and isinstance(args[1], int) else tensor.dim()
    count = rows_of(tensor.shape, sparse)
    indices, values = (
        tensor.new_empty((sparse, count), dtype=torch.int64),
        tensor.new_empty((count, *tensor.shape[sparse:])),
    )
    return _torch.sparse_coo(indices, values, tensor.shape, coalesced=True)


def _made_compressed(args: Arguments, kwargs: Keywords) -> Any:
    """SparseCsrTensor.cpp, sparse_compressed_tensor, which keeps the parts."""
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
    """SparseMatMul.cpp, sparse_sparse_matmul_cpu: at most, each element meets a whole row of the other matrix."""
    one, other = args
    if not coo(one) or not coo(other):
        return NotImplemented
    shape = (one.shape[0], other.shape[1])
    count = min(math.prod(shape), _torch.sparse_length(one) * min(_torch.sparse_length(other), other.shape[1]))
    return _new(one, count, coalesced=True, shape=shape)


def _dense_product(first: int) -> Instead:
    """SparseBlas.cpp, addmm_out_sparse_compressed_cpu. Fake tensors have no kernel for it."""

    def result(args: Arguments, kwargs: Keywords) -> Any:
        one, other = args[first : first + 2]
        if not (compressed(one) or compressed(other)) or (_torch.is_sparse(one) and _torch.is_sparse(other)):
            return NotImplemented
        dense = other if _torch.is_sparse(one) else one
        return dense.new_empty((one.shape[0], other.shape[1]))

    return result


def _reduced(args: Arguments, kwargs: Keywords) -> Any:
    """SparseBlas.cpp, _sparse_mm_reduce_impl_sparse_csr_cpu: for a derivative, where the largest elements are."""
    tensor, other, reduction = args
    result = other.new_empty((tensor.shape[0], other.shape[1]))
    with_places = reduction in ("amax", "amin") and torch.is_grad_enabled()
    with_places = with_places and (tensor.requires_grad or other.requires_grad)
    return result, other.new_empty(result.shape if with_places else (0,), dtype=torch.int64)


def _reduced_gradient(args: Arguments, kwargs: Keywords) -> Any:
    """SparseBlas.cpp, _sparse_mm_reduce_impl_backward_sparse_csr_cpu."""
    tensor, other, wanted = args[0], args[2], args[5]
    return copied(tensor) if wanted[0] else None, other.new_empty(other.shape) if wanted[1] else None


INSTEAD: Mapping[str, Instead] = {
    "aten.clone.default": _copy,
    "aten._to_copy.default": _copy,
    "aten.neg.default": _copy,
    **{f"aten._sparse_{name}.default": _copy for name in ("softmax", "log_softmax")},
    **{f"aten._sparse_{name}_backward_data.default": _like(1) for name in ("softmax", "log_softmax")},
    "aten._sparse_sum_backward.default": _like(1),
    "aten._sparse_mask_projection.default": _like(1),
    _COALESCE: _coalesce,
    "aten._sparse_coo_tensor_with_dims_and_tensors.default": _made,
    **{f"aten.{name}.default": _elementwise(f"aten.{name}.default") for name in UNARY},
    "aten.pow.Tensor_Scalar": _elementwise("aten.pow.Tensor_Scalar"),
    **{f"aten.{name}_.default": _same for name in (*UNARY, "neg")},
    "aten.add.Tensor": _added,
    "aten.sub.Tensor": _added,
    "aten.mul.Tensor": _scaled,
    "aten.mul.Scalar": _scaled,
    "aten.div.Tensor": _divided,
    "aten.div.Tensor_mode": _divided,
    "aten.div_.Tensor": _same,
    **{f"aten.{name}_.Tensor": _in_place(_added) for name in ("add", "sub")},
    "aten.mul_.Tensor": _in_place(_scaled),
    "aten.mul_.Scalar": _in_place(_scaled),
    "aten.zero_.default": _in_place(_emptied),
    "aten.copy_.default": _in_place(_of_other),
    "aten.sparse_mask.default": _masked,
    "aten.t.default": _turned,
    "aten.transpose.int": _turned,
    "aten.cat.default": _joined,
    "aten._sparse_sum.dim": _summed,
    "aten.sum.dim_IntList": _summed,
    "aten._embedding_bag_backward.default": _bag_gradient,
    "aten.index.Tensor": _without_padding,
    "aten._to_sparse.default": _to_sparse,
    "aten._to_sparse.sparse_dim": _to_sparse,
    "aten._to_sparse_csr.default": _compressed_as(torch.sparse_csr),
    "aten._to_sparse_csc.default": _compressed_as(torch.sparse_csc),
    "aten.sparse_compressed_tensor.comp_plain_value_size": _made_compressed,
    "aten.sparse_compressed_tensor.comp_plain_value": _without_size,
    "aten.sparse_sampled_addmm.default": _sampled,
    "aten._sparse_sparse_matmul.default": _product,
    "aten.mm.default": _dense_product(0),
    "aten.addmm.default": _dense_product(1),
    "aten._sparse_addmm.default": _dense_product(1),
    "aten._sparse_mm_reduce_impl.default": _reduced,
    "aten._sparse_mm_reduce_impl_backward.default": _reduced_gradient,
}
"""Overload name -> (args, kwargs) -> the result; NotImplemented where no sparse tensor is concerned."""


_PARTS = frozenset(
    f"aten.{name}.default"
    for name in ("_indices", "_values", "indices", "values", "crow_indices", "col_indices", "ccol_indices",
                 "row_indices", "detach", "alias", "t", "zeros_like", "empty_like", "_coalesced_")
) | {"aten.transpose.int"}  # fmt: skip
"""Ops of which fake tensors know what they make of a sparse tensor."""
_DIFFERENT = "indices of a sparse tensor were taken as all different, or as many as there are rows: never more"
_NOT_IN_COMMON = "sparse tensors that are added were taken to have no index in common: never more"
_LARGEST = {
    "aten._sparse_sparse_matmul.default": "a product of sparse tensors was taken as large as it can be: never more",
    **{f"aten.{name}.Tensor": _NOT_IN_COMMON for name in ("add", "add_", "sub", "sub_")},
}
_NO_ZERO = "a dense tensor was made sparse and no element of it taken as zero: never more"


def assumed(name: str, args: Arguments, result: Any, answered: bool) -> str | None:
    """Return what was taken for granted of an op's sparse result; None where it is certain, or not sparse.

    ``answered``: it is from `INSTEAD`.
    """
    if name.startswith("aten._foreach_") and any(map(_torch.is_sparse, args[0])):
        return _unknown(name)
    if not _torch.is_sparse(result):
        kept = name == "aten.index.Tensor" and padding_left_out(args)
        return "no index of an embedding was taken as its padding: never more" if kept else None
    if name == _COALESCE:
        return None if args[0]._nnz() < 2 or _torch.known_indices(args[0]) is not None else _DIFFERENT
    if name.startswith("aten._to_sparse") and args[0].layout == torch.strided:
        return _NO_ZERO
    if name in _LARGEST and all(map(_torch.is_sparse, args[:2])):
        return _LARGEST[name]
    if answered or name in _PARTS:
        return None
    return _unknown(name)


def _unknown(name: str) -> str:
    return f"{name.removeprefix('aten.').split('.')[0]}: what it makes of sparse tensors is not known and NOT COUNTED"
