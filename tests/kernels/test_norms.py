"""RMS norm and layer norm with a residual, beside plain torch in float64.

In `TRITON_INTERPRET=1` the same tests go through the kernels, else through the plain form.
"""

from __future__ import annotations

from collections.abc import Callable
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
from memplan.kernels.norms import LARGEST_ROW, norm

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
Function = Callable[..., Any]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def rms_of_sum(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return rms(h, weight), h


def layer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def layer_of_sum(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    h = x + residual
    return layer(h, weight, bias), h


KINDS: list[tuple[Function, Function, str]] = [
    (kernels.rms_norm, rms, "xw"),
    (kernels.rms_norm, rms_of_sum, "xwr"),
    (kernels.layer_norm, layer, "xw"),
    (kernels.layer_norm, layer, "xwb"),
    (kernels.layer_norm, layer_of_sum, "xwbr"),
]
kinds = pytest.mark.parametrize(("ours", "plain", "of"), KINDS, ids=lambda value: getattr(value, "__name__", value))


def operands(of: str, *shape: int) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = {"x": shape, "r": shape, "w": shape[-1:], "b": shape[-1:]}
    return [torch.randn(sizes[name], dtype=torch.float64) for name in of]


@dtypes
@kinds
@pytest.mark.parametrize("shape", [(37, 48), (2, 5, 1030)], ids=str)
def test_values_and_gradients(
    ours: Function, plain: Function, of: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert_as_exact(ours, plain, operands(of, *shape), dtype)


@kinds
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 7), (3, 17), (200, 16), (1, 4097), (0, 8), (2, LARGEST_ROW + 1)], ids=str
)
def test_odd_sizes(ours: Function, plain: Function, of: str, shape: tuple[int, ...]) -> None:
    assert_as_exact(ours, plain, operands(of, *shape), torch.float32, few=True)


@kinds
def test_strides(ours: Function, plain: Function, of: str) -> None:
    """Parts of rows, rows in another order, columns apart; gradients that few numbers are expanded to."""
    wide = [torch.cat([x, x], -1) for x in operands(of, 3, 4, 24)]

    def laid_out(x: Tensor, columns_apart: bool) -> Tensor:
        if columns_apart:
            return x[..., ::2].transpose(0, -2) if x.dim() == 3 else x[::2]
        return x[..., :24]

    for columns_apart in (False, True):

        def reduced(function: Function, columns_apart: bool = columns_apart) -> Function:
            def run(*tensors: Tensor) -> tuple[Tensor, ...]:
                results = function(*(laid_out(x, columns_apart) for x in tensors))
                results = results if isinstance(results, tuple) else (results,)
                return tuple(x.sum(0 if columns_apart else -1) for x in results)

            return run

        assert_as_exact(reduced(ours), reduced(plain), wide, torch.float32, few=True)


@kinds
def test_numeric_derivatives(ours: Function, plain: Function, of: str) -> None:
    assert torch.autograd.gradcheck(ours, [x.requires_grad_() for x in operands(of, 3, 5)])


def test_what_nothing_reads() -> None:
    """The sum, or the norm, may have no reader, and so no gradient."""
    for position in (0, 1):
        assert_as_exact(
            lambda *t, at=position: kernels.rms_norm(*t)[at],
            lambda *t, at=position: rms_of_sum(*t)[at] + 0 * t[1].sum(),
            operands("xwr", 9, 24),
            torch.float32,
        )


def test_frozen_weights_have_no_gradient() -> None:
    x, weight, bias = operands("xwb", 9, 24)
    kernels.layer_norm(x.requires_grad_(), weight, bias).sum().backward()
    layer(other := x.detach().requires_grad_(), weight, bias).sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    kernels.layer_norm(x.detach(), weight.requires_grad_(), bias).sum().backward()
    assert weight.grad is not None
    assert bias.grad is None


def test_dtypes_may_differ() -> None:
    """Half-precision rows with a float32 weight, and a float32 residual, as within autocast."""
    x, weight, residual = (x.float() for x in operands("xwr", 9, 24))
    x = x.bfloat16()
    y = kernels.rms_norm(x, weight)
    assert isinstance(y, Tensor)
    assert y.dtype == torch.bfloat16
    found = values_and_gradients(kernels.rms_norm, (x, weight, residual))
    expected = values_and_gradients(rms_of_sum, (x, weight, residual))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-2)
    sums = kernels.rms_norm(x, weight, residual)[1]
    assert sums.dtype == torch.float32


@kinds
def test_compiled_as_one_graph(ours: Function, plain: Function, of: str) -> None:
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_as_exact(compiled, plain, operands(of, 5, 24), torch.float32)


@pytest.mark.filterwarnings("ignore")  # opcheck's own
@pytest.mark.parametrize("centred", [False, True])
def test_the_op_is_as_torch_wants_it(centred: bool) -> None:
    x, weight, bias, residual = (x.requires_grad_() for x in operands("xwbr", 5, 24))
    torch.library.opcheck(norm, (x, residual, weight, bias, 1e-5, centred))
    torch.library.opcheck(norm, (x, None, weight, None, 1e-5, centred))


def test_refused() -> None:
    x, weight, residual = operands("xwr", 5, 24)
    with pytest.raises(InputError, match=r"rms_norm and layer_norm do not run under torch.vmap"):
        torch.vmap(lambda x: kernels.rms_norm(x, weight))(x.view(1, 5, 24))
    with pytest.raises(InputError, match=r"weight has the shape \(23,\). Expected \(24,\)"):
        kernels.rms_norm(x, weight[1:])
    with pytest.raises(InputError, match=r"residual has the shape \(4, 24\)"):
        kernels.layer_norm(x, weight, residual=residual[1:])
    (gradient,) = torch.autograd.grad(kernels.layer_norm(x.requires_grad_(), weight)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="norm_backward"):
        gradient.sum().backward()


# Memory


def blocks(dtype: torch.dtype, centred: bool, frozen: bool) -> Callable[[], Callable[[], None]]:
    """A training step of two residual blocks."""

    def build() -> Callable[[], None]:
        layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(3)).to(dtype)
        weights = nn.ParameterList(torch.ones(96, dtype=dtype) for _ in range(3)).requires_grad_(not frozen)
        inputs = torch.randn(4, 150, 96, dtype=dtype)

        def step() -> None:
            x = residual = layers[0](inputs)
            for weight, layer in zip(weights, layers, strict=True):
                if centred:
                    x, residual = kernels.layer_norm(x, weight, residual=residual)
                else:
                    x, residual = kernels.rms_norm(x, weight, residual)
                x = layer(x)
            (x + residual).sum().backward()
            layers.zero_grad()
            weights.zero_grad()

        return step

    return build


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies what its kernels take")
@pytest.mark.parametrize("frozen", [False, *slow(True)])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
def test_a_recorded_step_takes_what_is_measured(dtype: torch.dtype, centred: bool, frozen: bool) -> None:
    build = blocks(dtype, centred, frozen)
    predicted = memplan.simulate(memplan.record(build, device="cpu")).peak_allocated
    assert predicted == measured_peak(build)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies what its kernels take")
def test_on_a_card_the_norm_is_its_results() -> None:
    """By hand: y, the sum and a number a row; the gradient, and a partial sum of the weight's for each program."""
    rows, columns = 4096, 1024

    def build() -> Callable[[], None]:
        x, residual = torch.randn(2, rows, columns, dtype=torch.bfloat16).unbind()
        x.requires_grad_()
        weight = torch.ones(columns, dtype=torch.bfloat16, requires_grad=True)

        def step() -> None:
            y, _ = kernels.rms_norm(x, weight, residual)
            y.backward(y.detach())

        return step

    step = memplan.simulate(memplan.record(build, device="h100", steps=1)).steps[0]
    tensor, programs = rows * columns * 2, 2 * 132
    results = 2 * tensor + rows * 4  # y, the sum, r
    backward = tensor + programs * columns * 4 + columns * (4 + 2)  # dx, the partial sums, the sum and the gradient
    assert step.peak_allocated == 2 * tensor + columns * 2 + results + backward
