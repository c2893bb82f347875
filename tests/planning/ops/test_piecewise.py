"""The engine's own kernels against the ops they stand for: bits, layout, random numbers and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from truth.cpu_allocator import allocations, peak_of

import memplan.planning.ops.piecewise as kernels
from memplan.planning.graph import op_schema
from memplan.planning.graph.joint_graph import GraphOp, Ref, Value
from memplan.planning.graph.op_schema import NUMBER_TENSOR_BYTES
from memplan.planning.levers import in_place as forms
from memplan.planning.levers.encode import BITS_READERS
from memplan.planning.ops.pieces import LARGEST_PIECE, packed_bytes

ATEN, MEMPLAN = torch.ops.aten, torch.ops.memplan
FLOATS = (torch.float32, torch.bfloat16, torch.float64)
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40, 6.0)


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, special: bool = False) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3 + 1
    if special:
        for at, value in enumerate(SPECIAL):
            made.view(-1)[at * 11 + seed :: 97] = value
    return made.to(dtype)


def same(first: Any, second: Any) -> None:
    for one, other in zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]:
        if one is None or other is None:
            assert one is other
            continue
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


BETWEEN = 54_321_123  # bytes that nothing else allocates


def peaks(*calls: Callable[[], Any]) -> list[int]:
    """Bytes that each call holds at most beyond what it returns."""
    kept: list[Any] = []

    def run() -> None:
        for call in calls:
            torch.empty(BETWEEN, dtype=torch.uint8)
            kept.append(call())

    parts: list[list[int]] = []
    for size in allocations(run):
        if size == BETWEEN:
            parts.append([])
        elif size != -BETWEEN:
            parts[-1].append(size)
    return [peak_of(sizes) - sum(sizes) for sizes in parts]


def layouts(shape: tuple[int, ...], dtype: torch.dtype, **how: Any) -> list[Tensor]:
    one = tensor(*shape, dtype=dtype, **how)
    return [one, one.transpose(0, 1).contiguous().transpose(0, 1)]


# -- bits


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (3, 5), (2, LARGEST_PIECE + 3), (LARGEST_PIECE, 2)])
def test_bools_come_back(shape: tuple[int, ...]) -> None:
    for one in layouts(shape, torch.float32) if len(shape) > 1 else [tensor(*shape)]:
        flags = one > 1
        bits = MEMPLAN.pack_bits(flags, "bits")
        assert (bits.dtype, bits.numel()) == (torch.uint8, -(-flags.numel() // 8))
        assert packed_bytes(flags.numel()) == bits.numel()
        same(MEMPLAN.unpack_bits(bits, flags.shape, flags.stride()), flags)


GRADIENTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "threshold_backward": ("sign", (0,)),
    "leaky_relu_backward": ("positive", (0.01, False)),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_from_bits_is_the_gradient(name: str, dtype: torch.dtype) -> None:
    codec, rest = GRADIENTS[name]
    for shape in ((1, 3), (2, LARGEST_PIECE + 5)):
        for x, gradient in zip(
            layouts(shape, dtype, special=shape[1] > 3, seed=1), layouts(shape, dtype, special=shape[1] > 3, seed=2),
            strict=True,
        ):  # fmt: skip
            expected = getattr(ATEN, name)(gradient, x, *rest)
            bits = MEMPLAN.pack_bits(x, codec)
            before = gradient.clone()
            same(getattr(MEMPLAN, f"{name}_bits")(gradient, bits, *rest), expected)
            same(gradient, before)
            in_place = getattr(MEMPLAN, f"{name}_bits_")(gradient, bits, *rest)
            assert in_place.data_ptr() == gradient.data_ptr()
            same(in_place, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_masks_as_bits_give_the_same(dtype: torch.dtype) -> None:
    for gradient, mask in zip(
        layouts((3, LARGEST_PIECE // 2 + 1), dtype, special=True),
        layouts((3, LARGEST_PIECE // 2 + 1), dtype, seed=4),
        strict=True,
    ):
        flags = mask > 0
        bits = MEMPLAN.pack_bits(flags, "bits")
        for name, rest in (("native_dropout_backward", (1 / 0.9,)), ("masked_fill", (-0.5,))):
            expected = getattr(ATEN, name)(gradient, flags, *rest)
            if expected.stride() != gradient.stride():  # masked_fill: contiguous whatever it is given
                continue
            same(getattr(MEMPLAN, f"{name}_bits")(gradient, bits, *rest), expected)
            same(getattr(MEMPLAN, f"{name}_bits_")(gradient.clone(), bits, *rest), expected)


# -- in place

Case = tuple[str, tuple[Any, ...]]


def norm_cases(dtype: torch.dtype) -> list[Case]:
    found: list[Case] = []
    for rows, width in ((5, 33), (1000, 257), (3, LARGEST_PIECE + 2)):
        x, g = tensor(rows, width, dtype=dtype), tensor(rows, width, dtype=dtype, seed=1)
        w, b = tensor(width, dtype=dtype, seed=2), tensor(width, dtype=dtype, seed=3)
        _, mean, rstd = ATEN.native_layer_norm(x, [width], w, b, 1e-5)
        found.append(("native_layer_norm.default", (x, [width], w, b, 1e-5)))
        found.append(("native_layer_norm.default", (x.view(1, rows, width), [width], None, None, 1e-5)))
        for mask in ([True] * 3, [True, False, False], [True, False, True]):
            found.append(("native_layer_norm_backward.default", (g, x, [width], mean, rstd, w, b, mask)))
    for shape, group in (((2, 6, 5, 5), 3), ((3, 8, 70, 71), 4), ((2, 4, 9, 64, 70), 2), ((4, 6, 2), 3)):
        x, g = tensor(*shape, dtype=dtype), tensor(*shape, dtype=dtype, seed=1)
        w, b = tensor(shape[1], dtype=dtype, seed=2), tensor(shape[1], dtype=dtype, seed=3)
        sizes = (shape[0], shape[1], x[0, 0].numel(), group)
        found.append(("native_group_norm.default", (x, w, b, *sizes, 1e-5)))
        found.append(("native_group_norm.default", (x, None, None, *sizes, 1e-5)))
        found += batch_cases(x, g, w, b)
    return found


def batch_cases(x: Tensor, g: Tensor, w: Tensor, b: Tensor) -> list[Case]:
    mean, var = torch.zeros_like(w), torch.ones_like(w)
    found: list[Case] = []
    for train in (True, False):
        arguments = (x, w, b, mean, var, train, 0.1, 1e-5)
        found.append(("_native_batch_norm_legit_functional.default", arguments))
        _, save_mean, save_invstd, *_ = ATEN._native_batch_norm_legit_functional(*arguments)
        for mask in ([True] * 3, [True, False, False], [True, True, False]):
            found.append(
                ("native_batch_norm_backward.default", (g, x, w, mean, var, save_mean, save_invstd, train, 1e-5, mask))
            )
    found.append(("_native_batch_norm_legit.no_stats", (x, None, None, True, 0.1, 1e-5)))
    _, save_mean, save_invstd = ATEN._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)
    rest = (save_mean, save_invstd, True, 1e-5, [True] * 3)
    found.append(("native_batch_norm_backward.default", (g, x, w, None, None, *rest)))
    return found


@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_in_place_give_the_same_bits(dtype: torch.dtype) -> None:
    names = set[str]()
    for name, arguments in norm_cases(dtype):
        expected = op_schema.overload(f"aten.{name}")(*arguments)
        first = arguments[0].clone()
        form = forms.call_into(f"aten.{name}", forms.PIECEWISE[f"aten.{name}"].operand)
        got = op_schema.overload(form.target)(first, *arguments[1:])
        assert got[0].data_ptr() == first.data_ptr()
        same(got, expected)
        names.add(f"aten.{name}")
    assert names == {name for name in forms.PIECEWISE if "norm" in name}


@pytest.mark.parametrize("dtype", FLOATS)
def test_other_pieces_give_the_same_bits(dtype: torch.dtype) -> None:
    for shape in ((3, 5), (3, LARGEST_PIECE + 5)):
        for g, x in zip(
            layouts(shape, dtype, special=shape[1] > 5), layouts(shape, dtype, seed=1, special=shape[1] > 5),
            strict=True,
        ):  # fmt: skip
            for name, rest in (("native_dropout_backward", (x > 0, 1 / 0.9)), ("hardswish_backward", (x,))):
                expected = getattr(ATEN, name)(g, *rest)
                same(getattr(MEMPLAN, f"{name}_")(g.clone(), *rest), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_in_place_draws_what_dropout_draws(p: float, dtype: torch.dtype) -> None:
    x = tensor(3, LARGEST_PIECE + 5, dtype=dtype, special=True)
    for train in (True, None, False):
        torch.manual_seed(3)
        expected, state = ATEN.native_dropout(x, p, train), torch.get_rng_state()
        torch.manual_seed(3)
        same(MEMPLAN.native_dropout_(x.clone(), p, train), expected)
        assert torch.equal(torch.get_rng_state(), state)


# -- memory


def described(arguments: tuple[Any, ...], result: Tensor) -> tuple[tuple[Any, ...], list[Value]]:
    values: list[Value] = []
    given: list[Any] = []
    for one in arguments:
        given.append(Ref(len(values)) if isinstance(one, Tensor) else one)
        if isinstance(one, Tensor):
            values.append(_value(len(values), one))
    return tuple(given), [*values, _value(len(values), result)]


def _value(number: int, one: Tensor) -> Value:
    size = one.untyped_storage().nbytes()
    dtype = str(one.dtype).removeprefix("torch.")
    return Value(number, f"v{number}", "result", number, size, tuple(one.shape), one.stride(), dtype, 0)


def memory_cases() -> list[Case]:
    x, g = tensor(4, 64, 64, 64), tensor(4, 64, 64, 64, seed=1)
    w, b = tensor(64), tensor(64, seed=1)
    sizes = (4, 64, 4096, 16)
    rows, row_gradient = x.view(4096, 256), g.view(4096, 256)
    _, row_mean, row_rstd = ATEN.native_layer_norm(rows, [256], None, None, 1e-5)
    return [
        ("native_dropout.default", (x, 0.1, True)),
        ("native_dropout_backward.default", (g, x > 0, 1.1)),
        ("hardswish_backward.default", (g, x)),
        ("native_layer_norm.default", (rows, [256], None, None, 1e-5)),
        ("native_layer_norm_backward.default", (
            row_gradient, rows, [256], row_mean, row_rstd, torch.ones(256), torch.ones(256), [True] * 3)),
        ("native_group_norm.default", (x, w, b, *sizes, 1e-5)),
        ("native_batch_norm_backward.default", (g, x, w, w, w, w, w, True, 1e-5, [True] * 3)),
        ("_native_batch_norm_legit_functional.default", (x, w, b, w, w, True, 0.1, 1e-5)),
        ("_native_batch_norm_legit.no_stats", (x.view(1, 256, 64, 64), None, None, True, 0.1, 1e-5)),
    ]  # fmt: skip


def test_pieces_take_what_is_said() -> None:
    for name, arguments in memory_cases():
        target = f"aten.{name}"
        result = op_schema.overload(target)(*arguments)
        given, values = described(arguments, result[0] if isinstance(result, tuple) else result)
        number = len(values) - 1
        assert forms.overwrites(target, given, {}, values, number) == (0,)
        op = GraphOp(0, target, given, {}, "backward", (number,), True, (0,), (number,))
        func = op_schema.overload(forms.call_into(target, forms.overwritten_operand(op, 0, values).name).target)
        first = arguments[0].clone()
        whole, held = peaks(
            lambda: op_schema.overload(target)(*arguments),  # noqa: B023
            lambda: func(first, *arguments[1:]),  # noqa: B023
        )
        said = forms.in_place_workspace(replace(op, scratch=whole), values)
        assert held <= said <= held * 1.3 + 4096, name
        assert said <= values[0].bytes // 2, name


def test_bits_take_what_is_said() -> None:
    x, g = tensor(5, LARGEST_PIECE), tensor(5, LARGEST_PIECE, seed=1)
    bits = MEMPLAN.pack_bits(x > 0, "bits")
    flags = MEMPLAN.unpack_bits(bits, x.shape, x.stride())
    sign, positive, mask, unpacked = peaks(
        lambda: MEMPLAN.pack_bits(x, "sign"),
        lambda: MEMPLAN.pack_bits(x, "positive"),
        lambda: MEMPLAN.pack_bits(flags, "bits"),
        lambda: MEMPLAN.unpack_bits(bits, flags.shape, flags.stride()),
    )
    assert mask == unpacked == 0
    assert LARGEST_PIECE <= min(sign, positive) <= max(sign, positive) <= LARGEST_PIECE + NUMBER_TENSOR_BYTES
    rest = {"threshold_backward": (0,), "leaky_relu_backward": (0.01, False)}
    for direct in BITS_READERS.values():
        name = direct.target.removeprefix("memplan.")
        more = rest.get(name.removesuffix("_bits"), (1.1,))
        said = LARGEST_PIECE * direct.temporary_pieces * x.itemsize  # the unpacked bits are numpy's
        for held in peaks(
            lambda: getattr(MEMPLAN, name)(g, bits, *more),  # noqa: B023
            lambda: getattr(MEMPLAN, f"{name}_")(g, bits, *more),  # noqa: B023
        ):
            assert said <= held <= said + NUMBER_TENSOR_BYTES, name


# -- without data


def test_every_kernel_knows_its_results_without_data() -> None:
    x, w = tensor(2, 4, 3, 3), tensor(4)
    flags = x > 0
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (MEMPLAN.pack_bits, (flags, "bits")),
        (MEMPLAN.unpack_bits, (MEMPLAN.pack_bits(flags, "bits"), flags.shape, flags.stride())),
        (MEMPLAN.threshold_backward_bits, (x, MEMPLAN.pack_bits(x, "sign"), 0)),
        (MEMPLAN.native_dropout_backward_bits_, (x, MEMPLAN.pack_bits(flags, "bits"), 1.1)),
        (MEMPLAN.native_layer_norm_, (x, [3], None, None, 1e-5)),
        (MEMPLAN.native_dropout_, (x, 0.1, True)),
        (MEMPLAN.native_group_norm_, (x, w, w, 2, 4, 9, 2, 1e-5)),
        (MEMPLAN.native_batch_norm_backward_, (x, x.clone(), w, w, w, w, w, True, 1e-5, [True, True, False])),
        (MEMPLAN._native_batch_norm_legit_functional_, (x, w, w, w, w, True, 0.1, 1e-5)),
    ]
    for op, arguments in calls:
        with FakeTensorMode() as mode:
            faked = tuple(mode.from_tensor(one) if isinstance(one, Tensor) else one for one in arguments)
            fake = op(*faked)
        real = op(*arguments)
        for one, other in zip(fake, real, strict=True) if isinstance(real, tuple) else [(fake, real)]:
            assert (one is None) == (other is None)
            if other is not None:
                assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("count", [1, 8, 13, 4096])
def test_another_device_packs_the_same_bits(count: int) -> None:
    numbers = tensor(count)
    numbers[0] = torch.nan
    for kind, values in (("bits", numbers > 1), ("sign", numbers), ("positive", numbers)):
        bits = torch.empty((count + 7) // 8, dtype=torch.uint8)
        kernels._pack_by_torch(bits, values, kind)
        same(bits, kernels.pack_bits(values, kind))  # by numpy
        same(kernels._unpack_by_torch(bits, count), kernels._unpack(bits, count))


def test_the_kernels_are_registered_once() -> None:
    assert kernels.pack_bits(tensor(8) > 0, "bits").numel() == 1
    assert MEMPLAN.pack_bits.default is torch.ops.memplan.pack_bits.default
