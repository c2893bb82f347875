"""The checks together: ids, and no alarm on the zoo that nobody has looked at."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import memplan
from memplan.checks.registry import CHECKS

ROOT = Path(__file__).resolve().parents[2]

# What the zoo has, each looked at: it is there. Everything else would be a false alarm.
REVIEWED: dict[str, set[str]] = {
    "gpt2": {"loss-memory", "math-attention"},  # eager attention; 512 x 50257 logits
    "conv_vae": set(),
    "lstm_lm": set(),
    "wavenet": {"loss-memory", "border-erosion", "full-resolution"},  # 4096 classes; causal: a note; dilated, no stride
    "multihead_attention": {"math-attention"},  # need_weights is on, so the probabilities are made
    "resnet18": set(),
    "mobilenet": {"in-place-clone"},  # hardswish and hardtanh in place
    "instancenorm_net": {"kept-for-nothing"},  # a reflection pad
    "groupnorm_net": {"kept-for-nothing"},
    "resnet18_inference": set(),
    "gpt2_inference": set(),
    "frozen_backbone": set(),
    "gradient_accumulation": set(),
    "retained_graph": set(),  # the second backward pass reads it
    "gradient_penalty": set(),
    "loss_logging": set(),
    "output_kept_between_steps": set(),
    "zero_grad_after_step": {"idle-state"},  # zero_grad(set_to_none=False)
    "unet3d": set(),
    "basic_unet3d": {"kept-for-nothing"},  # replication pads
    "segresnet": {"border-erosion"},  # a note: strided convolutions down, interpolation up
    "dynunet": {"border-erosion"},
}


def test_ids_and_titles_are_unique() -> None:
    assert len({check.id for check in CHECKS}) == len({check.title for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize("name", REVIEWED)
@pytest.mark.filterwarnings("ignore")  # transformers and MONAI warn of what is none of ours
def test_no_false_alarm_on_the_zoo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("monai")
    pytest.importorskip("transformers")
    for folder in (ROOT, ROOT / "benchmarks"):
        monkeypatch.syspath_prepend(str(folder))
    importlib.import_module("zoo")  # of benchmarks/: fills the registry
    builds = importlib.import_module("zoo.registry").ZOO
    found = {finding.id for finding in memplan.check(builds[name], device="cpu")}
    assert found == REVIEWED[name]
