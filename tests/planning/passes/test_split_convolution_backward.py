"""What kernels do not read: bits and bytes with other memory in its place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from environment import slow, thinned
from planning.agreement import difference
from rewriting.cells import CHOICES
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from truth.cpu_allocator import allocations, peak_of

from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.joint_graph import RESIDENT, JointGraph
from memplan.planning.levers import in_place
from memplan.planning.passes import split_convolution_backward
from memplan.planning.schedule.actions import Choices
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import schedule
from memplan.rewriting.engine import Engine

DTYPES = torch.float32, torch.float64, torch.bfloat16


def nan_like(tensor: Tensor, *, dense: bool) -> Tensor:
    """What the graph puts in the place of an argument: its shape, in memory that holds something else."""
    stride = tensor.stride() if dense else (0,) * tensor.dim()
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, stride, strict=True))
    return torch.full((reach,), float("nan"), dtype=tensor.dtype).as_strided(tensor.shape, stride)


def peak(run: Callable[[], Any]) -> int:
    run()
    return peak_of(allocations(run))


def image(dims: int, dtype: torch.dtype, last: bool, channels: int = 4, size: int = 12) -> Tensor:
    x = torch.randn(2, channels, *[size] * dims).to(dtype)
    if last:
        x = x.to(memory_format={2: torch.channels_last, 3: torch.channels_last_3d}[dims])
    return x


def pools(target: str, dims: int) -> Callable[[Tensor], Tensor]:
    """A function whose derivative is the op."""
    name = target.split(".")[1]
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "max_pool": lambda x: getattr(F, f"max_pool{dims}d")(x, 3, 2, 1),
        "avg_pool": lambda x: getattr(F, f"avg_pool{dims}d")(x, 2),
        "adaptive_max_pool": lambda x: getattr(F, f"adaptive_max_pool{dims}d")(x, 5),
        "_adaptive_avg_pool": lambda x: getattr(F, f"adaptive_avg_pool{dims}d")(x, 5),
        "reflection_pad": lambda x: F.pad(x, (1, 2) * dims, mode="reflect"),
        "replication_pad": lambda x: F.pad(x, (1, 2) * dims, mode="replicate"),
    }
    return next(function for start, function in functions.items() if name.startswith(start))


class Calls(TorchDispatchMode):
    """Keeps the arguments of an op."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target, self.found = target, list[tuple[Any, tuple[Any, ...]]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) == self.target:
            self.found.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("target", "last", "dtype"),
    thinned(itertools.product(split_convolution_backward.SHAPE_ARGUMENT, [False, True], DTYPES), 5),
)
def test_a_kernel_takes_the_shape_alone(target: str, last: bool, dtype: torch.dtype) -> None:
    dims = next(int(letter) for letter in target.split(".")[1] if letter.isdigit())
    if (last and dims == 1) or (target == "aten.avg_pool3d_backward.default" and dtype == torch.bfloat16):
        pytest.skip("torch has no such layout, or no such kernel")
    x = image(dims, dtype, last).requires_grad_()
    y = pools(target, dims)(x)
    with Calls(target) as seen:
        y.backward(torch.randn_like(y))
    ((func, args),) = seen.found
    at = split_convolution_backward.SHAPE_ARGUMENT[target]
    dense = not args[at].is_contiguous()
    other = [*args[:at], nan_like(args[at], dense=dense), *args[at + 1 :]]
    expected, found = func(*args), func(*other)
    assert torch.equal(expected, found)
    assert found.stride() == expected.stride()
    assert peak(lambda: func(*other)) <= peak(lambda: func(*args))


@dataclass(frozen=True)
class Convolution:
    dims: int = 2
    wide: int = 8
    narrow: int = 16
    kernel: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    groups: int = 1
    transposed: bool = False
    last: bool = False
    dtype: torch.dtype = torch.float32
    size: int = 12

    def arguments(self) -> tuple[Any, ...]:
        x = image(self.dims, self.dtype, self.last, self.wide, self.size)
        kind = getattr(nn, f"Conv{'Transpose' if self.transposed else ''}{self.dims}d")
        layer = kind(
            self.wide, self.narrow, self.kernel, self.stride, self.padding, dilation=self.dilation, groups=self.groups
        ).to(self.dtype)
        y = layer(x)
        places = [[getattr(self, name)] * self.dims for name in ("stride", "padding", "dilation")]
        gradient = torch.randn_like(y)
        return gradient, x, layer.weight.detach(), [self.narrow], *places, self.transposed, [0] * self.dims, self.groups


def convolutions() -> Iterator[Convolution]:
    plain = Convolution()
    for one in (
        plain,
        replace(plain, stride=2),
        replace(plain, dilation=2, padding=2),
        replace(plain, groups=4),
        replace(plain, groups=8, narrow=8),
        replace(plain, kernel=1, padding=0),
        replace(plain, kernel=5, padding=2, wide=3),
        replace(plain, transposed=True),
        replace(plain, transposed=True, stride=2, groups=2),
        replace(plain, size=33, wide=32, narrow=32),
    ):
        yield one
        yield replace(one, last=True)
        yield replace(one, dtype=torch.bfloat16)
        yield replace(one, dims=1)
        if one.size < 20:
            yield replace(one, dims=3, size=6)
            yield replace(one, dims=3, size=6, last=True)
    yield replace(plain, dtype=torch.float64)


@pytest.mark.parametrize("one", thinned(convolutions(), 4), ids=str)
def test_a_convolutions_derivative_in_two_parts_is_the_same(one: Convolution) -> None:
    torch.manual_seed(0)
    args = one.arguments()
    backward = torch.ops.aten.convolution_backward.default
    of_input, of_weight, of_bias = backward(*args, [True, True, True])
    _, weight, bias = backward(*args, [False, True, True])
    other = [args[0], nan_like(args[1], dense=True), *args[2:]]
    result, _, _ = backward(*other, [True, False, False])
    assert torch.equal(of_weight, weight)
    assert torch.equal(of_bias, bias)
    assert torch.equal(of_input, result)
    assert of_input.stride() == result.stride()
    assert peak(lambda: backward(*other, [True, False, False])) == peak(lambda: backward(*args, [True, False, False]))


def reads(graph: JointGraph, target: str) -> list[str]:
    """What the ops of a kind read: values by the op that made them."""
    found: list[str] = []
    for op in graph.ops:
        if op.target == target:
            for value in op.reads:
                maker = graph.values[value].op
                found.append(graph.values[value].path if maker is None else graph.ops[maker].target)
    return found


def test_a_convolutions_input_is_read_by_the_weights_derivative_only() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
    graph = capture(model, call_of((torch.randn(2, 3, 8, 8),), {})).graph
    parts = [op for op in graph.ops if op.target == "aten.convolution_backward.default"]
    first = next(op for op in graph.ops if op.target == "aten.convolution.default")
    assert [op.args[10] for op in parts] == [[False, True, True], [True, False, False], [False, True, True]]
    assert [first.makes[0] in op.reads for op in parts] == [True, False, False]


@pytest.mark.parametrize(
    ("place", "last", "groups"), [("cpu", False, 1), ("cuda:0", False, 1), ("cuda:0", True, 1), ("cuda:0", False, 2)]
)
def test_on_a_card_the_input_is_not_kept_for_its_own_gradient(
    place: str, last: bool, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More channels come in than go out, so that no view of the result's gradient has the input's strides. cuDNN's
    convolutions alone take strides of 0."""
    monkeypatch.setattr("memplan.planning.passes.pipeline.split", lambda graph: graph)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Tanh(), nn.Conv2d(8, 2, 3, groups=groups))
    x = torch.randn(2, 4, 9, 9)
    if last:
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # its stub lacks it
        x = x.to(memory_format=torch.channels_last)
    graph = capture(model, call_of((x,), {})).graph
    graph = replace(graph, values=tuple(replace(value, place=place) for value in graph.values))
    derivatives = [op for op in split_convolution_backward.split(graph).ops if "convolution_backward" in op.target]
    of_input = next(op for op in derivatives if op.args[10][0])
    split = split_convolution_backward.split(graph)
    tanh = next(op for op in split.ops if op.target == "aten.tanh.default").makes[0]
    assert (split.base(of_input.args[1].value) == tanh) == (place == "cpu" or last or groups == 2)


def test_the_input_of_a_convolution_may_have_strides_of_0_for_its_own_gradient() -> None:
    """NaN, of which nothing arrives in the gradient."""
    x, weight, gradient = torch.randn(2, 8, 7, 7), torch.randn(2, 8, 3, 3), torch.randn(2, 2, 5, 5)
    sizes = x.new_full((1,), float("nan")).expand(x.shape)

    def of(input: Tensor) -> Tensor:
        options = None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, False, False]
        return torch.ops.aten.convolution_backward(gradient, input, weight, *options)[0]

    assert torch.equal(of(sizes), of(x))


def test_a_pools_input_is_not_kept() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2, 1, 1), nn.AvgPool2d(2))
    graph = capture(model, call_of((torch.randn(2, 3, 16, 16),), {})).graph
    assert "aten.tanh.default" not in reads(graph, "aten.max_pool2d_with_indices_backward.default")


@pytest.mark.parametrize("kind", ["max", "average"])
def test_on_a_card_a_pools_derivative_is_written_over_what_stands_for_its_input(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, torch would copy an input that is not contiguous."""
    monkeypatch.setattr(JointGraph, "is_on_card", True)
    pool = nn.MaxPool2d(2) if kind == "max" else nn.AvgPool2d(2)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 1), nn.ReLU(), pool)
    captured, differences = difference(model, (torch.randn(2, 3, 16, 16),))
    assert differences == []
    graph = captured.graph
    (op,) = (op for op in graph.ops if op.target in split_convolution_backward.COPIED_ON_CARD)
    made = schedule(graph, Choices(saved_forms=frozenset((form.lever, form.value) for form in graph.forms)))
    (action,) = (action for action in made.backward if action.op == op.index)
    assert graph.maker[op.overwrites[0]].target == "aten.new_empty_strided.default"
    assert action.overwritten == op.overwrites[0]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("target", sorted(split_convolution_backward.COPIED_ON_CARD))
def test_a_pools_derivative_can_be_written_over_its_input(target: str, last: bool) -> None:
    x = image(2, torch.float32, last).requires_grad_()
    y = pools(target, 2)(x)
    with Calls(target) as seen:
        y.backward(torch.randn_like(y))
    ((func, args),) = seen.found
    form, over = in_place.call_into(target, "self"), nan_like(args[1], dense=True)
    assert form.out is not None
    _, name, overload = form.target.split(".")
    found = getattr(getattr(torch.ops.aten, name), overload)(args[0], over, *args[2:], **{form.out: over})
    assert found.data_ptr() == over.data_ptr()
    assert torch.equal(found, func(*args))


@pytest.mark.parametrize("one", thinned(convolutions(), 4), ids=str)
def test_without_its_weight_a_convolutions_derivative_takes_the_shape_of_the_input_alone(one: Convolution) -> None:
    torch.manual_seed(0)
    args = one.arguments()
    backward = torch.ops.aten.convolution_backward.default
    of_input, _, of_bias = backward(*args, [True, False, True])
    other = [args[0], nan_like(args[1], dense=True), *args[2:]]
    assert torch.equal(of_input, backward(*other, [True, False, False])[0])
    assert torch.equal(of_bias, backward(*other, [False, False, True])[2])


def frozen(layer: nn.Module, *, bias: bool = False) -> nn.Module:
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(bias and name == "bias")
    return layer


MASKED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bias trained": (lambda: frozen(nn.Conv2d(16, 16, 3, padding=1), bias=True), "aten.convolution_backward.default"),
    "stride 2": (lambda: frozen(nn.Conv2d(16, 16, 3, 2, 1)), "aten.convolution_backward.default"),
    "stride 2, bias trained": (
        lambda: frozen(nn.Conv2d(16, 16, 3, 2, 1), bias=True), "aten.convolution_backward.default",
    ),
    "fewer channels": (lambda: frozen(nn.Conv2d(16, 4, 1)), "aten.convolution_backward.default"),
    "pool": (lambda: nn.MaxPool2d(2), "aten.max_pool2d_with_indices_backward.default"),
    "average": (lambda: nn.AvgPool2d(2), "aten.avg_pool2d_backward.default"),
}  # fmt: skip


def masked(name: str, last: bool) -> tuple[nn.Module, Tensor]:
    """A layer after a ReLU, whose own derivative takes bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), MASKED[name][0]())
    x = image(2, torch.float32, last, channels=3, size=96)
    return (model.to(memory_format=torch.channels_last) if last else model), x  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("last", [*slow(False), True])
@pytest.mark.parametrize("name", thinned(MASKED, 2))
def test_what_is_read_for_its_shape_does_not_keep_the_input(name: str, last: bool) -> None:
    model, x = masked(name, last)
    captured, differences = difference(model, (x,))
    assert differences == []
    graph = captured.graph
    ops = [
        op for op in graph.ops if op.target == MASKED[name][1] and (not op.args[10][1] if "conv" in op.target else 1)
    ]
    (relu,) = [op.makes[0] for op in graph.ops if op.target == "aten.relu.default"]
    assert ops
    assert not any(relu in op.reads for op in ops)
    made = schedule(graph, Choices(saved_forms=frozenset({("encode", relu)})))
    assert relu not in made.saved


@pytest.mark.parametrize("choice", ["all dropped", *slow("all kept")])
@pytest.mark.parametrize("last", [False, *slow(True)])
@pytest.mark.parametrize("name", thinned(MASKED, 2))
def test_what_stands_for_it_is_counted(name: str, last: bool, choice: str) -> None:
    model, x = masked(name, last)
    call = call_of((x,), {})
    captured = capture(model, call)
    made = schedule(captured.graph, CHOICES[choice](captured.graph))
    engine = Engine(captured, made)

    def step() -> None:
        output = engine.run(model, call)
        output.sum().backward()

    for _ in range(2):
        step()
        model.zero_grad()
    resident = sum(value.bytes for value in captured.graph.values if value.kind in RESIDENT)
    assert peak_of(allocations(step)) == pytest.approx(levels(made).peak - resident, rel=0.01)


def test_an_input_that_is_read_next_anyway_stands_for_itself() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Tanh(), frozen(nn.Conv2d(16, 16, 3, 2, 1)))
    graph = capture(model, call_of((torch.randn(2, 3, 16, 16),), {})).graph
    assert not any(op.target == "aten.new_empty_strided.default" for op in graph.ops)


def test_running_statistics_are_not_read_in_backward() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh())
    graph = capture(model, call_of((torch.randn(2, 3, 8, 8),), {})).graph
    read = reads(graph, "aten.native_batch_norm_backward.default")
    assert read
    assert not any(name.startswith("1.running") for name in read)
    model[1].eval()
    graph = capture(model, call_of((torch.randn(2, 3, 8, 8),), {})).graph
    assert any(name.startswith("1.running") for name in reads(graph, "aten.native_batch_norm_backward.default"))
