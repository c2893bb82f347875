"""Functions and ops that cannot be traced: the same bits as in eager mode, no more memory than said, no leaks."""

# pyright: reportIncompatibleMethodOverride=false
# Functions are written as torch documents them.

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from environment import thinned
from planning.agreement import Interpreter, difference
from torch import Tensor, nn
from torch.autograd import Function
from torch.profiler import profile

from memplan.errors import DataDependentError, RecordingError
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.capture.opaque_calls import notes_on_library_ops
from memplan.planning.graph.joint_graph import recomputable_values

LIBRARY = torch.library.Library("memplan_tests", "DEF")
LIBRARY.define("raw(Tensor x) -> Tensor")
LIBRARY.impl("raw", lambda x: torch.from_numpy(np.sqrt(np.abs(x.numpy()))), "CPU")


@torch.library.custom_op("memplan_tests::grown", mutates_args=())
def grown(x: Tensor, k: float) -> Tensor:
    return torch.from_numpy(np.exp(x.detach().numpy() * k))


def grown_saves(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.k = inputs[1]


grown.register_autograd(lambda ctx, g: (g * ctx.saved_tensors[0] * ctx.k, None), setup_context=grown_saves)


@torch.library.custom_op("memplan_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("memplan_tests::twice_backward", mutates_args=())
def twice_backward(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, g: torch.ops.memplan_tests.twice_backward(g))


class Sine(Function):
    """Leaves torch in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, k: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.k = k
        return torch.from_numpy(np.sin(x.detach().numpy() * k))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(np.cos(x.numpy() * ctx.k) * ctx.k * g.numpy()), None


class Product(Function):
    """Leaves torch in backward only; has an attribute, two results, and one without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(x, y)
        ctx.more = x + y
        return x * y, x > 0

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        x, y = ctx.saved_tensors
        return torch.from_numpy(g.numpy() * y.numpy()), torch.from_numpy(g.numpy() * x.numpy()) + 0 * ctx.more


class Square(Function):
    """Stays in torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 2 * ctx.saved_tensors[0] * g


class Outer(Function):
    """Calls another one that cannot be traced, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() * 2) + Sine.apply(x.detach(), 1.0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return g * (2 + Sine.apply(x + np.pi / 2, 1.0))  # pyright: ignore[reportOperatorIssue]


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.a, self.b = function, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def product(model: Any, x: Tensor) -> Tensor:
    value, positive = Product.apply(model.a(x), model.b(x))  # pyright: ignore[reportGeneralTypeIssues]
    return torch.where(positive, value, -value)


CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "function": (lambda model, x: model.b(Sine.apply(model.a(x), 2.0)) + Sine.apply(x, 3.0), 2),
    "backward": (product, 1),
    "one_in_another": (lambda model, x: model.b(Outer.apply(model.a(x))) + Sine.apply(x, 3.0), 2),
    "op": (lambda model, x: model.b(torch.ops.memplan_tests.grown(model.a(x), 0.5)), 1),
    "op_by_its_function": (lambda model, x: model.b(grown(model.a(x), 0.5)), 1),
    "op_of_the_derivative": (lambda model, x: model.b(twice(model.a(x))), 1),
    "op_without_derivative": (lambda model, x: model.a(x + torch.ops.memplan_tests.raw(x)), 1),
    "traced": (lambda model, x: Square.apply(model.a(x)), 0),
}


@pytest.mark.parametrize("name", thinned(CASES, 3))
def test_what_cannot_be_traced_is_called_as_it_is(name: str) -> None:
    torch.manual_seed(0)
    function, count = CASES[name]
    captured, differences = difference(Calls(function), (torch.randn(3, 4),))
    assert differences == []
    assert len(captured.opaque_calls) == count
    assert all("called as it is" in str(one) and "test_opaque_calls.py:" in str(one) for one in captured.opaque_calls)


def test_it_runs_once_and_holds_what_it_says() -> None:
    captured = capture(Calls(product), call_of((torch.randn(3, 4),), {}))
    (op,) = [op for op in captured.graph.ops if op.target == "memplan.opaque.default"]
    assert not set(op.makes) & recomputable_values(captured.graph)
    handle = captured.graph.values[op.outputs[-1] or 0]
    assert (
        handle.bytes == 3 * 4 * 4 + 4
    )  # ctx.more and where its graph begins; what is saved of the arguments is theirs
    (backward,) = [op for op in captured.graph.ops if op.target == "memplan.opaque_backward.default"]
    assert {captured.graph.base(value) for value in op.reads} | {handle.id} <= set(backward.reads)


class Hides(Function):
    """Keeps its first argument where nobody sees it, and refuses that the second needs a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        ctx.first = lambda: x
        return torch.from_numpy(x.detach().numpy() * y.numpy() + z.detach().numpy())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return torch.from_numpy(g.numpy() * 1), None, ctx.first() * 0 + g


def hides(model: Any, x: Tensor) -> Tensor:
    return Hides.apply(torch.tanh(model.a(x)), x, torch.tanh(model.b(x)))  # pyright: ignore[reportReturnType]


def test_what_a_function_hides_is_held() -> None:
    captured, differences = difference(Calls(hides), (torch.randn(3, 4),))
    assert differences == []
    graph = captured.graph
    tanh = [op.makes[0] for op in graph.ops if op.target == "aten.tanh.default"]
    assert graph.irreplaceable == {tanh[0]}
    assert tanh[0] not in recomputable_values(graph)
    assert tanh[1] in recomputable_values(graph)


LIBRARY.define("half(Tensor(a) x) -> Tensor(a)")
LIBRARY.impl("half", lambda x: x[: len(x) // 2], "CompositeExplicitAutograd")


def test_a_librarys_op_is_called_once_and_named() -> None:
    def calls(model: Any, x: Tensor) -> Tensor:
        return model.b(torch.ops.memplan_tests.half(twice(model.a(x)).detach()))

    captured, differences = difference(Calls(calls), (torch.randn(4, 4),))
    assert differences == []
    (op,) = [op for op in captured.graph.forward_ops if op.target == "memplan_tests.twice.default"]
    assert op.must_run_once
    (said,) = notes_on_library_ops(captured.graph)
    assert said.startswith("memplan_tests.twice.default (")
    assert "test_opaque_calls.py:" in said


def test_nothing_is_held_when_the_handle_is_gone() -> None:
    model, call = Calls(product), call_of((torch.randn(3, 4),), {})
    interpreter = Interpreter(capture(model, call), model, call)
    with torch.no_grad():
        interpreter.forward()
    handles = [one for one in interpreter.tensors.values() if hasattr(one, "recorded")]
    held = weakref.ref(handles[0].recorded)  # pyright: ignore[reportAttributeAccessIssue]
    assert held() is not None
    del handles
    interpreter.tensors.clear()
    gc.collect()
    assert held() is None


def test_a_profiler_at_work_is_named() -> None:
    with profile(acc_events=True), pytest.raises(RecordingError, match="Sine cannot be traced, and what it takes"):
        capture(Calls(CASES["function"][0]), call_of((torch.randn(3, 4),), {}))


def test_the_function_is_the_users_own_again_afterwards() -> None:
    before = dict(vars(Sine))
    capture(Calls(CASES["function"][0]), call_of((torch.randn(3, 4),), {}))
    assert dict(vars(Sine)) == before


class Picked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy()[x.detach().numpy() > 0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        raise AssertionError("not asked for")


def test_results_of_another_shape_than_planned_are_refused() -> None:
    model, x = Calls(lambda model, x: model.a(x).sum() + Picked.apply(x).sum()), torch.ones(3, 4)
    call = call_of((x,), {})
    captured = capture(model, call)
    with torch.no_grad():
        Interpreter(captured, model, call).forward()
        other = call_of((torch.tensor([1.0, -1, 1, 1]).expand(3, 4).clone(),), {})
        with pytest.raises(DataDependentError, match="Picked returned"):
            Interpreter(captured, model, other).forward()


class Broken(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        raise OSError("no such library")

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g


def test_a_function_that_fails_is_named_as_it_fails() -> None:
    with pytest.raises(RecordingError, match="OSError: no such library"):
        capture(Calls(lambda _, x: Broken.apply(x)), call_of((torch.randn(3, 4),), {}))


def test_recurrent_layers_hold_what_eager_mode_saves() -> None:
    model, x = nn.LSTM(8, 16, 2), torch.randn(5, 3, 8)
    captured = capture(model, call_of((x,), {}))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        results = model(x)
    sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in saved}
    known = [x, *model.parameters(), *(results[0], *results[1])]
    for one in known:
        sizes.pop(one.untyped_storage().data_ptr(), None)
    (op,) = [op for op in captured.graph.ops if op.target == "memplan.opaque.default"]
    held = captured.graph.values[op.outputs[-1] or 0].bytes
    assert held == pytest.approx(sum(sizes.values()), rel=0.2)
