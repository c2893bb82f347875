"""What stands for memplan's own ops in fused kernels computes what their kernels compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan._torch import inductor
from memplan.planning.inductor.decompositions import decompositions

LAYOUTS = {
    "rows": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
}
SIZES = st.tuples(*[st.integers(1, 5)] * 4)
TABLE = decompositions()
OPS: Any = torch.ops.memplan


def made(size: tuple[int, ...], layout: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return LAYOUTS[layout](torch.randn(size, generator=generator))


def both(op: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return op(*arguments), TABLE[op](*arguments)


@settings(deadline=None)
@given(size=SIZES, layout=st.sampled_from(sorted(LAYOUTS)), seed=st.integers(0, 99))
def test_what_reads_bits(size: tuple[int, ...], layout: str, seed: int) -> None:
    gradient, x = made(size, layout, seed), made(size, layout, seed + 1)
    x = torch.empty_like(gradient).copy_(x)
    signs, flags = OPS.pack_bits(x, "sign"), OPS.pack_bits(x > 0, "bits")
    for op, arguments in (
        (OPS.threshold_backward_bits.default, (gradient, signs, 0)),
        (OPS.leaky_relu_backward_bits.default, (gradient, OPS.pack_bits(x, "positive"), 0.3, False)),
        (OPS.native_dropout_backward_bits.default, (gradient, flags, 1.25)),
        (OPS.masked_fill_bits.default, (gradient, flags, -3.0)),
        (OPS.unpack_bits.default, (flags, x.shape, x.stride())),
    ):
        kernel, fused = both(op, *arguments)
        torch.testing.assert_close(fused, kernel)


@settings(deadline=None)
@given(size=SIZES, seed=st.integers(0, 99))
def test_dropout(size: tuple[int, ...], seed: int) -> None:
    x = made(size, "rows", seed)
    kernel, fused = both(OPS.dropout.default, x, x > 0, 1.25)
    torch.testing.assert_close(fused, kernel)


@pytest.mark.parametrize("shape", [(7, 5), (3, 5, 4, 2)])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_the_gradient_of_cross_entropy(shape: tuple[int, ...], reduction: int) -> None:
    logits = made(shape, "rows", 0) if len(shape) == 4 else torch.randn(shape)
    target = torch.randint(5, (shape[0], *shape[2:]))
    target.view(-1)[0] = -100
    weight = torch.rand(5)
    log_probs = torch.log_softmax(logits, 1)
    forward = torch.ops.aten.nll_loss_forward if len(shape) == 2 else torch.ops.aten.nll_loss2d_forward
    loss, total = forward(log_probs, target, weight, reduction, -100)
    kernel, fused = both(
        OPS.cross_entropy_backward.default, torch.ones_like(loss), log_probs, target, weight, reduction, -100, total
    )
    torch.testing.assert_close(fused, kernel)


def test_every_op_that_stands_for_several_of_torchs_is_there() -> None:
    """What has no entry runs as a kernel of its own: that is meant for what packs bits, and what draws."""
    fused = {str(op).partition(".default")[0].removeprefix("memplan.") for op in TABLE if op.namespace == "memplan"}
    functional = {"dropout", "unpack_bits", "cross_entropy_backward"} | {
        name for name in dir(OPS) if name.endswith("_bits") and name != "pack_bits"
    }
    assert fused == functional


def test_kernels_keep_no_constants_of_their_own() -> None:
    """Bytes that a compiled step would hold all the time, beside what a plan counts."""
    bits = OPS.pack_bits(torch.randn(16) > 0, "bits")
    traced = inductor.traced(
        lambda held: [TABLE[OPS.unpack_bits.default](held, [16], [1])],
        [inductor.fake_tensor(bits.shape, bits.stride(), bits.dtype, mode := inductor.fake_mode())],
        mode,
        TABLE,
    )
    assert not [node for node in traced.graph.graph.nodes if node.op == "get_attr"]


NORMS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "batch": (torch.ops.aten._native_batch_norm_legit_functional.default, (True, 0.1, 1e-5)),
    "instances": (torch.ops.aten._native_batch_norm_legit.no_stats, (True, 0.1, 1e-5)),
    "layer": (torch.ops.aten.native_layer_norm.default, (1e-5,)),
    "group": (torch.ops.aten.native_group_norm.default, (4, 6, 35, 2, 1e-5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_have_the_statistics_of_the_kernel_in_mixed_precision(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    op, rest = NORMS[kind]
    x, weight, bias = torch.randn(4, 6, 5, 7).to(dtype) + 3, torch.rand(6) + 0.5, torch.randn(6)
    given: tuple[Any, ...] = x, weight, bias, *rest
    if kind == "batch":
        given = x, weight, bias, torch.zeros(6), torch.ones(6), *rest
    if kind == "layer":
        given = x, [7], weight[:1].expand(7).contiguous(), bias[:1].expand(7).contiguous(), *rest
    expected, found = op(*given), TABLE[op](*given)
    for kernel, ours in zip(expected, found, strict=True):
        assert ours.dtype == kernel.dtype
        torch.testing.assert_close(ours.reshape(kernel.shape), kernel)
