"""Kernels of planned steps in the namespace ``memplan``: bit packing, and ops that work in place piece by piece.

They compute by calling the original torch op on pieces of the operands, so that the bits are the same. Their workspace
is bounded by the size of a piece (see memplan.planning.levers.in_place and memplan.planning.levers.encode) and comes
from torch's allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memplan.kernels import channel_norms, dice, softmax
from memplan.planning.levers import chunk_convolutions  # noqa: F401  # pyright: ignore[reportUnusedImport]  # as below
from memplan.planning.ops import int8  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers its ops
from memplan.planning.ops.custom_ops import LIBRARY, define, elements_in_memory_order
from memplan.planning.ops.pieces import (
    all_rows_and_rows_per_piece,
    channels_per_piece,
    elements_per_piece,
    groups_per_piece,
    most,
    packed_bytes,
)

_ATEN = torch.ops.aten


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield corresponding pieces of tensors with the same layout, in memory order."""
    split = (
        elements_in_memory_order(tensor).split(elements_per_piece(tensor.numel(), tensor.device.type))
        for tensor in tensors
    )
    return zip(*split, strict=True)


def _pieces_with_bits(bits: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield corresponding pieces of packed bits, and of tensors with the same layout in memory order."""
    elements = most(bits.device.type)  # of a piece: a multiple of 8, so that no byte has bits of two pieces
    return zip(
        bits.split(elements // 8),
        *(elements_in_memory_order(tensor).split(elements) for tensor in tensors),
        strict=True,
    )


# -- bits


_TO_BITS = sum(1 << 56 - 7 * flag for flag in range(8))
"""Times this, eight flags that lie in the bytes of an int64 are in its highest byte, the first as the lowest bit: byte
i meets 2^(56 - 7 i) there. No two products of a flag and a power are the same power, so that there are no carries."""
_REPEATED = sum(1 << 8 * flag for flag in range(8))
"""Times this, a byte is in each of the eight bytes of an int64."""
_OWN_BIT = sum(1 << 9 * flag for flag in range(8)) - (1 << 64)
"""In byte i bit i, as a signed int64."""


def _pack(bits: Tensor, piece: Tensor, kind: str) -> None:
    """Write a flag of each element of a piece into ``bits``, eight to a byte, the first as the lowest bit.
    ``kind``: of flags, as of `pack_bits`."""
    if piece.device.type == "cpu":
        flags = _FLAGS[kind](piece).numpy().view(np.uint8)
        bits.copy_(torch.from_numpy(np.packbits(flags, bitorder="little")))
    else:
        _pack_by_torch(bits, piece, kind)


def _pack_by_torch(bits: Tensor, piece: Tensor, kind: str) -> None:
    """Like `_pack`, by torch's ops, with a single buffer: a byte for each flag, which is that of `_FLAGS`."""
    flags, elements = piece.new_empty(8 * bits.numel(), dtype=torch.bool), piece.numel()
    flags[elements:] = False
    if kind == "bits":
        flags[:elements].copy_(piece)
    elif kind == "sign":
        torch.le(piece, 0, out=flags[:elements]).logical_not_()
    elif kind == "positive":
        torch.gt(piece, 0, out=flags[:elements])
    else:
        raise KeyError(kind)
    words = flags.view(torch.int64)
    bits.copy_(words.mul_(_TO_BITS).bitwise_right_shift_(56))  # the highest byte has the eight flags


def _unpack(bits: Tensor, count: int) -> Tensor:
    """Return the first ``count`` flags as bytes 0 or 1."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits.numpy(), count=count, bitorder="little"))
    return _unpack_by_torch(bits, count)


def _unpack_by_torch(bits: Tensor, count: int) -> Tensor:
    """Return the first ``count`` flags of packed bits as bytes 0 or 1, by torch's ops, in a single buffer."""
    words = bits.to(torch.int64)
    return words.mul_(_REPEATED).bitwise_and_(_OWN_BIT).view(torch.uint8).ne_(0)[:count]


_FLAGS: dict[str, Callable[[Tensor], Tensor]] = {
    "bits": lambda piece: piece,
    "sign": lambda piece: piece.le(0).logical_not_(),
    "positive": lambda piece: piece.gt(0),
}
"""By kind of flags. ``sign`` and ``positive`` differ for NaN only, as the gradients that read them do: ReLU's passes
the gradient on where its result is not <= 0, leaky ReLU's where its input is > 0."""


@define(
    "pack_bits(Tensor self, str kind) -> Tensor",
    lambda self, kind: self.new_empty(packed_bytes(self.numel()), dtype=torch.uint8),
)
def pack_bits(self: Tensor, kind: str) -> Tensor:
    """Pack a bit for each element, in memory order. ``kind``: ``bits`` of a bool tensor, ``sign`` (not <= 0, so NaN
    counts) or ``positive`` (> 0) of numbers."""
    bits = torch.empty(packed_bytes(self.numel()), dtype=torch.uint8, device=self.device)
    for packed_piece, self_piece in _pieces_with_bits(bits, self):
        _pack(packed_piece, self_piece, kind)
    return bits


@define(
    "unpack_bits(Tensor bits, SymInt[] size, SymInt[] stride) -> Tensor",
    lambda bits, size, stride: bits.new_empty_strided(size, stride, dtype=torch.bool),
)
def unpack_bits(bits: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the bool tensor that `pack_bits` packed, with its original strides."""
    flags = torch.empty_strided(size, stride, dtype=torch.bool, device=bits.device)
    for packed_piece, flags_piece in _pieces_with_bits(bits, flags):
        flags_piece.copy_(_unpack(packed_piece, flags_piece.numel()))
    return flags


# -- gradients from bits


def _fake_in_place(first: Tensor, *_: Any) -> Tensor:
    """Fake kernel of an op that overwrites its first argument and returns it."""
    return first


def _register_bits_op(schema: str, kernel: Callable[..., None]) -> None:
    """Register an op for the gradient of an activation that reads bits, and its in-place form (with an underscore after
    its name).

    Args:
        schema: of the op; the gradient and the bits come first.
        kernel: ``kernel(result, gradient, flags, *arguments)`` writes a piece of the result, which may be the memory of
            the gradient; ``flags`` are bytes 0 or 1, a temporary, ``arguments`` those of the op after the bits.
    """
    name, _, signature = schema.partition("(Tensor ")

    def run(result: Tensor, gradient: Tensor, bits: Tensor, arguments: Sequence[Any]) -> Tensor:
        """Run the kernel on all pieces, and return the result."""
        for packed_piece, result_piece, gradient_piece in _pieces_with_bits(bits, result, gradient):
            kernel(result_piece, gradient_piece, _unpack(packed_piece, gradient_piece.numel()), *arguments)
        return result

    define(schema, lambda first, *_: torch.empty_like(first))(
        lambda gradient, bits, *args: run(torch.empty_like(gradient), gradient, bits, args)
    )
    in_place = f"{name}_(Tensor(a!) {signature}".replace("-> Tensor", "-> Tensor(a!)")
    define(in_place, _fake_in_place)(lambda gradient, bits, *args: run(gradient, gradient, bits, args))


def _threshold(out: Tensor, gradient: Tensor, flags: Tensor, threshold: float) -> None:
    """Write the gradient of a ReLU's input to ``out``: 0 where the input was not above ``threshold``, which is 0.

    torch's own kernel would read numbers in place of flags, of four bytes each.
    """
    _masked_fill(out, gradient, flags.logical_not_(), 0.0)


def _leaky_relu(out: Tensor, gradient: Tensor, flags: Tensor, slope: float, is_result: bool) -> None:
    """Write the gradient of a leaky ReLU's input to ``out``. In the place of the input the kernel reads the flags as
    numbers: it compares them with 0 alone.

    A card's kernel casts the bytes as it reads them (c10::fetch_and_cast in CUDALoops.cuh); a CPU's needs a copy.
    """
    numbers = flags if flags.is_cuda else flags.to(gradient.dtype)
    _ATEN.leaky_relu_backward.grad_input(gradient, numbers, slope, is_result, grad_input=out)


def _dropout(out: Tensor, gradient: Tensor, flags: Tensor, scale: float) -> None:
    """Write the gradient of dropout's input to ``out``. ``flags``: its mask."""
    out.copy_(_ATEN.native_dropout_backward(gradient, flags.view(torch.bool), scale))


def _masked_fill(out: Tensor, gradient: Tensor, flags: Tensor, value: float) -> None:
    """Write a tensor to ``out``, with ``value`` where a flag is set."""
    if out.data_ptr() != gradient.data_ptr():  # else in place
        out.copy_(gradient)
    out.masked_fill_(flags.view(torch.bool), value)


_register_bits_op("threshold_backward_bits(Tensor grad_output, Tensor bits, Scalar threshold) -> Tensor", _threshold)
_register_bits_op(
    "leaky_relu_backward_bits(Tensor grad_output, Tensor bits, Scalar negative_slope, bool self_is_result) -> Tensor",
    _leaky_relu,
)
_register_bits_op("native_dropout_backward_bits(Tensor grad_output, Tensor bits, float scale) -> Tensor", _dropout)
_register_bits_op("masked_fill_bits(Tensor self, Tensor bits, Scalar value) -> Tensor", _masked_fill)


# -- in place, elementwise


@define("native_dropout_backward_(Tensor(a!) grad_output, Tensor mask, float scale) -> Tensor(a!)", _fake_in_place)
def _native_dropout_backward_(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Overwrite ``grad_output`` with the gradient of dropout's input."""
    for gradient, flags in _pieces(grad_output, mask):
        gradient.copy_(_ATEN.native_dropout_backward(gradient, flags, scale))
    return grad_output


@define("hardswish_backward_(Tensor(a!) grad_output, Tensor self) -> Tensor(a!)", _fake_in_place)
def _hardswish_backward_(grad_output: Tensor, x: Tensor) -> Tensor:
    """Overwrite ``grad_output`` with the gradient of hardswish's input ``x``."""
    for gradient, x_piece in _pieces(grad_output, x):
        gradient.copy_(_ATEN.hardswish_backward(gradient, x_piece))
    return grad_output


@define(
    "native_dropout_(Tensor(a!) input, float p, bool? train) -> (Tensor(a!), Tensor)",
    lambda input, p, train: (input, torch.empty_like(input, dtype=torch.bool)),
    (torch.Tag.nondeterministic_seeded,),
)
def _native_dropout_(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Compute native_dropout in place, as the CPU's kernel does: draw the whole mask, then multiply by mask and
    scale."""
    if train is False:
        return input, torch.ones_like(input, dtype=torch.bool)
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p)
    for input_piece, flags in _pieces(input, mask):
        _ATEN.mul_.Scalar(input_piece.mul_(flags), 0.0 if p == 1 else 1 / (1 - p))
    return input, mask


# -- dropout, split into two ops


@define(
    "dropout_mask(Tensor self, float p, *, Generator? generator=None) -> Tensor",
    lambda self, p, *, generator=None: torch.empty_like(self, dtype=torch.bool),
    (torch.Tag.nondeterministic_seeded,),
)
def _dropout_mask(self: Tensor, p: float, *, generator: torch.Generator | None = None) -> Tensor:
    """Draw the mask of native_dropout. On CUDA native_dropout itself runs and its product is freed, because it assigns
    random numbers to elements in another order than bernoulli_ (Dropout.cu). ``generator`` is for the CPU."""
    if self.is_cuda:
        _, mask = _ATEN.native_dropout(self, p, train=True)
        return mask
    return torch.empty_like(self, dtype=torch.bool).bernoulli_(1 - p, generator=generator)


@define("dropout(Tensor self, Tensor mask, float scale) -> Tensor", lambda self, mask, scale: torch.empty_like(self))
def _dropped_out(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Apply a dropout mask, rounding as native_dropout does: the product with the mask first, then the scale."""
    return _ATEN.mul_.Scalar(self.mul(mask), scale)


# -- batch norm, recomputed


def _evaluation_arguments(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the weight, bias, mean and variance with which a batch norm in evaluation mode and with eps 0 returns the
    result of training mode.

    Evaluation scales by weight / sqrt(variance + eps), training by weight * invstd. So the variance is 1, and the
    weight contains invstd. All are in the precision in which the kernel computes.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    scale = invstd.to(dtype) if weight is None else weight.to(dtype) * invstd.to(dtype)
    shift = None if bias is None else bias.to(dtype)
    return scale, shift, mean.to(dtype), torch.ones_like(invstd, dtype=dtype)


LIBRARY.define("batch_norm_again(Tensor self, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd) -> Tensor")


def batch_norm_again(self: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    """Compute the result of a training batch norm from its saved statistics (`passes.recompute_batch_norm`)."""
    arguments = _evaluation_arguments(self, weight, bias, mean, invstd)
    result, _, _ = _ATEN.native_batch_norm(self, *arguments, training=False, momentum=0.0, eps=0.0)
    return result


LIBRARY.impl("batch_norm_again", batch_norm_again, "CompositeImplicitAutograd")  # a compiler sees torch's ops


@define(
    "batch_norm_again_(Tensor(a!) self, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd) -> Tensor(a!)",
    _fake_in_place,
)
def _batch_norm_again_(
    self: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor
) -> Tensor:
    """Overwrite a training batch norm's input with its result, from its saved statistics."""
    scale, *_ = arguments = _evaluation_arguments(self, weight, bias, mean, invstd)
    unused_mean, unused_invstd = scale.new_empty(0), scale.new_empty(0)  # evaluation mode returns no statistics
    _ATEN.native_batch_norm.out(
        self, *arguments, training=False, momentum=0.0, eps=0.0, out=self, save_mean=unused_mean,
        save_invstd=unused_invstd,
    )  # fmt: skip
    return self


# -- cross-entropy


_LOSS_ARGUMENTS = "Tensor target, Tensor? weight, int reduction, SymInt ignore_index, Tensor total_weight"


def _write_cross_entropy_gradient(
    result: Tensor, grad_output: Tensor, log_probs: Tensor, target: Tensor, weight: Tensor | None, reduction: int,
    *loss_arguments: Any,
) -> Tensor:  # fmt: skip
    """Write the gradient of a cross-entropy's input to ``result``, which may be ``log_probs``, and return it.

    It is computed a few samples at a time. The other arguments are those of ``nll_loss_backward``: the gradient and log
    probabilities have the classes in dimension 1.
    """
    loss_backward = (_ATEN.nll_loss_backward if log_probs.dim() == 2 else _ATEN.nll_loss2d_backward).grad_input
    _, samples_per_piece = all_rows_and_rows_per_piece(log_probs.shape, log_probs.dim() - 1, log_probs.device.type)
    for start in range(0, log_probs.shape[0], samples_per_piece):
        samples = slice(start, start + samples_per_piece)
        piece_log_probs = log_probs[samples]
        out = torch.empty_like(piece_log_probs) if result is log_probs else result[samples]
        gradient = grad_output[samples] if grad_output.dim() else grad_output  # a scalar, if the loss is reduced
        loss_backward(gradient, piece_log_probs, target[samples], weight, reduction, *loss_arguments, grad_input=out)
        _ATEN._log_softmax_backward_data.out(out, piece_log_probs, 1, out.dtype, out=out)
        if result is log_probs:
            piece_log_probs.copy_(out)
        del out  # before the next piece is allocated
    return result


define(
    f"cross_entropy_backward(Tensor grad_output, Tensor log_probs, {_LOSS_ARGUMENTS}) -> Tensor",
    lambda _, x, *__: torch.empty_like(x),
)(
    lambda grad_output, log_probs, *args: _write_cross_entropy_gradient(
        torch.empty_like(log_probs), grad_output, log_probs, *args
    )
)
define(
    f"cross_entropy_backward_(Tensor grad_output, Tensor(a!) log_probs, {_LOSS_ARGUMENTS}) -> Tensor(a!)",
    lambda _, log_probs, *__: log_probs,
)(lambda grad_output, log_probs, *args: _write_cross_entropy_gradient(log_probs, grad_output, log_probs, *args))


# -- in place, by rows, groups or channels


def _fake_in_place_of(op: Any) -> Callable[..., tuple[Any, ...]]:
    """Return the fake kernel of the in-place form of an op, which writes its first result over its first argument."""
    return lambda first, *args: (first, *op(first, *args)[1:])


@define(
    "native_layer_norm_(Tensor(a!) input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps)"
    " -> (Tensor(a!), Tensor, Tensor)",
    _fake_in_place_of(_ATEN.native_layer_norm.default),
)
def _native_layer_norm_(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    """Overwrite the input of a layer norm with its result, a few rows at a time. Returns it, mean and 1 / deviation."""
    trailing = len(normalized_shape)
    all_rows, rows_per_piece = all_rows_and_rows_per_piece(input.shape, trailing)
    statistics: list[Tensor] = []  # mean and 1 / deviation, of all rows
    for index, piece_input in enumerate(input.view(all_rows, *normalized_shape).split(rows_per_piece)):
        result, *piece_statistics = _ATEN.native_layer_norm(piece_input, normalized_shape, weight, bias, eps)
        piece_input.copy_(result)
        del result  # before the next piece is allocated
        statistics = statistics or [statistic.new_empty(all_rows) for statistic in piece_statistics]
        first_row = index * rows_per_piece
        for whole, part in zip(statistics, piece_statistics, strict=True):
            whole[first_row : first_row + part.numel()] = part.view(-1)
    shape = (*input.shape[: input.dim() - trailing], *[1] * trailing)
    return (input, *(statistic.view(shape) for statistic in statistics))


@define(
    "native_layer_norm_backward_(Tensor(a!) grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean,"
    " Tensor rstd, Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor(a!), Tensor, Tensor)",
    _fake_in_place_of(_ATEN.native_layer_norm_backward.default),
)
def _native_layer_norm_backward_(
    grad_out: Tensor, input: Tensor, normalized_shape: Sequence[int], mean: Tensor, rstd: Tensor,
    weight: Tensor | None, bias: Tensor | None, output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Overwrite ``grad_out`` with the gradient of a layer norm's input, a few rows at a time. The gradients of weight
    and bias come first, for all rows at once, since they are sums over rows."""
    parameter_gradients = [None, None, None]
    if any(output_mask[1:]):
        parameter_gradients = _ATEN.native_layer_norm_backward(
            grad_out, input, normalized_shape, mean, rstd, weight, bias, [False, *output_mask[1:]]
        )
    all_rows, rows_per_piece = all_rows_and_rows_per_piece(input.shape, len(normalized_shape))
    pieces = [tensor.view(all_rows, *normalized_shape).split(rows_per_piece) for tensor in (grad_out, input)]
    pieces += [statistic.view(all_rows, 1).split(rows_per_piece) for statistic in (mean, rstd)]
    input_gradient_alone = [True, False, False]
    for gradient, x, *statistics in zip(*pieces, strict=True):
        gradient.copy_(
            _ATEN.native_layer_norm_backward(
                gradient, x, normalized_shape, *statistics, weight, bias, input_gradient_alone
            )[0]
        )
    return (grad_out, *parameter_gradients[1:])


def _group_ranges(shape: Sequence[int], group: int) -> Iterator[tuple[int, int, int]]:
    """Yield the pieces that a group norm is computed in, each as (sample, first group, end of its groups). ``shape``:
    of its input; ``group``: its number of groups, as torch calls it."""
    groups_of_piece = groups_per_piece(shape, group)
    for sample in range(shape[0]):
        for first in range(0, group, groups_of_piece):
            yield sample, first, min(first + groups_of_piece, group)


@define(
    "native_group_norm_(Tensor(a!) input, Tensor? weight, Tensor? bias, SymInt N, SymInt C, SymInt HxW, int group,"
    " float eps) -> (Tensor(a!), Tensor, Tensor)",
    _fake_in_place_of(_ATEN.native_group_norm.default),
)
def _native_group_norm_(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hxw: int, group: int, eps: float
) -> tuple[Tensor, ...]:
    """Overwrite the input of a group norm with its result, a few groups of a sample at a time. Returns it, mean and
    1 / deviation."""
    channels_per_group = c // group
    statistics: list[Tensor] = []  # mean and 1 / deviation, of all groups
    for sample, start, stop in _group_ranges(input.shape, group):
        piece_input = input.view(n, group, channels_per_group, hxw)[sample : sample + 1, start:stop].view(1, -1, hxw)
        its_channels = slice(start * channels_per_group, stop * channels_per_group)
        scale, shift = (vector if vector is None else vector[its_channels] for vector in (weight, bias))
        result, *piece_statistics = _ATEN.native_group_norm(
            piece_input, scale, shift, N=1, C=piece_input.shape[1], HxW=hxw, group=stop - start, eps=eps
        )
        piece_input.copy_(result)
        del result  # before the next piece is allocated
        statistics = statistics or [statistic.new_empty(n, group) for statistic in piece_statistics]
        for whole, part in zip(statistics, piece_statistics, strict=True):
            whole[sample, start:stop] = part.view(-1)
    return (input, *statistics)


def _in_place_by_channels(op: Any) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return the in-place form of a batch norm op or of its derivative, computed a few channels at a time.

    The op's first result overwrites its first argument; its other results are vectors with a value for each channel.
    """

    def of_channels(argument: Any, piece_channels: slice, rank: int) -> Any:
        """Return an argument for a slice of the channels: dimension 1 of activations, which have ``rank`` dimensions, 0
        of vectors."""
        if not isinstance(argument, Tensor) or not argument.numel():
            return argument
        is_activation = argument.dim() == rank
        return argument[:, piece_channels].contiguous() if is_activation else argument[piece_channels]

    def in_place(first: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        """Run the op, and return its first argument, overwritten, and its other results."""
        channels_of_piece, vectors_of_pieces = channels_per_piece(first.shape), list[Sequence[Tensor | None]]()
        for start in range(0, first.shape[1], channels_of_piece):
            piece_channels = slice(start, start + channels_of_piece)
            result, *vectors = op(*(of_channels(part, piece_channels, first.dim()) for part in (first, *args)))
            assert result is not None
            first[:, piece_channels].copy_(result)
            del result  # before the next piece is allocated
            vectors_of_pieces.append(vectors)
        results = list[Tensor | None]()
        for parts in zip(*vectors_of_pieces, strict=True):
            computed = [part for part in parts if part is not None]  # none, where `output_mask` leaves a result out
            results.append(torch.cat(computed) if computed else None)
        return (first, *results)

    return in_place


for _schema, _op in {
    "native_batch_norm_backward_(Tensor(a!) grad_out, Tensor input, Tensor? weight, Tensor? running_mean,"
    " Tensor? running_var, Tensor? save_mean, Tensor? save_invstd, bool train, float eps, bool[3] output_mask)"
    " -> (Tensor(a!), Tensor, Tensor)": _ATEN.native_batch_norm_backward.default,
    "_native_batch_norm_legit_functional_(Tensor(a!) input, Tensor? weight, Tensor? bias, Tensor running_mean,"
    " Tensor running_var, bool training, float momentum, float eps)"
    " -> (Tensor(a!), Tensor, Tensor, Tensor, Tensor)": _ATEN._native_batch_norm_legit_functional.default,
    "_native_batch_norm_legit_.no_stats(Tensor(a!) input, Tensor? weight, Tensor? bias, bool training,"
    " float momentum, float eps) -> (Tensor(a!), Tensor, Tensor)": _ATEN._native_batch_norm_legit.no_stats,
}.items():
    define(_schema, _fake_in_place_of(_op))(_in_place_by_channels(_op))


@define(
    "channel_norm_backward_into(Tensor d_y, Tensor x, Tensor? y, Tensor? weight, Tensor? bias, Tensor mean,"
    " Tensor variance, int groups, str activation, float slope, float eps, bool added, *, Tensor(a!) into)"
    " -> (Tensor(a!), Tensor, Tensor, Tensor)",
    lambda *args, into: (into, *torch.ops.memplan.channel_norm_backward(*args)[1:]),
)
def _channel_norm_backward_into(*args: Any, into: Tensor) -> tuple[Tensor, ...]:
    """As `channel_norm_backward`, with the gradient of x written to the memory of ``into``."""
    return channel_norms.differentiate(into, *args)


@define(
    "masked_softmax_backward_into(Tensor d_y, Tensor? x, Tensor? y, Tensor? mask, Tensor? bits, Tensor statistics,"
    " float fill, float scale, float p, *, Tensor(a!) into) -> Tensor(a!)",
    lambda *_, into: into,
)
def _masked_softmax_backward_into(*args: Any, into: Tensor) -> Tensor:
    """As `masked_softmax_backward`, with the gradient of x written to the memory of ``into``."""
    return softmax.differentiate(into, *args)


@define(
    "class_sums_backward_into(Tensor d_sums, Tensor logits, Tensor targets, int ignore_index, bool squared, *,"
    " Tensor(a!) into) -> Tensor(a!)",
    lambda *_, into: into,
)
def _class_sums_backward_into(*args: Any, into: Tensor) -> Tensor:
    """As `class_sums_backward`, with the gradient of the logits written to the memory of ``into``."""
    return dice.differentiate(into, *args)
