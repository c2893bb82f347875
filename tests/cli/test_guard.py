"""`memplan guard` as a user runs it: a baseline, a regression, and one line for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memplan.cli import main
from memplan.cli.guard import _portable, options_text
from memplan.cli.options import StepArguments
from memplan.cudnn.cudnn_library import of_this_torch, title_of
from memplan.errors import DeviceError

pytestmark = pytest.mark.usefixtures("models")
MODELS = """
import torch
from torch import nn


def net(width=64, depth=4):
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64)) for _ in range(depth)])


def volume():
    return nn.Conv3d(3, 5, 3)


def build(batch=32):
    model = net()
    data = torch.randn(batch, 64)
    return lambda: model(data).sum().backward()
"""


def run(*arguments: str, target: str = "models.py:net", baseline: str = "memory.json") -> Result:
    given = ["guard", target, *(("--input", "32x64") if target.endswith("net") else ()), "--baseline", baseline]
    device = () if "--device" in arguments or target.endswith(".json") else ("--device", "cpu")
    return CliRunner().invoke(main, [*given, *device, *arguments])


def step(name: str = "net", options: str = "--input 32x64") -> dict[str, object]:
    steps = json.loads(Path("memory.json").read_text())["steps"]
    return next(one for one in steps if (one["target"], one["options"]) == (f"models.py:{name}", options))


def test_a_baseline_is_written_and_held(models: Path) -> None:
    written = run("--update")
    assert written.exit_code == 0
    assert written.output.startswith("memory.json: models.py:net --input 32x64 on cpu: ")
    assert written.output.endswith(" peak, new\n")
    text = (models / "memory.json").read_text()
    held = run()
    assert held.exit_code == 0
    assert "as in the baseline." in held.output
    assert run("--update").output.endswith("(the same)\n")
    assert (models / "memory.json").read_text() == text


def test_a_wider_layer_fails_with_its_layer_and_its_cause(models: Path) -> None:
    run("--update", "--arg", "width=64")
    data = json.loads((models / "memory.json").read_text())
    data["steps"][0]["options"] = "--arg width=128 --input 32x64"
    (models / "memory.json").write_text(json.dumps(data))
    done = run("--arg", "width=128", "--json", "out.json")
    assert done.exit_code == 1
    assert "It takes more than the baseline" in done.output
    changes = json.loads((models / "out.json").read_text())["changes"]
    weights = [row for one in changes for row in one["causes"] if row["cause"] == "weight"]
    # 64 more rows and biases in each first layer, 64 more columns in each second
    assert sum(row["b"] - row["a"] for row in weights) == 4 * (64 * 64 + 64 + 64 * 64) * 4
    assert "(layers 0 to 3).0: +" in done.output


def test_one_file_holds_devices_options_and_targets() -> None:
    for arguments in ((), ("--device", "h100"), ("--batch", "8")):
        assert run("--update", *arguments).exit_code == 0
    assert run("--update", target="models.py:build").exit_code == 0
    assert len(json.loads(Path("memory.json").read_text())["steps"]) == 4
    for arguments in ((), ("--device", "h100"), ("--batch", "8")):
        assert run(*arguments).exit_code == 0
    missing = run("--batch", "16")
    assert missing.exit_code == 2
    assert "has no figures of it; it has models.py:build, models.py:net --input 32x64" in missing.output
    assert "has it for cpu, h100, not for rtx4090" in run("--device", "rtx4090").output


def test_a_target_is_the_same_however_its_path_is_written(models: Path) -> None:
    run("--update")
    for path in ("./models.py", str(models / "models.py")):
        assert run(target=f"{path}:net").exit_code == 0


@pytest.mark.parametrize(
    ("typed_as", "name"),
    [
        ("models\\net.py:make", "models/net.py:make"),
        ("./a/../net.py:Net.make", "net.py:Net.make"),
        ("/elsewhere/net.py:make", "/elsewhere/net.py:make"),
        ("package.net:make", "package.net:make"),
        ("traces\\step.json", "traces/step.json"),
    ],
)
def test_a_name_is_the_same_on_each_system(typed_as: str, name: str) -> None:
    assert _portable(typed_as) == name


def test_a_trace_is_a_target(models: Path) -> None:
    explained = ["explain", "models.py:net", "--input", "32x64", "--device", "cpu", "--trace", "step.json"]
    CliRunner().invoke(main, explained)
    assert run("--update", target="step.json").exit_code == 0
    run("--update")
    assert run(target="step.json").exit_code == 0
    peaks = {one["target"]: one["peak"] for one in json.loads((models / "memory.json").read_text())["steps"]}
    assert peaks["step.json"] == peaks["models.py:net"]


SCRIPT = """
import sys
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, WIDTH), nn.Linear(WIDTH, 64))
optimizer = torch.optim.SGD(model.parameters())
for _ in range(10):
    optimizer.zero_grad()
    model(torch.randn(int(sys.argv[1]), 64)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_script_is_a_target_with_its_arguments(models: Path) -> None:
    (models / "train.py").write_text(SCRIPT.replace("WIDTH", "64"))
    of_script = ["--script", "train.py", "--baseline", "memory.json", "--device", "cpu"]
    written = CliRunner().invoke(main, ["guard", *of_script, "--update", "--", "8"])
    assert (written.exit_code, written.output[:35]) == (0, "memory.json: train.py -- 8 on cpu: ")
    (models / "train.py").write_text(SCRIPT.replace("WIDTH", "128"))
    done = CliRunner().invoke(main, ["guard", *of_script, "--json", "out.json", "--", "8"])
    assert done.exit_code == 1, done.output
    changes = json.loads((models / "out.json").read_text())["changes"]
    assert "layers 0 to 1" in {one["name"] for one in changes}
    weights = [row for one in changes for row in one["causes"] if row["cause"] == "weight"]
    assert sum(row["b"] - row["a"] for row in weights) == (64 * 64 + 64 + 64 * 64) * 4


def test_outputs_for_ci_have_the_failure_and_its_line(models: Path) -> None:
    run("--update")
    text = (models / "memory.json").read_text()
    saved = step()
    smaller = {**saved, "peak": 5, "reserved": 5, "held": [{"layer": "0.0", "cause": "weight", "bytes": 5}]}
    (models / "memory.json").write_text(json.dumps(json.loads(text) | {"steps": [smaller]}))
    done = run("--sarif", "out.sarif", "--junit", "out.xml", "--github")
    assert done.exit_code == 1
    errors = [line for line in done.output.splitlines() if line.startswith("::error ")]
    assert [line.partition("::")[2].partition("::")[0] for line in errors] == [
        "error file=models.py,line=1,title=memplan memory-growth"
    ]
    results = json.loads((models / "out.sarif").read_text())["runs"][0]["results"]
    assert {one["ruleId"] for one in results} == {"memory-growth"}
    places = [one["locations"][0]["physicalLocation"] for one in results if one["level"] == "warning"]
    lines = {place["region"]["startLine"] for place in places}
    assert lines == {7}  # of net, which makes the layers
    assert 'failures="1"' in (models / "out.xml").read_text()
    assert run("--tolerance", "1TiB", "--junit", "out.xml").exit_code == 0
    assert 'failures="0"' in (models / "out.xml").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "there is no baseline memory.json. Expected one in version control. Run memplan guard with --update"),
        (("--tolerance", "1e9%"), "the tolerance '1e9%'. Expected a share of the baseline, or bytes."),
        (("--json", "-", "--github"), "two outputs at one place."),
        (("--sarif", "x", "--junit", "x"), "names the same file."),
        (("--sarif", "no/x"), "--sarif no/x: there is no folder"),
        (("--update", "--github"), "--update with --json, --sarif, --github or --junit."),
    ],
)
def test_a_mistake_is_one_line_and_2(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in done.output
    assert done.output.count("\n") == 1


@pytest.mark.parametrize("text", ["not JSON", '{"format":"memplan.baseline","schema":99}'])
def test_a_file_that_is_none_is_never_overwritten(models: Path, text: str) -> None:
    (models / "memory.json").write_text(text)
    assert run("--update").exit_code == 2
    assert run().exit_code == 2
    assert (models / "memory.json").read_text() == text


def test_a_baseline_of_another_torch_is_not_compared(models: Path) -> None:
    run("--update")
    text = (models / "memory.json").read_text()
    (models / "memory.json").write_text(text.replace(f'"torch":"{step()["torch"]}"', '"torch":"1.0"'))
    done = run()
    assert done.exit_code == 2
    assert "was written by torch 1.0, and this is torch" in done.output
    assert run("--update").exit_code == 0
    assert (models / "memory.json").read_text() == text


@pytest.mark.parametrize(
    ("typed_as", "asked"),
    [((), title_of(of_this_torch().version)), (("--cudnn", "off"), False), (("--cudnn", "/env"), "/env")],
)
def test_only_a_cudnn_that_is_named_is_asked(
    typed_as: tuple[str, ...], asked: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []

    def choose(device: str, assume: object, cudnn: object, *rank: object) -> None:
        found.append(cudnn)
        raise DeviceError("enough")

    monkeypatch.setattr("memplan.trace.recording.session.choose_target", choose)
    assert run("--update", *typed_as).exit_code == 2
    assert found == [asked]


def test_options_are_typed_in_one_order() -> None:
    given = StepArguments(
        "a.py:b", inputs=("8x3", "8"), optimizer="adamw", autocast="bf16", train=False, batch=4, device="h100",
        cudnn="off",
    )  # fmt: skip
    assert options_text(given) == "--input 8x3 --input 8 --optimizer adamw --autocast bf16 --no-train --batch 4"
    assert options_text(StepArguments("a.py:b")) == ""
    assert options_text(StepArguments("a.py:b", batch=1)) == "--batch 1"


def test_a_baseline_with_former_spellings_of_options_is_found(tmp_path: Path) -> None:
    typed = ("--no-train", "--autocast", "bf16")
    assert run("--update", *typed).exit_code == 0
    file = Path("memory.json")
    now = file.read_text()
    former = now.replace("--autocast bf16 --no-train", "--precision bf16 --infer")
    assert former != now
    file.write_text(former)
    assert run(*typed).exit_code == 0
    assert run("--update", *typed).exit_code == 0
    assert file.read_text() == now  # one row, in the present spelling


def test_a_card_s_workspaces_are_expected_whatever_is_installed(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is that of `memplan explain` for the version by name; baselines with intervals are refused."""
    typed = ("--input", "2x3x21x22x23", "--device", "a100-80gb")
    monkeypatch.setattr(
        "memplan.cudnn.cudnn_library._installed", lambda: pytest.fail("an installed cuDNN was looked for")
    )
    assert run("--update", *typed, target="models.py:volume").exit_code == 0
    written = json.loads((models / "memory.json").read_text())["steps"][0]
    version = title_of(of_this_torch().version)
    explained = CliRunner().invoke(main, ["explain", "models.py:volume", *typed, "--cudnn", version, "--json", "-"])
    assert written["peak"] == json.loads(explained.stdout)["timeline"]["peak_allocated"]
    assert (written["cudnn"], written["expected"]) == (False, True)
    assert run(*typed, target="models.py:volume").exit_code == 0
    assert run("--update", "--cudnn", "off", *typed, target="models.py:volume").exit_code == 0
    refused = run(*typed, target="models.py:volume")
    assert refused.exit_code == 2
    assert "the default of former versions" in refused.output


def test_a_baseline_of_a_former_version_is_read_where_no_workspace_is_cudnns(models: Path) -> None:
    assert run("--update").exit_code == 0
    file = models / "memory.json"
    now = file.read_text()
    former = now.replace(',"expected":false', "").replace(',\n"expected":false', "")
    assert former != now
    file.write_text(former)
    assert run().exit_code == 0


def test_ranks_of_several_have_baselines_of_their_own(models: Path) -> None:
    for options in ((), ("--world", "8"), ("--world", "8", "--rank", "3")):
        assert run("--update", *options, target="models.py:build").exit_code == 0
        assert run(*options, target="models.py:build").exit_code == 0
    assert {one["options"] for one in json.loads(Path("memory.json").read_text())["steps"]} == {
        "", "--world 8 --rank 0", "--world 8 --rank 3"
    }  # fmt: skip
    assert run("--world", "4", target="models.py:build").exit_code == 2
