"""Work of the ops of `memplan.kernels` whose bytes are not only those of their operands and results."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from memplan.kernels import dice
from memplan.kernels.depthwise import parts_of
from memplan.planning.graph.joint_graph import Value
from memplan.planning.graph.op_schema import (
    CHANNEL_NORM,
    CHANNEL_NORM_BACKWARD,
    CLASS_SUMS,
    DEPTHWISE,
    DEPTHWISE_BACKWARD,
    DROPOUT_MASK,
    KERNELS,
    TOKEN_STATISTICS,
    TOKEN_STATISTICS_BACKWARD,
    itemsize,
)
from memplan.planning.graph.roofline import WORKS, Work
from memplan.trace.records import HOST


def _token_statistics(args: Sequence[Any]) -> Work:
    """Return the work of the op `TOKEN_STATISTICS`: a product writes the logits, and a kernel reads them."""
    arguments = dict(zip(KERNELS[TOKEN_STATISTICS], args, strict=True))
    return _work_on_logits(arguments["hidden"], arguments["weight"], products=1, passes=2)


def _token_statistics_backward(args: Sequence[Any]) -> Work:
    """Return the work of the op `TOKEN_STATISTICS_BACKWARD`. A product writes the logits again, a kernel writes their
    gradient over them, and a product computes each of the gradients of hidden states and weight that are wanted."""
    arguments = dict(zip(KERNELS[TOKEN_STATISTICS_BACKWARD], args, strict=True))
    products = 1 + sum(arguments["wanted"][:2])
    return _work_on_logits(arguments["hidden"], arguments["weight"], products=products, passes=2 + products)


def _work_on_logits(hidden: Value, weight: Value, *, products: int, passes: int) -> Work:
    """Return the work of ``products`` matrix products of the sizes tokens, features and classes, and of ``passes`` that
    each read or write all logits. ``hidden``: (tokens, features); ``weight``: (classes, features)."""
    (tokens, features), classes, size = hidden.shape, weight.shape[0], itemsize(hidden.dtype)
    flops = 2 * products * tokens * features * classes
    operand_bytes = size * features * (tokens + classes) * products
    return Work(flops, operand_bytes + passes * tokens * classes * size, hidden.dtype)


def _channel_norm(args: Sequence[Any]) -> Work:
    """Return the work of the op `CHANNEL_NORM`: it reads x for the moments, and once more to write y, with the residual
    where there is one."""
    arguments = dict(zip(KERNELS[CHANNEL_NORM], args, strict=True))
    return _work_of_passes(arguments["x"], passes=3 + (arguments["residual"] is not None))


def _channel_norm_backward(args: Sequence[Any]) -> Work:
    """Return the work of the op `CHANNEL_NORM_BACKWARD`: it reads the gradient, x and, where it is saved, y for the
    sums, and once more to write the gradients of x and the residual."""
    arguments = dict(zip(KERNELS[CHANNEL_NORM_BACKWARD], args, strict=True))
    return _work_of_passes(arguments["x"], passes=5 + 2 * (arguments["y"] is not None) + arguments["added"])


def _work_of_passes(x: Value, *, passes: int) -> Work:
    """Return the work of passes that each read or write x; its arithmetic takes less time than its bytes."""
    return Work(flops=0, bytes=passes * prod(x.shape) * itemsize(x.dtype), rate_dtype=x.dtype)


def _depthwise(args: Sequence[Any]) -> Work:
    """Return the work of the op `DEPTHWISE`: it reads x and writes y, each element once: it is in the cache when its
    neighbours read it."""
    arguments = dict(zip(KERNELS[DEPTHWISE], args, strict=True))
    x, weight = arguments["x"], arguments["weight"]
    steps = (arguments["stride"], arguments["padding"], arguments["dilation"])
    sizes = (
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(x.shape[2:], weight.shape[2:], *steps, strict=True)
    )
    return _depthwise_work(x, (*x.shape[:2], *sizes), weight, convolutions=1, partial_sums=0)


def _depthwise_backward(args: Sequence[Any]) -> Work:
    """Return the work of the op `DEPTHWISE_BACKWARD`. For the gradient of x it reads that of y; for that of the weight
    x and the gradient of y, and it writes sums of parts and reads them again."""
    arguments = dict(zip(KERNELS[DEPTHWISE_BACKWARD], args, strict=True))
    d_y, weight, wanted = arguments["d_y"], arguments["weight"], arguments["wanted"]
    of_x, of_weight, of_bias = wanted
    taps, partial_sums = prod(weight.shape[2:]), 0
    if of_weight or of_bias:
        parts, _, _ = parts_of(d_y.shape[0], prod(d_y.shape[2:]), taps)
        partial_sums = parts * (taps + of_bias) * d_y.shape[1]
    convolutions = of_x + (of_weight or of_bias)  # each as much work as the forward pass
    return _depthwise_work(arguments["x"], d_y.shape, weight, convolutions=convolutions, partial_sums=partial_sums)


def _depthwise_work(
    x: Value, result_shape: Sequence[int], weight: Value, *, convolutions: int, partial_sums: int
) -> Work:  # fmt: skip
    """Return the work of convolutions that each read or write x, the result and the weight once, and of float32 sums
    that are written and read. Tensor cores take no part in it, whatever the dtype: the rate is that of float32."""
    taps, size = prod(weight.shape[2:]), itemsize(x.dtype)
    moved_bytes = size * (prod(x.shape) + prod(result_shape) + prod(weight.shape)) * convolutions + 2 * 4 * partial_sums
    return Work(flops=2 * convolutions * prod(result_shape) * taps, bytes=moved_bytes, rate_dtype="float32")


def _class_sums(args: Sequence[Any]) -> Work:
    """Return the work of the op `CLASS_SUMS`: it reads logits and targets, and sums of parts are written and read
    again. For more classes than `LARGEST_CLASSES` plain torch runs, without parts."""
    arguments = dict(zip(KERNELS[CLASS_SUMS], args, strict=True))
    logits, targets = arguments["logits"], arguments["targets"]
    samples, classes, *sizes = logits.shape
    parts = -(-prod(sizes) // dice.part_length(classes)) if classes <= dice.LARGEST_CLASSES else 0
    operand_bytes = sum(prod(value.shape) * itemsize(value.dtype) for value in (logits, targets))
    sum_bytes = 4 * 4 * samples * classes * (1 + 2 * parts)  # four in float32 for each class of a sample
    return Work(flops=0, bytes=operand_bytes + sum_bytes, rate_dtype=logits.dtype)


def _dropout_mask(args: Sequence[Any]) -> Work:
    """Return the work of the op `DROPOUT_MASK`: it reads the input and writes a byte an element; on a card torch's
    kernel writes a product, too."""
    x, elements = args[0], prod(args[0].shape)
    tensors_of_input_size = 1 if x.place == HOST else 2
    return Work(flops=0, bytes=(tensors_of_input_size * itemsize(x.dtype) + 1) * elements, rate_dtype=x.dtype)


WORKS[CLASS_SUMS] = _class_sums
WORKS[DROPOUT_MASK] = _dropout_mask
WORKS[CHANNEL_NORM] = _channel_norm
WORKS[CHANNEL_NORM_BACKWARD] = _channel_norm_backward
WORKS[DEPTHWISE] = _depthwise
WORKS[DEPTHWISE_BACKWARD] = _depthwise_backward
WORKS[TOKEN_STATISTICS] = _token_statistics
WORKS[TOKEN_STATISTICS_BACKWARD] = _token_statistics_backward
