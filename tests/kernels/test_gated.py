"""SwiGLU and GeGLU, beside plain torch in float64.

In `TRITON_INTERPRET=1` the same tests go through the kernels, else through the plain form.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from environment import slow
from torch import Tensor, nn
from truth.cpu_allocator import measured_peak
from truth.float64_errors import INTERPRETED, assert_as_exact

import memplan
from memplan import kernels
from memplan.errors import InputError
from memplan.kernels.gated import gated

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
Function = Callable[[Tensor, Tensor], Tensor]

KINDS: dict[str, tuple[Function, Function]] = {
    "silu": (kernels.swiglu, lambda gate, up: F.silu(gate) * up),
    "gelu": (kernels.geglu, lambda gate, up: F.gelu(gate) * up),
    "tanh": (
        lambda gate, up: kernels.geglu(gate, up, approximate="tanh"),
        lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    ),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def operands(*shape: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [3 * torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)]


@dtypes
@kinds
@pytest.mark.parametrize("shape", [(37, 48), (2, 5, 1030)], ids=str)
def test_values_and_gradients(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_as_exact(*KINDS[kind], operands(*shape), dtype)


@kinds
@pytest.mark.parametrize("shape", [(), (1, 7), (0, 8), (20, 1), *slow(((1,),), ((8, 0),), ((3, 2049),))], ids=str)
def test_odd_sizes(kind: str, shape: tuple[int, ...]) -> None:
    assert_as_exact(*KINDS[kind], operands(*shape), torch.float32, few=True)


@kinds
def test_far_from_zero(kind: str) -> None:
    """Where exponentials leave float32."""
    gate = torch.tensor(
        [-1e4, -200.0, -100.0, -90.0, -30.0, -5.0, -0.0, 5.0, 30.0, 90.0, 200.0, 1e4], dtype=torch.float64
    )
    assert_as_exact(*KINDS[kind], (gate, torch.ones_like(gate)), torch.float32, few=True)


@kinds
def test_strides(kind: str) -> None:
    """Halves of one tensor, rows in another order, columns apart; a gradient that one number is expanded to."""
    both, layouts = (
        torch.randn(3, 4, 48, dtype=torch.float64),
        (
            lambda x: x.chunk(2, -1),
            lambda x: x.transpose(0, 1).chunk(2, -1),
            lambda x: (x[..., ::2], x[..., 1::2]),
            lambda x: x.transpose(1, 2).chunk(2, 1),
        ),
    )
    for laid_out in layouts:
        ours, plain = (lambda x, f=function, laid_out=laid_out: f(*laid_out(x)).sum((0, 1)) for function in KINDS[kind])
        assert_as_exact(ours, plain, (both,), torch.float32, few=True)


@kinds
def test_numeric_derivatives(kind: str) -> None:
    assert torch.autograd.gradcheck(KINDS[kind][0], [x.requires_grad_() for x in operands(3, 5)])


@kinds
def test_compiled_as_one_graph(kind: str) -> None:
    ours, plain = KINDS[kind]
    assert_as_exact(torch.compile(ours, fullgraph=True, backend="aot_eager"), plain, operands(5, 24), torch.float32)


@pytest.mark.filterwarnings("ignore")  # opcheck's own
@kinds
def test_the_op_is_as_torch_wants_it(kind: str) -> None:
    torch.library.opcheck(gated, (*(x.requires_grad_() for x in operands(5, 24)), kind))


def test_refused() -> None:
    gate, up = operands(4, 6)
    with pytest.raises(InputError, match=r"swiglu and geglu do not run under torch.vmap"):
        torch.vmap(kernels.swiglu)(gate, up)
    with pytest.raises(InputError, match=r"gate is \(4, 6\) of torch.float64, up \(4, 5\)"):
        kernels.swiglu(gate, up[:, 1:])
    with pytest.raises(InputError, match=r"up \(4, 6\) of torch.float32"):
        kernels.geglu(gate, up.float())
    with pytest.raises(InputError, match="approximate is 'erf'"):
        kernels.geglu(gate, up, approximate="erf")  # pyright: ignore[reportArgumentType]
    (gradient,) = torch.autograd.grad(kernels.swiglu(gate.requires_grad_(), up).sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="gated_backward"):
        gradient.sum().backward()


# Memory


def test_gate_and_up_alone_are_saved() -> None:
    up_gate = torch.randn(8, 64, requires_grad=True)
    saved: set[int] = set()

    def pack(x: Tensor) -> Tensor:
        saved.add(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kernels.swiglu(*up_gate.chunk(2, -1))
    assert saved == {up_gate.untyped_storage().data_ptr()}


def mlp(dtype: torch.dtype, kind: str) -> Callable[[], Callable[[], None]]:
    """A training step of a gated MLP whose halves are one product."""

    def build() -> Callable[[], None]:
        first, second = nn.Linear(64, 512).to(dtype), nn.Linear(256, 64).to(dtype)
        inputs = torch.randn(4, 75, 64, dtype=dtype)

        def step() -> None:
            second(KINDS[kind][0](*first(inputs).chunk(2, -1))).sum().backward()
            first.zero_grad()
            second.zero_grad()

        return step

    return build


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies what its kernels take")
@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
def test_a_recorded_step_takes_what_is_measured(dtype: torch.dtype, kind: str) -> None:
    build = mlp(dtype, kind)
    predicted = memplan.simulate(memplan.record(build, device="cpu")).peak_allocated
    assert predicted == measured_peak(build)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies what its kernels take")
def test_on_a_card_the_results_are_all_that_is_added() -> None:
    """By hand: y, and two gradients."""

    def build() -> Callable[[], None]:
        gate, up = (torch.randn(1024, 512, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))

        def step() -> None:
            y = kernels.swiglu(gate, up)
            y.backward(y.detach())

        return step

    step = memplan.simulate(memplan.record(build, device="h100", steps=1)).steps[0]
    assert step.peak_allocated == 5 * 1024 * 512 * 2
