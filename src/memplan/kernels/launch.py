"""Triton, where it is installed, and which tensors its kernels take.

Without Triton, or for other tensors, each kernel's plain torch form runs: same results, more bytes moved. With
``TRITON_INTERPRET=1`` in the environment before Triton is imported, the kernels run on the CPU in its interpreter.

Where the interpreter is not a card (Triton 3.6 to 3.9): it cuts float32 to bfloat16 instead of rounding to the nearest;
NumPy warns where an exponential overflows or a logarithm is of 0, which a card does silently; that of 3.6 cannot loop
to an argument with NumPy 2.4. It starts programs one after the other, so races stay unseen, and reads whatever memory
a wrong address names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError:
    triton: Any = None
    tl: Any = None

OLDEST_CARD = (7, 5)
"""Compute capability from which on the kernels are compiled and their registers known."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function as a Triton kernel. Without Triton, return the function itself, which is never called."""
    return function if triton is None else triton.jit(function)


@jit
def sigmoid(z):
    """S(z) = 1 / (1 + exp(-z)) and its derivative, by exponentials of negative numbers alone and without a difference
    of near numbers."""
    small = tl.exp(-tl.abs(z))
    of_absolute = 1.0 / (1.0 + small)  # S(|z|), and S(-|z|) = small · S(|z|)
    return tl.where(z < 0, small * of_absolute, of_absolute), small * of_absolute * of_absolute


def interpreted() -> bool:
    """Whether kernels run on the CPU, in Triton's interpreter."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel that would have been started, with its arguments and its compile-time constants (also ``num_warps``)."""

    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _WithoutData:
    """Arguments of `without_data`."""

    device: str
    launched: Callable[[Launch], None] | None
    programs: int | None


_without_data: ContextVar[_WithoutData | None] = ContextVar("_without_data", default=None)
"""Set while kernels do not run: in a recording on fake tensors."""


@contextmanager
def without_data(
    device: str, launched: Callable[[Launch], None] | None = None, programs: int | None = None
) -> Iterator[None]:
    """Within this context, ops allocate as on this type of device, ``"cpu"`` or ``"cuda"``, and kernels do not run.

    Args:
        device: type of the simulated device.
        launched: called with each kernel that would have been launched.
        programs: number of programs that the function `programs` returns; by default that of the tensors' own device.
    """
    token = _without_data.set(_WithoutData(device, launched, programs))
    try:
        yield
    finally:
        _without_data.reset(token)


def launches(*tensors: Tensor | None) -> bool:
    """Whether Triton's kernels run on these tensors. None stands for a missing operand, and is skipped."""
    present = [tensor for tensor in tensors if tensor is not None]
    if any(tensor.is_floating_point() and tensor.dtype not in DTYPES for tensor in present):
        return False
    if any(tensor.numel() == 0 for tensor in present):
        return False  # a grid without programs is refused
    if (simulated := _without_data.get()) is not None:
        return simulated.device == "cuda"  # builds of torch for CUDA bring Triton
    if triton is None:
        return False
    device = present[0].device
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= OLDEST_CARD
    return device.type == "cpu" and interpreted()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Run a Triton kernel with one program for each point of ``grid``, on the device of its first tensor argument.

    Within `without_data` it does not run, but is reported to the callback ``launched``. ``constants`` are the kernel's
    compile-time arguments, also ``num_warps``.
    """
    if (simulated := _without_data.get()) is not None:
        if simulated.launched is not None:
            simulated.launched(Launch(kernel, args, constants))
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*args, **constants)


def programs(device: torch.device) -> int:
    """Return the number of programs to start of a kernel whose programs each loop over many parts of the input.

    There are two for each multiprocessor of the card.
    """
    if (simulated := _without_data.get()) is not None and simulated.programs is not None:
        return simulated.programs
    if device.type != "cuda":
        return 4  # on the CPU, in the interpreter
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count


def rows_of(x: Tensor) -> Tensor:
    """Return x, of shape (N, D), or a copy if the elements of a row are not adjacent; rows may have any stride."""
    return x if x.stride(1) == 1 else x.contiguous()


def block_of(columns: int, largest: int) -> int:
    """Return the smallest power of two from `columns` on, at least 16 and at most `largest`."""
    return max(16, min(largest, 1 << (columns - 1).bit_length()))


def warps_of(block: int) -> int:
    """Return the number of warps for a program over `block` elements, 1 to 16: about 8 elements for each thread."""
    return max(1, min(16, block // 256))


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of elements of `dtype` are accumulated: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
