"""What reductions stage on CUDA, against what an H100 allocated (memory snapshot of a training step, fp32)."""

from __future__ import annotations

import pytest
import torch

from memplan.trace.semantics.cuda.arch import Arch
from memplan.trace.semantics.cuda.kernels import FORMULAS
from memplan.trace.semantics.cuda.reductions import staging_buffer

H100 = Arch((9, 0), 132)


@pytest.mark.parametrize(
    ("name", "x", "dim", "recorded"),
    [
        # recorded in ../shared's full step: logits of 1024 tokens and 10,000 words, as the loss reduces them
        ("aten.max.dim", torch.empty(10_000, 1024, device="meta").t(), 1, (329_252_864, 32)),
        ("aten.sum.dim_IntList", torch.empty(10_000, 1024, device="meta").t(), [1], (82_313_216, 32)),
        # the gradient of a norm's weight: 4 x 256 tokens of 2560
        ("aten.sum.dim_IntList", torch.empty(4, 256, 2560, device="meta"), [0, 1], (20_971_520,)),
        # along the fastest dimension a block has a row of its own
        ("aten.sum.dim_IntList", torch.empty(1024, 2560, device="meta"), [1], ()),
        ("aten.mean.dim", torch.empty(1024, 2560, device="meta"), [-1], ()),
    ],
)
def test_recorded_sizes(name: str, x: torch.Tensor, dim: object, recorded: tuple[int, ...]) -> None:
    found = FORMULAS[name]((x, dim), {}, x.new_empty(1), H100)
    assert found[: len(recorded)] == recorded
    others = [size for size in found[len(recorded) :] if isinstance(size, int)]
    assert len(others) == len(found) - len(recorded)
    assert sum(others) < 1024  # the semaphores, where only the buffer is stated


def test_nothing_is_staged_where_nothing_is_reduced_or_little() -> None:
    assert staging_buffer(torch.empty(8, 8), [0], 4, H100) == ()
    assert staging_buffer(torch.empty(1, 4096), [0], 4, H100) == ()
    assert staging_buffer(torch.empty(0, 4096), [0], 4, H100) == ()


def test_more_multiprocessors_stage_more() -> None:
    x = torch.empty(8192, 4096, device="meta")
    small, large = (sum(staging_buffer(x, [0], 4, Arch((8, 0), count))) for count in (20, 108))
    assert 0 < small < large
