"""Batch, group and instance norm with an activation, beside plain torch in float64.

In `TRITON_INTERPRET=1` the same tests go through the kernels, else through the plain form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from environment import slow
from torch import Tensor, nn
from truth.cpu_allocator import measured_peak
from truth.float64_errors import INTERPRETED, assert_as_exact, values_and_gradients

import memplan
from memplan import kernels
from memplan.errors import InputError
from memplan.kernels.channel_norms import channel_norm, differentiate

Function = Callable[..., Any]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
GROUPS = 2


def activated(x: Tensor, activation: str) -> Tensor:
    if activation == "leaky_relu":
        return F.leaky_relu(x, 0.1)
    return {"none": lambda x: x, "relu": F.relu, "silu": F.silu}[activation](x)


def pair(kind: str, activation: str) -> tuple[Function, Function]:
    """The kernel, and plain torch, of x, weight and bias, and for a residual also of that."""
    options: dict[str, Any] = {"activation": activation, "slope": 0.1}
    if kind == "batch":
        return partial(kernels.batch_norm_act, **options), lambda x, *of: activated(
            F.batch_norm(x, None, None, *of, training=True), activation
        )
    if kind == "residual":
        return (
            lambda x, w, b, r: kernels.batch_norm_act(x, w, b, residual=r, **options),
            lambda x, w, b, r: activated(F.batch_norm(x, None, None, w, b, training=True) + r, activation),
        )
    if kind == "group":
        return (
            lambda x, *of: kernels.group_norm_act(x, GROUPS, *of, **options),
            lambda x, *of: activated(F.group_norm(x, GROUPS, *of), activation),
        )
    return partial(kernels.instance_norm_act, **options), lambda x, *of: activated(
        F.instance_norm(x, None, None, *of), activation
    )


KINDS = ("batch", "residual", "group", "instance")
kinds = pytest.mark.parametrize("kind", KINDS)


def operands(kind: str, *shape: int) -> list[Tensor]:
    torch.manual_seed(0)
    x, weight, bias, residual = (torch.randn(size, dtype=torch.float64) for size in (shape, *2 * [shape[1:2]], shape))
    return [2 * x + 3, weight, bias, *([residual] if kind == "residual" else [])]


@dtypes
@pytest.mark.parametrize(
    ("kind", "activation"),
    [("batch", "none"), ("batch", "relu"), ("residual", "none"), ("residual", "relu"), ("residual", "leaky_relu"),
     ("group", "silu"), ("instance", "leaky_relu")],
)  # fmt: skip
def test_values_and_gradients(kind: str, activation: str, dtype: torch.dtype) -> None:
    """Of weight and bias there are six numbers: few."""
    assert_as_exact(*pair(kind, activation), operands(kind, 3, 6, 5, 7), dtype, few=True)


@kinds
@pytest.mark.parametrize(
    "shape", [(2, 2), (1, 2, 128, 129), (2, 70, 3, 3), *slow(((5, 2, 1),), ((2, 4, 3, 4, 5),))], ids=str
)
def test_odd_sizes(kind: str, shape: tuple[int, ...]) -> None:
    """Without positions, in 1D and 3D, with more positions than a part has, and more channels than a tile."""
    if kind in ("group", "instance") and len(shape) < 4:
        return  # torch refuses single elements
    if kind in ("residual", "group") and shape[-1] == 129:
        return  # two parts are the same there
    assert_as_exact(*pair(kind, "relu"), operands(kind, *shape), torch.float32, few=True)


@kinds
@pytest.mark.parametrize("shape", [(2, 70, 3, 5), *slow(((1, 4, 33, 34),), ((2, 4, 3, 4, 5),))], ids=str)
def test_channels_last(kind: str, shape: tuple[int, ...]) -> None:
    """Also with gradients that are not; the result has the layout of x."""
    ours, plain = pair(kind, "leaky_relu" if kind != "residual" else "relu")
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d

    def laid_out(function: Function, given: torch.memory_format) -> Function:
        def run(x: Tensor, *others: Tensor) -> Tensor:
            y = function(x.contiguous(memory_format=last), *others)
            assert function is plain or y.is_contiguous(memory_format=last)
            return y.contiguous(memory_format=given)

        return run

    for given in (last, torch.contiguous_format):
        assert_as_exact(laid_out(ours, given), laid_out(plain, given), operands(kind, *shape), torch.float32, few=True)


@kinds
def test_other_strides(kind: str) -> None:
    """Every second column, and a gradient that one number is expanded to."""
    ours, plain = pair(kind, "relu")
    of = operands(kind, 2, 4, 3, 10)

    def strided(function: Function) -> Function:
        return lambda *of: function(*(x[..., ::2] if x.dim() > 1 else x for x in of)).sum(-1)

    assert_as_exact(strided(ours), strided(plain), of, torch.float32, few=True)


def test_without_weights() -> None:
    for kind in ("batch", "group", "instance"):
        ours, plain = pair(kind, "silu")
        assert_as_exact(ours, plain, operands(kind, 2, 4, 5, 7)[:1], torch.float32, few=True)


@pytest.mark.parametrize("kind", ["batch", "instance"])
def test_a_mean_far_from_zero(kind: str) -> None:
    """A thousand deviations away: y is wrong by no more than the rounding of the mean to float32, which the difference
    of two large numbers as variance would exceed a thousandfold."""
    x, weight, bias = operands(kind, 2, 3, 9, 9)
    x = (x + 2000).float().double()
    ours, plain = pair(kind, "none")
    error = (ours(x.float(), weight.float(), bias.float()) - plain(x, weight, bias)).abs().max()
    assert error <= 2003 / 2 * torch.finfo(torch.float32).eps * weight.abs().max() * 2


@kinds
def test_numeric_derivatives(kind: str) -> None:
    ours, _ = pair(kind, "leaky_relu")
    assert torch.autograd.gradcheck(ours, [x.requires_grad_() for x in operands(kind, 2, 4, 3)])


def test_running_statistics_are_updated_once() -> None:
    x, weight, bias = (one.float() for one in operands("batch", 3, 4, 5, 5))
    mine, theirs = ([torch.zeros(4), torch.ones(4)] for _ in range(2))
    for _ in range(2):
        y = kernels.batch_norm_act(
            x.requires_grad_(), weight, bias, running_mean=mine[0], running_var=mine[1], momentum=0.3
        )
        y.sum().backward()
        F.batch_norm(x, theirs[0], theirs[1], weight, bias, training=True, momentum=0.3)
    torch.testing.assert_close(mine, theirs)


def test_dtypes_may_differ() -> None:
    """Half-precision numbers with float32 weights, as within autocast."""
    x, weight, bias = (one.float() for one in operands("batch", 3, 4, 5, 5))
    ours, plain = pair("batch", "relu")
    found = values_and_gradients(ours, (x.bfloat16(), weight, bias))
    expected = values_and_gradients(plain, (x.bfloat16(), weight, bias))
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(x.bfloat16(), weight, bias).dtype == torch.bfloat16


def test_frozen_weights_have_no_gradient() -> None:
    x, weight, bias = operands("batch", 3, 4, 5)
    kernels.batch_norm_act(x.requires_grad_(), weight, bias.requires_grad_()).sum().backward()
    assert weight.grad is None
    assert x.grad is not None
    assert bias.grad is not None


@pytest.mark.skipif(INTERPRETED, reason="it says nothing of what runs in the op")
def test_compiled_as_one_graph() -> None:
    ours, _ = pair("residual", "relu")
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    of = operands("residual", 2, 4, 5)
    torch.testing.assert_close(values_and_gradients(compiled, of), values_and_gradients(ours, of), atol=0, rtol=0)


@pytest.mark.skipif(INTERPRETED, reason="it says nothing of what runs in the op")
@pytest.mark.filterwarnings("ignore")  # opcheck's own
@pytest.mark.parametrize("groups", [0, 2])
def test_the_op_is_as_torch_wants_it(groups: int) -> None:
    x, weight, bias, residual = (x.requires_grad_() for x in operands("residual", 2, 4, 5))
    torch.library.opcheck(channel_norm, (x, residual, weight, bias, groups, "relu", 0.0, 1e-5))
    torch.library.opcheck(channel_norm, (x, None, None, None, groups, "silu", 0.0, 1e-5))


@kinds
def test_the_gradient_may_be_written_over_what_it_is_computed_from(kind: str) -> None:
    groups = {"batch": 0, "residual": 0, "group": GROUPS, "instance": 4}[kind]
    x, weight, bias, residual = (one.float() for one in operands("residual", 3, 4, 5, 7))
    added = residual if kind == "residual" else None
    y, mean, variance = channel_norm(x, added, weight, bias, groups, "relu", 0.0, 1e-5)
    d_y = torch.randn(y.shape)
    signs = None if added is None else y
    of = signs, weight, bias, mean, variance, groups, "relu", 0.0, 1e-5, added is not None
    expected = differentiate(None, d_y, x, *of)
    for over in (0, 1):
        operands_of = d_y.clone(), x.clone()
        found = differentiate(operands_of[over], *operands_of, *of)
        assert found[0].data_ptr() == operands_of[over].data_ptr()
        assert all(map(torch.equal, found, expected))


def test_refused() -> None:
    x, weight, _ = operands("batch", 2, 4, 5)
    with pytest.raises(InputError, match=r"do not run under torch.vmap"):
        torch.vmap(lambda x: kernels.instance_norm_act(x, weight))(x.view(1, 2, 4, 5))
    with pytest.raises(InputError, match=r"weight has the shape \(3,\). Expected \(4,\)"):
        kernels.batch_norm_act(x, weight[1:])
    with pytest.raises(InputError, match=r"running_var has the shape \(3,\)"):
        kernels.batch_norm_act(x, weight, running_var=weight[1:])
    with pytest.raises(InputError, match=r"residual has the shape \(1, 4, 5\)"):
        kernels.batch_norm_act(x, weight, residual=x[1:])
    with pytest.raises(InputError, match=r"'silu' has a residual. .*Add the residual by itself"):
        kernels.batch_norm_act(x, weight, residual=x, activation="silu")
    with pytest.raises(InputError, match=r"with slope -1.0 has a residual"):
        kernels.batch_norm_act(x, weight, residual=x, activation="leaky_relu", slope=-1.0)
    with pytest.raises(InputError, match=r"activation is 'gelu'. Expected 'none' or 'relu'"):
        kernels.instance_norm_act(x, activation="gelu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"groups is 3, x has the shape \(2, 4, 5\)"):
        kernels.group_norm_act(x, 3)
    with pytest.raises(InputError, match=r"\(2, 4\): 1 element\(s\) share a mean. Expected two or more"):
        kernels.instance_norm_act(x[..., 0])
    with pytest.raises(InputError, match=r"\(0, 4, 5\): 0 element\(s\) share a mean"):
        kernels.batch_norm_act(x[:0])
    (gradient,) = torch.autograd.grad(kernels.instance_norm_act(x.requires_grad_()).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="channel_norm_backward"):
        gradient.sum().backward()


# Memory


def blocks(kind: str, dtype: torch.dtype) -> Callable[[], Callable[[], None]]:
    """A training step of two convolutions, each with its norm."""

    def build() -> Callable[[], None]:
        layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2)).to(dtype)
        weight = nn.Parameter(torch.ones(8, dtype=dtype))
        inputs = torch.randn(2, 8, 96, 96, dtype=dtype)
        ours, _ = pair(kind, "relu")

        def step() -> None:
            x = inputs
            for layer in layers:
                y = layer(x)
                x = ours(y, weight, weight, x) if kind == "residual" else ours(y, weight, weight)
            x.sum().backward()
            layers.zero_grad()
            weight.grad = None

        return step

    return build


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies what its kernels take")
@kinds
def test_a_recorded_step_takes_what_is_measured(kind: str) -> None:
    build = blocks(kind, torch.float32)
    predicted = memplan.simulate(memplan.record(build, device="cpu")).peak_allocated
    assert predicted == measured_peak(build)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies what its kernels take")
def test_on_a_card_the_norm_is_its_results() -> None:
    """By hand: y and two numbers a channel of a sample; the gradient, two numbers a part, and a few of each channel."""
    samples, channels, side = 2, 32, 256

    def build() -> Callable[[], None]:
        x = torch.randn(samples, channels, side, side, requires_grad=True)

        def step() -> None:
            y = kernels.instance_norm_act(x)
            y.backward(y.detach())

        return step

    step = memplan.simulate(memplan.record(build, device="h100", steps=1)).steps[0]
    tensor = samples * channels * side * side * 4
    most = 3 * tensor + 16 * samples * channels * 4 * (side * side // (16 * 1024))
    assert 3 * tensor < step.peak_allocated <= most
