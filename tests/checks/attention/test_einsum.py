"""Equations as batched products, against torch's own einsum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.checks.attention.einsum import arranged

SIZES = {"a": 2, "b": 3, "i": 4, "j": 5, "d": 6}


@st.composite
def equations(draw: st.DrawFn) -> str:
    lead = draw(st.sampled_from(["a", "ab"]))
    left, right, wanted = ("".join(draw(st.permutations(lead + letters))) for letters in ("id", "jd", "ij"))
    return f"{left},{right}->{wanted}"


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(equations())
def test_as_einsum(equation: str) -> None:
    operands = [torch.randn([SIZES[letter] for letter in one]) for one in equation.split("->")[0].split(",")]
    expected = torch.einsum(equation, *operands)
    pair = arranged(equation, operands)
    assert pair is not None
    for one in (pair, pair.flipped):
        torch.testing.assert_close(one.result(one.left @ one.right), expected)
    product = pair.left @ pair.right  # its rows are what comes first in the result
    assert product.shape[-2:] == tuple(size for size in expected.shape if size in (4, 5))


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bij->bji", [(2, 3, 4)]),
        ("ij,jk->ik", [(2, 3), (3, 4)]),  # no batch
        ("bij,bij->b", [(2, 3, 4), (2, 3, 4)]),
        ("b...i,b...i->b...", [(2, 3, 4), (2, 3, 4)]),
        ("bijd,bjkd->bik", [(2, 3, 4, 5), (2, 4, 6, 5)]),  # two that are summed over
        ("bii,bij->bij", [(2, 3, 3), (2, 3, 4)]),
        ("bid,bjd", [(2, 3, 4), (2, 5, 4)]),
    ],
)
def test_others_are_none(equation: str, shapes: list[tuple[int, ...]]) -> None:
    assert arranged(equation, [torch.zeros(shape) for shape in shapes]) is None
