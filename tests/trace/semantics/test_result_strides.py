"""Every op of the table, on fake tensors and for real, in any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from environment import thinned
from hypothesis import given, settings
from hypothesis import strategies as st
from models.tensor_layouts import laid_out, shapes, strides
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from memplan.trace.semantics.cpu.strides import STRIDES
from memplan.trace.semantics.layout import in_own_format

Draw = Callable[..., torch.Tensor]
"""shape (and dtype) -> a tensor in some layout."""
aten = torch.ops.aten
INTEGERS = ("bitwise",)


def op_of(name: str) -> Any:
    _, packet, overload = name.split(".")
    return getattr(getattr(aten, packet), overload)


def told(results: Any) -> list[tuple[int, ...] | None]:
    return [one.stride() if isinstance(one, torch.Tensor) else None for one in tree_leaves(results)]


def hold(name: str, *args: Any) -> None:
    """Compare a corrected fake result with a real one, and its shape and dtype with the fake one's."""
    real = op_of(name)(*args)
    with FakeTensorMode() as mode:
        fakes = tree_map(lambda one: mode.from_tensor(one) if isinstance(one, torch.Tensor) else one, args)
        fake = op_of(name)(*fakes)
        corrected = STRIDES[name](fakes, {}, fake)
    assert told(corrected) == told(real)
    for one, other in zip(tree_leaves(corrected), tree_leaves(fake), strict=True):
        assert one is other is None or (one.shape, one.dtype) == (other.shape, other.dtype)


def weights(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.ones(x.shape[1]), torch.zeros(x.shape[1])]


def norm(draw: Draw, shape: list[int], *, training: bool = True) -> tuple[Any, ...]:
    x = draw(shape)
    return x, *weights(x), *weights(x)[::-1], training, 0.1, 1e-5


def norm_backward(draw: Draw, shape: list[int]) -> tuple[Any, ...]:
    x = draw(shape)
    one = torch.ones(shape[1])
    return draw(shape), x, one, one, one, one, one, True, 1e-5, [True, True, True]


def group_norm(draw: Draw, shape: list[int]) -> tuple[Any, ...]:
    x = in_own_format(draw(shape))
    return x, *weights(x), shape[0], shape[1], x[0, 0].numel(), 1, 1e-5


def group_norm_backward(draw: Draw, shape: list[int]) -> tuple[Any, ...]:
    x = in_own_format(draw(shape))
    one = torch.ones(shape[0], 1)
    return torch.empty_like(x), x, one, one, weights(x)[0], shape[0], shape[1], x[0, 0].numel(), 1, [True, True, True]


def convolution_backward(draw: Draw, shape: list[int]) -> tuple[Any, ...]:
    x, space = draw(shape), len(shape) - 2
    weight = torch.ones(5, shape[1], *[1] * space)
    if space == 2 and draw(shape).stride() != x.stride():
        weight = torch.empty_like(weight).as_strided(weight.shape, [shape[1], 1, shape[1], shape[1]])
    gradient = draw([shape[0], 5, *shape[2:]])
    form = ([1] * space, [0] * space, [1] * space, False, [0] * space, 1, [True, True, True])
    return gradient, x, weight, [5], *form


def of_images(of: int) -> Callable[[list[int]], list[int]]:
    """A batch of images, or volumes, of any sizes."""
    return lambda shape: [*shape, 1, 2, 3, 1][: of + 2]


def scaled(draw: Draw, shape: list[int]) -> tuple[Any, ...]:
    return draw(shape), [2 * n for n in shape[2:]]


def corners(draw: Draw, shape: list[int]) -> tuple[Any, ...]:
    return *scaled(draw, shape), False


def padded(draw: Draw, shape: list[int]) -> tuple[Any, ...]:
    return draw(shape), [1, 1] * (len(shape) - 2)


def padded_backward(draw: Draw, shape: list[int]) -> tuple[Any, ...]:
    return draw([*shape[:2], *(n + 2 for n in shape[2:])]), *padded(draw, shape)


def log_sigmoid_backward(draw: Draw, shape: list[int]) -> tuple[Any, ...]:
    return draw(shape), draw(shape), draw(shape)


def unlikely(draw: Draw, shape: list[int]) -> tuple[Any, ...]:
    """Losses of pixels."""
    x = draw(shape).contiguous()
    target = torch.zeros(shape[0], *shape[2:], dtype=torch.long)
    return torch.ones(()), x, target, None, 1, -100, torch.ones(())


def soft(draw: Draw, shape: list[int]) -> tuple[Any, ...]:
    return draw(shape), draw(shape), 1, torch.float32


def loss(draw: Draw, shape: list[int]) -> tuple[Any, ...]:
    return torch.ones(()), draw(shape), draw(shape), 1


def halves(draw: Draw, shape: list[int]) -> tuple[Any, ...]:
    return draw(shape), draw([shape[0], 2 * shape[1], *shape[2:]]), 1


IMAGE, VOLUME = of_images(2), of_images(3)
CASES: dict[str, Callable[[Draw, list[int]], tuple[Any, ...]]] = {
    "aten.view.default": lambda draw, shape: (laid_out([2, 1, 3, 2], [6, 1, 1, 3]), [1, 2, 3, 1, 2]),
    "aten._unsafe_view.default": lambda draw, shape: (laid_out([1, 4, 6], [24, 1, 4]), [1, 4, 2, 3]),
    "aten.native_batch_norm.default": norm,
    "aten._native_batch_norm_legit.default": norm,
    "aten._native_batch_norm_legit_functional.default": norm,
    "aten._native_batch_norm_legit.no_stats": lambda draw, shape: (*norm(draw, shape)[:3], True, 0.1, 1e-5),
    "aten.native_batch_norm_backward.default": norm_backward,
    "aten.native_group_norm.default": group_norm,
    "aten.native_group_norm_backward.default": group_norm_backward,
    "aten.native_layer_norm.default": lambda draw, shape: (draw(shape), shape[-1:], None, None, 1e-5),
    "aten.native_layer_norm_backward.default": lambda draw, shape: (
        *(draw(shape), draw(shape), shape[-1:], torch.ones(*shape[:-1], 1), torch.ones(*shape[:-1], 1)),
        *(None, None, [True, False, False]),
    ),
    "aten.convolution_backward.default": lambda draw, shape: convolution_backward(
        draw, [*shape[:5], 3][: max(len(shape), 3)]
    ),
    "aten.native_dropout.default": lambda draw, shape: (draw(shape), 0.5, True),
    "aten.native_dropout_backward.default": lambda draw, shape: (draw(shape), draw(shape, torch.bool), 2.0),
    "aten._prelu_kernel_backward.default": lambda draw, shape: (draw(shape), draw(shape), torch.ones([1] * len(shape))),
    "aten._prelu_kernel.default": lambda draw, shape: (draw(shape), torch.ones([1] * len(shape))),
    "aten.glu_backward.default": halves,
    "aten.nll_loss2d_backward.default": lambda draw, shape: unlikely(draw, IMAGE(shape)),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": lambda draw, shape: (
        (x := laid_out([2, 4, 3, 8], draw(IMAGE(shape)).stride()[:0] or [96, 8, 32, 1])),
        *(x, x),
    ),
    "aten.replication_pad2d_backward.default": lambda draw, shape: padded_backward(draw, IMAGE(shape)),
    "aten.replication_pad3d_backward.default": lambda draw, shape: padded_backward(draw, VOLUME(shape)),
    "aten.replication_pad3d.default": lambda draw, shape: padded(draw, VOLUME(shape)),
    "aten.reflection_pad3d.default": lambda draw, shape: padded(draw, [max(n, 2) for n in VOLUME(shape)]),
    "aten.roll.default": lambda draw, shape: (draw(shape), [1, 3], [len(shape) - 1, 0]),
    "aten.channel_shuffle.default": lambda draw, shape: (draw(IMAGE(shape)), 1),
    "aten.upsample_nearest2d.default": lambda draw, shape: scaled(draw, IMAGE(shape)),
    "aten.upsample_nearest3d.default": lambda draw, shape: scaled(draw, VOLUME(shape)),
    "aten.upsample_bilinear2d.default": lambda draw, shape: corners(draw, IMAGE(shape)),
    "aten.upsample_bicubic2d.default": lambda draw, shape: corners(draw, IMAGE(shape)),
    "aten.upsample_trilinear3d.default": lambda draw, shape: corners(draw, VOLUME(shape)),
    "aten.sort.default": lambda draw, shape: (draw(shape), 1),
    "aten.flip.default": lambda draw, shape: (draw(shape), [1]),
    "aten.linalg_vector_norm.default": lambda draw, shape: (draw(shape), 2.0, [1], True),
    "aten.full_like.default": lambda draw, shape: (draw(shape), 1),
    "aten._log_softmax.default": lambda draw, shape: (draw(shape), 1, False),
    "aten._log_softmax_backward_data.default": soft,
    "aten._softmax_backward_data.default": soft,
    "aten.mse_loss_backward.default": loss,
    "aten.smooth_l1_loss_backward.default": lambda draw, shape: (*loss(draw, shape), 1.0),
    "aten.huber_loss_backward.default": lambda draw, shape: (*loss(draw, shape), 1.0),
    "aten.where.self": lambda draw, shape: (draw(shape, torch.bool), draw(shape), draw(shape)),
    "aten.masked_fill.Scalar": lambda draw, shape: (draw(shape), draw(shape, torch.bool), 0),
    "aten.log_sigmoid_backward.default": log_sigmoid_backward,
}
"""Arguments of the ops that take more than tensors of one shape and numbers."""


def by_schema(name: str) -> Callable[[Draw, list[int]], tuple[Any, ...]]:
    def given_for(draw: Draw, shape: list[int]) -> tuple[Any, ...]:
        dtype = torch.int64 if name.split(".")[1].startswith(INTEGERS) else torch.float32
        args: list[Any] = []
        for argument in op_of(name)._schema.arguments:
            kind = str(argument.type)
            if argument.kwarg_only:
                break
            if "Tensor" in kind:
                args.append(draw(shape, dtype))
            elif argument.has_default_value() and argument.name not in ("min", "max"):
                args.append(argument.default_value)
            else:
                args.append({"bool": True}.get(kind, 1))
        return tuple(args)

    return given_for


@pytest.mark.parametrize("name", thinned(STRIDES, 4))
@settings(deadline=None, max_examples=2)
@given(data=st.data(), shape=shapes().filter(lambda shape: max([shape[0], *shape[2:]]) > 1))
def test_an_op_gives_its_result_the_strides_of_its_kernel(name: str, data: st.DataObject, shape: list[int]) -> None:
    def draw(sizes: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return laid_out(sizes, data.draw(strides(sizes)), dtype)

    hold(name, *CASES.get(name, by_schema(name))(draw, shape))


@pytest.mark.parametrize("name", ["mul", "add", "sub", "div", "ge", "eq"])
@settings(deadline=None, max_examples=2)
@given(data=st.data(), shape=shapes())
def test_a_number_beside_a_tensor(name: str, data: st.DataObject, shape: list[int]) -> None:
    hold(f"aten.{name}.Tensor", laid_out(shape, data.draw(strides(shape))), torch.ones(()))
    hold(f"aten.{name}.Scalar", laid_out(shape, data.draw(strides(shape))), 2)
