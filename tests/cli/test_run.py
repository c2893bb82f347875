"""`memplan run`, and `--script` of other commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from environment import slow

import memplan
from memplan.cli import main

here = pytest.mark.usefixtures("scripts_here")
"""What the process of a script adds is seen by tests without this mark, and in tests/integrations/scripts."""
SCRIPT = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
given = parser.parse_args()
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
opt = torch.optim.Adam(model.parameters())
print("a secret that it prints")
for (x,) in DataLoader(TensorDataset(torch.randn(512, 64)), batch_size=given.batch_size):
    model(x).sum().backward()
    opt.step()
    opt.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "train.py"


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_a_script_with_its_arguments(script: str) -> None:
    done = _invoke("run", "--device", "cpu", "--json", "out.json", script, "--batch-size", "32")
    assert done.exit_code == 0, done.output
    data = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert data["script"]["command"] == "train.py --batch-size 32"
    assert data["script"]["batches"][0]["text"] == "32x64"
    assert "train.py: training step on cpu" in done.stdout
    assert "2 updates" in done.stdout
    assert "1 line that it printed is not shown" in done.stdout
    assert "secret" not in done.output


@here
def test_a_module(script: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "train.py").rename(tmp_path / "package" / "train.py")
    done = _invoke("run", "--json", "-", "-m", "package.train", "--batch-size", "16")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["script"]["batches"][0]["size"] == 16


@here
def test_its_trace_is_explained_again(script: str) -> None:
    assert _invoke("run", "--device", "rtx4090", "--trace", "step.json", script).exit_code == 0
    done = _invoke("explain", "step.json")
    assert done.exit_code == 0
    assert "training step on rtx4090" in done.stdout


@here
def test_its_own_answer_to_wrong_arguments(script: str) -> None:
    done = _invoke("run", script, "--batch-sice", "3")
    assert done.exit_code == 2
    assert "train.py: error: unrecognized arguments: --batch-sice 3" in done.stderr


@here
def test_its_help(script: str) -> None:
    done = _invoke("run", script, "--help")
    assert done.exit_code == 0
    assert "usage: train.py" in done.stderr


@here
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch.py"], "there is no file nosuch.py"),
        (["--device", "h1000", "train.py"], "no card 'h1000'"),
        (["--input", "3y4", "train.py"], "input '3y4' does not describe a tensor"),
        (["--input", "3x4", "--kwarg", "x=3x4", "train.py"], "--input and --kwarg"),
        (["--json", "-", "--trace", "-", "train.py"], "--json - and --trace -"),
    ],
)
def test_bad_input_is_one_line(script: str, arguments: list[str], message: str) -> None:
    done = _invoke("run", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@here
def test_the_largest_batch_is_the_largest(script: str) -> None:
    """The same as the largest that a build with an argument for the batch has."""
    done = _invoke("largest", "--script", script, "--device", "cpu", "--budget", "4MiB", "--json", "-")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)

    def build(batch: int = 8) -> object:
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, TensorDataset

        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
        opt = torch.optim.Adam(model.parameters())
        batches = iter(DataLoader(TensorDataset(torch.randn(512, 64)), batch_size=8))

        def step() -> None:
            (x,) = next(batches)
            model(x.new_zeros((batch, 64))).sum().backward()
            opt.step()
            opt.zero_grad()

        return step

    assert found["value"] == memplan.largest(build, "batch", device="cpu", budget="4MiB")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "--script", "train.py", "--loss", "mse_loss"], "--loss with --script"),
        (["check"], "no TARGET"),
        (["largest", "--script", "train.py", "--axis", "size", "--device", "t4"], "another axis than batch"),
        (["largest", "--script", "nosuch.py", "--device", "t4"], "there is no file nosuch.py"),
        (["fit", "--script", "train.py"], "no budget"),
        (["fit", "--script", "train.py", "--budget", "1MiB", "--use-plan", "p.json"], "--use-plan with --script"),
        (["fit", "--script", "train.py", "--budget", "1MiB", "--frontier", "a.png"], "--frontier with --script"),
        (["fit", "--script", "train.py", "--budget", "1MiB", "--optimizer", "sgd"], "--optimizer with --script"),
        (["fit", "--budget", "1MiB"], "no TARGET"),
    ],
)  # fmt: skip
def test_bad_scripts_of_other_commands(script: str, arguments: list[str], message: str) -> None:
    done = _invoke(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr


@here
def test_check_takes_a_script(script: str) -> None:
    """Four convolutions without padding lose a border."""
    layers = ", ".join(["nn.Conv2d(1, 8, 3)"] + ["nn.Conv2d(8, 8, 3)"] * 3)
    text = SCRIPT.replace("nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4)", layers)
    Path(script).write_text(text.replace("torch.randn(512, 64)", "torch.randn(64, 1, 64, 64)"), encoding="utf-8")
    done = _invoke("check", "--script", script, "--", "--batch-size", "4")
    assert done.exit_code == 1, done.output
    assert "train.py: 1 warning" in done.stdout
    assert "4 pixels on each side" in done.stdout


@here
@pytest.mark.parametrize(
    ("budget", "code", "said"),
    [
        *slow(("1GiB", 0, "fits 1.0 GiB already")),
        ("10MiB", 0, "can be made to fit 10.0 MiB; nothing was run."),
        *slow(("1MiB", 1, "does not fit 1.0 MiB. The smallest budget with a plan is")),
    ],
)
def test_fit_takes_a_script(script: str, budget: str, code: int, said: str) -> None:
    arguments = ["--device", "cpu", "--json", "out.json", "--plan", "plan.json", "--", "--batch-size", "2048"]
    text = SCRIPT.replace("nn.ReLU()", "nn.GELU(), nn.Linear(256, 256), nn.GELU()").replace("randn(512", "randn(2048")
    Path(script).write_text(text, encoding="utf-8")
    done = _invoke("fit", "--script", script, "--budget", budget, *arguments)
    assert done.exit_code == code, done.output
    assert said in " ".join(done.stdout.split())
    data = json.loads(Path("out.json").read_text(encoding="utf-8"))
    assert (data["fits"], data["changed"]) == (code == 0, Path("plan.json").exists())
    if data["changed"]:
        assert "Add after train.py:10:" in done.stdout


@pytest.mark.parametrize("command", ["check", "explain"])
def test_a_target_without_a_callable_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    text = "def make(): ...\nopen('trained', 'w').close()\nraise SystemExit\n"
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    done = _invoke(command, "train.py")
    assert done.exit_code == 2
    assert "Say which: train.py:make; or memplan run train.py says what it needs" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@here
@pytest.mark.parametrize("command", ["fit", "largest"])
def test_a_budget_that_is_a_card_is_what_a_script_is_recorded_for(script: str, command: str) -> None:
    """For the CPU a script that names CUDA cannot be recorded."""
    text = SCRIPT.replace("nn.Linear(256, 4))", "nn.Linear(256, 4)).cuda()").replace("model(x)", "model(x.cuda())")
    Path(script).write_text(text, encoding="utf-8")
    most = ["--most", "8"] if command == "largest" else []
    done = _invoke(command, "--script", script, "--budget", "t4", *most)
    assert done.exit_code == 0, done.output
    assert "14.6 GiB" in done.stdout


PHASES = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(64, 256)
opt = torch.optim.SGD(model.parameters(), 0.1)
data = DataLoader(TensorDataset(torch.randn(400, 64), torch.zeros(400, dtype=torch.long)), 8)
for x, y in data:
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
model.eval()
with torch.no_grad():
    outputs = [model(x) for x, y in data]
torch.save(model.state_dict(), "model.pt")
"""


@here
def test_phases_are_rows_with_what_all_batches_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(PHASES, encoding="utf-8")
    done = CliRunner().invoke(main, ["run", "--phases", "--json", "-", "--device", "cpu", "script.py"])
    assert done.exit_code == 0, done.output
    phases = json.loads(done.stdout)["run"]["phases"]
    assert [phase["kind"] for phase in phases] == ["build", "train", "evaluate", "save"]
    evaluation = phases[2]
    assert (evaluation["batches"], evaluation["length"]) == (6, 50)
    assert evaluation["per_batch"] == 8 * 256 * 4
    assert evaluation["allocated"] - phases[1]["stays"] >= 50 * 8 * 256 * 4
    shown = CliRunner().invoke(main, ["run", "--phases", "--device", "cpu", "script.py"]).stdout
    assert "after all 50" in " ".join(shown.split())


@pytest.mark.parametrize("option", [("--lines", "script.py"), ("--steps", "2")])
def test_phases_exclude_lines_and_a_number_of_updates(
    option: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(PHASES, encoding="utf-8")
    done = CliRunner().invoke(main, ["run", "--phases", *option, "script.py"])
    assert done.exit_code == 2
    assert f"{option[0]} with --phases" in done.output


@here
def test_an_evaluation_with_gradients_is_told_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Train.py").write_text(PHASES.replace("torch.no_grad()", "torch.enable_grad()"), encoding="utf-8")
    shown = CliRunner().invoke(main, ["run", "--phases", "--device", "cpu", "Train.py"]).stdout
    text = " ".join(shown.split())
    assert "evaluate under torch.no_grad()" in text
    assert "Gradients are enabled in evaluation (Train.py:14)" in text
