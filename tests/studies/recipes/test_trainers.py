"""Recipes of trl's trainers: their recordings are real runs of the printed scripts, and of the trainers' own loops."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from environment import slow
from models.small_llama import small_llama

import memplan
from memplan.errors import InputError
from memplan.studies.recipes.lines import Options
from memplan.studies.recipes.models import Model, find_model
from memplan.studies.recipes.recipe import recipe_of
from memplan.studies.recipes.script import script_of

for library in ("transformers", "peft", "trl", "datasets"):
    pytest.importorskip(library)
pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries, one about another


def llama(folder: Path) -> Model:
    return small_llama(folder, vocabulary=1024)


def peaks(script: str, folder: Path) -> tuple[int, int, int]:
    """Peak of the recording, of a real run of the script, and of two steps by the trainer's own loop."""
    (folder / "train.py").write_text(script, encoding="utf-8")
    build = runpy.run_path(str(folder / "train.py"))["build"]
    before, found, _ = script.partition("    model, optimizer = ")
    before = before.replace(" rollout_func=rollout,", "")  # transformers generates all tokens
    assert found
    end = "    settings.max_steps, settings.save_strategy = 2, 'no'\n    return trainer.train\n"
    (folder / "loop.py").write_text(before + end, encoding="utf-8")
    loop = runpy.run_path(str(folder / "loop.py"))["build"]
    traces = memplan.record(build), memplan.measure(build), memplan.measure(loop, steps=1)
    recorded, measured, trained = (memplan.simulate(trace).peak_allocated for trace in traces)
    return recorded, measured, trained


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("sft", Options(2, 32, dtype="fp32")),
        ("sft:r=4,targets=all", Options(2, 32, dtype="fp32", checkpointing=True)),
        ("dpo", Options(2, 32, dtype="fp32", checkpointing=True)),
        ("dpo:r=4", Options(2, 32, dtype="fp32")),
        *slow(
            ("sft", Options(2, 32, dtype="fp32", autocast="bf16")),
            ("dpo", Options(2, 32, "sgd:lr=0.1", "fp32")),
            ("dpo:r=4", Options(2, 32, dtype="fp32", checkpointing=True)),
            ("grpo:generations=4,r=4", Options(2, 32, dtype="fp32", checkpointing=True)),
        ),
    ],
)
def test_the_recorded_peak_is_that_of_the_trainer(recipe: str, options: Options, tmp_path: Path) -> None:
    recorded, measured, trained = peaks(script_of(llama(tmp_path), recipe_of(recipe), options), tmp_path)
    assert recorded == measured
    assert recorded == pytest.approx(trained, rel=0.001)


@pytest.mark.parametrize("recipe", ["grpo:generations=2,r=4", *slow("grpo:generations=2", "grpo:generations=2,beta=0")])
def test_answers_that_are_generated_are_recorded_as_they_run(recipe: str, tmp_path: Path) -> None:
    """The trainer's own loop has masks of answers that end at different tokens, or none."""
    script = script_of(llama(tmp_path), recipe_of(recipe), Options(2, 32, dtype="fp32"))
    recorded, measured, trained = peaks(script, tmp_path)
    assert recorded == measured
    assert recorded == pytest.approx(trained, rel=0.01)


@pytest.mark.parametrize(
    ("model", "rows", "prompt", "answer"),
    [
        ("llama", 8, 40, 8),
        ("mistral", 4, 4, 28),
        *slow(("llama", 4, 1, 4), ("mistral", 4, 20, 12), ("llama", 4, 4, 90)),
    ],
)
def test_a_rollout_takes_what_the_trainer_takes_to_generate(
    model: str, rows: int, prompt: int, answer: int, tmp_path: Path
) -> None:
    """The trainer's own generation of all tokens: the mistral attends to the last 16 of them."""
    llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if model == "mistral":
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    recipe = recipe_of(f"grpo:generations={rows},prompt={prompt},beta=0")
    script = script_of(find_model(str(tmp_path)), recipe, Options(rows, prompt + answer, dtype="fp32"))
    before, found, _ = script.partition("    model, optimizer = ")
    assert found
    builds = []
    for name in ("rollout", "trainer"):
        text = before if name == "rollout" else before.replace(" rollout_func=rollout,", "")
        text += (
            "    trainer.model_wrapped, trainer.generation_config.eos_token_id = trainer.model, [-1]  # it never ends\n"
        )
        text += "    return lambda: trainer._generate(['a' + ' a' * (prompt - 1)] * generations)\n"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        builds.append(runpy.run_path(str(tmp_path / f"{name}.py"))["build"])
    recorded, measured = memplan.record(builds[0], steps=1), memplan.measure(builds[1], steps=1)
    peaks = [memplan.simulate(trace).peak_allocated for trace in (recorded, measured)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.001)


def test_with_adapters_the_reference_is_the_model_without_them(tmp_path: Path) -> None:
    def weights(recipe: str) -> int:
        path = tmp_path / "train.py"
        path.write_text(script_of(llama(tmp_path), recipe_of(recipe), Options(1, 8, dtype="fp32")), encoding="utf-8")
        return memplan.explain(runpy.run_path(str(path))["build"]).by_cause["weight"]

    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64
    model = 4 * (2 * 1024 * 64 + 3 * layer + 64)
    adapters = 4 * 3 * 4 * (2 * 64 + 64 + 32)  # of queries and values
    assert weights("dpo") == 2 * model
    assert weights("dpo:r=4") == model + adapters


def test_on_a_card_the_loss_takes_what_its_kernels_take(tmp_path: Path) -> None:
    """Without weights to train but the embedding's, 64 tokens' logits are one tile of bf16, which the kernels turn into
    its gradient in place; PyTorch's own ops, for devices without Triton, take copies in fp32."""
    pytest.importorskip("triton")
    path = tmp_path / "train.py"
    path.write_text(script_of(llama(tmp_path), recipe_of("sft:r=4"), Options(2, 32)), encoding="utf-8")
    explained = memplan.explain(runpy.run_path(str(path))["build"], device="rtx4090")
    tile = 62 * 32768 * 2
    assert explained.by_cause_most["temporary"] < tile * 1.1


def test_a_card_needs_the_kernels_of_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memplan.studies.recipes.lines.find_spec", lambda name: name if name != "triton" else None)
    assert "SFTTrainer" in script_of(llama(tmp_path), recipe_of("sft"), Options())
    with pytest.raises(InputError, match=r"triton is not installed here.* pip install triton"):
        script_of(llama(tmp_path), recipe_of("sft"), Options(on_card=True))


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("sft", Options(1, 2), r"--seq 2\. Expected a prompt and an answer"),
        ("grpo:prompt=29", Options(8, 32), r"--seq 32\. Expected a prompt and an answer of 4"),
        ("grpo:generations=8", Options(3, 32), r"--batch 3 of 8 generations\. Expected a divisor or a multiple"),
    ],
)
def test_sizes_that_a_trainer_refuses_are_refused(recipe: str, options: Options, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        script_of(llama(tmp_path), recipe_of(recipe), options)


def test_models_that_are_no_language_models_are_refused() -> None:
    bert = Model("bert", "BertForMaskedLM", {})
    with pytest.raises(InputError, match=r"the recipe sft, and bert is a BertForMaskedLM\. Expected a causal language"):
        script_of(bert, recipe_of("sft"), Options())
