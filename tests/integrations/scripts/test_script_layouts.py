"""Layouts of a script: each is the script, run with the flags that make that layout by hand."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from integrations.scripts.script_runs import run_here

import memplan
from memplan.cli import main
from memplan.devices import find
from memplan.errors import StepError
from memplan.integrations.scripts.command import Command
from memplan.integrations.scripts.launchers import Accelerate, Launch, Torchtitan, launcher_of
from memplan.integrations.scripts.process import run_script
from memplan.integrations.scripts.request import Request
from memplan.integrations.scripts.script_layouts import script_layouts
from memplan.studies.layouts.layout import Layout

RANKS = Path(__file__).parent / "ranks"
SHARDED = Layout(1, 8, 0)


class ByReplicas:
    """Sets the layout of fsdp_mesh.py, which has a flag for it, and shards in no other way."""

    batch_by_loader = True
    notes = ("float32: no mixed precision was given",)

    def launch(self, layout: Layout, micro_batch: int | None) -> Launch | None:
        if layout.shards == 1 or layout.checkpoint or not layout.reshard:
            return None
        return Launch(("--replicas", str(layout.replicas)), {"UNUSED": "1"}, f"--replicas {layout.replicas}")


def peak_of(script: str, world: int, *arguments: str) -> int:
    request = Request(Command(script, arguments), device="h100", world=world)
    return memplan.simulate(run_script(request).trace).peak_allocated


@pytest.fixture
def scripts_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts run in the test's process: another one for each layout takes four seconds to import torch."""
    monkeypatch.setattr("memplan.integrations.scripts.script_layouts.run_script", run_here)
    monkeypatch.setitem(globals(), "run_script", run_here)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("scripts_here")
def test_rows_are_the_runs_with_those_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(RANKS / "fsdp_mesh.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    request = Request(Command("fsdp_mesh.py"), device="h100", world=4)
    result = script_layouts(request, ByReplicas(), find("h100"), (), per_node=2)
    rows = {row.layout.title: row for row in result.rows}
    assert set(rows) == {"FSDP2 4", "HSDP 2 x 2"}
    assert rows["HSDP 2 x 2"].allocated == peak_of("fsdp_mesh.py", 4, "--replicas", "2")
    assert rows["FSDP2 4"].allocated < rows["HSDP 2 x 2"].allocated
    # of each layer of width 128: four projections of attention, two of the feed-forward layer, two norms
    parameters = 2 * (4 * 128 * 129 + 128 * 512 + 512 + 512 * 128 + 128 + 4 * 128)
    # gathered forward and backward, gradients reduced to shards, across machines of two cards
    assert rows["FSDP2 4"].sending == pytest.approx(3 * 4 * parameters * 3 / 4 / result.links[1], rel=0.02)
    within, between = 3 * 4 * parameters / 2 / result.links[0], 2 * 4 * parameters / 2 / 2 / result.links[1]
    assert rows["HSDP 2 x 2"].sending == pytest.approx(within + between, rel=0.02)
    assert result.best is not None
    title = result.best.layout.title
    assert result.notes[:2] == (f"{title}: --replicas {result.best.layout.replicas}", *ByReplicas.notes)


@pytest.mark.usefixtures("scripts_here")
def test_an_error_of_all_layouts_is_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemError('no data')\n")
    request = Request(Command(str(tmp_path / "train.py")), device="h100", world=2)
    with pytest.raises(StepError, match="no data"):
        script_layouts(request, ByReplicas(), find("h100"), (), per_node=8)


@pytest.mark.slow
def test_a_script_of_a_trainer_is_started_as_accelerate_launch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is the script that asks the Trainer for the same, which is compared with an emulated card."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    for name in ("trainer_fsdp", "trainer_unsharded"):
        shutil.copy(RANKS / f"{name}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    line = ["layouts", "--script", "trainer_unsharded.py", "--world", "4", "--device", "h100", "--json", "all.json"]
    done = CliRunner().invoke(main, line)
    assert done.exit_code == 0, done.output
    rows = {row.layout.title: row for row in memplan.Layouts.load("all.json").rows}
    endings = ("", ", kept", ", recomputed", ", kept, recomputed")
    assert set(rows) == {"DDP 4", *(f"FSDP2 4{ending}" for ending in endings)}
    assert {row.layout.micro_batch for row in rows.values()} == {8}
    assert rows["FSDP2 4"].allocated == peak_of("trainer_fsdp.py", 4)
    assert rows["FSDP2 4, recomputed"].allocated < rows["FSDP2 4"].allocated < rows["DDP 4"].allocated
    assert "accelerate launch --use_fsdp" in re.sub(r"\s+", " ", done.output)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("from accelerate import Accelerator\naccelerator = Accelerator()", Accelerate),
        ("from transformers import AutoModel, Trainer", Accelerate),
        ("from trl import SFTTrainer", Accelerate),
        ("from transformers import Trainer, TrainingArguments\nTrainingArguments('out', fsdp='full_shard')", None),
        ("from transformers import Trainer, TrainingArguments\nTrainingArguments('out', deepspeed='ds.json')", None),
        ("from transformers import Trainer\noptions = {'deepspeed': 'ds.json'}", None),
        ("from transformers import Trainer\nfrom transformers.integrations import deepspeed", Accelerate),
        ("import torch\nfrom torch.distributed.fsdp import fully_shard", None),
        ("import torch", None),
        ("not python", None),
    ],
)
def test_which_scripts_have_a_layout_that_is_set_from_outside(text: str, kind: type | None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    launcher = launcher_of(Command(str(tmp_path / "train.py")))
    assert (None if launcher is None else type(launcher)) == kind
    assert isinstance(launcher_of(Command("torchtitan.train", is_module=True)), Torchtitan)
    assert launcher_of(Command("package.train", is_module=True)) is None


def test_torchtitans_flags_are_those_of_its_configuration() -> None:
    config = pytest.importorskip("torchtitan.config")
    layout = Layout(2, 4, 2, reshard=False, checkpoint=True, tensor=2)
    launch = Torchtitan().launch(layout, 2)
    assert launch is not None
    read = config.ConfigManager().parse_args(list(launch.arguments))
    parallelism = read.parallelism
    degrees = "data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree"
    assert [getattr(parallelism, name) for name in degrees] == [2, 4, 2]
    assert (parallelism.fsdp_reshard_after_forward, parallelism.disable_loss_parallel) == ("never", True)
    assert (read.activation_checkpoint.mode, read.training.local_batch_size) == ("full", 2)


def test_what_accelerate_cannot_set_is_left_out() -> None:
    launch = Accelerate().launch(SHARDED, None)
    assert launch is not None
    assert launch.variables["FSDP_RESHARD_AFTER_FORWARD"] == "true"
    assert Accelerate().launch(Layout(1, 4, 0, tensor=2), None) is None
    assert Accelerate().launch(Layout(8, 1, 0, checkpoint=True), None) is None


TRAINER = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"


def launcher_of_trainer(folder: Path, *arguments: str, text: str = TRAINER) -> Accelerate | None:
    (folder / "train.py").write_text(text)
    launcher = launcher_of(Command(str(folder / "train.py"), arguments))
    assert launcher is None or isinstance(launcher, Accelerate)
    return launcher


def test_arguments_of_a_script_that_shard_it_are_seen(tmp_path: Path) -> None:
    for arguments in (["--fsdp", "full_shard auto_wrap"], ["--deepspeed", "ds.json"], ["--deepspeed=ds.json"]):
        assert launcher_of_trainer(tmp_path, *arguments) is None
    assert launcher_of_trainer(tmp_path, "--output_dir", "runs/fsdp") is not None


def test_variables_of_the_calling_process_shard_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the state of Accelerate reads them."""
    state = pytest.importorskip("accelerate.state")
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG"):
        monkeypatch.setenv(name, "true")
    launch = Accelerate().launch(Layout(8, 1, 0), None)
    assert launch is not None
    for name, value in launch.variables.items():
        monkeypatch.setenv(name, value)
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_PARALLELISM_CONFIG"):
        assert state.parse_flag_from_env(name) is False
    sharded = Accelerate().launch(SHARDED, None)
    assert sharded is not None
    assert sharded.variables["ACCELERATE_USE_DEEPSPEED"] == "false"
    assert sharded.variables["ACCELERATE_USE_FSDP"] == "true"


def test_float32_is_said_where_nothing_gives_mixed_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    said = ("float32: no mixed precision was given",)
    unsaid = [launcher_of_trainer(tmp_path, "--bf16"), launcher_of_trainer(tmp_path, text=f"{TRAINER}bf16 = True")]
    plain = launcher_of_trainer(tmp_path)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    unsaid.append(launcher_of_trainer(tmp_path))
    assert plain is not None
    assert plain.notes == said
    assert [one.notes for one in unsaid if one is not None] == [(), (), ()]


def test_a_script_of_its_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    line = ["layouts", "--script", str(tmp_path / "train.py"), "--world", "2", "--device", "h100"]
    done = CliRunner().invoke(main, line)
    assert done.exit_code == 2
    assert "nothing sets its layout from outside that memplan knows" in re.sub(r"\s+", " ", done.output)
