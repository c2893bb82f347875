"""The properties of a machine (card, library versions, settings) that determine what is allocated."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

VARIABLES = (
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE", "TORCH_CUBLAS_WORKSPACE_CACHE", "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_V8_API_DISABLED", "CUDA_MODULE_LOADING", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
"""Environment variables that change what is allocated."""


def gpu(number: int = 0) -> dict[str, Any]:
    """Return the card's name, compute capability, number of multiprocessors, and memory in bytes."""
    properties = torch.cuda.get_device_properties(number)
    return {
        "name": properties.name, "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count, "memory": properties.total_memory,
    }  # fmt: skip


def versions(libraries: Iterable[str] = ()) -> dict[str, Any]:
    """Return the versions of torch, CUDA, cuDNN, the driver and Python, and of imported ones among ``libraries``."""
    by_library: dict[str, Any] = {
        "torch": str(torch.__version__), "cuda": torch.version.cuda, "python": platform.python_version(),
        "cudnn": or_none(torch.backends.cudnn.version), "driver": or_none(_driver),
    }  # fmt: skip
    for library in libraries:
        if library in sys.modules:
            by_library[library] = or_none(lambda name=library: importlib.metadata.version(name))
    return by_library


def _driver() -> str:
    """Return the version of NVIDIA's driver, such as "550.54.15", from its kernel module or from its library."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
        return next(word for word in words if word[:1].isdigit() and "." in word)
    except (OSError, StopIteration):
        import pynvml  # pyright: ignore[reportMissingImports]  # where it is installed

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)


def environment() -> dict[str, str]:
    """Return the values of the `VARIABLES` that are set."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def flags() -> dict[str, Any]:
    """Return torch's current settings that affect the choice of kernels."""
    cudnn = torch.backends.cudnn
    return {
        "cudnn_benchmark": or_none(lambda: cudnn.benchmark),
        "cudnn_deterministic": or_none(lambda: cudnn.deterministic),
        "cudnn_tf32": or_none(lambda: cudnn.allow_tf32),
        "matmul_tf32": or_none(lambda: torch.backends.cuda.matmul.allow_tf32),
        "blas": or_none(lambda: str(torch.backends.cuda.preferred_blas_library())),
    }


def or_none(read: Callable[[], Any]) -> Any:
    """Return ``read()``, or None if it raises, as on a machine or in a version of torch without the property."""
    try:
        return read()
    except Exception:  # of any library, in any way
        return None
