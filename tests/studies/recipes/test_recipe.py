"""Recipes as typed, and what is refused."""

from __future__ import annotations

import pytest

from memplan.errors import InputError
from memplan.studies.recipes.recipe import Diffusion, Dora, Dpo, Freeze, Full, Grpo, Lora, Qlora, Recipe, Sft, recipe_of


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("full", Full()),
        ("freeze", Freeze(2)),
        ("freeze:layers=4", Freeze(4)),
        ("LoRA", Lora()),
        ("lora:r=16,alpha=32,dropout=0.05,targets=all", Lora(16, 32, 0.05, "all")),
        ("dora:r=4", Dora(4)),
        ("qlora:r=4,prepare=false", Qlora(4, prepare=False)),
        ("sft", Sft()),
        ("grpo:generations=4,prompt=64,beta=0", Grpo(generations=4, prompt=64, beta=0)),
        ("diffusion:r=4,size=256", Diffusion(4, size=256)),
        ("dpo:r=16,targets=all", Dpo(16, targets="all")),
    ],
)
def test_recipes_are_read(text: str, recipe: Recipe) -> None:
    assert recipe_of(text) == recipe


def test_names_of_layers_are_joined_by_a_plus() -> None:
    recipe = recipe_of("lora:targets=q_proj+v_proj")
    assert isinstance(recipe, Lora)
    assert recipe.target_names == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lroa", "there is no recipe 'lroa'. Expected one of full, freeze, lora, dora, qlora.* Did you mean lora"),
        ("qlora:kind=int4", "qlora:kind=int4. Expected nf4 or fp4"),
        ("qlora:double=2", "qlora:double=2. Expected true or false"),
        ("lora:rank=8", "the recipe lora has no argument 'rank'. Expected one of r, alpha, dropout, targets"),
        ("full:r=8", "the recipe full has no argument 'r'. Expected none"),
        ("lora:r=0", "lora:r=0. Expected a whole number from 1"),
        ("lora:r=1.5", "a whole number from 1"),
        ("lora:alpha=true", "a whole number from 1"),
        ("lora:dropout=1", "a share from 0 to less than 1"),
        ("lora:targets=q_proj+", "options"),
        ("lora:targets=3", "names joined by"),
        ("dpo:r=-1", "a whole number from 1"),
        ("sft:r=4,dropout=1", "a share from 0 to less than 1"),
        ("grpo:generations=1", "2 or more"),
        ("grpo:beta=-1", "a number from 0"),
        ("diffusion:size=100", "a multiple of 64"),
        ("freeze:layers=-1", "a whole number from 1"),
        ("lora:16", "options '16'. Expected name=value"),
    ],
)
def test_wrong_recipes_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe_of(text)
