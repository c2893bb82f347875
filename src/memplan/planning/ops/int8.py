"""Block-wise quantization to eight bits: the ops ``memplan::quantize`` and ``memplan::dequantize``.

Elements are grouped by `GROUP` in memory order. The scale of a group is its largest magnitude divided by 127 (255 for
unsigned values), so that the error of an element is at most half a scale. Unsigned elements above 0 stay above 0, with
an error of at most a scale. (Block-wise absolute maxima: Dettmers et al., 8-bit Optimizers via Block-wise Quantization,
arXiv:2110.02861.) A group with an element that is not finite is decoded as nan, so that the problem stays visible.

The encoding is a single uint8 tensor: the elements, padded to a multiple of 4 bytes, then the scales in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from memplan.planning.ops.custom_ops import define, elements_in_memory_order
from memplan.planning.ops.pieces import GROUP, quantized_bytes, quantized_elements_per_piece

_TINY = torch.finfo(torch.float32).tiny


def _groups(flat: Tensor, encoding: Tensor, signed: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield corresponding pieces of (elements, their 8-bit codes, their scales), each with a row for every group. The
    last group can be shorter. ``flat``: all elements; ``encoding``: of these; codes and scales are views of it."""
    elements = flat.numel()
    padded_elements = -(-elements // 4) * 4  # the scales are aligned to 4 bytes
    codes = encoding[:elements].view(torch.int8 if signed else torch.uint8)
    scales = encoding[padded_elements:].view(torch.float32)
    in_whole_groups = elements // GROUP * GROUP
    piece = quantized_elements_per_piece(elements, flat.device.type)  # elements, a multiple of GROUP
    for begin in range(0, in_whole_groups, piece):
        end = min(begin + piece, in_whole_groups)
        piece_scales = scales[begin // GROUP : end // GROUP, None]
        yield flat[begin:end].view(-1, GROUP), codes[begin:end].view(-1, GROUP), piece_scales
    if in_whole_groups < elements:
        yield (
            flat[in_whole_groups:].view(1, -1),
            codes[in_whole_groups:].view(1, -1),
            scales[in_whole_groups // GROUP :, None],
        )


def quantize(self: Tensor, signed: bool) -> Tensor:
    """Return the encoding of a dense tensor of at most 32 bits an element. ``signed``: elements can be below 0."""
    encoding = torch.empty(quantized_bytes(self.numel()), dtype=torch.uint8, device=self.device)
    encoding[self.numel() : self.numel() + -self.numel() % 4] = 0  # the padding
    for part, codes, scales in _groups(elements_in_memory_order(self), encoding, signed):
        wide = part.float()
        low, high = torch.aminmax(wide, dim=1, keepdim=True)
        torch.maximum(low.neg_(), high, out=scales)
        scales.div_(127 if signed else 255).clamp_min_(_TINY)  # positive for a group of zeros, too
        scales.masked_fill_(scales.isfinite().logical_not_(), float("nan"))  # the group is decoded as nan
        quantized = (wide / scales).round_()
        if not signed:  # elements above 0 stay above 0
            torch.maximum(quantized, wide.sign(), out=quantized)
        codes.copy_(quantized.nan_to_num_(0.0))
        del wide, quantized  # before the next piece is allocated
    return encoding


def dequantize(
    encoding: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, signed: bool
) -> Tensor:
    """Return the tensor that `quantize` encoded, up to rounding."""
    value = torch.empty_strided(size, stride, dtype=dtype, device=encoding.device)
    for part, codes, scales in _groups(elements_in_memory_order(value), encoding, signed):
        if dtype == torch.float32:  # without a copy in float32
            part.copy_(codes).mul_(scales)
        else:
            part.copy_(codes.float().mul_(scales))
    return value


define(
    "quantize(Tensor self, bool signed) -> Tensor",
    lambda self, signed: self.new_empty(quantized_bytes(self.numel()), dtype=torch.uint8),
)(quantize)
define(
    "dequantize(Tensor form, SymInt[] size, SymInt[] stride, ScalarType dtype, bool signed) -> Tensor",
    lambda encoding, size, stride, dtype, signed: encoding.new_empty_strided(size, stride, dtype=dtype),
)(dequantize)
