"""Decompositions of libraries' custom operators into the torch ops that implement them, so that a recording counts
their temporaries.

A custom operator arrives as a single op with a result. Where its implementation is Python code that calls further ops,
their results are its temporaries, so the recording runs these ops instead; likewise for torch's products of float8,
which the CPU emulates (torch 2.13). Seen in bitsandbytes 0.50: ``gemm_4bit``, and its ``default`` implementation
(backends/default/ops.py), which CUDA uses too but for few rows (backends/cuda/ops.py); on the CPU ``quantize_4bit``,
the products of ``Linear8bitLt`` and the optimizers' updates (backends/default/ops.py, backends/cpu/ops.py);
``name2qmap``, ``get_paged``, ``fill`` and ``prefetch_tensor`` of ``bitsandbytes.functional``, ``_code_4bit_cache`` of
``bitsandbytes.backends.utils`` and ``_get_4bit_quantize_bounds`` of ``bitsandbytes.backends.default.ops``. Seen in
torchao 0.18: ``_TORCH_FN_TABLE`` of ``TorchAOBaseTensor``, class -> function of torch -> its implementation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._subclasses.fake_tensor import FakeTensor

from memplan._patched import original_of, patched

_FEW_ROWS = 8
"""Rows below which a kernel of bitsandbytes multiplies packed weights. Up to 1,536 rows that depends on the card and
the sizes; there the weights are assumed to be unpacked, which takes more memory."""


def _gemm_4bit(
    x: Tensor,
    packed: Tensor,
    shape: Sequence[int],
    scales: Tensor,
    block: int,
    kind: str,
    bias: Tensor | None = None,
    packed_scales: Tensor | None = None,
    code: Tensor | None = None,
    offset: Tensor | None = None,
) -> Any:
    """Multiply by a weight of four bits: unpack its scales, if they are packed too, then the weight.

    NotImplemented on a card for few rows, which a kernel multiplies by the packed weight.
    """
    if x.numel() < _FEW_ROWS * x.shape[-1] and x.device.type == "cuda":
        return NotImplemented
    library: Any = torch.ops.bitsandbytes
    unpacked = None
    if packed_scales is not None and offset is not None:
        unpacked = library.dequantize_blockwise.default(packed_scales, scales, code, 256, torch.float32)
        scales = unpacked + offset
    if x.device.type == "cpu":
        del unpacked  # on a card the unpacked scales are freed after the product
    weight = library.dequantize_4bit.default(packed, scales, block, kind, shape, x.dtype)
    return torch.ops.aten.linear.default.decompose(x, weight, bias)  # below autograd, it would arrive whole


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Any:
    """Multiply float8 matrices as the CPU emulates it, in float32 (aten/src/ATen/native/Blas.cpp, without AMX)."""
    if a.device.type != "cpu":
        return NotImplemented
    b = b.contiguous()
    out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype)
    wide_a, wide_b = a.float() * scale_a, b.float() * scale_b
    product = wide_a @ wide_b
    if bias is not None:
        product.add_(bias)
    return out.copy_(product if out.dtype == torch.float32 else product.to(out.dtype))


def _int8_vectorwise_quant(x: Tensor, threshold: float = 0.0) -> Any:
    """Quantize rows on the CPU. Which columns have outliers above a threshold depends on values: none are assumed."""
    if threshold == 0.0 or x.device.type != "cpu":
        return _as_on_the_cpu("int8_vectorwise_quant")(x, threshold)
    outliers = x.abs() >= threshold
    largest = torch.max(x.abs(), dim=1).values.float()
    quantized = torch.round(x * (127.0 / largest.unsqueeze(-1))).to(torch.int8)
    del outliers
    return quantized, largest, torch.empty(0, dtype=torch.int64)


def _kernels_of_ours(name: str) -> Callable[..., Any]:
    """Return a function that allocates as an op of `memplan.kernels` does, on the CPU or on a card."""

    def call(*args: Any, **kwargs: Any) -> Any:
        """Run the op's implementation without launching kernels; a recording's mode gets each kernel that it would
        launch."""
        from memplan.kernels.launch import without_data  # not with this file: it imports Triton

        tensor = next(arg for arg in args if isinstance(arg, Tensor))
        on_launch = getattr(getattr(tensor, "fake_mode", None), "on_launch", None)  # None outside of a recording

        def report(launch: Any) -> None:
            if on_launch is not None:
                on_launch(f"triton.{launch.kernel.__name__}", [arg for arg in launch.args if isinstance(arg, Tensor)])

        with without_data(tensor.device.type, report):
            return run_kernel_of_ours(name, args, kwargs)

    return call


def run_kernel_of_ours(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the implementation of an op of `memplan.kernels`, also on tensors without data."""
    operator: Any = getattr(torch.ops.memplan, name).default
    return operator.redispatch(DispatchKeySet(DispatchKey.CompositeExplicitAutograd), *args, **kwargs)


def _as_on_the_cpu(name: str) -> Callable[..., Any]:
    """Return a function that calls the implementation of an op of bitsandbytes for the CPU, or for all devices.

    NotImplemented for tensors on other devices.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, Tensor) and arg.device.type != "cpu" for arg in (*args, *kwargs.values())):
            return NotImplemented
        operator: Any = getattr(torch.ops.bitsandbytes, name).default
        kernels = (DispatchKey.CPU, DispatchKey.CompositeExplicitAutograd)
        key = next((key for key in kernels if operator.has_kernel_for_dispatch_key(key)), None)
        if key is None:
            return NotImplemented
        return operator.redispatch(DispatchKeySet(key), *args, **kwargs)

    return call


MADE_OF_TORCH = ("quantize_4bit", "optimizer_update_8bit_blockwise", "optimizer_update_32bit")
"""Operators of bitsandbytes that the CPU implements by torch ops; a card's kernels allocate only their results."""


_PRODUCTS_OF_INT8 = (
    "int8_vectorwise_dequant", "int8_mixed_scaled_mm", "int8_scaled_mm", "int8_linear_matmul", "int8_mm_dequant",
)  # fmt: skip
"""Operators of bitsandbytes that the CPU implements by torch ops, and a card by kernels of the library."""


_DIFFERENTIATED = ("token_statistics", "norm", "gated", "depthwise", "masked_softmax", "class_sums")
_KERNELS_OF_OURS = [
    *(op + form for op in _DIFFERENTIATED for form in ("", "_backward")),
    *("pack_flags", "adamw", "sgd"),
]
"""Ops of `memplan.kernels`, made of torch's and, on a card, of kernels that allocate nothing."""


COMPOSED: dict[str, Callable[..., Any]] = {
    "bitsandbytes::gemm_4bit": _gemm_4bit,
    **{f"bitsandbytes::{name}": _as_on_the_cpu(name) for name in (*MADE_OF_TORCH, *_PRODUCTS_OF_INT8)},
    **{f"memplan::{name}": _kernels_of_ours(name) for name in _KERNELS_OF_OURS},
    "bitsandbytes::int8_vectorwise_quant": _int8_vectorwise_quant,
    "aten::_scaled_mm": _scaled_mm,
}
"""Qualified name of an operator -> its decomposition, which returns NotImplemented where the operator has a kernel of
its own."""


_TABLES = (("bitsandbytes.functional", "name2qmap"), ("bitsandbytes.backends.utils", "_code_4bit_cache"))
"""Caches of quantization codes in bitsandbytes, by module and name."""


@contextmanager
def tables_as_without_recording() -> Iterator[None]:
    """At the end of this context, remove from libraries' caches the fake tensors, which real steps would use, and undo
    registrations for patched functions of torch by libraries that were imported within the context."""
    try:
        yield
    finally:
        _register_originals(getattr(sys.modules.get("torchao.utils"), "TorchAOBaseTensor", None))
        for module, name in _TABLES:
            table: dict[Any, Any] = getattr(sys.modules.get(module), name, {})
            for key in [key for key, code in table.items() if isinstance(code, FakeTensor)]:
                del table[key]
        default = sys.modules.get("bitsandbytes.backends.default.ops")
        if default is not None and hasattr(default, "_get_4bit_quantize_bounds"):
            cast(Any, default)._get_4bit_quantize_bounds.cache_clear()  # its entries may be fake


@contextmanager
def managed_memory(allocate: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> Iterator[None]:
    """Within this context, bitsandbytes (if imported) allocates CUDA managed memory by ``allocate(shape, dtype)``,
    which returns zeros; filling and prefetching are no-ops."""
    functional: Any = sys.modules.get("bitsandbytes.functional")
    if functional is None or not hasattr(functional, "get_paged"):
        yield
        return

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        """Replace bitsandbytes' allocation of managed memory."""
        tensor: Any = allocate(shape, dtype)
        tensor.is_paged, tensor.page_deviceid = True, 0
        return tensor

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    with patched(functional, get_paged=get_paged, fill=nothing, prefetch_tensor=nothing):
        yield


def _register_originals(kind: Any) -> None:
    """Replace patched functions of torch by their originals in the function tables of a torchao tensor class and its
    subclasses."""
    if kind is None:
        return
    for table in vars(kind).get("_TORCH_FN_TABLE", {}).values():
        for function in [function for function in table if original_of(function) is not function]:
            table[original_of(function)] = table.pop(function)
    for below in kind.__subclasses__():
        _register_originals(below)
