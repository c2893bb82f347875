"""Write scripts of trl's trainers: their own data loaders, losses and optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memplan.errors import InputError
from memplan.studies.recipes.lines import Options, adapter_lines, call_lines, optimizer_call
from memplan.studies.recipes.recipe import Dpo, Grpo, Sft, Trained
from memplan.trace.spec import dtype_of

_MIXED = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


@dataclass(frozen=True)
class _Trainer:
    """A trainer of trl, and what its script has of its own."""

    name: str
    """Of its class, and with Config instead of Trainer of its settings'."""
    before: tuple[str, ...]
    """Lines that make its data and functions."""
    settings: tuple[str, ...] = ("max_length=sequence",)
    arguments: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()

    @property
    def config(self) -> str:
        return self.name.replace("Trainer", "Config")


_ROLLOUT = '''
def reward(completions, **_):
    return [0.0] * len(completions)

def rollout(prompts, trainer):
    """Generate the first and the last two tokens of the answers: in between, the cache alone grows."""
    rows, last, config = len(prompts), sequence - prompt, trainer.generation_config
    tokens = [torch.zeros(prompt, dtype=torch.int64) for _ in prompts]
    ids = torch.stack(tokens).to(device)
    mask = torch.ones_like(ids)
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as policy, torch.no_grad():
        config.max_new_tokens, config.return_dict_in_generate = 2, True
        cache = policy.generate(ids, attention_mask=mask, generation_config=config).past_key_values
        for layer in cache.layers:
            more = sequence - 3 - layer.get_seq_length()
            if layer.is_sliding:  # no more than a window stays
                window = layer.sliding_window - 1 - layer.keys.shape[-2]
                layer.cumulative_length += max(more - window, 0)
                more = min(more, window)
            layer.update(*(x[..., :1, :].expand(-1, -1, more, -1) for x in (layer.keys, layer.values)))
        config.return_dict_in_generate = False
        known, mask = (x[:1, :1].expand(rows, sequence - 2) for x in (ids, mask))
        policy.generate(
            known, attention_mask=mask, position_ids=known, past_key_values=cache, generation_config=config
        )
        del cache
    answers = [[0] * last] * (rows - 1) + [[0] * (last - 1)]  # of two lengths, so that they are padded
    return {"prompt_ids": [[0] * prompt] * rows, "completion_ids": answers, "logprobs": None}
'''


def _trainer_of(recipe: Trained) -> _Trainer:
    """Return trl's trainer for a recipe, with its data set, settings and imports."""
    match recipe:
        case Sft():
            return _Trainer("SFTTrainer", ('rows = Dataset.from_dict({"input_ids": [[0] * sequence] * batch})',))
        case Dpo():
            answers = (
                'answers = [" a" * (sequence - 1)] * batch  # of one word each, after a prompt of one',
                'rows = Dataset.from_dict({"prompt": ["a"] * batch, "chosen": answers, "rejected": answers})',
            )
            arguments = ("ref_model=reference",) if recipe.adapters is None else ()
            return _Trainer("DPOTrainer", answers, arguments=arguments)
        case Grpo():
            sizes = (
                f"generations, prompt = {recipe.generations}, {recipe.prompt or 'sequence // 4'}",
                "accumulation = max(1, generations // batch)",
                'rows = Dataset.from_dict({"prompt": ["a" + " a" * (prompt - 1)]})',
            )
            settings = (
                "num_generations=generations", "gradient_accumulation_steps=accumulation",
                "max_completion_length=sequence - prompt", f"beta={0.0 if _adds_reference(recipe) else recipe.beta}",
            )  # fmt: skip
            imports = ("from trl.models import unwrap_model_for_generation",)
            if _adds_reference(recipe):
                imports += ("from trl.trainer.utils import add_fused_lm_head",)
            return _Trainer(
                "GRPOTrainer", (*sizes, *_ROLLOUT.splitlines(), ""), settings,
                ("reward_funcs=reward", "rollout_func=rollout"), imports,
            )  # fmt: skip
        case _:
            raise AssertionError(recipe)


def _adds_reference(recipe: Trained) -> bool:
    """Return whether the script makes grpo's reference model: trl would load it by the name of its weights."""
    return isinstance(recipe, Grpo) and recipe.adapters is None and recipe.beta > 0


def check_sizes(recipe: Trained, batch: int | None, sequence: int | None) -> None:
    """Raise InputError for a sequence too short for a prompt and an answer, or a batch that grpo cannot fill."""
    prompt, answer = (recipe.prompt, 4) if isinstance(recipe, Grpo) else (1, 2)  # tokens
    if sequence is not None and sequence < max(prompt, 1) + answer:
        tokens = f"a prompt and an answer of {answer} tokens"
        raise InputError(f"--seq {sequence}", expected=tokens, do="Lengthen it")
    if isinstance(recipe, Grpo) and batch is not None:
        small, large = sorted((batch, recipe.generations))
        if large % small:
            raise InputError(
                f"--batch {batch} of {recipe.generations} generations", expected="a divisor or a multiple of them",
                do="Choose one",
            )  # fmt: skip


def trainer_imports(recipe: Trained, names: list[str]) -> list[str]:
    """Return the lines that import what a trainer's script uses. ``names``: of transformers."""
    trainer = _trainer_of(recipe)
    return [
        "import tempfile",
        "",
        "import torch",
        "from datasets import Dataset",
        *(["from peft import LoraConfig"] if recipe.adapters is not None else []),
        "from tokenizers import Tokenizer, models, pre_tokenizers",
        f"from transformers import {', '.join(sorted([*names, 'PreTrainedTokenizerFast']))}",
        f"from trl import {trainer.config}, {trainer.name}",
        *trainer.imports,
    ]


def trainer_lines(recipe: Trained, options: Options, make: str) -> Iterator[str]:
    """Yield the lines of ``build`` after ``config`` and ``dtype``; ``make`` is the expression that makes a model."""
    trainer = _trainer_of(recipe)
    yield "with torch.device(device):"
    yield f"    model = {make}"
    if _adds_reference(recipe) or "ref_model=reference" in trainer.arguments:
        yield f"    reference = {make}"
    yield 'words = Tokenizer(models.WordLevel({"a": 0}, "a"))'
    yield "words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()"
    yield 'tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="a", pad_token="a")'
    yield from trainer.before
    precision = None if options.autocast is None else dtype_of(options.autocast)
    mixed = [f"{name}={str(precision) == kind}" for name, kind in _MIXED.items()]
    yield from call_lines(
        f"settings = {trainer.config}",
        (
            "tempfile.gettempdir()", "per_device_train_batch_size=batch", *trainer.settings,
            f"gradient_checkpointing={options.checkpointing}", *mixed, 'use_cpu=device == "cpu"', 'report_to="none"',
        ),
    )  # fmt: skip
    arguments = ["model=model", *trainer.arguments, "args=settings", "train_dataset=rows", "processing_class=tokenizer"]
    if recipe.adapters is not None:
        yield from adapter_lines(recipe.adapters)
        arguments.append("peft_config=adapters")
    yield from call_lines(f"trainer = {trainer.name}", arguments)
    if _adds_reference(recipe):
        assert isinstance(recipe, Grpo)
        yield f"trainer.beta = {recipe.beta}  # with beta in its settings it loads a reference by name"
        yield "trainer.ref_model = trainer.accelerator.prepare_model(reference, evaluation_mode=True)"
        yield "add_fused_lm_head(trainer.ref_model)"
    optimizer = optimizer_call(options.optimizer)
    if optimizer is not None and options.optimizer != Options().optimizer:
        yield "trained = [p for p in trainer.model.parameters() if p.requires_grad]"
        yield f"trainer.optimizer = {optimizer}"
    if optimizer is None:
        yield "trainer.model_wrapped = model = trainer.accelerator.prepare(trainer.model)"
    else:
        yield "model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())"
        yield "trainer.model_wrapped = model"
    yield "trainer.current_gradient_accumulation_steps = settings.gradient_accumulation_steps"
    if options.checkpointing:
        yield "model.gradient_checkpointing_enable(settings.gradient_checkpointing_kwargs)"
    yield "model.train()"
    yield "inputs = next(iter(trainer.get_train_dataloader()))"
    yield "\ndef step():  # as trainer.train() does"
    if isinstance(recipe, Grpo):
        yield "    for _ in range(accumulation):"
        yield "        trainer.training_step(model, inputs, None)"
    else:
        yield "    trainer.training_step(model, dict(inputs))"
    if optimizer is not None:
        yield "    trainer.accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm)"
        yield "    optimizer.step()"
    yield "    model.zero_grad()\n"
