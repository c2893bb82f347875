"""Linear layer and cross-entropy, or log-probabilities, without ever holding the logits of the whole vocabulary.

With N tokens, D features and V classes, the logits z = hidden weightᵀ + bias are N x V: for a language model the
largest tensor of the step by far. All that a loss needs of them are three numbers a token:

    lse = log Σ_v exp(l_v)     picked = l_target     total = Σ_v l_v     where l = scale · softcap · tanh(z / softcap)

    -log p_target = lse - picked     uniform part of label smoothing = lse - total / V

They are computed over parts of the vocabulary, `width` classes at a time: a product N x width into a buffer that all
parts share, and one pass over it, which updates the three numbers. The parts' lse are joined by the usual rescaling:
lse ← m + log(exp(lse - m) + Σ exp(l - m)) with m the new maximum.

Saved for the backward pass: hidden and weight, which live anyway, and lse, 4 N bytes. The backward pass computes each
part's logits again (four products in all; a loss that keeps the logits has three) and writes over them

    dz = (dlse · exp(l - lse) + dpicked · [v = target] + dtotal) · scale · (1 - tanh²(z / softcap))

from which come dweight = dzᵀ hidden, of this part alone, so that it is written once, without a sum over parts, and
dhidden += dz weight, summed in float32.

Why parts of the vocabulary and not of the tokens: a part of the tokens would add to the gradient of the whole weight
each time, and in float32 to be as exact, so it would move 8 V D bytes a part and hold 4 V D more. Here the sum is of
hidden's size.

Bytes moved by the kernels of this file, of b-byte elements, apart from the products: forward reads each logit once,
N V b; backward reads and writes each once, 2 N V b. Both are the least for logits in memory. Each product of logits
writes N V b more and reads weight once and hidden V / width times. Beside operands and gradients a call holds
N · width · b bytes, where width is D (at least 1,024), so about as much as hidden; backward the sum in float32, too.
Plain torch holds N V b and, for the softmax, as much again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.library import custom_op

from memplan.errors import InputError
from memplan.kernels.launch import accumulated, block_of, jit, launch, launches, tl, warps_of

LEAST_WIDTH = 1024
"""Classes of a part of the vocabulary, at least: narrower products leave most of a card idle."""

LARGEST_BLOCK = 4096


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """``F.cross_entropy(F.linear(hidden, weight, bias), targets)`` without ever holding the logits.

    Beside its arguments and their gradients it takes about one more `hidden` in the forward pass and up to four in the
    backward pass, where D is at least 1,024. Gradients reach `hidden`, `weight` and `bias`; those not needed cost
    nothing.

    Args:
        hidden: (..., D), what the last layer returns before the head.
        weight: (V, D), the head's. Of hidden's dtype, unless within autocast.
        targets: (...), class indices, int64. One outside of 0 to V - 1 that is not `ignore_index` makes the loss NaN.
        bias: (V,), the head's.
        ignore_index: targets of this value add neither to the loss nor to the mean's count. Where all have it, the
            mean is NaN, as in torch, and the gradients are zero.
        label_smoothing: as in torch, 0 to 1: the share of the target that is spread over all classes.
        softcap: logits z become softcap · tanh(z / softcap), as in Gemma 2.
        reduction: "mean" over targets that are not ignored, "sum", or "none": the shape of targets.

    Returns:
        The loss, in float32 (float64 for float64).

    Raises:
        InputError: shapes or dtypes that do not fit, and under ``torch.vmap``.

    Example:
        >>> hidden, head = torch.randn(2, 5, 8, requires_grad=True), torch.randn(100, 8, requires_grad=True)
        >>> cross_entropy(hidden, head, torch.randint(100, (2, 5))).backward()
        >>> head.grad.shape
        torch.Size([100, 8])
    """
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f"reduction is {reduction!r}", expected="'mean', 'sum' or 'none'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise InputError(f"label_smoothing is {label_smoothing}", expected="a number from 0 to 1")
    smoothed = label_smoothing > 0
    lse, picked, total = _of_tokens(hidden, weight, targets, bias, softcap, scale=1.0, summed=smoothed)
    losses = lse - picked
    if smoothed:
        losses = torch.lerp(losses, lse - total / weight.shape[0], label_smoothing)
    counted = targets != ignore_index
    losses = torch.where(counted, losses, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probability of each token of `ids` under the logits of `hidden`, without ever holding these.

    Args:
        hidden: (..., D), what the last layer returns before the head.
        weight: (V, D), the head's. Of hidden's dtype, unless within autocast.
        ids: (...), class indices, int64. Outside of 0 to V - 1 the result is NaN.
        bias: (V,), the head's.
        softcap: logits z become softcap · tanh(z / softcap), as in Gemma 2.
        temperature: logits are divided by it, after the soft cap.

    Returns:
        log softmax(logits / temperature)[ids], of the shape of ids, in float32 (float64 for float64).

    Raises:
        InputError: shapes or dtypes that do not fit, and under ``torch.vmap``.
    """
    if not temperature > 0:
        raise InputError(f"temperature is {temperature}", expected="a number above 0")
    lse, picked, _ = _of_tokens(hidden, weight, ids, bias, softcap, scale=1.0 / temperature, summed=False)
    return picked - lse


def _of_tokens(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    scale: float,
    summed: bool,
) -> tuple[Tensor, ...]:
    """Check the arguments of a loss, and return three numbers of each token in the shape of `ids`.

    These are the log-sum-exp of its logits, the logit of its class in `ids`, and the sum of its logits, which is empty
    unless `summed`. `softcap` is None for none, `scale` a factor of the logits after it.
    """
    if weight.dim() != 2 or hidden.shape != (*ids.shape, weight.shape[1]):
        shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(ids.shape)}"
        raise InputError(f"The shapes are {shapes}", expected="(..., D), (V, D) and (...)")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(f"bias has the shape {tuple(bias.shape)}", expected=f"({weight.shape[0]},)")
    if ids.dtype != torch.int64:
        raise InputError(f"The class indices are of {ids.dtype}", expected="torch.int64")
    if softcap is not None and not softcap > 0:
        raise InputError(f"softcap is {softcap}", expected="a number above 0, or None")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        # as F.linear; weight is cast part by part, so that no copy of it is held
        hidden = hidden.to(torch.get_autocast_dtype(device))
    elif weight.dtype != hidden.dtype or (bias is not None and bias.dtype != hidden.dtype):
        raise InputError(
            f"hidden is of {hidden.dtype}, weight of {weight.dtype}", expected="the same dtype", do="Use autocast"
        )
    lse, picked, total = token_statistics(
        hidden.reshape(-1, weight.shape[1]), weight, bias, ids.reshape(-1), softcap or 0.0, scale, summed
    )
    return lse.view(ids.shape), picked.view(ids.shape), total.view(ids.shape) if summed else total


# The ops


@custom_op("memplan::token_statistics", mutates_args=())
def token_statistics(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, softcap: float, scale: float, summed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what a loss needs of the logits of N tokens, a part of the vocabulary at a time.

    Args:
        hidden, weight, bias: of the linear layer: N x D, V x D, and V or None.
        ids: class index of each token.
        softcap: bound of the logits; 0 for none.
        scale: factor of the logits, the inverse of the temperature.
        summed: whether to compute total; else it is empty.

    Returns:
        lse, the log-sum-exp of each token's logits; picked, the logit of its class, NaN for a class that does not
        exist; total, the sum of its logits. N numbers each.
    """
    lse, picked, total = _empty_statistics(hidden, summed)
    lse.fill_(float("-inf"))
    picked.fill_(float("nan"))
    total.zero_()
    absorb = _absorb_in_triton if launches(hidden, weight) else _absorb
    with torch.autocast(hidden.device.type, enabled=False):
        for part, _, logits in _parts_of_logits(hidden, weight, bias):
            absorb(logits, ids - part.start, lse, picked, total, softcap, scale, summed)
    return lse, picked, total


@token_statistics.register_fake
def _(hidden, weight, bias, ids, softcap, scale, summed):
    return _empty_statistics(hidden, summed)


def _empty_statistics(hidden: Tensor, summed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for lse, picked and total of each token of `hidden`; total has no elements unless `summed`."""
    tokens, dtype = hidden.shape[0], accumulated(hidden.dtype)
    lse, picked = hidden.new_empty(tokens, dtype=dtype), hidden.new_empty(tokens, dtype=dtype)
    return lse, picked, hidden.new_empty(tokens if summed else 0, dtype=dtype)


@custom_op("memplan::token_statistics_backward", mutates_args=())
def token_statistics_backward(
    d_lse: Tensor,
    d_picked: Tensor,
    d_total: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    lse: Tensor,
    softcap: float,
    scale: float,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; empty where `wanted` is False, which has these three in order.

    Args:
        d_lse, d_picked, d_total: gradients of the results of `token_statistics`.
        lse: log-sum-exp of each token's logits, saved from the forward pass.
        hidden, weight, bias, ids, softcap, scale: arguments of `token_statistics`.
    """
    d_hidden, d_weight, d_bias = _empty_gradients(hidden, weight, bias, wanted)
    d_lse, d_picked, d_total = d_lse.contiguous(), d_picked.contiguous(), d_total.contiguous()
    separate_sums = accumulated(hidden.dtype) != hidden.dtype  # half precision is summed in float32
    sums = hidden.new_empty(d_hidden.shape, dtype=accumulated(hidden.dtype)) if separate_sums else d_hidden
    sums.zero_()
    differentiate = _differentiate_in_triton if launches(hidden, weight) else _differentiate
    with torch.autocast(hidden.device.type, enabled=False):
        for part, weight_part, logits in _parts_of_logits(hidden, weight, bias):
            differentiate(logits, ids - part.start, lse, d_lse, d_picked, d_total, softcap, scale)
            if wanted[1]:
                _multiply(logits.t(), hidden, d_weight[part])
            if wanted[2]:
                d_bias[part] = logits.sum(0, dtype=sums.dtype)
            if not wanted[0]:
                continue
            if separate_sums:
                sums.add_(logits @ weight_part)
            else:
                sums.addmm_(logits, weight_part)
    if separate_sums:
        d_hidden.copy_(sums)
    return d_hidden, d_weight, d_bias


@token_statistics_backward.register_fake
def _(d_lse, d_picked, d_total, hidden, weight, bias, ids, lse, softcap, scale, wanted):
    return _empty_gradients(hidden, weight, bias, wanted)


def _empty_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients of hidden, weight and bias, without elements where `wanted` is False."""
    operands = hidden, weight, hidden if bias is None else bias
    d_hidden, d_weight, d_bias = (
        x.new_empty(x.shape if want else (0,)) for x, want in zip(operands, wanted, strict=True)
    )
    return d_hidden, d_weight, d_bias


def _save(ctx, inputs, output):
    """Save the operands and lse for the backward pass (`torch.library` calls this after the op)."""
    hidden, weight, bias, ids, ctx.softcap, ctx.scale, _ = inputs
    ctx.save_for_backward(hidden, weight, bias, ids, output[0])


def _backward(ctx, d_lse, d_picked, d_total):
    """Gradients of the op's arguments, in their order: hidden, weight, bias, and None for the others."""
    hidden, weight, bias, ids, lse = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    gradients = token_statistics_backward(
        d_lse, d_picked, d_total, hidden, weight, bias, ids, lse, ctx.softcap, ctx.scale, wanted
    )
    operand_gradients = (gradient if want else None for gradient, want in zip(gradients, wanted, strict=True))
    return *operand_gradients, None, None, None, None


token_statistics.register_autograd(_backward, setup_context=_save)


@token_statistics.register_vmap
def _(info, in_dims, *args):
    raise InputError(
        "memplan.kernels.cross_entropy and log_probs do not run under torch.vmap",
        do="Call them on the whole batch: any leading dimensions are taken",
    )


def _parts_of_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield for each part of the vocabulary its classes as a slice, their rows of weight in hidden's dtype, and the
    tokens' logits of these classes, N x width.

    All parts' logits lie in the same buffer. The caller may overwrite them.
    """
    tokens, features = hidden.shape
    classes = weight.shape[0]
    width = min(classes, max(LEAST_WIDTH, features))
    buffer = hidden.new_empty(tokens * width)
    for first in range(0, classes, width):
        part = slice(first, min(first + width, classes))
        weight_part = weight[part].to(hidden.dtype)
        logits = buffer[: tokens * weight_part.shape[0]].view(tokens, weight_part.shape[0])
        if bias is None:
            torch.mm(hidden, weight_part.t(), out=logits)
        else:
            torch.addmm(bias[part].to(hidden.dtype), hidden, weight_part.t(), out=logits)
        yield part, weight_part, logits
        del weight_part


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, also where out is of another dtype."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


# In plain torch


def _absorb(
    logits: Tensor,
    ids: Tensor,
    lse: Tensor,
    picked: Tensor,
    total: Tensor,
    softcap: float,
    scale: float,
    summed: bool,
) -> None:
    """Add the logits of a part of the vocabulary to the statistics of each token, in place.

    These are `lse`, the log-sum-exp of its logits, `picked`, the logit of its class, and, if `summed`, `total`, their
    sum. Class indices in `ids` count from the part's first class. Of the logits, `softcap` is a bound (0: none) and
    `scale` a factor.
    """
    values = logits.to(lse.dtype)
    if softcap:
        values = (values / softcap).tanh_().mul_(softcap)
    if scale != 1.0:
        values = values * scale
    torch.logaddexp(lse, values.logsumexp(1), out=lse)
    column, in_part = _column_of(ids, logits)
    picked.copy_(torch.where(in_part, values.gather(1, column).squeeze(1), picked))
    if summed:
        total += values.sum(1)


def _differentiate(
    logits: Tensor,
    ids: Tensor,
    lse: Tensor,
    d_lse: Tensor,
    d_picked: Tensor,
    d_total: Tensor,
    softcap: float,
    scale: float,
) -> None:
    """Overwrite the logits of a part of the vocabulary with their gradient.

    `lse` is the log-sum-exp of each token's logits. `d_lse`, `d_picked` and `d_total` are gradients of it, of the logit
    of the token's class, and of the sum of its logits (empty if nothing reads it). Class indices in `ids` count from
    the part's first class.
    """
    values = logits.to(lse.dtype)
    slopes = scale
    if softcap:
        tanh = (values / softcap).tanh_()
        slopes = scale * (1 - tanh * tanh)
        values = tanh.mul_(softcap)
    gradient = torch.exp(values * scale - lse[:, None]).mul_(d_lse[:, None])
    if d_total.numel():
        gradient += d_total[:, None]
    column, in_part = _column_of(ids, logits)
    gradient.scatter_add_(1, column, torch.where(in_part, d_picked, 0.0)[:, None])
    logits.copy_(gradient.mul_(slopes))


def _column_of(ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The column of each token's class in this part's logits, N x 1, and whether the class is in this part, N. If it is
    not, the column is any valid one."""
    last = logits.shape[1] - 1
    return ids.clamp(0, last)[:, None], (ids >= 0) & (ids <= last)


# In Triton


@jit
def _capped(logits, softcap):
    """softcap · tanh(logits / softcap), with exponentials of negative numbers only, which cannot overflow."""
    small = tl.exp(-2.0 * tl.abs(logits) / softcap)
    size = softcap * (1.0 - small) / (1.0 + small)
    return tl.where(logits < 0, -size, size)


@jit
def absorb_kernel(
    logits, ids, lse, picked, total, width, softcap, scale,
    CAPPED: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update lse, picked and total of a token by its logits of a part of the vocabulary, which are read once.

    One program for each token, a row of `width` logits. `ids` count from the part's first class.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    largest = tl.load(lse + row)  # log-sum-exp of the parts before: the same as a single logit of that size
    sum_of_exps = 1.0
    sum_of_values = 0.0
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < width
        values = tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32)
        if CAPPED:
            values = _capped(values, softcap)
        values *= scale
        if SUMMED:
            sum_of_values += tl.sum(tl.where(inside, values, 0.0))  # pyright: ignore[reportOperatorIssue]  # a tensor
        values = tl.where(inside, values, float("-inf"))
        larger = tl.maximum(largest, tl.max(values))
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # all of them -inf: exp(-inf - -inf) would be NaN
        sum_of_exps = sum_of_exps * tl.exp(largest - shift) + tl.sum(tl.exp(values - shift))
        largest = larger
    tl.store(lse + row, largest + tl.log(sum_of_exps))
    if SUMMED:
        tl.store(total + row, tl.load(total + row) + sum_of_values)
    target = tl.load(ids + row)
    if (target >= 0) & (target < width):
        value = tl.load(logits + target).to(tl.float32)
        if CAPPED:
            value = _capped(value, softcap)
        tl.store(picked + row, value * scale)


@jit
def differentiate_kernel(
    logits, ids, lse, d_lse, d_picked, d_total, width, softcap, scale,
    CAPPED: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite BLOCK logits of a token with their gradient. A program for each token, a row of `width` logits, and
    each block of them; `ids` count from the first class of the row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32)
    slopes = scale
    if CAPPED:
        values = _capped(values, softcap)
        slopes = scale * (1.0 - (values / softcap) * (values / softcap))
    gradient = tl.exp(values * scale - tl.load(lse + row)) * tl.load(d_lse + row)
    gradient += tl.where(columns == tl.load(ids + row), tl.load(d_picked + row), 0.0)
    if SUMMED:
        gradient += tl.load(d_total + row)
    tl.store(logits + columns, (gradient * slopes).to(logits.dtype.element_ty), mask=inside)


def _absorb_in_triton(
    logits: Tensor,
    ids: Tensor,
    lse: Tensor,
    picked: Tensor,
    total: Tensor,
    softcap: float,
    scale: float,
    summed: bool,
) -> None:
    """As `_absorb`, by a kernel with a program for each token."""
    tokens, width = logits.shape
    block = block_of(width, LARGEST_BLOCK)
    # without `total`, the kernel gets `lse` in its place, which it then does not touch
    launch(
        absorb_kernel, (tokens,),
        logits, ids, lse, picked, total if summed else lse, width, softcap, scale,
        CAPPED=softcap > 0, SUMMED=summed, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip


def _differentiate_in_triton(
    logits: Tensor,
    ids: Tensor,
    lse: Tensor,
    d_lse: Tensor,
    d_picked: Tensor,
    d_total: Tensor,
    softcap: float,
    scale: float,
) -> None:
    """As `_differentiate`, by a Triton kernel."""
    tokens, width = logits.shape
    block = block_of(width, LARGEST_BLOCK)
    summed = d_total.numel() > 0
    launch(
        differentiate_kernel, (tokens, -(-width // block)),
        logits, ids, lse, d_lse, d_picked, d_total if summed else lse, width, softcap, scale,
        CAPPED=softcap > 0, SUMMED=summed, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
