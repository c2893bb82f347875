"""Ops really run: their peak, as torch's profiler saw it, against results + ``transient_bytes``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import thinned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memplan.trace.semantics.cpu.results import RESULTS
from memplan.trace.semantics.cpu.table import _FORMULAS, transient_bytes
from memplan.trace.semantics.cpu.temporaries import (
    indexing,
    losses,
    resampling,
)

aten = torch.ops.aten
BF16, F64 = torch.bfloat16, torch.float64


def allocations(run: Callable[[], Any]) -> tuple[list[int], Any]:
    """Bytes taken (+) and given back (-) while ``run`` runs, in order, and what it returns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
            result = run()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    found: list[tuple[int, int]] = []
    events = list(profile.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        if event.name == "[memory]":
            fields: Any = event.extra_fields
            found.append((event.start_time_ns, fields.alloc_size))
        events += event.children
    return [size for _, size in sorted(found)], result


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, list | tuple) else []


def compare(op: Any, *args: Any, decided: bool = False, within: float = 0.02, **kwargs: Any) -> None:
    """Hold the prediction against the measured peak. ``decided``: without a formula the two would be apart."""
    op(*args, **kwargs)
    sizes, result = allocations(lambda: op(*args, **kwargs))
    level = peak = 0
    for size in sizes:
        level += size
        peak = max(peak, level)
    mine = {t.untyped_storage().data_ptr() for t in tensors_in(args)}
    new = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in([result])}
    held = sum(size for pointer, size in new.items() if pointer not in mine)
    predicted = held + transient_bytes(str(op), args, kwargs, result)
    near = max(65_536, within * peak)
    assert abs(predicted - peak) <= near, f"{predicted - peak:+} of {peak}: {sizes[:12]}"
    assert not decided or abs(held - peak) > near, f"its results alone are as near: {held} of {peak}"


WITHIN = 0.15
"""oneDNN's scratchpads are bounded, not imitated: within so much of a convolution's peak."""


def conv(
    x: tuple[int, ...],
    w: tuple[int, ...],
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    transposed: bool = False,
    groups: int = 1,
    bias: bool = True,
    mask: tuple[bool, bool] = (True, True),
    dtype: torch.dtype = torch.float32,
    last: bool = False,
) -> None:
    """A convolution and its backward."""
    dims = len(x) - 2
    a, weight = torch.randn(x).to(dtype), torch.randn(w).to(dtype)
    if last:
        form = torch.channels_last if dims == 2 else torch.channels_last_3d
        a, weight = a.to(memory_format=form), weight.to(memory_format=form)
    channels = w[1] * groups if transposed else w[0]
    b = torch.randn(channels).to(dtype) if bias else None
    how = ([stride] * dims, [padding] * dims, [dilation] * dims, transposed, [0] * dims, groups)
    compare(aten.convolution.default, a, weight, b, *how, within=WITHIN)
    gradient = torch.randn_like(aten.convolution(a, weight, b, *how))
    sizes = [channels] if bias else None
    compare(
        aten.convolution_backward.default, gradient, a, weight, sizes, *how, [*mask, mask[1] and bias], within=WITHIN
    )


CONVOLUTIONS = [
    ((8, 32, 56, 56), (64, 32, 3, 3), {"padding": 1}),
    ((8, 24, 56, 56), (40, 24, 3, 3), {"padding": 1}),
    ((8, 3, 64, 64), (64, 3, 7, 7), {"stride": 2, "padding": 3, "mask": (False, True)}),
    ((8, 3, 64, 64), (40, 3, 4, 4), {"stride": 4}),
    ((8, 12, 56, 56), (32, 12, 3, 3), {"padding": 1}),
    ((8, 64, 40, 40), (10, 64, 1, 1), {}),
    ((8, 64, 32, 32), (128, 64, 1, 1), {"stride": 2}),
    ((8, 64, 32, 32), (64, 64, 3, 3), {"stride": 2, "padding": 1}),
    ((4, 512, 4, 4), (512, 512, 3, 3), {"padding": 1, "bias": False}),
    ((16, 128, 20, 20), (128, 128, 3, 3), {"padding": 1}),
    ((8, 3, 96, 96), (384, 3, 16, 16), {"stride": 16, "mask": (False, True)}),
    ((8, 32, 28, 28), (64, 32, 3, 3), {"padding": 2, "dilation": 2}),
    ((8, 32, 56, 56), (32, 1, 3, 3), {"padding": 1, "groups": 32}),
    ((8, 32, 56, 56), (32, 1, 7, 7), {"padding": 3, "groups": 32}),
    ((8, 64, 30, 30), (64, 16, 3, 3), {"padding": 1, "groups": 4}),
    ((8, 64, 40, 40), (64, 32, 3, 3), {"padding": 1, "stride": 2, "groups": 2}),
    ((8, 20, 40, 40), (24, 10, 3, 3), {"padding": 1, "groups": 2}),
    ((4, 48, 4096), (256, 48, 1), {}),
    ((4, 48, 4096), (64, 48, 3), {"padding": 2, "dilation": 2}),
    ((2, 1, 24, 24, 24), (16, 1, 3, 3, 3), {"padding": 1}),
    ((2, 16, 24, 24, 24), (32, 16, 3, 3, 3), {"padding": 1}),
    ((2, 16, 24, 24, 24), (32, 16, 3, 3, 3), {"padding": 1, "stride": 2}),
    ((2, 16, 24, 24, 24), (16, 1, 3, 3, 3), {"padding": 1, "groups": 16}),
    ((8, 64, 16, 16), (64, 32, 4, 4), {"stride": 2, "padding": 1, "transposed": True}),
    ((8, 64, 28, 28), (64, 3, 4, 4), {"stride": 2, "padding": 1, "transposed": True}),
    ((8, 32, 28, 28), (32, 64, 3, 3), {"padding": 1, "transposed": True}),
    ((2, 32, 20, 20, 20), (32, 16, 2, 2, 2), {"stride": 2, "transposed": True}),
    ((8, 32, 56, 56), (64, 32, 3, 3), {"padding": 1, "last": True}),
    ((8, 64, 56, 56), (64, 64, 1, 1), {"last": True}),
    ((8, 64, 56, 56), (128, 64, 3, 3), {"stride": 2, "padding": 1, "last": True}),
    ((8, 64, 56, 56), (64, 1, 3, 3), {"padding": 1, "groups": 64, "last": True}),
    ((2, 256, 56, 56), (512, 256, 1, 1), {"stride": 2, "mask": (False, True)}),
    ((4, 64, 27, 27), (64, 64, 1, 1), {"stride": 2}),
    ((4, 32, 28, 28), (32, 1, 1, 1), {"stride": 2, "groups": 32}),
    ((8, 512, 2, 2), (512, 512, 3, 3), {"padding": 1}),
    ((4, 32, 40, 40), (16, 8, 3, 3), {"stride": 2, "groups": 4}),
    ((8, 32, 16, 16, 16), (8, 16, 7, 7, 7), {"groups": 2}),
    ((2, 8, 16, 16, 16), (32, 8, 1, 1, 1), {"stride": 2}),
    ((8, 16, 16, 16, 16), (16, 8, 2, 2, 2), {"stride": 2, "transposed": True}),
    ((2, 3, 12, 12, 12), (3, 8, 2, 2, 2), {"stride": 2, "transposed": True}),
    # Where oneDNN does not run:
    ((1, 32, 24, 24), (64, 32, 3, 3), {"padding": 1}),
    ((1, 16, 24, 24, 24), (16, 16, 3, 3, 3), {"padding": 1}),
    ((1, 4, 16, 16, 16), (8, 4, 1, 1, 1), {}),
    ((4, 32, 12, 12, 12), (64, 32, 1, 1, 1), {"last": True, "dtype": F64}),
    ((1, 16, 16, 16, 16), (16, 16, 3, 3, 3), {"padding": 1, "last": True}),
    ((0, 16, 30, 30), (32, 16, 3, 3), {"padding": 2, "dilation": 2}),
    ((1, 32, 12, 12, 12), (32, 16, 2, 2, 2), {"stride": 2, "transposed": True}),
    ((4, 16, 30, 30), (32, 16, 3, 3), {"padding": 1, "dtype": F64}),
    ((4, 16, 30, 30), (32, 16, 3, 3), {"padding": 2, "dilation": 2, "dtype": F64}),
    ((2, 8, 16, 16, 16), (16, 8, 3, 3, 3), {"padding": 1, "dtype": F64}),
    ((4, 16, 30, 30), (32, 8, 3, 3), {"padding": 1, "groups": 2, "dtype": F64}),
    ((4, 32, 20, 20), (32, 16, 4, 4), {"stride": 2, "padding": 1, "transposed": True, "dtype": F64}),
    ((4, 16, 30, 30), (32, 16, 3, 3), {"padding": 1, "dtype": F64, "last": True}),
    ((4, 16, 30, 30), (32, 16, 1, 1), {"dtype": F64, "last": True}),
    ((4, 16, 30, 30), (32, 16, 3, 3), {"padding": 2, "dilation": 2, "dtype": F64, "last": True}),
    ((4, 16, 30, 30), (32, 8, 3, 3), {"padding": 1, "groups": 2, "dtype": F64, "last": True}),
    ((4, 32, 20, 20), (32, 16, 4, 4), {"stride": 2, "padding": 1, "transposed": True, "dtype": F64, "last": True}),
]


@pytest.mark.parametrize(("x", "w", "how"), thinned(CONVOLUTIONS, 3))
def test_convolution_and_its_backward(x: tuple[int, ...], w: tuple[int, ...], how: dict[str, Any]) -> None:
    conv(x, w, **how)


@settings(deadline=None, max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    batch=st.sampled_from([2, 4, 8]),
    channels=st.tuples(st.sampled_from([1, 3, 8, 20, 32, 64]), st.sampled_from([2, 10, 32, 48, 64])),
    side=st.sampled_from([14, 28, 40]),
    kernel=st.sampled_from([1, 2, 3, 5]),
    stride=st.sampled_from([1, 2]),
    bias=st.booleans(),
    mask=st.sampled_from([(True, True), (False, True), (True, False)]),
)
def test_drawn_convolutions(
    batch: int,
    channels: tuple[int, int],
    side: int,
    kernel: int,
    stride: int,
    bias: bool,
    mask: tuple[bool, bool],
) -> None:
    x, w = (batch, channels[0], side, side), (channels[1], channels[0], kernel, kernel)
    conv(x, w, stride, kernel // 2, bias=bias, mask=mask)


def test_the_operands_of_a_second_derivative_are_copied() -> None:
    x, g = torch.randn(4, 32, 48, 48).transpose(0, 1), torch.randn(4, 32, 48, 48).transpose(0, 1)
    compare(aten.convolution.default, x, g, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, within=WITHIN)


def image(last: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(8, 64, 32, 32).to(dtype)
    return x.to(memory_format=torch.channels_last) if last else x


def strided(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(8, 64, 32, 64).to(dtype)[..., ::2]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("kind", ["plain", "last", "mixed", "strided"])
@pytest.mark.parametrize("mask", [[True] * 3, [False, True, True]])
def test_batch_norm_backward(dtype: torch.dtype, kind: str, mask: list[bool]) -> None:
    x = image(kind in ("last", "mixed"), dtype)
    g = {"plain": image(False, dtype), "last": image(True, dtype), "mixed": image(False, dtype)}.get(kind)
    one = torch.ones(64)
    _, mean, scale = aten.native_batch_norm(x, one, one, one, one, True, 0.1, 1e-5)
    given = (strided(dtype) if g is None else g, x, one, one, one, mean, scale, True, 1e-5, mask)
    compare(aten.native_batch_norm_backward.default, *given)


rows, one_row = torch.randn(64, 128, 256), torch.ones(256)
turned, spread = torch.randn(128, 64, 256).transpose(0, 1), torch.randn(64, 128, 1).expand(64, 128, 256)
table, other, wide = torch.randn(1024, 500), torch.randn(1024, 500), torch.randn(1024, 1000)[:, ::2]
low, low_other = table.to(BF16), other.to(BF16)
whole, mask_of = torch.ones(1024, 500, dtype=torch.int64), torch.randn(1024, 500) > 0
pooled, places = aten.max_pool2d_with_indices(image(True), [2, 2])
pooling = ([2, 2], [], [0, 0], [1, 1], False)
volume, strided_volume = torch.randn(2, 16, 24, 24, 24), torch.randn(2, 16, 24, 24, 48)[..., ::2]
sample, row_means = torch.randn(2, 40_000), torch.randn(64, 128, 1)
to_pool, to_pool_volume = torch.randn(8, 64, 16, 32)[..., ::2], torch.randn(2, 16, 12, 12, 24)[..., ::2]
classes = torch.randn(8, 20, 64, 128)[..., ::2], torch.randint(0, 20, (8, 64, 64)), None, 1, -100

MIXED = [
    *(aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default, aten.minimum.default),
    *(aten.fmax.default, aten.fmin.default, aten.pow.Tensor_Tensor, aten.atan2.default, aten.fmod.Tensor),
    *(aten.remainder.Tensor, aten.hypot.default, aten.copysign.Tensor, aten.floor_divide.default),
    *(aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.ge.Tensor),
    *(aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default),
]
"""Ops of two tensors, which cast the one of another dtype as a whole."""
IN_PLACE = [
    *(aten.sub_.Tensor, aten.div_.Tensor, aten.pow_.Tensor, aten.atan2_.default, aten.fmod_.Tensor),
    *(aten.remainder_.Tensor, aten.hypot_.default, aten.copysign_.Tensor, aten.floor_divide_.Tensor),
]
UNARY = [
    *(aten.sqrt, aten.rsqrt, aten.exp, aten.log, aten.log2, aten.log1p, aten.sin, aten.cos, aten.tanh),
    *(aten.sigmoid, aten.reciprocal, aten.erf),
]

OPS: list[tuple[Any, ...]] = [
    (aten.native_layer_norm.default, turned, [256], one_row, one_row, 1e-5),
    (aten.native_layer_norm_backward.default, turned, rows, [256], row_means, row_means, one_row, one_row, [True] * 3),
    (aten.native_layer_norm_backward.default, sample, sample, [40_000], sample[:, :1], sample[:, :1], sample[0],
     sample[0], [True] * 3),
    (aten._fused_rms_norm.default, rows, [256], one_row, 1e-5),
    (aten._fused_rms_norm.default, rows.to(BF16), [256], one_row.to(BF16), 1e-5),
    (aten._softmax.default, turned, -1, False),
    (aten._log_softmax.default, turned, 1, False),
    (aten._softmax_backward_data.default, spread, rows, -1, torch.float32),
    (aten._log_softmax_backward_data.default, turned, turned, 1, torch.float32),
    (aten._safe_softmax.default, rows, -1),
    (aten.log_sigmoid_forward.default, turned),
    (aten.mse_loss.default, table, other),
    (aten.mse_loss.default, low, low_other),
    (aten.smooth_l1_loss.default, table, other),
    (aten.soft_margin_loss_backward.default, torch.ones(()), table, other.sign(), 1),
    (aten.l1_loss.default, table, other),
    (aten.l1_loss.default, low, low_other),
    (aten.huber_loss.default, table, other),
    (aten.kl_div.default, table, other.sigmoid()),
    (aten.binary_cross_entropy_with_logits.default, table, other.sigmoid()),
    (aten.binary_cross_entropy_with_logits.default, low, other.sigmoid().to(BF16)),
    (aten.nll_loss2d_forward.default, *classes),
    *((op, table, low_other) for op in MIXED),
    *((op, low.clone(), other.abs() + 1) for op in IN_PLACE),
    *((op.default, whole) for op in UNARY),
    (aten.add.Tensor, table, low_other),
    (aten.add.Tensor, low, torch.randn(500)),
    (aten.mul.Tensor, table, mask_of),
    (aten.div.Tensor, whole, whole),
    (aten.add_.Tensor, table.clone(), low_other),
    (aten.mul_.Tensor, low.clone(), other),
    (aten.gt.Tensor, table, low_other),
    (aten.where.self, mask_of, table, low_other),
    (aten.mean.default, low),
    (aten.mean.dim, low, [1]),
    (aten.sum.default, mask_of),
    (aten.sum.dim_IntList, mask_of, [1]),
    (aten.cumsum.default, mask_of, 1),
    (aten.cumprod.default, mask_of, 1),
    (aten.isinf.default, table),
    (aten.any.default, table),
    (aten.any.dim, table, 1),
    (aten.all.default, table),
    (aten.all.dim, table, 1),
    (aten.max.default, table.t()),
    (aten.min.default, table.t()),
    (aten.argmax.default, table.t()),
    (aten.argmin.default, table.t()),
    (aten.logsumexp.default, rows, [1]),
    (aten.native_dropout.default, rows, 0.1, True),
    (aten.native_dropout_backward.default, rows, rows > 0, 1.1),
    (aten.median.default, table),
    (aten.median.dim, rows, 0),
    (aten.nanmedian.default, table),
    (aten.nanmedian.dim, rows, 0),
    (aten.kthvalue.default, table, 3),
    (aten.embedding_dense_backward.default, turned, torch.randint(0, 999, (64, 128)), 1000, -1, False),
    (aten.max_pool2d_with_indices.default, strided(), [2, 2]),
    (aten.avg_pool2d.default, strided(), [2, 2]),
    (aten._adaptive_avg_pool2d.default, strided(), [4, 4]),
    (aten.adaptive_max_pool2d.default, strided(), [4, 4]),
    (aten.reflection_pad2d.default, strided(), [2] * 4),
    (aten.replication_pad2d.default, strided(), [2] * 4),
    (aten.reflection_pad3d.default, strided_volume, [1] * 6),
    (aten.replication_pad3d.default, strided_volume, [1] * 6),
    (aten.pixel_shuffle.default, strided(), 2),
    (aten.channel_shuffle.default, strided(), 2),
    (aten.max_pool2d_with_indices_backward.default, pooled, image(), *pooling, places),
    (aten.avg_pool2d_backward.default, to_pool, image(), [2, 2], [2, 2], [0, 0], False, True, None),
    (aten._adaptive_avg_pool2d_backward.default, to_pool, image()),
    (aten.adaptive_max_pool2d_backward.default, to_pool, image(), places.contiguous()),
    (aten.max_pool3d_with_indices_backward.default, to_pool_volume, volume, [2] * 3, [2] * 3, [0] * 3, [1] * 3, False,
     aten.max_pool3d_with_indices(volume, [2] * 3)[1]),
    (aten.upsample_bicubic2d_backward.default, torch.randn(8, 64, 64, 128)[..., ::2], [64, 64], [8, 64, 32, 32], False),
    (aten.upsample_nearest2d.default, image(), [64, 64]),
    (aten._upsample_nearest_exact2d.default, image(), [64, 64]),
    (aten.upsample_bilinear2d.default, image(), [64, 64], False),
    (aten.max_pool3d_with_indices.default, strided_volume, [2, 2, 2]),
    (aten.avg_pool3d.default, volume.to(memory_format=torch.channels_last_3d), [2, 2, 2]),
    (aten.mm.default, wide, torch.randn(500, 64)),
    (aten.mv.default, wide, torch.randn(500)),
    (aten.addmm.default, torch.ones(64), table, torch.randn(500, 128)[:, ::2]),
    (aten.addmm_.default, torch.ones(1024, 128), table, torch.randn(500, 256)[:, ::2]),
]  # fmt: skip

WITHOUT: list[tuple[Any, ...]] = [
    (aten.native_group_norm.default, image(), torch.ones(64), torch.ones(64), 8, 64, 1024, 8, 1e-5),
    (aten.native_layer_norm.default, rows, [256], one_row, one_row, 1e-5),
    (aten._log_softmax.default, rows, 1, False),
    (aten.mse_loss.default, table, other, 0),
    (aten.mul.Tensor, table, torch.ones(1024, 1, dtype=torch.int64)),
    (aten.mean.default, table),
    (aten.max_pool2d_with_indices.default, image(True), [2, 2]),
    (aten.max_pool2d_with_indices_backward.default, pooled, image(True), *pooling, places),
    (aten.upsample_bilinear2d.default, image(True), [64, 64], False),
    (aten.max_pool3d_with_indices.default, volume.to(memory_format=torch.channels_last_3d), [2, 2, 2]),
    (aten.upsample_nearest2d.default, image(True), [64, 64]),
    (aten.upsample_nearest2d.default, image(), [96, 96]),
    (aten.upsample_trilinear3d.default, volume, [48, 48, 48], False),
    (aten.mm.default, table.t(), other),
    (aten.bmm.default, turned, torch.randn(64, 256, 32)),
    (aten.baddbmm.default, torch.ones(64, 128, 32), turned, torch.randn(64, 256, 32)),
    (aten._foreach_addcdiv_.Scalar, [table.clone()], [other], [other.exp()], 0.1),
    (aten._foreach_norm.Scalar, [table, other]),
]
"""Calls that take next to nothing."""

ELSEWHERE = (
    *("convolution", "flash_attention", "mkldnn_rnn", "_transformer_encoder", "_native_multi_head"),
    *("native_batch_norm", "native_group_norm", "linalg_vector_norm", "bmm"),
    *("_pad1d_backward", "_pad2d_backward", "_pad3d_backward", "upsample", "pool3d_backward", "grid_sampler"),
    *("Scalar", "div.Tensor_mode"),  # these in test_scalar_operands.py
    *("pixel_unshuffle", "im2col", "col2im", "sort", "abs", "_ctc_loss"),  # these in test_kernels_expanded_gradients.py
    *("masked_select", "masked_scatter", "unique", "aten.index", "index_put"),  # these in test_selections.py
)
"""Ops of other tests; batched products take something only in bfloat16 on some processors, of which the formula is a
middle."""


@pytest.mark.parametrize("call", OPS, ids=lambda call: str(call[0]))
def test_op(call: tuple[Any, ...]) -> None:
    compare(*call, decided=True)


@pytest.mark.parametrize("call", WITHOUT, ids=lambda call: str(call[0]))
def test_op_without_temporaries(call: tuple[Any, ...]) -> None:
    compare(*call)


def test_a_norm_in_another_dtype() -> None:
    compare(aten.linalg_vector_norm.default, low, decided=True, dtype=torch.float32)


BY_A_NUMBER = ["aten.deg2rad.default", "aten.rad2deg.default"]
"""Held against a step's peak in `test_scalar_operands`."""
OF_THEIR_OWN = (indexing, losses, resampling)
"""Modules that tests of their own hold against a step's peak."""
BY_GRADIENTS = ["aten._batch_norm_with_update.default", "aten.batch_norm_backward.default"]
"""Held against a step's peak in `test_kernels_expanded_gradients`."""


def test_every_formula_is_of_an_op_that_there_is_and_decides_a_case() -> None:
    formulas = {name for name in _FORMULAS if not name.startswith("fsdp.")}  # ops that FSDP2 registers when it is used
    for name in formulas:
        _, op, overload = name.split(".")
        assert hasattr(getattr(aten, op), overload), name
    called = {str(call[0]) for call in OPS}
    own = {name for module in OF_THEIR_OWN for name in module.FORMULAS}
    left = [name for name in formulas - called - own if not any(part in name for part in ELSEWHERE)]
    others = [*BY_GRADIENTS, *BY_A_NUMBER, "aten.gelu_backward.default"]  # the last takes two copies, one or none
    assert sorted(left) == sorted(others)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("batch", "heads", "length", "size"), [(4, 8, 256, 64), (1, 12, 1024, 64)])
@pytest.mark.parametrize("inside", [True, False])
def test_flash_attention(dtype: torch.dtype, batch: int, heads: int, length: int, size: int, inside: bool) -> None:
    q, k, v, gradient = (torch.randn(batch, length, heads, size).to(dtype).transpose(1, 2) for _ in range(4))
    if not inside:
        gradient = gradient.contiguous()
    op = aten._scaled_dot_product_flash_attention_for_cpu
    compare(op.default, q, k, v)
    out, scale = op(q, k, v)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    if dtype is torch.float32:
        compare(backward, gradient, q, k, v, out, scale, 0.0, False)


def test_an_op_that_is_not_in_the_table_takes_nothing() -> None:
    assert transient_bytes("aten.relu.default", (torch.randn(3),), {}, torch.randn(3)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("channels", "out", "groups"), [(384, 32, 1), (64, 32, 1), (96, 4, 2), (8, 8, 1)])
def test_the_memory_of_a_transposed_convolution_of_volumes(
    dtype: torch.dtype, batch: int, channels: int, out: int, groups: int
) -> None:
    """Which can be that of its input."""
    x = torch.randn(batch, channels, 4, 4, 4, dtype=dtype)
    weight = torch.randn(channels, out // groups, 2, 2, 2, dtype=dtype)
    args = (x, weight, None, [2] * 3, [0] * 3, [1] * 3, True, [0] * 3, groups)
    result = aten.convolution.default(*args)
    predicted = RESULTS["aten.convolution.default"](args, {}, torch.empty(result.shape, dtype=dtype))
    assert predicted.untyped_storage().nbytes() == result.untyped_storage().nbytes()
    assert predicted.shape == result.shape
