"""Eight bits an element: how far what comes back may be from what was put in, whatever that is."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import memplan.planning.ops.piecewise  # noqa: F401  # registers the ops
from memplan.planning.ops.pieces import GROUP, quantized_bytes, quantized_elements_per_piece
from memplan.verification.measurement.peak_and_time import measure_step

OPS = torch.ops.memplan
TINY = torch.finfo(torch.float32).tiny


def round_trip(value: Tensor, *, signed: bool) -> Tensor:
    form = OPS.quantize(value, signed)
    assert (form.dtype, form.numel()) == (torch.uint8, quantized_bytes(value.numel()))
    return OPS.dequantize(form, value.shape, value.stride(), value.dtype, signed)


def in_memory(value: Tensor) -> list[float]:
    return torch.as_strided(value, (value.numel(),), (1,)).double().tolist()


def check_bound(value: Tensor, back: Tensor, *, signed: bool) -> None:
    """Group by group, in plain Python: half a scale, or one where the sign is kept, and the dtype's own rounding."""
    assert (back.shape, back.stride(), back.dtype) == (value.shape, value.stride(), value.dtype)
    one, other = in_memory(value), in_memory(back)
    own = torch.finfo(value.dtype).eps
    for begin in range(0, len(one), GROUP):
        put, got = one[begin : begin + GROUP], other[begin : begin + GROUP]
        if not all(map(math.isfinite, put)):
            assert all(map(math.isnan, got))
            continue
        largest = max(map(abs, put))
        bound = (largest / 127 / 2 if signed else largest / 255) * (1 + 1e-5) + own * largest + TINY
        for a, b in zip(put, got, strict=True):
            assert abs(a - b) <= bound
            if not signed and value.dtype == torch.float32 and a > 255 * TINY:
                assert b > 0, "what is above 0 stays so"
            if a == 0:
                assert b == 0


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    scale=st.floats(-30, 30),
    signed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    odd=st.sampled_from([None, math.nan, math.inf, -math.inf]),
)
def test_an_element_is_off_by_half_a_scale_of_its_group_at_most(
    shape: list[int], order: object, scale: float, signed: bool, dtype: torch.dtype, odd: float | None
) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    value = torch.randn([13, *shape], generator=generator)
    value = value * 10.0 ** (scale / (10 if dtype == torch.float16 else 1))
    value = (value if signed else value.relu()).to(dtype)
    dims = list(range(value.dim()))
    order.shuffle(dims)  # pyright: ignore[reportAttributeAccessIssue]
    value = value.permute(dims).contiguous().permute([dims.index(at) for at in range(len(dims))])  # dense, any order
    if odd is not None and (signed or odd != -math.inf):
        value.as_strided((value.numel(),), (1,))[7] = odd
    check_bound(value, round_trip(value, signed=signed), signed=signed)


def test_zeros_and_the_largest_of_a_group_come_back() -> None:
    value = torch.zeros(3 * GROUP + 5)
    assert torch.equal(round_trip(value, signed=True), value)
    value[GROUP + 1], value[-1] = -3.5, 7.0
    assert torch.allclose(round_trip(value, signed=True), value, rtol=1e-6, atol=0)
    assert torch.equal(round_trip(torch.full((7,), 1e-45), signed=False) > -1, torch.ones(7, dtype=torch.bool))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scratch_is_what_the_graph_is_told(signed: bool, dtype: torch.dtype) -> None:
    from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, Value
    from memplan.planning.levers.lever import Situation
    from memplan.planning.levers.registry import with_encodings

    value = torch.rand(1 << 20).to(dtype)
    name, size = str(dtype).removeprefix("torch."), value.numel() * value.element_size()
    maker = "aten.tanh.default" if signed else "aten.sigmoid.default"
    x = Value(0, "x", "input", 0, size, tuple(value.shape), (1,), name)
    y, g = (Value(at, f"v{at}", "result", at, size, x.shape, (1,), name, at - 1) for at in (1, 2))
    maker_op = GraphOp(0, maker, (Ref(0),), {}, "forward", (1,), False, (0,), (1,))
    back = GraphOp(1, "aten.mul.Tensor", (Ref(1), Ref(1)), {}, "backward", (2,), False, (1,), (2,))
    (kept,) = with_encodings(JointGraph((x, y, g), (maker_op, back), (), ()), Situation("int8")).forms
    form, made = OPS.quantize(value, signed), list[Tensor]()
    taken = measure_step(lambda: made.append(OPS.quantize(value, signed))).growth_peak
    assert taken - form.numel() <= kept.store_scratch
    taken = measure_step(
        lambda: made.append(OPS.dequantize(form, value.shape, value.stride(), dtype, signed))
    ).growth_peak
    assert taken - size <= kept.fetch_scratch
    assert kept.store_scratch < size / 2


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 22))
def test_pieces_are_whole_groups(elements: int) -> None:
    piece = quantized_elements_per_piece(elements)
    assert piece % GROUP == 0
    assert piece == GROUP or piece <= elements / 16
