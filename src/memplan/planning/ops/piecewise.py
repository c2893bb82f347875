"""Kernels that a planned step needs beside torch's: ops of the namespace ``memplan``.

They use no arithmetic of their own: each hands pieces of its operands to the very op that it stands for, so that the
bits are that op's bits. What they hold beside their results is bounded by the size of a piece
(memplan.planning.levers.in_place and memplan.planning.levers.encode say by how much), and comes from torch's allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memplan.planning.levers import chunk_convolutions  # noqa: F401  # pyright: ignore[reportUnusedImport]  # as above
from memplan.planning.levers import in_place as forms
from memplan.planning.ops import int8  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers its ops
from memplan.planning.ops.custom_ops import LIBRARY, define, in_memory
from memplan.planning.ops.pieces import channels, groups, most, packed, rows

_ATEN = torch.ops.aten


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Pieces of tensors of one layout, in the order of memory."""
    return zip(*(in_memory(one).split(forms.piece(one.numel(), one.device.type)) for one in tensors), strict=True)


def _with_bits(bits: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same, each with its part of the bits before it: a piece is a multiple of 8."""
    piece = most(bits.device.type)
    return zip(bits.split(piece // 8), *(in_memory(one).split(piece) for one in tensors), strict=True)


# -- bits


_WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


def _pack(flags: Tensor) -> Tensor:
    """Eight flags a byte, the first one lowest."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.packbits(flags.numpy().view(np.uint8), bitorder="little"))
    return _pack_by_torch(flags)


def _pack_by_torch(flags: Tensor) -> Tensor:
    short = -flags.numel() % 8
    padded = torch.nn.functional.pad(flags, (0, short)) if short else flags
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=flags.device)
    return (padded.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _unpack(bits: Tensor, count: int) -> Tensor:
    """The flags as bytes that are 0 or 1."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits.numpy(), count=count, bitorder="little"))
    return _unpack_by_torch(bits, count)


def _unpack_by_torch(bits: Tensor, count: int) -> Tensor:
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=bits.device)
    return (bits[:, None] & weights).ne_(0).view(-1)[:count]


_FLAGS: dict[str, Callable[[Tensor], Tensor]] = {
    "bits": lambda piece: piece,
    "sign": lambda piece: piece.le(0).logical_not_(),
    "positive": lambda piece: piece.gt(0),
}


def _pack_fake(self: Tensor, kind: str) -> Tensor:
    return self.new_empty(packed(self.numel()), dtype=torch.uint8)


@define("pack_bits(Tensor self, str kind) -> Tensor", _pack_fake)
def pack_bits(self: Tensor, kind: str) -> Tensor:
    """Pack one bit for each element, in the order of memory: `memplan.planning.levers.encode` has the kinds."""
    bits = torch.empty(packed(self.numel()), dtype=torch.uint8, device=self.device)
    for into, piece in _with_bits(bits, self):
        into.copy_(_pack(_FLAGS[kind](piece)))
    return bits


def _unpack_fake(bits: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    return bits.new_empty_strided(size, stride, dtype=torch.bool)


@define("unpack_bits(Tensor bits, SymInt[] size, SymInt[] stride) -> Tensor", _unpack_fake)
def unpack_bits(bits: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the bool tensor that `pack_bits` packed, laid out as it was."""
    flags = torch.empty_strided(size, stride, dtype=torch.bool, device=bits.device)
    for part, piece in _with_bits(bits, flags):
        piece.copy_(_unpack(part, piece.numel()))
    return flags


# -- gradients from bits


def _same(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first)


def _itself(first: Tensor, *_: Any) -> Tensor:
    return first


def _direct(schema: str, kernel: Callable[..., None]) -> None:
    """Register a gradient that reads bits: one with a result of its own, and one that works in place.

    ``kernel(result, gradient, flags, *rest)`` writes a piece of the result, which may lie where the gradient does.
    """
    name, _, rest = schema.partition("(Tensor ")

    def over(result: Tensor, gradient: Tensor, bits: Tensor, rest: Sequence[Any]) -> Tensor:
        for part, into, piece in _with_bits(bits, result, gradient):
            kernel(into, piece, _unpack(part, piece.numel()), *rest)
        return result

    define(schema, _same)(lambda gradient, bits, *rest: over(torch.empty_like(gradient), gradient, bits, rest))
    in_place = f"{name}_(Tensor(a!) {rest}".replace("-> Tensor", "-> Tensor(a!)")
    define(in_place, _itself)(lambda gradient, bits, *rest: over(gradient, gradient, bits, rest))


def _threshold(into: Tensor, gradient: Tensor, flags: Tensor, threshold: float) -> None:
    _ATEN.threshold_backward.grad_input(gradient, flags.to(gradient.dtype), threshold, grad_input=into)


def _leaky_relu(into: Tensor, gradient: Tensor, flags: Tensor, slope: float, is_result: bool) -> None:
    standin = flags.to(gradient.dtype)
    _ATEN.leaky_relu_backward.grad_input(gradient, standin, slope, is_result, grad_input=into)


def _dropout(into: Tensor, gradient: Tensor, flags: Tensor, scale: float) -> None:
    into.copy_(_ATEN.native_dropout_backward(gradient, flags.view(torch.bool), scale))


def _masked_fill(into: Tensor, gradient: Tensor, flags: Tensor, value: float) -> None:
    if into.data_ptr() != gradient.data_ptr():
        into.copy_(gradient)
    into.masked_fill_(flags.view(torch.bool), value)


_direct("threshold_backward_bits(Tensor grad_output, Tensor bits, Scalar threshold) -> Tensor", _threshold)
_direct(
    "leaky_relu_backward_bits(Tensor grad_output, Tensor bits, Scalar negative_slope, bool self_is_result) -> Tensor",
    _leaky_relu,
)
_direct("native_dropout_backward_bits(Tensor grad_output, Tensor bits, float scale) -> Tensor", _dropout)
_direct("masked_fill_bits(Tensor self, Tensor bits, Scalar value) -> Tensor", _masked_fill)


# -- in place, by elements


@define("native_dropout_backward_(Tensor(a!) grad_output, Tensor mask, float scale) -> Tensor(a!)", _itself)
def _native_dropout_backward_(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    for gradient, flags in _pieces(grad_output, mask):
        gradient.copy_(_ATEN.native_dropout_backward(gradient, flags, scale))
    return grad_output


@define("hardswish_backward_(Tensor(a!) grad_output, Tensor self) -> Tensor(a!)", _itself)
def _hardswish_backward_(grad_output: Tensor, x: Tensor) -> Tensor:
    for gradient, piece in _pieces(grad_output, x):
        gradient.copy_(_ATEN.hardswish_backward(gradient, piece))
    return grad_output


def _dropout_fake(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    return input, torch.empty_like(input, dtype=torch.bool)


@define(
    "native_dropout_(Tensor(a!) input, float p, bool? train) -> (Tensor(a!), Tensor)",
    _dropout_fake,
    (torch.Tag.nondeterministic_seeded,),
)
def _native_dropout_(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """As the CPU's kernel, which draws the whole mask at once and then multiplies by mask and scale."""
    if train is False:
        return input, torch.ones_like(input, dtype=torch.bool)
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p)
    for piece, flags in _pieces(input, mask):
        _ATEN.mul_.Scalar(piece.mul_(flags), 0.0 if p == 1 else 1 / (1 - p))
    return input, mask


# -- dropout, taken apart


@define(
    "dropout_mask(Tensor self, float p, *, Generator? generator=None) -> Tensor",
    lambda self, p, *, generator=None: torch.empty_like(self, dtype=torch.bool),
    (torch.Tag.nondeterministic_seeded,),
)
def _dropout_mask(self: Tensor, p: float, *, generator: torch.Generator | None = None) -> Tensor:
    """What native_dropout draws. On CUDA it gives the numbers to other elements than bernoulli_ does (Dropout.cu: those
    of a thread to neighbours), so it draws itself, and what it multiplies is let go. ``generator``: on the CPU."""
    if self.is_cuda:
        return _ATEN.native_dropout(self, p, True)[1]
    return torch.empty_like(self, dtype=torch.bool).bernoulli_(1 - p, generator=generator)


@define("dropout(Tensor self, Tensor mask, float scale) -> Tensor", lambda self, mask, scale: torch.empty_like(self))
def _dropped_out(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    """What native_dropout makes of its mask."""
    return _ATEN.mul_.Scalar(self.mul(mask), scale)


# -- batch norm, made again


def _evaluated(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Weight, bias, mean and variance with which a batch norm gives in evaluation mode, its eps 0, what it gave in
    training. They are in the precision that the kernel computes in."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    scale = invstd.to(dtype) if weight is None else weight.to(dtype) * invstd.to(dtype)
    shift = None if bias is None else bias.to(dtype)
    return scale, shift, mean.to(dtype), torch.ones_like(invstd, dtype=dtype)


LIBRARY.define("batch_norm_again(Tensor self, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd) -> Tensor")


def batch_norm_again(self: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    """Compute the first result of a training batch norm of its second and third (`passes.recompute_batch_norm`)."""
    return _ATEN.native_batch_norm(self, *_evaluated(self, weight, bias, mean, invstd), False, 0.0, 0.0)[0]


LIBRARY.impl("batch_norm_again", batch_norm_again, "CompositeImplicitAutograd")  # a compiler sees torch's ops


@define(
    "batch_norm_again_(Tensor(a!) self, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd) -> Tensor(a!)",
    _itself,
)
def _batch_norm_again_(
    self: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor
) -> Tensor:
    given = _evaluated(self, weight, bias, mean, invstd)
    nothing = [given[2].new_empty(0) for _ in range(2)]
    _ATEN.native_batch_norm.out(self, *given, False, 0.0, 0.0, out=self, save_mean=nothing[0], save_invstd=nothing[1])
    return self


# -- cross-entropy


_LOSS = "Tensor target, Tensor? weight, int reduction, SymInt ignore_index, Tensor total_weight"


def _cross_entropy(
    result: Tensor, grad_output: Tensor, log_probs: Tensor, target: Tensor, weight: Tensor | None, reduction: int,
    *rest: Any,
) -> Tensor:  # fmt: skip
    """Some samples at a time; classes are in dimension 1. The result may be the log-probabilities' own memory."""
    loss = (_ATEN.nll_loss_backward if log_probs.dim() == 2 else _ATEN.nll_loss2d_backward).grad_input
    step = rows(log_probs.shape, log_probs.dim() - 1, log_probs.device.type)[1]
    for start in range(0, log_probs.shape[0], step):
        part = slice(start, start + step)
        piece = log_probs[part]
        into = torch.empty_like(piece) if result is log_probs else result[part]
        gradient = grad_output[part] if grad_output.dim() else grad_output
        loss(gradient, piece, target[part], weight, reduction, *rest, grad_input=into)
        _ATEN._log_softmax_backward_data.out(into, piece, 1, into.dtype, out=into)
        if result is log_probs:
            piece.copy_(into)
        del into
    return result


define(f"cross_entropy_backward(Tensor grad_output, Tensor log_probs, {_LOSS}) -> Tensor", lambda _, x, *__: _same(x))(
    lambda grad_output, log_probs, *rest: _cross_entropy(torch.empty_like(log_probs), grad_output, log_probs, *rest)
)
define(
    f"cross_entropy_backward_(Tensor grad_output, Tensor(a!) log_probs, {_LOSS}) -> Tensor(a!)",
    lambda _, log_probs, *__: log_probs,
)(lambda grad_output, log_probs, *rest: _cross_entropy(log_probs, grad_output, log_probs, *rest))


# -- in place, by rows, groups or channels


def _fake_of(op: Any) -> Callable[..., tuple[Any, ...]]:
    """The op on tensors without data, its first result in the first argument."""
    return lambda first, *rest: (first, *op(first, *rest)[1:])


def _part(tensor: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if tensor is None else tensor[start:stop]


@define(
    "native_layer_norm_(Tensor(a!) input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor(a!), Tensor, Tensor)",
    _fake_of(_ATEN.native_layer_norm.default),
)
def _native_layer_norm_(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    trailing = len(normalized_shape)
    count, step = rows(input.shape, trailing)
    statistics: list[Tensor] = []
    for at, piece in enumerate(input.view(count, *normalized_shape).split(step)):
        result, *found = _ATEN.native_layer_norm(piece, normalized_shape, weight, bias, eps)
        piece.copy_(result)
        del result
        statistics = statistics or [one.new_empty(count) for one in found]
        for one, part in zip(statistics, found, strict=True):
            one[at * step : at * step + part.numel()] = part.view(-1)
    shape = (*input.shape[: input.dim() - trailing], *[1] * trailing)
    return (input, *(one.view(shape) for one in statistics))


@define(
    "native_layer_norm_backward_(Tensor(a!) grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean,"
    " Tensor rstd, Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor(a!), Tensor, Tensor)",
    _fake_of(_ATEN.native_layer_norm_backward.default),
)
def _native_layer_norm_backward_(
    grad_out: Tensor, input: Tensor, normalized_shape: Sequence[int], mean: Tensor, rstd: Tensor,
    weight: Tensor | None, bias: Tensor | None, output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The weights' gradients of the whole, since they are sums over rows; then the rows."""
    others = [None, None, None]
    if any(output_mask[1:]):
        others = _ATEN.native_layer_norm_backward(
            grad_out, input, normalized_shape, mean, rstd, weight, bias, [False, *output_mask[1:]]
        )
    count, step = rows(input.shape, len(normalized_shape))
    parts = [one.view(count, *normalized_shape).split(step) for one in (grad_out, input)]
    parts += [one.view(count, 1).split(step) for one in (mean, rstd)]
    for gradient, x, *statistics in zip(*parts, strict=True):
        gradient.copy_(
            _ATEN.native_layer_norm_backward(
                gradient, x, normalized_shape, *statistics, weight, bias, [True, False, False]
            )[0]
        )
    return (grad_out, *others[1:])


def _grouped(shape: Sequence[int], group: int) -> Iterator[tuple[int, int, int]]:
    """(sample, first group, last group) of each piece."""
    step = groups(shape, group)
    return ((n, g, min(g + step, group)) for n in range(shape[0]) for g in range(0, group, step))


@define(
    "native_group_norm_(Tensor(a!) input, Tensor? weight, Tensor? bias, SymInt N, SymInt C, SymInt HxW, int group,"
    " float eps) -> (Tensor(a!), Tensor, Tensor)",
    _fake_of(_ATEN.native_group_norm.default),
)
def _native_group_norm_(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hxw: int, group: int, eps: float
) -> tuple[Tensor, ...]:
    size = c // group
    statistics: list[Tensor] = []
    for sample, start, stop in _grouped(input.shape, group):
        piece = input.view(n, group, size, hxw)[sample : sample + 1, start:stop].view(1, -1, hxw)
        scale, shift = (_part(one, start * size, stop * size) for one in (weight, bias))
        result, *found = _ATEN.native_group_norm(piece, scale, shift, 1, piece.shape[1], hxw, stop - start, eps)
        piece.copy_(result)
        del result
        statistics = statistics or [one.new_empty(n, group) for one in found]
        for one, part in zip(statistics, found, strict=True):
            one[sample, start:stop] = part.view(-1)
    return (input, *statistics)


def _by_channels(compute: Callable[[slice], Sequence[Tensor | None]], over: Tensor) -> tuple[Tensor | None, ...]:
    """Results of a batch norm, of which each is one for every channel but the first, which goes over a tensor."""
    step, found = channels(over.shape), list[Sequence[Tensor | None]]()
    for start in range(0, over.shape[1], step):
        part = slice(start, start + step)
        first, *others = compute(part)
        assert first is not None
        over[:, part].copy_(first)
        del first
        found.append(others)
    columns = ([one for one in column if one is not None] for column in zip(*found, strict=True))
    return (over, *(torch.cat(column) if column else None for column in columns))


def _channel(part: slice, *tensors: Tensor | None) -> Iterator[Tensor | None]:
    return (one if one is None or not one.numel() else one[part] for one in tensors)


@define(
    "native_batch_norm_backward_(Tensor(a!) grad_out, Tensor input, Tensor? weight, Tensor? running_mean,"
    " Tensor? running_var, Tensor? save_mean, Tensor? save_invstd, bool train, float eps, bool[3] output_mask)"
    " -> (Tensor(a!), Tensor, Tensor)",
    _fake_of(_ATEN.native_batch_norm_backward.default),
)
def _native_batch_norm_backward_(
    grad_out: Tensor, input: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    save_mean: Tensor | None, save_invstd: Tensor | None, train: bool, eps: float, output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    small = (weight, running_mean, running_var, save_mean, save_invstd)

    def compute(part: slice) -> Sequence[Tensor | None]:
        gradient, x = grad_out[:, part].contiguous(), input[:, part].contiguous()
        return _ATEN.native_batch_norm_backward(gradient, x, *_channel(part, *small), train, eps, output_mask)

    return _by_channels(compute, grad_out)


@define(
    "_native_batch_norm_legit_functional_(Tensor(a!) input, Tensor? weight, Tensor? bias, Tensor running_mean,"
    " Tensor running_var, bool training, float momentum, float eps)"
    " -> (Tensor(a!), Tensor, Tensor, Tensor, Tensor)",
    _fake_of(_ATEN._native_batch_norm_legit_functional.default),
)
def _batch_norm_(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    def compute(part: slice) -> Sequence[Tensor | None]:
        small = _channel(part, weight, bias, running_mean, running_var)
        x = input[:, part].contiguous()
        return _ATEN._native_batch_norm_legit_functional(x, *small, training, momentum, eps)

    return _by_channels(compute, input)


@define(
    "_native_batch_norm_legit_.no_stats(Tensor(a!) input, Tensor? weight, Tensor? bias, bool training,"
    " float momentum, float eps) -> (Tensor(a!), Tensor, Tensor)",
    _fake_of(_ATEN._native_batch_norm_legit.no_stats),
)
def _batch_norm_without_statistics_(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor | None, ...]:
    def compute(part: slice) -> Sequence[Tensor | None]:
        x = input[:, part].contiguous()
        return _ATEN._native_batch_norm_legit.no_stats(x, *_channel(part, weight, bias), training, momentum, eps)

    return _by_channels(compute, input)
