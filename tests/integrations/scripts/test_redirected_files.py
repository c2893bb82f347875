"""Files that a script writes: for it they are there, and the real ones stay as they were."""

from __future__ import annotations

import io
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.integrations.scripts.redirected_files import RedirectedFiles

NAMES = st.sampled_from(["a", "b", "folder/a", "folder/b", "new/a", "folder", "new"])


def _ignore(path: str, *, removed: bool = False) -> None:
    pass


def _outcomes(folder: Path, steps: list[tuple[str, str, str, str]]) -> list[Any]:
    seen: list[Any] = []
    for do, at, to, text in steps:
        try:
            seen.append(ACTIONS[do](folder / at, folder / to, text))
        except OSError as error:
            seen.append(type(error).__name__)
    return seen


def _write(path: Path, mode: str, text: str) -> str:
    with open(path, mode, encoding="utf-8") as file:
        file.write(text)
    return path.read_text(encoding="utf-8")


def _inside(folder: Path, text: str) -> Any:
    """Work in a folder, by relative paths."""
    here = os.getcwd()
    os.chdir(folder)
    try:
        Path("b").write_text(text, encoding="utf-8")
        there = os.path.basename(os.getcwd()), sorted(os.listdir()), sorted(os.listdir("..")), Path("b").read_text()
        return *there, os.path.exists("../folder/a"), Path.cwd() == folder, os.path.isfile("../a")
    finally:
        os.chdir(here)


def _emptied(path: Path, text: str) -> str:
    """Open a file that has to be there, and empty it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(descriptor, text.encode())
    os.close(descriptor)
    return path.read_text(encoding="utf-8")


ACTIONS: dict[str, Callable[[Path, Path, str], Any]] = {
    "empty": lambda at, to, text: _emptied(at, text),
    "write": lambda at, to, text: _write(at, "w", text),
    "append": lambda at, to, text: _write(at, "a", text),
    "create": lambda at, to, text: _write(at, "x", text),
    "update": lambda at, to, text: _write(at, "r+", text),
    "read": lambda at, to, text: at.read_text(encoding="utf-8"),
    "touch": lambda at, to, text: at.touch(),
    "exists": lambda at, to, text: (os.path.exists(at), at.is_dir(), at.is_file()),
    "mkdir": lambda at, to, text: os.mkdir(at),
    "makedirs": lambda at, to, text: os.makedirs(at, exist_ok=True),
    "remove": lambda at, to, text: os.remove(at),
    "unlink": lambda at, to, text: at.unlink(missing_ok=True),
    "rename": lambda at, to, text: os.replace(at, to) if at.is_file() and not to.is_dir() else None,
    "copy": lambda at, to, text: shutil.copyfile(at, to) and None if at.is_file() and at != to else None,
    "list": lambda at, to, text: sorted(os.listdir(at)),
    "scan": lambda at, to, text: sorted(entry.name for entry in os.scandir(at)),
    "rmtree": lambda at, to, text: shutil.rmtree(at) if at.is_dir() else None,
    "inside": lambda at, to, text: _inside(at, text),
    "size": lambda at, to, text: os.stat(at).st_size if at.is_file() else None,
}


def _made(folder: Path) -> Path:
    folder.mkdir()
    (folder / "folder").mkdir()
    (folder / "a").write_text("first", encoding="utf-8")
    (folder / "folder" / "a").write_text("second", encoding="utf-8")
    return folder


def _all(folder: Path) -> dict[str, str | None]:
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8") if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(ACTIONS)), NAMES, NAMES, st.text("xyz", min_size=1, max_size=3)), max_size=12
    )
)
def test_what_a_script_sees_is_what_it_would_see(steps: list[tuple[str, str, str, str]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        real, plain, world = _made(Path(place, "real")), _made(Path(place, "plain")), Path(place, "world")
        world.mkdir()
        before = _all(real)
        with RedirectedFiles(str(world), _ignore).redirecting():
            seen = _outcomes(real, steps)
        assert _all(real) == before
        assert seen == _outcomes(plain, steps)


def test_everything_is_put_back(tmp_path: Path) -> None:
    import builtins

    before = [builtins.open, io.open, os.open, os.stat, os.mkdir, shutil.rmtree, sqlite3.connect, tempfile.tempdir]
    with pytest.raises(RuntimeError), RedirectedFiles(str(tmp_path), _ignore).redirecting():
        raise RuntimeError
    after = [builtins.open, io.open, os.open, os.stat, os.mkdir, shutil.rmtree, sqlite3.connect, tempfile.tempdir]
    assert after == before


def test_databases_and_temporary_files_are_held(tmp_path: Path) -> None:
    world, told = tmp_path / "world", list[str]()
    world.mkdir()
    with RedirectedFiles(str(world), lambda path, *, removed=False: told.append(path)).redirecting():
        connection = sqlite3.connect(tmp_path / "log.db")
        connection.execute("create table t (x)")
        connection.commit()
        connection.close()
        with tempfile.NamedTemporaryFile() as file:
            temporary = file.name
    assert told == [str(tmp_path / "log.db")], "temporary files are not told"
    assert temporary.startswith(str(world))
    assert [path.name for path in tmp_path.iterdir()] == ["world"]


def test_descriptors_are_held_too(tmp_path: Path) -> None:
    world = tmp_path / "world"
    world.mkdir()
    with RedirectedFiles(str(world), _ignore).redirecting():
        descriptor = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
        os.write(descriptor, b"held")
        os.close(descriptor)
        assert (tmp_path / "lock").read_bytes() == b"held"
        with pytest.raises(FileExistsError):
            os.open(tmp_path / "lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    assert not (tmp_path / "lock").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_what_is_in_a_pipe_stays_for_its_reader(tmp_path: Path) -> None:
    world, pipe = tmp_path / "world", tmp_path / "pipe"
    world.mkdir()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(pipe, os.O_WRONLY)
    os.write(writer, b"theirs")
    with RedirectedFiles(str(world), _ignore).redirecting():
        own = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        assert os.read(own, 99) == b""
        with open(pipe, "wb", buffering=0) as file:
            file.write(b"own")
            assert os.read(own, 99) == b"own"
        os.close(own)
    assert os.read(reader, 99) == b"theirs"
    os.close(reader)
    os.close(writer)
