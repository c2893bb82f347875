"""Dice loss and cross-entropy of segmentation, without probabilities and one-hot targets of the image's size.

For logits z of N samples, C classes and S positions, with the class t of each position, p = softmax(z) over classes,
and sums over the positions of a sample that are not ignored:

    I_c = Σ [t = c] p_c     P_c = Σ p_c, or Σ p_c²     T_c = Σ [t = c]     L_c = Σ [t = c] (log Σ_k exp(z_k) - z_c)

    Dice = 1 - mean_c (2 I_c + a) / (P_c + T_c + b)     cross-entropy = Σ_c L_c / Σ_c T_c

where Dice is of each sample, or of the sums over all of them. The four sums, N x C each, are what the op returns; the
losses are made of them in plain torch, so that class weights and the like cost nothing. With their gradients dI, dP and
dL, of which T has none:

    e_c = dP_c + [t = c] dI_c     dz_c = p_c (e_c - Σ_k p_k e_k) + dL_t (p_c - [t = c])

and 0 where the position is ignored; with squares 2 p_c dP_c stands in the place of dP_c.

Saved for the backward pass: z and t. p is computed again, from the classes of a position, which a program holds at
once. Plain torch saves the softmax, the log-softmax and the one-hot targets, each of z's size or twice that.

Bytes moved, of b-byte elements and n of them, and of i-byte class indices: forward reads z and t, n b + N S i; backward
reads both and writes dz, 2 n b + N S i. That is the least. Sums are made of parts of 512 positions or more, in a fixed
order, without atomics: 16 bytes a class and part are written and read again, of a large z in float32 0.8 % each time.

Held: besides z, t and dz nothing of their size, and an engine that knows that nothing else reads z has dz written over
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from memplan.errors import InputError
from memplan.kernels.launch import accumulated, jit, launch, launches, tl, warps_of

LARGEST_CLASSES = 512
"""Classes that a program of the kernels holds; more go through the plain form."""

_TILE = 1024
"""Elements that a program takes at a time."""
_TILES = 16
"""Tiles of a part whose sums a program makes, and more where a tile has few positions."""
_LEAST_PART = 512
"""Positions of a part, at least: so that the parts' sums are few bytes."""
_LEAST_PIECE = 1 << 13
_PIECES = 32
"""The plain form computes so many pieces of a tensor one after the other, of at least `_LEAST_PIECE` elements."""


def dice_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    dice_factor: float = 1.0,
    cross_entropy_factor: float = 1.0,
    include_background: bool = True,
    batch: bool = False,
    squared: bool = False,
    jaccard: bool = False,
    smooth_numerator: float = 1e-5,
    smooth_denominator: float = 1e-5,
    constant: float = 1.0,
    weight: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Dice loss plus cross-entropy, as MONAI's ``DiceCELoss(softmax=True, to_onehot_y=True)``; saves `logits` and
    `targets` alone for the backward pass.

    With ``constant=0``, ``include_background=False`` and ``batch`` its ``batch_dice`` it is nnU-Net's
    ``DC_and_CE_loss``.

    Args:
        logits: (N, C, ...), with two or more classes, contiguous or channels last; other layouts are copied.
        targets: class indices (N, ...) or (N, 1, ...); those of floating point are converted, as MONAI does. One
            outside of 0 to C - 1 that is not `ignore_index` makes the loss NaN.
        dice_factor, cross_entropy_factor: factors of the two losses.
        include_background: whether class 0 counts in the Dice loss.
        batch: whether the Dice loss is of sums over the samples, instead of the mean of each sample's.
        squared: whether the denominator has squares of probabilities.
        jaccard: whether the union stands in the denominator, instead of the mean of the two sets.
        smooth_numerator, smooth_denominator: added to each.
        constant: the Dice loss is this less the Dice coefficient.
        weight: (C,), of each class, in both losses.
        ignore_index: positions of this class count in neither loss. Where all have it, the loss is NaN.

    Returns:
        The loss, in float32 (float64 for float64).

    Raises:
        InputError: shapes or dtypes that do not fit, and under ``torch.vmap``.

    Example:
        >>> logits = torch.randn(2, 3, 8, 8, 8, requires_grad=True)
        >>> dice_cross_entropy(logits, torch.randint(3, (2, 1, 8, 8, 8)), include_background=False).backward()
        >>> logits.grad.shape
        torch.Size([2, 3, 8, 8, 8])
    """
    _check(logits, targets, weight)
    if targets.is_floating_point():
        targets = targets.long()
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(logits.dim(), torch.contiguous_format)
    if not logits.is_contiguous() and not logits.is_contiguous(memory_format=last):
        logits = logits.contiguous()
    sums = class_sums(logits, targets.reshape(logits.shape[0], -1), ignore_index, squared)
    intersections, predicted, counts, losses = sums.unbind()
    of_classes, of_losses = counts.sum(0), losses.sum(0)
    if weight is not None:
        weight = weight.to(sums.dtype)
        of_classes, of_losses = of_classes * weight, of_losses * weight
    cross_entropy = of_losses.sum() / of_classes.sum()
    if batch:
        intersections, predicted, counts = (sums.sum(0, keepdim=True) for sums in (intersections, predicted, counts))
    if not include_background:
        intersections, predicted, counts = (sums[:, 1:] for sums in (intersections, predicted, counts))
        weight = None if weight is None else weight[1:]
    denominators = predicted + counts
    if jaccard:
        denominators = 2 * (denominators - intersections)
    dice = constant - (2 * intersections + smooth_numerator) / (denominators + smooth_denominator)
    if weight is not None:
        dice = dice * weight
    return dice_factor * dice.mean() + cross_entropy_factor * cross_entropy


def _check(logits: Tensor, targets: Tensor, weight: Tensor | None) -> None:
    """Raise InputError if shapes or dtypes do not fit."""
    if logits.dim() < 2 or not logits.is_floating_point() or logits.shape[1] < 2 or logits.numel() == 0:
        raise InputError(
            f"logits have the shape {tuple(logits.shape)} and are of {logits.dtype}",
            expected="(N, C, ...) of floats, with two or more classes and a position",
        )
    samples, _, *positions = logits.shape
    if tuple(targets.shape) not in ((samples, *positions), (samples, 1, *positions)):
        raise InputError(
            f"targets have the shape {tuple(targets.shape)}",
            expected=f"{(samples, *positions)}, class indices",
            do="Pass the label map, not one-hot targets",
        )
    if targets.dtype == torch.bool or targets.is_complex():
        raise InputError(f"targets are of {targets.dtype}", expected="integers")
    if weight is not None and weight.shape != logits.shape[1:2]:
        raise InputError(f"weight has the shape {tuple(weight.shape)}", expected=f"{tuple(logits.shape[1:2])}")


# The ops


@custom_op("memplan::class_sums", mutates_args=())
def class_sums(logits: Tensor, targets: Tensor, ignore_index: int, squared: bool) -> Tensor:
    """Four sums over the positions of each sample and class, (4, N, C), in float32 (float64 for float64): of the
    probabilities of the class where it is the target (I), of its probabilities (P), the number of positions where it is
    the target (T), and their cross-entropy (L).

    Args:
        logits: (N, C, ...), contiguous or channels last.
        targets: class indices (N, S), of any integer dtype.
        ignore_index: positions of this class count in no sum.
        squared: whether the second sum is of squares.
    """
    sums = _empty_sums(logits, targets, ignore_index, squared)
    fits = logits.shape[1] <= LARGEST_CLASSES
    (_sums_in_triton if fits and launches(logits, targets) else _sums)(logits, targets, ignore_index, squared, sums)
    return sums


@class_sums.register_fake
def _empty_sums(logits, targets, ignore_index, squared):
    return logits.new_empty((4, *logits.shape[:2]), dtype=accumulated(logits.dtype))


@custom_op("memplan::class_sums_backward", mutates_args=())
def class_sums_backward(d_sums: Tensor, logits: Tensor, targets: Tensor, ignore_index: int, squared: bool) -> Tensor:
    """Gradient of the logits, in their layout, from that of the sums, (4, N, C). See `class_sums` for the rest."""
    return differentiate(None, d_sums, logits, targets, ignore_index, squared)


@class_sums_backward.register_fake
def _(d_sums, logits, targets, ignore_index, squared):
    return torch.empty_like(logits)


def differentiate(
    into: Tensor | None, d_sums: Tensor, logits: Tensor, targets: Tensor, ignore_index: int, squared: bool
) -> Tensor:
    """As `class_sums_backward`, with the gradient written to ``into``: new memory if it is None, or that of
    ``logits``."""
    d_logits = torch.empty_like(logits) if into is None else into
    fits = logits.shape[1] <= LARGEST_CLASSES
    run = _backward_in_triton if fits and launches(logits, targets) else _backward
    run(d_sums.contiguous(), logits, targets, ignore_index, squared, d_logits)
    return d_logits


def _save(ctx, inputs, output):
    """Save logits and targets for the backward pass (`torch.library` calls this after the op)."""
    logits, targets, ctx.ignore_index, ctx.squared = inputs
    ctx.save_for_backward(logits, targets)


def _differentiate(ctx, d_sums):
    return class_sums_backward(d_sums, *ctx.saved_tensors, ctx.ignore_index, ctx.squared), None, None, None


class_sums.register_autograd(_differentiate, setup_context=_save)


@class_sums.register_vmap
def _(info, in_dims, *args):
    raise InputError(
        "memplan.kernels.dice_cross_entropy does not run under torch.vmap",
        do="Call it on the whole batch",
    )


# In plain torch


def _pieces(logits: Tensor, targets: Tensor) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Yield sample, positions, logits (C, positions) and targets (positions,) of a piece at a time."""
    samples, classes = logits.shape[:2]
    whole = logits.flatten(2) if logits.dim() > 2 else logits[:, :, None]
    step = max(1, max(_LEAST_PIECE, logits.numel() // _PIECES) // classes)
    for sample in range(samples):
        for first in range(0, whole.shape[2], step):
            positions = slice(first, first + step)
            yield sample, positions, whole[sample, :, positions], targets[sample, positions]


def _sums(logits: Tensor, targets: Tensor, ignore_index: int, squared: bool, sums: Tensor) -> None:
    """Write for each sample and class the sums of `class_sums`, added up in float64."""
    total = sums.new_zeros(sums.shape, dtype=torch.float64)
    classes = torch.arange(logits.shape[1], device=logits.device)[:, None]
    for sample, _, piece_logits, piece_targets in _pieces(logits, targets):
        log_p = piece_logits.to(sums.dtype).log_softmax(0)
        counted = (piece_targets != ignore_index)[None, :]
        is_target = (classes == piece_targets) & counted
        is_invalid = (counted & ((piece_targets < 0) | (piece_targets >= logits.shape[1]))).any()
        intersections, predicted, counts, losses = total[:, sample].unbind()  # views
        losses -= torch.where(is_target, log_p, 0.0).sum(1, dtype=torch.float64)
        losses += torch.where(is_invalid, float("nan"), 0.0)
        p = log_p.exp_().mul_(counted)
        intersections += torch.where(is_target, p, 0.0).sum(1, dtype=torch.float64)
        predicted += (p.square_() if squared else p).sum(1, dtype=torch.float64)
        counts += is_target.sum(1)
        del log_p, p
    sums.copy_(total)


def _backward(
    d_sums: Tensor, logits: Tensor, targets: Tensor, ignore_index: int, squared: bool, d_logits: Tensor
) -> None:
    """Write the gradient of the logits, given that of the sums, a piece at a time.

    With e = d_predicted + (d_intersections where the class is the target): d_logits = p (e - Σ p e) + d_loss (p - 1
    where the class is the target, else p), with sums over classes; 0 where the position is ignored.
    """
    classes = torch.arange(logits.shape[1], device=logits.device)[:, None]
    results = _pieces(d_logits, targets)
    for (sample, _, piece_logits, piece_targets), (_, _, out, _) in zip(_pieces(logits, targets), results, strict=True):
        d_intersections, d_predicted, _, d_losses = d_sums[:, sample, :, None]
        p = piece_logits.to(d_sums.dtype).softmax(0)
        counted = (piece_targets != ignore_index)[None, :]
        is_target = (classes == piece_targets) & counted
        gradient = torch.where(is_target, d_intersections, 0.0)
        gradient += 2 * p * d_predicted if squared else d_predicted
        gradient.sub_((p * gradient).sum(0)).mul_(p)
        d_loss = torch.where(is_target, d_losses, 0.0).sum(0)
        gradient += p.sub_(is_target.to(p.dtype)).mul_(d_loss)
        out.copy_(gradient.mul_(counted))
        del p, gradient


# In Triton: logits as (N, C, S), whose classes or positions lie side by side


@jit
def class_sums_kernel(
    logits, targets, sums, classes, positions, parts, length, class_stride, position_stride, ignored,
    SQUARED: tl.constexpr, CLASSES: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Write the sums of `class_sums` over a part of the positions of a sample, (4, programs, classes).

    One program for each part, of ``length`` positions; a sample has ``parts``. Class ``ignored`` does not count.
    """
    sample_part = tl.program_id(0)
    sample = (sample_part // parts).to(tl.int64)
    begin = (sample_part % parts) * length
    end = tl.minimum(begin + length, positions)
    of_class = tl.arange(0, CLASSES)
    present = of_class < classes
    class_offset = sample * classes * positions + of_class.to(tl.int64)[:, None] * class_stride
    intersections = tl.zeros((CLASSES, POSITIONS), tl.float32)
    predicted = tl.zeros((CLASSES, POSITIONS), tl.float32)
    counts = tl.zeros((CLASSES, POSITIONS), tl.float32)
    losses = tl.zeros((CLASSES, POSITIONS), tl.float32)
    for first in range(begin, end, POSITIONS):
        position = first + tl.arange(0, POSITIONS)
        inside = position < end
        offset = class_offset + position.to(tl.int64)[None, :] * position_stride
        z = tl.load(logits + offset, mask=present[:, None] & inside[None, :], other=0.0).to(tl.float32)
        z = tl.where(present[:, None], z, float("-inf"))
        t = tl.load(targets + sample * positions + position, mask=inside, other=0).to(tl.int64)
        counted = inside & (t != ignored)
        is_target = (of_class[:, None] == t[None, :]) & counted[None, :] & present[:, None]
        z -= tl.max(z, 0, keep_dims=True)
        p = tl.exp(z)
        total = tl.sum(p, 0, keep_dims=True)
        p = tl.where(counted[None, :], p / total, 0.0)
        intersections += tl.where(is_target, p, 0.0)
        predicted += p * p if SQUARED else p
        counts += tl.where(is_target, 1.0, 0.0)
        losses += tl.where(is_target, tl.log(total) - z, 0.0)
        is_invalid = counted & ((t < 0) | (t >= classes))
        losses = tl.where(is_invalid[None, :], float("nan"), losses)
    result_offset = sample_part.to(tl.int64) * classes + of_class
    sums_stride = tl.num_programs(0).to(tl.int64) * classes
    tl.store(sums + result_offset, tl.sum(intersections, 1), mask=present)
    tl.store(sums + sums_stride + result_offset, tl.sum(predicted, 1), mask=present)
    tl.store(sums + 2 * sums_stride + result_offset, tl.sum(counts, 1), mask=present)
    tl.store(sums + 3 * sums_stride + result_offset, tl.sum(losses, 1), mask=present)


@jit
def class_sums_backward_kernel(
    d_sums, logits, targets, d_logits, classes, positions, tiles, sums_stride, class_stride, position_stride, ignored,
    SQUARED: tl.constexpr, CLASSES: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the logits of POSITIONS positions of a sample; reads them all before it writes any, so that
    d_logits may be logits. `sums_stride`: numbers of each of the four sums in d_sums. The formula is in `_backward`."""
    sample_tile = tl.program_id(0)
    sample = (sample_tile // tiles).to(tl.int64)
    position = (sample_tile % tiles) * POSITIONS + tl.arange(0, POSITIONS)
    inside = position < positions
    of_class = tl.arange(0, CLASSES)
    present = of_class < classes
    offset = sample * classes * positions
    offset += of_class.to(tl.int64)[:, None] * class_stride + position.to(tl.int64)[None, :] * position_stride
    z = tl.load(logits + offset, mask=present[:, None] & inside[None, :], other=0.0).to(tl.float32)
    z = tl.where(present[:, None], z, float("-inf"))
    t = tl.load(targets + sample * positions + position, mask=inside, other=0).to(tl.int64)
    counted = inside & (t != ignored)
    is_target = (of_class[:, None] == t[None, :]) & counted[None, :]
    p = tl.exp(z - tl.max(z, 0, keep_dims=True))
    p /= tl.sum(p, 0, keep_dims=True)
    d_sums_of_class = d_sums + sample * classes + of_class
    d_intersection = tl.load(d_sums_of_class, mask=present, other=0.0)
    d_predicted = tl.load(d_sums_of_class + sums_stride, mask=present, other=0.0)
    d_loss = tl.load(d_sums_of_class + 3 * sums_stride, mask=present, other=0.0)
    gradient = tl.where(is_target, d_intersection[:, None], 0.0)
    gradient += 2.0 * p * d_predicted[:, None] if SQUARED else d_predicted[:, None]
    gradient = p * (gradient - tl.sum(p * gradient, 0, keep_dims=True))
    target_loss_gradient = tl.sum(tl.where(is_target, d_loss[:, None], 0.0), 0, keep_dims=True)
    gradient += target_loss_gradient * (p - tl.where(is_target, 1.0, 0.0))
    gradient = tl.where(counted[None, :], gradient, 0.0)
    tl.store(
        d_logits + offset, gradient.to(d_logits.dtype.element_ty), mask=present[:, None] & inside[None, :]
    )  # fmt: skip


def part_length(classes: int) -> int:
    """Positions of which a program makes sums."""
    return max(_LEAST_PART, _TILES * _positions_of_tile(classes))


def _positions_of_tile(classes: int) -> int:
    return max(1, _TILE // (1 << (classes - 1).bit_length()))


def _shape(logits: Tensor) -> tuple[int, int, tuple[int, int], dict[str, Any]]:
    """Classes, positions, the strides of each, and the compile-time arguments of the kernels."""
    classes, positions = logits.shape[1], logits.shape[2:].numel()
    strides = (positions, 1) if logits.is_contiguous() else (1, classes)
    classes_of_tile = 1 << (classes - 1).bit_length()
    positions_of_tile = _positions_of_tile(classes)
    return classes, positions, strides, {
        "CLASSES": classes_of_tile, "POSITIONS": positions_of_tile,
        "num_warps": warps_of(classes_of_tile * positions_of_tile),
    }  # fmt: skip


def _sums_in_triton(logits: Tensor, targets: Tensor, ignore_index: int, squared: bool, sums: Tensor) -> None:
    """As `_sums`, by a Triton kernel."""
    classes, positions, strides, tile = _shape(logits)
    length = part_length(classes)
    parts = -(-positions // length)
    of_parts = sums.new_empty(4, logits.shape[0], parts, classes)
    launch(
        class_sums_kernel, (logits.shape[0] * parts,),
        logits, targets.contiguous(), of_parts, classes, positions, parts, length, *strides, ignore_index,
        SQUARED=squared, **tile,
    )  # fmt: skip
    torch.sum(of_parts, 2, out=sums)


def _backward_in_triton(
    d_sums: Tensor, logits: Tensor, targets: Tensor, ignore_index: int, squared: bool, d_logits: Tensor
) -> None:
    """As `_backward`, by a Triton kernel."""
    classes, positions, strides, tile = _shape(logits)
    tiles = -(-positions // tile["POSITIONS"])
    launch(
        class_sums_backward_kernel, (logits.shape[0] * tiles,),
        d_sums, logits, targets.contiguous(), d_logits, classes, positions, tiles, logits.shape[0] * classes,
        *strides, ignore_index, SQUARED=squared, **tile,
    )  # fmt: skip
