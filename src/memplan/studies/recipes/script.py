"""Write the training script of a model and a recipe."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memplan.errors import InputError
from memplan.studies.recipes.lines import (
    SCRIPT,
    Options,
    adapter_lines,
    call_lines,
    default_batch,
    optimizer_lines,
    require,
    required,
    step_lines,
    written,
)
from memplan.studies.recipes.models import Model
from memplan.studies.recipes.recipe import Diffusion, Freeze, Full, Grpo, Lora, Qlora, Recipe, Trained
from memplan.studies.recipes.trainers import check_sizes, trainer_imports, trainer_lines
from memplan.trace.naming.parsing import offer
from memplan.trace.spec import dtype_of

_SEQUENCE = 1024


@dataclass(frozen=True)
class _Task:
    """The class of transformers that makes a kind of model, and the lines that make its inputs."""

    factory: str
    inputs: tuple[str, ...]

    @property
    def has_sequence(self) -> bool:
        """Whether the inputs have a length that can be chosen."""
        return any("sequence" in line for line in self.inputs)


_IDS = "ids = torch.randint(config.vocab_size, (batch, sequence), device=device)"
_TEXT = (_IDS, 'inputs = {"input_ids": ids, "labels": ids}')
_CLASSES = (
    _IDS,
    'inputs = {"input_ids": ids, "labels": torch.randint(config.num_labels, (batch,), device=device)}',
)
_IMAGES = (
    "sizes = (batch, config.num_channels, config.image_size, config.image_size)",
    "labels = torch.randint(config.num_labels, (batch,), device=device)",
    'inputs = {"pixel_values": torch.rand(sizes, dtype=dtype, device=device), "labels": labels}',
)
_SPEECH = (
    "sizes = (batch, config.num_mel_bins, 2 * config.max_source_positions)",
    _IDS,
    'inputs = {"input_features": torch.rand(sizes, dtype=dtype, device=device), "labels": ids}',
)
_TASKS = {
    "ForCausalLM": _Task("AutoModelForCausalLM", _TEXT),
    "LMHeadModel": _Task("AutoModelForCausalLM", _TEXT),
    "ForMaskedLM": _Task("AutoModelForMaskedLM", _TEXT),
    "ForSequenceClassification": _Task("AutoModelForSequenceClassification", _CLASSES),
    "ForImageClassification": _Task("AutoModelForImageClassification", _IMAGES),
    "WhisperForConditionalGeneration": _Task("AutoModelForSpeechSeq2Seq", _SPEECH),
}
"""End of an architecture's name -> its task."""


def script_of(model: Model, recipe: Recipe, options: Options) -> str:
    """Return a script whose ``build(batch, sequence)`` returns the training step; run as a program, it takes two.
    Raises InputError: transformers or peft is not installed, or this transformers has no such architecture; a sequence
    that the model cannot have; layers that it does not have; an optimizer that is not torch's."""
    if isinstance(recipe, Diffusion):
        raise InputError(
            f"the recipe diffusion, and {model.name} is a {model.architecture}", expected="a diffusion model",
            do="Name one: stable-diffusion-1.5",
        )  # fmt: skip
    require("transformers")
    task = _task_of(model)
    config = _config_class(model)
    sequence = _sequence(model, task, options.sequence)
    adapters = recipe.adapters if isinstance(recipe, Trained) else recipe
    if isinstance(recipe, Trained):
        if task.factory != "AutoModelForCausalLM":
            raise InputError(
                f"the recipe {type(recipe).__name__.lower()}, and {model.name} is a {model.architecture}",
                expected="a causal language model", do="Explain full or lora",
            )  # fmt: skip
        check_sizes(recipe, options.batch, sequence)
    for library in required(recipe, options.on_card):
        require(library)
    if isinstance(adapters, Lora):
        _check_targets(model, adapters, config, task)
    names = [task.factory, "AutoConfig" if model.path is not None else config.__name__]
    imports = trainer_imports(recipe, names) if isinstance(recipe, Trained) else _imports(recipe, names)
    return SCRIPT.format(
        imports="\n".join(imports),
        arguments=f"batch={options.batch or default_batch(recipe)}"
        + ("" if sequence is None else f", sequence={sequence}"),
        body=textwrap.indent("\n".join(_body(model, recipe, options, config.__name__, task)), " " * 4),
    )


def _imports(recipe: Recipe, names: list[str]) -> Iterator[str]:
    """Yield the lines that import what a training loop without a trainer uses. ``names``: of transformers."""
    yield "import torch"
    if isinstance(recipe, Qlora):
        yield "from bitsandbytes.nn import Linear4bit, Params4bit"
    if isinstance(recipe, Lora):
        tools = ["LoraConfig", "get_peft_model"]
        if isinstance(recipe, Qlora) and recipe.prepare:
            tools.append("prepare_model_for_kbit_training")
        yield f"from peft import {', '.join(tools)}"
    yield f"from transformers import {', '.join(sorted(names))}"


def _body(model: Model, recipe: Recipe, options: Options, config: str, task: _Task) -> Iterator[str]:
    """Yield the lines of ``build``. ``config``: name of the configuration's class in transformers."""
    if model.path is None:
        yield from call_lines(f"config = {config}", written(model.config))
    else:
        yield f"config = AutoConfig.from_pretrained({model.path!r}, local_files_only=True)"
    if task.has_sequence and not isinstance(recipe, Grpo):  # grpo generates with a cache
        yield "config.use_cache = False"
    yield f"dtype = {dtype_of(options.dtype)}"
    make = f"{task.factory}.from_config(config, dtype=dtype)"
    if isinstance(recipe, Trained):
        yield from trainer_lines(recipe, options, make)
    else:
        yield from _loop_lines(recipe, options, make, task)


def _loop_lines(recipe: Recipe, options: Options, make: str, task: _Task) -> Iterator[str]:
    """Yield the lines that make the model, the optimizer and the step of a loop without a trainer."""
    if isinstance(recipe, Qlora):
        yield f"model = {make}  # in the host's memory: layers are packed as they move"
        yield from _packing_lines(recipe)
    else:
        yield "with torch.device(device):"
        yield f"    model = {make}"
    if isinstance(recipe, Qlora) and recipe.prepare:
        checkpoints = f'{options.checkpointing}, {{"use_reentrant": False}}'
        yield f"model = prepare_model_for_kbit_training(model, {checkpoints})"
    elif options.checkpointing:
        yield "model.gradient_checkpointing_enable()"
    yield from _recipe_lines(recipe)
    yield "model.train()"
    yield from optimizer_lines("model", options)
    yield from task.inputs
    yield "\ndef step():"
    yield from step_lines("model", options, "loss = model(**inputs).loss", "loss.backward()")


def _packing_lines(recipe: Qlora) -> Iterator[str]:
    """Yield the lines that pack all linear layers except the head to 4 bits, as transformers does with
    ``load_in_4bit``."""
    yield f'packing = {{"compress_statistics": {recipe.double}, "quant_type": "{recipe.kind}"}}'
    yield "kept = model.get_output_embeddings()"
    yield "for name, part in list(model.named_modules()):"
    yield "    if type(part) is torch.nn.Linear and part is not kept:"
    yield "        sizes = part.in_features, part.out_features, part.bias is not None"
    yield '        packed = Linear4bit(*sizes, compute_dtype=dtype, device="meta")'
    yield "        packed.weight = Params4bit(part.weight.data, requires_grad=False, module=packed, **packing)"
    yield "        packed.bias = part.bias"
    yield "        model.set_submodule(name, packed)"
    yield "model.to(device).is_loaded_in_4bit = True"


def _recipe_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the lines that freeze parameters or add adapters."""
    match recipe:
        case Full():
            return
        case Freeze():
            yield "model.requires_grad_(False)"
            yield "blocks = max((part for part in model.modules() if isinstance(part, torch.nn.ModuleList)), key=len)"
            yield f"for block in blocks[-{recipe.layers}:]:"
            yield "    block.requires_grad_(True)"
        case Lora():
            yield from adapter_lines(recipe)
            yield "model = get_peft_model(model, adapters)"


def _task_of(model: Model) -> _Task:
    """Return what the architecture is trained for, by the end of its name. Raises InputError for others."""
    for end, task in _TASKS.items():
        if model.architecture.endswith(end):
            return task
    raise InputError(
        f"{model.name} is a {model.architecture}",
        expected=f"an architecture whose name ends with {', '.join(_TASKS)}",
        do="Write a build for it: see memplan explain --help",
    )


def _config_class(model: Model) -> Any:
    """Return the class of transformers for the architecture's configuration. Raises InputError if it has none."""
    import transformers

    architecture = getattr(transformers, model.architecture, None)
    if architecture is None:
        raise InputError(
            f"transformers {transformers.__version__} has no {model.architecture}",
            expected="an architecture that this transformers has; code of a model's own folder is not run",
            do="Update transformers, or write a build for it",
        )
    return architecture.config_class


def _sequence(model: Model, task: _Task, sequence: int | None) -> int | None:
    """Return the length of the sequence, by default 1024 or the longest that the model takes; None for models without.
    Raises InputError if the model takes no sequence, or none so long."""
    if not task.has_sequence:
        if sequence is not None:
            raise InputError(f"--seq {sequence}, and {model.name} takes images", expected="no --seq", do="Leave it out")
        return None
    longest = model.positions
    if sequence is not None and longest is not None and sequence > longest:
        raise InputError(
            f"--seq {sequence}, and {model.name} has {longest} positions",
            expected="a sequence that the model takes",
            do="Shorten it, or name a config.json with more positions",
        )
    return sequence or min(_SEQUENCE, longest or _SEQUENCE)


def _check_targets(model: Model, recipe: Lora, config_class: Any, task: _Task) -> None:
    """Raise InputError if a recipe adapts layers that the model does not have, or packs to four bits and there are
    none."""
    import torch
    import transformers
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as defaults

    kind = config_class.model_type
    if recipe.targets == "default" and kind not in defaults:
        raise InputError(f"peft has no default layers for {kind}", expected="the layers to adapt", do="Add targets=all")
    if not recipe.target_names and not isinstance(recipe, Qlora):
        return
    if model.path is None:
        config = config_class(**model.config)
    else:
        config = transformers.AutoConfig.from_pretrained(model.path, local_files_only=True)
    with torch.device("meta"):
        module = getattr(transformers, task.factory).from_config(config)
    head = module.get_output_embeddings()
    if isinstance(recipe, Qlora) and not any(type(m) is torch.nn.Linear and m is not head for m in module.modules()):
        raise InputError(
            f"{model.name} has no linear layer to pack to four bits",
            expected="a model of torch.nn.Linear layers: GPT-2's are Conv1D", do="Explain lora",
        )  # fmt: skip
    parts = {
        name.rpartition(".")[2] for name, part in module.named_modules()
        if isinstance(part, (torch.nn.Linear, torch.nn.Embedding, transformers.pytorch_utils.Conv1D))
    }  # fmt: skip
    for name in recipe.target_names:
        if name.rpartition(".")[2] not in parts:
            raise InputError(
                f"{model.name} has no layer {name!r} to adapt", expected="names of its linear layers",
                do=offer(name, parts),
            )  # fmt: skip
