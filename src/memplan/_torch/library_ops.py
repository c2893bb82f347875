"""Operators of libraries that are made of others, where a recording has to see these.

An operator that a library registers is one op with a result. Where its implementation is Python that calls further ops,
their results are its temporaries, so it is run by them. Seen in bitsandbytes 0.50: ``gemm_4bit``, and its ``default``
implementation (backends/default/ops.py), which CUDA takes too but for few rows (backends/cuda/ops.py);
on the CPU ``quantize_4bit`` and the optimizers' updates (backends/default/ops.py, backends/cpu/ops.py);
``name2qmap`` of ``bitsandbytes.functional``, ``_code_4bit_cache`` of ``bitsandbytes.backends.utils`` and
``_get_4bit_quantize_bounds`` of ``bitsandbytes.backends.default.ops``. Seen in
torchao 0.18: ``_TORCH_FN_TABLE`` of ``TorchAOBaseTensor``, class -> function of torch -> its implementation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from memplan._patched import original_of

_FEW_ROWS = 8
"""Rows below which a kernel of bitsandbytes multiplies packed weights. Up to 1,536 that depends on the card and the
sizes; the weights are taken as unpacked there, which takes more."""


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
    """Multiply by a weight of four bits: unpack its scales, if they are packed too, then the weight."""
    if x.numel() < _FEW_ROWS * x.shape[-1] and x.device.type == "cuda":
        return NotImplemented
    library: Any = torch.ops.bitsandbytes
    if packed_scales is not None and offset is not None:
        scales = library.dequantize_blockwise.default(packed_scales, scales, code, 256, torch.float32) + offset
    weight = library.dequantize_4bit.default(packed, scales, block, kind, shape, x.dtype)
    return functional.linear(x, weight, bias)


def _as_on_the_cpu(name: str) -> Callable[..., Any]:
    """Return a function that calls the implementation which bitsandbytes registered for the CPU, or for all devices."""

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
"""Operators of bitsandbytes made of torch's on the CPU, and whose kernels on a card take their results alone."""


COMPOSED: dict[str, Callable[..., Any]] = {
    "bitsandbytes::gemm_4bit": _gemm_4bit,
    **{f"bitsandbytes::{name}": _as_on_the_cpu(name) for name in MADE_OF_TORCH},
}
"""Qualified name of an operator -> a function that computes it by others; NotImplemented: by a kernel of its own."""


_TABLES = (("bitsandbytes.functional", "name2qmap"), ("bitsandbytes.backends.utils", "_code_4bit_cache"))
"""Tables of codes, by module and name, that fill as they are used."""


@contextmanager
def tables_as_without_recording() -> Iterator[None]:
    """At the end, take tensors without data out of libraries' tables, where they would stay for real steps, and what a
    recording replaces: a library that is imported meanwhile registers its own implementations for that."""
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
            cast(Any, default)._get_4bit_quantize_bounds.cache_clear()  # whether they have data is not to be seen


def _register_originals(kind: Any) -> None:
    """In the tables of a class of torchao's tensors and of those below it, put functions of torch for what replaces
    them."""
    if kind is None:
        return
    for table in vars(kind).get("_TORCH_FN_TABLE", {}).values():
        for function in [function for function in table if original_of(function) is not function]:
            table[original_of(function)] = table.pop(function)
    for below in kind.__subclasses__():
        _register_originals(below)
