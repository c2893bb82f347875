"""Lines that scripts of all recipes share."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from memplan.errors import InputError
from memplan.studies.recipes.recipe import Adapted, Diffusion, Dora, Grpo, Lora, Qlora, Recipe, Trained
from memplan.trace.naming.step_parts import optimizer_of
from memplan.trace.spec import dtype_of

_WIDTH = 72
_EXTRA = ("transformers", "peft")


SCRIPT = """\
{imports}


def build({arguments}):
    device = "cuda" if torch.cuda.is_available() else "cpu"
{body}
    return step


if __name__ == "__main__":
    step = build()
    for _ in range(2):
        step()
    print(torch.cuda.max_memory_allocated(), "bytes")
"""


@dataclass(frozen=True)
class Options:
    """Options of a training step in addition to its model and recipe."""

    batch: int | None = None
    """None: 1, or all answers of grpo."""
    sequence: int | None = None
    """None: 1024, or the longest that the model takes."""
    optimizer: str = "adamw"
    """As `memplan.explain` takes it: ``sgd:lr=0.1``, ``none``."""
    dtype: str = "bfloat16"
    """Of the weights."""
    autocast: str | None = None
    checkpointing: bool = False
    on_card: bool = False
    """Whether it is to run on a card: there trl runs kernels of Triton, without which its loss takes more memory."""


def call_lines(begin: str, arguments: Iterable[str], end: str = ")") -> Iterator[str]:
    """Yield the lines of a call, on a single line if that is short.

    Args:
        begin: text up to the opening bracket, without it.
        arguments: Python text of each argument.
        end: closing brackets.
    """
    values = list(arguments)
    whole = f"{begin}({', '.join(values)}{end}"
    if len(whole) <= _WIDTH:
        yield whole
        return
    yield f"{begin}("
    # lines break between arguments, and within lists; "\0" stands for spaces that are not broken
    solid = ", ".join(value if "[" in value else value.replace(" ", "\0") for value in values)
    for line in textwrap.wrap(solid, _WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 4):
        yield line.replace("\0", " ")
    yield end


def written(arguments: Mapping[str, Any]) -> list[str]:
    """Return keyword arguments as Python text: ``["r=8", "lora_alpha=16"]``."""
    return [f"{name}={value!r}" for name, value in arguments.items()]


def adapter_lines(recipe: Lora) -> Iterator[str]:
    """Yield the lines that describe a recipe's adapters."""
    values: dict[str, Any] = {"r": recipe.r, "lora_alpha": recipe.alpha, "lora_dropout": recipe.dropout}
    if recipe.targets != "default":
        values["target_modules"] = recipe.target_names or "all-linear"
    if isinstance(recipe, Dora):
        values["use_dora"] = True
    yield from call_lines("adapters = LoraConfig", written(values))


def optimizer_lines(model: str, options: Options) -> Iterator[str]:
    """Yield the lines that create the optimizer of a model's variable; none if the recipe has no optimizer."""
    optimizer = optimizer_call(options.optimizer)
    if optimizer is not None:
        yield f"trained = [p for p in {model}.parameters() if p.requires_grad]"
        yield f"optimizer = {optimizer}"


def step_lines(model: str, options: Options, forward: str, backward: str) -> Iterator[str]:
    """Yield the lines of ``step`` from the model's call on, which runs under autocast if that is an option.

    Args:
        model: name of the model's variable.
        options: autocast and optimizer.
        forward, backward: lines of the forward and the backward pass.
    """
    if options.autocast is not None:
        yield f"    with torch.autocast(device, {dtype_of(options.autocast)}):"
        yield f"        {forward}"
    else:
        yield f"    {forward}"
    yield f"    {backward}"
    if optimizer_call(options.optimizer) is None:
        yield f"    {model}.zero_grad()\n"
    else:
        yield "    optimizer.step()"
        yield "    optimizer.zero_grad()\n"


def optimizer_call(text: str) -> str | None:
    """Return the call that makes an optimizer of torch, such as ``torch.optim.AdamW(trained, lr=0.1)``; None for
    ``none``. Raises InputError if the optimizer is not torch's."""
    factory = optimizer_of(text, "--optimizer")
    if factory is None:
        return None
    assert isinstance(factory, functools.partial), "a name was resolved"
    if not factory.func.__module__.startswith("torch.optim"):
        raise InputError(
            f"--optimizer {text} of a recipe", expected="an optimizer of torch.optim, such as adamw",
            do="Name one, or write the script: the report prints it",
        )  # fmt: skip
    options = "".join(f", {name}={value!r}" for name, value in factory.keywords.items())
    return f"torch.optim.{factory.func.__name__}(trained{options})"


def require(library: str) -> None:
    """Raise InputError for a library that is not installed."""
    if find_spec(library) is None:
        raise InputError(
            f"{library} is not installed here", expected="the library that makes the model of a recipe",
            do="Install it: pip install " + ("'memplan[recipes]'" if library in _EXTRA else library),
        )  # fmt: skip


def required(recipe: Recipe, on_card: bool = False) -> list[str]:
    """Return the libraries that a recipe's script needs in addition to torch and transformers."""
    adapters = recipe.adapters if isinstance(recipe, Adapted) else recipe
    needed = {
        "trl": isinstance(recipe, Trained), "datasets": isinstance(recipe, Trained),
        "triton": isinstance(recipe, Trained) and on_card, "diffusers": isinstance(recipe, Diffusion),
        "peft": isinstance(adapters, Lora), "bitsandbytes": isinstance(recipe, Qlora),
    }  # fmt: skip
    return [library for library, is_needed in needed.items() if is_needed]


def default_batch(recipe: Recipe) -> int:
    """Return the default batch size of a recipe."""
    return recipe.generations if isinstance(recipe, Grpo) else 1
