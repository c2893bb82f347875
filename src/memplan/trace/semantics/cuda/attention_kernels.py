"""Temporaries of the fused attention kernels on CUDA: flash, memory-efficient and cuDNN.

`sdpa_choice` selects the kernel. Operands of the `_scaled_dot_product_*` ops are (batch, heads, length, head size),
those of the others (batch, length, heads, head size).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.formula import AllocationBytes, Allocations, Formula, nonzero
from memplan.trace.semantics.kinds import Arguments, Keywords, Temporary
from memplan.trace.semantics.layout import bytes_of, ceil_div, copy_bytes, padded

_REDUCED = (torch.bfloat16, torch.float16)
_FLOAT = 4
_MOST_SPLITS = 128
_PLAN_BYTES = {8: 128, 9: 256}
"""Major compute capability -> bytes of workspace of cuDNN's attention plans beyond the known parts."""


def _by_length(tensor: torch.Tensor, heads_first: bool) -> torch.Tensor:
    """Return the tensor as (batch, length, heads, head size)."""
    return tensor.transpose(1, 2) if heads_first else tensor


def flash_splits(query_blocks: int, multiprocessors: int, key_blocks: int) -> int:
    """Number of parts that the keys are split into if there are too few queries to fill the card.

    Source: transformers/cuda/flash_attn/flash_api.cpp, num_splits_heuristic: the fewest parts that reach 85 % of the
    best occupancy.
    """
    if query_blocks >= 0.8 * multiprocessors:
        return 1
    occupancy: dict[int, float] = {}  # by number of parts
    for parts in range(1, min(_MOST_SPLITS, multiprocessors, key_blocks) + 1):
        if parts > 1 and ceil_div(key_blocks, parts) == ceil_div(key_blocks, parts - 1):
            continue  # a further part does not make the largest part smaller
        waves = query_blocks * parts / multiprocessors
        occupancy[parts] = waves / ceil_div(query_blocks * parts, multiprocessors)
    best = max(occupancy.values(), default=0)
    return min((parts for parts, share in occupancy.items() if share >= 0.85 * best), default=1)


def flash_forward(
    args: Arguments, kwargs: Keywords, result: Any, arch: Arch, *, heads_first: bool, dropout: int
) -> AllocationBytes:
    """Temporaries of flash attention: partial outputs and their log-sum-exp if the keys are split (never with dropout).

    Source: flash_api.cpp, mha_fwd. ``heads_first``: whether operands are (batch, heads, length, head size) rather than
    (batch, length, heads, head size); ``dropout``: position of the argument ``dropout_p``.
    """
    q, k = (_by_length(t, heads_first) for t in args[:2])
    dropout_p = args[dropout] if len(args) > dropout else kwargs.get("dropout_p", 0.0)
    if q.dim() != 4 or dropout_p:
        return ()
    batch, length, heads, head_size = q.shape
    # flash_api.cpp, set_params_splitkv: blocks of the kernel for split keys; two blocks for each multiprocessor
    key_block = 256 if head_size <= 64 else 128 if head_size <= 128 else 64
    query_blocks = batch * heads * ceil_div(length, 64)
    splits = flash_splits(query_blocks, 2 * arch.multiprocessors, ceil_div(k.shape[1], key_block))
    if splits == 1:
        return ()
    log_sum_exp = splits * batch * heads * length * _FLOAT
    return nonzero(log_sum_exp, log_sum_exp * _padded_head_size(head_size))


def _padded_head_size(head_size: int) -> int:
    """Return the length of a row of flash attention's float32 sums. Source: flash_api.cpp, ``head_size_rounded``."""
    return padded(head_size, 32 if head_size <= 128 else 64)


def flash_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch, *, heads_first: bool) -> AllocationBytes:
    """Temporaries of flash attention's backward (flash_api.cpp, mha_bwd; attention_backward.cu,
    _flash_attention_backward).

    The gradient of the queries in float32, with rows padded to 128 and padded head sizes (with deterministic algorithms
    one per split of the keys); a sum per row; gradients of keys and values for every query head with grouped queries;
    the output and its gradient, contiguous by length.
    """
    gradient, q, k, v, out = (_by_length(t, heads_first and t.dim() == 4) for t in args[:5])
    heads, head_size = q.shape[-2:]
    if q.dim() == 3:  # sequences of different lengths, packed: (all rows, heads, head size)
        batch = args[6].numel() - 1  # cumulative lengths, from 0 on
        rows = q.shape[0] + 128 * batch
    else:
        batch = q.shape[0]
        rows = batch * padded(q.shape[1], 128)
    splits = 1
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        splits = ceil_div(arch.multiprocessors, batch * heads)
    query_gradient = splits * rows * heads * _padded_head_size(head_size) * _FLOAT
    kv_heads = k.shape[-2]
    grouped = [bytes_of(t) // kv_heads * heads for t in (k, v)] if kv_heads != heads else []
    return nonzero(copy_bytes(gradient), copy_bytes(out), rows * heads * _FLOAT, query_gradient, *grouped)


def efficient_forward(
    args: Arguments, kwargs: Keywords, result: Any, arch: Arch, *, heads_first: bool
) -> AllocationBytes:
    """Temporaries of memory-efficient attention: a float32 accumulator for half precision and head sizes over 128.

    Source: attention.cu, _efficient_attention_forward.
    """
    q, k, v = (_by_length(t, heads_first) for t in args[:3])
    if q.dtype not in _REDUCED or max(k.shape[-1], v.shape[-1]) <= 128:
        return ()
    batch, length, heads, _ = q.shape
    return nonzero(batch * length * heads * v.shape[-1] * _FLOAT)


def _tile_shape(head_size: int, reduced: bool, arch: Arch) -> tuple[int, int, bool]:
    """The tiles of memory-efficient attention's backward: (queries in a tile, keys in a tile, whether the gradients of
    keys and values stay in registers).

    ``reduced``: whether the operands are in half precision. Source: mem_eff_attention/kernels/cutlassB.h, the first
    kernel of the list whose head size and shared memory fit. That the large tiles do not fit with less than 100 KiB per
    block is inferred from the list, which has smaller ones for such cards.
    """
    if head_size <= 64:
        return 64, 64, reduced
    if arch.capability[0] < 8 or not reduced:
        queries = 128 if arch.shared_memory >= 96 else 64
        return queries, 64, reduced and head_size <= queries
    if head_size <= 96 and arch.capability in ((8, 6), (8, 9)):
        return 128, 64, True
    if arch.shared_memory <= 99:
        return 64, 64, False
    return (128, 128, True) if head_size <= 128 else (128, 64, False)


def _efficient_workspace(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arch: Arch) -> int:
    """Bytes of the workspace of memory-efficient attention's backward: gradients of the queries in float32 tiles, and
    of keys and values unless they stay in registers.

    Source: mem_eff_attention/kernel_backward.h, workspace_size (and workspace_elements_gk, _gv and _gq, which pad head
    sizes to kBlockSizeI, the queries in a tile). The number of splits, with its 256 and 200, is the heuristic in
    attention_backward.cu, _efficient_attention_backward.
    """
    batch, rows, heads, head_size = q.shape
    keys, value_size = k.shape[1], v.shape[-1]
    reduced = q.dtype in _REDUCED
    tile_queries, tile_keys, in_registers = _tile_shape(max(head_size, value_size), reduced, arch)
    tiles = ceil_div(rows, tile_queries) * ceil_div(head_size, tile_keys)
    # of a batch entry and head; a tile (GradQTempStorage) begins with a lock, a counter and padding: 4 words of 4 bytes
    elements = tiles * (tile_queries * tile_keys + 4)
    if reduced and not in_registers:
        splits = ceil_div(keys, tile_keys)  # parts of the keys, each with gradients of its own
        if batch * heads >= 256 and keys <= 2 * tile_keys:  # parallel enough
            splits = 1
        splits = max(1, min(splits, 200 // (batch * heads)))
        elements += splits * tile_keys * (padded(head_size, tile_queries) + padded(value_size, tile_queries))
    return batch * heads * padded(elements, 4) * _FLOAT


def efficient_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch, *, heads_first: bool) -> Allocations:
    """Temporaries of memory-efficient attention's backward (attention_backward.cu, _efficient_attention_backward).

    The gradient is made contiguous by length before the results are allocated. Output times gradient is summed per row:
    inside the kernel in half precision; in float32 by a product as large as the output, its sums and a contiguous copy
    of them, of which the first two are freed before the workspace is allocated.
    """
    gradient, q, k, v = (_by_length(t, heads_first) for t in args[:4])
    batch, length, heads, _ = q.shape
    sums = batch * length * heads * _FLOAT
    copies = [Temporary(size, first=True) for size in nonzero(copy_bytes(gradient))]
    product_and_sums = [Temporary(sums * v.shape[-1], followed=2), Temporary(sums, followed=1)]
    before = copies if q.dtype in _REDUCED else copies + product_and_sums
    return (*before, sums, _efficient_workspace(q, k, v, arch))


def cudnn_forward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries (cudnn/MHA.cpp): the workspace of cuDNN's plan, which is empty except on sm_90 (cuDNN 9.19)."""
    return nonzero(_PLAN_BYTES[9] if arch.capability[0] == 9 else 0)


def cudnn_backward(args: Arguments, kwargs: Keywords, result: Any, arch: Arch, *, heads_first: bool) -> AllocationBytes:
    """Temporaries of cuDNN's attention backward (cudnn/MHA.cpp): its plan's workspace, as far as its parts are known.

    dq in float32, on sm_80 to sm_89 twice, and a sum per row; dk and dv for every query head with grouped queries
    (cudnn-frontend, the backward node of scaled dot product attention; cuDNN 9.19's answers for several shapes on
    emulated cards), and a few bytes of the plan itself. Before it, a copy of an output's gradient whose elements do not
    follow each other, such as the expanded one of a sum (MHA.cpp, run_cudnn_SDP_bprop).
    """
    gradient = args[0]
    copied_gradient = bytes_of(gradient) if gradient.stride(-1) != 1 else 0
    q, k, v = (_by_length(t, heads_first) for t in args[1:4])
    batch, length, heads, head_size = q.shape
    row_sums = batch * length * heads * _FLOAT
    query_gradients = (2 if arch.capability[0] == 8 else 1) * row_sums * head_size
    grouped = sum(bytes_of(t) // t.shape[2] * heads for t in (k, v) if t.shape[2] != heads)
    workspace = row_sums + query_gradients + grouped + _PLAN_BYTES.get(arch.capability[0], 0)
    return nonzero(copied_gradient, workspace)


FORMULAS: dict[str, Formula] = {
    "aten._scaled_dot_product_flash_attention.default": partial(flash_forward, heads_first=True, dropout=3),
    "aten._scaled_dot_product_flash_attention_backward.default": partial(flash_backward, heads_first=True),
    "aten._flash_attention_forward.default": partial(flash_forward, heads_first=False, dropout=7),
    "aten._flash_attention_backward.default": partial(flash_backward, heads_first=False),
    "aten._scaled_dot_product_efficient_attention.default": partial(efficient_forward, heads_first=True),
    "aten._scaled_dot_product_efficient_attention_backward.default": partial(efficient_backward, heads_first=True),
    "aten._efficient_attention_forward.default": partial(efficient_forward, heads_first=False),
    "aten._efficient_attention_backward.default": partial(efficient_backward, heads_first=False),
    "aten._scaled_dot_product_cudnn_attention.default": cudnn_forward,
    "aten._cudnn_attention_forward.default": cudnn_forward,
    "aten._scaled_dot_product_cudnn_attention_backward.default": partial(cudnn_backward, heads_first=True),
    "aten._cudnn_attention_backward.default": partial(cudnn_backward, heads_first=False),
}
