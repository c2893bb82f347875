"""Values taken apart and put together again."""

from __future__ import annotations

import collections
import dataclasses
import weakref
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import BatchEncoding, DynamicCache

from memplan.trace.structure import take_apart


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    a: Any
    b: Any = 3


class Holder:
    def __init__(self, inside: Any) -> None:
        self.inside, self.name = inside, "holder"


Point = collections.namedtuple("Point", "x y")
plain = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.floats(allow_nan=False))
tensors = st.integers(0, 99).map(torch.tensor)
values = st.recursive(
    st.one_of(plain, tensors),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
        st.builds(Slots, inner, inner),
    ),
    max_leaves=12,
)


def shown(value: Any, change: int = 0) -> str:
    """A text of a value in which tensors are their numbers."""
    if isinstance(value, Tensor):
        return f"<{int(value) + change}>"
    if dataclasses.is_dataclass(value):
        return f"Slots({shown(value.a, change)}, {shown(value.b, change)})"  # pyright: ignore
    if isinstance(value, dict):
        return str({key: shown(part, change) for key, part in value.items()})
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}{[shown(part, change) for part in value]}"
    return repr(value)


@given(values)
def test_a_value_comes_together_as_it_was_with_other_tensors(value: Any) -> None:
    found, structure = take_apart(value)
    before = shown(value)
    assert shown(structure.rebuild(found)) == before
    assert shown(structure.rebuild([one + 1 for one in found])) == shown(value, 1)
    assert shown(value) == before


def test_objects_that_hold_tensors_are_copied_and_others_are_not() -> None:
    tensor, module = torch.ones(2), nn.Linear(2, 2)
    holder, empty = Holder([tensor]), Holder(3)
    found, structure = take_apart({"h": holder, "e": empty, "m": module})
    assert [one is tensor for one in found] == [True]
    made = structure.rebuild([torch.zeros(2)])
    assert made["e"] is empty
    assert made["m"] is module
    assert made["h"] is not holder
    assert made["h"].name == "holder"
    assert not made["h"].inside[0].any()
    assert holder.inside[0] is tensor


def test_an_object_that_holds_itself_comes_to_an_end() -> None:
    holder = Holder(torch.ones(2))
    holder.name = [holder]  # pyright: ignore[reportAttributeAccessIssue]
    found, structure = take_apart(holder)
    assert len(found) == 1
    assert not structure.rebuild([torch.zeros(2)]).inside.any()


def test_nothing_keeps_a_tensor_that_was_taken_out() -> None:
    tensor = torch.ones(2)
    gone = weakref.ref(tensor)
    structure = take_apart((Holder(tensor), Slots(tensor), {"x": tensor}))[1]
    del tensor
    assert gone() is None
    assert structure.rebuild([torch.ones(1)] * 3)[1].b == 3


def test_what_libraries_put_tensors_in() -> None:
    cache: Any = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), 0)
    found, structure = take_apart((cache, BatchEncoding({"ids": torch.ones(3)})))
    assert len(found) == 3
    made: Any
    made, encoding = structure.rebuild([one + 1 for one in found])
    assert made.layers[0].keys.mean() == 2
    assert cache.layers[0].keys.mean() == 1
    assert encoding["ids"].tolist() == [2, 2, 2]


def test_symbolic_sizes_are_not_searched() -> None:
    size = cast(Any, ShapeEnv()).create_unbacked_symint()
    size.node.seen = torch.ones(2)
    assert take_apart([size])[0] == ()
