"""Work of the ops of `memplan.kernels`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memplan import kernels
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph.joint_graph import Value
from memplan.planning.graph.op_schema import (
    CHANNEL_NORM,
    CHANNEL_NORM_BACKWARD,
    CLASS_SUMS,
    DEPTHWISE,
    DEPTHWISE_BACKWARD,
    DROPOUT_MASK,
    TOKEN_STATISTICS,
    TOKEN_STATISTICS_BACKWARD,
)
from memplan.planning.graph.roofline import WORKS, work_of
from memplan.planning.ops import kernel_costs  # noqa: F401  # pyright: ignore[reportUnusedImport]  # fills the table

TOKENS, WIDTH, CLASSES = 96, 64, 3000


def tensor(*shape: int) -> Value:
    return Value(0, "v", "result", 0, 0, shape, (), "float32")


@pytest.mark.parametrize("trained", [True, False])
def test_work_is_that_of_the_products_and_of_the_logits(trained: bool) -> None:
    """By hand, as derived at the top of memplan.kernels.cross_entropy: backward computes the logits once more, their
    gradient over them, then that of hidden, and of a weight that is trained. Each product is read or written once."""
    hidden, weight, rows = tensor(TOKENS, WIDTH), tensor(CLASSES, WIDTH), tensor(TOKENS)
    product, logits, operands = 2 * TOKENS * WIDTH * CLASSES, 4 * TOKENS * CLASSES, 4 * WIDTH * (TOKENS + CLASSES)
    forward = WORKS[TOKEN_STATISTICS]((hidden, weight, None, rows, 0.0, 1.0, False))
    assert (forward.flops, forward.bytes) == (product, 2 * logits + operands)
    wanted, products = [True, trained, False], 2 + trained
    backward = WORKS[TOKEN_STATISTICS_BACKWARD]((rows, rows, rows, hidden, weight, None, rows, rows, 0.0, 1.0, wanted))
    assert (backward.flops, backward.bytes) == (products * product, (2 + products) * logits + products * operands)


@pytest.mark.parametrize("added", [True, False])
def test_norms_of_channels_read_their_input_twice(added: bool) -> None:
    """By hand, as derived at the top of memplan.kernels.channel_norms."""
    x, vector = tensor(2, 8, 4, 4), tensor(8)
    residual, size = x if added else None, 4 * 2 * 8 * 4 * 4
    forward = WORKS[CHANNEL_NORM]((x, residual, vector, vector, 0, "relu", 0.0, 1e-5))
    assert (forward.flops, forward.bytes) == (0, (4 if added else 3) * size)
    of = (x, residual, vector, vector, vector, vector, 0, "relu", 0.0, 1e-5, added)
    assert WORKS[CHANNEL_NORM_BACKWARD]((x, *of)).bytes == (8 if added else 5) * size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_depthwise_convolutions_move_little_more_than_their_operands(dtype: str) -> None:
    """By hand: x is halved in each dimension. The least is x and y forward, and in the backward pass for each of two
    gradients once more. A filter of 27 has parts of 1,080 positions or more."""
    samples, channels, side, taps, size = 2, 32, 64, 27, 4 if dtype == "float32" else 2
    x = Value(0, "x", "result", 0, 0, (samples, channels, side, side, side), (), dtype)
    y = Value(0, "y", "result", 0, 0, (samples, channels, side // 2, side // 2, side // 2), (), dtype)
    weight = Value(0, "w", "parameter", 0, 0, (channels, 1, 3, 3, 3), (), dtype)
    steps = [2] * 3, [1] * 3, [1] * 3
    positions = samples * channels * (side // 2) ** 3
    least = size * (9 * positions + channels * taps)
    forward = WORKS[DEPTHWISE]((x, weight, None, *steps))
    assert (forward.flops, forward.bytes) == (2 * taps * positions, least)
    backward = WORKS[DEPTHWISE_BACKWARD]((y, x, weight, *steps, [True, True, False]))
    sums = 2 * 4 * samples * channels * taps * ((side // 2) ** 3 // 1080)
    assert (backward.flops, backward.bytes) == (2 * forward.flops, 2 * least + sums)
    assert backward.bytes <= 1.1 * 2 * least
    frozen = WORKS[DEPTHWISE_BACKWARD]((y, x, weight, *steps, [True, False, False]))
    assert (frozen.flops, frozen.bytes) == (forward.flops, forward.bytes)


class Layer(nn.Conv2d):
    """A convolution of one channel to three, and a loss of its result."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__(1, 3, 1)
        self.loss = loss

    def forward(self, input: Tensor) -> Tensor:
        return self.loss(super().forward(input))


def bytes_of(loss: Callable[[Tensor], Tensor]) -> dict[str, int]:
    """Bytes of the ops of kernels in a step with 2 x 3 x 64 x 64 numbers, by op."""
    graph = capture(Layer(loss), call_of((torch.randn(2, 1, 64, 64),), {})).graph
    return {op.target.split(".")[1]: work_of(graph, op).bytes for op in graph.ops if op.target.startswith("memplan.")}


def test_attention_reads_and_writes_each_tensor_once() -> None:
    """By hand, as derived at the top of memplan.kernels.softmax: scores, probabilities, bits, a mask, and of each row
    two numbers. Without dropout at most a tenth more than the scores and probabilities alone; with it torch's kernel
    reads the scores and writes a byte of each element, on a card also a product, and what packs the bytes moves 9/8."""
    mask = torch.ones(64, 64).tril() == 0
    elements = 2 * 3 * 64 * 64
    found = bytes_of(lambda scores: kernels.softmax_dropout(scores, mask).square().sum())
    assert found["masked_softmax"] == 2 * 4 * elements + 64 * 64 <= 1.1 * 2 * 4 * elements
    assert found["masked_softmax_backward"] == 3 * 4 * elements + 64 * 64 <= 1.1 * 3 * 4 * elements
    found = bytes_of(lambda scores: kernels.softmax_dropout(scores, mask, p=0.1).square().sum())
    beside = elements // 8 + 64 * 64 + 8 * (elements // 64)
    assert found["masked_softmax"] == 2 * 4 * elements + beside
    assert found["masked_softmax_backward"] == 3 * 4 * elements + beside
    assert found["dropout_mask"] == (4 + 1) * elements
    on_card = Value(0, "x", "result", 0, 0, (2, 3, 64, 64), (), "float32", place="cuda:0")
    assert WORKS[DROPOUT_MASK]((on_card, 0.1)).bytes == (2 * 4 + 1) * elements
    assert found["pack_flags"] == elements + elements // 8


def test_losses_of_segmentation_read_logits_and_targets_once() -> None:
    """By hand, as derived at the top of memplan.kernels.dice; the sums are four of each class of a sample."""
    labels = torch.randint(3, (2, 64, 64))
    found = bytes_of(lambda logits: kernels.dice_cross_entropy(logits, labels))
    logits, targets, sums = 4 * 2 * 3 * 64 * 64, 8 * 2 * 64 * 64, 4 * 4 * 2 * 3
    assert found["class_sums"] == logits + targets + sums + 2 * sums  # a part of 16 tiles of 256 positions
    assert found["class_sums_backward"] == 2 * logits + targets + sums


@pytest.mark.parametrize("classes", [2, 60, 64, 512])
def test_sums_of_a_loss_of_many_classes_are_few_bytes(classes: int) -> None:
    """Those of parts are at most a 25th of the logits and the targets, also of bfloat16."""
    logits = Value(0, "z", "result", 0, 0, (2, classes, 64, 64), (), "bfloat16")
    targets = Value(0, "t", "result", 0, 0, (2, 64 * 64), (), "int64")
    least = 2 * 2 * classes * 64 * 64 + 8 * 2 * 64 * 64
    assert least < WORKS[CLASS_SUMS]((logits, targets, -100, False)).bytes <= 1.04 * least
