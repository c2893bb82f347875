"""Softmax of masked scores with dropout, beside plain torch in float64.

In `TRITON_INTERPRET=1` the same tests go through the kernels, else through the plain form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from truth.cpu_allocator import measured_peak
from truth.float64_errors import INTERPRETED, assert_as_exact, values_and_gradients

import memplan
from memplan import kernels
from memplan.errors import InputError
from memplan.kernels import softmax
from memplan.kernels.softmax import masked_softmax, pack_flags

Function = Callable[..., Any]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)


def seeded(function: Function) -> Function:
    """The same draws in each call."""

    def run(*operands: Tensor) -> Any:
        torch.manual_seed(3)
        return function(*operands)

    return run


def hidden(*shape: int) -> Tensor:
    """A mask that leaves each row an element."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(5)) > 0.6
    mask[..., 0] = False
    return mask


def plain(x: Tensor, mask: Tensor | None, p: float = 0.0, fill: float = -math.inf, scale: float = 1.0) -> Tensor:
    x = x * scale
    if mask is not None:
        x = x.masked_fill(mask, fill) if mask.dtype == torch.bool else x + mask
    return F.dropout(F.softmax(x, -1), p)


def pair(**options: Any) -> tuple[Function, Function]:
    """The kernel, and plain torch, of x and a mask."""
    return (
        seeded(lambda x, mask=None: kernels.softmax_dropout(x, mask, **options)),
        seeded(lambda x, mask=None: plain(x, mask, **options)),
    )


def operands(*shape: int) -> list[Tensor]:
    """Scores, and a mask of each row that is the same for all but the first and the last two dimensions."""
    torch.manual_seed(0)
    of_mask = (*shape[:1], *(1 for _ in shape[1:-2]), *shape[-2:]) if len(shape) > 2 else shape
    return [2 * torch.randn(shape, dtype=torch.float64), torch.randn(of_mask, dtype=torch.float64)]


@dtypes
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["none", "added", "hidden"])
def test_values_and_gradients(kind: str, p: float, dtype: torch.dtype) -> None:
    """Also of the mask, where it is added."""
    x, mask = operands(2, 3, 9, 37)
    of = {"none": [x], "added": [x, mask], "hidden": [x, hidden(9, 37)]}[kind]
    assert_as_exact(*pair(p=p, scale=0.7), of, dtype)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["added", "hidden"])
def test_rows_longer_than_a_block(kind: str, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 and of 32, the last of which is not full."""
    for block in (16, 32):
        monkeypatch.setattr(softmax, "LARGEST_BLOCK", block)
        x, mask = operands(3, 5, 67)
        assert_as_exact(*pair(p=p, scale=0.5), [x, hidden(5, 67) if kind == "hidden" else mask], torch.float32)


@pytest.mark.parametrize("shape", [(1,), (7, 1), (0, 8), (8, 0), (5, 16), (2, 1, 3, 2, 5)], ids=str)
def test_odd_sizes(shape: tuple[int, ...]) -> None:
    x, _ = operands(*shape)
    for p in (0.0, 0.5):
        assert_as_exact(*pair(p=p), [x], torch.float32, few=True)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(5,), (2, 1), (2, 1, 1, 5), (3, 1, 1), (2, 1, 4, 1, 5)], ids=str)
def test_masks_broadcast(shape: tuple[int, ...], p: float) -> None:
    """One number a key, a query, a sample, a head; and more groups of dimensions than the kernel counts by."""
    x, _ = operands(*((2, 3, 4, 2, 5) if len(shape) == 5 else (2, 3, 2, 5)))
    torch.manual_seed(1)
    assert_as_exact(*pair(p=p), [x, torch.randn(shape, dtype=torch.float64)], torch.float32, few=True)
    assert_as_exact(*pair(p=p), [x, hidden(*shape)], torch.float32, few=True)


def test_strides() -> None:
    """Transposed scores, every second number of a mask, and a gradient that one number is expanded to."""
    x, mask = operands(3, 4, 6, 10)
    ours, theirs = (
        lambda x, mask, f=function: f(x.transpose(1, 2), mask[..., ::2].transpose(1, 2)).sum(-1) * 1
        for function in pair(p=0.3)
    )
    assert_as_exact(ours, theirs, [x, torch.cat((mask, mask), -1)], torch.float32, few=True)


def test_a_mask_that_counts_beyond_int32_is_copied() -> None:
    """Kernels count by int32 within a row: a transposed mask of 2^15 keys, and one of a key less."""
    x, mask = torch.empty(1 << 16, 1 << 15, device="meta"), torch.empty(1 << 15, 1 << 16, device="meta")
    for keys, stride in ((1 << 15, 1), ((1 << 15) - 1, 1 << 16)):
        found = softmax._Masked.of(x[:, :keys], mask[:keys].t()).mask
        assert found is not None
        assert found.stride(-1) == stride
        assert (keys - 1) * found.stride(-1) < 1 << 31


def test_elements_that_are_filled_have_no_gradient() -> None:
    """Also in rows where all are, whose probabilities are even."""
    mask = torch.tensor([[True] * 5, [True, False, True, False, True]])
    x = torch.randn(2, 5, dtype=torch.float64)
    for p in (0.0, 0.4):
        assert_as_exact(*pair(p=p, fill=-30.0), [x, mask], torch.float32, few=True)


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_rows_of_which_nothing_is_left_are_nan(p: float) -> None:
    """As in torch, in the value; the gradient is 0 where a score was replaced."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    found, expected = (values_and_gradients(f, [torch.ones(2, 3), mask]) for f in pair(p=p))
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize(("of", "to"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_results_of_another_dtype(of: torch.dtype, to: torch.dtype, p: float) -> None:
    """As transformers has it: in float32, and then cast. At most twice as far from float64's."""
    x, mask = operands(2, 3, 9, 37)

    torch.manual_seed(1)
    factors = F.dropout(torch.ones(x.shape, dtype=to), p).double()

    def ours(x: Tensor, mask: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return theirs(x, mask)
        torch.manual_seed(1)
        return kernels.softmax_dropout(x, mask, p=p, dtype=to)

    def theirs(x: Tensor, mask: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            return F.softmax(x + mask, -1) * factors
        torch.manual_seed(1)
        return F.dropout(F.softmax(x + mask, -1, dtype=torch.float32).to(to), p)

    assert_as_exact(ours, theirs, [x, mask], of)
    assert torch.equal(ours(x.to(of), mask.to(of)) == 0, factors == 0)


def test_autocast_leaves_dtypes_as_they_are() -> None:
    """It computes in float32 anyway."""
    x, mask = (one.bfloat16() for one in operands(2, 3, 5))
    expected = kernels.softmax_dropout(x, mask)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(kernels.softmax_dropout(x, mask), expected)


def test_draws_are_those_of_dropout() -> None:
    """Which are kept, and the random state behind it."""
    x = torch.randn(5, 41)
    for p in (0.1, 0.9, 1.0):
        torch.manual_seed(2)
        expected, state = F.dropout(F.softmax(x, -1), p), torch.get_rng_state()
        torch.manual_seed(2)
        found = kernels.softmax_dropout(x, p=p)
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("count", [0, 1, 8, 13, 40_003])
def test_flags_are_packed_in_order(count: int) -> None:
    """Beside NumPy."""
    import numpy as np

    flags = torch.rand(count) > 0.5
    assert pack_flags(flags).tolist() == np.packbits(flags.numpy(), bitorder="little").tolist()


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_numeric_derivatives(p: float) -> None:
    ours, _ = pair(p=p, scale=0.5)
    assert torch.autograd.gradcheck(ours, [x.requires_grad_() for x in operands(2, 2, 3)])


@pytest.mark.skipif(INTERPRETED, reason="it says nothing of what runs in the op")
@pytest.mark.filterwarnings("ignore")  # opcheck's own
def test_the_ops_are_as_torch_wants_them() -> None:
    x, mask = (one.requires_grad_() for one in operands(2, 3, 5))
    bits = pack_flags(torch.rand(2, 3, 5) > 0.5)
    torch.library.opcheck(masked_softmax, (x, mask, bits, -math.inf, 0.5, 0.5, torch.float64))
    torch.library.opcheck(masked_softmax, (x, hidden(3, 5), None, -9.0, 0.5, 0.0, torch.float64))
    torch.library.opcheck(pack_flags, (torch.rand(13) > 0.5,))


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_the_gradient_may_be_written_over_what_it_is_computed_from(p: float) -> None:
    x, mask = (one.float() for one in operands(2, 3, 5, 19))
    bits = pack_flags(torch.rand(x.shape) > p) if p else None
    y, statistics = masked_softmax(x, mask, bits, -math.inf, 0.5, p, x.dtype)
    d_y, of = torch.randn(y.shape), (x if p else y)
    rest = mask, bits, statistics, -math.inf, 0.5, p

    def gradient(into: int | None) -> tuple[Tensor, Tensor | None]:
        copies = d_y.clone(), of.clone()
        x_or_y = (copies[1], None) if p else (None, copies[1])
        memory = None if into is None else copies[into]
        return softmax.differentiate(memory, copies[0], *x_or_y, *rest), memory

    expected, _ = gradient(None)
    for over in (0, 1):
        found, memory = gradient(over)
        assert memory is not None
        assert found.data_ptr() == memory.data_ptr()
        assert torch.equal(found, expected)


def test_refused() -> None:
    x, mask = operands(2, 3, 4)
    with pytest.raises(InputError, match=r"softmax_dropout does not run under torch.vmap"):
        torch.vmap(kernels.softmax_dropout)(x)
    for randomness in ("error", "different", "same"):
        with pytest.raises(InputError, match=r"softmax_dropout does not run under torch.vmap"):
            torch.vmap(lambda x: kernels.softmax_dropout(x, p=0.5), randomness=randomness)(x)
    with pytest.raises(InputError, match=r"mask has the shape \(2, 3, 3\). Expected one that broadcasts to"):
        kernels.softmax_dropout(x, mask[..., 1:])
    with pytest.raises(InputError, match=r"mask has the shape \(1, 2, 3, 4\)"):
        kernels.softmax_dropout(x, mask[None])
    with pytest.raises(InputError, match=r"mask is of torch.int64. Expected torch.bool, or a floating-point"):
        kernels.softmax_dropout(x, mask.long())
    with pytest.raises(InputError, match=r"p is 1.5. Expected a number from 0 to 1"):
        kernels.softmax_dropout(x, p=1.5)
    with pytest.raises(InputError, match=r"scale is 0. Expected a finite number"):
        kernels.softmax_dropout(x, scale=0)
    with pytest.raises(InputError, match=r"x has the shape \(2, 3, 4\) and is of torch.int64"):
        kernels.softmax_dropout(x.long())
    (gradient,) = torch.autograd.grad(kernels.softmax_dropout(x.requires_grad_())[0, 0, 0], x, create_graph=True)
    with pytest.raises(RuntimeError, match="masked_softmax_backward"):
        gradient.sum().backward()


# Memory


def saved_bytes(function: Callable[[], Tensor]) -> int:
    """Bytes of the storages that a function saves for its backward pass."""
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        function()
    return sum(saved.values())


def test_what_is_saved() -> None:
    """By hand: the result alone; with dropout x, a bit an element and 8 bytes a row."""
    rows, length = 24, 64
    x = torch.randn(2, 3, 4, length, requires_grad=True)
    assert saved_bytes(lambda: kernels.softmax_dropout(x, torch.zeros(4, length))) == 4 * rows * length
    expected = 4 * rows * length + rows * length // 8 + 8 * rows
    assert saved_bytes(lambda: kernels.softmax_dropout(x, p=0.1)) == expected


def attention() -> Callable[[], None]:
    """A training step of a layer of attention."""
    layer = nn.Linear(32, 96)
    inputs, causal = torch.randn(2, 192, 32), torch.ones(192, 192).triu(1).bool()

    def step() -> None:
        q, k, v = (x.unflatten(2, (2, 16)).transpose(1, 2) for x in layer(inputs).chunk(3, -1))
        y = kernels.softmax_dropout(q @ k.transpose(2, 3), causal, scale=0.25, p=0.1) @ v
        y.sum().backward()
        layer.zero_grad()

    return step


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies what its kernels take")
def test_a_recorded_step_takes_what_is_measured() -> None:
    predicted = memplan.simulate(memplan.record(attention, device="cpu")).peak_allocated
    assert predicted == measured_peak(attention)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter copies what its kernels take")
def test_on_a_card_the_results_are_all_that_is_added() -> None:
    """By hand: x, y and the gradient, bits, and two numbers a row."""
    rows, length = 1024, 1024

    def build() -> Callable[[], None]:
        x = torch.randn(rows, length, requires_grad=True)

        def step() -> None:
            y = kernels.softmax_dropout(x, p=0.1)
            y.backward(y.detach())

        return step

    step = memplan.simulate(memplan.record(build, device="h100", steps=1)).steps[0]
    assert step.peak_allocated == 3 * 4 * rows * length + rows * length // 8 + 8 * rows
