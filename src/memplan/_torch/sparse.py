"""Sparse tensors: their parts, and fake ones made of fake parts.

A fake tensor's kernels forget how many elements a sparse tensor holds: a copy of one has none. Everything here was seen
in torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils.weak import WeakIdKeyDictionary

from memplan._torch.eager import no_modes

_ATEN = torch.ops.aten
ROWS_COMPRESSED = (torch.sparse_csr, torch.sparse_bsr)
_COLUMNS_COMPRESSED = (torch.sparse_csc, torch.sparse_bsc)
_KNOWN, _OUTSIDE = "_memplan_indices", "_memplan_outside"


def is_sparse(value: Any) -> bool:
    """Return whether a value is a tensor of a sparse layout."""
    return isinstance(value, torch.Tensor) and value.layout != torch.strided and bool(_names(value.layout))


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that a sparse one is made of, its values last."""
    with no_modes() if not isinstance(tensor, FakeTensor) else contextlib.nullcontext():
        return [getattr(tensor, name)() for name in _names(tensor.layout)]


def _names(layout: torch.layout) -> tuple[str, ...]:
    if layout == torch.sparse_coo:
        return "_indices", "_values"
    if layout in ROWS_COMPRESSED:
        return "crow_indices", "col_indices", "values"
    if layout in _COLUMNS_COMPRESSED:
        return "ccol_indices", "row_indices", "values"
    return ()


def sparse_coo(
    indices: torch.Tensor,
    values: torch.Tensor,
    shape: Sequence[int],
    *,
    coalesced: bool,
    known: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a sparse tensor over fake indices and values, without any op that a recording sees.

    ``known``: what the indices are, where that is known and the fake ones do not say it.
    """
    result = _ATEN._sparse_coo_tensor_with_dims_and_tensors.default(
        indices.shape[0], values.dim() - 1, list(shape), indices, values, dtype=values.dtype, layout=torch.sparse_coo,
        device=torch.device("cpu"), pin_memory=False, is_coalesced=coalesced,
    )  # fmt: skip
    setattr(result, _KNOWN, getattr(indices, "constant", None) if known is None else known)
    return result


def known_indices(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the indices of a sparse tensor, where `sparse_coo` knew them."""
    return getattr(tensor, _KNOWN, None)


def distinct(indices: torch.Tensor) -> torch.Tensor:
    """Return the columns of indices that are known, each once and in order."""
    with no_modes():
        return torch.unique(indices, dim=1)


def sparse_compressed(layout: torch.layout, parts: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor in a compressed sparse layout over fake parts: compressed and plain indices, and values.

    torch refuses to make one of fake tensors: "Values and compressed tensor instance need to be on the same device".
    """
    values: Any = parts[-1]
    mode = values.fake_mode
    with in_kernel_invocation_manager(mode):
        made = _ATEN._sparse_compressed_tensor_unsafe.default(
            *parts, list(shape), dtype=values.dtype, layout=layout, device=torch.device("meta")
        )
    return mode.fake_tensor_converter.from_meta_and_device(mode, made, values.fake_device)


class FakeSparse:
    """Fakes of the sparse tensors from outside of a recording that it meets: of their parts, which torch's lose."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._made = WeakIdKeyDictionary()

    def replaced(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of an op with fakes of the sparse tensors among them."""
        if not any(is_sparse(arg) and not isinstance(arg, FakeTensor) for arg in args):
            return args
        return tuple(self._of(arg) if is_sparse(arg) and not isinstance(arg, FakeTensor) else arg for arg in args)

    def _of(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self._made.get(tensor)
        if made is None:
            real = sparse_parts(tensor)
            parts = [self._mode.from_tensor(part) for part in real]
            if tensor.layout == torch.sparse_coo:
                coalesced = tensor.is_coalesced()
                made = sparse_coo(parts[0], parts[1], tensor.shape, coalesced=coalesced, known=real[0])
            else:
                made = sparse_compressed(tensor.layout, parts, tensor.shape)
            setattr(made, _OUTSIDE, True)
            self._made[tensor] = made
        return made


def is_from_outside(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was there before a recording: it is real, or the fake of a sparse one that is."""
    return not isinstance(tensor, FakeTensor) or hasattr(tensor, _OUTSIDE)


def become(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Give a sparse tensor the parts of another, as an op in place does. Return it."""
    target.data = source
    setattr(target, _KNOWN, known_indices(source))
    return target


@functools.cache
def runs_on_sparse(func: Any) -> bool:
    """Return whether the CPU has a kernel of an op for sparse tensors with coordinates."""
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), "SparseCPU")
