"""Singular values and eigenvalues without vectors: under a dispatch mode torch computes the unused vectors, too.

Source: aten/src/ATen/native/BatchLinearAlgebra.cpp, `_may_require_fw_or_bw_grad` (`isTensorSubclassLike` is true of
every tensor under a mode). Seen in torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from memplan._torch.patches import only_in_this_thread, patched

_NAMES = ("svdvals", "eigvals", "eigvalsh", "matrix_rank", "cond", "matrix_norm", "norm")
_aten: Any = torch.ops.aten


@contextlib.contextmanager
def decompositions_without_vectors(set_needs_no_vectors: Callable[[bool], None]) -> Iterator[None]:
    """Within this context, report when a decomposition inside of `torch.linalg` needs values alone.

    ``set_needs_no_vectors(True)`` is called when a function such as `torch.linalg.svdvals` begins, unless its
    derivative needs the singular or eigenvectors, and ``set_needs_no_vectors(False)`` when the function ends.
    """

    def reporting(function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of `torch.linalg` that reports its begin and end."""

        def call_and_report(*args: Any, **kwargs: Any) -> Any:
            matrix = args[0] if args else kwargs.get("A", kwargs.get("input"))
            set_needs_no_vectors(isinstance(matrix, torch.Tensor) and not _needs_derivative(matrix))
            try:
                return function(*args, **kwargs)
            finally:
                set_needs_no_vectors(False)

        return only_in_this_thread(call_and_report, function)

    names = [name for name in _NAMES if hasattr(torch.linalg, name)]
    with patched(torch.linalg, **{name: reporting(getattr(torch.linalg, name)) for name in names}):
        yield


def _needs_derivative(matrix: torch.Tensor) -> bool:
    """Return whether torch may differentiate a function of this matrix, in any mode or by a transform of torch.func."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    if functorch.is_functorch_wrapped_tensor(matrix):
        return True
    with_tangent = forward_ad._current_level >= 0 and forward_ad.unpack_dual(matrix).tangent is not None
    return (torch.is_grad_enabled() and matrix.requires_grad) or with_tangent


def without_vectors(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the (op, arguments) that compute only the values of a decomposition, not its vectors, for op ``func``;
    None for an op that is no such decomposition."""
    if func is _aten._linalg_svd.default and not any(args[1:2]):
        return func, (args[0], False, False)
    if func is _aten._linalg_eigh.default:
        return func, (args[0], *(args[1:2] or ("L",)), False)
    if func is _aten.linalg_eig.default:
        return _aten._linalg_eigvals.default, args
    return None
