"""What kernels hold while they are tuned, as the emulated card's own allocator counts it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from environment import ENVIRONMENT, needs_cuda_torch
from torch._inductor.runtime.benchmarking import InductorBenchmarker
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from memplan._torch.patches import patched
from memplan.trace.dry_run.builds import Packed
from memplan.trace.dry_run.process import run_dry
from memplan.trace.trace import Trace

SCRIPT = """
import os
import torch
from memplan._torch import inductor

SHAPE = 2048, 4096  # 32 MiB; the card's L2 cache has 50

def kernels():
    mode = inductor.fake_mode()
    example = inductor.fake_tensor(SHAPE, (SHAPE[1], 1), torch.float32, mode, "cuda")
    of = inductor.traced(lambda x: [torch.softmax(torch.sin(x), 1).cos()], [example], mode, {})
    _, ops, results = inductor.inputs_ops_results(of)
    return inductor.kernels_of(inductor.lowerable(of, ops, results, backward=False))

def build(before, folder):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # nothing was tuned before
    function, x = kernels(), torch.zeros(SHAPE, device="cuda")

    def step():
        taken = torch.empty(before, dtype=torch.uint8, device="cuda")
        del taken
        torch.cuda.empty_cache()
        function([x])

    return step
"""
RESULT = 2048 * 4096 * 4
L2 = 50 << 20
SMALL = 2 << 20
"""A segment for small requests."""
LARGE = 20 << 20
"""A segment for larger ones, which is left free."""


def test_inductor_has_what_is_replaced_while_it_tunes() -> None:
    """Under other names a kernel would be tuned as before, without a word."""
    assert callable(CachingAutotuner.bench)
    assert "optimize_mem" in inspect.signature(CachingAutotuner.__init__).parameters
    benchmarker = InductorBenchmarker()
    with patched(benchmarker, L2_cache_size=0):
        ask = getattr(benchmarker, "get_device_cache_size", lambda: benchmarker.L2_cache_size)  # torch 2.11 has none
        assert ask() == 0
    assert "L2_cache_size" not in vars(benchmarker)


def _tuned(folder: Path, before: int) -> Trace:
    """Two steps, of which the first tunes a kernel after it has held this many bytes."""
    script = folder / "tuned.py"
    script.write_text(f"{SCRIPT}\ndef here():\n    return build({before}, {str(folder / 'inductor')!r})\n")
    trace = run_dry(Packed("tuned", "here", str(script)), device="h100", steps=2, environment=ENVIRONMENT)
    assert len(list(folder.rglob("*.best_config"))) == 1, "nothing was tuned"
    return trace


@needs_cuda_torch
def test_a_kernel_is_tuned_in_what_the_step_reserves(tmp_path: Path) -> None:
    trace = _tuned(tmp_path, 0)
    assert [one.reserved for one in trace.counters[1:]] == [2 * RESULT, 2 * RESULT]


@needs_cuda_torch
@pytest.mark.slow
@pytest.mark.parametrize(("before", "buffers"), [(RESULT + L2, 0), (RESULT + L2 + LARGE, 1)])
def test_the_cache_is_emptied_where_as_much_was_reserved(tmp_path: Path, before: int, buffers: int) -> None:
    trace = _tuned(tmp_path, before)
    assert trace.counters[1].reserved <= RESULT + before + SMALL
    assert min(1, sum(one.bytes == L2 for one in trace.storages)) == buffers
