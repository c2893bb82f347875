"""Attention's kernels on CUDA: cases made by hand from torch's documented rules and its tests, one a reason.

The rules stand in torch's documentation (torch.nn.functional.scaled_dot_product_attention, torch.nn.attention,
torch.backends.cuda) and in torch/testing/_internal/common_cuda.py (flash and cuDNN from sm_80, memory-efficient from
sm_50); the numbers in the case names are theirs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from memplan.trace.semantics.cuda.sdpa_choice import Choice, Enabled, choose, default_order, versions

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
A100, RTX3090, RTX4090, H100, B200, RTX5090, T4, V100 = (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (7, 5), (7, 0)
NEWER = Enabled(torch=(2, 15), cudnn_version=92600)


def tensor(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def chosen(
    query: tuple[int, ...] = (2, 8, 128, 64),
    key: tuple[int, ...] | None = None,
    value: tuple[int, ...] | None = None,
    *,
    arch: tuple[int, int] = A100,
    dtype: torch.dtype = BF16,
    grad: bool = True,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    gqa: bool = False,
    enabled: Enabled | None = None,
) -> Choice:
    enabled = enabled or Enabled()
    if enabled.order == Enabled().order:
        enabled = replace(enabled, order=default_order(arch, enabled.cudnn_version))
    q = tensor(*query, dtype=dtype, grad=grad)
    k = tensor(*(key or query), dtype=dtype, grad=grad)
    v = tensor(*(value or key or query), dtype=dtype, grad=grad)
    return choose(q, k, v, mask, dropout, causal, None, gqa, arch=arch, enabled=enabled)


BOOLS = torch.ones(128, 128, dtype=torch.bool, device="meta")
ALL_BUT = {name: Enabled(**{name: False}) for name in ("flash", "efficient", "cudnn", "math")}  # pyright: ignore[reportArgumentType]

CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    # by architecture and dtype
    "half precision on an A100": ({}, "flash", "nothing speaks against"),
    "float16 on an A100": ({"dtype": F16}, "flash", ""),
    "half precision on a 4090": ({"arch": RTX4090}, "flash", ""),
    "half precision on a 5090": ({"arch": RTX5090}, "flash", ""),
    "cuDNN is first on Hopper": ({"arch": H100}, "cudnn", "the first that is tried"),
    "and on Blackwell for servers": ({"arch": B200}, "cudnn", ""),
    "float32 is never flash": ({"dtype": F32}, "efficient", "float32, and flash attention takes float16 or bfloat16"),
    "float32 on Hopper": ({"dtype": F32, "arch": H100}, "efficient", "cuDNN's attention takes"),
    "float64 is fused nowhere": ({"dtype": F64}, "math", "float64"),
    "float16 on a T4": ({"dtype": F16, "arch": T4}, "efficient", "flash attention needs sm_80 or later"),
    "bfloat16 on a T4": ({"arch": T4}, "math", "bfloat16, and memory-efficient attention takes float16 or float32"),
    "float32 on a V100": ({"dtype": F32, "arch": V100}, "efficient", "sm_70"),
    # heads
    "heads of 256": ({"query": (1, 2, 64, 256)}, "flash", ""),
    "heads of 264": ({"query": (1, 2, 64, 264)}, "efficient", "heads of 264, and flash attention takes up to 256"),
    "heads of 257": ({"query": (1, 2, 64, 257)}, "math", "heads of 257, and flash attention takes up to 256"),
    "odd heads are padded for flash": ({"query": (1, 2, 64, 60)}, "flash", ""),
    "odd heads in float32": ({"query": (1, 2, 64, 62), "dtype": F32}, "math", "multiples of 4 in float32"),
    "odd heads in float16 on a T4": ({"query": (1, 2, 64, 60), "dtype": F16, "arch": T4}, "math", "multiples of 8"),
    "any heads in float32 on a T4": ({"query": (1, 2, 64, 63), "dtype": F32, "arch": T4}, "efficient", "sm_75"),
    "value heads of another size": ({"value": (2, 8, 128, 32)}, "efficient", "unequal sizes (64, 64, 32)"),
    "training heads of 200 on a 3090": ({"query": (1, 2, 64, 200), "arch": RTX3090}, "efficient", "no backward"),
    "heads of 200 without gradients": ({"query": (1, 2, 64, 200), "arch": RTX3090, "grad": False}, "flash", ""),
    "training heads of 256 on a 4090": ({"query": (1, 2, 64, 256), "arch": RTX4090}, "flash", ""),
    "with dropout": ({"query": (1, 2, 64, 256), "arch": RTX4090, "dropout": 0.1}, "efficient", "dropout"),
    "the same on an A100": ({"query": (1, 2, 64, 256), "dropout": 0.1}, "flash", ""),
    "heads of 256 on an H100": ({"query": (1, 2, 64, 256), "arch": H100}, "cudnn", ""),
    "heads of 256 on a B200": ({"query": (1, 2, 64, 256), "arch": B200}, "flash", "cuDNN's attention takes up to 128"),
    "192 and 128 on a B200": (
        {"query": (1, 2, 64, 192), "value": (1, 2, 64, 128), "key": (1, 2, 64, 192), "arch": B200},
        "cudnn",
        "",
    ),
    "odd heads on an H100": ({"query": (1, 2, 64, 60), "arch": H100}, "flash", "takes multiples of 8"),
    # masks
    "a mask": ({"mask": BOOLS}, "efficient", "a mask is given, which flash attention does not take"),
    "a mask on an H100": ({"mask": BOOLS, "arch": H100}, "cudnn", ""),
    "a mask that needs a gradient": (
        {"mask": tensor(128, 128), "arch": H100},
        "efficient",
        "the mask needs a gradient, which cuDNN's attention does not give",
    ),
    "a mask of three dimensions": (
        {"mask": BOOLS.expand(8, 128, 128), "arch": H100},
        "efficient",
        "a mask of shape (8, 128, 128)",
    ),
    "a mask a key": ({"mask": torch.ones(2, 1, 1, 128, device="meta") > 0, "arch": H100}, "cudnn", ""),
    "a transposed mask": ({"mask": torch.ones(128, 128, device="meta").t()}, "math", "last dimension is not"),
    # lengths and shapes
    "causal": ({"causal": True}, "flash", ""),
    "causal of different lengths": ({"causal": True, "key": (2, 8, 64, 64)}, "efficient", "different lengths"),
    "causal of different lengths on an H100": ({"causal": True, "key": (2, 8, 64, 64), "arch": H100}, "cudnn", ""),
    "an empty sequence": ({"key": (2, 8, 0, 64)}, "math", "an empty sequence"),
    "a single key on an H100": ({"key": (2, 8, 1, 64), "arch": H100}, "flash", "a single key"),
    "a single query with dropout": ({"query": (2, 8, 1, 64), "key": (2, 8, 9, 64), "arch": H100, "dropout": 0.5},
                                    "flash", "a single query with dropout"),
    "a single query without dropout": ({"query": (2, 8, 1, 64), "key": (2, 8, 9, 64), "arch": H100}, "cudnn", ""),
    "three dimensions": ({"query": (8, 128, 64)}, "math", "tensors of 3 dimensions, and the fused kernels take 4"),
    "other batch sizes": ({"key": (1, 8, 128, 64)}, "math", "different batch sizes"),
    "fewer key heads": ({"key": (2, 2, 128, 64)}, "math", "8 query heads and 2 key heads"),
    "grouped queries": ({"key": (2, 2, 128, 64), "gqa": True}, "flash", ""),
    "grouped queries in float32": ({"key": (2, 2, 128, 64), "gqa": True, "dtype": F32}, "math", "(grouped queries)"),
    "groups of unequal size": ({"key": (2, 3, 128, 64), "gqa": True}, "math", "no multiple"),
    # what the user lets it choose from
    "flash off": ({"enabled": ALL_BUT["flash"]}, "efficient", "flash attention is switched off"),
    "cuDNN off on an H100": ({"enabled": ALL_BUT["cudnn"], "arch": H100}, "flash", "cuDNN's attention is switched off"),
    "deterministic on an H100": ({"enabled": Enabled(deterministic=True), "arch": H100}, "flash", "deterministic"),
    "math first": ({"enabled": Enabled(order=("math", "flash", "efficient", "cudnn"))}, "math", "the first"),
    "math off, nothing else fits but cuDNN": (
        {"enabled": Enabled(math=False, flash=False, efficient=False)},
        "cudnn",
        "the math path is switched off",
    ),
    "dropout with cuDNN 9.12": ({"arch": H100, "dropout": 0.1, "enabled": Enabled(cudnn_version=91200)}, "flash", ""),
    "cuDNN too old to be first": ({"arch": H100, "enabled": Enabled(cudnn_version=91002)}, "flash", "the first"),
    # torch 2.14 and later
    "new: three dimensions": ({"query": (8, 128, 64), "enabled": NEWER}, "flash", ""),
    "new: one head for all": ({"key": (2, 1, 128, 64), "enabled": NEWER}, "flash", ""),
    "new: grouped queries in float32": (
        {"key": (2, 2, 128, 64), "gqa": True, "dtype": F32, "enabled": NEWER},
        "efficient",
        "",
    ),
    "new: dropout that cuDNN cannot": ({"arch": H100, "dropout": 0.1, "enabled": NEWER}, "flash", "1/16"),
    "new: dropout that cuDNN can": ({"arch": H100, "dropout": 0.125, "enabled": NEWER}, "cudnn", ""),
    "new: heads of 256 on a B200": ({"query": (1, 2, 64, 256), "arch": B200, "enabled": NEWER}, "cudnn", ""),
    "new: heads of 160 on an H100": (
        {"query": (1, 2, 64, 160), "arch": H100, "enabled": NEWER},
        "flash",
        "no backward",
    ),
    "new: without gradients": (
        {"query": (1, 2, 64, 160), "arch": H100, "enabled": NEWER, "grad": False},
        "cudnn",
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_and_its_reason(case: str) -> None:
    arguments, kernel, words = CASES[case]
    choice = chosen(**arguments)
    assert choice.kernel == kernel, choice.reason
    assert words in choice.reason
    assert not choice.reason.endswith(".")


def test_elements_of_a_head_apart() -> None:
    q = torch.empty(2, 8, 64, 128, dtype=BF16, device="meta").transpose(-2, -1)
    choice = choose(q, q, q, None, 0.0, False, None, False, arch=A100, enabled=Enabled())
    assert (choice.kernel, "not contiguous" in choice.reason) == ("math", True)


def test_gradients_count_only_where_they_are_on() -> None:
    given: dict[str, Any] = {"query": (1, 2, 64, 200), "arch": RTX3090}
    assert chosen(**given).kernel == "efficient"
    with torch.no_grad():
        assert chosen(**given).kernel == "flash"


def test_a_tensor_off_its_alignment_is_refused_by_newer_versions_only() -> None:
    q = torch.empty(2 * 4 * 64 * 32 + 1, device="meta")[1:].view(2, 4, 64, 32)
    arguments: Any = (q, q, q, None, 0.0, False, None, False)
    assert choose(*arguments, arch=A100, enabled=Enabled()).kernel == "efficient"
    assert choose(*arguments, arch=A100, enabled=NEWER).kernel == "math"


def test_no_kernel_left_is_an_error_with_the_reasons() -> None:
    with pytest.raises(RuntimeError, match=r"No available kernel.*sm_80.*float32, and flash attention"):
        chosen(dtype=F32, enabled=Enabled(math=False, efficient=False))


def test_the_environment_can_put_cudnn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_order(H100, 92000)[0] == "cudnn"
    assert default_order((10, 3), 92000)[0] == "cudnn"
    assert default_order(A100, 92000)[0] == default_order(RTX5090, 92000)[0] == "flash"
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert default_order(H100, 92000)[0] == "flash"


def test_this_torch_is_known() -> None:
    (major, minor), cudnn = versions()
    assert torch.__version__.startswith(f"{major}.{minor}.")
    assert cudnn >= 91900
