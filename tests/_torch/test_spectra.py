"""Functions that need singular or eigenvalues alone are told of, unless a derivative needs the vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from memplan import _torch

aten: Any = torch.ops.aten


def told(x: Tensor, function: Callable[[Tensor], Any]) -> list[bool]:
    """Return what is told while a function runs."""
    calls: list[bool] = []
    with _torch.decompositions_without_vectors(calls.append):
        function(x)
    return calls


@pytest.mark.parametrize("name", ["svdvals", "eigvals", "eigvalsh", "matrix_rank", "cond"])
def test_values_alone_are_told_where_no_derivative_is_needed(name: str) -> None:
    x = torch.eye(3)
    assert told(x, lambda x: getattr(torch.linalg, name)(x))[0] is True
    assert told(x.requires_grad_(), lambda x: getattr(torch.linalg, name)(x))[0] is False
    with torch.no_grad():
        assert told(x, lambda x: getattr(torch.linalg, name)(x))[0] is True


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_tangents_and_transforms_need_vectors() -> None:
    x = torch.eye(3)
    with forward_ad.dual_level():
        assert told(forward_ad.make_dual(x, x), lambda x: torch.linalg.svdvals(x))[0] is False
    assert told(x, lambda x: torch.func.grad(lambda y: torch.linalg.svdvals(y).sum())(x))[0] is False


def test_what_stands_for_an_op_gives_the_same_values() -> None:
    x = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    for op, args in (
        (aten._linalg_svd.default, (x,)),
        (aten._linalg_eigh.default, (x,)),
        (aten.linalg_eig.default, (x,)),
    ):
        other = _torch.without_vectors(op, args)
        assert other is not None
        values, found = op(*args), other[0](*other[1])
        ours = found if isinstance(found, Tensor) else next(one for one in found if one.dim() == 1 and one.numel())
        theirs = next(one for one in values if one.dim() == 1)
        torch.testing.assert_close(ours, theirs)
    assert _torch.without_vectors(aten._linalg_svd.default, (x, True)) is None
    assert _torch.without_vectors(aten.mm.default, (x, x)) is None
