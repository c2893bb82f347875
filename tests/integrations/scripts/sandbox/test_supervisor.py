"""Whatever a program does below a supervisor: files, processes and listeners outside stay as they were."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from environment import slow
from integrations.scripts.sandbox.random_effects import script
from integrations.scripts.sandbox.supervised import HOME, NEITHER, NO_NAMESPACES, has_landlock, has_namespaces, run

from memplan.integrations.scripts.sandbox import kernel
from memplan.integrations.scripts.sandbox.messages import MARK

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and Landlock are Linux's")
KERNELS: dict[str, Callable[[], None] | None] = {
    "namespaces": None,
    "landlock": NO_NAMESPACES,
}


@pytest.fixture(scope="module")
def available() -> dict[str, bool]:
    """What this machine has."""
    return {"namespaces": has_namespaces(), "landlock": has_landlock()}


def _need(available: dict[str, bool], protection: str) -> None:
    if not available[protection]:
        pytest.skip(f"this machine allows no {protection}")


def _snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Return everything of a tree that a program could change: kind, mode, owner, times, attributes, content."""
    found = dict[str, tuple[Any, ...]]()
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else None
        link = os.readlink(path) if path.is_symlink() else None
        attributes = tuple(os.listxattr(path, follow_symlinks=False))
        found[str(path)] = (
            status.st_mode, status.st_uid, status.st_gid, status.st_nlink, status.st_mtime_ns, attributes,
            content, link,
        )  # fmt: skip
    return found


class Outside:
    """A tree of files, a process and listeners, of which nothing may change."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        for name in ("data/a.txt", "data/deep/b.txt", "runs/last.ckpt", "config.json", "empty/x"):
            (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
            (self.tree / name).write_text(f"precious {name}")
        (self.tree / "latest").symlink_to("runs")
        self.shared = Path(tempfile.mkdtemp(prefix="memplan-test-", dir="/dev/shm"))
        (self.shared / "one").write_text("staged")
        self.received = list[bytes]()
        self.process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.mark = f"memplan-test-{uuid.uuid4()}"
        self._plugs = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
        self._plugs[1].bind(("127.0.0.1", 0))
        self.abstract = "\0" + self.mark
        for address in (str(self.tree / "s"), self.abstract):
            plug = socket.socket(socket.AF_UNIX)
            plug.bind(address)
            plug.listen()
            self._plugs.append(plug)
        for plug in self._plugs:
            threading.Thread(target=self._listen, args=(plug,), daemon=True).start()
        self.before = self._state()

    def _listen(self, plug: socket.socket) -> None:
        while True:
            try:
                if plug.type == socket.SOCK_DGRAM:
                    self.received.append(plug.recv(99))
                else:
                    plug.accept()[0].close()
                    self.received.append(b"a connection")
            except OSError:
                return

    def script(self, seed: int, *, held: bool = True) -> str:
        """Return a random script that goes at all of it."""
        files = [str(path) for path in self.tree.rglob("*") if path.is_file()]
        folders = [str(path) for path in self.tree.rglob("*") if path.is_dir() and not path.is_symlink()]
        places = {"f": files, "d": folders, "n": [str(self.tree / "new"), str(self.tree / "data" / "new")]}
        fixed = {
            "p": self._plugs[0].getsockname()[1], "u": self._plugs[1].getsockname()[1], "s": str(self.tree / "s"),
            "a": self.abstract, "k": self.process.pid, "h": str(self.shared),
            "host": self.mark[-9:],
        }  # fmt: skip
        return script(seed, places, fixed, held=held)

    def _state(self) -> tuple[Any, ...]:
        queues = Path("/proc/sysvipc/shm").read_text() if os.path.exists("/proc/sysvipc/shm") else ""
        return (
            _snapshot(self.tree), _snapshot(self.shared), socket.gethostname(), self.process.poll(),
            Path(f"/proc/{self.process.pid}/oom_score_adj").read_text(), "T (stopped)" in self._status(),
            os.getpriority(os.PRIO_PROCESS, self.process.pid), queues.count("\n"),
        )  # fmt: skip

    def _status(self) -> str:
        return Path(f"/proc/{self.process.pid}/status").read_text()

    def check(self) -> None:
        """Check that all is as it was, and that no process is left."""
        assert self._state() == self.before
        assert self.received == []
        assert self.left() == []

    def left(self) -> list[str]:
        """Return the processes that are left of those that ran with the mark in their environment."""
        found = list[str]()
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and self.mark.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_text())
            except OSError:
                continue
        return found

    def close(self) -> None:
        for plug in self._plugs:
            plug.shutdown(socket.SHUT_RDWR) if plug.type == socket.SOCK_STREAM else None
            plug.close()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.shared)


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    made = Outside(tmp_path)
    yield made
    made.close()


def _seeds(number: int) -> list[Any]:
    return [pytest.param(seed, marks=[] if seed < 2 else pytest.mark.slow) for seed in range(number)]


@pytest.mark.parametrize("protection", KERNELS)
@pytest.mark.parametrize("seed", _seeds(200))
def test_nothing_outside_changes(protection: str, seed: int, outside: Outside, available: dict[str, bool]) -> None:
    _need(available, protection)
    done = run(
        outside.script(seed), outside.tree, kernel=KERNELS[protection], environment={"MARK": outside.mark}, seconds=15
    )
    assert done.outcome.protection == protection
    outside.check()


def test_the_random_scripts_do_change_what_nothing_protects(outside: Outside) -> None:
    """Else the test above would hold for a script that does nothing."""
    changed = 0
    for seed in range(6):
        run(outside.script(seed, held=False), outside.tree, protections=("none",), environment={"MARK": outside.mark})
        changed += outside.before[:2] != (_snapshot(outside.tree), _snapshot(outside.shared))
        assert outside.left() == [], "processes end with their supervisor all the same"
    assert changed


def test_neither_runs_nothing(outside: Outside) -> None:
    done = run("print('ran')", outside.tree, kernel=NEITHER)
    assert done.outcome.protection is None
    assert {name for name, _ in done.outcome.reasons} == {"namespaces", "landlock"}
    assert done.out == ""
    outside.check()


def test_without_namespaces_nothing_has_run_before_landlock(outside: Outside, available: dict[str, bool]) -> None:
    _need(available, "landlock")
    done = run("print('ran')", outside.tree, kernel=NO_NAMESPACES)
    assert (done.outcome.protection, done.out) == ("landlock", "ran\n")


NEXT_RUN = """
import os, shutil
def next_run():
    control, here = setting["control"], os.getcwd()
    os.write(control, b"n")
    answer = b""
    while not answer.endswith(b"\\n"):
        answer += os.read(control, 65536)
    os.chdir(here)
    changes = json.loads(answer)
    rows = [[os.path.relpath(row["path"]) + "/" * row["path"].endswith("/"), row["kind"]] for row in changes["rows"]]
    print(json.dumps(rows))
    return changes["more"]
"""
CHANGES = (
    NEXT_RUN
    + """
open("new.txt", "w").write("x"); os.remove("config.json"); os.chmod("data", 0o700); os.makedirs("made/inner")
shutil.rmtree("runs"); os.mkdir("runs"); open("runs/other", "w").write("y"); open("data/a.txt", "a").write("z")
next_run()
print(sorted(os.listdir(".")), open("data/a.txt").read())
next_run()
"""
)


def test_changes_are_listed_and_forgotten_at_the_end_of_a_run(outside: Outside, available: dict[str, bool]) -> None:
    _need(available, "namespaces")
    names = sorted(os.listdir(outside.tree))
    done = run(CHANGES, outside.tree)
    assert done.outcome.status == 0, done.err
    first, second, third = done.out.splitlines()
    assert {tuple(row) for row in json.loads(first)} == {
        ("new.txt", "file"), ("config.json", "removed"), ("data/", "changed"), ("made/", "file"),
        ("made/inner/", "file"), ("runs/", "removed"), ("runs/", "file"), ("runs/other", "file"),
        ("data/a.txt", "file"),
    }  # fmt: skip
    assert (second, third) == (f"{names} precious data/a.txt", "[]")
    outside.check()


COMMITS = f"""
import os, shutil
open("new.txt", "w").write("x"); os.makedirs("made/inner"); open("made/inner/f", "w").write("f")
open("config.json", "w").write("changed"); os.remove("data/a.txt"); shutil.rmtree("empty")
open("runs/last.ckpt", "wb").write({MARK!r} + b"0000000000000000")
open("runs/other.pt", "wb").write(b"header" + {MARK!r})
os.replace("runs/other.pt", "runs/best.pt"); os.symlink("data", "link")
"""


def test_allowed_writes_are_written_without_checkpoints_and_removals(
    outside: Outside, available: dict[str, bool]
) -> None:
    _need(available, "namespaces")
    done = run(COMMITS, outside.tree, commit=True, own_network=False)
    assert done.outcome.status == 0, done.err
    now = {str(path.relative_to(outside.tree)) for path in outside.tree.rglob("*")}
    before = {os.path.relpath(path, outside.tree) for path in outside.before[0]} - {"."}
    assert now == before | {"new.txt", "made", "made/inner", "made/inner/f", "link"}
    assert (outside.tree / "config.json").read_text() == "changed"
    assert (outside.tree / "runs/last.ckpt").read_text() == "precious runs/last.ckpt"
    assert (outside.tree / "data/a.txt").read_text() == "precious data/a.txt"


def test_what_cannot_be_written_is_listed_and_keeps_nothing_else_back(
    tmp_path: Path, available: dict[str, bool]
) -> None:
    _need(available, "namespaces")
    full = tmp_path / "full"
    (full / "folder").mkdir(parents=True)
    (full / "text").write_text("old", encoding="utf-8")
    (full / "link").symlink_to("text")
    code = """
import os, shutil
os.chdir("full")
open("b.txt", "w").write("x"); open("z.txt", "w").write("x"); open("text", "w").write("new")
with open("sparse", "w") as file: file.truncate(1 << 43)
open("large", "wb").write(bytes(3 << 20))
os.rmdir("folder"); open("folder", "w").write("x")
os.remove("link"); open("link", "w").write("x")
for _ in range(1500):
    os.mkdir("deeper"); os.chdir("deeper")
"""

    done = run(code, tmp_path, commit=True, own_network=False)
    assert done.outcome.status == 0, done.err
    reasons = {os.path.relpath(path, full): reason for path, reason in done.outcome.unwritten}
    assert reasons.pop(next(path for path in reasons if "deeper/" in path)) == "File name too long"
    assert reasons == {
        "sparse": "No space left on device", "folder": "there is a folder in its place, which stays",
        "link": "there is a link in its place, which stays",
    }  # fmt: skip
    assert [(full / name).read_text(encoding="utf-8") for name in ("b.txt", "z.txt", "text")] == ["x", "x", "new"]


@pytest.mark.slow
def test_changes_that_are_not_listed_are_counted(tmp_path: Path, available: dict[str, bool]) -> None:
    _need(available, "namespaces")
    code = """
for number in range(10_100): open(f"{number}.txt", "w").close()
for _ in range(1500):
    os.mkdir("deeper"); os.chdir("deeper")
os.chdir("/tmp")
print(next_run())
"""
    done = run(NEXT_RUN + code, tmp_path)
    assert done.outcome.status == 0, done.err
    rows, more = done.out.splitlines()
    assert len(json.loads(rows)) == 10_000
    deep = os.pathconf("/", "PC_PATH_MAX") // len("deeper/")
    assert 10_100 - 10_000 + deep - 100 < int(more) < 10_100 - 10_000 + deep


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount")
@pytest.mark.parametrize("protection", KERNELS)
def test_a_script_that_fills_the_disk_is_ended(protection: str, tmp_path: Path, available: dict[str, bool]) -> None:
    _need(available, protection)
    scratch = tmp_path / "tmp"
    scratch.mkdir()

    def small_disk() -> None:
        kernel.unshare(kernel.NEW_MOUNTS)
        kernel.mount(None, "/", flags=kernel.PRIVATE | kernel.RECURSIVE)
        kernel.mount("tmpfs", str(scratch), "tmpfs", options="size=64m")
        if (deny := KERNELS[protection]) is not None:
            deny()

    code = """
import time
os.makedirs(os.environ["TMPDIR"], exist_ok=True)
for number in range(600):
    open(os.path.join(os.environ["TMPDIR"], str(number % 50)), "wb").write(bytes(1 << 20))
    time.sleep(0.02)
"""
    done = run(code, tmp_path, kernel=small_disk, environment={"TMPDIR": str(scratch)})
    assert done.outcome.protection == protection
    assert done.outcome.room is not None, done.err
    assert 30 << 20 < done.outcome.room <= 32 << 20
    assert not done.outcome.over


@pytest.mark.parametrize("protection", KERNELS)
def test_locks_of_files_keep_nobody_waiting(protection: str, tmp_path: Path, available: dict[str, bool]) -> None:
    _need(available, protection)
    (tmp_path / "data").touch()
    code = """
import fcntl, time
file = open("data")
for lock in (
    lambda: fcntl.flock(file, fcntl.LOCK_EX), lambda: fcntl.lockf(file, fcntl.LOCK_SH),
    lambda: fcntl.fcntl(file, 1024, 0),
):
    try: lock()
    except OSError: pass
print("up", flush=True)
time.sleep(2)
"""

    def lock_it(process: subprocess.Popen[str]) -> None:
        with open(tmp_path / "data", "r+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    assert run(code, tmp_path, kernel=KERNELS[protection], stop=lock_it).outcome.protection == protection


def test_an_answer_that_is_not_read_holds_nothing_up(tmp_path: Path, available: dict[str, bool]) -> None:
    _need(available, "namespaces")
    code = """
for number in range(5_000): open(f"{number}.txt", "w").close()
os.write(setting["control"], b"n")
while True: pass
"""
    begin = time.monotonic()
    done = run(code, tmp_path, seconds=6)
    assert done.outcome.over
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("protection", ["namespaces", "landlock", "none"])
def test_time_ends_it_and_says_where_it_stood(protection: str, tmp_path: Path, available: dict[str, bool]) -> None:
    if protection != "none":
        _need(available, protection)
    code = """
import faulthandler, time
from memplan.integrations.scripts.sandbox.messages import TRACEBACK
faulthandler.register(TRACEBACK)
faulthandler.cancel_dump_traceback_later()
while True: time.sleep(1)
"""
    begin = time.monotonic()
    done = run(code, tmp_path, protections=(protection,), seconds=3)  # pyright: ignore[reportArgumentType]
    assert done.outcome.over
    assert 'File "<string>", line' in done.err
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize(
    ("protection", "kind"),
    [
        ("namespaces", signal.SIGTERM), ("landlock", signal.SIGTERM), ("none", signal.SIGTERM),
        ("namespaces", signal.SIGKILL),
    ],
)  # fmt: skip
def test_a_supervisor_that_is_ended_leaves_nothing(
    protection: str, kind: signal.Signals, outside: Outside, available: dict[str, bool]
) -> None:
    if protection != "none":
        _need(available, protection)
    scratch = outside.tree.parent / "tmp"
    scratch.mkdir()
    code = """
import subprocess, time
subprocess.Popen(['sleep', '600'], start_new_session=True)
print('up', flush=True)
time.sleep(600)
"""
    begin = time.monotonic()
    run(
        code, outside.tree, protections=(protection,), stop=lambda process: process.send_signal(kind),  # pyright: ignore[reportArgumentType]
        environment={"MARK": outside.mark, "TMPDIR": str(scratch)}, seconds=240,
    )  # fmt: skip
    assert time.monotonic() - begin < 180, "the signal ends it, not its time"
    assert outside.left() == []
    if kind == signal.SIGTERM:
        assert os.listdir(scratch) == []


def test_numbers_of_processes_are_not_those_of_others(tmp_path: Path, available: dict[str, bool]) -> None:
    _need(available, "namespaces")
    done = run("print(os.getpid())", tmp_path)
    assert not os.path.exists(f"/proc/{int(done.out)}")


def test_the_process_that_lays_overlays_is_out_of_reach(tmp_path: Path, available: dict[str, bool]) -> None:
    _need(available, "namespaces")
    code = """
for act in (lambda: os.listdir("/proc/1/root"), lambda: open("/proc/1/mem", "r+b"), lambda: os.kill(1, 9)):
    try:
        print(act())
    except OSError as error:
        print(type(error).__name__)
os.kill(1, 15)
print("still here")
"""
    done = run(code, tmp_path)
    assert done.out.split("\n")[:2] == ["PermissionError", "PermissionError"]
    assert "still here" in done.out


def test_deep_and_locked_folders_go_with_the_rest(tmp_path: Path, available: dict[str, bool]) -> None:
    _need(available, "namespaces")
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    code = """
for _ in range(1500):
    os.mkdir('deeper'); os.chdir('deeper')
os.chdir('/tmp'); os.mkdir('locked'); os.chmod('locked', 0)
"""
    done = run(code, tmp_path, environment={"TMPDIR": str(scratch)})
    assert done.outcome.status == 0, done.err
    assert os.listdir(scratch) == []
    assert sorted(os.listdir(tmp_path)) == ["tmp"]


def _become_nobody() -> None:
    os.setgid(65534)
    os.setuid(65534)


def _reads_memplan(python: str) -> bool:
    code = f"import sys; sys.path.insert(0, {HOME!r}); import memplan.integrations.scripts.sandbox.supervisor"
    return subprocess.run([python, "-I", "-c", code], preexec_fn=_become_nobody, check=False).returncode == 0


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become somebody else")
def test_without_root_it_is_the_same(tmp_path: Path, available: dict[str, bool]) -> None:
    _need(available, "namespaces")
    python = "/usr/bin/python3"  # a virtual environment of root's is root's alone
    if not os.path.exists(python) or not _reads_memplan(python):
        pytest.skip(f"others than root cannot import memplan by {python}")
    folder = Path(tempfile.mkdtemp(prefix="memplan-test-"))
    try:
        (folder / "a.txt").write_text("precious")
        (folder / "tmp").mkdir()
        for path in (folder, *folder.iterdir()):
            os.chown(path, 65534, 65534)
        code = "open('a.txt', 'w').write('x'); os.mkdir('b'); print(os.getuid(), sorted(os.listdir('.')))"
        done = run(
            code, folder, protections=("namespaces",), kernel=_become_nobody,
            environment={"TMPDIR": str(folder / "tmp")}, python=python,
        )  # fmt: skip
        if done.outcome.protection is None:
            pytest.skip(f"others than root may not: {done.outcome.reasons}")
        assert done.out == "65534 ['a.txt', 'b', 'tmp']\n"
        assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "tmp"]
        assert (folder / "a.txt").read_text() == "precious"
    finally:
        shutil.rmtree(folder)


NESTED = """
for line in (
    "open('beside.txt', 'w').write('x')", "os.makedirs('made/inner')", "open('config.json', 'w').write('y')",
    "open('large', 'r+').write('y')", "open('drive/new', 'w').write('x')", "os.remove('drive/a')",
    "open('drive/below/inner/new', 'w').write('x')", "open('drive/below/new', 'w').write('x')",
    "open('drive/below/inner/b', 'a').write('x')", "os.remove('latest')", "shutil.rmtree('data')",
    "os.rename('made', 'moved')", "os.rename('drive', 'elsewhere')",
):
    try: exec(line)
    except OSError as error: print(line, error.strerror)
next_run()
"""


def _mount(*pairs: tuple[Path, Path], locked: bool) -> Callable[[], None]:
    """Return what binds folders on others in a mount namespace. ``locked``: and enters one that cannot undo it."""

    def mount() -> None:
        number = os.getuid()
        kernel.unshare(kernel.NEW_MOUNTS)
        kernel.mount(None, "/", flags=kernel.PRIVATE | kernel.RECURSIVE)
        for source, target in pairs:
            kernel.mount(str(source), str(target), flags=kernel.BIND)
        if locked:
            kernel.unshare(kernel.NEW_USER | kernel.NEW_MOUNTS)
            Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/self/{name}").write_text(f"{number} {number} 1", encoding="utf-8")

    return mount


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount")
@pytest.mark.parametrize("locked", [False, *slow(True)])  # to undo the locked ones takes the kernel half a minute
def test_folders_with_mounts_below_them_are_written_to(
    locked: bool, outside: Outside, available: dict[str, bool]
) -> None:
    _need(available, "namespaces")
    drives = [outside.tree.parent / name for name in ("drive", "inner")]
    for drive, names in zip(drives, (["a", "below/inner/x"], ["b"]), strict=True):
        for name in names:
            (drive / name).parent.mkdir(parents=True, exist_ok=True)
            (drive / name).write_text("precious", encoding="utf-8")
    (outside.tree / "drive").mkdir()
    (outside.tree / "large").write_bytes(bytes(2 << 20))
    outside.before, before = outside._state(), [_snapshot(drive) for drive in drives]  # pyright: ignore[reportPrivateUsage]
    mounts = [(drives[0], outside.tree / "drive"), (drives[1], outside.tree / "drive/below/inner")]
    done = run(NEXT_RUN + NESTED * 2, outside.tree, kernel=_mount(*mounts, locked=locked), protections=("namespaces",))
    assert done.outcome.status == 0, (done.outcome, done.err)
    rows = {
        ("beside.txt", "file"), ("moved/", "file"), ("moved/inner/", "file"), ("config.json", "file"),
        ("latest", "removed"), ("drive/new", "file"), ("drive/a", "removed"),
        ("drive/below/inner/new", "file"), ("drive/below/new", "file"), ("drive/below/inner/b", "file"),
        *([("data/a.txt", "removed"), ("data/deep", "removed")] if locked else []),
        *([] if locked else [("large", "file"), ("data", "removed")]),
    }  # fmt: skip
    large = ["open('large', 'r+').write('y') Read-only file system"]
    mounted = ["shutil.rmtree('data') Device or resource busy"]
    lines = done.out.splitlines()
    for *refused, found in (lines[: len(lines) // 2], lines[len(lines) // 2 :]):
        assert {tuple(row) for row in json.loads(found)} == rows
        assert refused == [*((large + mounted) * locked), "os.rename('drive', 'elsewhere') Device or resource busy"]
    outside.check()
    assert [_snapshot(drive) for drive in drives] == before
