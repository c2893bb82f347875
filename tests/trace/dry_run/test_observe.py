"""The dry card does what a real H100 did: every peak of building and of each step, and every size that was asked for.

Of convolutions cuDNN chooses other plans for a described H100 than it did on the real one: steps with these are in
`OTHER_PLANS`, with a bound.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from environment import ENVIRONMENT, needs_cuda_torch

import memplan
from memplan.dry.cuda_torch import find_torch
from memplan.trace.dry_run.builds import Packed
from memplan.trace.dry_run.process import run_dry

ROOT = Path(__file__).resolve().parents[3]
GOLDENS = ROOT / "goldens" / "nvidia-h100-80gb-hbm3" / "2.11.0-cu130"
EXACT = [
    "linear", "gpt2", "optimizer_adam", "optimizer_adafactor", "optimizer_adamw_fused", "attention_flash", "layer_norm",
    "softmax", "embedding_bag", "checkpoint_reentrant", "autocast_transformer", "cross_entropy_4096", "swiglu",
    "group_norm", "gradient_clipping", "batch_norm_channels_last",
]  # fmt: skip
OTHER_PLANS = {"resnet18": 0.045, "resnet50": 0.015, "densenet": 0.01, "groupnorm_net": 0.13, "mobilenet": 0.01}
"""Step -> how far the allocated peak is off at most, as a share of the real one."""
_BUILD = """
import sys
sys.path[:0] = [{tools!r}, {root!r}]
import golden_steps
SUBJECT = golden_steps.subjects()[0][{name!r}]

def build():
    return golden_steps.on_card(SUBJECT.build)()
"""


def is_release(version: str) -> bool:
    """Return whether the environment has the torch that the real histories are of."""
    return ENVIRONMENT is not None and find_torch(ENVIRONMENT).version == version


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], memplan.Trace]:
    """Return what the real card did, and a dry run of the same step."""
    golden = json.loads(gzip.decompress((GOLDENS / f"{name}.json.gz").read_bytes()))
    if not is_release(golden["versions"]["torch"]):
        pytest.skip(f"the real history is of torch {golden['versions']['torch']}")
    for variable, value in golden["environment"].items():
        monkeypatch.setenv(variable, value)
    file = folder / f"golden_{name}.py"
    file.write_text(_BUILD.format(tools=str(ROOT / "tools" / "gpu"), root=str(ROOT), name=name))
    build = Packed(f"golden_{name}", "build", str(file))
    return golden, run_dry(build, device="h100", steps=golden["steps"], environment=ENVIRONMENT)


def sizes(golden: dict[str, Any]) -> list[int]:
    """Return the bytes of all allocations of a golden file, in order."""
    left = iter(golden["events"]["sizes"])
    sized = [(action, next(left)) for action in golden["events"]["actions"] if action not in "frc"]
    return [size for action, size in sized if action == "a"]


@needs_cuda_torch
@pytest.mark.parametrize("name", EXACT)
def test_every_size_and_every_peak_is_the_real_ones(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden, trace = run(name, tmp_path, monkeypatch)
    assert [storage.bytes for storage in trace.storages] == sizes(golden)
    assert [[one.allocated, one.reserved] for one in trace.counters] == [golden["build"], *golden["peaks"]]


@needs_cuda_torch
@pytest.mark.parametrize("name", OTHER_PLANS)
def test_what_cudnn_plans_otherwise_is_told_and_bounded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden, trace = run(name, tmp_path, monkeypatch)
    real = golden["peaks"][-1][0]
    assert abs(trace.counters[-1].allocated - real) <= OTHER_PLANS[name] * real
    assert any(one.kind == "dry" and "cuDNN" in one.text for one in trace.assumptions)


@needs_cuda_torch
@pytest.mark.parametrize("name", [*EXACT[:4], *OTHER_PLANS])
def test_the_simulation_of_a_dry_run_counts_as_torch_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, trace = run(name, tmp_path, monkeypatch)
    steps = memplan.simulate(trace).steps
    assert [(step.peak_allocated, step.peak_reserved) for step in steps] == [
        (one.allocated, one.reserved) for one in trace.counters[1:]
    ]
