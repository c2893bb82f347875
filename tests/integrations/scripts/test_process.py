"""Scripts of ten styles in processes of their own: recorded as they really run, and nothing of them is left behind."""

from __future__ import annotations

import ctypes
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch

import memplan
from memplan.errors import InputError, StepError
from memplan.integrations.scripts import process
from memplan.integrations.scripts.command import Command
from memplan.integrations.scripts.process import run_script
from memplan.integrations.scripts.request import Ran, Request, ScriptEnded

TEN = Path(__file__).parent / "ten"
NEEDS = {
    "accelerated": ["accelerate"],
    "ema_diffusion": ["monai"],
    "lightning_module": ["lightning", "tensorboard"],
    "plain_amp": ["tensorboard", "tqdm"],
    "sliding_window": ["monai"],
    "trainer_lora": ["transformers", "peft"],
}
QUICK = ("gan", "made_on_the_fly")
SCRIPTS = [
    pytest.param(path.stem, marks=[] if path.stem in QUICK else pytest.mark.slow) for path in sorted(TEN.glob("*.py"))
]
LOOP = """
import torch
from torch import nn
model = nn.Linear(64, 64)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
print("begins")
for _ in range(9):
    model(torch.randn(8, 64)).sum().backward()
    opt.step()
"""


def _copied(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    shutil.copy(TEN / f"{name}.py", tmp_path / f"{name}.py")
    monkeypatch.chdir(tmp_path)
    return Command(f"{name}.py")


def _written(tmp_path: Path, text: str) -> Command:
    (tmp_path / "script.py").write_text(text, encoding="utf-8")
    return Command(str(tmp_path / "script.py"))


def _peak(ran: Ran) -> int:
    return memplan.simulate(ran.trace).peak_allocated


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_prediction_is_what_it_really_takes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = _copied(name, tmp_path, monkeypatch)
    recorded = run_script(Request(command, device="cpu"))
    measured = run_script(Request(command, device="cpu", really=True))
    assert _peak(recorded) == pytest.approx(_peak(measured), rel=0.001)
    assert recorded.facts.ending == measured.facts.ending
    assert recorded.facts.updates == measured.facts.updates == (0 if name == "evaluation" else 2)
    assert [path.name for path in tmp_path.rglob("*")] == [f"{name}.py"], "no file is written"


def test_what_would_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = _copied("plain_amp", tmp_path, monkeypatch)
    held = run_script(Request(command, device="cpu")).facts.held
    kinds = {(one.kind, os.path.relpath(one.what)) for one in held}
    assert {("file", "runs"), ("file", os.path.join("runs", "exp1"))} <= kinds
    assert any("events.out.tfevents" in what for _, what in kinds)
    own = [one for one in held if "tfevents" not in one.what]  # written by a thread of TensorBoard's
    assert all(str(one.where).startswith("plain_amp.py:") for one in own)


@pytest.mark.parametrize(("ending", "code"), [("raise SystemExit(3)", 3), ("import os; os._exit(5)", None)])
def test_an_exit_before_the_first_model(tmp_path: Path, ending: str, code: int | None) -> None:
    command = _written(tmp_path, f"print('said before')\n{ending}\n")
    with pytest.raises(StepError, match="exit code") as caught:
        run_script(Request(command, device="cpu"))
    if code is not None:
        assert isinstance(caught.value, ScriptEnded)
        assert (caught.value.code, caught.value.said) == (code, "said before\n")


def test_a_process_that_dies_is_a_message(tmp_path: Path) -> None:
    command = _written(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(StepError, match=r"script\.py ended by SIGKILL"):
        run_script(Request(command, device="cpu"))


def test_there_is_no_such_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(InputError, match=r"there is no file .*trian\.py.*train\.py"):
        run_script(Request(Command(str(tmp_path / "trian.py"))))


def test_this_process_stays_as_it_was(tmp_path: Path) -> None:
    before = (os.getcwd(), list(sys.path), list(sys.argv), dict(os.environ))
    ran = run_script(Request(_written(tmp_path, "import os\nos.chdir('/')\nos.environ['NEW'] = '1'\n" + LOOP)))
    assert (os.getcwd(), list(sys.path), list(sys.argv), dict(os.environ)) == before
    assert ran.facts.lines == 1


@pytest.mark.parametrize(
    ("line", "kind", "what"),
    [
        ("import socket; socket.create_connection(('example.org', 80))", "network", "example.org"),
        ("import subprocess; subprocess.run(['nvidia-smi', '-L'])", "process", "nvidia-smi -L"),
        ("import os; os.system('touch made')", "process", "touch made"),
        ("torch.save(model, 'model.pt')", "checkpoint", "model.pt"),
        ("import safetensors.torch as s; s.save_file(model.state_dict(), 'm.st')", "checkpoint", "m.st"),
        ("open('log.txt', 'w').write('x')", "file", "log.txt"),
    ],
)  # fmt: skip
def test_effects_are_held_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, kind: str, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    attempt = f"try:\n    {line}\nexcept OSError as error:\n    print(error)\n"
    ran = run_script(Request(_written(tmp_path, LOOP.replace("print", attempt + "print")), device="cpu"))
    (held,) = ran.facts.held
    assert (held.kind, os.path.basename(held.what)) == (kind, what)
    assert held.where == "script.py:7"
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_what_was_saved_is_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    again = "torch.save(model.state_dict(), 'a.pt')\nmodel.load_state_dict(torch.load('a.pt'))\nprint"
    ran = run_script(Request(_written(tmp_path, LOOP.replace("print", again)), device="cpu"))
    assert ran.facts.ending == "steps"


def test_writes_are_allowed_where_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = LOOP.replace("print", "open('log.txt', 'w').write('x')\ntorch.save(model, 'model.pt')\nprint")
    ran = run_script(Request(_written(tmp_path, text), device="cpu", writes=True))
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "x"
    assert not (tmp_path / "model.pt").exists(), "its tensors have no values"
    assert [one.kind for one in ran.facts.held] == ["checkpoint"]


IN_C = """
import ctypes, os
from torch import nn
libc = ctypes.CDLL(None, use_errno=True)
libc.fopen.restype = ctypes.c_void_p
if not libc.fopen(os.path.abspath("out.h5").encode(), b"w"):
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "out.h5")
nn.Linear(1, 1)
"""


def test_what_a_library_writes_without_python_is_refused_by_the_kernel(tmp_path: Path) -> None:
    if not _has_landlock():
        pytest.skip("needs Landlock: Linux 5.13 or newer, with it switched on")
    with pytest.raises(StepError, match="--allow-writes") as raised:
        run_script(Request(_written(tmp_path, IN_C), device="cpu"))
    assert "Permission denied: 'out.h5'" in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def _has_landlock() -> bool:
    """Ask for Landlock's version, in a system call that changes nothing."""
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1) > 0


def test_processes_are_refused(tmp_path: Path) -> None:
    text = LOOP.replace("print", "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)\nprint")
    with pytest.raises(StepError, match=r"starts processes of its own.*script\.py:7"):
        run_script(Request(_written(tmp_path, text), device="cpu"))


def test_a_loop_that_meets_no_model_is_ended_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = _written(tmp_path, "import time\nwhile True:\n    time.sleep(0.1)\n")
    with pytest.raises(StepError, match=r"not at its second update when its time was over.*script\.py:3"):
        run_script(Request(command, device="cpu", limit=-28.0))


@pytest.mark.parametrize(("device", "starts"), [(None, True), ("cuda", True), ("cuda:0", True), ("h100", False)])
def test_a_card_is_started_before_files_are_refused(
    device: str | None, starts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else CUDA says that there is none."""
    order = list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: order.append("the card"))
    monkeypatch.setattr(process, "_keep_files", lambda _: order.append("the barrier"))
    monkeypatch.setattr(process, "recorded", lambda *_: order.append("the script"))
    monkeypatch.setattr(process, "_end", lambda: None)
    monkeypatch.setattr(sys, "argv", sys.argv[:])
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "request").write_bytes(pickle.dumps(Request(_written(tmp_path, LOOP), device)))
    process.answer(str(tmp_path))
    assert order == ["the card"] * starts + ["the barrier", "the script"]
