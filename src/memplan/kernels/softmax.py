"""Softmax of masked attention scores, and dropout of the probabilities.

For a row x of L scores, with a mask that is added, m, or that has another number f written where it is true:

    s = scale · x + m, or f where the mask is true     p = exp(s - max s) / Σ exp(s - max s)     y = p · k / (1 - q)

    g = dy · k / (1 - q)     dx = scale · p (g - Σ p · g), and 0 where f was written     dm = dx / scale, summed

with k of 0 or 1 for each element, drawn with the probability 1 - q of being 1. max and Σ are over the row, in float32,
or float64 for float64.

Saved for the backward pass, of b-byte elements and n of them: without dropout y, which the product with the values
saves anyway. With dropout, or where y is of another dtype than x: x, k as bits, n / 8 bytes, the mask, and max s and
Σ exp(s - max s), 8 bytes a row, from which p is computed again. p itself would be as large as x, but to be written
forward. Plain torch saves p, k as bytes on a card and as numbers on the CPU, and p once more in float32 where the
softmax is computed in it.

Bytes moved: forward reads x and writes y, 2 n b; backward reads dy and x (or y) and writes dx, 3 n b; each with
dropout the bits, too, and with a mask what it has of its own. That is the least. Rows longer than 8,192 are read twice,
the second time from the cache, which holds them.

k is drawn by torch, as `F.dropout` draws it, so that a step is the same with this function and without. torch's kernel
reads x and writes a byte an element and a product of y's size, 2 n b + n bytes; packing reads the bytes and writes the
bits, 1.125 n. So with dropout twice what is least is moved forward. Product and bytes are freed before y is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import custom_op

from memplan.errors import InputError
from memplan.kernels.launch import accumulated, block_of, jit, launch, launches, tl, warps_of

LARGEST_BLOCK = 8192
"""Elements of a row that a program holds; it goes over longer rows twice, half as many at a time."""

_TILE = 1024
"""Elements that a program takes at a time: several rows, where they are short."""
_LEAST_PIECE = 1 << 13
_PIECES = 32
"""The plain form computes so many pieces of a tensor one after the other, of at least `_LEAST_PIECE` elements."""


def softmax_dropout(
    x: Tensor,
    mask: Tensor | None = None,
    *,
    fill: float = float("-inf"),
    scale: float = 1.0,
    p: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``F.dropout(F.softmax(scale * x + mask, -1), p)``, or with ``x.masked_fill(mask, fill)`` for a boolean mask.

    Without dropout it saves its result alone for the backward pass, with dropout `x`, a bit an element and 8 bytes a
    row.

    Args:
        x: scores (..., L), such as (batch, heads, queries, keys).
        mask: broadcasts to x's shape. Floating point: added; gradients reach it. Boolean: where it is True, `fill`
            stands in the place of the score, which has no gradient there.
        fill: score of elements that a boolean mask leaves out. A row of -inf alone becomes NaN, as in torch.
        scale: factor of x before the mask; not 0.
        p: share of the probabilities that is set to 0, 0 to 1, drawn from torch's random state as `F.dropout` draws.
            Pass 0 in evaluation.
        dtype: of the result; by default x's.

    Returns:
        Probabilities of x's shape, those that are kept divided by 1 - p.

    Raises:
        InputError: a mask or options that do not fit, and under ``torch.vmap``.

    Example:
        >>> scores, causal = torch.randn(2, 4, 8, 8, requires_grad=True), torch.ones(8, 8).triu(1).bool()
        >>> softmax_dropout(scores, causal, scale=0.5, p=0.1).sum().backward()
        >>> bool(scores.grad[..., 0, 1:].any())
        False
    """
    dtype = x.dtype if dtype is None else dtype
    if x.dim() == 0 or not x.is_floating_point() or not dtype.is_floating_point:
        problem = f"x has the shape {tuple(x.shape)} and is of {x.dtype}, dtype is {dtype}"
        raise InputError(problem, expected="scores (..., L) of floats")
    if not 0.0 <= p <= 1.0:
        raise InputError(f"p is {p}", expected="a number from 0 to 1")
    if scale == 0 or not math.isfinite(scale):
        raise InputError(f"scale is {scale}", expected="a finite number other than 0")
    if mask is not None:
        _check_mask(x, mask)
        if mask.requires_grad:
            x = x.to(torch.promote_types(x.dtype, mask.dtype))  # its gradient is a sum of x's
    bits = None
    if p > 0:
        with torch.no_grad():
            # as `F.dropout` of the result draws
            like = x.detach() if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
            # of 1 nothing is drawn
            bits = x.new_zeros((x.numel() + 7) // 8, dtype=torch.uint8) if p == 1 else pack_flags(_drawn(like, p))
    return masked_softmax(x, mask, bits, fill, scale, p, dtype)[0]


def _drawn(like: Tensor, p: float) -> Tensor:
    """Which elements dropout keeps, as bytes."""
    try:
        return torch.native_dropout(like.contiguous(), p, True)[1]
    except RuntimeError as error:
        if "vmap: called random operation" in str(error):
            raise _under_vmap() from error
        raise


def _under_vmap() -> InputError:
    """Return the error for a call within `torch.vmap`."""
    return InputError(
        "memplan.kernels.softmax_dropout does not run under torch.vmap",
        do="Call it on the whole batch: any leading dimensions are taken",
    )


def _check_mask(x: Tensor, mask: Tensor) -> None:
    """Raise InputError unless the mask is boolean or floating point, and broadcasts to x's shape."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(f"mask is of {mask.dtype}", expected="torch.bool, or a floating-point dtype")
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.dim() > x.dim() or any(size not in (1, full) for size, full in sizes):
        raise InputError(f"mask has the shape {tuple(mask.shape)}", expected=f"one that broadcasts to {tuple(x.shape)}")


# The ops


@custom_op("memplan::pack_flags", mutates_args=())
def pack_flags(flags: Tensor) -> Tensor:
    """Pack a bool tensor, in the order of its elements, eight to a byte, the first as the lowest bit."""
    count = flags.numel()
    bits = flags.new_empty(-(-count // 8), dtype=torch.uint8)
    flags = flags.reshape(-1)
    if launches(flags):
        grid = (-(-bits.numel() // _TILE),)
        launch(pack_kernel, grid, flags.view(torch.uint8), bits, count, BLOCK=_TILE, num_warps=8)
        return bits
    weights = torch.arange(8, dtype=torch.uint8, device=flags.device)
    step = max(_LEAST_PIECE, count // _PIECES // 8 * 8)
    for first in range(0, count, step):
        piece = flags[first : first + step]
        if piece.numel() % 8:
            piece = torch.nn.functional.pad(piece, (0, -piece.numel() % 8))
        packed = (piece.view(torch.uint8).view(-1, 8) << weights).sum(1, dtype=torch.uint8)
        bits[first // 8 : first // 8 + packed.numel()] = packed
    return bits


@pack_flags.register_fake
def _(flags):
    return flags.new_empty((flags.numel() + 7) // 8, dtype=torch.uint8)


@custom_op("memplan::masked_softmax", mutates_args=())
def masked_softmax(
    x: Tensor, mask: Tensor | None, bits: Tensor | None, fill: float, scale: float, p: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """y, and for the backward pass max s and Σ exp(s - max s) of each row, (2, rows).

    The statistics are empty where the backward pass reads y.

    Args:
        x: scores (..., L).
        mask: as for `softmax_dropout`, or None.
        bits: which probabilities are kept, as `pack_flags` returns them; None to keep all.
        fill, scale, p: as for `softmax_dropout`.
        dtype: of y.
    """
    y, statistics = _empty_results(x, mask, bits, fill, scale, p, dtype)
    run = _softmax_in_triton if launches(x, y, mask, bits) else _softmax
    run(x.contiguous(), mask, bits, fill, scale, _kept_scale(p), y, statistics)
    return y, statistics


@masked_softmax.register_fake
def _empty_results(x, mask, bits, fill, scale, p, dtype):
    """Memory for y and the statistics: the op's results on fake tensors."""
    rows = 0 if _reads_result(x, bits, dtype) else x.shape[:-1].numel()
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(2, rows, dtype=accumulated(x.dtype))


def _reads_result(x: Tensor, bits: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the backward pass reads y instead of x."""
    return bits is None and dtype == x.dtype


@custom_op("memplan::masked_softmax_backward", mutates_args=())
def masked_softmax_backward(
    d_y: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    mask: Tensor | None,
    bits: Tensor | None,
    statistics: Tensor,
    fill: float,
    scale: float,
    p: float,
) -> Tensor:
    """Gradient of x from x, or from y, where the other is None. See `masked_softmax` for the rest."""
    return differentiate(None, d_y, x, y, mask, bits, statistics, fill, scale, p)


@masked_softmax_backward.register_fake
def _(d_y, x, y, mask, bits, statistics, fill, scale, p):
    """Memory for x's gradient: the op's result on fake tensors."""
    saved = y if x is None else x
    return saved.new_empty(saved.shape)


def differentiate(
    into: Tensor | None,
    d_y: Tensor,
    x: Tensor | None,
    y: Tensor | None,
    mask: Tensor | None,
    bits: Tensor | None,
    statistics: Tensor,
    fill: float,
    scale: float,
    p: float,
) -> Tensor:
    """As `masked_softmax_backward`, with x's gradient written to ``into``: new memory if it is None, or that of a
    contiguous ``d_y``, ``x`` or ``y``."""
    saved = y if x is None else x
    assert saved is not None
    d_x = saved.new_empty(saved.shape) if into is None else into
    run = _backward_in_triton if launches(d_y, saved, mask, bits) else _backward
    run(d_y.contiguous(), saved.contiguous(), x is None, mask, bits, statistics, fill, scale, _kept_scale(p), d_x)
    return d_x


def _kept_scale(p: float) -> float:
    """The factor of probabilities that are kept."""
    return 0.0 if p == 1 else 1 / (1 - p)


def _save(ctx, inputs, output):
    """Save y for the backward pass or, with dropout or in another dtype, x and the statistics (`torch.library` calls
    this after the op)."""
    x, mask, bits, ctx.fill, ctx.scale, ctx.p, dtype = inputs
    y, statistics = output
    ctx.mark_non_differentiable(statistics)
    ctx.set_materialize_grads(False)  # of the statistics
    from_y = _reads_result(x, bits, dtype)
    ctx.mask_shape = None if mask is None else (mask.shape, mask.dtype)
    # y has the probabilities: an added mask is not needed then, a boolean one says where the gradient is 0
    needed = mask if mask is not None and (mask.dtype == torch.bool or not from_y) else None
    ctx.save_for_backward(None if from_y else x, y if from_y else None, needed, bits, statistics)


def _differentiate(ctx, d_y, d_statistics):
    """Gradients of the op's arguments, in their order: x, mask, and None for the others."""
    if d_y is None:
        return None, None, None, None, None, None, None
    d_x = masked_softmax_backward(d_y, *ctx.saved_tensors, ctx.fill, ctx.scale, ctx.p)
    d_mask = None
    if ctx.needs_input_grad[1]:
        shape, dtype = ctx.mask_shape
        d_mask = (d_x.sum_to_size(shape) / ctx.scale).to(dtype)
    return d_x if ctx.needs_input_grad[0] else None, d_mask, None, None, None, None, None


masked_softmax.register_autograd(_differentiate, setup_context=_save)


def _refuse_vmap(info, in_dims, *args):
    raise _under_vmap()


pack_flags.register_vmap(_refuse_vmap)
masked_softmax.register_vmap(_refuse_vmap)


@dataclass(frozen=True)
class _Masked:
    """Scores as (samples, heads, queries, L), and a mask of that shape, whose strides may be 0."""

    shape: tuple[int, int, int, int]
    mask: Tensor | None

    @staticmethod
    def of(x: Tensor, mask: Tensor | None) -> _Masked:
        """Join leading dimensions of x to three (samples, heads, queries), as far as one stride of the mask steps
        through them. A mask that would need more than three is copied to x's shape."""
        *sizes, columns = x.shape
        if mask is None:
            return _Masked((1, 1, math.prod(sizes), columns), mask=None)
        mask = mask.expand(x.shape)
        if columns * mask.stride(-1) >= 1 << 31:  # the kernels count by int32 within a row
            mask = mask.contiguous()
        groups: list[tuple[int, int]] = []  # size and stride, outermost first
        for size, stride in zip(sizes, mask.stride(), strict=False):
            if size == 1:
                continue
            if groups and groups[-1][1] == stride * size:
                groups[-1] = (groups[-1][0] * size, stride)
            else:
                groups.append((size, stride))
        if len(groups) > 3:
            mask = mask.contiguous()
            groups = [(math.prod(sizes), columns)]
        groups = [(1, 0)] * (3 - len(groups)) + groups
        shape = (groups[0][0], groups[1][0], groups[2][0], columns)
        return _Masked(shape, mask.as_strided(shape, (*(stride for _, stride in groups), mask.stride(-1))))

    def pieces(self) -> Iterator[tuple[tuple[slice, slice, slice], int]]:
        """Ranges of samples, heads and queries to compute at a time, whose scores lie side by side, and the number of
        scores before them."""
        samples, heads, queries, columns = self.shape
        if 0 in self.shape:
            return
        most = max(_LEAST_PIECE, math.prod(self.shape) // _PIECES)
        # as many samples, heads and queries as have `most` scores, at least one of each
        steps = [max(1, most // max(1, size)) for size in (heads * queries * columns, queries * columns, columns)]
        steps = [min(steps[0], samples), min(steps[1], heads), min(steps[2], queries)]
        for sample in range(0, samples, steps[0]):
            for head in range(0, heads, steps[1]):
                for query in range(0, queries, steps[2]):
                    first = ((sample * heads + head) * queries + query) * columns
                    yield (
                        (
                            slice(sample, sample + steps[0]),
                            slice(head, head + steps[1]),
                            slice(query, query + steps[2]),
                        ),
                        first,
                    )


# In plain torch


def _scores(x: Tensor, mask: Tensor | None, fill: float, scale: float, dtype: torch.dtype) -> Tensor:
    """Scores of a piece after scale and mask, in new memory."""
    s = x.to(dtype, copy=True).mul_(scale)
    if mask is None:
        return s
    return s.masked_fill_(mask, fill) if mask.dtype == torch.bool else s.add_(mask)


def _flags(bits: Tensor, first: int, count: int) -> Tensor:
    """The bits of `count` elements from `first` on, as bool."""
    packed = bits[first // 8 : (first + count + 7) // 8]
    bit_numbers = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (packed[:, None] >> bit_numbers).bitwise_and_(1).view(-1)[first % 8 :][:count].view(torch.bool)


def _softmax(
    x: Tensor,
    mask: Tensor | None,
    bits: Tensor | None,
    fill: float,
    scale: float,
    kept_scale: float,
    y: Tensor,
    statistics: Tensor,
) -> None:
    """Write y, and the statistics if they have elements."""
    scores = _Masked.of(x, mask)
    x, y, rows = x.view(scores.shape), y.view(scores.shape), scores.shape[:3]
    for piece, first in scores.pieces():
        mask_part = None if scores.mask is None else scores.mask[piece]
        values = _scores(x[piece], mask_part, fill, scale, statistics.dtype)
        most = values.amax(-1, keepdim=True)
        values = values.sub_(most).exp_()
        total = values.sum(-1, keepdim=True)
        if statistics.numel():
            statistics[0].view(rows)[piece] = most.squeeze(-1)
            statistics[1].view(rows)[piece] = total.squeeze(-1)
        values.div_(total)
        if bits is not None:
            values.mul_(_flags(bits, first, values.numel()).view(values.shape)).mul_(kept_scale)
        y[piece] = values


def _backward(
    d_y: Tensor,
    saved: Tensor,
    from_y: bool,
    mask: Tensor | None,
    bits: Tensor | None,
    statistics: Tensor,
    fill: float,
    scale: float,
    kept_scale: float,
    d_x: Tensor,
) -> None:
    """Write the gradient of x: scale · p (g - Σ p · g), with g the gradient before dropout, and 0 where `fill` replaces
    the score. `saved` is y if `from_y`, else x, from which p is computed again."""
    scores = _Masked.of(saved, mask)
    d_y, saved, d_x, rows = d_y.view(scores.shape), saved.view(scores.shape), d_x.view(scores.shape), scores.shape[:3]
    for piece, first in scores.pieces():
        mask_part = None if scores.mask is None else scores.mask[piece]
        if from_y:
            p = saved[piece].to(statistics.dtype)
        else:
            most, total = (numbers.view(rows)[piece].unsqueeze(-1) for numbers in statistics)
            p = _scores(saved[piece], mask_part, fill, scale, statistics.dtype).sub_(most).exp_().div_(total)
        g = d_y[piece].to(statistics.dtype, copy=True)
        if bits is not None:
            g.mul_(_flags(bits, first, g.numel()).view(g.shape)).mul_(kept_scale)
        g.sub_((p * g).sum(-1, keepdim=True)).mul_(p).mul_(scale)
        if mask_part is not None and mask_part.dtype == torch.bool:
            g.masked_fill_(mask_part, 0.0)
        d_x[piece] = g


# In Triton


@jit
def pack_kernel(flags, bits, count, BLOCK: tl.constexpr):
    """Write BLOCK bytes of eight flags each; flags are bytes of 0 or 1."""
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)
    element = byte[:, None] * 8 + bit[None, :]
    flag = tl.load(flags + element, mask=element < count, other=0).to(tl.int32)
    packed = tl.sum(flag << bit[None, :], 1)
    tl.store(bits + byte, packed.to(tl.uint8), mask=byte * 8 < count)


@jit
def _masked_scores(x, mask, offset, mask_offset, inside, scale, fill, MASK: tl.constexpr):
    """Scores of a tile after scale and mask, -inf outside of the row, and whether `fill` replaces them (if MASK is
    "fill")."""
    s = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32) * scale
    masked = inside
    if MASK == "add":
        s += tl.load(mask + mask_offset, mask=inside, other=0.0).to(tl.float32)
    elif MASK == "fill":
        masked = tl.load(mask + mask_offset, mask=inside, other=0) != 0
        s = tl.where(masked, fill, s)
    return tl.where(inside, s, float("-inf")), masked


@jit
def _factors(bits, offset, inside, kept_scale):
    """Dropout's factor of each element of a tile: `kept_scale` or 0."""
    byte = tl.load(bits + (offset >> 3), mask=inside, other=0).to(tl.int32)
    return tl.where((byte >> (offset & 7).to(tl.int32)) & 1 != 0, kept_scale, 0.0)


@jit
def masked_softmax_kernel(
    x, mask, bits, y, most, total, rows, columns, heads, queries, mask_0, mask_1, mask_2, mask_3,
    scale, fill, kept_scale,
    MASK: tl.constexpr, DROPOUT: tl.constexpr, STATISTICS: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the probabilities of ROWS rows, and for the backward pass the largest score and the sum of exponentials of
    each. BLOCK elements of a row at a time, all of them if WHOLE.

    Rows are of (samples, heads, queries). ``mask_0`` to ``mask_3``: the mask's strides by sample, head, query and
    element; ``kept_scale``: factor of probabilities that dropout keeps; MASK: "none", "add", or "fill", where `fill`
    replaces scores.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    row_mask_offset = (row // queries // heads) * mask_0 + (row // queries % heads) * mask_1 + (row % queries) * mask_2
    column = tl.arange(0, BLOCK)
    if WHOLE:
        inside = present[:, None] & (column < columns)[None, :]
        offset = row[:, None] * columns + column[None, :]
        mask_offset = row_mask_offset[:, None] + column[None, :] * mask_3
        s, _ = _masked_scores(x, mask, offset, mask_offset, inside, scale, fill, MASK)
        m = tl.where(present, tl.max(s, 1), 0.0)
        s = tl.exp(s - m[:, None])
        t = tl.sum(s, 1)
        s *= (1.0 / tl.where(present, t, 1.0))[:, None]
        if DROPOUT:
            s *= _factors(bits, offset, inside, kept_scale)
        tl.store(y + offset, s.to(y.dtype.element_ty), mask=inside)
    else:
        m = tl.full((ROWS,), float("-inf"), tl.float32)
        t = tl.zeros((ROWS,), tl.float32)
        for first in range(0, columns, BLOCK):
            element = first + column
            inside = present[:, None] & (element < columns)[None, :]
            offset = row[:, None] * columns + element[None, :]
            mask_offset = row_mask_offset[:, None] + element[None, :] * mask_3
            s, _ = _masked_scores(x, mask, offset, mask_offset, inside, scale, fill, MASK)
            larger = tl.maximum(m, tl.max(s, 1))
            shift = tl.where(larger == float("-inf"), 0.0, larger)  # exp(-inf - -inf) would be NaN
            t = t * tl.exp(m - shift) + tl.sum(tl.exp(s - shift[:, None]), 1)
            m = larger
        m, inverse_total = tl.where(present, m, 0.0), 1.0 / tl.where(present, t, 1.0)
        for first in range(0, columns, BLOCK):
            element = first + column
            inside = present[:, None] & (element < columns)[None, :]
            offset = row[:, None] * columns + element[None, :]
            mask_offset = row_mask_offset[:, None] + element[None, :] * mask_3
            s, _ = _masked_scores(x, mask, offset, mask_offset, inside, scale, fill, MASK)
            s = tl.exp(s - m[:, None]) * inverse_total[:, None]
            if DROPOUT:
                s *= _factors(bits, offset, inside, kept_scale)
            tl.store(y + offset, s.to(y.dtype.element_ty), mask=inside)
    if STATISTICS:
        tl.store(most + row, m, mask=present)
        tl.store(total + row, t, mask=present)


@jit
def _probabilities(
    saved, mask, offset, mask_offset, inside, m, inverse_total, scale, fill, FROM_Y: tl.constexpr, MASK: tl.constexpr
):  # fmt: skip
    """Probabilities of a tile, 0 outside of the row, and whether `fill` replaces the scores. ``saved`` is y, which has
    the probabilities, if FROM_Y, else x; ``m`` and ``inverse_total``: the rows' largest score, and the inverse of their
    sum of exponentials."""
    if FROM_Y:
        p = tl.load(saved + offset, mask=inside, other=0.0).to(tl.float32)
        masked = inside
        if MASK == "fill":
            masked = tl.load(mask + mask_offset, mask=inside, other=0) != 0
    else:
        s, masked = _masked_scores(saved, mask, offset, mask_offset, inside, scale, fill, MASK)
        p = tl.exp(s - m[:, None]) * inverse_total[:, None]
    return p, masked


@jit
def masked_softmax_backward_kernel(
    d_y, saved, mask, bits, most, total, d_x, rows, columns, heads, queries, mask_0, mask_1, mask_2, mask_3,
    scale, fill, kept_scale,
    FROM_Y: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the scores of ROWS rows: scale · p (g - Σ p · g), with g the gradient before dropout. p is
    `saved` (y) if FROM_Y, else computed again from `saved` (x). Reads a tile before it is written, so that d_x may be
    d_y or `saved`. Other arguments are as for `masked_softmax_kernel`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    row_mask_offset = (row // queries // heads) * mask_0 + (row // queries % heads) * mask_1 + (row % queries) * mask_2
    column = tl.arange(0, BLOCK)
    m = tl.zeros((ROWS,), tl.float32)
    inverse_total = tl.zeros((ROWS,), tl.float32)
    if not FROM_Y:
        m = tl.load(most + row, mask=present, other=0.0)
        inverse_total = 1.0 / tl.load(total + row, mask=present, other=1.0)
    dot = tl.zeros((ROWS,), tl.float32)
    if not WHOLE:
        for first in range(0, columns, BLOCK):
            element = first + column
            inside = present[:, None] & (element < columns)[None, :]
            offset = row[:, None] * columns + element[None, :]
            mask_offset = row_mask_offset[:, None] + element[None, :] * mask_3
            p, _ = _probabilities(saved, mask, offset, mask_offset, inside, m, inverse_total, scale, fill, FROM_Y, MASK)
            g = tl.load(d_y + offset, mask=inside, other=0.0).to(tl.float32)
            if DROPOUT:
                g *= _factors(bits, offset, inside, kept_scale)
            dot += tl.sum(p * g, 1)
    for first in range(0, columns, BLOCK):
        element = first + column
        inside = present[:, None] & (element < columns)[None, :]
        offset = row[:, None] * columns + element[None, :]
        mask_offset = row_mask_offset[:, None] + element[None, :] * mask_3
        p, masked = _probabilities(
            saved, mask, offset, mask_offset, inside, m, inverse_total, scale, fill, FROM_Y, MASK
        )
        g = tl.load(d_y + offset, mask=inside, other=0.0).to(tl.float32)
        if DROPOUT:
            g *= _factors(bits, offset, inside, kept_scale)
        if WHOLE:
            dot += tl.sum(p * g, 1)
        g = scale * p * (g - dot[:, None])
        if MASK == "fill":
            g = tl.where(masked, 0.0, g)
        tl.store(d_x + offset, g.to(d_x.dtype.element_ty), mask=inside)


def _tile(columns: int) -> dict[str, int | bool]:
    """Compile-time arguments of the kernels for rows of this length."""
    block = block_of(columns, LARGEST_BLOCK)
    if columns > block:  # rows that no program holds as a whole are gone over in smaller blocks
        block //= 2
    rows = max(1, _TILE // block)
    return {"WHOLE": columns <= block, "ROWS": rows, "BLOCK": block, "num_warps": warps_of(rows * block)}


def _of_mask(scores: _Masked, x: Tensor) -> tuple[Tensor, tuple[int, ...], str]:
    """The kernels' mask, its strides, and how it is applied: MASK of the kernels."""
    if scores.mask is None:
        return x, (0, 0, 0, 0), "none"
    if scores.mask.dtype == torch.bool:
        return scores.mask.view(torch.uint8), scores.mask.stride(), "fill"
    return scores.mask, scores.mask.stride(), "add"


def _softmax_in_triton(
    x: Tensor,
    mask: Tensor | None,
    bits: Tensor | None,
    fill: float,
    scale: float,
    kept_scale: float,
    y: Tensor,
    statistics: Tensor,
) -> None:
    """As `_softmax`, by a Triton kernel."""
    scores, tile = _Masked.of(x, mask), _tile(x.shape[-1])
    rows, (mask_memory, strides, kind) = math.prod(scores.shape[:3]), _of_mask(scores, x)
    most, total = statistics if statistics.numel() else (y, y)
    launch(
        masked_softmax_kernel, (-(-rows // tile["ROWS"]),),
        x, mask_memory, x if bits is None else bits, y, most, total, rows, x.shape[-1], *scores.shape[1:3], *strides,
        scale, fill, kept_scale,
        MASK=kind, DROPOUT=bits is not None, STATISTICS=statistics.numel() > 0, **tile,
    )  # fmt: skip


def _backward_in_triton(
    d_y: Tensor,
    saved: Tensor,
    from_y: bool,
    mask: Tensor | None,
    bits: Tensor | None,
    statistics: Tensor,
    fill: float,
    scale: float,
    kept_scale: float,
    d_x: Tensor,
) -> None:
    """As `_backward`, by a Triton kernel."""
    scores, tile = _Masked.of(saved, mask), _tile(saved.shape[-1])
    rows, (mask_memory, strides, kind) = math.prod(scores.shape[:3]), _of_mask(scores, saved)
    most, total = (d_x, d_x) if from_y else statistics
    launch(
        masked_softmax_backward_kernel, (-(-rows // tile["ROWS"]),),
        d_y, saved, mask_memory, saved if bits is None else bits, most, total, d_x, rows, saved.shape[-1],
        *scores.shape[1:3], *strides, scale, fill, kept_scale,
        FROM_Y=from_y, MASK=kind, DROPOUT=bits is not None, **tile,
    )  # fmt: skip
