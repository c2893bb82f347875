"""cuBLAS and cuBLASLt on CUDA: which ops take a workspace, how large it is, how long it lives, and copies of operands.

A thread has a handle of its own, and the backward pass runs in another thread than the forward pass: one workspace per
(thread, stream). Up to torch 2.14 it is taken from the caching allocator when the handle is first fetched and kept for
good; from 2.15 on every op takes one and gives it back (`kept` tells).

Source: aten/src/ATen/cuda/CublasHandlePool.cpp. What each release does was read from its `libtorch_cuda.so` (the
constants in `parseChosenWorkspaceSize`, `getCUDABlasLtWorkspaceSize`, `getCUDABlasLtWorkspace`): 2.11.0, 2.12.1,
2.13.0, 2.14.1, 2.15.0. A later release is taken to do as 2.15.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import torch

from memplan._torch import Version, torch_version
from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.layout import bytes_of, is_dense

Library = Literal["cublas", "cublaslt"]

_SMALL = 2 * (4096 << 10) + 8 * (16 << 10)
_LARGE = 32 << 20
_LT = 1 << 20


def workspace_bytes(capability: tuple[int, int], env: Mapping[str, str], version: Version | None = None) -> int:
    """Return the bytes of the workspace of one cuBLAS handle on one stream.

    8,519,680; 33,554,432 on sm_90 and, from 2.12 on, also on Blackwell (2.12 and 2.13: sm_10x and sm_12x; later
    sm_11x too). ``CUBLAS_WORKSPACE_CONFIG`` (":SIZE:COUNT" in KiB, repeated) overrides it; torch ignores, with
    a warning, what it cannot read.
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
    """Return the bytes of the allocation that cuBLASLt works in: the cuBLAS workspace itself where `shared_with_lt`.

    Otherwise 1 MiB, or ``CUBLASLT_WORKSPACE_SIZE`` (KiB); 2.11 never makes it larger than that of cuBLAS unless
    ``TORCH_CUBLASLT_UNIFIED_WORKSPACE=0``.
    """
    version = version or torch_version()
    if shared_with_lt(env, version):
        return workspace_bytes(capability, env, version)
    asked = re.match(r"\s*\+?([0-9]+)", env.get("CUBLASLT_WORKSPACE_SIZE", ""))
    size = int(asked[1]) << 10 if asked else _LT
    if version < (2, 12) and _flag(env, "TORCH_CUBLASLT_UNIFIED_WORKSPACE") is not False:
        return min(size, workspace_bytes(capability, env, version))
    return size


def shared_with_lt(env: Mapping[str, str], version: Version | None = None) -> bool:
    """Return whether cuBLASLt works in the workspace of cuBLAS, so that no second one is taken.

    2.11: only with ``TORCH_CUBLASLT_UNIFIED_WORKSPACE=1``; 2.12 to 2.14: unless it is 0; from 2.15 on likewise, but
    only where workspaces are `kept`.
    """
    version = version or torch_version()
    unified = _flag(env, "TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    if version < (2, 12):
        return unified is True
    return unified is not False and kept(env, version)


def kept(env: Mapping[str, str], version: Version | None = None) -> bool:
    """Return whether a workspace stays with its handle and stream once taken, rather than for one op only.

    Always up to 2.14; from 2.15 on only with ``TORCH_CUBLAS_WORKSPACE_CACHE=1``.
    """
    return (version or torch_version()) < (2, 15) or _flag(env, "TORCH_CUBLAS_WORKSPACE_CACHE") is True


def _flag(env: Mapping[str, str], name: str) -> bool | None:
    """As c10/util/env.h, check_env: "1" and "0" count, anything else is ignored with a warning."""
    return {"1": True, "0": False}.get(env.get(name, ""))


USES: frozenset[str] = frozenset(
    f"aten.{name}.default"
    for name in (
        *("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addbmm", "mv", "addmv", "addmv_", "dot", "vdot"),
        *("linear", "_addmm_activation", "_int_mm", "_scaled_mm", "linalg_solve_triangular", "triangular_solve"),
        *(
            "_linalg_solve_ex",
            "linalg_lu_factor_ex",
            "linalg_lu_solve",
            "linalg_inv_ex",
            "_trilinear",
            "_euclidean_dist",
        ),
    )
)
"""Ops whose kernels fetch a cuBLAS handle, and so its workspace: also small ones, ``dot`` and ``mv`` too.

Source: aten/src/ATen/cuda/CUDABlas.cpp (every function there fetches the handle) and the kernels in
native/cuda/Blas.cpp and native/cuda/linalg. Ops without elements take none.
"""


def taken(
    library: Library, capability: tuple[int, int], env: Mapping[str, str], version: Version | None = None
) -> dict[Library, int]:
    """Return whose workspaces one call takes, and bytes of each; a `kept` one is taken only once per thread and stream.

    2.11 fetches a cuBLAS handle, with its workspace, also for a call of cuBLASLt; later releases do not.
    """
    version = version or torch_version()
    own: dict[Library, int] = {"cublas": workspace_bytes(capability, env, version)}
    if library == "cublas" or shared_with_lt(env, version):
        found: dict[Library, int] = own
    else:
        found = {**(own if version < (2, 12) else {}), "cublaslt": lt_workspace_bytes(capability, env, version)}
    return {name: size for name, size in found.items() if size}


_OF_VECTORS = frozenset({"aten.dot.default", "aten.vdot.default"})
_ALWAYS_LT = {"aten._scaled_mm.default", "aten._int_mm.default"}
_LT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def library(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Library | None:
    """Return whose workspace the op takes: cuBLAS, cuBLASLt or none.

    Args:
        name: overload name, e.g. ``aten.addmm.default``.
        args, kwargs, result: as dispatched.
    """
    if name not in USES or _is_empty(name, args, result):
        return None
    if name in _ALWAYS_LT or (name.startswith("aten.addmm.") and _bias_fits(args, kwargs, result)):
        return "cublaslt"
    if name.startswith("aten._addmm_activation"):
        return "cublaslt"
    if name == "aten.linear.default" and len(args) > 2 and args[2] is not None:
        return "cublaslt"
    return "cublas"


def _is_empty(name: str, args: tuple[Any, ...], result: Any) -> bool:
    """Blas.cpp, BatchLinearAlgebra.cpp: where an operand has no elements nothing is called, but for `dot`."""
    given = result if isinstance(result, (tuple, list)) else (result,)
    operands = () if name in _OF_VECTORS else [one for one in args if isinstance(one, torch.Tensor)]
    return any(isinstance(one, torch.Tensor) and not one.numel() for one in (*given[:1], *operands))


def _bias_fits(args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> bool:
    """native/cuda/Blas.cpp, isInputCompliesAddmmCudaLt: a row of biases is added while multiplying."""
    bias, a, b = args[:3]
    row = bias.dim() == 1 or sum(n != 1 for n in bias.shape) == 1
    fits = row and bias.is_contiguous() and bias.shape[-1] == b.shape[1] and kwargs.get("beta", 1) == 1
    return bool(fits and result.is_contiguous() and a.dtype in _LT_DTYPES and min(b.shape) > 1)


def _matrix(tensor: torch.Tensor) -> int:
    """Return the bytes of the copy of a matrix that no leading dimension describes: Blas.cpp,
    prepare_matrix_for_cublas."""
    rows, columns = tensor.shape[-2:]
    down, across = tensor.stride()[-2:]
    if down == 1 and across >= max(1, rows):
        return 0
    if across == 1 and down >= max(1, columns):
        return 0
    if tensor.dim() == 2 and is_dense(tensor):
        return 0
    return 0 if tensor.is_contiguous() and down and across else bytes_of(tensor)


def product(*positions: int) -> Any:
    """Return the temporaries of a product: copies of the operands whose strides cuBLAS cannot take, e.g. expanded
    gradients.

    Source: native/cuda/Blas.cpp. Reduced precision needs no copy in float32, and a bias none in the result's shape.
    """

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
        if not all(args[i].numel() for i in positions):
            return ()
        return tuple(taken for i in positions if (taken := _matrix(args[i])))

    return formula


def matrix_by_vector(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
    """``mv`` and ``addmv``: the matrix likewise, and a vector of stride 0."""
    matrix, vector = args[-2:] if isinstance(args[-1], torch.Tensor) else args[1:3]
    copies = (_matrix(matrix), bytes_of(vector) if vector.stride(0) == 0 and vector.numel() > 1 else 0)
    return tuple(taken for taken in copies if taken)


_LOOPED, _FEW = 64, 8


def pointers(matrix: int, other: int) -> Any:
    """Return the temporaries of a call for a batch: where each matrix of both operands begins.

    Source: BatchLinearAlgebra.cpp, triangular_solve_kernel, lu_solve_kernel: not where at most 8 matrices of at least
    64 x 64 are solved one by one.
    """

    def formula(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, arch: Arch) -> tuple[int, ...]:
        a, b = args[matrix], args[other]
        count = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]).numel()
        if not (a.numel() and b.numel()) or (count <= _FEW and a.shape[-1] >= _LOOPED):
            return ()
        return 8 * count, 8 * count

    return formula


FORMULAS = {
    "aten.linalg_solve_triangular.default": pointers(0, 1),
    "aten.triangular_solve.default": pointers(1, 0),
    "aten.linalg_lu_solve.default": pointers(0, 2),
    "aten.mm.default": product(0, 1),
    "aten.bmm.default": product(0, 1),
    **{f"aten.{name}.default": product(1, 2) for name in ("addmm", "addmm_", "baddbmm", "baddbmm_")},
    **{f"aten.{name}.default": matrix_by_vector for name in ("mv", "addmv", "addmv_")},
}
"""Overload name -> bytes of each copy of an operand."""
