"""Write scripts that train a diffusion model with the classes of diffusers; find its configurations."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from memplan._json import Unreadable, parse, read_text
from memplan.errors import InputError, TargetError
from memplan.studies.recipes.lines import (
    SCRIPT,
    Options,
    adapter_lines,
    call_lines,
    optimizer_lines,
    require,
    required,
    step_lines,
    written,
)
from memplan.studies.recipes.recipe import Diffusion
from memplan.trace.naming.parsing import offer
from memplan.trace.spec import dtype_of


@dataclass(frozen=True)
class Pipeline:
    """The models of a text-to-image pipeline: a UNet, an autoencoder and one text encoder or, as SDXL, two."""

    name: str
    size: int
    """Pixels of an image in each dimension."""
    unet: Mapping[str, Any] = field(default_factory=dict[str, Any])
    vae: Mapping[str, Any] = field(default_factory=dict[str, Any])
    text: Mapping[str, Any] = field(default_factory=dict[str, Any])
    text_2: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_xl: bool = False
    """Whether there are two text encoders, and the UNet takes the second one's projection and the images' sizes."""
    path: str | None = None
    """Folder with the configurations, instead of those here."""


@cache
def pipelines() -> Mapping[str, Mapping[str, Any]]:
    """Return the public pipelines by name: the configuration of each model.

    Each entry also has the published numbers of parameters, and the address at which the configurations were read.
    """
    return parse(read_text(str(Path(__file__).with_name("pipelines.json"))))


def find_pipeline(name: str) -> Pipeline:
    """Return the pipeline of a name, or of a folder as diffusers saves it.

    Raises:
        TargetError: there is no such pipeline, with the nearest names.
        InputError: a folder whose UNet's config.json is damaged.
    """
    entry = pipelines().get(name.lower())
    if entry is not None:
        models = [entry.get(part, {}) for part in ("unet", "vae", "text", "text_2")]
        return Pipeline(name.lower(), entry["size"], *models, is_xl="text_2" in entry)
    parts = [Path(name, part, "config.json") for part in ("unet", "vae", "text_encoder")]
    if not all(part.is_file() for part in parts):
        raise TargetError(
            f"there is no pipeline {name!r}",
            expected="a name, or a folder with unet/config.json, vae/config.json and text_encoder/config.json",
            do=offer(name.lower(), pipelines()),
        )
    try:
        config = parse(read_text(str(parts[0])))
        is_xl = Path(name, "text_encoder_2", "config.json").is_file()
        return Pipeline(name, 8 * config["sample_size"], is_xl=is_xl, path=str(Path(name).resolve()))
    except (Unreadable, KeyError, TypeError) as error:
        raise InputError(f"{parts[0]}: {error}", expected="a UNet's configuration", do="Name another") from None


def diffusion_script(pipeline: Pipeline, recipe: Diffusion, options: Options) -> str:
    """Return a script whose ``build(batch, size)`` returns the training step; run as a program, it takes two. Raises
    InputError: diffusers is not installed; a length of sequences was named; an optimizer that is not torch's."""
    for library in ("transformers", *required(recipe)):
        require(library)
    if options.sequence is not None:
        raise InputError(f"--seq {options.sequence} of a diffusion model", expected="no --seq", do="Leave it out")
    imports = [
        "import torch",
        "from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel",
        *(["from peft import LoraConfig"] if recipe.adapters is not None else []),
        "from transformers import CLIPTextConfig, CLIPTextModel"
        + (", CLIPTextModelWithProjection" if pipeline.is_xl else ""),
    ]
    return SCRIPT.format(
        imports="\n".join(imports),
        arguments=f"batch={options.batch or 1}, size={recipe.size or pipeline.size}",
        body=textwrap.indent("\n".join(_body(pipeline, recipe, options)), " " * 4),
    )


def _body(pipeline: Pipeline, recipe: Diffusion, options: Options) -> Iterator[str]:
    """Yield the lines of ``build``, which do what diffusers' examples of training do."""
    frozen = dtype_of(options.autocast or options.dtype)  # of models that are not trained, and of one with adapters
    yield f"dtype, frozen = {frozen if recipe.adapters is not None else dtype_of(options.dtype)}, {frozen}"
    yield from _model_lines(pipeline)
    images = "torch.float32" if pipeline.is_xl else "frozen"  # SDXL's autoencoder overflows in 16 bits
    yield f"vae.to(device, {images}).requires_grad_(False)"
    for name in ("text", "text_2") if pipeline.is_xl else ("text",):
        yield f"{name}.to(device, frozen).requires_grad_(False)"
    yield "unet.to(device, dtype).train()"
    yield 'noises = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")'
    if recipe.adapters is not None:
        yield "unet.requires_grad_(False)"
        yield from adapter_lines(recipe.adapters)
        yield "unet.add_adapter(adapters)"
        if options.autocast is not None:
            yield "for part in unet.parameters():"
            yield "    if part.requires_grad:"
            yield f"        part.data = part.data.to({dtype_of(options.dtype)})"
    if options.checkpointing:
        yield "unet.enable_gradient_checkpointing()"
    yield from optimizer_lines("unet", options)
    yield f"images = torch.rand(batch, 3, size, size, dtype={images}, device=device)"
    words = "(batch, text.config.max_position_embeddings)"
    yield f"words = torch.randint(text.config.vocab_size, {words}, device=device)"
    if pipeline.is_xl:
        yield f"words_2 = torch.randint(text_2.config.vocab_size, {words}, device=device)"
    yield "\ndef step():"
    yield "    latents = vae.encode(images).latent_dist.sample() * vae.config.scaling_factor"
    if pipeline.is_xl:
        yield "    latents = latents.to(frozen)"
    yield "    noise = torch.randn_like(latents)"
    yield "    times = torch.randint(noises.config.num_train_timesteps, (batch,), device=device)"
    yield "    noisy = noises.add_noise(latents, noise, times)"
    if pipeline.is_xl:
        yield "    first, second = text(words, output_hidden_states=True), text_2(words_2, output_hidden_states=True)"
        yield "    states = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], -1)"
        yield "    sizes = torch.tensor([[size, size, 0, 0, size, size]] * batch, dtype=frozen, device=device)"
        yield '    conditions = {"text_embeds": second.text_embeds, "time_ids": sizes}'
        call = "unet(noisy, times, states, added_cond_kwargs=conditions, return_dict=False)"
    else:
        yield "    states = text(words, return_dict=False)[0]"
        call = "unet(noisy, times, states, return_dict=False)"
    yield from step_lines(
        "unet", options, f"predicted = {call}[0]",
        "torch.nn.functional.mse_loss(predicted.float(), noise.float()).backward()",
    )  # fmt: skip


def _model_lines(pipeline: Pipeline) -> Iterator[str]:
    """Yield the lines that make the models, in the host's memory."""
    if pipeline.path is None:
        yield from call_lines("unet = UNet2DConditionModel", written(pipeline.unet))
        yield from call_lines("vae = AutoencoderKL", written(pipeline.vae))
        yield from call_lines("text = CLIPTextModel(CLIPTextConfig", written(pipeline.text), end="))")
        if pipeline.is_xl:
            start = "text_2 = CLIPTextModelWithProjection(CLIPTextConfig"
            yield from call_lines(start, written(pipeline.text_2), end="))")
        return
    yield f"path = {pipeline.path!r}"
    for name, kind in (("unet", "UNet2DConditionModel"), ("vae", "AutoencoderKL")):
        yield f'{name} = {kind}.from_config({kind}.load_config(path, subfolder="{name}"))'
    yield 'text = CLIPTextModel(CLIPTextConfig.from_pretrained(path, subfolder="text_encoder"))'
    if pipeline.is_xl:
        yield 'config = CLIPTextConfig.from_pretrained(path, subfolder="text_encoder_2")'
        yield "text_2 = CLIPTextModelWithProjection(config)"
