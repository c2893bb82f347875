"""What tells calls apart, and what is said about two that differ in one thing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from memplan.planning.capture.flat_call import call_of
from memplan.rewriting.keys import Keys, UnkeyedError, argument_of
from memplan.verification.measurement.state_copies import ModuleCopy


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Dropout(0.5))
        self.names, self.table = ["a", ["b"]], {"scale": 1.0, "inner": {"x": (1, [2])}}
        self.config, self.kinds = SimpleNamespace(scale=1.0), {1, 2}


class Other(nn.Linear):
    pass


def key(net: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return Keys(net).key(net, call_of(args, kwargs))


X = torch.ones(2, 4)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda net: None, True),
        (lambda net: net[0].weight.data.mul_(2), True),
        (lambda net: net[0].weight.register_hook(lambda gradient: gradient), True),
        (lambda net: net[0].weight.register_post_accumulate_grad_hook(lambda weight: None), False),
        (lambda net: net[0].weight.register_post_accumulate_grad_hook(lambda weight: None).remove(), True),
        (lambda net: net[1].eval(), False),
        (lambda net: setattr(net, "config", copy.deepcopy(net.config)), True),
        (lambda net: setattr(net, "_new", 1), True),
        (lambda net: net[0].register_forward_hook(lambda *_: None), False),
        (lambda net: setattr(net[0].weight, "data", torch.ones(4, 8)), False),
        (lambda net: setattr(net[0], "__class__", Other), False),
        (lambda net: setattr(net[0], "weight", nn.Parameter(torch.ones(4, 4))), True),
        (lambda net: net[0].requires_grad_(False), False),
        (lambda net: setattr(net[0], "bias", None), False),
    ],
)
@pytest.mark.parametrize("calls", [1, 300])  # after some of them guards are built that are quicker
def test_what_makes_another_key(change: Callable[[Any], Any], same: bool, calls: int) -> None:
    net = Net()
    keys, call = Keys(net), call_of((X,), {})
    before = keys.key(net, call)
    assert all(keys.key(net, call) == before for _ in range(calls - 1))
    change(net)
    after = keys.key(net, call)
    assert (after == before) is same
    assert not same or hash(after) == hash(before)


def test_the_keys_of_a_module_that_runs_with_copies_are_its_own() -> None:
    net = Net()
    keys, call = Keys(net), call_of((X,), {})
    before = keys.key(net, call)
    with ModuleCopy(net).in_place():
        assert keys.key(net, call) == before
    assert keys.key(net, call) == before


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"t": 0.1}, {"t": 0.2}, "argument t"),
        ({"t": {"a": [1, 2]}}, {"t": {"a": [1, 3]}}, "argument t"),
        ({"t": float("nan")}, {"t": float("nan")}, None),
        ({"t": 0.1}, {"t": 0.1}, None),
        ({"t": "a"}, {"t": "b"}, None),
        ({"t": True}, {"t": False}, None),
        ({"t": 0.1, "x": X}, {"t": 0.2, "x": X[:1]}, None),
    ],
)
def test_the_argument_in_which_two_calls_differ(one: Any, other: Any, found: str | None) -> None:
    net = Net()
    keys, calls = Keys(net), [call_of((X, "kept"), kwargs) for kwargs in (one, other)]
    places = keys.key(net, calls[0]).differing_leaves(keys.key(net, calls[1]))
    assert [argument_of(calls[0], at) for at in places or []] == ([found] if found else [])


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autocast("cpu"),
        lambda: torch.device("meta"),
        lambda: flag(torch.use_deterministic_algorithms, True, False),
        lambda: flag(torch.set_default_dtype, torch.float64, torch.float32),
        lambda: flag(torch.set_float32_matmul_precision, "medium", "highest"),
    ],
)
def test_flags_of_torch_make_another_key_while_they_are_set(around: Callable[[], Any]) -> None:
    net = Net()
    keys, call = Keys(net), call_of((X,), {})
    before = keys.key(net, call)
    with around():
        inside = keys.key(net, call)
        assert inside != before
        assert keys.key(net, call) == inside
    assert keys.key(net, call) == before


@contextmanager
def flag(put: Callable[[Any], Any], new: Any, old: Any) -> Iterator[None]:
    put(new)
    try:
        yield
    finally:
        put(old)


def test_an_unchanged_model_has_the_very_same_state() -> None:
    net = Net()
    keys, call = Keys(net), call_of((X,), {})
    assert keys.key(net, call).state is keys.key(net, call).state
    assert not keys.have_gradients()
    net[0].weight.grad = torch.ones(4, 4)
    assert keys.have_gradients()


def test_gradients_are_seen_without_a_comparison_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    keys = Keys(net)
    keys.key(net, call_of((X,), {}))
    net[0].bias.grad = torch.ones(4)
    monkeypatch.setattr(torch.Tensor, "__eq__", lambda *_: pytest.fail("it takes 10 us for each parameter"))
    assert keys.have_gradients()


def test_what_has_no_key() -> None:
    with pytest.raises(UnkeyedError, match="argument of type object"):
        key(Net(), X, object())
    with pytest.raises(UnkeyedError, match="layout"):
        key(Net(), X.to_sparse())
