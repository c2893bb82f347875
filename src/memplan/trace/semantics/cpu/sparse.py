"""Temporaries of the CPU's kernels on sparse COO tensors; see `sparse_results`.

Each formula names its file under ATen/native. An index takes 8 bytes per sparse dimension.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan import _torch
from memplan.trace.semantics.cpu.sparse_results import coo, drops_embedding_padding
from memplan.trace.semantics.kinds import Arguments, Formula, Keywords
from memplan.trace.semantics.layout import bytes_of

_INDEX = 8


def _coalesce(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (SparseTensor.cpp, _coalesce_sparse_cpu): sorted indices, their permutation and the unsorted
    indices; indices of several dimensions flattened; a contiguous copy of the values."""
    tensor = args[0]
    if tensor.is_coalesced() or _torch.sparse_length(tensor) < 2:
        return 0
    indices, values = _torch.sparse_parts(tensor)
    rows = 3 + (indices.shape[0] > 1)
    return rows * _INDEX * indices.shape[1] + (0 if values.is_contiguous() else bytes_of(values))


def _coalesced_copy_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's coalesced copy and the scratch to make it."""
    return 0 if tensor.is_coalesced() else _bytes_of_parts(tensor) + _coalesce((tensor,), {}, None)


def _bytes_of_parts(tensor: torch.Tensor) -> int:
    return sum(map(bytes_of, _torch.sparse_parts(tensor)))


def _norm(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (SparseTensorMath.cpp, norm_sparse): the operand is coalesced first."""
    return _coalesced_copy_bytes(args[0])


def _dense_sparse_add(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (SparseTensorMath.cpp, add_out_dense_sparse_cpu): unless its values and the result are
    contiguous, an uncoalesced operand is coalesced first."""
    if coo(result) or not coo(args[1]):
        return 0
    values = _torch.sparse_parts(args[1])[1]
    return 0 if values.is_contiguous() and result.is_contiguous() else _coalesced_copy_bytes(args[1])


def _sparse_mask(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (SparseTensor.cpp, sparse_mask of a dense tensor): its elements at the mask's indices."""
    return 0 if coo(args[0]) else bytes_of(_torch.sparse_parts(result)[1]) + args[1].element_size()


def _transpose(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorShape.cpp, sparse_transpose_): a copy of one row of indices."""
    return _INDEX * _torch.sparse_length(result)


def _bag_gradient(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (EmbeddingBag.cpp, _embedding_bag_backward and _embedding_bag_sparse_backward): the bag of
    each index, unless saved by the forward; for a mean, the bag sizes as floats, their inverses, and an inverse per
    index."""
    indices, bags, sizes, mode = args[1], args[3], args[4], args[8]
    bag_of_each = _INDEX * (indices.numel() + 1) if bags.numel() != indices.numel() else 0
    if mode != _MEAN:
        return bag_of_each
    return bag_of_each + (2 * sizes.numel() + indices.numel()) * args[0].element_size()


_MEAN = 1


def _embedding_padding_mask(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """TensorAdvancedIndexing.cpp, index, by which an embedding's sparse gradient drops padding: the int64 positions
    where the mask is true."""
    return _INDEX * args[0].shape[0]


def _to_sparse(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorConversions.cpp, dense_to_sparse): a copy of the indices and of the values."""
    return 0 if coo(args[0]) else _INDEX * args[0].dim() * args[0].numel() + bytes_of(_torch.sparse_parts(result)[1])


def _product(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (SparseTensorMath.cpp, _sparse_mm): `mm` adds the product to zeros; a sparse right operand
    is transposed."""
    return bytes_of(result) + (_bytes_of_parts(args[1]) if coo(args[1]) else 0)


FORMULAS: dict[str, Formula] = {
    "aten._coalesce.default": _coalesce,
    "aten.norm.ScalarOpt_dim": _norm,
    "aten.norm.ScalarOpt_dim_dtype": _norm,
    **{f"aten.{name}.Tensor": _dense_sparse_add for name in ("add", "add_", "sub", "sub_")},
    "aten.sparse_mask.default": _sparse_mask,
    "aten.t.default": _transpose,
    "aten._embedding_bag_backward.default": _bag_gradient,
    "aten.index.Tensor": _embedding_padding_mask,
    "aten._to_sparse.default": _to_sparse,
    "aten._to_sparse.sparse_dim": _to_sparse,
    "aten.mm.default": _product,
}
"""Overload name -> (args, kwargs, result) -> bytes, of ops with a sparse operand or result."""


def concerns(name: str, args: Arguments, result: Any) -> bool:
    """Return whether an op reads or returns a sparse tensor, so that the formulas of this module apply."""
    values = args[0] if args and isinstance(args[0], (list, tuple)) else args
    if _torch.is_sparse(result) or any(_torch.is_sparse(value) for value in values):
        return True
    return name == "aten.index.Tensor" and drops_embedding_padding(args)


def transient_bytes(name: str, args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the peak bytes that the kernel allocates beyond its results."""
    formula = FORMULAS.get(name)
    return 0 if formula is None else max(0, formula(args, kwargs, result))
