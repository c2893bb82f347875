"""AdamW's and SGD's update of a parameter in one pass, with clipping, and of master weights packed beside it.

For a parameter p with the gradient g, the learning rate lr and the number t of the update; clip is a number on the
device, or 1:

    g ← clip · g, negated to maximize

    AdamW   p ← p (1 - lr · decay)     m ← m + (1 - β1) (g - m)     v ← β2 · v + ((1 - β2) g) g
            p ← p + (s · m) / (sqrt(v) / sqrt(1 - β2^t) + eps)      with s = -lr / (1 - β1^t)

    SGD     g ← g + decay · p          u ← momentum · u + (1 - dampening) g, in the first update g
            p ← p - lr · u, with Nesterov's momentum p - lr (g + momentum · u), without any p - lr · g

A bfloat16 p may have its float32 master weight packed beside it (`memplan.PackedMasters`): low, the low 16 bits of
master - p, as their bits are subtracted, and the few positions where that is 2^15 (ties), which int16 cannot hold. The
kernels restore the master weight, update that, and round it to the nearest.

Arithmetic is in float32, in the order of torch's single-tensor update on a CPU: the same products are added within one
rounding (fma), and all other operations round to the nearest. So the bits are the same on any card, and the same for
a master weight whether it is packed or not. SGD's, and AdamW's moments, are those of ``torch.optim`` on a CPU that has
fma; AdamW's parameters differ from these where MKL does not round a square root to the nearest. Torch's kernels for a
card differ in the last bits: its single-tensor AdamW multiplies by 1 / sqrt(1 - β2^t) and divides before it multiplies
by s, its fused one has no fma in its source and leaves them to the compiler.

Saved: nothing. Bytes moved, of n elements: AdamW in float32 reads p, g, m and v and writes p, m and v, 28 n; SGD with
momentum 20 n, without 12 n; of packed master weights with gradients in bfloat16 AdamW 26 n, SGD 18 n and 10 n, and
n / 8 for a bit an element that says where ties are, n / 4 if there were some before. Without those that is the least;
torch's single-tensor AdamW moves 80 n, and what clips the gradients 8 n before.

Held: a bit an element of packed master weights, twice where there were ties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import custom_op

from memplan.errors import InputError
from memplan.kernels.launch import DTYPES, accumulated, jit, launch, launches, tl, warps_of

_BLOCK = 1024
_PIECE = 1 << 20
"""The plain form updates so many elements at a time."""
_WORD = 32
"""Elements whose bits an int32 holds."""
_HALF = 1 << 15
"""Half of a rounding step of bfloat16, in rounding steps of float32."""


def adamw_step(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    clip: Tensor | None = None,
    low: Tensor | None = None,
    ties: Tensor | None = None,
) -> Tensor | None:
    """Update a parameter in place, as ``torch.optim.AdamW``. In float32 the bits are those of its single-tensor form.

    Args:
        parameter: of any shape, in float32, bfloat16, float16 or float64. Updated in place.
        gradient: of the parameter's shape and any of these dtypes; it stays as it is.
        exp_avg, exp_avg_sq: moments, of the parameter's shape and any of these dtypes, updated in place.
        step: number of this update, from 1 on.
        lr, betas, eps, weight_decay, maximize: as of ``torch.optim.AdamW``.
        clip: tensor of one number on the parameter's device, by which the gradient is multiplied in float32. It is read
            there, so that the host does not wait for it.
        low: low halves of float32 master weights of a bfloat16 parameter, int16, updated in place.
        ties: positions of low halves of 2^15, which int16 cannot hold, int64; None: there are none.

    Returns:
        With ``low`` the positions of ties after the update, ascending, of which a recording knows none; else None.

    Raises:
        InputError: shapes, dtypes or options that do not fit, and under ``torch.vmap``.

    Example:
        >>> weight, gradient = torch.ones(8, 8), torch.ones(8, 8)
        >>> norm = torch.nn.utils.get_total_norm([gradient])
        >>> moments = torch.zeros(2, 8, 8)
        >>> adamw_step(weight, gradient, *moments, step=1, lr=0.1, clip=(1 / (norm + 1e-6)).clamp(max=1))
        >>> weight[0, 0]
        tensor(0.8990)
    """
    _check(parameter, gradient, clip, low, ties, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    if step < 1 or not all(0 <= beta < 1 for beta in betas):
        raise InputError(f"step is {step}, betas {betas}", expected="a step from 1 on, and betas from 0 to below 1")
    with torch.no_grad():
        order = _order(parameter, exp_avg, exp_avg_sq, low)  # in which the tensors are contiguous, if they can be
        tensors = _permuted(order, parameter.detach(), gradient, exp_avg, exp_avg_sq, low)
        before, behind = _words(low, _ties_in(order, parameter.shape, ties))
        adamw(*tensors, before, behind, clip, step, lr, *betas, eps, weight_decay, maximize)
        return _ties_behind(behind, order, parameter.shape)


def sgd_step(
    parameter: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor | None = None,
    *,
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first: bool = False,
    clip: Tensor | None = None,
    low: Tensor | None = None,
    ties: Tensor | None = None,
) -> Tensor | None:
    """Update a parameter in place, as ``torch.optim.SGD``. In float32 the bits are those of its single-tensor form.

    Args:
        parameter, gradient, clip, low, ties: as for `adamw_step`.
        momentum_buffer: with momentum, of the parameter's shape, updated in place.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as of ``torch.optim.SGD``.
        first: whether this is the first update: the momentum buffer is written and not read.

    Returns:
        As `adamw_step`.

    Raises:
        InputError: shapes, dtypes or options that do not fit, and under ``torch.vmap``.

    Example:
        >>> weight = torch.ones(8)
        >>> sgd_step(weight, torch.ones(8), lr=0.5)
        >>> weight[0]
        tensor(0.5000)
    """
    _check(parameter, gradient, clip, low, ties, momentum_buffer=momentum_buffer)
    if (momentum_buffer is None) != (momentum == 0) or (nesterov and (momentum == 0 or dampening != 0)):
        buffer = "no" if momentum_buffer is None else "a"
        options = f"momentum is {momentum}, dampening {dampening}, nesterov {nesterov}, with {buffer} momentum_buffer"
        raise InputError(options, expected="a buffer with momentum alone, and nesterov with momentum and no dampening")
    with torch.no_grad():
        order = _order(parameter, momentum_buffer, low)
        tensors = _permuted(order, parameter.detach(), gradient, momentum_buffer, low)
        before, behind = _words(low, _ties_in(order, parameter.shape, ties))
        sgd(*tensors, before, behind, clip, lr, momentum, dampening, weight_decay, nesterov, maximize, first)
        return _ties_behind(behind, order, parameter.shape)


def _check(
    parameter: Tensor, gradient: Tensor, clip: Tensor | None, low: Tensor | None, ties: Tensor | None,
    **states: Tensor | None,
) -> None:  # fmt: skip
    """Raise InputError if the tensors do not fit each other. `states` are the optimizer's, by name."""
    floats = (*DTYPES, torch.float64)
    for name, tensor in {"parameter": parameter, "gradient": gradient, **states}.items():
        if tensor is not None and (tensor.shape != parameter.shape or tensor.dtype not in floats):
            problem = f"{name} is {tuple(tensor.shape)} of {tensor.dtype}"
            expected = f"the parameter's shape, {tuple(parameter.shape)}, in float32, bfloat16, float16 or float64"
            raise InputError(problem, expected=expected)
    if clip is not None and (clip.numel() != 1 or clip.dtype not in floats):
        raise InputError(f"clip is {tuple(clip.shape)} of {clip.dtype}", expected="one number, as a tensor")
    if low is not None:
        if parameter.dtype != torch.bfloat16:
            do = "Pass low with a bfloat16 parameter alone"
            raise InputError(f"parameter is of {parameter.dtype} and has low halves", expected="bfloat16", do=do)
        if low.shape != parameter.shape or low.dtype != torch.int16:
            expected = f"the parameter's shape, {tuple(parameter.shape)}, in int16"
            raise InputError(f"low is {tuple(low.shape)} of {low.dtype}", expected=expected)
    if ties is not None and (low is None or ties.dim() != 1 or ties.dtype != torch.int64):
        problem = f"ties is {tuple(ties.shape)} of {ties.dtype}{'' if low is not None else ', without low'}"
        raise InputError(problem, expected="one dimension of int64, with low")


# Layouts, such as channels last


def _order(*tensors: Tensor | None) -> list[int]:
    """Dimensions in the order of memory, if all tensors have the same and no gaps; else as they are."""
    present = [tensor for tensor in tensors if tensor is not None]
    strides = present[0].stride()
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    if all(tensor.permute(order).is_contiguous() for tensor in present):
        return order
    return list(range(len(strides)))


def _permuted(order: list[int], *tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors with dimensions in this order."""
    return [None if tensor is None else tensor.permute(order) for tensor in tensors]


def _ties_in(order: Sequence[int], sizes: Sequence[int], ties: Tensor | None) -> Tensor | None:
    """Return positions in a tensor of these sizes, flattened, as positions in the tensor with dimensions in this order,
    ascending."""
    if ties is None or list(order) == sorted(order):
        return ties
    indices, position = torch.unravel_index(ties, tuple(sizes)), torch.zeros_like(ties)
    for dim in order:
        position = position * sizes[dim] + indices[dim]
    return position.sort().values


def _ties_behind(behind: Tensor | None, order: Sequence[int], sizes: Sequence[int]) -> Tensor | None:
    """Positions of ties after the update, in the parameter's own order of dimensions; None if ``behind``, which has a
    bit for each element, is None."""
    if behind is None:
        return None
    back = sorted(range(len(order)), key=lambda dim: order[dim])
    return _ties_in(back, [sizes[dim] for dim in order], ties_of(behind))


# Ties, a bit for each element


def _words(low: Tensor | None, ties: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return (words before the update, words after it): int32 with a bit for each of 32 elements, set where the low
    half is a tie. None before if there are no ties, memory for those after the update; both None without low halves."""
    if low is None:
        return None, None
    behind = low.new_empty(-(-low.numel() // _WORD), dtype=torch.int32)
    if ties is None or len(ties) == 0:
        return None, behind
    bits = torch.ones_like(ties, dtype=torch.int32) << (ties % _WORD)
    return torch.zeros_like(behind).index_put_((ties // _WORD,), bits.to(torch.int32), accumulate=True), behind


@custom_op("memplan::ties_of", mutates_args=())
def ties_of(words: Tensor) -> Tensor:
    """Positions of the bits that are set, ascending, int64."""
    (nonzero_words,) = words.nonzero(as_tuple=True)
    row, bit = (words[nonzero_words, None] >> torch.arange(_WORD, device=words.device) & 1).nonzero(as_tuple=True)
    return nonzero_words[row] * _WORD + bit


@ties_of.register_fake
def _(words):
    """Positions of a number that depends on values: the op's result on fake tensors."""
    try:
        count = torch.library.get_ctx().new_dynamic_size()
    except RuntimeError:  # a recording, whose sizes are numbers
        count = 0
    return words.new_empty(count, dtype=torch.int64)


# The ops


@custom_op("memplan::adamw", mutates_args=("parameter", "exp_avg", "exp_avg_sq", "low", "behind"))
def adamw(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    low: Tensor | None,
    before: Tensor | None,
    behind: Tensor | None,
    clip: Tensor | None,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """As `adamw_step`. ``before``: words with a bit for each element, set where the low half is a tie, or None;
    ``behind``: memory for these words after the update."""
    tensors = (parameter, exp_avg, exp_avg_sq, low)
    step_size, root = -lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    if not _run_in_triton(gradient, *tensors):
        for piece in _pieces(parameter, gradient, low, before, behind, clip, exp_avg, exp_avg_sq):
            master, grad, (average, square) = piece.master, piece.gradient, piece.states
            if maximize:
                grad = -grad
            if weight_decay != 0:
                master.mul_(1 - lr * weight_decay)
            average.lerp_(grad, 1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            master.addcdiv_(average, (square.sqrt() / root).add_(eps), value=step_size)
            piece.store()
        return
    elements, words, clipped = _flat(parameter, low), behind if behind is not None else parameter, clip is not None
    share = _rounded(1 - beta1)
    small = abs(share) < 0.5  # else torch's `lerp_` counts from its end, the gradient
    launch(
        adamw_kernel, (-(-parameter.numel() // _BLOCK),),
        elements, gradient.contiguous(), exp_avg, exp_avg_sq, parameter if low is None else low,
        words if before is None else before, words, clip if clipped else parameter, parameter.numel(),
        1 - lr * weight_decay, share if small else share - 1, beta2, 1 - beta2, root, eps, step_size,
        PACKED=low is not None, TIES=before is not None, CLIP=clipped, MAXIMIZE=maximize, DECAY=weight_decay != 0,
        SMALL=small, BLOCK=_BLOCK, num_warps=warps_of(_BLOCK), enable_fp_fusion=False,
    )  # fmt: skip


@custom_op("memplan::sgd", mutates_args=("parameter", "momentum_buffer", "low", "behind"))
def sgd(
    parameter: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor | None,
    low: Tensor | None,
    before: Tensor | None,
    behind: Tensor | None,
    clip: Tensor | None,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first: bool,
) -> None:
    """As `sgd_step`. ``before`` and ``behind``: as for `adamw`."""
    if not _run_in_triton(gradient, parameter, momentum_buffer, low):
        for piece in _pieces(parameter, gradient, low, before, behind, clip, momentum_buffer):
            master, grad, buffer = piece.master, piece.gradient, next(iter(piece.states), None)
            if maximize:
                grad = -grad
            if weight_decay != 0:
                grad = grad.add(master, alpha=weight_decay)
            if buffer is not None:
                if first:
                    buffer.copy_(grad)
                else:
                    buffer.mul_(momentum).add_(grad, alpha=1 - dampening)
                grad = grad.add(buffer, alpha=momentum) if nesterov else buffer
            master.add_(grad, alpha=-lr)
            piece.store()
        return
    elements, words, clipped = _flat(parameter, low), behind if behind is not None else parameter, clip is not None
    launch(
        sgd_kernel, (-(-parameter.numel() // _BLOCK),),
        elements, gradient.contiguous(), parameter if momentum_buffer is None else momentum_buffer,
        parameter if low is None else low, words if before is None else before, words, clip if clipped else parameter,
        parameter.numel(), -lr, momentum, 1 - dampening, weight_decay,
        PACKED=low is not None, TIES=before is not None, CLIP=clipped, MAXIMIZE=maximize, DECAY=weight_decay != 0,
        MOMENTUM=momentum_buffer is not None, NESTEROV=nesterov, FIRST=first,
        BLOCK=_BLOCK, num_warps=warps_of(_BLOCK), enable_fp_fusion=False,
    )  # fmt: skip


@adamw.register_fake
def _(parameter, gradient, exp_avg, exp_avg_sq, low, before, behind, clip, *numbers):
    return None


@sgd.register_fake
def _(parameter, gradient, momentum_buffer, low, before, behind, clip, *numbers):
    return None


def _refuse_vmap(info, in_dims, *args):
    raise InputError(
        "memplan.kernels.adamw_step and sgd_step do not run under torch.vmap",
        do="Call them on the stacked parameters: any shape is taken",
    )


adamw.register_vmap(_refuse_vmap)
sgd.register_vmap(_refuse_vmap)


def _run_in_triton(gradient: Tensor, *tensors: Tensor | None) -> bool:
    """Whether the kernels run on these tensors: what they write is one range of memory."""
    return launches(gradient, *tensors) and all(tensor is None or tensor.is_contiguous() for tensor in tensors)


def _flat(parameter: Tensor, low: Tensor | None) -> Tensor:
    """The parameter as a kernel reads it: the bits of one with low halves."""
    return parameter if low is None else parameter.view(torch.int16)


def _rounded(number: float) -> float:
    """A number, rounded to float32."""
    return float(torch.tensor(number, dtype=torch.float32))


# In plain torch


@dataclass
class _Piece:
    """A range of a parameter and its states, in the dtype of the arithmetic."""

    master: Tensor
    gradient: Tensor
    states: list[Tensor]
    own_dtype_states: list[Tensor]
    """The states in their own dtype, to which `store` writes."""
    parameter: Tensor
    low: Tensor | None
    words: Tensor | None
    """With a bit for each element: whether its low half is a tie after the update."""

    def store(self) -> None:
        """Write the updated numbers back, where they are not in place; of packed master weights the bfloat16 values,
        the low halves, and where these are ties."""
        for state, own_dtype in zip(self.states, self.own_dtype_states, strict=True):
            if state is not own_dtype:
                own_dtype.copy_(state)
        if self.low is None:
            if self.master is not self.parameter:
                self.parameter.copy_(self.master)
            return
        assert self.words is not None
        self.parameter.copy_(self.master)
        low = self.master.view(torch.int32) - self.parameter.float().view(torch.int32)
        self.low.copy_(low)
        bits = torch.zeros(_WORD * len(self.words), dtype=torch.int32, device=low.device)
        bits[: low.numel()] = (low == _HALF).reshape(-1)
        bit_numbers = torch.arange(_WORD, dtype=torch.int32, device=low.device)
        self.words.copy_((bits.view(-1, _WORD) << bit_numbers).sum(1, dtype=torch.int32))


def _pieces(
    parameter: Tensor, gradient: Tensor, low: Tensor | None, before: Tensor | None, behind: Tensor | None,
    clip: Tensor | None, *states: Tensor | None,
) -> Iterator[_Piece]:  # fmt: skip
    """Yield the pieces of a parameter, one after the other, or all of it where it is not contiguous. The arguments are
    as for `adamw`; ``states``: the optimizer's, None for a missing one."""
    tensors, count = [parameter, gradient, low, *states], parameter.numel()
    whole = not all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    length = max(count, 1) if whole else _PIECE
    for start in range(0, count, length):
        flat = (None if whole or t is None else t.view(-1)[start : start + length] for t in tensors)
        parts = tensors if whole else list(flat)
        words = slice(start // _WORD, -(-(start + length) // _WORD))
        weight, grad, low_part, *other = parts
        own_dtype_states = [tensor for tensor in other if tensor is not None]
        assert weight is not None
        assert grad is not None
        dtype = accumulated(weight.dtype)
        grad = grad.to(dtype)
        if clip is not None:
            grad = grad * clip.view(()).to(dtype)
        yield _Piece(
            _unpacked(weight, low_part, None if before is None else before[words]), grad,
            [tensor.to(dtype) for tensor in own_dtype_states], own_dtype_states, weight, low_part,
            None if behind is None else behind[words],
        )  # fmt: skip


def _unpacked(weight: Tensor, low: Tensor | None, before: Tensor | None) -> Tensor:
    """Master weights from bfloat16 ``weight``, low halves and the bits of ties (``before``); without low halves, the
    weight in the dtype of the arithmetic."""
    master = weight.to(accumulated(weight.dtype))
    if low is None:
        return master
    bits = master.view(torch.int32) + low
    if before is not None:  # ties: as int16, 2^15 is -2^15, which was added in its place
        bit_numbers = torch.arange(_WORD, dtype=torch.int32, device=low.device)
        bits += (((before[:, None] >> bit_numbers) & 1) << 16).view(-1)[: low.numel()].view(low.shape)
    restored = bits.view(torch.float32)
    # a weight that was set to 0 by hand has the low half of another, and must not become a NaN
    return torch.where(restored.isnan(), master, restored)


# In Triton


@jit
def _restored(parameter, low, before, element, inside, PACKED: tl.constexpr, TIES: tl.constexpr):
    """The parameter in float32; with PACKED, whose elements are the bits of bfloat16, its master weight."""
    values = tl.load(parameter + element, mask=inside, other=0)
    if PACKED:
        high = values.to(tl.int32) << 16
        bits = high + tl.load(low + element, mask=inside, other=0).to(tl.int32)
        if TIES:
            word = tl.load(before + element // 32, mask=inside, other=0)
            bits += ((word >> (element % 32).to(tl.int32)) & 1) << 16
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, high, bits)  # a NaN
        master = bits.to(tl.float32, bitcast=True)
    else:
        master = values.to(tl.float32)
    return master


@jit
def _store(master, parameter, low, behind, element, inside, count, PACKED: tl.constexpr, BLOCK: tl.constexpr):
    """Write the parameter, with PACKED the bits of the nearest bfloat16, the low half and the bits of ties."""
    if PACKED:
        bits = master.to(tl.int32, bitcast=True)
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to the nearest, of two to the even one
        high = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, high)  # a NaN stays one
        difference = bits - (high << 16)
        tl.store(parameter + element, high.to(tl.int16), mask=inside)
        tl.store(low + element, difference.to(tl.int16), mask=inside)
        tie = (inside & (difference == 32768)).to(tl.int32)
        bit_numbers = tl.arange(0, 32)[None, :]
        words = tl.sum(tl.reshape(tie, (BLOCK // 32, 32)) << bit_numbers, 1).to(tl.int32)
        word = tl.program_id(0).to(tl.int64) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        tl.store(behind + word, words, mask=word < (count + 31) // 32)
    else:
        tl.store(parameter + element, master.to(parameter.dtype.element_ty), mask=inside)


@jit
def _load_gradient(gradient, clip, element, inside, CLIP: tl.constexpr, MAXIMIZE: tl.constexpr):
    """The gradient in float32, clipped, and negated to maximize."""
    grad = tl.load(gradient + element, mask=inside, other=0.0).to(tl.float32)
    if CLIP:
        grad = grad * tl.load(clip).to(tl.float32)
    if MAXIMIZE:
        grad = -grad
    return grad


@jit
def adamw_kernel(
    parameter, gradient, exp_avg, exp_avg_sq, low, before, behind, clip, count,
    shrink, share, beta2, share2, root, eps, step_size,
    PACKED: tl.constexpr, TIES: tl.constexpr, CLIP: tl.constexpr, MAXIMIZE: tl.constexpr, DECAY: tl.constexpr,
    SMALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements by AdamW. ``shrink``: 1 less the decay; ``share``, ``share2``: of the gradient in the
    moments; ``root``: square root of the second moment's bias correction; ``step_size``: -lr over that of the first.

    SMALL: ``share`` is below 1 / 2; else it is less 1, and counts from the gradient, as in torch's `lerp_`. The
    arithmetic rounds as torch's on a CPU does.
    """
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    grad = _load_gradient(gradient, clip, element, inside, CLIP, MAXIMIZE)
    master = _restored(parameter, low, before, element, inside, PACKED, TIES)
    average = tl.load(exp_avg + element, mask=inside, other=0.0).to(tl.float32)
    square = tl.load(exp_avg_sq + element, mask=inside, other=0.0).to(tl.float32)
    if DECAY:
        master = master * shrink
    average = tl.fma(grad - average, share, average if SMALL else grad)
    square = tl.fma(grad * share2, grad, square * beta2)
    divisor = tl.div_rn(tl.sqrt_rn(square), root) + eps
    master = master + tl.div_rn(average * step_size, divisor)
    tl.store(exp_avg + element, average.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + element, square.to(exp_avg_sq.dtype.element_ty), mask=inside)
    _store(master, parameter, low, behind, element, inside, count, PACKED, BLOCK)


@jit
def sgd_kernel(
    parameter, gradient, buffer, low, before, behind, clip, count, step_size, momentum, share, decay,
    PACKED: tl.constexpr, TIES: tl.constexpr, CLIP: tl.constexpr, MAXIMIZE: tl.constexpr, DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements by SGD. ``step_size``: -lr; ``share``: 1 less the dampening."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    grad = _load_gradient(gradient, clip, element, inside, CLIP, MAXIMIZE)
    master = _restored(parameter, low, before, element, inside, PACKED, TIES)
    if DECAY:
        grad = tl.fma(master, decay, grad)
    if MOMENTUM:
        if FIRST:
            velocity = grad
        else:
            velocity = tl.load(buffer + element, mask=inside, other=0.0).to(tl.float32)
            velocity = tl.fma(grad, share, velocity * momentum)
        tl.store(buffer + element, velocity.to(buffer.dtype.element_ty), mask=inside)
        grad = tl.fma(velocity, momentum, grad) if NESTEROV else velocity
    master = tl.fma(grad, step_size, master)
    _store(master, parameter, low, behind, element, inside, count, PACKED, BLOCK)
