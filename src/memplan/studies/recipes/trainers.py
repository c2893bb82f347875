"""Write scripts of trl's trainers: their own data loaders, losses and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memplan.studies.recipes.lines import Options, adapter_lines, call_lines, optimizer_call
from memplan.studies.recipes.recipe import Dpo, Sft, Trained
from memplan.trace.spec import dtype_of


@dataclass(frozen=True)
class Trainer:
    """A trainer of trl, and what its script needs."""

    name: str
    """Of its class, and with Config instead of Trainer of its settings'."""
    rows: tuple[str, ...]
    """Lines that make its data."""
    settings: tuple[str, ...] = ()
    """Its arguments besides those of all trainers."""
    step: tuple[str, ...] = ("trainer.training_step(model, dict(inputs))",)
    inputs: str = "inputs = next(iter(trainer.get_train_dataloader()))"

    @property
    def config(self) -> str:
        """Name of the settings' class."""
        return self.name.replace("Trainer", "Config")


_TRAINERS: dict[type[Trained], Trainer] = {
    Sft: Trainer("SFTTrainer", ('rows = Dataset.from_dict({"input_ids": [[0] * sequence] * batch})',)),
    Dpo: Trainer(
        "DPOTrainer",
        (
            'answers = [" a" * (sequence - 1)] * batch  # of one word each, after a prompt of one',
            'rows = Dataset.from_dict({"prompt": ["a"] * batch, "chosen": answers, "rejected": answers})',
        ),
    ),
}


def trainer_imports(recipe: Trained, names: list[str]) -> list[str]:
    """The lines that import what a trainer's script uses, ``names`` of transformers among them."""
    trainer = _TRAINERS[type(recipe)]
    return [
        "import tempfile",
        "",
        "import torch",
        "from datasets import Dataset",
        *["from peft import LoraConfig"] * (recipe.adapters is not None),
        "from tokenizers import Tokenizer, models, pre_tokenizers",
        f"from transformers import {', '.join(sorted([*names, 'PreTrainedTokenizerFast']))}",
        f"from trl import {trainer.config}, {trainer.name}",
    ]


def trainer_lines(recipe: Trained, options: Options, make: str) -> Iterator[str]:
    """Yield the lines of ``build`` after ``config`` and ``dtype``; ``make`` is the expression that makes a model."""
    trainer = _TRAINERS[type(recipe)]
    compares = isinstance(recipe, Dpo) and recipe.adapters is None
    yield "with torch.device(device):"
    yield f"    model = {make}"
    if compares:
        yield f"    reference = {make}"
    yield 'words = Tokenizer(models.WordLevel({"a": 0}, "a"))'
    yield "words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()"
    yield 'tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a", pad_token="a")'
    yield from trainer.rows
    yield f"settings = {trainer.config}("
    yield "    tempfile.gettempdir(), per_device_train_batch_size=batch, max_length=sequence,"
    precision = None if options.autocast is None else dtype_of(options.autocast)
    mixed = f"bf16={str(precision) == 'torch.bfloat16'}, fp16={str(precision) == 'torch.float16'}"
    yield f"    gradient_checkpointing={options.checkpointing}, {mixed},"
    yield '    use_cpu=device == "cpu", report_to="none",'
    yield from (f"    {line}," for line in trainer.settings)
    yield ")"
    arguments = {"model": "model", "args": "settings", "train_dataset": "rows", "processing_class": "tokenizer"}
    if compares:
        arguments["ref_model"] = "reference"
    if recipe.adapters is not None:
        yield from adapter_lines(recipe.adapters)
        arguments["peft_config"] = "adapters"
    yield from call_lines(f"trainer = {trainer.name}", {name: _Name(value) for name, value in arguments.items()})
    optimizer = optimizer_call(options.optimizer)
    if optimizer is not None and options.optimizer != Options().optimizer:
        yield "trained = [p for p in trainer.model.parameters() if p.requires_grad]"
        yield f"trainer.optimizer = {optimizer}"
    if optimizer is None:
        yield "model = trainer.accelerator.prepare(trainer.model)"
    else:
        yield "model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())"
    yield "trainer.current_gradient_accumulation_steps = 1  # this and the next as train() does"
    if options.checkpointing:
        yield "model.gradient_checkpointing_enable(settings.gradient_checkpointing_kwargs)"
    yield "model.train()"
    yield trainer.inputs
    yield "\ndef step():"
    yield from (f"    {line}" for line in trainer.step)
    if optimizer is not None:
        yield "    trainer.accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm)"
        yield "    optimizer.step()"
    yield "    model.zero_grad()\n"


class _Name(str):
    """A value of an argument that is a name in the script."""

    def __repr__(self) -> str:
        return str(self)
