"""Scripts of models and recipes run, and their recordings are the runs' to the byte."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from environment import slow, thinned
from models.small_llama import small_llama

import memplan
from memplan.errors import InputError, MemplanError
from memplan.studies.recipes.lines import Options
from memplan.studies.recipes.models import Model
from memplan.studies.recipes.recipe import Lora, recipe_of
from memplan.studies.recipes.script import script_of

pytest.importorskip("transformers")
pytest.importorskip("peft")
# transformers 5.23 renames what earlier versions need
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")


def small(architecture: str, **config: object) -> Model:
    return Model("small", architecture, config)


MODELS = {
    "GPT-2": small("GPT2LMHeadModel", vocab_size=320, n_positions=64, n_embd=48, n_layer=2, n_head=4),
    "BERT": small(
        "BertForMaskedLM", vocab_size=320, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
    ),
    "BERT for classes": small(
        "BertForSequenceClassification", vocab_size=320, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
    ),
    "ViT": small(
        "ViTForImageClassification", hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        image_size=32, patch_size=8, num_channels=3, num_labels=10,
    ),
    "Whisper": small(
        "WhisperForConditionalGeneration", vocab_size=320, num_mel_bins=16, d_model=48, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
        max_source_positions=50, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    ),
}  # fmt: skip


def peaks(script: str, folder: Path) -> tuple[int, int]:
    """Peak of the recording, and of a real run of the script's file."""
    path = folder / "train.py"
    path.write_text(script, encoding="utf-8")
    build = runpy.run_path(str(path))["build"]
    recorded, measured = memplan.record(build), memplan.measure(build)
    return memplan.simulate(recorded).peak_allocated, memplan.simulate(measured).peak_allocated


@pytest.mark.parametrize(
    ("recipe", "checkpointing"),
    [
        ("lora:r=4,targets=all", True),
        *slow(
            ("full", False),
            ("freeze:layers=1", True),
            ("full", True),
            ("freeze:layers=1", False),
            ("lora:r=4", False),
            ("dora:r=4", False),
            ("dora:r=4", True),
        ),
    ],
)
def test_the_recorded_peak_is_the_run_of_the_printed_script(recipe: str, checkpointing: bool, tmp_path: Path) -> None:
    options = Options(2, 32, dtype="float32", checkpointing=checkpointing)
    recorded, measured = peaks(script_of(small_llama(tmp_path), recipe_of(recipe), options), tmp_path)
    assert recorded == measured


@pytest.mark.parametrize(
    ("recipe", "checkpointing"), [("qlora:r=4,targets=all", True), *slow(("qlora:r=4,prepare=false", False))]
)
def test_weights_of_four_bits_are_recorded_as_they_run(recipe: str, checkpointing: bool, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    script = script_of(
        small_llama(tmp_path), recipe_of(recipe), Options(2, 32, dtype="fp32", checkpointing=checkpointing)
    )
    peaks(script, tmp_path)  # the first makes the tables of bitsandbytes
    recorded, measured = peaks(script, tmp_path)
    assert recorded == measured


@pytest.mark.parametrize("first", ["lora", "qlora"])
def test_packed_weights_are_half_a_byte_on_a_card(first: str, tmp_path: Path) -> None:
    """By hand: what is packed takes half a byte and a scale for 64 values; scales of fp32, or of a byte and one more
    for 256. Also after a recording for the CPU in the same process."""
    pytest.importorskip("bitsandbytes")
    peaks(script_of(small_llama(tmp_path), recipe_of(first), Options(1, 16, "none", "fp32")), tmp_path)
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}
    model = small("LlamaForCausalLM", vocab_size=320, num_hidden_layers=2, max_position_embeddings=64, **sizes)
    packed = 2 * (4 * 1024 * 1024 + 3 * 1024 * 4096)
    rest = 2 * (2 * 320 * 1024 + 5 * 1024)  # embeddings, the head, norms
    for double, scales in ((False, 4 / 64), (True, 1 / 64 + 4 / 64 / 256)):
        recipe = recipe_of(f"qlora:r=1,double={str(double).lower()},prepare=false")
        script = script_of(model, recipe, Options(1, 16, "none"))
        (tmp_path / "train.py").write_text(script, encoding="utf-8")
        build = runpy.run_path(str(tmp_path / "train.py"))["build"]
        explained = memplan.explain(build, device="rtx4090").by_cause
        adapters = 2 * 2 * 2 * 1024 * 4  # of queries and values, fp32
        expected = packed * (0.5 + scales) + rest + adapters
        held = explained["weight"] + explained["input"]  # scales are no parameters
        assert held == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize("name", thinned(MODELS, 6))
def test_every_kind_of_model_runs(name: str, tmp_path: Path) -> None:
    sequence = None if name == "ViT" else 16
    script = script_of(MODELS[name], recipe_of("full"), Options(2, sequence, "sgd:lr=0.1", "float32"))
    recorded, measured = peaks(script, tmp_path)
    assert recorded == measured


def test_the_options_are_in_the_script(tmp_path: Path) -> None:
    script = script_of(
        small_llama(tmp_path), recipe_of("full"), Options(3, 32, "sgd:lr=0.1,momentum=0.9", "fp32", "bf16")
    )
    for line in (
        "def build(batch=3, sequence=32):", "torch.optim.SGD(trained, lr=0.1, momentum=0.9)", "dtype = torch.float32",
        "with torch.autocast(device, torch.bfloat16):",
    ):  # fmt: skip
        assert line in script
    without = script_of(small_llama(tmp_path), recipe_of("full"), Options(optimizer="none"))
    assert "optimizer" not in without
    assert "sequence=128" in without  # as long as its positions, which are less than 1024


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("lora:targets=q_porj", Options(), "has no layer 'q_porj' to adapt.* Did you mean .*q_proj"),
        ("full", Options(sequence=129), "--seq 129, and .* has 128 positions"),
        ("full", Options(optimizer="adamm"), "there is no optimizer 'adamm'.*Did you mean adam"),
        ("full", Options(optimizer="collections:Counter"), "Expected an optimizer of torch.optim"),
        ("full", Options(dtype="bf17"), "dtype 'bf17'"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(recipe: str, options: Options, message: str, tmp_path: Path) -> None:
    with pytest.raises(MemplanError, match=message):
        script_of(small_llama(tmp_path), recipe_of(recipe), options)


def test_models_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(InputError, match="small takes images"):
        script_of(MODELS["ViT"], recipe_of("full"), Options(sequence=8))
    with pytest.raises(InputError, match="an architecture whose name ends with ForCausalLM"):
        script_of(small("LlavaForConditionalGeneration"), recipe_of("full"), Options())
    with pytest.raises(InputError, match=r"transformers .* has no MineForCausalLM"):
        script_of(small("MineForCausalLM"), recipe_of("full"), Options())


def test_a_model_without_linear_layers_is_not_packed() -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(InputError, match="small has no linear layer to pack to four bits"):
        script_of(MODELS["GPT-2"], recipe_of("qlora"), Options())


def test_bitsandbytes_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.studies.recipes.lines.find_spec", lambda name: name != "bitsandbytes" or None)
    with pytest.raises(InputError, match=r"bitsandbytes is not installed here.* pip install bitsandbytes"):
        script_of(small_llama(tmp_path), recipe_of("qlora"), Options())


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.studies.recipes.lines.find_spec", lambda name: None if name == "peft" else name)
    with pytest.raises(InputError, match=r"peft is not installed here.* pip install 'memplan\[recipes\]'"):
        script_of(small_llama(tmp_path), Lora(), Options())
