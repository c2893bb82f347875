"""Temporaries of the fused attention kernels on CUDA: flash, memory-efficient and cuDNN.

`sdpa_choice` selects the kernel. Operands of the `_scaled_dot_product_*` ops are (batch, heads, length, head size),
those of the others (batch, length, heads, head size).
"""

from __future__ import annotations

from typing import Any

import torch

from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.formula import Formula, nonzero
from memplan.trace.semantics.kinds import Temporary
from memplan.trace.semantics.layout import bytes_of, copied, padded

_REDUCED = (torch.bfloat16, torch.float16)
_FLOAT = 4
_MOST_SPLITS = 128
_PLAN_BYTES = {8: 128, 9: 256}
"""Major compute capability -> bytes of workspace of cuDNN's attention plans beyond the known parts."""


def _by_length(tensor: torch.Tensor, heads_first: bool) -> torch.Tensor:
    """Return the tensor as (batch, length, heads, head size)."""
    return tensor.transpose(1, 2) if heads_first else tensor


def flash_splits(blocks: int, multiprocessors: int, columns: int) -> int:
    """Number of parts that the keys are split into if there are too few queries to fill the card.

    Source: transformers/cuda/flash_attn/flash_api.cpp, num_splits_heuristic: the fewest parts that reach 85 % of the
    best occupancy. ``blocks`` are the blocks of queries, ``columns`` those of keys.
    """
    if blocks >= 0.8 * multiprocessors:
        return 1
    most = min(_MOST_SPLITS, multiprocessors, columns)
    occupancy: dict[int, float] = {}
    for n in range(1, most + 1):
        if n > 1 and -(-columns // n) == -(-columns // (n - 1)):
            continue
        waves = blocks * n / multiprocessors
        occupancy[n] = waves / -(-blocks * n // multiprocessors)
    best = max(occupancy.values(), default=0)
    return min((n for n, share in occupancy.items() if share >= 0.85 * best), default=1)


def flash_forward(heads_first: bool, dropout: int) -> Formula:
    """Formula of flash attention: partial outputs and their log-sum-exp if the keys are split (never with dropout).

    Source: flash_api.cpp, mha_fwd. ``heads_first``: the layout of the operands; ``dropout``: the position of its
    probability.
    """

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
        q, k = (_by_length(t, heads_first) for t in args[:2])
        if q.dim() != 4 or (args[dropout] if len(args) > dropout else kwargs.get("dropout_p", 0.0)):
            return ()
        (batch, length, heads, size), keys = q.shape, k.shape[1]
        block = 256 if size <= 64 else 128 if size <= 128 else 64
        blocks = batch * heads * -(-length // 64)
        splits = flash_splits(blocks, 2 * arch.multiprocessors, -(-keys // block))
        if splits == 1:
            return ()
        rows = splits * batch * heads * length * _FLOAT
        return nonzero(rows, rows * padded(size, 32))

    return formula


def flash_backward(heads_first: bool) -> Formula:
    """Formula of flash attention's backward (flash_api.cpp, mha_bwd; attention_backward.cu, _flash_attention_backward).

    The gradient of the queries in float32, with rows padded to 128 and head sizes to 32 (with deterministic algorithms
    one per split of the keys); a sum per row; gradients of keys and values for every query head with grouped queries;
    the output and its gradient, contiguous by length.
    """

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
        gradient, q, k, v, out = (_by_length(t, heads_first and t.dim() == 4) for t in args[:5])
        heads, size = q.shape[-2:]
        packed = q.dim() == 3
        batch = args[6].numel() - 1 if packed else q.shape[0]
        rows = q.shape[0] + 128 * batch if packed else batch * padded(q.shape[1], 128)
        splits = 1
        if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
            splits = -(-arch.multiprocessors // (batch * heads))
        accumulated = splits * rows * heads * padded(size, 32) * _FLOAT
        grouped = [bytes_of(t) // k.shape[-2] * heads if k.shape[-2] != heads else 0 for t in (k, v)]
        return nonzero(copied(gradient), copied(out), rows * heads * _FLOAT, accumulated, *grouped)

    return formula


def efficient_forward(heads_first: bool) -> Formula:
    """Formula of memory-efficient attention: a float32 accumulator for half precision and head sizes over 128.

    Source: attention.cu, _efficient_attention_forward.
    """

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
        q, k, v = (_by_length(t, heads_first) for t in args[:3])
        if q.dtype not in _REDUCED or max(k.shape[-1], v.shape[-1]) <= 128:
            return ()
        return nonzero(q.shape[0] * q.shape[1] * q.shape[2] * v.shape[-1] * _FLOAT)

    return formula


def _tile_shape(size: int, reduced: bool, arch: Arch) -> tuple[int, int, bool]:
    """The tiles of memory-efficient attention's backward: queries and keys in a tile, and whether the gradients of keys
    and values stay in registers.

    Source: mem_eff_attention/kernels/cutlassB.h, the first kernel of the list whose head size and shared memory fit.
    That the large tiles do not fit with less than 100 KiB per block is inferred from the list, which has smaller ones
    for such cards.
    """
    if size <= 64:
        return 64, 64, reduced
    large = arch.shared_memory >= 96
    if arch.capability[0] < 8 or not reduced:
        wide = 128 if large else 64
        return wide, 64, reduced and size <= wide
    if size <= 96 and arch.capability in ((8, 6), (8, 9)):
        return 128, 64, True
    if size <= 128:
        return (128, 128, True) if arch.shared_memory > 99 else (64, 64, False)
    return (128, 64, False) if arch.shared_memory > 99 else (64, 64, False)


def _efficient_workspace(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arch: Arch) -> int:
    """Bytes of the workspace of memory-efficient attention's backward: gradients of the queries in float32 tiles, and
    of keys and values unless they stay in registers.

    Source: mem_eff_attention/kernel_backward.h, workspace_size.
    """
    (batch, rows, heads, size), keys, width = q.shape, k.shape[1], v.shape[-1]
    reduced = q.dtype in _REDUCED
    tile_rows, tile_columns, in_registers = _tile_shape(max(size, width), reduced, arch)
    elements = -(-rows // tile_rows) * -(-size // tile_columns) * (tile_rows * tile_columns + 4)
    splits = -(-keys // tile_columns)
    if batch * heads >= 256 and keys <= 2 * tile_columns:
        splits = 1
    if reduced and not in_registers:
        splits = max(1, min(splits, 200 // (batch * heads)))
        elements += splits * tile_columns * (padded(size, tile_rows) + padded(width, tile_rows))
    return batch * heads * padded(elements, 4) * _FLOAT


def efficient_backward(heads_first: bool) -> Formula:
    """Formula of memory-efficient attention's backward (attention_backward.cu, _efficient_attention_backward).

    The gradient is made contiguous by length before the results are allocated. Output times gradient is summed per row:
    inside the kernel in half precision; in float32 by a product as large as the output, its sums and a contiguous copy
    of them, of which the first two are freed before the workspace is allocated.
    """

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int | Temporary, ...]:
        gradient, q, k, v = (_by_length(t, heads_first) for t in args[:4])
        sums = q.shape[0] * q.shape[1] * q.shape[2] * _FLOAT
        workspace = _efficient_workspace(q, k, v, arch)
        copies = [Temporary(size, first=True) for size in nonzero(copied(gradient))]
        if q.dtype in _REDUCED:
            return (*copies, sums, workspace)
        return (*copies, Temporary(sums * v.shape[-1], followed=2), Temporary(sums, followed=1), sums, workspace)

    return formula


def cudnn_forward(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """Temporaries (cudnn/MHA.cpp): the workspace of cuDNN's plan, which is empty except on sm_90 (cuDNN 9.19)."""
    return nonzero(_PLAN_BYTES[9] if arch.capability[0] == 9 else 0)


def cudnn_backward(heads_first: bool) -> Formula:
    """Formula of cuDNN's attention backward (cudnn/MHA.cpp): its plan's workspace, as far as its parts are known.

    dq in float32, on sm_80 to sm_89 twice, and a sum per row; dk and dv for every query head with grouped queries
    (cudnn-frontend, the backward node of scaled dot product attention; cuDNN 9.19's answers for several shapes on
    emulated cards), and a few bytes of the plan itself.
    """

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
        q, k, v = (_by_length(t, heads_first) for t in args[1:4])
        rows = q.shape[0] * q.shape[1] * q.shape[2] * _FLOAT
        heads = q.shape[2]
        grouped = sum(bytes_of(t) // t.shape[2] * heads for t in (k, v) if t.shape[2] != heads)
        sums = 2 if arch.capability[0] == 8 else 1
        return nonzero(rows + sums * rows * q.shape[-1] + grouped + _PLAN_BYTES.get(arch.capability[0], 0))

    return formula


FORMULAS: dict[str, Formula] = {
    "aten._scaled_dot_product_flash_attention.default": flash_forward(True, 3),
    "aten._scaled_dot_product_flash_attention_backward.default": flash_backward(True),
    "aten._flash_attention_forward.default": flash_forward(False, 7),
    "aten._flash_attention_backward.default": flash_backward(False),
    "aten._scaled_dot_product_efficient_attention.default": efficient_forward(True),
    "aten._scaled_dot_product_efficient_attention_backward.default": efficient_backward(True),
    "aten._efficient_attention_forward.default": efficient_forward(False),
    "aten._efficient_attention_backward.default": efficient_backward(False),
    "aten._scaled_dot_product_cudnn_attention.default": cudnn_forward,
    "aten._cudnn_attention_forward.default": cudnn_forward,
    "aten._scaled_dot_product_cudnn_attention_backward.default": cudnn_backward(True),
    "aten._cudnn_attention_backward.default": cudnn_backward(False),
}
"""Overload name -> formula."""
