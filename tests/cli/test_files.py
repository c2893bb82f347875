"""Files that commands write: where they were asked for, whatever the build does, and as whole as they were."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memplan._text import write_whole
from memplan.cli import main

MOVES = """
import os
from torch import nn

def make():
    os.chdir({folder!r})
    return nn.Linear(4, 4)
"""


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, list(map(str, args)))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "away").mkdir()
    (tmp_path / "net.py").write_text(MOVES.format(folder=str(tmp_path / "away")))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_build_that_changes_the_folder_changes_no_output(here: Path) -> None:
    done = run("explain", "net.py:make", "--input", "2x4", "--json", "out.json", "--trace", "t.json")
    assert (done.exit_code, Path.cwd()) == (0, here / "away")
    assert sorted(path.name for path in here.iterdir() if path.suffix == ".json") == ["out.json", "t.json"]
    assert list((here / "away").iterdir()) == []


@pytest.mark.parametrize("name", ["out.json", "./out.json", "link.json"])
def test_no_output_is_another_argument(here: Path, name: str) -> None:
    (here / "link.json").symlink_to("out.json")
    done = run("explain", "net.py:make", "--input", "2x4", "--trace", "out.json", "--json", name)
    assert done.exit_code == 2
    assert "names the same file. Expected a file of its own for each output." in done.stderr


def test_source_code_is_never_replaced(here: Path) -> None:
    before = (here / "net.py").read_text()
    (here / "link.json").symlink_to("net.py")
    for options in (("--json", "net.py"), ("--trace", here / "net.py"), ("--json", "link.json"), ("--json=net.py",)):
        done = run("explain", "net.py:make", "--input", "2x4", *options)
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    (here / "module.py").write_text(before)
    assert "is source code" in run("explain", "net:make", "--input", "2x4", "--json", "module.py").stderr
    assert (here / "net.py").read_text() == (here / "module.py").read_text() == before


def test_a_loop_of_links_is_told_as_what_it_is(here: Path) -> None:
    (here / "a.json").symlink_to("b.json")
    (here / "b.json").symlink_to("a.json")
    done = run("devices", "h100", "--json", "a.json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("memplan: --json a.json: Too many levels of symbolic links. Expected a file")


def test_a_full_disk_is_told_as_what_it_is(here: Path) -> None:
    code = (
        "import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "from memplan.cli import main\nmain(['devices', '--json', 'out.json'])\n"
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=here, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"memplan: {here / 'out.json'}: File too large. Expected a file or device")
    assert "no error inside of memplan" not in done.stderr
    assert sorted(path.name for path in here.iterdir()) == ["away", "net.py"]


def test_mode_and_owner_of_a_replaced_file_stay(here: Path) -> None:
    file = here / "out.json"
    file.write_text("old")
    file.chmod(0o600)
    if os.getuid() == 0:
        os.chown(file, 12345, 54321)
    before = file.stat()
    assert run("devices", "h100", "--json", "out.json").exit_code == 0
    after = file.stat()
    assert json.loads(file.read_text())
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


def test_a_new_file_has_the_mode_of_the_process(here: Path) -> None:
    mask = os.umask(0o027)
    try:
        write_whole(here / "new", "x")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((here / "new").stat().st_mode) == 0o640


def test_a_link_is_written_through_and_a_device_stays(here: Path) -> None:
    (here / "real").write_text("old")
    (here / "link").symlink_to("real")
    write_whole(here / "link", "new")
    assert ((here / "link").is_symlink(), (here / "real").read_text()) == (True, "new")
    write_whole("/dev/null", "x")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_saved_explanation_is_explained_again(here: Path) -> None:
    first = run("explain", "net.py:make", "--input", "2x4", "--json", "e.json")
    again = run("explain", here / "e.json", "--json", here / "again.json")
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    assert json.loads((here / "again.json").read_text()) == json.loads((here / "e.json").read_text())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--input", "2x4"), "is an explanation, and --input was given, too"),
        (("--trace", "t.json"), "is an explanation, and --trace was given, too"),
        (("--settings", "expandable_segments:True"), "and --settings was given, too"),
    ],
)
def test_a_saved_explanation_takes_no_options_of_a_step(here: Path, options: tuple[str, ...], words: str) -> None:
    run("explain", "net.py:make", "--input", "2x4", "--json", here / "e.json")
    done = run("explain", here / "e.json", *options)
    assert (done.exit_code, words in done.stderr) == (2, True), done.stderr


def test_a_damaged_explanation_is_one_line(here: Path) -> None:
    run("explain", "net.py:make", "--input", "2x4", "--json", here / "e.json")
    data = json.loads((here / "e.json").read_text())
    data["by_cause"]["\x1b[2Jevil"] = data["by_cause"].pop("weight")
    (here / "bad.json").write_text(json.dumps(data))
    for command in (("explain", here / "bad.json"), ("compare", here / "bad.json", here / "e.json")):
        done = run(*command)
        assert (done.exit_code, done.stderr.count("\n"), "\x1b" in done.stderr + done.stdout) == (2, 1, False)
        assert "is no explanation that can be used" in done.stderr
