"""`memplan fit` as a user runs it: what it asks for, prints and writes, and its one line for every mistake."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from reports.outcomes import FRONTIER, MIB, PROOF, WRONG, kept, plan
from torch import nn

import memplan
from memplan import _torch
from memplan._bytes import format_bytes
from memplan.cli import fit as fit_command
from memplan.cli import main
from memplan.errors import BudgetError, StepError, UsageError, VerificationError
from memplan.planning.plan.plan import Plan
from memplan.verification.peers import trials
from memplan.verification.peers.peers import EAGER, Peer
from memplan.verification.proof.proof import Proof

MODELS = """
from torch import nn

def make(width: int = 8):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))

def deep():
    layers = (layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)))
    return nn.Sequential(nn.Linear(16, 64), *layers, nn.Linear(64, 8))

def asleep():
    return make().eval()

def step():
    return lambda: None

def raising():
    raise KeyError("weights.pt")

def leaving():
    raise SystemExit(3)
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    file = tmp_path / "net.py"
    file.write_text(MODELS)
    return f"{file}:make"


@dataclass
class Fitted:
    plan: Plan
    proof: Proof | None
    changed: bool
    notes: list[str] = field(default_factory=lambda: ["tightened once"])

    def undo(self) -> None:
        """Nothing was done."""


@dataclass
class Engine:
    """Stands for what plans and runs: it notes what it was asked for, and answers as told."""

    answer: Any = field(default_factory=lambda: Fitted(plan(), PROOF, changed=True))
    asked: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def fit(self, model: Any, *inputs: Any, **options: Any) -> Fitted:
        self.asked.append((model, inputs, options))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def plan(self, model: Any, *inputs: Any, **options: Any) -> Plan:
        return self.fit(model, *inputs, **options).plan


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(memplan, "fit", made.fit, raising=False)
    monkeypatch.setattr(memplan, "plan", made.plan, raising=False)
    return made


def run(*args: str | Path | int) -> Result:
    return CliRunner().invoke(main, ["fit", *map(str, args)])


def one_line(result: Result) -> str:
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    return result.stderr


# -- what is asked for


def test_the_options_become_a_call_of_fit(net: str, engine: Engine) -> None:
    result = run(
        net, "--arg", "width=16", "--input", "2x4", "--target", "2:int64<3", "--loss", "cross_entropy",
        "--optimizer", "sgd:lr=0.5", "--autocast", "bf16", "--budget", "400MiB", "--early", "--accumulate", "2",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    (model, inputs, options), *_ = engine.asked
    assert isinstance(model, nn.Sequential)
    assert model[0].weight.shape == (16, 4)
    assert [spec.shape for spec in inputs] == [(2, 4)]
    assert options["loss"] is nn.functional.cross_entropy
    assert [spec.shape for spec in options["targets"]] == [(2,)]
    assert options["optimizer"](model.parameters()).param_groups[0]["lr"] == 0.5
    assert options["autocast"] is torch.bfloat16
    assert (options["budget"], options["early"], options["accumulate"]) == ("400MiB", True, 2)


@pytest.mark.slow
def test_a_model_in_evaluation_is_fitted_in_training(net: str, engine: Engine) -> None:
    run(net.replace(":make", ":asleep"), "--input", "2x4", "--budget", "400MiB", "--dtype", "bf16")
    ((model, inputs, _),) = engine.asked
    assert all(module.training for module in model.modules())
    assert model[0].weight.dtype is inputs[0].dtype is torch.bfloat16


@pytest.mark.slow
def test_lazy_layers_are_made_before(tmp_path: Path, engine: Engine) -> None:
    lazy = tmp_path / "lazy.py"
    lazy.write_text(
        "from torch import nn\ndef make(): return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Dropout())\n"
    )
    run(f"{lazy}:make", "--input", "2x4", "--budget", "400MiB")
    ((model, _, _),) = engine.asked
    assert model[0].weight.shape == (3, 4)
    assert (model[1].running_mean == 0).all()
    assert model.training


def test_a_prediction_runs_nothing_and_makes_no_model(net: str, engine: Engine) -> None:
    engine.answer = Fitted(plan(), None, changed=True)
    result = run(net, "--input", "2x4", "--budget", "400MiB", "--predict")
    assert "can be made to fit the budget of 400.0 MiB; nothing was run." in " ".join(result.stdout.split())
    ((make, _, _),) = engine.asked
    assert not isinstance(make, nn.Module)
    assert isinstance(make(), nn.Sequential)


def test_a_prediction_of_estimates_is_the_same_again(net: str) -> None:
    options = ["--arg", "width=512", "--input", "512x4", "--target", "512:int64<3", "--loss", "cross_entropy"]
    results = [run(net, *options, "--budget", "2.1MiB", "--predict", "--costs", "roofline") for _ in range(2)]
    assert results[0].exit_code == 0, results[0].output
    assert "can be made to fit" in " ".join(results[0].stdout.split())
    assert results[0].stdout == results[1].stdout


def test_a_proof_takes_no_estimates(net: str, engine: Engine) -> None:
    assert "--predict" in one_line(run(net, "--input", "2x4", "--budget", "1MiB", "--costs", "roofline"))
    assert engine.asked == []


# -- answers


def test_a_step_that_fits_now(net: str, engine: Engine) -> None:
    result = run(net, "--input", "2x4", "--budget", "400MiB")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "measured peak" in result.stdout
    assert "the same bit for bit" in result.stdout
    assert "note: tightened once" in result.stdout


def test_a_step_that_fits_already(net: str, engine: Engine) -> None:
    engine.answer = Fitted(kept(), None, changed=False)
    result = run(net, "--input", "2x4", "--budget", "1GiB")
    assert result.exit_code == 0
    assert "already: nothing was changed" in " ".join(result.stdout.split())


def test_a_proof_that_fails_is_no_success(net: str, engine: Engine, tmp_path: Path) -> None:
    engine.answer = VerificationError("The planned step is NOT the same", do="Please report this", proof=WRONG)
    files = "--json", tmp_path / "out.json", "--plan", tmp_path / "plan.json"
    result = run(net, "--input", "2x4", "--budget", "400MiB", *files)
    assert (result.exit_code, result.stderr) == (1, "")
    words = " ".join(result.stdout.split())
    assert "was NOT made to fit the budget of 400.0 MiB: the proof failed." in words
    assert "NOT the same: the gradient of a.weight differs by up to 1" in words
    assert "note: Please report this." in words
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["fits"], written["changed"], written["proof"]["ok"]) == (False, False, False)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("options", [[], ["--predict"]])
def test_a_budget_below_the_floor(net: str, engine: Engine, tmp_path: Path, options: list[str]) -> None:
    engine.answer = BudgetError("The budget is 1.0 MiB", do="Halve the batch", smallest_budget=200 * MIB)
    file = tmp_path / "out.json"
    result = run(net, "--input", "2x4", "--budget", "1MiB", "--json", file, "--plan", tmp_path / "plan.json", *options)
    assert (result.exit_code, result.stderr) == (1, "")
    assert "The smallest budget that it fits is 200.0 MiB." in " ".join(result.stdout.split())
    assert "Halve the batch." in result.stdout
    assert json.loads(file.read_text())["smallest_budget"] == 200 * MIB
    assert not (tmp_path / "plan.json").exists()


# -- files


@pytest.mark.slow
def test_a_plan_is_written_and_used_again(net: str, engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    run(net, "--input", "2x4", "--budget", "400MiB", "--plan", file, "--python", tmp_path / "step.py")
    assert (tmp_path / "step.py").read_text() == plan().as_python()
    result = run(net, "--input", "2x4", "--use-plan", file)
    assert result.exit_code == 0
    assert "plan" not in engine.asked[0][2]
    assert engine.asked[1][2]["plan"] == plan()
    assert engine.asked[1][2]["budget"] == 400 * MIB  # the plan's own


def test_json_alone_on_stdout(net: str, engine: Engine) -> None:
    result = run(net, "--input", "2x4", "--budget", "400MiB", "--json", "-")
    assert json.loads(result.stdout)["proof"]["peak"] == PROOF.peak


def test_the_frontier_is_drawn_and_listed(
    net: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(fit_command, "_frontier", lambda *given: FRONTIER)
    result = run(net, "--input", "2x4", "--budget", "400MiB", "--frontier", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "the floor" in result.stdout


def test_the_frontier_of_a_model(net: str, engine: Engine, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "out.json"
    options = ["--target", "4096:int64<3", "--loss", "cross_entropy", "--arg", "width=64", "--budget", "1GiB"]
    result = run(net, "--input", "4096x4", *options, "--frontier", tmp_path / "out.svg", "--json", file)
    assert result.exit_code == 0, result.stderr
    points = json.loads(file.read_text())["frontier"]["points"]
    assert points[0]["seconds"] == 0
    assert all(one["peak"] > other["peak"] for one, other in pairwise(points))
    assert all(one["seconds"] <= other["seconds"] for one, other in pairwise(points))
    # Weights, inputs and the hidden layer, which is made and read at once: 4096 x 64 floats.
    assert points[-1]["peak"] > 4096 * 64 * 4 + 4096 * 4 * 4


def test_peers_are_measured_where_they_are_asked_for(
    net: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(trials, "peers", lambda **_: (EAGER, Peer("again", checkpointed=True)))
    file = tmp_path / "out.json"
    options = ["--target", "64:int64<3", "--loss", "cross_entropy", "--budget", "1GiB", "--json", file]
    result = run(net, "--input", "64x4", *options, "--frontier", tmp_path / "out.svg", "--peers")
    assert result.exit_code == 0, result.stderr
    peers = json.loads(file.read_text())["frontier"]["peers"]
    assert [(one["name"], one["gradients"]) for one in peers] == [("eager", "right"), ("again", "right")]
    assert "Peers, measured" in result.stdout


# -- the whole way, with nothing in anything's place

STEP = {"targets": "512:int64<8", "loss": nn.functional.cross_entropy}
OPTIONS = ("--input", "512x16", "--target", "512:int64<8", "--loss", "cross_entropy")


@pytest.fixture
def deep(net: str) -> tuple[str, nn.Module]:
    """A target, and what it makes."""
    target = net.replace(":make", ":deep")
    scope: dict[str, Any] = {}
    exec(Path(target.partition(":deep")[0]).read_text(), scope)
    return target, scope["deep"]()


def between(model: nn.Module, **options: Any) -> int:
    found = memplan.plan(model, "512x16", **STEP, budget="1 GiB", **options)
    return (found.floor + found.eager_peak) // 2


@pytest.mark.slow
def test_a_step_is_fitted_and_its_plan_used_again(deep: tuple[str, nn.Module], tmp_path: Path) -> None:
    target, model = deep
    budget, file = between(model), tmp_path / "plan.json"
    first = run(target, *OPTIONS, "--budget", budget, "--plan", file, "--json", tmp_path / "one.json")
    assert (first.exit_code, first.stderr) == (0, "")
    again = run(target, *OPTIONS, "--use-plan", file, "--json", tmp_path / "two.json")
    assert (again.exit_code, again.stderr) == (0, "")
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one.json", "two.json"))
    fitted = memplan.fit(model, "512x16", **STEP, budget=budget, plan=memplan.Plan.load(file), pairs=0)
    for written in (one, two):
        assert written["fits"]
        assert written["changed"]
        assert written["proof"]["ok"]
        assert written["proof"]["budget"] == budget
        assert written["proof"]["times"]["pairs"] > 0
        assert written["proof"]["peak"] == fitted.proof.peak <= budget < fitted.proof.reference_peak
        assert written["proof"]["reference_peak"] == fitted.proof.reference_peak
        assert written["plan"]["choices"] == json.loads(file.read_text())["choices"]
    words = " ".join(again.stdout.split())
    assert f"fits the budget of {format_bytes(budget)} now, and its result is the same." in words
    assert f"measured peak {format_bytes(fitted.proof.reference_peak)} {format_bytes(fitted.proof.peak)}" in words


@pytest.mark.slow
def test_a_step_is_fitted_with_the_optimizer_early(deep: tuple[str, nn.Module], tmp_path: Path) -> None:
    target, model = deep
    early: dict[str, Any] = {"optimizer": torch.optim.AdamW, "early": True}
    budget, file = between(model, **early), tmp_path / "plan.json"
    options = ("--optimizer", "adamw", "--early", "--budget", budget, "--plan", file, "--json", tmp_path / "out.json")
    result = run(target, *OPTIONS, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    fitted = memplan.fit(model, "512x16", **STEP, **early, budget=budget, plan=memplan.Plan.load(file), pairs=0)
    fitted.undo()
    proof = json.loads((tmp_path / "out.json").read_text())["proof"]
    assert (proof["ok"], proof["early"], proof["optimizer"]) == (True, True, "AdamW")
    assert proof["peak"] == fitted.proof.peak <= budget < fitted.proof.reference_peak
    assert "with AdamW, applied early" in " ".join(result.stdout.split())


@pytest.mark.slow
def test_the_smallest_budget_is_told_and_is_enough(deep: tuple[str, nn.Module], tmp_path: Path) -> None:
    target, _ = deep
    short = run(target, *OPTIONS, "--budget", "1KiB", "--json", tmp_path / "out.json")
    assert (short.exit_code, short.stderr) == (1, "")
    least = json.loads((tmp_path / "out.json").read_text())["smallest_budget"]
    assert f"({least} bytes)" in " ".join(short.stdout.split())
    assert run(target, *OPTIONS, "--budget", least, "--predict").exit_code == 0


@pytest.mark.slow
@pytest.mark.skipif(_torch.cpp_compiler() is None, reason="Inductor needs a C++ compiler, and none is here")
def test_what_fusion_brings_is_told(deep: tuple[str, nn.Module], tmp_path: Path) -> None:
    target, model = deep
    options = ("--engine", "inductor", "--predict", "--costs", "roofline", "--budget", between(model))
    result = run(target, *OPTIONS, *options, "--json", tmp_path / "out.json")
    assert (result.exit_code, result.stderr) == (0, "")
    fusion = json.loads((tmp_path / "out.json").read_text())["plan"]["fusion"]
    assert fusion["kernels_after"] == len(fusion["groups"]) < fusion["kernels_before"]
    assert sum(group["bytes"] for group in fusion["groups"]) == fusion["bytes_after"] < fusion["bytes_before"]
    assert f"kernels {fusion['kernels_before']} -> {fusion['kernels_after']}, bytes moved" in result.stdout
    assert any(group["fused"] and group["layers"] for group in fusion["groups"])


# -- bad usage


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (
            "8 Gbit",
            "'8 Gbit' is a number of bits. Expected a number of bytes; or a share of the step without a plan, such as "
            "'70%'. Divide it by 8 and write it like '1 GB'.",
        ),
        ("-1", "'-1' is not a number of bytes."),
        ("lots", "'lots' is not a number of bytes."),
    ],
)
def test_a_budget_that_is_no_size(net: str, engine: Engine, budget: str, words: str) -> None:
    assert words in one_line(run(net, "--input", "2x4", f"--budget={budget}"))
    assert engine.asked == []


def test_a_card_is_a_budget(net: str, engine: Engine) -> None:
    assert run(net, "--input", "2x4", "--budget", "rtx4090").exit_code == 0
    assert engine.asked[0][2]["budget"] == "rtx4090"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "no budget. Expected one: --budget 400MiB, or a plan's own with --use-plan."),
        (["--no-train"], "no budget. Expected one: --budget 400MiB, or a share"),
        (
            ["--budget", "1GiB", "--no-train", "--allow", "lossy", "--early"],
            "--allow, --early with --no-train. Expected TARGET, --arg, --input, --dtype, --budget and --json alone",
        ),
        (["--budget", "1GiB", "--settings", "expandable_segments:True"], "--settings. Expected"),
        (["--budget", "1GiB", "--peers"], "--peers without --frontier. Expected a frontier to draw them beside"),
        (["--budget", "1GiB", "--peers", "--frontier", "x.png", "--predict"], "--peers with --predict. Expected"),
        (["--budget", "1GiB", "--frontier", "-"], "--frontier -. Expected a file"),
        (["--budget", "1GiB", "--frontier", "x.txt"], "Expected a name that ends in .png"),
        (["--budget", "1GiB", "--plan", "-", "--json", "-"], "one file for several outputs"),
        (["--budget", "1GiB", "--plan", "/nowhere/p.json"], "there is no folder /nowhere"),
        (["--use-plan", "/nowhere/p.json"], "--use-plan /nowhere/p.json cannot be read (No such file or directory)"),
        (["--budget", "1GiB", "--accumulate", "0"], "--accumulate"),
        (["--budget", "1GiB", "--target", "2:int64<3"], "--target without --loss"),
    ],
)
def test_options_that_cannot_be(net: str, engine: Engine, options: list[str], words: str) -> None:
    assert words in one_line(run(net, "--input", "2x4", *options))
    assert engine.asked == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("step", "returned a value of type function. Expected a module"),
        ("raising", "net.py:raising raised KeyError: 'weights.pt' (at"),
        ("leaving", "called sys.exit(3)"),
    ],
)
def test_a_target_that_makes_no_model(net: str, engine: Engine, name: str, words: str) -> None:
    assert words in one_line(run(net.replace(":make", f":{name}"), "--input", "2x4", "--budget", "1GiB"))


def test_files_that_are_no_plan_or_one_with_a_larger_peak(net: str, engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("{}")
    assert "is no plan that can be used" in one_line(run(net, "--input", "2x4", "--use-plan", file))
    file.write_text(plan().to_json())
    words = one_line(run(net, "--input", "2x4", "--use-plan", file, "--budget", "299MiB"))
    assert "has a peak of 300.0 MiB, and the budget is 299.0 MiB. Expected a plan within the budget." in words


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UsageError("The plan is for another model"), "memplan: The plan is for another model."),
        (StepError("mat1 and mat2 cannot be multiplied", layer="0", where="net.py:5"), "it was given --input 2x4"),
    ],
)
def test_what_the_engine_refuses_is_bad_usage(net: str, engine: Engine, error: Exception, words: str) -> None:
    engine.answer = error
    assert words in one_line(run(net, "--input", "2x4", "--budget", "1GiB"))


def test_inference_is_fitted_in_parts(tmp_path: Path) -> None:
    """Its measured peak beside that of the model as it is, by torch's profiler; below all parts, the reason."""
    (tmp_path / "convolutions.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))\n"
    )
    target = f"{tmp_path / 'convolutions.py'}:make"
    model, x = (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1)),
        torch.randn(1, 3, 128, 128),
    )
    profile = _torch.memory_profile()
    with torch.no_grad(), profile:
        result = model(x)
    level = whole = 0
    for event in _torch.Profile.of(profile).events:
        level += event.bytes
        whole = max(whole, level)
    whole += sum(tensor.nbytes for tensor in (*model.parameters(), x))
    done = run(target, "--input", "1x3x128x128", "--no-train", "--budget", "60%", "--json", tmp_path / "fit.json")
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "fit.json").read_text())["figures"]
    assert figures["before"] == pytest.approx(whole, rel=0.01)
    assert x.nbytes + result.nbytes < figures["measured"] <= figures["budget"] == int(0.6 * figures["before"])
    assert f"in {figures['parts']} parts" in " ".join(done.stdout.split())
    least = run(target, "--input", "1x3x128x128", "--no-train", "--budget", "100KiB")
    assert least.exit_code == 1
    assert "does not fit. The smallest budget that it fits is" in " ".join(least.stdout.split())
