"""Every C kernel alone, over random shapes, beside PyTorch in float64."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting.kernels.kernel_cases import Case, worst_error
from torch.nn import functional as F

from memplan.exporting.kernels.elementwise import ELEMENTWISE
from memplan.exporting.kernels.frozen_weights import quantized
from memplan.exporting.kernels.kernel_calls import CALLS, DROPOUT
from memplan.exporting.lower import RULES
from memplan.exporting.lowering.device_graph import FILL
from memplan.planning.graph.op_schema import CROSS_ENTROPY
from memplan.planning.passes.split_dropout import DRAW_MASK

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

BOUND = 3e-5
"""Of the largest element: float32 sums of a few hundred products."""
Draw = Callable[[random.Random], Case]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def shuffled(r: random.Random, *shape: int) -> torch.Tensor:
    """A tensor whose dimensions may lie in another order, from somewhere inside its memory."""
    order = list(range(len(shape)))
    if r.random() < 0.5:
        r.shuffle(order)
    start = r.choice((0, 3))
    made = torch.randn(start + max(1, torch.Size(shape).numel()))[start:][: torch.Size(shape).numel()]
    made = made.view([shape[d] for d in order])
    return made.permute([order.index(d) for d in range(len(shape))])


def geometry(r: random.Random, dims: int) -> dict[str, Any]:
    return {
        "kernel": [r.randint(1, 3) for _ in range(dims)], "stride": [r.randint(1, 2) for _ in range(dims)],
        "padding": [r.randint(0, 2) for _ in range(dims)], "dilation": [r.randint(1, 2) for _ in range(dims)],
    }  # fmt: skip


def convolution(transposed: bool, backward: bool) -> Draw:
    def draw(r: random.Random) -> Case:
        dims, groups = r.randint(1, 2), r.choice((1, 1, 2, 4))
        g = geometry(r, dims)
        before, after = (groups * r.choice((1, 2, 3, 5, 20 // groups)) for _ in range(2))
        shape = [2 + r.randint(4, 7) for _ in range(dims)]
        x = normal(r.randint(1, 2), before, *shape)
        sizes = (before, after // groups) if transposed else (after, before // groups)
        weight = normal(*sizes, *g["kernel"])
        out = [r.randint(0, s - 1) if transposed else 0 for s in g["stride"]]
        how = (g["stride"], g["padding"], g["dilation"], transposed, out, groups)
        if not backward:
            bias = normal(after) if r.random() < 0.5 else None
            return Case("aten.convolution.default", (x, weight, bias, *how))
        made = torch.ops.aten.convolution(x, weight, None, *how)
        mask = r.choice(([True, False, False], [False, True, False], [True, True, True], [False, False, True]))
        args = (normal(*made.shape), x, weight, [after], *how, mask)
        return Case("aten.convolution_backward.default", args, phase="backward")

    return draw


def norm_input(r: random.Random) -> torch.Tensor:
    return normal(r.randint(2, 3), r.choice((4, 6)), *(r.randint(2, 5) for _ in range(r.randint(0, 2))))


def batch_norm(training: bool, backward: bool) -> Draw:
    def draw(r: random.Random) -> Case:
        x = norm_input(r)
        channels = x.shape[1]
        weight, bias, mean, variance = normal(channels), normal(channels), normal(channels), torch.rand(channels) + 0.5
        if r.random() < 0.3:
            weight = bias = None
        if not backward and training:
            args = (x, weight, bias, True, 0.1, 1e-5)
            return Case("aten._native_batch_norm_legit.no_stats", args)
        if not backward:
            return Case(
                "aten._native_batch_norm_legit_no_training.default", (x, weight, bias, mean, variance, 0.1, 1e-5)
            )
        _, saved, deviation = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, bias, True, 0.1, 1e-5)
        mask = [True, weight is not None, weight is not None]
        args = (normal(*x.shape), x, weight, mean, variance, saved, deviation, training, 1e-5, mask)
        return Case("aten.native_batch_norm_backward.default", args, phase="backward")

    return draw


def layer_norm(backward: bool) -> Draw:
    def draw(r: random.Random) -> Case:
        x = normal(r.randint(1, 3), r.randint(1, 4), r.randint(2, 6))
        shape = list(x.shape[r.randint(1, 2) :])
        weight, bias = (normal(*shape), normal(*shape)) if r.random() < 0.7 else (None, None)
        if not backward:
            return Case("aten.native_layer_norm.default", (x, shape, weight, bias, 1e-5))
        _, mean, deviation = torch.ops.aten.native_layer_norm(x, shape, weight, bias, 1e-5)
        mask = [True, weight is not None, weight is not None]
        args = (normal(*x.shape), x, shape, mean, deviation, weight, bias, mask)
        return Case("aten.native_layer_norm_backward.default", args, phase="backward")

    return draw


def group_norm(backward: bool) -> Draw:
    def draw(r: random.Random) -> Case:
        groups = r.choice((1, 2, 3))
        x = normal(r.randint(1, 3), groups * r.randint(1, 3), r.randint(2, 6))
        weight, bias = normal(x.shape[1]), normal(x.shape[1])
        sizes = (x.shape[0], x.shape[1], x.shape[2], groups)
        if not backward:
            return Case("aten.native_group_norm.default", (x, weight, bias, *sizes, 1e-5))
        _, mean, deviation = torch.ops.aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
        args = (normal(*x.shape), x, mean, deviation, weight, *sizes, [True, True, True])
        return Case("aten.native_group_norm_backward.default", args, phase="backward")

    return draw


def pooled(r: random.Random) -> tuple[torch.Tensor, list[int], list[int], list[int]]:
    kernel = [r.randint(1, 3), r.randint(1, 3)]
    padding = [r.randint(0, k // 2) for k in kernel]
    x = torch.randperm(2 * 3 * 64).float().view(2, 3, 8, 8)[:, :, : r.randint(5, 8), : r.randint(5, 8)].contiguous()
    return x, kernel, [r.randint(1, 3), r.randint(1, 3)], padding


def max_pool(r: random.Random) -> Case:
    x, kernel, stride, padding = pooled(r)
    return Case("aten.max_pool2d_with_indices.default", (x, kernel, stride, padding, [r.randint(1, 2)] * 2))


def average_pool(r: random.Random) -> Case:
    x, *how = pooled(r)
    return Case("aten.avg_pool2d.default", (x, *how, r.random() < 0.3, r.random() < 0.5, r.choice((None, 3))))


def average_pool_backward(r: random.Random) -> Case:
    x, *how = pooled(r)
    rest = (r.random() < 0.3, r.random() < 0.5, r.choice((None, 3)))
    g = normal(*torch.ops.aten.avg_pool2d(x, *how, *rest).shape)
    return Case("aten.avg_pool2d_backward.default", (g, x, *how, *rest), phase="backward")


def adaptive(backward: bool) -> Draw:
    def draw(r: random.Random) -> Case:
        x, out = normal(2, 3, r.randint(4, 9), r.randint(4, 9)), [r.randint(1, 4), r.randint(1, 4)]
        if backward:
            return Case("aten._adaptive_avg_pool2d_backward.default", (normal(2, 3, *out), x), phase="backward")
        return Case("aten._adaptive_avg_pool2d.default", (x, out))

    return draw


def pad(kind: str, dims: int, backward: bool) -> Draw:
    def draw(r: random.Random) -> Case:
        x, pads = (
            normal(2, *(3 if dims == 2 else 2,), *(r.randint(4, 6) for _ in range(dims))),
            [r.randint(0, 3) for _ in range(2 * dims)],
        )
        name = f"aten.{kind}_pad{dims}d"
        if not backward:
            return Case(f"{name}.default", (x, pads))
        g = normal(*getattr(torch.ops.aten, f"{kind}_pad{dims}d")(x, pads).shape)
        return Case(f"{name}_backward.default", (g, x, pads), phase="backward")

    return draw


def constant_pad(r: random.Random) -> Case:
    return Case("aten.constant_pad_nd.default", (shuffled(r, 2, 5, 6), [r.randint(-2, 2) for _ in range(4)], 1.5))


def softmax(name: str) -> Draw:
    def draw(r: random.Random) -> Case:
        x, dim = normal(*(r.randint(2, 5) for _ in range(r.randint(1, 3)))), r.choice((0, -1))
        if name == "_safe_softmax":
            x = torch.where(torch.rand(x.shape) < 0.5, -torch.inf, x)
            return Case("aten._safe_softmax.default", (x, dim))
        return Case(f"aten.{name}.default", (x, dim, False))

    return draw


def softmax_backward(name: str, logarithm: bool) -> Draw:
    def draw(r: random.Random) -> Case:
        x, dim = normal(*(r.randint(2, 5) for _ in range(r.randint(1, 3)))), r.choice((0, -1))
        result = F.log_softmax(x, dim) if logarithm else F.softmax(x, dim)
        return Case(f"aten.{name}.default", (normal(*x.shape), result, dim, torch.float32), phase="backward")

    return draw


def likelihood(planes: bool, backward: bool) -> Draw:
    def draw(r: random.Random) -> Case:
        inner = [r.randint(1, 3), r.randint(1, 3)] if planes else []
        x = F.log_softmax(normal(r.randint(1, 4), r.randint(2, 6), *inner), 1)
        target = torch.randint(x.shape[1], (x.shape[0], *inner))
        weight = torch.rand(x.shape[1]) + 0.1 if r.random() < 0.5 else None
        how = (weight, r.choice((1, 2)), r.choice((-100, 1 if x.numel() > 12 else -100)))
        name = "nll_loss2d" if planes else "nll_loss"
        forward = getattr(torch.ops.aten, f"{name}_forward")
        loss, total = forward(x, target, *how)
        if not torch.isfinite(loss):  # every class ignored
            how = (*how[:2], -100)
            _, total = forward(x, target, *how)
        if not backward:
            return Case(f"aten.{name}_forward.default", (x, target, *how))
        args = (torch.randn(()), x, target, *how, total)
        return Case(f"aten.{name}_backward.default", args, phase="backward")

    return draw


def squares(backward: bool) -> Draw:
    def draw(r: random.Random) -> Case:
        x, y, reduction = normal(3, r.randint(1, 9)), normal(3, 1), r.choice((1, 2))
        y = normal(*x.shape)
        if backward:
            return Case("aten.mse_loss_backward.default", (torch.randn(()), x, y, reduction), phase="backward")
        return Case("aten.mse_loss.default", (x, y, reduction))

    return draw


def product(name: str) -> Draw:
    def draw(r: random.Random) -> Case:
        m, n, k = r.choice((1, 2, 3, 9, 21)), r.choice((1, 2, 3, 9, 21)), r.choice((1, 2, 6, 20, 150))
        batch = (r.randint(1, 3),) if name == "bmm" else ()
        a, b = shuffled(r, *batch, m, k), shuffled(r, *batch, k, n)
        if name == "addmm":
            return Case("aten.addmm.default", (normal(n), a, b))
        return Case(f"aten.{name}.default", (a, b))

    return draw


def total(name: str) -> Draw:
    def draw(r: random.Random) -> Case:
        x = shuffled(r, *(r.randint(1, 4) for _ in range(r.randint(1, 3))))
        if name.endswith("default"):
            return Case(f"aten.{name}", (x,))
        dims = r.sample(range(x.dim()), r.randint(1, x.dim()))
        return Case(f"aten.{name}", (x, dims, r.random() < 0.5))

    return draw


def concatenated(r: random.Random) -> Case:
    dim, shape = r.randint(0, 2), [r.randint(1, 4) for _ in range(3)]
    parts = []
    for _ in range(r.randint(1, 3)):
        shape[dim] = r.randint(1, 4)
        parts.append(shuffled(r, *shape))
    return Case("aten.cat.default", (parts, dim))


def part_backward(name: str) -> Draw:
    def draw(r: random.Random) -> Case:
        sizes, dim = [r.randint(2, 6) for _ in range(3)], r.randint(-3, 2)
        if name == "select":
            index = r.randint(-sizes[dim], sizes[dim] - 1)
            g = shuffled(r, *torch.empty(sizes).select(dim, index).shape)
            return Case("aten.select_backward.default", (g, sizes, dim, index), phase="backward")
        start, step = r.randint(0, sizes[dim] - 1), r.randint(1, 2)
        end = r.choice((sizes[dim], 9223372036854775807))
        g = shuffled(r, *torch.ops.aten.slice.Tensor(torch.empty(sizes), dim, start, end, step).shape)
        return Case("aten.slice_backward.default", (g, sizes, dim, start, end, step), phase="backward")

    return draw


def embedding(backward: bool) -> Draw:
    def draw(r: random.Random) -> Case:
        rows, size = r.randint(2, 7), r.randint(1, 5)
        index = torch.randint(rows, (r.randint(1, 3), r.randint(1, 4)))
        if backward:
            args = (normal(*index.shape, size), index, rows, r.choice((-1, 1)), False)
            return Case("aten.embedding_dense_backward.default", args, phase="backward")
        return Case("aten.embedding.default", (normal(rows, size), index))

    return draw


def in_eight_bits(draw: Draw, weight: int) -> Draw:
    """The same op, which reads its weight in eight bits: PyTorch computes with what these are in float32."""

    def narrow(r: random.Random) -> Case:
        case = draw(r)
        given = case.args[weight]
        assert isinstance(given, torch.Tensor)
        linear = case.target in ("aten.mm.default", "aten.addmm.default") and r.random() < 0.5
        found = quantized((given.t() if linear else given).contiguous().numpy())
        floats = torch.from_numpy(found.floats)
        args = [*case.args]
        args[weight] = floats.t() if linear else floats
        place = sum(isinstance(one, torch.Tensor) for one in case.args[:weight])
        return replace(case, args=tuple(args), narrow=(place, found))

    return narrow


def input_gradient(transposed: bool) -> Draw:
    def draw(r: random.Random) -> Case:
        case = convolution(transposed, True)(r)
        return replace(case, args=(*case.args[:-1], [True, False, False]))

    return draw


def choice(r: random.Random) -> Case:
    shape = [r.randint(1, 4) for _ in range(3)]
    parts = [shuffled(r, *shape), normal(*(1 if r.random() < 0.5 else size for size in shape)), normal()]
    r.shuffle(parts)
    return Case("aten.where.self", (parts[0] > 0, parts[1], parts[2]))


def extreme(name: str) -> Draw:
    def draw(r: random.Random) -> Case:
        x = shuffled(r, *(r.randint(1, 5) for _ in range(3))).mul(2).round()  # equal ones, too
        if name in ("amax", "amin"):
            return Case(f"aten.{name}.default", (x, r.sample(range(3), r.randint(1, 3)), r.random() < 0.5))
        return Case(f"aten.{name}.dim", (x, r.randint(-3, 2), r.random() < 0.5))

    return draw


def by_index(name: str) -> Draw:
    def draw(r: random.Random) -> Case:
        sizes, dim = [r.randint(1, 4) for _ in range(3)], r.randint(0, 2)
        x = normal(*sizes)
        shape = [*sizes[:dim], r.randint(1, 4 if name in ("gather", "scatter_add") else 1), *sizes[dim + 1 :]]
        index = torch.randint(sizes[dim], shape)
        if name == "gather":
            return Case("aten.gather.default", (x, dim, index))
        if name == "scatter.value":
            return Case("aten.scatter.value", (x, dim, index, 0.5))
        return Case(f"aten.{name}{'' if '.' in name else '.default'}", (x, dim, index, normal(*shape)))

    return draw


def upsampled(kind: str, backward: bool) -> Draw:
    def draw(r: random.Random) -> Case:
        dims = 1 if "1d" in kind else 2
        sizes, factors = [r.randint(1, 4) for _ in range(dims)], [r.randint(1, 3) for _ in range(dims)]
        to = [size * factor for size, factor in zip(sizes, factors, strict=True)]
        corners = [] if "nearest" in kind else [r.random() < 0.5]
        scales = [float(factor) for factor in factors] if r.random() < 0.5 else [None] * dims
        name = f"aten.upsample_{kind}{'_backward' * backward}.default"
        if backward:
            return Case(name, (normal(2, 3, *to), to, [2, 3, *sizes], *corners, *scales), phase="backward")
        return Case(name, (normal(2, 3, *sizes), to, *corners, *scales))

    return draw


def flipped(r: random.Random) -> Case:
    return Case("aten.flip.default", (shuffled(r, 2, 3, 4), r.sample(range(-3, 0), r.randint(1, 3))))


def adaptive_max(r: random.Random) -> Case:
    out = [r.randint(1, 3), r.randint(1, 3)]
    x = torch.randperm(2 * 81).float().view(2, 1, 9, 9)[:, :, : out[0] * 2, : out[1] * 3].contiguous()
    return Case("aten.adaptive_max_pool2d.default", (x, out))


def simple(target: str, *args: Any) -> Draw:
    """A call of fixed arguments, of which those that are callables are drawn."""
    phase = "backward" if "backward" in target else "forward"
    return lambda r: Case(f"aten.{target}", tuple(one() if callable(one) else one for one in args), phase=phase)


def some(*shape: int, **how: float) -> Callable[[], torch.Tensor]:
    return lambda: torch.rand(*shape) if how else torch.randn(*shape)


X, P, G = some(3, 4), some(3, 4, positive=1), some(3, 4)
DECOMPOSED: dict[str, Draw] = {
    f"{name} by parts, {at}": simple(name, *args)
    for at, (name, *args) in enumerate((
        ("huber_loss.default", X, X, 1, 0.7), ("huber_loss_backward.default", normal, X, X, 1, 0.7),
        ("smooth_l1_loss.default", X, X, 2, 0.5), ("smooth_l1_loss_backward.default", normal, X, X, 1, 0.5),
        ("binary_cross_entropy.default", P, P, None, 1),
        ("binary_cross_entropy_backward.default", normal, P, P, None, 1),
        ("binary_cross_entropy_with_logits.default", X, P, None, some(4, positive=1), 1),
        ("soft_margin_loss.default", X, X, 1), ("soft_margin_loss_backward.default", normal, X, X, 1),
        ("mse_loss.default", X, X, 0), ("xlogy.Tensor", P, P),
        ("mish.default", X), ("mish_backward.default", G, X), ("celu.default", X, 1.3), ("glu.default", X, 1),
        ("glu_backward.default", some(3, 2), X, 1), ("log_sigmoid_forward.default", X), ("hardshrink.default", X),
        ("softshrink.default", X), ("threshold.default", X, 0.1, 2.0), ("_prelu_kernel.default", X, some(1, 4)),
        ("_prelu_kernel_backward.default", G, X, some(1, 4)), ("pixel_shuffle.default", some(2, 8, 3, 2), 2),
        ("pixel_unshuffle.default", some(2, 2, 4, 6), 2), ("channel_shuffle.default", some(2, 6, 3), 3),
        ("logsumexp.default", X, [1]), ("logsumexp.default", some(2, 3, 2), [0, 2], True),
        ("var.correction", X, [0]), ("std.correction", X, [1]), ("roll.default", X, [1, -2], [0, 1]),
        ("roll.default", X, [5]), ("cumsum.default", X, 1), ("mv.default", X, some(4)),
        ("repeat.default", X, [2, 1, 3]),
        ("_trilinear.default", X, some(5, 4, 2), some(3, 2), [1, 3], [0], [1, 2], [2, 3]),
        ("_weight_norm_interface.default", X, some(3, 1, positive=1), 0),
        ("_weight_norm_interface_backward.default", G, X, some(3, 1), some(3, 1, positive=1), 0),
        ("linalg_vector_norm.default", X, 2.0, [1]), ("slice_scatter.default", X, some(3, 2), 1, 1, 3),
        ("copy.default", X, some(1, 4)),
    ))
}  # fmt: skip
"""Ops without a kernel of their own: torch's decompositions, or ours."""

DRAWS: dict[str, Draw] = {
    **DECOMPOSED,
    "aten.where.self": choice,
    **{f"aten.{name}.default": extreme(name) for name in ("amax", "amin")},
    **{f"aten.{name}.dim": extreme(name) for name in ("max", "min")},
    **{
        f"aten.{name}{'' if '.' in name else '.default'}": by_index(name)
        for name in ("gather", "scatter.src", "scatter.value", "scatter_add")
    },
    **{
        f"aten.upsample_{kind}{'_backward' * backward}.default": upsampled(kind, backward)
        for kind in ("nearest1d", "nearest2d", "linear1d", "bilinear2d")
        for backward in (False, True)
    },
    "aten.flip.default": flipped,
    "aten.adaptive_max_pool2d.default": adaptive_max,
    "convolution in eight bits": in_eight_bits(convolution(False, False), 1),
    "transposed in eight bits": in_eight_bits(convolution(True, False), 1),
    "input gradient in eight bits": in_eight_bits(input_gradient(False), 2),
    "transposed input gradient in eight bits": in_eight_bits(input_gradient(True), 2),
    "mm in eight bits": in_eight_bits(product("mm"), 1),
    "addmm in eight bits": in_eight_bits(product("addmm"), 2),
    "embedding in eight bits": in_eight_bits(embedding(False), 0),
    "aten.convolution.default": convolution(False, False),
    "transposed": convolution(True, False),
    "aten.convolution_backward.default": convolution(False, True),
    "transposed backward": convolution(True, True),
    "aten._native_batch_norm_legit.no_stats": batch_norm(True, False),
    "aten._native_batch_norm_legit_no_training.default": batch_norm(False, False),
    "aten.native_batch_norm_backward.default": batch_norm(True, True),
    "fixed backward": batch_norm(False, True),
    "aten.native_layer_norm.default": layer_norm(False),
    "aten.native_layer_norm_backward.default": layer_norm(True),
    "aten.native_group_norm.default": group_norm(False),
    "aten.native_group_norm_backward.default": group_norm(True),
    "aten.max_pool2d_with_indices.default": max_pool,
    "aten.avg_pool2d.default": average_pool,
    "aten.avg_pool2d_backward.default": average_pool_backward,
    "aten._adaptive_avg_pool2d.default": adaptive(False),
    "aten._adaptive_avg_pool2d_backward.default": adaptive(True),
    **{
        f"aten.{kind}_pad{dims}d{'_backward' * backward}.default": pad(kind, dims, backward)
        for kind in ("reflection", "replication")
        for dims in (1, 2)
        for backward in (False, True)
    },
    "aten.constant_pad_nd.default": constant_pad,
    "aten._log_softmax.default": softmax("_log_softmax"),
    "aten._softmax.default": softmax("_softmax"),
    "aten._safe_softmax.default": softmax("_safe_softmax"),
    "aten._log_softmax_backward_data.default": softmax_backward("_log_softmax_backward_data", True),
    "aten._softmax_backward_data.default": softmax_backward("_softmax_backward_data", False),
    "aten.nll_loss_forward.default": likelihood(False, False),
    "aten.nll_loss2d_forward.default": likelihood(True, False),
    "aten.nll_loss_backward.default": likelihood(False, True),
    "aten.nll_loss2d_backward.default": likelihood(True, True),
    "aten.mse_loss.default": squares(False),
    "aten.mse_loss_backward.default": squares(True),
    "aten.addmm.default": product("addmm"),
    "aten.mm.default": product("mm"),
    "aten.bmm.default": product("bmm"),
    **{f"aten.{name}": total(name) for name in ("sum.default", "sum.dim_IntList", "mean.default", "mean.dim")},
    "aten.cat.default": concatenated,
    "aten.select_backward.default": part_backward("select"),
    "aten.slice_backward.default": part_backward("slice"),
    "aten.embedding.default": embedding(False),
    "aten.embedding_dense_backward.default": embedding(True),
}

POSITIVE = ("log", "sqrt", "rsqrt", "reciprocal", "log1p", "div", "pow")
NUMBERS: dict[str, tuple[Any, ...]] = {
    "aten.add.Scalar": (0.5,), "aten.clamp.default": (-0.5, 0.75), "aten.div.Scalar": (3.0,),
    "aten.hardtanh.default": (-0.5, 0.75), "aten.hardtanh_backward.default": (-0.5, 0.75),
    "aten.leaky_relu_backward.default": (0.1, False), "aten.mul.Scalar": (0.3,), "aten.pow.Tensor_Scalar": (2.5,),
    "aten.rsub.Scalar": (1.5,), "aten.sub.Scalar": (0.5,), "aten.softplus_backward.default": (1.5, 20.0),
    "aten.threshold_backward.default": (0.0,), "aten.clamp_max.default": (0.5,), "aten.clamp_min.default": (-0.5,),
    "aten.hardshrink_backward.default": (0.5,), "aten.softshrink_backward.default": (0.4,),
    **{f"aten.{name}.Scalar": (1.0,) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}  # fmt: skip


WHOLE = ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not")
"""Ops that are drawn with operands that are often equal, or 0."""


def elementwise(target: str) -> Draw:
    def draw(r: random.Random) -> Case:
        shape = [r.randint(1, 4) for _ in range(r.randint(1, 3))]
        form = ELEMENTWISE[target][-1 if target.endswith("Scalar") else 0]
        operands = [shuffled(r, *shape) for _ in form.operands]
        if len(operands) == 2 and "backward" not in target and r.random() < 0.5:
            operands[1] = normal(*(1 if r.random() < 0.5 else size for size in shape))
        if any(word in target for word in POSITIVE):
            operands = [one.abs() + 0.5 for one in operands]
        if target.split(".")[1] in WHOLE:
            operands = [one.mul(1.5).round() for one in operands]
        if target in ("aten.isinf.default", "aten.isnan.default"):
            operands = [torch.where(one > 0.5, torch.inf, torch.where(one < -0.5, torch.nan, one)) for one in operands]
        if target == "aten.elu_backward.default":
            args = (operands[0], 1.2, 0.9, 1.1, r.random() < 0.5, operands[1])
        else:
            args = (*operands, *NUMBERS.get(target, ()))
        kwargs = {"approximate": r.choice(("none", "tanh"))} if "gelu" in target else {}
        return Case(target, args, kwargs, "backward" if "backward" in target else "forward")

    return draw


EVERY = {target: elementwise(target) for target in ELEMENTWISE if target.startswith("aten.")} | DRAWS
ELSEWHERE = {
    DROPOUT, DRAW_MASK, FILL, CROSS_ENTROPY, "aten.native_dropout_backward.default", "aten._to_copy.default",
    "aten._native_batch_norm_legit_functional.default", "aten.native_batch_norm.default",
    "aten.max_pool2d_with_indices_backward.default", "aten.native_dropout.default",
    "aten.adaptive_max_pool2d_backward.default", "aten.bitwise_and.Tensor", "aten.bitwise_or.Tensor",
    "aten.bitwise_not.default",
}  # fmt: skip
"""Seen in whole steps only (tests/exporting/test_export.py)."""


def test_every_op_has_cases() -> None:
    known = {target for target in (*ELEMENTWISE, *CALLS, *RULES) if target.startswith("aten.")}
    assert known - set(EVERY) - ELSEWHERE == set()


def checked(count: int, folder: Path, names: Sequence[str] = (), flags: Sequence[str] = ()) -> dict[str, float]:
    torch.manual_seed(0)
    r = random.Random(0)
    drawn = [(name, EVERY[name](r)) for name in names or EVERY for _ in range(count)]
    worst: dict[str, float] = {}
    errors = worst_error([case for _, case in drawn], folder, flags)
    for (name, _), error in zip(drawn, errors, strict=True):
        worst[name] = max(worst.get(name, 0.0), error if error == error else float("inf"))
    return {name: error for name, error in worst.items() if not error <= BOUND}


def test_kernels_compute_what_torch_does(tmp_path: Path) -> None:
    assert checked(3, tmp_path) == {}
    written = (tmp_path / "cases.c").read_text()
    narrow = ("matmul", "embedding", "convolution_gather", "convolution_scatter", "convolution_tiles")
    assert all(f"    {kernel}_int8(" in written for kernel in narrow)


PRODUCTS = ("convolution", "transposed", "input gradient", "mm.default")
TILED = [name for name in EVERY if any(word in name for word in PRODUCTS)]


@pytest.mark.parametrize("flags", [["-DWIDE=4"], ["-DWIDE=8"], ["-DWIDE=16"], ["-DWIDE=4", "-DDEEP=3"]])
def test_tiles_of_other_sizes_compute_the_same(flags: list[str], tmp_path: Path) -> None:
    assert checked(4, tmp_path, TILED, flags) == {}
    assert "    convolution_weight_gradient_tiles(" in (tmp_path / "cases.c").read_text()


@pytest.mark.slow
def test_kernels_compute_what_torch_does_over_two_hundred_shapes(tmp_path: Path) -> None:
    assert checked(200, tmp_path) == {}
