from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from memplan.verification.proof.differences import difference, output_differences

ONE = torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (ONE, ONE.clone(), None),
        (None, None, None),
        (torch.tensor([math.nan]), torch.tensor([math.nan]), None),
        (ONE[::2], ONE[::2].clone(), None),
        (torch.tensor(1 + 2j), torch.tensor(1 + 2j), None),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse(), None),
        (torch.empty(0), torch.empty(0), None),
        (ONE, None, "missing"),
        (None, ONE, "without one"),
        (ONE, ONE[:2], "shape"),
        (ONE, ONE.double(), "dtype float64, not float32"),
        (ONE, ONE.nextafter(torch.tensor(9.0)), "differs by up to"),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "differs by up to 0"),
        (ONE > 1, ONE > 2, "differs by up to 1"),
        (torch.tensor([1e-18]), torch.tensor([1e-6]), "differs by up to 1e-06 (and should be 1e-18, in L2)"),
        (torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse(), "differs"),
    ],
)
def test_two_tensors(one: Any, other: Any, said: str | None) -> None:
    found = difference("x", 0, one, other)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)


def test_errors_as_numpy_computes_them() -> None:
    torch.manual_seed(0)
    one = torch.randn(50)
    other = one + 1e-3 * torch.randn(50)
    found = difference("x", 2, one, other)
    assert found is not None
    apart = other.double().numpy() - one.double().numpy()
    assert found.max_abs == numpy.abs(apart).max()
    assert found.relative == pytest.approx(numpy.linalg.norm(apart) / numpy.linalg.norm(one.double().numpy()))
    assert found.step == 2


def test_layout_counts_where_asked_and_where_there_is_a_next_element() -> None:
    one, other = torch.zeros(2, 3), torch.zeros(3, 2).t()
    assert difference("x", 0, one, other) is None
    assert difference("x", 0, one, other, layout=True) is not None
    assert difference("x", 0, torch.zeros(1, 3), torch.zeros(3, 1).t(), layout=True) is None


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ({"a": ONE, "n": 3}, {"a": ONE.clone(), "n": 3}, []),
        ({"a": ONE, "n": 3}, {"a": ONE, "n": 4}, ["output 1"]),
        ({"a": ONE, "n": 3}, {"a": ONE + 1, "n": ONE}, ["output 0", "output 1"]),
        ((ONE, ONE), [ONE, ONE], ["the output"]),
        ((ONE, ONE), (ONE,), ["the output"]),
        (ONE, ONE + 1, ["the output"]),
    ],
)
def test_outputs(one: Any, other: Any, names: list[str]) -> None:
    assert [found.name for found in output_differences(0, one, other)[1]] == names


@dataclass
class Slotted:
    __slots__ = ("kept", "name")
    kept: Any
    name: str


class Cache:
    """Says of no other that it is equal, as most classes."""

    def __init__(self, *layers: Any, size: int = 1) -> None:
        self.layers, self.size, self.owner = list(layers), size, self


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (Cache(ONE, Cache(ONE)), Cache(ONE.clone(), Cache(ONE.clone())), []),
        (Cache(ONE, size=1), Cache(ONE, size=2), ["output 0 has the size 2, not 1"]),
        (Cache(ONE), Cache(ONE + 1), ["output 1 differs"]),
        (Cache(ONE, Cache(ONE)), Cache(ONE, Cache(ONE - 1)), ["output 3 differs"]),
        (Cache(ONE, Cache()), Cache(ONE, Cache(size=2)), ["output 0 is", "output 2 has the size 2, not 1"]),
        (Cache(ONE), Cache(ONE, ONE), ["the output is put together"]),
        (Cache(ONE), SimpleNamespace(layers=[ONE]), ["the output is put together"]),
        (Slotted(ONE, "a"), Slotted(ONE.clone(), "a"), []),
        (Slotted(ONE, "a"), Slotted(ONE, "b"), ["output 0 has the name 'b', not 'a'"]),
        ((ONE, {1: "a"}), (ONE, {1: "b"}), ["output 1 is 'b', not 'a'"]),
        ((ONE, frozenset([1])), (ONE, frozenset([2])), ["output 1 is"]),
        ({"now": Slotted(ONE, "a")}, {"now": Slotted(ONE + 1, "a")}, ["output 1 differs"]),
        ((ONE, Cache()), (ONE, Cache()), []),
        ((ONE, Cache), (ONE, Slotted), ["output 1 is"]),
        ((ONE, object()), (ONE, object()), ["output 1 is"]),
    ],
)
def test_outputs_that_are_objects(one: Any, other: Any, said: list[str]) -> None:
    found = [str(difference) for difference in output_differences(0, one, other)[1]]
    assert len(found) == len(said)
    assert all(text.startswith(start) for text, start in zip(found, said, strict=True)), found
