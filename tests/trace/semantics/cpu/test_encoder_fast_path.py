"""Encoder layers and self-attention of the fast path, really run against ``transient_bytes``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import slow

_spec = importlib.util.spec_from_file_location("measured", Path(__file__).with_name("test_table.py"))
assert _spec is not None
assert _spec.loader is not None
_measured: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_measured)
compare = _measured.compare

aten = torch.ops.aten

ATTENTIONS = [(4, 128, 256, 512), (2, 256, 256, 2048)]
MASKS = [(), (0,), (1,), (2,)]


def masked(kind: tuple[int, ...], batch: int, length: int) -> torch.Tensor | None:
    sizes = {0: (length, length), 1: (batch, length), 2: (batch, 8, length, length)}
    return torch.zeros(sizes[kind[0]], dtype=torch.bool) if kind else None


@pytest.mark.parametrize("sizes", ATTENTIONS)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("norm_first", [True, *slow(False)])
def test_encoder_layer(sizes: tuple[int, int, int, int], kind: tuple[int, ...], norm_first: bool) -> None:
    batch, length, width, hidden = sizes
    x = torch.randn(batch, length, width)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(*shape)

    given = [x, width, 8, of(3 * width, width), of(3 * width), of(width, width), of(width), False, norm_first, 1e-5]
    given += [of(width) for _ in range(4)] + [of(hidden, width), of(hidden), of(width, hidden), of(width)]
    with torch.no_grad():
        compare(aten._transformer_encoder_layer_fwd.default, *given, masked(kind, batch, length), *kind)


@pytest.mark.parametrize("sizes", ATTENTIONS)
@pytest.mark.parametrize("kind", MASKS[:2])
@pytest.mark.parametrize("weights", [(False, True), (True, True), (True, False)])
def test_native_attention(sizes: tuple[int, int, int, int], kind: tuple[int, ...], weights: tuple[bool, bool]) -> None:
    batch, length, width, _ = sizes
    x = torch.randn(batch, length, width)
    given = [x, x, x, width, 8, *(torch.randn(3 * width, width), torch.randn(3 * width))]
    given += [torch.randn(width, width), torch.randn(width)]
    with torch.no_grad():
        compare(aten._native_multi_head_attention.default, *given, masked(kind, batch, length), *weights, *kind)
