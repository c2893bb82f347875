"""What is readable in Python is told apart by value, wherever code can find it."""

from __future__ import annotations

import argparse
import collections
import copy
import functools
import gc
import time
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from memplan.planning.capture.loss_module import with_loss
from memplan.rewriting.readable import Readable, told

WEIGHT = 1.0
OPTIONS: dict[str, Any] = {"weight": 1.0}
ARGUMENTS = argparse.Namespace(weight=1.0, step=0)
counter = 0


def regularized(out: Tensor) -> Tensor:
    return scaled(out) * OPTIONS["weight"] * ARGUMENTS.weight


def scaled(out: Tensor) -> Tensor:
    return out * WEIGHT


@dataclass(slots=True)
class Slotted:
    weight: float = 1.0


@dataclass
class Config:
    weight: float = 1.0
    inner: Slotted = field(default_factory=Slotted)
    names: list[str] = field(default_factory=lambda: ["a"])


class Penalty:
    scale = 1.0

    def __init__(self) -> None:
        self.weight, self.log = 1.0, list[float]()

    def __call__(self, out: Tensor) -> Tensor:
        return out.sum() * self.share()

    def share(self) -> float:
        return self.weight * getattr(self, "scale")  # noqa: B009  # as some code does

    def note(self) -> None:
        self.log.append(1.0)

    def by_method(self, out: Tensor) -> Tensor:
        return out * self.weight


class Net(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.plain, self._hidden, self.pair = 1.0, 1.0, (1, [2])
        self.items, self.table, self.kinds = [1, [2]], {"a": {"b": 1}}, {1, 2}
        self.recent, self.config = collections.deque([1]), Config()
        self.part = functools.partial(torch.clamp, min=0.0)
        self.loose, self.beside = torch.ones(2), [nn.Linear(2, 2)]
        self.space = types.SimpleNamespace(weight=1.0)
        self.itself = list[Any]([1])
        self.itself.append(self.itself)

    def forward(self, x: Tensor) -> Tensor:
        return regularized(self.linear(x))


def put(owner: Any, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def changes(net: Net) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """By name: something to do, and what undoes it."""
    here = globals()
    return {
        "plain": (put(net, "plain", 0.5), put(net, "plain", 1.0)),
        "kind of number": (put(net, "plain", 1), put(net, "plain", 1.0)),
        "hidden": (put(net, "_hidden", 0.5), put(net, "_hidden", 1.0)),
        "of a layer": (put(net.linear, "extra", 1), lambda: delattr(net.linear, "extra")),
        "shadowed": (put(net, "scale", 0.5), lambda: delattr(net, "scale")),
        "of the class": (put(Net, "scale", 0.5), put(Net, "scale", 1.0)),
        "in a tuple": (lambda: net.pair[1].append(3), lambda: net.pair[1].pop()),
        "list": (lambda: net.items[1].append(3), lambda: net.items[1].pop()),
        "dict": (lambda: net.table["a"].update(b=2), lambda: net.table["a"].update(b=1)),
        "set": (lambda: net.kinds.add(3), lambda: net.kinds.discard(3)),
        "deque": (lambda: net.recent.append(3), lambda: net.recent.pop()),
        "config": (put(net.config, "weight", 2.0), put(net.config, "weight", 1.0)),
        "slots in it": (put(net.config.inner, "weight", 2.0), put(net.config.inner, "weight", 1.0)),
        "list in it": (lambda: net.config.names.append("b"), lambda: net.config.names.pop()),
        "namespace": (put(net.space, "weight", 2.0), put(net.space, "weight", 1.0)),
        "partial": (lambda: net.part.keywords.update(min=1.0), lambda: net.part.keywords.update(min=0.0)),
        "module beside": (lambda: net.beside[0].eval(), lambda: net.beside[0].train()),
        "global": (lambda: here.update(WEIGHT=2.0), lambda: here.update(WEIGHT=1.0)),
        "global dict": (lambda: OPTIONS.update(weight=2.0), lambda: OPTIONS.update(weight=1.0)),
        "global namespace": (put(ARGUMENTS, "weight", 2.0), put(ARGUMENTS, "weight", 1.0)),
    }


@pytest.mark.parametrize("name", changes(Net()))
def test_a_change_is_seen_and_so_is_its_undoing(name: str) -> None:
    net = Net()
    change, back = changes(net)[name]
    readable = Readable(net)
    before = readable.now()
    assert readable.now() is before
    change()
    try:
        changed = readable.now()
        assert changed != before
        assert len(changed.differing(before)) == 1
    finally:
        back()
    assert readable.now() == before
    assert hash(readable.now()) == hash(before)


def test_what_is_not_read_does_not_count() -> None:
    net = Net()
    readable = Readable(net)
    before = readable.now()
    global counter
    counter += 1
    ARGUMENTS.step += 1
    net.eval()
    net.plain = float("1.0")
    net.items = copy.deepcopy(net.items)
    net.table = copy.deepcopy(net.table)
    assert readable.now() == before


def test_another_tensor_counts_even_at_the_same_address() -> None:
    net = Net()
    readable, seen = Readable(net), []
    for _ in range(20):
        net.loose = torch.ones(2)
        found = readable.now()
        assert found not in seen
        seen.append(found)


def closing() -> tuple[Callable[..., Tensor], Callable[[float], None]]:
    beta = 1.0

    def kl(out: Tensor) -> Tensor:
        return out.sum() * beta

    def anneal(value: float) -> None:
        nonlocal beta
        beta = value

    return lambda out, target: (out - target).sum() + kl(out), anneal


def test_what_a_loss_reads() -> None:
    loss, anneal = closing()
    penalty = Penalty()

    def defaulted(out: Tensor, weight: float = 1.0, *, other: float = 1.0) -> Tensor:
        return out.sum() * weight * other

    cases: dict[str, tuple[Any, Callable[[], Any]]] = {
        "a cell of a function in a cell": (loss, lambda: anneal(0.5)),
        "a default": (defaulted, put(defaulted, "__defaults__", (2.0,))),
        "a keyword's default": (defaulted, put(defaulted, "__kwdefaults__", {"other": 2.0})),
        "an attribute of what is called": (penalty, put(penalty, "weight", 2.0)),
        "a default of its class": (penalty, put(penalty, "scale", 2.0)),
        "the object of a method": (penalty.by_method, put(penalty, "weight", 3.0)),
        "an argument of a partial": (part := functools.partial(defaulted, other=1.0), lambda: part.keywords.clear()),
    }
    for name, (function, change) in cases.items():
        readable = Readable(with_loss(nn.Linear(2, 2), function))
        before = readable.now()
        penalty.note()
        assert readable.now() == before, name
        change()
        assert readable.now().differing(before) == ["attribute loss"], name


def test_modules_of_python_count_as_far_as_functions_name_what_is_in_them() -> None:
    settings: Any = types.ModuleType("settings_of_a_user")
    settings.weight, settings.other = 1.0, 1.0
    step: Any = with_loss(nn.Linear(2, 2), lambda out: out.sum() * settings.weight, targets=0)
    step.beside = settings
    readable = Readable(step)
    before = readable.now()
    settings.other = 2.0
    globals()["new"] = 1
    assert readable.now() is before
    settings.weight = 2.0
    assert readable.now().differing(before) == ["attribute loss"]


def test_the_same_function_made_again_is_the_same() -> None:
    model = nn.Linear(2, 2)
    found = [Readable(with_loss(model, closing()[0])).now() for _ in range(2)]
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_what_hooks_compute_does_not_count() -> None:
    net = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(2, 2)), nn.LSTM(2, 2), nn.Linear(2, 2))
    prune.l1_unstructured(net[2], "weight", 0.5)
    readable = Readable(net)
    before = readable.now()
    with torch.no_grad():
        net[2](net[1](net[0](torch.ones(3, 2)))[0])
    assert readable.now() is before


def test_numbers_by_value() -> None:
    assert told(float("nan")) == told(float("nan"))
    assert len({told(value) for value in (0.0, -0.0, 0, False, float("nan"), complex(0, -0.0), complex(0, 0.0))}) == 7


def test_optimizers_trainers_and_logs_do_not_count_beyond_which_they_are() -> None:
    net: Any = Net()
    net.optimizer = torch.optim.SGD(net.linear.parameters(), lr=0.1)
    readable = Readable(net)
    before = readable.now()
    net.optimizer.param_groups[0]["lr"] = 0.2
    assert readable.now() == before


def test_large_containers_and_deep_objects_are_looked_into_as_far_as_it_goes() -> None:
    net: Any = nn.Linear(2, 2)
    deep = Config()
    net.deep = types.SimpleNamespace(a=types.SimpleNamespace(a=deep))
    net.many = list(range(100_000))
    readable = Readable(net)
    before = readable.now()
    deep.weight = 3.0
    assert readable.now() is before
    net.many[0] = -1
    assert readable.now() != before


def test_the_model_is_not_kept_alive() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    readable = Readable(net)
    readable.now()
    held = weakref.ref(net)
    gc.disable()
    try:
        del net
        assert held() is None
    finally:
        gc.enable()


def test_nothing_is_looked_at_again_in_a_large_model() -> None:
    config: Any = Config()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), Net()) for _ in range(100)])
    for module in model.modules():
        module.config = config
    readable = Readable(model)
    readable.now()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        readable.now()
        times.append(time.perf_counter() - start)
    assert min(times) < 5e-3
