"""`--model` and `--recipe` as a user types them."""

from __future__ import annotations

import json
import re
import runpy
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import memplan
from memplan.cli import main

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A small Llama, as a config.json."""
    values = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 64,
        "intermediate_size": 160, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return str(path)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_explain_prints_the_script_that_it_recorded(config: str, tmp_path: Path) -> None:
    arguments = ["explain", "--model", config, "--recipe", "lora:r=4", "--seq", "32", "--batch", "2", "--dtype", "fp32"]
    result = run(*arguments, "--checkpointing", "--optimizer", "adamw:lr=1e-4")
    assert result.exit_code == 0, result.output
    assert "lora:r=4: training step on cpu" in result.output
    printed = result.stdout.partition("The script that was recorded\n")[2]
    (tmp_path / "train.py").write_text(textwrap.dedent(printed), encoding="utf-8")
    measured = memplan.measure(runpy.run_path(str(tmp_path / "train.py"))["build"])
    page, data = tmp_path / "a.html", tmp_path / "a.json"
    files = ("--json", str(data), "--html", str(page))
    assert run(*arguments, "--checkpointing", "--optimizer", "adamw:lr=1e-4", *files).exit_code == 0
    saved = json.loads(data.read_text(encoding="utf-8"))
    assert saved["timeline"]["peak_allocated"] == memplan.simulate(measured).peak_allocated
    assert saved["source"].split() == printed.split()
    again = run("explain", str(data))
    assert again.exit_code == 0, again.output
    assert again.stdout.partition("The script that was recorded\n")[2].split() == printed.split()
    assert "get_peft_model(model, adapters)" in page.read_text(encoding="utf-8")


def test_largest_finds_the_longest_sequence_and_stops_at_the_positions(config: str) -> None:
    result = run("largest", "--model", config, "--axis", "sequence", "--budget", "1GiB", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "128" in result.output.splitlines()[0] + result.output.splitlines()[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "lama-3.1-8b"], "there is no model 'lama-3.1-8b'.* Did you mean llama-3.1-8b"),
        (["--model", "gpt2", "--recipe", "lorra"], "there is no recipe 'lorra'.* Did you mean lora"),
        (["--model", "gpt2", "--seq", "2048"], "--seq 2048, and gpt2 has 1024 positions"),
        (["--model", "gpt2", "--input", "8x3"], "--input with --model. Expected a target and its options, or a model"),
        (["--model", "gpt2", "a.py:b"], "TARGET with --model"),
        (["a.py:b", "--seq", "8"], "without --model. Expected the model"),
        ([], "no TARGET. Expected one: .* or --model"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    result = run("explain", *arguments)
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert re.search(message, result.output)


@pytest.mark.slow
@pytest.mark.usefixtures("scripts_here")
def test_fit_plans_the_script(config: str) -> None:
    arguments = ["--model", config, "--seq", "128", "--batch", "8", "--dtype", "fp32", "--device", "cpu"]
    explained = json.loads(run("explain", *arguments, "--json", "-").stdout)
    peak = explained["timeline"]["peak_allocated"]
    result = run("fit", *arguments, "--budget", str(int(peak * 0.9)), "--predict", "--costs", "roofline")
    assert result.exit_code == 0, result.output
    assert "train.py" in result.output
