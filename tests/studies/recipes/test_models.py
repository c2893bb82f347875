"""Configurations of the catalogue against the published numbers of parameters, and where else a model is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from environment import slow

from memplan.errors import InputError, TargetError
from memplan.studies.recipes.models import catalogue, find_model

transformers = pytest.importorskip("transformers")

PUBLISHED = {
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192, "llama-3-8b":
    8_030_261_248, "llama-3-70b": 70_553_706_496, "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "tinyllama-1.1b": 1_100_048_384, "smollm2-135m":
    134_515_008, "smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384, "yi-6b": 6_061_035_520,
    "deepseek-llm-7b": 6_910_365_696, "mistral-7b-v0.1": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400, "mixtral-8x7b": 46_702_792_704, "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b":
    1_543_714_304, "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920, "qwen3-1.7b":
    1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b":
    32_762_123_264, "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176, "gemma-3-1b": 999_885_952, "phi-3-mini-4k": 3_821_079_552, "phi-3-medium-4k":
    13_960_238_080, "phi-4": 14_659_507_200, "phi-2": 2_779_683_840, "gpt2": 124_439_808, "gpt2-medium":
    354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200, "pythia-160m": 162_322_944, "pythia-410m":
    405_334_016, "pythia-1b": 1_011_781_632, "pythia-1.4b": 1_414_647_808, "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016, "pythia-12b": 11_846_072_320, "opt-125m": 125_239_296, "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984, "bert-base-uncased": 109_514_298, "bert-large-uncased": 335_174_458, "roberta-base":
    124_697_433, "distilbert-base-uncased": 66_985_530, "vit-base-patch16-224": 86_567_656, "vit-large-patch16-224":
    304_326_632, "whisper-tiny": 37_760_640, "whisper-base": 72_593_920, "whisper-small": 241_734_912,
    "whisper-medium": 763_857_920, "whisper-large-v3": 1_543_490_560,
}  # fmt: skip
"""Parameters by model card, or by the index of the published weights; a tied embedding counts once."""


def test_the_published_numbers_cover_the_catalogue() -> None:
    assert set(PUBLISHED) == set(catalogue())


FEW = (
    "llama-3.2-1b", "mistral-7b-v0.1", "mixtral-8x7b", "qwen2.5-0.5b", "qwen3-0.6b", "gemma-2-2b", "gemma-3-270m",
    "phi-3-mini-4k", "phi-2", "gpt2", "pythia-160m", "opt-125m", "bert-base-uncased", "roberta-base",
    "distilbert-base-uncased", "vit-base-patch16-224", "whisper-tiny",
)  # fmt: skip
"""A small one of each architecture."""


@pytest.mark.parametrize("name", [*FEW, *slow(*(name for name in PUBLISHED if name not in FEW))])
def test_a_configuration_has_the_published_number_of_parameters(name: str) -> None:
    model = find_model(name)
    kind = getattr(transformers, model.architecture)
    with torch.device("meta"):
        made = kind._from_config(kind.config_class(**model.config))
    assert sum(parameter.numel() for parameter in made.parameters()) == PUBLISHED[name]


def test_a_config_json_and_its_folder_are_read(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in (tmp_path, tmp_path / "config.json"):
        model = find_model(str(name))
        assert (model.architecture, model.path, model.positions) == ("LlamaForCausalLM", str(name), 64)


def test_an_id_of_the_local_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--some--model"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc", encoding="utf-8")
    config = {"architectures": ["GPT2LMHeadModel"], "n_positions": 32}
    (cached / "snapshots" / "abc" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = find_model("some/model")
    assert (model.architecture, model.path, model.positions) == ("GPT2LMHeadModel", "some/model", 32)


@pytest.mark.parametrize("name", ["lama-3.1-8b", "meta-llama/Llama-3.1-8b", "Llama 3.1 8b"])
def test_an_unknown_model_offers_the_nearest(name: str) -> None:
    with pytest.raises(TargetError, match=r"there is no model .* Did you mean .*llama-3.1-8b") as caught:
        find_model(name)
    assert name in caught.value.found


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "Expected a config.json of transformers"), ("{}", "names no architecture"), ("[]", "names no architecture")],
)
def test_a_damaged_config_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        find_model(str(tmp_path))
