"""What changes outside of a graph is seen, named and put back."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from memplan.planning.capture.side_effects import Watch, line_of, refuse_hooks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = nn.Linear(2, 2)
        self.inner.number, self.inner.nothing = 1, None
        self.inner.tensor = torch.ones(2)
        self.inner.items = [1, [2, {"a": 3}]]
        self.inner.deque, self.inner.set = collections.deque([1]), {1}
        self.inner.config = SimpleNamespace(kind="a", inside=SimpleNamespace(n=[1]))
        self.inner.draw, self.inner.array = random.Random(0), np.random.default_rng(0)
        self.inner.generator = torch.Generator()


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "number": (lambda m: setattr(m, "number", 2), "inner.number"),
    "kind of number": (lambda m: setattr(m, "number", 1.0), "inner.number"),
    "new": (lambda m: setattr(m, "more", 2), "inner.more"),
    "gone": (lambda m: delattr(m, "number"), "inner.number"),
    "tensor": (lambda m: setattr(m, "tensor", torch.ones(2)), "inner.tensor"),
    "from nothing": (lambda m: setattr(m, "nothing", torch.ones(2)), "inner.nothing"),
    "list": (lambda m: m.items[1][1].update(a=4), "inner.items"),
    "longer": (lambda m: m.items.append(4), "inner.items"),
    "deque": (lambda m: m.deque.append(4), "inner.deque"),
    "set": (lambda m: m.set.add(4), "inner.set"),
    "object": (lambda m: m.config.inside.n.append(2), "inner.config"),
    "random": (lambda m: m.draw.random(), "inner.draw"),
    "numpy": (lambda m: m.array.random(), "inner.array"),
    "generator": (lambda m: torch.rand(2, generator=m.generator), "inner.generator"),
    "parameter": (lambda m: setattr(m, "weight", nn.Parameter(torch.ones(2, 2))), "inner._parameters"),
    "training": (lambda m: m.eval(), "inner.training"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named_and_put_back(name: str) -> None:
    model = Model()
    change, called = CHANGES[name]
    watch, again = Watch(model), Watch(model)
    assert watch.changed_attributes() == []
    change(model.inner)
    assert watch.changed_attributes() == [called]
    watch.restore()
    assert watch.changed_attributes() == []
    assert again.changed_attributes() == []


def test_nothing_that_becomes_something_plain_does_not_count() -> None:
    model = Model()
    watch = Watch(model)
    model.inner.nothing = "single_label"
    model.inner.number = 1
    assert watch.changed_attributes() == []
    watch.restore()
    assert model.inner.nothing is None


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_draws_are_seen_and_put_back(draw: Callable[[], Any]) -> None:
    watch = Watch(nn.Linear(2, 2))
    first = draw()
    torch.rand(2)
    assert len(watch.drawn_generators()) == 1
    watch.restore()
    assert watch.drawn_generators() == []
    assert draw() == first


def test_the_line_that_makes_something_happen() -> None:
    seen: list[int] = []

    def run() -> None:
        first = 1
        seen.append(first)
        seen.clear()

    where = line_of(run, lambda: bool(seen))
    assert where is not None
    assert where.endswith(f"test_side_effects.py:{run.__code__.co_firstlineno + 2}")
    assert line_of(run, lambda: False) is None


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_torchs_own_hooks_may_be_there() -> None:
    old = torch.nn.utils.weight_norm(nn.Linear(2, 2))
    model = nn.Sequential(old, spectral_norm(nn.Linear(2, 2)))
    refuse_hooks(model)
    watch = Watch(model)
    model(torch.ones(2))
    assert watch.changed_attributes() == []
