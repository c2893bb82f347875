"""cuBLAS's workspaces, against the constants in torch's releases and against published peaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memplan.trace.semantics.cuda import cublas
from memplan.trace.semantics.cuda.arch import A100

MIB = 1 << 20
CHIPS = {"a100": (8, 0), "h100": (9, 0), "b200": (10, 0), "thor": (11, 0), "5090": (12, 0), "t4": (7, 5)}


def test_two_workspaces_are_what_a_published_step_takes_above_its_tensors() -> None:
    # An MLP of Llama's kind on an A100: 1294.25 MiB, of which 16.25 are no tensor's; forward and backward have
    # a thread each.
    assert 2 * cublas.workspace_bytes(CHIPS["a100"], {}) == 16.25 * MIB


@pytest.mark.parametrize(
    ("version", "large"),
    [
        ((2, 11), {"h100"}),
        ((2, 12), {"h100", "b200", "5090"}),
        ((2, 13), {"h100", "b200", "5090"}),
        ((2, 14), {"h100", "b200", "thor", "5090"}),
        ((2, 15), {"h100", "b200", "thor", "5090"}),
    ],
)
def test_the_default_is_32_mib_from_hopper_on_and_8_125_before(version: tuple[int, int], large: set[str]) -> None:
    # Read from `parseChosenWorkspaceSize` in the release's libtorch_cuda.so: 0x820000 and 0x2000000.
    sizes = {name: cublas.workspace_bytes(chip, {}, version) for name, chip in CHIPS.items()}
    assert sizes == {name: 0x2000000 if name in large else 0x820000 for name in CHIPS}


@pytest.mark.parametrize(
    ("config", "kib"),
    [(":4096:8", 32768), (":16:8", 128), (":4096:2:16:8", 8320), (":0:0", 0), ("", 8320), ("4096:8", 8320)],
)
def test_the_config_sums_its_pools_and_is_ignored_where_it_is_no_config(config: str, kib: int) -> None:
    # torch searches for ":SIZE:COUNT", so that text without a first colon is no pool.
    assert cublas.workspace_bytes((8, 0), {"CUBLAS_WORKSPACE_CONFIG": config}) == kib << 10


@pytest.mark.parametrize(
    ("version", "env", "library", "expected"),
    [
        ((2, 11), {}, "cublaslt", {"cublas": 0x820000, "cublaslt": MIB}),
        ((2, 11), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}, "cublaslt", {"cublas": 0x820000}),
        ((2, 11), {"CUBLASLT_WORKSPACE_SIZE": "32768"}, "cublaslt", {"cublas": 0x820000, "cublaslt": 0x820000}),
        ((2, 13), {}, "cublaslt", {"cublas": 0x820000}),
        ((2, 13), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}, "cublaslt", {"cublaslt": MIB}),
        ((2, 13), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "yes"}, "cublaslt", {"cublas": 0x820000}),
        ((2, 15), {}, "cublaslt", {"cublaslt": MIB}),
        ((2, 15), {"CUBLASLT_WORKSPACE_SIZE": "64"}, "cublaslt", {"cublaslt": 65536}),
        ((2, 15), {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}, "cublaslt", {"cublas": 0x820000}),
        ((2, 15), {}, "cublas", {"cublas": 0x820000}),
    ],
)
def test_which_workspaces_a_call_takes(
    version: tuple[int, int], env: dict[str, str], library: Any, expected: dict[str, int]
) -> None:
    assert cublas.workspaces(library, (8, 0), env, version) == expected


def test_workspaces_stay_up_to_2_14_and_then_only_when_asked_for() -> None:
    assert cublas.caches_workspaces({}, (2, 14))
    assert not cublas.caches_workspaces({}, (2, 15))
    assert cublas.caches_workspaces({"TORCH_CUBLAS_WORKSPACE_CACHE": "1"}, (2, 15))
    assert cublas.caches_workspaces({"TORCH_CUBLAS_WORKSPACE_CACHE": "0"}, (2, 12))


def matrices(*sizes: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=dtype) for size in sizes]


def test_a_bias_row_is_added_by_cublaslt() -> None:
    a, b, y = matrices((4, 8), (8, 6), (4, 6))
    row, square = torch.empty(6), torch.empty(4, 6)
    name = "aten.addmm.default"
    assert cublas.library(name, (row, a, b), {}, y) == "cublaslt"
    assert cublas.library(name, (row[None], a, b), {}, y) == "cublaslt"
    assert cublas.library(name, (square, a, b), {}, y) == "cublas"
    assert cublas.library(name, (row, a, b), {"beta": 2}, y) == "cublas"
    assert cublas.library(name, (torch.empty(1), a, b), {}, y) == "cublas"
    assert cublas.library(name, (row.long(), a.long(), b.long()), {}, y.long()) == "cublas"
    assert cublas.library(name, (torch.empty(1), a, b[:, :1]), {}, y[:, :1].clone()) == "cublas"


def test_other_products_take_cublas_and_other_ops_nothing() -> None:
    a, b, y = matrices((4, 8), (8, 6), (4, 6))
    assert cublas.library("aten.mm.default", (a, b), {}, y) == "cublas"
    assert cublas.library("aten.dot.default", (a[0], a[1]), {}, torch.empty(())) == "cublas"
    assert cublas.library("aten._scaled_mm.default", (a, b), {}, y) == "cublaslt"
    assert cublas.library("aten.add.Tensor", (a, a), {}, a) is None
    assert cublas.library("aten.mm.default", (a[:0], b), {}, y[:0]) is None


def test_operands_are_copied_where_no_leading_dimension_describes_them() -> None:
    mm, bmm = cublas.FORMULAS["aten.mm.default"], cublas.FORMULAS["aten.bmm.default"]
    wide, b = torch.empty(64, 256), torch.empty(128, 32)

    def taken(formula: Any, *args: torch.Tensor) -> tuple[int, ...]:
        return formula(args, {}, None, A100)

    assert taken(mm, wide[:, :128], b) == ()
    assert taken(mm, torch.empty(128, 64).t(), b) == ()
    assert taken(mm, wide[:, ::2], b) == (64 * 128 * 4,)
    assert taken(mm, torch.empty(1, 1).expand(64, 128), b) == (64 * 128 * 4,)
    assert taken(mm, torch.empty(64, 1).expand(64, 128), b) == (64 * 128 * 4,)
    keys = torch.empty(1, 128, 32).expand(4, 128, 32)
    assert taken(bmm, torch.empty(4, 64, 128), keys) == ()
    heads = torch.empty(2, 64, 4, 128).transpose(1, 2)[0]
    assert taken(bmm, heads, keys) == ()
    assert taken(bmm, torch.empty(4, 1, 1).expand(4, 64, 128), keys) == (4 * 64 * 128 * 4,)
