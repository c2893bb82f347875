"""Results of CPU ops on sparse COO tensors, with indices and values of the sizes that the kernels allocate.

These are the ops of sparse gradients (``nn.Embedding(sparse=True)``, ``nn.EmbeddingBag(sparse=True)``), of the
optimizers that take them (SparseAdam, SGD, Adagrad), and products of a sparse matrix with a dense one. What another op
makes of a sparse tensor is not counted, and `assumed` says so; compressed layouts (CSR, CSC, BSR, BSC) are refused.

The fake-tensor kernels return empty sparse results. The number of elements (nnz) can depend on values:
unknown indices are assumed to be all different (at most one per row), and no element of a dense tensor to be zero. This
is the upper bound, and `assumed` reports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memplan import _torch
from memplan.trace.semantics.kinds import Arguments, Keywords

Instead = Callable[[Arguments, Keywords], Any]

_COALESCE = "aten._coalesce.default"


def coo(tensor: Any) -> bool:
    """Return whether `tensor` is a sparse COO tensor."""
    return isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_coo


def _max_elements(shape: tuple[int, ...], sparse_dim: int) -> int:
    """Return how many different indices a sparse tensor of this shape can have in its first ``sparse_dim``
    dimensions."""
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
    """Return a new COO tensor like ``like`` with ``count`` elements.

    Args:
        like: a sparse tensor, whose dtype and shape are the defaults.
        stored: number of elements for which its storages are allocated; None: ``count``.
        known: its indices, if their values are known.
    """
    indices, values = _torch.sparse_parts(like)
    stored = count if stored is None else stored
    return _torch.sparse_coo(
        indices.new_empty((indices.shape[0], stored)).narrow(1, 0, count),
        values.new_empty((stored, *values.shape[1:]), dtype=dtype).narrow(0, 0, count),
        tuple(like.shape) if shape is None else shape,
        coalesced=coalesced,
        known=known,
    )


def _copy_sparse(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a copy of a sparse tensor: new indices and new values."""
    known = _torch.known_indices(tensor)
    return _new(tensor, _torch.sparse_length(tensor), coalesced=tensor.is_coalesced(), dtype=dtype, known=known)


def _is_stolen_by_engine(tensor: torch.Tensor) -> bool:
    """Return whether AccumulateGrad keeps this sparse gradient as the parameter's `.grad` instead of cloning it.

    Under a dispatch mode it clones. Source: torch/csrc/autograd/functions/accumulate_grad.h, `accumulateGrad`.
    """
    node = _torch.backward_node() if _torch.in_backward() and not torch.is_grad_enabled() else None
    if node is None or node.name() != "torch::autograd::AccumulateGrad" or not _torch.called_by_engine():
        return False
    return all(part.is_contiguous() for part in _torch.sparse_parts(tensor))


def _copy(args: Arguments, kwargs: Keywords) -> Any:
    """Result (SparseTensor.cpp, clone_sparse, and dtype conversions): a new tensor, except of a gradient that
    autograd's engine would not clone but keep."""
    tensor = args[0]
    if not coo(tensor) or kwargs.get("layout") not in (None, torch.sparse_coo):
        return NotImplemented
    if _is_stolen_by_engine(tensor):
        known, (indices, values) = _torch.known_indices(tensor), _torch.sparse_parts(tensor)
        return _torch.sparse_coo(indices, values, tensor.shape, coalesced=tensor.is_coalesced(), known=known)
    return _copy_sparse(tensor, kwargs.get("dtype"))


def _coalesce(args: Arguments, kwargs: Keywords) -> Any:
    """Result (SparseTensor.cpp, _coalesce_sparse_cpu): storages for all elements, of which the result uses the distinct
    ones."""
    tensor = args[0]
    if tensor.is_coalesced():
        return _copy_sparse(tensor)
    count, known = _torch.sparse_length(tensor), _torch.known_indices(tensor)
    if known is None:
        distinct = min(count, _max_elements(tensor.shape, tensor.sparse_dim()))
    else:
        known = _torch.distinct_columns(known)
        distinct = known.shape[1]
    return _new(tensor, distinct, stored=count, coalesced=True, known=known)


def _from_parts(args: Arguments, kwargs: Keywords) -> Any:
    """Result of constructing a COO tensor: it shares the storages of the indices and values."""
    _, _, shape, indices, values = args
    dtype = kwargs.get("dtype")
    if not isinstance(indices, torch.Tensor) or dtype not in (None, values.dtype):
        return NotImplemented
    return _torch.sparse_coo(indices, values, shape, coalesced=bool(kwargs.get("is_coalesced")))


def _sum(args: Arguments, kwargs: Keywords) -> Any:
    """Result (SparseTensorMath.cpp, add_out_sparse_cpu): the sum of two sparse tensors has the elements of both; equal
    indices merge if both are coalesced."""
    left, right = args[:2]
    if not coo(left) or not coo(right):
        return NotImplemented
    coalesced = left.is_coalesced() and right.is_coalesced()
    stored = _torch.sparse_length(left) + _torch.sparse_length(right)
    count = min(stored, _max_elements(left.shape, left.sparse_dim())) if coalesced else stored
    return _new(left, count, stored=stored, coalesced=coalesced, dtype=torch.result_type(left, right))


def _is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or (value.layout == torch.strided and value.dim() == 0)


def _product_with_number(args: Arguments, kwargs: Keywords) -> Any:
    """Result (SparseTensorMath.cpp, mul_out_sparse_zerodim and div_out_sparse_zerodim): multiplied or divided by a
    number."""
    left, right = args[:2]
    tensor, factor = (right, left) if _is_number(left) else (left, right)
    if not coo(tensor) or not _is_number(factor):
        return NotImplemented
    return _copy_sparse(tensor, torch.result_type(left, right))


def _in_place_version(functional: Instead) -> Instead:
    """Return the in-place version of ``functional``: the first argument takes over indices and values of the result."""

    def result(args: Arguments, kwargs: Keywords) -> Any:
        new = functional(args, kwargs) if coo(args[0]) else NotImplemented  # then torch's own kernel runs
        return NotImplemented if new is NotImplemented else _torch.replace_sparse_parts(args[0], new)

    return result


def _values_in_place(args: Arguments, kwargs: Keywords) -> Any:
    """Result of an in-place op that writes into the existing values: the tensor, with the same indices."""
    return args[0] if coo(args[0]) else NotImplemented


def _no_elements(args: Arguments, kwargs: Keywords) -> Any:
    return _new(args[0], count=0, coalesced=True)


def _sparse_mask(args: Arguments, kwargs: Keywords) -> Any:
    """Result (SparseTensor.cpp, sparse_mask): a tensor with the mask's indices."""
    tensor, mask = args[:2]
    return mask if tensor is mask and mask.is_coalesced() else _copy_sparse(mask, tensor.dtype)


def _transpose(args: Arguments, kwargs: Keywords) -> Any:
    """Result (TensorShape.cpp, sparse_transpose_): a copy with two rows of the indices swapped."""
    tensor = args[0]
    if not coo(tensor) or tensor.dim() != 2 or tensor.sparse_dim() != 2:
        return NotImplemented
    return _new(tensor, _torch.sparse_length(tensor), coalesced=False, shape=tuple(reversed(tensor.shape)))


def _bag_gradient(args: Arguments, kwargs: Keywords) -> Any:
    """Result (EmbeddingBag.cpp, _embedding_bag_sparse_backward): an element per index;
    _embedding_bag_dense_backward_cpu: the whole table's gradient."""
    gradient, indices, rows, sparse = args[0], args[1], args[6], args[9]
    width = gradient.shape[-1]
    if not sparse:
        return gradient.new_empty((rows, width))
    values = gradient.new_empty((indices.numel(), width))
    return _torch.sparse_coo(indices.reshape(1, -1), values, (rows, width), coalesced=False)


def drops_embedding_padding(args: Arguments) -> bool:
    """Return whether an indexing op is the step in which the sparse gradient of an embedding drops `padding_idx`.

    Source: Embedding.cpp. ``args``: of ``aten.index``.
    """
    indices = args[1] if len(args) > 1 else None
    if not isinstance(indices, (list, tuple)) or len(indices) != 1 or not isinstance(indices[0], torch.Tensor):
        return False
    if indices[0].dtype is not torch.bool or not _torch.in_backward():
        return False
    node = _torch.backward_node()
    return node is not None and node.name() == "EmbeddingBackward0"


def _without_padding(args: Arguments, kwargs: Keywords) -> Any:
    """Result of indexing an embedding's sparse gradient without its padding: no index is assumed to be padding."""
    return args[0].new_empty(args[0].shape) if drops_embedding_padding(args) else NotImplemented


def _to_sparse(args: Arguments, kwargs: Keywords) -> Any:
    """Result (TensorConversions.cpp, dense_to_sparse): no element is assumed to be zero."""
    tensor, layout = args[0], kwargs.get("layout")
    if layout not in (None, torch.sparse_coo):
        return _refuse_compressed(args, kwargs)
    if coo(tensor):
        return NotImplemented
    sparse_dim = args[1] if len(args) > 1 and isinstance(args[1], int) else tensor.dim()
    count = _max_elements(tensor.shape, sparse_dim)
    indices = tensor.new_empty((sparse_dim, count), dtype=torch.int64)
    values = tensor.new_empty((count, *tensor.shape[sparse_dim:]))
    return _torch.sparse_coo(indices, values, tensor.shape, coalesced=True)


def _refuse_compressed(args: Arguments, kwargs: Keywords) -> Any:
    """Refuse an op that makes a tensor in a compressed layout."""
    raise _torch.compressed_layout_error()


def _product(first: int) -> Instead:
    """Return the function for the result of a product of a sparse and a dense matrix, for which fake tensors have no
    kernel. ``first``: position of the left operand among the arguments.

    Source: SparseTensorMath.cpp, s_addmm_out_sparse_dense_cpu.
    """

    def result(args: Arguments, kwargs: Keywords) -> Any:
        left, right = args[first : first + 2]
        if coo(left) == coo(right):
            return NotImplemented
        dense = right if coo(left) else left
        return dense.new_empty((left.shape[0], right.shape[1]))

    return result


INSTEAD: Mapping[str, Instead] = {
    "aten.clone.default": _copy,
    "aten._to_copy.default": _copy,
    "aten.neg.default": _copy,
    _COALESCE: _coalesce,
    "aten._sparse_coo_tensor_with_dims_and_tensors.default": _from_parts,
    **{f"aten.{name}.Tensor": _sum for name in ("add", "sub")},
    **{f"aten.{name}_.Tensor": _in_place_version(_sum) for name in ("add", "sub")},
    **{f"aten.{name}": _product_with_number for name in ("mul.Tensor", "mul.Scalar", "div.Tensor")},
    **{f"aten.mul_.{form}": _in_place_version(_product_with_number) for form in ("Tensor", "Scalar")},
    "aten.div_.Tensor": _values_in_place,
    "aten.zero_.default": _in_place_version(_no_elements),
    "aten.sparse_mask.default": _sparse_mask,
    "aten.t.default": _transpose,
    "aten._embedding_bag_backward.default": _bag_gradient,
    "aten.index.Tensor": _without_padding,
    "aten._to_sparse.default": _to_sparse,
    "aten._to_sparse.sparse_dim": _to_sparse,
    **{f"aten._to_sparse_{layout}.default": _refuse_compressed for layout in ("csr", "csc", "bsr", "bsc")},
    **{
        f"aten.sparse_compressed_tensor.{form}": _refuse_compressed
        for form in ("comp_plain_value_size", "comp_plain_value")
    },
    "aten.mm.default": _product(0),
    **{f"aten.{name}.default": _product(1) for name in ("addmm", "_sparse_addmm")},
}
"""Overload name -> (args, kwargs) -> the result, or NotImplemented if no sparse tensor is involved."""


_RIGHT_IN_FAKE_TENSORS = frozenset(
    f"aten.{name}.default"
    for name in ("_indices", "_values", "indices", "values", "detach", "alias", "zeros_like", "empty_like",
                 "_coalesced_")
)  # fmt: skip
"""Ops whose sparse results the fake-tensor kernels get right."""
_ALL_DIFFERENT = "indices of a sparse tensor were taken as all different, or as many as there are rows: never more"
_NOT_IN_COMMON = "sparse tensors that are added were taken to have no index in common: never more"
_SUMS = frozenset(f"aten.{name}.Tensor" for name in ("add", "add_", "sub", "sub_"))
_NO_ZERO = "a dense tensor was made sparse and no element of it taken as zero: never more"


def assumed(name: str, args: Arguments, result: Any, answered: bool) -> str | None:
    """Return the assumption behind the result of an op on sparse tensors, as text for the report; None if it is exact.

    Dense results are exact, with two exceptions: ``_foreach`` ops on sparse tensors are not counted, and ``aten.index``
    may assume that no index of an embedding is its padding.

    ``answered``: whether the result came from `INSTEAD`.
    """
    if name.startswith("aten._foreach_") and any(map(_torch.is_sparse, args[0])):
        return _not_counted(name)
    if not _torch.is_sparse(result):
        drops_padding = name == "aten.index.Tensor" and drops_embedding_padding(args)
        return "no index of an embedding was taken as its padding: never more" if drops_padding else None
    if name == _COALESCE:
        return None if args[0]._nnz() < 2 or _torch.known_indices(args[0]) is not None else _ALL_DIFFERENT
    if name.startswith("aten._to_sparse") and args[0].layout == torch.strided:
        return _NO_ZERO
    if name in _SUMS and all(map(_torch.is_sparse, args[:2])):
        return _NOT_IN_COMMON
    if answered or name in _RIGHT_IN_FAKE_TENSORS:
        return None
    return _not_counted(name)


def _not_counted(name: str) -> str:
    return f"{name.removeprefix('aten.').split('.')[0]}: what it makes of sparse tensors is not known and NOT COUNTED"
