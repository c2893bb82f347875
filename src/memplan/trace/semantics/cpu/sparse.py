"""Temporaries of the CPU's kernels on sparse COO tensors; see `sparse_results`.

Each formula names its file under ATen/native. An index takes 8 bytes per sparse dimension.
"""

from __future__ import annotations

from typing import Any

import torch

from memplan import _torch
from memplan.trace.semantics.cpu.sparse_results import coo, drops_embedding_padding
from memplan.trace.semantics.kinds import Arguments, Formula, Keywords
from memplan.trace.semantics.layout import bytes_of, copy_bytes

_INDEX = 8


def _coalesce(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (SparseTensor.cpp, _coalesce_sparse_cpu): sorted indices, their permutation and the unsorted
    indices; indices of several dimensions flattened; a contiguous copy of the values."""
    tensor = args[0]
    if tensor.is_coalesced() or _torch.sparse_length(tensor) < 2:
        return 0
    indices, values = _torch.sparse_parts(tensor)
    sparse_dims, elements = indices.shape
    rows = 4 if sparse_dims > 1 else 3
    return rows * _INDEX * elements + copy_bytes(values)


def _coalesced_copy_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the coalesced copy of a sparse tensor and of the temporaries of making it; 0 if it is
    coalesced."""
    return 0 if tensor.is_coalesced() else _bytes_of_parts(tensor) + _coalesce((tensor,), {}, result=None)


def _bytes_of_parts(tensor: torch.Tensor) -> int:
    """Return the bytes of the indices and values of a sparse tensor."""
    return sum(map(bytes_of, _torch.sparse_parts(tensor)))


def _norm(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (SparseTensorMath.cpp, norm_sparse): the operand is coalesced first."""
    return _coalesced_copy_bytes(args[0])


def _dense_sparse_add(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (SparseTensorMath.cpp, add_out_dense_sparse_cpu): unless its values and the result are
    contiguous, an uncoalesced operand is coalesced first."""
    other = args[1]
    if coo(result) or not coo(other):
        return 0
    _, values = _torch.sparse_parts(other)
    return 0 if values.is_contiguous() and result.is_contiguous() else _coalesced_copy_bytes(other)


def _sparse_mask(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (SparseTensor.cpp, sparse_mask of a dense tensor): its elements at the mask's indices, and
    a zero."""
    tensor, mask = args[:2]
    if coo(tensor):
        return 0
    _, values = _torch.sparse_parts(result)
    return bytes_of(values) + mask.element_size()


def _transpose(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorShape.cpp, sparse_transpose_): a copy of one row of indices."""
    return _INDEX * _torch.sparse_length(result)


def _bag_gradient(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (EmbeddingBag.cpp, _embedding_bag_backward and _embedding_bag_sparse_backward): the bag of
    each index, unless saved by the forward; for a mean, the bag sizes as floats, their inverses, and an inverse per
    index."""
    gradient, indices, _, bag_of_each, bag_sizes, _, _, _, mode = args[:9]
    unsaved = _INDEX * (indices.numel() + 1) if bag_of_each.numel() != indices.numel() else 0
    if mode != _MEAN:
        return unsaved
    return unsaved + (2 * bag_sizes.numel() + indices.numel()) * gradient.element_size()


_MEAN = 1


def _embedding_padding_mask(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries of dropping the padding from an embedding's sparse gradient by a mask: its int64 indices
    (TensorAdvancedIndexing.cpp, index)."""
    return _INDEX * args[0].shape[0]


def _to_sparse(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (TensorConversions.cpp, dense_to_sparse): a copy of the indices and of the values."""
    tensor = args[0]
    if coo(tensor):
        return 0
    _, values = _torch.sparse_parts(result)
    return _INDEX * tensor.dim() * tensor.numel() + bytes_of(values)


def _product(args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Bytes of temporaries (SparseTensorMath.cpp, _sparse_mm): `mm` adds the product to zeros; a sparse right operand
    is transposed."""
    right = args[1]
    return bytes_of(result) + (_bytes_of_parts(right) if coo(right) else 0)


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
    operands = args[0] if args and isinstance(args[0], (list, tuple)) else args
    if _torch.is_sparse(result) or any(_torch.is_sparse(operand) for operand in operands):
        return True
    return name == "aten.index.Tensor" and drops_embedding_padding(args)


def transient_bytes(name: str, args: Arguments, kwargs: Keywords, result: Any) -> int:
    """Return the peak bytes that the kernel allocates beyond its results."""
    formula = FORMULAS.get(name)
    return 0 if formula is None else max(0, formula(args, kwargs, result))
