"""Values in eight bits an element: the ops ``memplan::quantize`` and ``memplan::dequantize``.

Elements are taken in the order in which they lie in memory, in groups of `GROUP`; the largest magnitude of a
group is its scale times 127 (255 where nothing is below 0). So an element comes back with an error of half a scale at
most; where nothing is below 0, what is above 0 stays above, with an error of a scale at most. (Block-wise absolute
maxima: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.) A group with an element that
is not finite comes back as nan: what is wrong stays visible.

The encoded form is one uint8 tensor: the elements, and from the next multiple of 4 bytes on the scales in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from memplan.planning.ops.custom_ops import define, in_memory
from memplan.planning.ops.pieces import GROUP, quantized_bytes, quantized_piece

_TINY = torch.finfo(torch.float32).tiny


def _groups(flat: Tensor, form: Tensor, signed: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Pieces of a value, of its codes and of its scales: rows of a group each. The last row can be shorter."""
    count = flat.numel()
    codes = form[:count].view(torch.int8 if signed else torch.uint8)
    scales = form[-(-count // 4) * 4 :].view(torch.float32)
    whole, piece = count // GROUP * GROUP, quantized_piece(count, flat.device.type)
    for begin in range(0, whole, piece):
        end = min(begin + piece, whole)
        some = scales[begin // GROUP : end // GROUP, None]
        yield flat[begin:end].view(-1, GROUP), codes[begin:end].view(-1, GROUP), some
    if whole < count:
        yield flat[whole:].view(1, -1), codes[whole:].view(1, -1), scales[whole // GROUP :, None]


def quantize(self: Tensor, signed: bool) -> Tensor:
    """Quantize a dense tensor of 32 bits or fewer to eight. ``signed``: elements can be below 0."""
    form = torch.empty(quantized_bytes(self.numel()), dtype=torch.uint8, device=self.device)
    form[self.numel() : self.numel() + -self.numel() % 4] = 0
    for part, codes, scales in _groups(in_memory(self), form, signed):
        wide = part.float()
        low, high = torch.aminmax(wide, dim=1, keepdim=True)
        torch.maximum(low.neg_(), high, out=scales)
        scales.div_(127 if signed else 255).clamp_min_(_TINY)  # of a group of zeros, too
        scales.masked_fill_(scales.isfinite().logical_not_(), float("nan"))
        found = (wide / scales).round_()
        if not signed:
            torch.maximum(found, wide.sign(), out=found)
        codes.copy_(found.nan_to_num_(0.0))
        del wide, found  # before the next piece is there
    return form


def dequantize(form: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, signed: bool) -> Tensor:
    """Return the tensor that `quantize` was given, as near as that keeps it."""
    value = torch.empty_strided(size, stride, dtype=dtype, device=form.device)
    for part, codes, scales in _groups(in_memory(value), form, signed):
        if dtype == torch.float32:
            part.copy_(codes).mul_(scales)
        else:
            part.copy_(codes.float().mul_(scales))
    return value


def _quantize_fake(self: Tensor, signed: bool) -> Tensor:
    return self.new_empty(quantized_bytes(self.numel()), dtype=torch.uint8)


def _dequantize_fake(
    form: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, signed: bool
) -> Tensor:
    return form.new_empty_strided(size, stride, dtype=dtype)


for _schema, _kernel, _fake in (
    ("quantize(Tensor self, bool signed) -> Tensor", quantize, _quantize_fake),
    (
        "dequantize(Tensor form, SymInt[] size, SymInt[] stride, ScalarType dtype, bool signed) -> Tensor",
        dequantize,
        _dequantize_fake,
    ),
):
    define(_schema, _fake)(_kernel)
