"""A planned step never goes on with an old value of something that its Python code reads, wherever that is.

The independent source is the model itself without a plan: ``forward()`` called directly.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import contextvars
import copy
import ctypes
import decimal
import enum
import functools
import gc
import importlib
import inspect
import itertools
import json
import logging
import multiprocessing
import operator
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from environment import slow, thinned
from hypothesis import given, settings
from hypothesis import strategies as st
from rewriting.cells import installed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memplan.errors import BackwardError, RecordingError, UsageError
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.capture.loss_module import with_loss
from memplan.planning.capture.reads.kinds import MISSING, value_key
from memplan.planning.capture.reads.readable import Reads
from memplan.planning.capture.reads.watched import Watched

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
WEIGHT = 1.0
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)
SETTINGS = types.ModuleType("settings_of_a_user")
LOGGER = logging.getLogger("of_a_user")
SETTINGS.conf = types.SimpleNamespace(alpha=1.0)  # pyright: ignore[reportAttributeAccessIssue]
counter = 0


class Box:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Single:
    only: Any = None

    @classmethod
    def get(cls) -> Any:
        cls.only = cls.only or Box(alpha=1.0)
        return cls.only


class Table:
    rows: Any = {"a": {"b": {"c": 1.0}}}  # noqa: RUF012


class Answering:
    """A config whose attributes are in a dict."""

    def __init__(self) -> None:
        self._values = {"alpha": 1.0}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(slots=True)
class Slotted:
    alpha: float = 1.0
    inner: Any = field(default_factory=lambda: [1.0])


class Computed:
    def __init__(self) -> None:
        self._alpha = 1.0

    @property
    def alpha(self) -> float:
        return self._alpha


@functools.lru_cache
def cached() -> Any:
    return Box(alpha=1.0)


class Callable_:
    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, net: Any) -> float:
        return self.scale


Read = Callable[[Any], Any]


class Net(nn.Module):
    scale = 1.0

    def __init__(self, holder: Any, read: Read) -> None:
        super().__init__()
        self.first, self.last, self.h, self.read = nn.Linear(8, 8), nn.Linear(8, 2), holder, read

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sigmoid(self.first(x))) * self.read(self) * self.scale


def put(owner: Any, name: str, value: Any) -> Callable[[Any], None]:
    return lambda _: setattr(owner, name, value)


def closing() -> tuple[Read, Callable[[Any], None]]:
    alpha = 1.0

    def anneal(_: Any) -> None:
        nonlocal alpha
        alpha = 0.25

    return lambda net: alpha, anneal


def environment(value: str) -> Callable[[Any], None]:
    return lambda _: os.environ.update(MEMPLAN_TEST_ALPHA=value)


def cases() -> dict[str, tuple[Any, Read, Callable[[Any], Any]]]:
    """By name: what the model holds, what it reads, and a change of that."""
    os.environ["MEMPLAN_TEST_ALPHA"] = "1"
    Single.only, Table.rows["a"]["b"]["c"], Net.scale = None, 1.0, 1.0
    SETTINGS.conf.alpha, globals()["WEIGHT"] = 1.0, 1.0
    sys.modules[SETTINGS.__name__] = SETTINGS
    VARIABLE.set(1.0)
    cached.cache_clear()
    refilled.cache_clear()
    refilled()
    Mode.TABLE.value["alpha"], Mode.TABLE.scale, Mode.NESTED.value[0][0] = 1.0, 1.0, 1.0
    globals()["dispatched"] = functools.singledispatch(lambda _: 1.0)
    LOGGER.setLevel(logging.DEBUG)
    closed, anneal = closing()
    callable_, local = Callable_(), collections.deque([1.0])
    target = Box(alpha=1.0)

    def defaulted(net: Any, alpha: float = 1.0) -> float:
        return alpha

    def imported(net: Any) -> float:
        import settings_of_a_user as found  # pyright: ignore[reportMissingImports]

        return found.conf.alpha

    return {
        "six objects deep": (
            Box(a=Box(b=Box(c=Box(d=Box(e=Box(alpha=1.0)))))),
            lambda s: s.h.a.b.c.d.e.alpha,
            lambda m: setattr(m.h.a.b.c.d.e, "alpha", 0.25),
        ),
        "a module's object": (None, lambda s: SETTINGS.conf.alpha, put(SETTINGS.conf, "alpha", 0.25)),
        "a global": (None, lambda s: WEIGHT, lambda m: globals().update(WEIGHT=0.25)),
        "a singleton": (None, lambda s: Single.get().alpha, lambda m: setattr(Single.get(), "alpha", 0.25)),
        "a cached function's": (None, lambda s: cached().alpha, lambda m: setattr(cached(), "alpha", 0.25)),
        "a class's default": (None, lambda s: 1.0, put(Net, "scale", 0.25)),
        "what shadows it": (None, lambda s: 1.0, lambda m: setattr(m, "scale", 0.25)),
        "an array": (np.ones(2), lambda s: float(s.h[1]), lambda m: m.h.__setitem__(1, 0.25)),
        "UserDict": (collections.UserDict(a=1.0), lambda s: s.h["a"], lambda m: m.h.__setitem__("a", 0.25)),
        "a proxy": (
            Box(real={"a": 1.0}, shown=None),
            lambda s: types.MappingProxyType(s.h.real)["a"],
            lambda m: m.h.real.update(a=0.25),
        ),
        "an ordered dict's order": (
            collections.OrderedDict(a=1.0, b=0.25),
            lambda s: next(iter(s.h.values())),
            lambda m: m.h.move_to_end("a"),
        ),
        "the environment": (None, lambda s: float(os.environ["MEMPLAN_TEST_ALPHA"]), environment("0.25")),
        "the end of a list": ([1.0] * 900, lambda s: s.h[899], lambda m: m.h.__setitem__(899, 0.25)),
        "a set": ({1}, lambda s: 1.0 if 2 in s.h else 0.5, lambda m: m.h.add(2)),
        "a deque": (local, lambda s: s.h[0], lambda m: m.h.__setitem__(0, 0.25)),
        "the kind of a number": (Box(n=2), lambda s: torch.full((), s.h.n) // 4 * 1.0 + s.h.n / 2, put_kind),
        "an unregistered module's mode": ([nn.Dropout(0.9)], lambda s: s.h[0](torch.ones(2)), lambda m: m.h[0].eval()),
        "a ContextVar": (None, lambda s: VARIABLE.get(), lambda m: VARIABLE.set(0.25)),
        "a weak reference": (
            Box(ref=weakref.ref(target), keep=target),
            lambda s: s.h.ref().alpha,
            put(target, "alpha", 0.25),
        ),
        "slots": (Slotted(), lambda s: s.h.alpha, lambda m: setattr(m.h, "alpha", 0.25)),
        "a property": (Computed(), lambda s: s.h.alpha, lambda m: setattr(m.h, "_alpha", 0.25)),
        "__getattr__": (Answering(), lambda s: s.h.alpha, lambda m: m.h._values.update(alpha=0.25)),
        "vars()": (Box(a=0.5, b=0.5), lambda s: sum(vars(s.h).values()), lambda m: setattr(m.h, "b", 0.25)),
        "a cell": (None, closed, anneal),
        "a default": (None, defaulted, put(defaulted, "__defaults__", (0.25,))),
        "a callable object's": (None, callable_, put(callable_, "scale", 0.25)),
        "a partial's": (
            functools.partial(defaulted, alpha=1.0),
            lambda s: s.h(s),
            lambda m: m.h.keywords.update(alpha=0.25),
        ),
        "a class": (Box(alpha=1.0), lambda s: 0.5 if isinstance(s.h, Callable_) else 1.0, put_class),
        "a layer's": (None, lambda s: 1.0, lambda m: setattr(m, "last", nn.Linear(8, 2, bias=False))),
        "shared memory": (
            multiprocessing.Value("d", 1.0),
            lambda s: s.h.value,
            lambda m: setattr(m.h, "value", 0.25),
        ),
        "a logger's level": (
            None,
            lambda s: 1.0 if LOGGER.isEnabledFor(logging.ERROR) else 0.25,
            lambda m: LOGGER.setLevel(logging.CRITICAL),
        ),
        "a cache that is filled anew": (None, lambda s: refilled(), refill),
        "a context manager's": (None, *managed()),
        "an implementation by type": (
            None,
            lambda s: dispatched(3),
            lambda m: dispatched.register(int)(lambda _: 0.25),
        ),
        "a getter's": (Box(a=Box(alpha=1.0), get=operator.attrgetter("a.alpha")), lambda s: s.h.get(s.h), put_deep),
        "a partial getattr's": (
            functools.partial(getattr, target, "alp" + "ha"),
            lambda s: s.h(),
            put(target, "alpha", 0.25),
        ),
        "a pattern's": (Slotted(), matched, lambda m: setattr(m.h, "alpha", 0.25)),
        "a format's": (Box(alpha=1.0), lambda s: float("{.alpha}".format(s.h)), put_alpha),  # noqa: UP032
        "eval": (None, lambda s: eval("WEIGHT * 1.0"), lambda m: globals().update(WEIGHT=0.25)),
        "a member's attribute": (Mode.TABLE, lambda s: s.h.scale, lambda m: setattr(m.h, "scale", 0.25)),
        "a list in a member's tuple": (
            Mode.NESTED,
            lambda s: s.h.value[0][0],
            lambda m: m.h.value[0].__setitem__(0, 0.25),
        ),
        "a text's attribute": (Text("a"), lambda s: s.h.scale, lambda m: setattr(m.h, "scale", 0.25)),
        **computed_names(),
        **states_of_c(),
        "a module that is replaced": (None, imported, replace_settings),
        "a tensor": (torch.ones(2), lambda s: s.h, lambda m: setattr(m, "h", torch.full((2,), 0.25))),
    }  # fmt: skip


def computed(*parts: str) -> str:
    """A name that is no constant of any code."""
    return "".join(parts or ("al", "pha"))


def computed_names() -> dict[str, tuple[Any, Read, Callable[[Any], Any]]]:
    """Attributes and modules that only functions of C have the names of."""
    return {
        "map(getattr)": (Box(alpha=1.0), lambda s: next(map(getattr, [s.h], [computed()])), put_alpha),
        "json of vars": (
            Box(alpha=1.0),
            lambda s: json.loads(json.dumps(s.h, default=vars))[computed()],
            put_alpha,
        ),
        "object.__getattribute__": (Box(alpha=1.0), lambda s: object.__getattribute__(s.h, computed()), put_alpha),
        "getattr_static": (Box(alpha=1.0), lambda s: inspect.getattr_static(s.h, computed()), put_alpha),
        "import_module": (
            None,
            lambda s: importlib.import_module(computed("settings_of", "_a_user")).conf.alpha,
            put(SETTINGS.conf, "alpha", 0.25),
        ),
    }


class Abstract(abc.ABC):  # noqa: B024
    pass


class Below(Abstract):
    pass


class Structure(ctypes.Structure):
    _fields_ = [("alpha", ctypes.c_float)]


def done(value: float) -> Future[float]:
    future = Future[float]()
    future.set_result(value)
    return future


def states_of_c() -> dict[str, tuple[Any, Read, Callable[[Any], Any]]]:
    """State behind functions of C."""
    decimal.getcontext().prec = 28
    np.seterr(divide="warn")
    torch.set_num_threads(1)
    threading.current_thread().name = "MainThread"
    fresh = type("Fresh", (), {})
    return {
        "decimal's precision": (None, lambda s: float(decimal.Decimal(1) / 3), put_precision),
        "numpy's errors": (
            None,
            lambda s: 1.0 if np.geterr()["divide"] == "warn" else 0.25,
            lambda m: np.seterr(divide="ignore"),
        ),
        "a registered class": (
            fresh(),
            lambda s: 1.0 if isinstance(s.h, Abstract) else 0.25,
            lambda m: Below.register(fresh),
        ),
        "a future's result": (done(1.0), lambda s: s.h.result(), lambda m: vars(m.h).update(_result=0.25)),
        "a structure of ctypes": (Structure(1.0), lambda s: s.h.alpha, put_alpha),
        "torch's threads": (None, lambda s: float(torch.get_num_threads()), lambda m: torch.set_num_threads(2)),
        "the thread's name": (
            None,
            lambda s: float(len(threading.current_thread().name)),
            lambda m: setattr(threading.current_thread(), "name", "other"),
        ),
    }


def put_precision(_: Any) -> None:
    decimal.getcontext().prec = 5


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Leave the state of the process as it was."""
    precision, errors, threads = decimal.getcontext().prec, np.geterr(), torch.get_num_threads()
    name = threading.current_thread().name
    yield
    decimal.getcontext().prec, threading.current_thread().name = precision, name
    np.seterr(**errors)
    torch.set_num_threads(threads)


class Mode(enum.Enum):
    TABLE = {"alpha": 1.0}  # noqa: RUF012
    NESTED = ([1.0],)
    scale: float


class Text(str):
    scale = 1.0


@functools.lru_cache
def refilled() -> float:
    return WEIGHT


def refill(_: Any) -> None:
    globals()["WEIGHT"] = 0.25
    refilled.cache_clear()
    refilled()


dispatched: Any = None
"""Set for each case."""


def managed() -> tuple[Read, Callable[[Any], None]]:
    alpha = 1.0

    @contextlib.contextmanager
    def scaled() -> Iterator[float]:
        yield alpha

    def anneal(_: Any) -> None:
        nonlocal alpha
        alpha = 0.25

    def read(_: Any) -> float:
        with scaled() as found:
            return found

    return read, anneal


def matched(net: Any) -> float:
    match net.h:
        case Slotted(alpha):
            return alpha
        case _:
            raise AssertionError


def put_deep(model: Any) -> None:
    model.h.a.alpha = 0.25


def put_alpha(model: Any) -> None:
    model.h.alpha = 0.25


def replace_settings(_: Any) -> None:
    module = types.ModuleType(SETTINGS.__name__)
    module.conf = types.SimpleNamespace(alpha=0.25)  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules[SETTINGS.__name__] = module


def put_kind(model: Any) -> None:
    model.h.n = 2.0


def put_class(model: Any) -> None:
    model.h.__class__ = Callable_


def result(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Any]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = call(X).square().sum()
    loss.backward()
    return [loss.detach(), *(None if one.grad is None else one.grad.clone() for one in model.parameters())]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(a is b or bool(torch.equal(*pair)) for pair in zip(one, other, strict=True) for a, b in [pair])


@pytest.mark.parametrize("worth", [1, *slow(1 << 30)], ids=["by a tree", "by Python"])
@pytest.mark.parametrize("name", thinned(cases(), 9))
def test_a_planned_call_is_eager_modes_after_any_change(name: str, worth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan._torch.guards._CHECKS_BEFORE_TREE", worth)
    holder, read, change = cases()[name]
    model = Net(holder, read)
    plans = installed(model)
    before = result(model, model)
    assert same(before, result(model, model.forward))
    assert same(before, result(model, model))
    assert len(plans.engines) == 1
    change(model)
    assert same(result(model, model.forward), result(model, model))
    assert len(plans.engines) == 2 or plans.calls.stats().unplanned


VALUES = st.one_of(st.booleans(), st.integers(-3, 3), st.floats(-2, 2, width=32), st.sampled_from(["a", "b"]))
TREES = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.dictionaries(st.sampled_from("pqr"), inner, min_size=1, max_size=3),
        st.dictionaries(st.sampled_from("uvw"), inner, min_size=1, max_size=3).map(lambda found: Box(**found)),
        st.tuples(inner, inner),
    ),
    max_leaves=8,
)


def weight_of(tree: Any) -> float:
    """A number that depends on everything in a tree."""
    if isinstance(tree, (list, tuple)):
        return sum((at + 1.5) * weight_of(one) for at, one in enumerate(tree))
    if isinstance(tree, dict):
        return sum((ord(key) - 100) * weight_of(one) for key, one in sorted(tree.items()))
    if isinstance(tree, Box):
        return 1.25 * sum((ord(key) - 100) * weight_of(one) for key, one in sorted(vars(tree).items()))
    return float({"a": 3.0, "b": 5.0}.get(tree, tree) if isinstance(tree, str) else tree + 0.5 * isinstance(tree, bool))


def places(tree: Any) -> list[tuple[Any, Any]]:
    """All places in a tree that can be assigned to."""
    found = list[tuple[Any, Any]]()
    if isinstance(tree, list):
        found += [(tree, at) for at in range(len(tree))]
    elif isinstance(tree, dict):
        found += [(tree, key) for key in tree]
    elif isinstance(tree, Box):
        found += [(tree, key) for key in vars(tree)]
    inner = vars(tree).values() if isinstance(tree, Box) else tree.values() if isinstance(tree, dict) else tree
    for one in inner if isinstance(tree, (list, tuple, dict, Box)) else ():
        found += places(one)
    return found


@given(TREES.map(lambda tree: Box(tree=tree)), st.data())
@settings(max_examples=5, deadline=None)
def test_any_one_change_in_any_tree(holder: Box, data: st.DataObject) -> None:
    model = Net(holder, lambda s: weight_of(s.h.tree))
    installed(model)
    assert same(result(model, model.forward), result(model, model))
    for _ in range(2):
        owner, key = data.draw(st.sampled_from(places(holder)))
        value = data.draw(VALUES)
        setattr(owner, key, value) if isinstance(owner, Box) else owner.__setitem__(key, value)
        assert same(result(model, model.forward), result(model, model))


LOG: list[int] = []


def test_a_log_that_forward_only_adds_to_is_not_read() -> None:
    def read(net: Any) -> float:
        LOG.append(1)
        return 1.0

    model = Net(None, read)
    plans = installed(model)
    for _ in range(2):
        result(model, model)
        result(model, model.forward)
    assert LOG
    assert len(plans.engines) == 1


def test_what_is_not_read_makes_no_other_plan() -> None:
    model: Any = Net(Box(alpha=1.0, step=0, inner=Box(log=[1])), lambda s: s.h.alpha)
    plans = installed(model)
    global counter
    for _ in range(3):
        result(model, model)
        counter += 1
        model.h.step += 1
        model.h.inner.log.append(1)
        model.epoch = counter
        model.h = copy.deepcopy(model.h)
    assert len(plans.engines) == 1
    assert plans.calls.stats().planned == 3


def test_a_value_that_comes_back_has_its_plan() -> None:
    model = Net(Box(alpha=1.0), lambda s: s.h.alpha)
    plans = installed(model)
    for alpha in (1.0, 0.5, 1.0, 0.5):
        model.h.alpha = alpha
        assert same(result(model, model.forward), result(model, model))
    assert len(plans.engines) == 2


@pytest.mark.parametrize(
    ("holder", "read", "said"),
    [
        (itertools.count(1), lambda s: next(s.h), "iterator"),
        (None, lambda s: time.time() * 0 + 1, "time.time"),
        (None, lambda s: float(len(os.getcwd()) > 0), "getcwd"),
        (None, lambda s: globals()["WEIGHT"], "globals"),
        (None, lambda s: in_another_thread(), "a thread's submit"),
        (None, lambda s: float(np.load(ARRAY)[0]), "calls numpy.load"),
        (None, lambda s: float(np.fromfile(ARRAY)[0]), "calls numpy.fromfile"),
        (None, lambda s: float(np.memmap(ARRAY)[0]), "calls numpy.memmap"),
        (None, lambda s: sys.modules[computed(__name__)].WEIGHT, "a module up by a computed name"),
        (None, lambda s: sys.modules.get(computed(__name__)).WEIGHT, "a module up by a computed name"),  # pyright: ignore[reportOptionalMemberAccess]
        (None, lambda s: __import__(computed("settings_of", "_a_user")).conf.alpha, "a module up by a computed name"),
        (None, lambda s: getattr(SETTINGS, computed("co", "nf")).alpha, "the module settings_of_a_user by computed"),
        (ctypes.pointer(ctypes.c_float(1.0)), lambda s: s.h[0], "a pointer of ctypes"),
        (None, lambda s: float(len(Path(__file__).read_text()) > 0), "open"),
        ([0.0], lambda s: counted(s.h), "changes"),
    ],
)
def test_what_cannot_be_compared_is_refused(holder: Any, read: Read, said: str) -> None:
    with pytest.raises(RecordingError, match=said):
        capture(Net(Box(inside=holder) if isinstance(holder, list) else holder, read), call_of((X,), {}))


ARRAY = Path()
"""A file with an array; set for these tests."""


@pytest.fixture(autouse=True, scope="module")
def _array(tmp_path_factory: pytest.TempPathFactory) -> None:
    globals()["ARRAY"] = tmp_path_factory.mktemp("arrays") / "array.npy"
    np.save(ARRAY, np.ones(1))


def in_another_thread() -> float:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: WEIGHT).result()


def counted(holder: Any) -> float:
    holder.inside[0] += 1.0
    return holder.inside[0]


class Factor(torch.autograd.Function):
    """Multiplies the gradient by what `backward_by` returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, holder: Any) -> Tensor:
        ctx.holder = holder
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * WEIGHT * ctx.holder.alpha, None


class Scaled(torch.autograd.Function):
    """Reads in backward what forward kept, and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return torch.relu(x) * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * (nn.functional.relu(ctx.saved_tensors[0]) > 0) * ctx.scale, None


def by_a_function(net: Any, x: Tensor) -> Tensor:
    return Factor.apply(x, net.h)


def by_a_hook(net: Any, x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda gradient: gradient * net.h.alpha)
    return y


def by_a_checkpoint(net: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: torch.tanh(x * net.h.alpha) * net.h.alpha, x, use_reentrant=True)


def by_what_it_kept(net: Any, x: Tensor) -> Tensor:
    return Scaled.apply(x, net.h.alpha)


class Late(nn.Module):
    h: Any

    def __init__(self, middle: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.h, self.middle = nn.Linear(8, 8), nn.Linear(8, 2), Box(alpha=1.0), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self, self.first(x)))


def changed_between(model: Late, call: Callable[[Tensor], Tensor], change: Callable[[Any], Any]) -> list[Any]:
    """The gradients where something changes between forward and backward; it is changed back."""
    model.zero_grad()
    loss = call(X).square().sum()
    change(model)
    try:
        loss.backward()
    finally:
        model.h.alpha, globals()["WEIGHT"] = 1.0, 1.0
    return [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


@pytest.mark.parametrize(
    ("middle", "change", "named"),
    [
        (by_a_function, lambda m: globals().update(WEIGHT=0.25), "WEIGHT"),
        (by_a_function, put_alpha, "h.alpha"),
        (by_a_hook, put_alpha, "h.alpha"),
        (by_a_checkpoint, put_alpha, "h.alpha"),
    ],
)
def test_what_backward_reads_must_not_change_before_it(middle: Any, change: Callable[[Any], Any], named: str) -> None:
    globals()["WEIGHT"] = 1.0
    model = Late(middle)
    plans = installed(model)
    expected = changed_between(model, model.forward, lambda m: None)
    assert same(expected, changed_between(model, model, lambda m: None))
    assert not same(expected, changed_between(model, model.forward, change))
    with pytest.raises(BackwardError, match=named):
        changed_between(model, model, change)
    assert same(expected, changed_between(model, model, lambda m: None))
    assert plans.calls.stats().planned == 3


def test_what_only_forward_reads_may_change_before_backward() -> None:
    model = Late(by_what_it_kept)
    plans = installed(model)
    assert same(changed_between(model, model.forward, put_alpha), changed_between(model, model, put_alpha))
    assert plans.calls.stats().planned == 1


def test_a_model_of_torchs_layers_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.5))
    installed(model)
    for change in (lambda: setattr(model[1], "eps", 0.125), lambda: setattr(model[2], "p", 0.25)):
        result(model, model)
        change()
        assert same(result(model, model.forward), result(model, model))


def test_what_a_loss_reads() -> None:
    penalty = Callable_()
    step = with_loss(nn.Linear(8, 2), lambda out, target: (out - target).square().sum() * penalty(out))
    installed(step)
    for scale in (1.0, 0.5):
        penalty.scale = scale
        assert torch.equal(step(X, torch.ones(4, 2)), step.forward(X, torch.ones(4, 2)))


def test_names_of_what_differs() -> None:
    model = Net(Box(a=Box(alpha=1.0)), lambda s: s.h.a.alpha)
    reads = capture(model, call_of((X,), {})).reads
    assert isinstance(reads, Reads)
    assert reads.are_unchanged()
    model.h.a.alpha = 2.0
    assert not reads.are_unchanged()
    assert reads.differences() == ["attribute h.a.alpha"]


def test_modes_and_hooks_for_all_modules_are_refused_while_a_step_is_captured() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(UsageError, match="hook for all modules"):
            capture(nn.Linear(8, 2), call_of((X,), {}))
    finally:
        handle.remove()


def test_numbers_by_value() -> None:
    assert value_key(float("nan")) == value_key(float("nan"))
    assert (
        len({value_key(value) for value in (0.0, -0.0, 0, False, float("nan"), complex(0, -0.0), complex(0, 0.0))}) == 7
    )


def test_the_model_is_not_kept_alive() -> None:
    model = nn.Sequential(nn.Linear(8, 2))
    reads = capture(model, call_of((X,), {})).reads
    assert reads is not None
    alive = weakref.ref(model)
    gc.collect(1)  # what the capture made; older objects take seconds to search
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_cells_that_are_filled_or_emptied() -> None:
    full, empty = types.CellType(1), types.CellType()
    watched = Watched()
    assert watched.watch_cell(full) == 1
    assert watched.watch_cell(empty) is MISSING
    watched.record_versions()
    assert watched.unchanged()
    empty.cell_contents = 1
    assert not watched.unchanged()
    del empty.cell_contents
    assert watched.unchanged()
    del full.cell_contents
    assert not watched.unchanged()
