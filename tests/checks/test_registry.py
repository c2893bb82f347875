"""The checks together: ids, and no alarm on the zoo that nobody has looked at."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

import memplan
from memplan.checks.registry import CHECKS

ROOT = Path(__file__).resolve().parents[2]

# What the zoo has, each looked at: it is there. Everything else would be a false alarm.
ON_THE_CPU: dict[str, set[str]] = {
    "gpt2": {"loss-memory", "math-attention"},  # eager attention; 512 x 50257 logits
    "conv_vae": {"kept-for-nothing"},  # an ELU that is not in place
    "lstm_lm": set(),
    "wavenet": {"loss-memory", "border-erosion", "full-resolution"},  # 4096 classes; causal: a note; dilated, no stride
    "multihead_attention": {"math-attention"},  # need_weights is on, so the probabilities are made
    "resnet18": set(),
    "mobilenet": {"in-place-clone"},  # hardswish and hardtanh in place
    "instancenorm_net": {"kept-for-nothing", "border-erosion"},  # LeakyReLU, reflection pads; half a pixel off: a note
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

ON_A_CARD: dict[str, set[str]] = {
    "gan": {"unread-gradients"},  # the generator's backward pass fills the discriminator's, which are zeroed unread
    "gpt2": {"loss-memory"},  # a fused kernel takes dropout there
    "llama": {"loss-memory", "math-attention"},  # float32, and key heads for several query heads: repeated they fit
    "llama_gradient_checkpointing": {"loss-memory"},  # attention is recomputed, one layer at a time
    "llama_lora": {"loss-memory", "math-attention"},
    "bert": {"loss-memory"},
    "t5": {"loss-memory", "kept-for-nothing"},  # ReLU, then dropout
    "wavenet": ON_THE_CPU["wavenet"],
    "multihead_attention": {"math-attention"},
    "mobilenet": {"in-place-clone"},
    "groupnorm_net": {"kept-for-nothing"},
    "instancenorm_net": ON_THE_CPU["instancenorm_net"],
    "zero_grad_after_step": {"idle-state"},
    # a real card took workspaces for these 3D convolutions, none of which is a surprise
    "unet3d": set(),
    "basic_unet3d": {"kept-for-nothing"},
    "unetr": set(),
    "segresnet": {"border-erosion"},
    "dynunet": {"border-erosion"},
}
QUIET = [
    "conv_vae", "gpt2_inference", "optimizer_sgd", "optimizer_sgd_foreach", "optimizer_adam",
    "optimizer_adamw_fused", "optimizer_adafactor", "lstm_lm", "gru_classifier", "sdpa_transformer",
    "weight_tying", "checkpoint_non_reentrant", "checkpoint_reentrant", "bf16_transformer",
    "autocast_transformer", "resnet18", "resnet18_channels_last", "resnet50", "densenet", "vit",
    "resnet18_inference", "gradient_accumulation", "autocast_conv", "frozen_backbone", "frozen_first_layers",
    "gradient_clipping", "retained_graph", "gradient_penalty", "loss_logging", "output_kept_between_steps",
    "moving_average",
]  # fmt: skip
"""Without a finding on a card."""
CASES = [
    *((name, "cpu", found) for name, found in ON_THE_CPU.items()),
    *((name, "h100", found) for name, found in ON_A_CARD.items()),
    *((name, "h100", set[str]()) for name in QUIET),
]
LONG = (
    *("t5", "unetr", "llama", "llama_gradient_checkpointing", "llama_lora", "bert", "segresnet", "basic_unet3d"),
    *("zero_grad_after_step", "checkpoint_reentrant", "autocast_conv", "unet3d", "dynunet", "gan"),
    *("gradient_accumulation", "resnet18_inference", "gpt2_inference", "frozen_backbone", "loss_logging"),
    *(name for name in QUIET if name != "sdpa_transformer"),
)
"""Take long, and have kin among the others."""


def repeats(name: str, device: str) -> bool:
    """Whether a case is left to `make test-all`: long ones, and on the CPU what a card has findings of."""
    return name in LONG or (device == "cpu" and name in ON_A_CARD)


def test_ids_and_titles_are_unique() -> None:
    assert len({check.id for check in CHECKS}) == len({check.title for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize(
    ("name", "device", "reviewed"),
    [pytest.param(*case, marks=[pytest.mark.slow] * repeats(*case[:2]), id=f"{case[0]}-{case[1]}") for case in CASES],
)
@pytest.mark.filterwarnings("ignore")  # transformers and MONAI warn of what is none of ours
def test_no_false_alarm_on_the_zoo(name: str, device: str, reviewed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("monai")
    pytest.importorskip("transformers")
    for folder in (ROOT, ROOT / "benchmarks"):
        monkeypatch.syspath_prepend(str(folder))
    importlib.import_module("zoo")  # of benchmarks/: fills the registry
    builds = importlib.import_module("zoo.registry").ZOO
    found = {finding.id for finding in memplan.check(builds[name], device=device)}
    assert found == reviewed


# Every warning on 150 models of other people, read beside the code that it names (benchmarks/check_corpus.py)
ROWS = json.loads((ROOT / "benchmarks" / "results" / "check_corpus.json").read_text("utf-8"))["rows"]
_EAGER = "the code multiplies queries and keys, applies softmax, and multiplies again; nothing reads the matrices else"
_PADDED = "F.pad(x, ..., 'replicate') is called also where no side is padded, and keeps its input, whose shape it needs"
_UNUSED_HEADS = "without deep supervision three of four final convolutions are computed and not returned"
_BYTES = "forward() rounds the latents to bytes, behind which no gradient goes"
_POOLED = "an average pool keeps its input, of which its gradient needs the shape"
JUDGED: dict[tuple[str, str], tuple[bool, str]] = {
    ("big_bird", "math-attention"): (True, _EAGER),
    ("blip", "math-attention"): (True, _EAGER),
    ("imagegpt", "math-attention"): (True, _EAGER),
    ("pvt_v2", "math-attention"): (True, _EAGER),
    ("vilt", "math-attention"): (True, _EAGER),
    ("UNETR 2d", "math-attention"): (True, f"{_EAGER}; use_flash_attention=True would not hold them"),
    ("SwinUNETR 2d", "math-attention"): (True, f"{_EAGER}; bias and mask can be given to the fused call as its mask"),
    ("ViT 3d", "math-attention"): (True, f"{_EAGER}; use_flash_attention=True would not hold them"),
    ("BasicUNet 2d", "kept-for-nothing"): (True, _PADDED),
    ("BasicUNet 3d", "kept-for-nothing"): (True, _PADDED),
    ("BasicUNetPlusPlus 2d", "kept-for-nothing"): (True, _PADDED),
    ("BasicUNetPlusPlus 3d", "kept-for-nothing"): (True, _PADDED),
    ("BasicUNetPlusPlus 2d", "untrained-parameters"): (True, _UNUSED_HEADS),
    ("BasicUNetPlusPlus 3d", "untrained-parameters"): (True, _UNUSED_HEADS),
    ("AutoencoderTiny", "untrained-parameters"): (True, _BYTES),
    ("T2IAdapter", "kept-for-nothing"): (True, _POOLED),
}  # fmt: skip
"""Model and check -> whether the warning is true, and why."""


def test_each_warning_was_read_and_two_percent_at_most_are_false() -> None:
    warned = [(row["name"], one["id"]) for row in ROWS for one in row.get("warnings", ())]
    assert set(warned) == set(JUDGED)
    assert len(ROWS) == 150
    assert sum("left_out" not in row for row in ROWS) >= 149
    assert sum(not JUDGED[one][0] for one in warned) <= 0.02 * len(warned)
