"""Scripts of ten styles in processes of their own: recorded as they really run, and nothing of them is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from environment import slow
from integrations.scripts.script_runs import run_here
from truth.fresh_process import run_fresh

import memplan
from memplan._json import Unreadable
from memplan.cli import main
from memplan.errors import InputError, StepError, UsageError
from memplan.integrations.scripts import process
from memplan.integrations.scripts.answer import read_answer
from memplan.integrations.scripts.command import Command
from memplan.integrations.scripts.process import run_script
from memplan.integrations.scripts.request import Request, RunResult, ScriptEnded
from memplan.integrations.scripts.sandbox.messages import Outcome

Done = subprocess.CompletedProcess[str]
TEN = Path(__file__).parent / "ten"
NEEDS = {
    "accelerated": ["accelerate"],
    "ema_diffusion": ["monai"],
    "lightning_module": ["lightning", "tensorboard"],
    "plain_amp": ["tensorboard", "tqdm"],
    "sliding_window": ["monai"],
    "trainer_lora": ["transformers", "peft"],
}
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


def _peak(ran: RunResult) -> int:
    return memplan.simulate(ran.trace).peak_allocated


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.stem for path in TEN.glob("*.py")))
def test_the_prediction_is_what_it_really_takes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = _copied(name, tmp_path, monkeypatch)
    recorded = run_script(Request(command, device="cpu"))
    measured = run_script(Request(command, device="cpu", really=True))
    assert _peak(recorded) == pytest.approx(_peak(measured), rel=0.001)
    assert recorded.facts.ending == measured.facts.ending
    assert recorded.facts.updates == measured.facts.updates == (0 if name == "evaluation" else 2)
    assert [path.name for path in tmp_path.rglob("*")] == [f"{name}.py"], "no file is written"


@pytest.mark.slow
def test_what_would_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = _copied("plain_amp", tmp_path, monkeypatch)
    held = run_script(Request(command, device="cpu")).facts.held
    kinds = {(one.kind, os.path.relpath(one.what)) for one in held}
    assert {("file", "runs"), ("file", os.path.join("runs", "exp1"))} <= kinds
    assert any("events.out.tfevents" in what for _, what in kinds)
    own = [one for one in held if "tfevents" not in one.what]  # written by a thread of TensorBoard's
    assert all(str(one.where).startswith("plain_amp.py:") for one in own)


@pytest.mark.parametrize(("ending", "code"), slow(("raise SystemExit(3)", 3), ("import os; os._exit(5)", None)))
def test_an_exit_before_the_first_model(tmp_path: Path, ending: str, code: int | None) -> None:
    command = _written(tmp_path, f"print('said before')\n{ending}\n")
    with pytest.raises(StepError, match="exit code") as caught:
        run_script(Request(command, device="cpu"))
    if code is not None:
        assert isinstance(caught.value, ScriptEnded)
        assert (caught.value.code, caught.value.said) == (code, "said before\n")


def test_an_exit_with_a_message_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "run_script", run_here)
    done = _command(tmp_path, "import sys\nsys.exit('no config: set DATA_DIR')\n")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "no config: set DATA_DIR\n")


def _command(
    tmp_path: Path, text: str, *options: str, namespaces: bool = True, arguments: tuple[str, ...] = ()
) -> Done:
    """Run the command on a script: in a process of its own where the kernel denies that namespaces, else in this
    one."""
    (tmp_path / "script.py").write_text(text, encoding="utf-8")
    command = ["run", "--device", "cpu", *options, "script.py", *arguments]
    if not namespaces:
        return run_fresh(
            "import os\n"
            "from integrations.scripts.sandbox.supervised import NO_NAMESPACES\n"
            "from memplan.cli import main\n"
            f"os.chdir({str(tmp_path)!r}); NO_NAMESPACES(); main({command!r})"
        )
    with contextlib.chdir(tmp_path):
        done = CliRunner().invoke(main, command)
    return Done(command, done.exit_code, done.stdout, done.stderr)


def _ends(monkeypatch: pytest.MonkeyPatch, outcome: Outcome, answer: bytes = b"") -> None:
    """Let each script's process have this end, instead of running it."""
    said = SimpleNamespace(text="", lines=0)
    ended = SimpleNamespace(outcome=outcome, answer=answer, out=said, err=said)
    runs = "_run_supervised" if sys.platform == "linux" else "_run_unsupervised"
    monkeypatch.setattr(f"memplan.integrations.scripts.process.{runs}", lambda _: ended)


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome("namespaces", 9), r"the process of script\.py ended by SIGKILL"),
        (Outcome("namespaces", 5 << 8), r"the process of script\.py ended with exit code 5"),
        (Outcome("namespaces", 9, over=True), r"not at its second update when its time was over"),
        (
            Outcome("namespaces", 9, room=20 << 30),
            r"more than 20\.0 GiB of files.*under python beforehand.*TMPDIR=/path memplan run",
        ),
    ],
)
def test_a_process_that_ends_early_is_a_message(
    outcome: Outcome, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _ends(monkeypatch, outcome)
    with pytest.raises(StepError, match=said):
        run_script(Request(_written(tmp_path, LOOP), device="cpu"))


def test_an_answer_that_cannot_be_read_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _ends(monkeypatch, Outcome("namespaces", 0), NO_ANSWERS[0])
    with pytest.raises(StepError, match="no answer that can be read"):
        run_script(Request(_written(tmp_path, LOOP), device="cpu"))


def test_there_is_no_such_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(InputError, match=r"there is no file .*trian\.py.*train\.py"):
        run_script(Request(Command(str(tmp_path / "trian.py"))))


EFFECTS = {
    "import socket; socket.create_connection(('example.org', 80))": ("network", "example.org"),
    "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 9))": ("network", "192.0.2.1:9"),
    "import subprocess; subprocess.run(['true', '-L'])": ("process", "true -L"),
    "import os; os.system('true made')": ("process", "true made"),
    "os.posix_spawn('/bin/true', ['true', 'x'], os.environ)": ("process", "true x"),
    "torch.save(model, 'model.pt')": ("checkpoint", "model.pt"),
    "torch.jit.script(model).save('script.pt')": ("checkpoint", "script.pt"),
    "torch.jit.trace(model, torch.randn(8, 64)).save('trace.pt')": ("checkpoint", "trace.pt"),
    "import pickle; open('model.bin', 'wb').write(pickle.dumps(model.state_dict()))": ("checkpoint", "model.bin"),
    "import safetensors.torch as s; s.save_file(model.state_dict(), 'm.st')": ("checkpoint", "m.st"),
    "open('log.txt', 'w').write('x')": ("file", "log.txt"),
    "import io; io.FileIO('raw.txt', 'w').write(b'x')": ("file", "raw.txt"),
    "os.remove('old.txt')": ("removed", "old.txt"),
    "os.chmod('script.py', 0o600)": ("changed", "script.py"),
}


def test_effects_are_held_back_and_listed_with_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.txt").touch()
    tries = "".join(f"try: {line}\nexcept OSError as error: print(error)\n" for line in EFFECTS)
    text = LOOP.replace("print", tries + "print", 1)
    before = (os.getcwd(), list(sys.path), list(sys.argv), dict(os.environ))
    ran = run_script(Request(_written(tmp_path, text), device="cpu"))
    assert (os.getcwd(), list(sys.path), list(sys.argv), dict(os.environ)) == before, "this process stays as it was"
    first = LOOP.partition("print")[0].count("\n") + 1
    assert sorted((one.kind, os.path.basename(one.what), str(one.where)) for one in ran.facts.held) == sorted(
        (kind, what, f"script.py:{first + 2 * number}") for number, (kind, what) in enumerate(EFFECTS.values())
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.txt", "script.py"]
    assert (tmp_path / "script.py").read_text(encoding="utf-8") == text


IDIOMS = """
import ctypes, faulthandler, io, os, pickle, shutil, sqlite3, subprocess
from concurrent.futures import ProcessPoolExecutor
import safetensors.torch
saved = {'a': torch.ones(3)}
os.makedirs('outputs/1'); os.chdir('outputs/1'); os.chdir('../..')
os.rename('runs', 'runs.old'); assert (os.listdir('runs.old'), os.path.exists('runs')) == (['first'], False)
os.symlink('script.py', 'latest')
torch.save(saved, 'c.tmp'); os.replace('c.tmp', 'c.pt'); a = torch.load('c.pt')
torch.save(saved, 'last.pt'); shutil.copyfile('last.pt', 'best.pt'); a = torch.load('best.pt')
with open('d.pt', 'wb') as file: torch.save(saved, file)
with open('d.pt', 'rb') as file: a = torch.load(file)
buffer = io.BytesIO(); torch.save(saved, buffer); buffer.seek(0); a = torch.load(buffer)
with open('a.pkl', 'wb') as file: pickle.dump(model.state_dict(), file)
with open('a.pkl', 'rb') as file: model.load_state_dict(pickle.load(file))
again = pickle.loads(pickle.dumps(model)); assert isinstance(again.weight, nn.Parameter)
safetensors.torch.save_file(saved, 'c.st'); a = safetensors.torch.load_file('c.st')
with safetensors.safe_open('c.st', 'pt') as file:
    assert (list(file.keys()), file.get_slice('a').get_shape(), file.get_tensor('a').shape) == (['a'], [3], (3,))
sqlite3.connect('file:b.db?mode=rwc', uri=True).execute('create table t (a)')
class Mine(ProcessPoolExecutor): pass
assert list(Mine(2).map(abs, [-1])) == [1]
faulthandler.dump_traceback_later(3600)
assert subprocess.check_output(['echo', 'x']) == b'x\\n'
libc = ctypes.CDLL(None); libc.fopen.restype = ctypes.c_void_p; assert libc.fopen(b'out.h5', b'w')
compiled = torch.compile(model); compiled(torch.randn(8, 64))
scripted = torch.jit.script(nn.Linear(2, 2)); scripted(torch.randn(1, 2))
traced = torch.jit.trace(nn.Linear(2, 2), torch.randn(1, 2)); traced(torch.randn(3, 2))
torch.distributed.init_process_group('gloo', f'file://{os.getcwd()}/group', rank=0, world_size=1)
torch.distributed.all_reduce(torch.ones(3)); torch.distributed.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("really", [False, True])
def test_usual_idioms_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, really: bool) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    text = LOOP.replace("print", IDIOMS + "print", 1)
    ran = run_script(Request(_written(tmp_path, text), device="cpu", really=really))
    assert ran.facts.ending == "steps"
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == ["runs", "runs/first", "script.py"]


MOVES = """
import os, shutil, sys, tempfile
from pathlib import Path

def attempt(act, *arguments):
    try: act(*arguments)
    except OSError as error: print(type(error).__name__, error.errno)

Path("runs").rename("runs.old"); os.mkdir("runs")
os.rename(b"data", b"runs/data")
with tempfile.NamedTemporaryFile("w", dir=sys.argv[1], delete=False) as file: file.write("best")
os.replace(file.name, "best.txt")
os.mkdir("empty"); os.rename("runs.old/", "empty")
os.rename("link", "moved.link")
shutil.move("more", "runs/more")
attempt(os.rename, "empty", "runs")
attempt(os.rename, "other", "best.txt")
attempt(os.rename, "none", "other/none")
for path in sorted(Path().rglob("*")):
    if "script" not in path.name:
        print(path, os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else "")
"""


@pytest.mark.slow
def test_folders_that_were_there_are_renamed_as_without_memplan(tmp_path: Path) -> None:
    elsewhere = tempfile.mkdtemp(dir="/var/tmp" if os.stat("/var/tmp").st_dev == tmp_path.stat().st_dev else tmp_path)
    trees = [tmp_path / name for name in ("plain", "held")]
    for tree in trees:
        for name in ("runs/a/last.txt", "data/x", "more/y", "other/z"):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(name, encoding="utf-8")
        (tree / "link").symlink_to("other")
    (trees[0] / "script.py").write_text(MOVES, encoding="utf-8")
    plain = subprocess.run(
        [sys.executable, "script.py", elsewhere], cwd=trees[0], capture_output=True, text=True, check=True
    )
    before = sorted(str(path) for path in trees[1].rglob("*"))
    text = LOOP.replace("print", MOVES + "print", 1)
    done = _command(trees[1], text, "--show-output", arguments=(elsewhere,))
    assert done.returncode == 0, done.stderr
    assert plain.stdout in done.stderr
    assert sorted(str(path) for path in trees[1].rglob("*") if path.name != "script.py") == before
    assert os.listdir(elsewhere) == []
    os.rmdir(elsewhere)


SHARED = """
import multiprocessing
from multiprocessing.shared_memory import SharedMemory
with multiprocessing.Lock(), multiprocessing.RLock(), multiprocessing.Semaphore(2): pass
event = multiprocessing.Event(); event.set(); assert event.wait(1)
lock = torch.multiprocessing.Lock(); assert lock.acquire() and not lock.acquire(block=False)
bounded = multiprocessing.BoundedSemaphore(1)
try: bounded.release(); raise SystemExit("released too often")
except ValueError: pass
condition = multiprocessing.Condition()
with condition: condition.notify_all()
queue = multiprocessing.Queue(); queue.put(1); assert queue.get() == 1
number = multiprocessing.Value("i", 3); number.value += 1; assert number.value == 4
numbers = multiprocessing.Array("d", 4); numbers[1] = 2.0; assert numbers[:] == [0, 2, 0, 0]
assert multiprocessing.Pool(2).map(len, ["ab"]) == [2]
memory = SharedMemory(create=True, size=8); again = SharedMemory(memory.name); memory.buf[0] = 7
assert again.buf[0] == 7; again.close(); memory.close(); memory.unlink()
model.share_memory(); batch = torch.randn(8, 64).share_memory_()
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--measure"]])
@pytest.mark.parametrize("namespaces", [True, False])
def test_what_processes_would_share_is_there(tmp_path: Path, namespaces: bool, options: list[str]) -> None:
    done = _command(tmp_path, LOOP.replace("print", SHARED + "print", 1), *options, namespaces=namespaces)
    assert done.returncode == 0, done.stderr


CHECKPOINTS = """
import io, os, shutil
open('log.txt', 'w').write('x')
torch.save(model, 'model.pt')
with open('open.pt', 'wb') as f: torch.save(model.state_dict(), f)
b = io.BytesIO(); torch.save(model.state_dict(), b); open('buffer.pt', 'wb').write(b.getvalue())
torch.save(model, 'tmp'); os.replace('tmp', 'renamed.pt'); shutil.copyfile('renamed.pt', 'best.pt')
pickle.dump(model.state_dict(), open('pickled.pt', 'wb'))
late = open('late.pt', 'wb')
import gzip
with gzip.open('packed.gz', 'wb') as file: torch.save(model.state_dict(), file)
import numpy
numpy.savez('arrays.npz', **{name: value.detach().numpy() for name, value in model.state_dict().items()})
open('t', 'w').write('new'); os.replace('t', 'latest')
os.remove('old.pt')
"""


@pytest.mark.slow
def test_allowed_writes_never_touch_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [
        "model.pt",
        "open.pt",
        "buffer.pt",
        "renamed.pt",
        "best.pt",
        "pickled.pt",
        "old.pt",
        "late.pt",
        "packed.gz",
        "arrays.npz",
    ]
    for name in names:
        (tmp_path / name).write_text("three days", encoding="utf-8")
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "latest").symlink_to("old.pt")
    text = "import pickle\n" + LOOP.replace("print", CHECKPOINTS + "print")
    ran = run_script(Request(_written(tmp_path, text), device="cpu", writes=True))
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "x"
    for name in names:
        assert (tmp_path / name).read_text(encoding="utf-8") == "three days"
        assert (tmp_path / name).stat().st_mtime == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["latest", "log.txt", "script.py", *names])
    assert {one.kind for one in ran.facts.held} == {"checkpoint", "removed"}


BRANCHES = """
import os, torch
from torch import nn
run = int(open("count.txt").read()) if os.path.exists("count.txt") else 0
open("count.txt", "w").write(str(run + 1))
os.makedirs(f"run_{run}")
open("log.txt", "a").write("x")
model = nn.Linear(16, 4)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    loss = model(torch.randn(8, 16)).sum()
    loss.backward()
    opt.step()
    if loss.item() > 0:
        torch.zeros(100)
    if loss.item() > 5:
        torch.zeros(1000)
"""


@pytest.mark.slow
def test_a_script_that_is_recorded_on_several_branches_writes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_script(Request(_written(tmp_path, BRANCHES), device="cpu", writes=True))
    assert (tmp_path / "count.txt").read_text(encoding="utf-8") == "1"
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["count.txt", "log.txt", "run_0", "script.py"]


PRETRAINED = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=200, n_positions=32))
opt = torch.optim.AdamW(model.parameters())
for _ in range(3):
    ids = torch.randint(0, 200, (2, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    opt.step()
    model.save_pretrained("out")
"""


@pytest.mark.slow
def test_a_pretrained_model_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks for each tensor's address, to see which share memory."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    ran = run_script(Request(_written(tmp_path, PRETRAINED), device="cpu"))
    assert ("model.safetensors", "checkpoint") in {(os.path.basename(one.what), one.kind) for one in ran.facts.held}
    assert ran.facts.updates == 2


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code"), [("raise SystemExit(3)\n", 3), (LOOP, 1)])
def test_files_that_could_not_be_written_are_told(tmp_path: Path, ending: str, code: int) -> None:
    (tmp_path / "runs").mkdir()
    text = "import os\nos.rmdir('runs'); open('runs', 'w').write('x'); open('a.txt', 'w').write('x')\n"
    done = _command(tmp_path, text + ending, "--allow-writes")
    assert done.returncode == code
    assert f"memplan: {tmp_path}/runs was not written: there is a folder in its place, which stays" in done.stderr
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "x"


HYDRA = """
import os
os.makedirs("outputs/x"); os.chdir("outputs/x")
with open("log.txt", "w") as file: file.write("x")
assert (open("log.txt").read(), os.listdir(), open("../../script.py").read(10)) == ("x", ["log.txt"], "\\nimport to")
"""


@pytest.mark.slow
@pytest.mark.parametrize("namespaces", [True, False])
def test_a_script_works_in_a_folder_that_it_made(tmp_path: Path, namespaces: bool) -> None:
    done = _command(tmp_path, LOOP.replace("print", HYDRA + "print", 1), namespaces=namespaces)
    assert done.returncode == 0, done.stderr
    assert "outputs/x/log.txt" in done.stdout.rpartition("Held back")[2]
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


@pytest.mark.slow
def test_deep_folders_cost_no_more_than_flat_ones(tmp_path: Path) -> None:
    deep = "import os\nfor _ in range(1500): os.mkdir('deeper'); os.chdir('deeper')\nos.chdir('/')\n"
    done = _command(tmp_path, deep + LOOP, "--limit", "30")
    assert done.returncode == 0, done.stderr
    assert "At least 1 more are not listed." in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os.closerange(3, 1024)", ""),
        ("import ctypes; [ctypes.CDLL(None).close(number) for number in range(3, 99)]", "closed the descriptor"),
        ("[os.close(number) for number in map(int, os.listdir('/dev/fd')) if number > 2]", ""),
    ],
)
def test_a_script_may_close_all_descriptors(tmp_path: Path, code: str, said: str) -> None:
    text = f"import os\ntry: {code}\nexcept OSError: pass\n" + LOOP
    done = _command(tmp_path, text)
    assert done.returncode == (2 if said else 0), done.stderr
    assert said in done.stderr


def test_a_supervisor_that_cannot_start_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = _written(tmp_path, LOOP)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    before = os.listdir("/dev/fd")
    with pytest.raises(FileNotFoundError):
        run_script(Request(command, device="cpu"))
    assert os.listdir("/dev/fd") == before


@pytest.mark.parametrize(("options", "way_out"), [({}, "--unprotected"), ({"writes": True}, "--measure")])
def test_where_nothing_can_protect_it_asks_before(
    options: dict[str, Any], way_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That nothing has run then is in `test_supervisor`."""
    _ends(monkeypatch, Outcome(None, reasons=(("namespaces", "denied"), ("landlock", "denied"))))
    with pytest.raises(UsageError, match=way_out):
        run_script(Request(_written(tmp_path, LOOP), device="cpu", **options))


def test_without_namespaces_python_reads_back_what_it_writes_and_shares_what_processes_share(tmp_path: Path) -> None:
    text = "open('a.txt', 'w').write('x')\nassert open('a.txt').read() == 'x'\n" + LOOP.replace(
        "print", SHARED + "print", 1
    )
    done = _command(tmp_path, text, namespaces=False)
    assert done.returncode == 0, done.stderr
    assert "a.txt" in done.stdout.rpartition("Held back")[2]
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


@pytest.mark.slow
def test_without_namespaces_libraries_that_write_are_refused(tmp_path: Path) -> None:
    done = _command(tmp_path, IN_C, namespaces=False)
    assert done.returncode == 2
    assert "--allow-writes" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


IN_C = """
import ctypes, os
from torch import nn
libc = ctypes.CDLL(None, use_errno=True)
libc.fopen.restype = ctypes.c_void_p
if not libc.fopen(os.path.abspath("out.h5").encode(), b"w"):
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "out.h5")
nn.Linear(1, 1)
"""

FORGED = """
import json, os, sys
text = sys.orig_argv[-1]
path = json.loads(text)["answer"]
os.write(os.open(path, os.O_WRONLY), {data!r})
os._exit(0)
"""


NO_ANSWERS = [b"cposix\nsystem\n(Vtouch here\ntR.", b'{"facts": {}}\n{}', b"{}", b"[]", b'{"error": 1}', b"\xff" * 99]


@pytest.mark.parametrize("data", NO_ANSWERS)
def test_what_is_no_answer_is_unreadable(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Unreadable):
        read_answer(data, Request(Command("script.py")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("data", NO_ANSWERS)
def test_an_answer_is_data_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StepError, match="no answer that can be read"):
        run_script(Request(_written(tmp_path, FORGED.format(data=data)), device="cpu"))
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


@pytest.mark.slow
def test_the_last_of_what_it_prints_is_kept(tmp_path: Path) -> None:
    text = "for i in range(40): print('x' * 1000000)\nprint('the end')\n"
    with pytest.raises(ScriptEnded) as caught:
        run_script(Request(_written(tmp_path, text), device="cpu"))
    assert caught.value.said.endswith("the end\n")
    assert len(caught.value.said) <= 1 << 17


def test_processes_are_refused(tmp_path: Path) -> None:
    text = LOOP.replace("print", "import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)\nprint")
    with pytest.raises(StepError, match=r"starts processes of its own.*script\.py:7"):
        run_here(Request(_written(tmp_path, text), device="cpu"))


@pytest.mark.slow
def test_a_loop_that_meets_no_model_is_ended_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = _written(tmp_path, "import time\nwhile True:\n    time.sleep(0.1)\n")
    with pytest.raises(StepError, match=r"not at its second update when its time was over.*script\.py:3"):
        run_script(Request(command, device="cpu", limit=-10.0))


KINDS = [(signal.SIGINT,), (signal.SIGINT, signal.SIGINT), (signal.SIGTERM,), (signal.SIGHUP,)]


@pytest.mark.skipif(sys.platform != "linux", reason="the supervisor is Linux's")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_signal_at_any_moment_leaves_nothing(tmp_path: Path, seed: int) -> None:
    chosen, kinds = random.Random(seed), KINDS[seed % len(KINDS)]
    scratch, mark = tmp_path / "tmp", f"memplan-test-{uuid.uuid4()}"
    scratch.mkdir()
    text = "open('here', 'w')\n" + LOOP
    (tmp_path / "script.py").write_text(text, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "memplan", "run", "--device", "cpu", "script.py"], cwd=tmp_path, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(scratch), "MARK": mark}, start_new_session=True,
    )  # fmt: skip
    time.sleep(chosen.uniform(0.3, 5))
    for kind in kinds:
        process.send_signal(kind)
        time.sleep(chosen.uniform(0, 0.2))
    _, err = process.communicate(timeout=120)  # the pipes close with the last process
    assert process.returncode in (0, 130, *(-kind for kind in kinds)), err
    assert "Traceback" not in err or process.returncode == -signal.SIGINT, err  # before memplan's own code ran
    deadline = time.monotonic() + 20
    while (left := _marked(mark) + os.listdir(scratch)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py", "tmp"]


def _marked(mark: str) -> list[str]:
    """Return the processes that have a mark in their environment."""
    found = list[str]()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text())
    return found


def test_without_a_supervisor_it_runs_only_unprotected_and_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS and Windows."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt").write_text("three days", encoding="utf-8")
    saves = "torch.save(model, 'model.pt'); torch.load('model.pt'); open('a.txt', 'w')\nprint"
    command = _written(tmp_path, LOOP.replace("print", saves, 1))
    with pytest.raises(UsageError, match=r"darwin: has neither.*--unprotected"):
        run_script(Request(command, device="cpu"))
    assert run_script(Request(command, device="cpu", unprotected=True)).facts.protection == "none"
    assert (tmp_path / "model.pt").read_text(encoding="utf-8") == "three days"
    assert (tmp_path / "a.txt").exists()


@pytest.mark.slow
def test_without_a_supervisor_its_time_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(StepError, match="its time was over"):
        run_script(Request(_written(tmp_path, "while True: pass\n"), device="cpu", unprotected=True, limit=-25))
