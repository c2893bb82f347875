"""Scripts that train diffusion models run, and their recordings are the runs' to the byte."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import slow

import memplan
from memplan.errors import InputError, TargetError
from memplan.studies.recipes.diffusion import diffusion_script, find_pipeline, pipelines
from memplan.studies.recipes.lines import Options
from memplan.studies.recipes.models import Model
from memplan.studies.recipes.recipe import Diffusion, recipe_of
from memplan.studies.recipes.script import script_of

diffusers: Any = pytest.importorskip("diffusers")
transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries, one about another

UNET = {
    "_class_name": "UNet2DConditionModel", "sample_size": 8, "block_out_channels": [32, 64], "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"], "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 32, "attention_head_dim": 8, "norm_num_groups": 8,
}  # fmt: skip
VAE = {
    "_class_name": "AutoencoderKL", "block_out_channels": [16, 32, 32, 32], "norm_num_groups": 8,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
}  # fmt: skip
TEXT = {
    "model_type": "clip_text_model", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


TIMES = {
    "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "cross_attention_dim": 32 + 48,
    "projection_class_embeddings_input_dim": 48 + 6 * 8,
}  # fmt: skip
TEXT_2 = TEXT | {"hidden_size": 48, "projection_dim": 48}


def save(folder: Path, *, is_xl: bool = False) -> str:
    models = {"unet": UNET | TIMES if is_xl else UNET, "vae": VAE, "text_encoder": TEXT}
    for name, config in (models | ({"text_encoder_2": TEXT_2} if is_xl else {})).items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("recipe", "options", "is_xl"),
    [
        ("diffusion", Options(2, dtype="fp32"), False),
        ("diffusion:r=4", Options(2, dtype="fp32", checkpointing=True), False),
        ("diffusion:r=4", Options(2, dtype="fp32"), True),
        *slow(
            ("diffusion:r=4", Options(2, dtype="fp32", autocast="bf16"), False),
            ("diffusion:size=128", Options(1, None, "sgd:lr=0.1", "fp32", checkpointing=True), False),
            ("diffusion:size=128", Options(1, dtype="fp32", checkpointing=True), True),
        ),
    ],
)
def test_the_recorded_peak_is_the_run_of_the_printed_script(
    recipe: str, options: Options, is_xl: bool, tmp_path: Path
) -> None:
    kind = recipe_of(recipe)
    assert isinstance(kind, Diffusion)
    path = tmp_path / "train.py"
    path.write_text(diffusion_script(find_pipeline(save(tmp_path, is_xl=is_xl)), kind, options), encoding="utf-8")
    build = runpy.run_path(str(path))["build"]
    recorded, measured = (memplan.simulate(run(build)).peak_allocated for run in (memplan.record, memplan.measure))
    assert recorded == pytest.approx(measured, rel=0.001)


@pytest.mark.parametrize("name", pipelines())
def test_parameters_are_as_published(name: str) -> None:
    pipeline = find_pipeline(name)
    with torch.device("meta"):
        models = (
            diffusers.UNet2DConditionModel(**pipeline.unet),
            diffusers.AutoencoderKL(**pipeline.vae),
            transformers.CLIPTextModel(transformers.CLIPTextConfig(**pipeline.text)),
            *[transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**pipeline.text_2))]
            * pipeline.is_xl,
        )
    assert [sum(p.numel() for p in model.parameters()) for model in models] == pipelines()[name]["parameters"]


def test_what_is_no_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no pipeline 'stable-difusion-1.5'.* Did you mean stable-diffusion-1.5"):
        find_pipeline("stable-difusion-1.5")
    path = Path(save(tmp_path), "unet", "config.json")
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="a UNet's configuration"):
        find_pipeline(str(tmp_path))
    with pytest.raises(InputError, match="the recipe diffusion, and small is a LlamaForCausalLM"):
        script_of(Model("small", "LlamaForCausalLM", {}), Diffusion(), Options())
    with pytest.raises(InputError, match="no --seq"):
        diffusion_script(find_pipeline("stable-diffusion-1.5"), Diffusion(), Options(sequence=8))
