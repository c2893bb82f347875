"""The options ``--model`` and ``--recipe`` of commands that take a model by name instead of a target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from memplan.cli.options import Whole, used_options
from memplan.errors import InputError

_RECIPE_OPTIONS = (
    click.Option(
        ["--model"], metavar="NAME",
        help="Instead of TARGET: llama-3.1-8b and other names of the catalogue, a config.json, its folder, or an "
        "id in the local Hugging Face cache.",
    ),
    click.Option(
        ["--recipe"], metavar="NAME",
        help="With --model, what is trained: full, freeze:layers=2, lora:r=16,targets=all, dora, qlora; by trl's "
        "trainers sft, dpo, grpo:generations=8, or with adapters sft:r=16; diffusion. Default: full.",
    ),
    click.Option(["--seq"], type=Whole(min=1), metavar="N", help="With --model: tokens of a sequence. Default: 1024."),
    click.Option(["--checkpointing"], is_flag=True, help="With --model: checkpoint each block."),
)  # fmt: skip


@dataclass(frozen=True)
class RecipeTarget:
    """A model and a recipe as a command's target."""

    title: str
    script: str
    path: str
    """File of the script."""
    positions: int | None
    """Length of the longest sequence."""


def recipe_option(command: click.Command) -> click.Command:
    """Make a command accept ``--model`` and ``--recipe`` instead of its target."""
    for parameter in command.params:
        if parameter.name == "target":
            parameter.required = False
    command.params += _RECIPE_OPTIONS
    return command


def take_recipe(values: dict[str, Any]) -> RecipeTarget | None:
    """Pop the options of a recipe from a command's values; return the recipe, or None without ``--model``.

    The target in ``values`` becomes the recipe's script, a file that exists as long as the command runs. Raises
    UsageError for a model, recipe or option that cannot be used."""
    name, recipe, sequence = values.pop("model"), values.pop("recipe"), values.pop("seq")
    checkpointing = values.pop("checkpointing")
    if name is None:
        if recipe is not None or sequence is not None or checkpointing:
            raise InputError(
                "--recipe, --seq or --checkpointing without --model",
                expected="the model",
                do="Add --model llama-3.1-8b",
            )
        return None
    from memplan.studies.recipes.diffusion import diffusion_script, find_pipeline
    from memplan.studies.recipes.lines import Options
    from memplan.studies.recipes.models import find_model
    from memplan.studies.recipes.recipe import Diffusion, recipe_of
    from memplan.studies.recipes.script import script_of
    from memplan.trace.held_output import CapturedOutput

    target_options = {
        "TARGET": values["target"], "--script": values.get("script"), "--arg": values["args"],
        "--input": values["inputs"], "--kwarg": values["kwargs"], "--target": values["targets"],
        "--loss": values["loss"], "--no-train": not values["train"],
    }  # fmt: skip
    if wrong := used_options(target_options):
        raise InputError(f"{wrong} with --model", expected="a target and its options, or a model", do="Leave it out")
    options = Options(
        values["batch"], sequence, values["optimizer"] or "adamw", values["dtype"] or "bfloat16",
        values["autocast"], checkpointing, values.get("device") not in (None, "cpu"),
    )  # fmt: skip
    with CapturedOutput().capturing():  # output of importing transformers
        kind = recipe_of(recipe or "full")
        if isinstance(kind, Diffusion):
            script, positions = diffusion_script(find_pipeline(name), kind, options), None
        else:
            model = find_model(name)
            script, positions = script_of(model, kind, options), model.positions
    folder = click.get_current_context().with_resource(TemporaryDirectory(prefix="memplan-"))
    path = Path(folder, "train.py")
    path.write_text(script, encoding="utf-8")
    values |= {"target": f"{path}:build", "batch": None, "optimizer": None, "dtype": None, "autocast": None}
    return RecipeTarget(f"{name}, {recipe or 'full'}", script, str(path), positions)
