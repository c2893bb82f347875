"""cuBLAS and cuBLASLt on CUDA: which ops need a workspace, its size and lifetime, and copies of operands.

Each thread has its own handle, and the backward pass runs in another thread than the forward pass: one workspace per
(thread, stream). Up to torch 2.14 it is allocated when the handle is first fetched and never freed; from 2.15 on
every op allocates and frees one (`caches_workspaces`).

Source: aten/src/ATen/cuda/CublasHandlePool.cpp. The behaviour of each release was read from its `libtorch_cuda.so` (the
constants in `parseChosenWorkspaceSize`, `getCUDABlasLtWorkspaceSize`, `getCUDABlasLtWorkspace`): 2.11.0, 2.12.1,
2.13.0, 2.14.1, 2.15.0. Later releases are assumed to behave as 2.15.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch

from memplan._torch import Version, torch_version
from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.formula import AllocationBytes, Formula, nonzero
from memplan.trace.semantics.kinds import Arguments, Keywords
from memplan.trace.semantics.layout import bytes_of, is_dense

Library = Literal["cublas", "cublaslt"]

_SMALL = 2 * (4096 << 10) + 8 * (16 << 10)
"""Bytes of ``CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8``, torch's default."""
_LARGE = 32 << 20
_LT = 1 << 20


def workspace_bytes(capability: tuple[int, int], env: Mapping[str, str], version: Version | None = None) -> int:
    """Return the bytes of the workspace of a cuBLAS handle on a stream.

    8,519,680; 33,554,432 on sm_90 and, from 2.12 on, also on Blackwell (2.12 and 2.13: sm_10x and sm_12x; later
    sm_11x too). ``CUBLAS_WORKSPACE_CONFIG`` (":SIZE:COUNT" in KiB, repeated) overrides it; torch ignores values
    that it cannot parse, with a warning.
    """
    pools = re.findall(r":([0-9]+):([0-9]+)", env.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pools:
        return sum((int(size) << 10) * int(count) for size, count in pools)
    version = version or torch_version()
    if version < (2, 12):
        return _LARGE if capability == (9, 0) else _SMALL
    majors = (9, 10, 12) if version < (2, 14) else (9, 10, 11, 12)
    return _LARGE if capability[0] in majors else _SMALL


def lt_workspace_bytes(capability: tuple[int, int], env: Mapping[str, str], version: Version | None = None) -> int:
    """Bytes of the cuBLASLt workspace; the cuBLAS workspace itself if they are `shared_with_lt`.

    Otherwise 1 MiB, or ``CUBLASLT_WORKSPACE_SIZE`` (KiB). 2.11 limits it to the size of the cuBLAS workspace unless
    ``TORCH_CUBLASLT_UNIFIED_WORKSPACE=0``.
    """
    version = version or torch_version()
    if shared_with_lt(env, version):
        return workspace_bytes(capability, env, version)
    configured = re.match(r"\s*\+?([0-9]+)", env.get("CUBLASLT_WORKSPACE_SIZE", ""))
    size = int(configured[1]) << 10 if configured else _LT
    if version < (2, 12) and _flag(env, "TORCH_CUBLASLT_UNIFIED_WORKSPACE") is not False:
        return min(size, workspace_bytes(capability, env, version))
    return size


def shared_with_lt(env: Mapping[str, str], version: Version | None = None) -> bool:
    """Return whether cuBLASLt uses the cuBLAS workspace instead of allocating its own.

    2.11: only with ``TORCH_CUBLASLT_UNIFIED_WORKSPACE=1``; 2.12 to 2.14: unless it is 0; from 2.15 on likewise, but
    only if workspaces are cached.
    """
    version = version or torch_version()
    unified = _flag(env, "TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    if version < (2, 12):
        return unified is True
    return unified is not False and caches_workspaces(env, version)


def caches_workspaces(env: Mapping[str, str], version: Version | None = None) -> bool:
    """Return whether a workspace stays allocated for its handle and stream, rather than for a single op.

    Always up to 2.14; from 2.15 on only with ``TORCH_CUBLAS_WORKSPACE_CACHE=1``.
    """
    return (version or torch_version()) < (2, 15) or _flag(env, "TORCH_CUBLAS_WORKSPACE_CACHE") is True


def _flag(env: Mapping[str, str], name: str) -> bool | None:
    """Return the value of a flag of the environment, None if it is not set (c10/util/env.h, check_env).

    "1" is true, "0" false, and anything else is ignored with a warning.
    """
    return {"1": True, "0": False}.get(env.get(name, ""))


_OPS = """
    mm addmm addmm_ bmm baddbmm baddbmm_ addbmm mv addmv addmv_ dot vdot linear _addmm_activation _int_mm _scaled_mm
    linalg_solve_triangular triangular_solve _linalg_solve_ex linalg_lu_factor_ex linalg_lu_solve linalg_inv_ex
    _trilinear _euclidean_dist
"""
USES: frozenset[str] = frozenset(f"aten.{name}.default" for name in _OPS.split())
"""Ops whose kernels fetch a cuBLAS handle, and so its workspace, however small the operands (``dot`` and ``mv`` too).

Source: aten/src/ATen/cuda/CUDABlas.cpp (every function there fetches the handle) and the kernels in
native/cuda/Blas.cpp and native/cuda/linalg. Ops on empty tensors fetch none.
"""


def workspaces(
    library: Library, capability: tuple[int, int], env: Mapping[str, str], version: Version | None = None
) -> dict[Library, int]:
    """Return library -> bytes of its workspace, for each workspace that a call to ``library`` needs.

    Cached workspaces are allocated once per thread and stream. 2.11 also fetches a cuBLAS handle, with its workspace,
    for a cuBLASLt call; later releases do not.
    """
    version = version or torch_version()
    sizes: dict[Library, int] = {}
    shared = library == "cublas" or shared_with_lt(env, version)
    if shared or version < (2, 12):
        sizes["cublas"] = workspace_bytes(capability, env, version)
    if not shared:
        sizes["cublaslt"] = lt_workspace_bytes(capability, env, version)
    return {name: size for name, size in sizes.items() if size}


_OF_VECTORS = frozenset({"aten.dot.default", "aten.vdot.default"})
_ALWAYS_LT = {"aten._scaled_mm.default", "aten._int_mm.default", "aten._addmm_activation.default"}
_LT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def library(name: str, args: Arguments, kwargs: Keywords, result: Any) -> Library | None:
    """Return the library whose workspace an op needs, or None if it needs no workspace."""
    if name not in USES or _is_empty(name, args, result):
        return None
    if name.startswith("aten.addmm."):
        uses_lt = _bias_fits(args, kwargs, result)
    elif name == "aten.linear.default":
        uses_lt = len(args) > 2 and args[2] is not None  # with a bias
    else:
        uses_lt = name in _ALWAYS_LT
    return "cublaslt" if uses_lt else "cublas"


def _is_empty(name: str, args: Arguments, result: Any) -> bool:
    """Return whether cuBLAS is not called because an operand or result is empty (Blas.cpp, BatchLinearAlgebra.cpp).

    `dot` and `vdot` call it for empty operands, too.
    """
    output = result[0] if isinstance(result, (tuple, list)) and result else result
    values = (output,) if name in _OF_VECTORS else (output, *args)
    return any(isinstance(value, torch.Tensor) and not value.numel() for value in values)


def _bias_fits(args: Arguments, kwargs: Keywords, result: torch.Tensor) -> bool:
    """Return whether cuBLASLt adds the bias of an ``addmm`` in its epilogue.

    Source: native/cuda/Blas.cpp, isInputCompliesAddmmCudaLt.
    """
    bias, a, b = args[:3]
    is_row = bias.dim() == 1 or sum(size != 1 for size in bias.shape) == 1
    if not is_row or not bias.is_contiguous() or bias.shape[-1] != b.shape[1] or kwargs.get("beta", 1) != 1:
        return False
    return bool(result.is_contiguous() and a.dtype in _LT_DTYPES and min(b.shape) > 1)


def _matrix_copy(tensor: torch.Tensor) -> int:
    """Return the bytes of the copy of a matrix, or a batch of them, whose strides cuBLAS does not support; else 0.

    Source: native/cuda/Blas.cpp, prepare_matrix_for_cublas.
    """
    rows, columns = tensor.shape[-2:]
    row_stride, column_stride = tensor.stride()[-2:]
    has_leading_dimension = (row_stride == 1 and column_stride >= max(1, rows)) or (
        column_stride == 1 and row_stride >= max(1, columns)
    )
    if has_leading_dimension or (tensor.dim() == 2 and is_dense(tensor)):
        return 0
    return 0 if tensor.is_contiguous() and row_stride and column_stride else bytes_of(tensor)


def product(*positions: int) -> Formula:
    """Formula for copies of the matrices at ``positions`` whose strides cuBLAS does not support (e.g. expanded).

    Source: native/cuda/Blas.cpp. Reduced precision needs no float32 copy, and a bias is not expanded.
    """

    def formula(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
        matrices = [args[position] for position in positions]
        return nonzero(*map(_matrix_copy, matrices)) if all(matrix.numel() for matrix in matrices) else ()

    return formula


def matrix_by_vector(args: Arguments, kwargs: Keywords, result: Any, arch: Arch) -> AllocationBytes:
    """Temporaries of ``mv`` and ``addmv``: copies of a matrix whose strides cuBLAS does not support, and of an expanded
    vector."""
    matrix, vector = args[:2] if len(args) == 2 else args[1:3]
    is_expanded = vector.stride(0) == 0 and vector.numel() > 1
    return nonzero(_matrix_copy(matrix), bytes_of(vector) if is_expanded else 0)


_LARGE_MATRIX, _SMALL_BATCH = 64, 8


def pointers(args: Arguments, kwargs: Keywords, result: Any, arch: Arch, *, matrix: int, other: int) -> AllocationBytes:
    """Temporaries: the pointer arrays of a batched solve: one for each operand, 8 bytes per matrix.

    ``matrix``, ``other``: positions of the factored matrices and of the right sides among the arguments. Source:
    BatchLinearAlgebra.cpp, triangular_solve_kernel, lu_solve_kernel: up to 8 matrices of at least 64 x 64 are solved in
    a loop, without them.
    """
    a, b = args[matrix], args[other]
    count = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]).numel()
    in_a_loop = count <= _SMALL_BATCH and a.shape[-1] >= _LARGE_MATRIX
    return () if in_a_loop or not a.numel() or not b.numel() else (8 * count, 8 * count)


FORMULAS: dict[str, Formula] = {
    "aten.linalg_solve_triangular.default": partial(pointers, matrix=0, other=1),
    "aten.triangular_solve.default": partial(pointers, matrix=1, other=0),
    "aten.linalg_lu_solve.default": partial(pointers, matrix=0, other=2),
    "aten.mm.default": product(0, 1),
    "aten.bmm.default": product(0, 1),
    **{f"aten.{name}.default": product(1, 2) for name in ("addmm", "addmm_", "baddbmm", "baddbmm_")},
    **{f"aten.{name}.default": matrix_by_vector for name in ("mv", "addmv", "addmv_")},
}
"""Overload name -> bytes of each copy of an operand."""
