from __future__ import annotations

import sys
from pathlib import Path

import pytest

from memplan.errors import StepError, TargetError
from memplan.trace.held_output import output_shown
from memplan.trace.naming.targets import Target, contained, location, resolve


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def test_a_file_is_found_by_its_path_and_imports_its_neighbours() -> None:
    write("models/size_of_targets.py", "WIDTH = 7\n")
    write("models/by_path.py", "from size_of_targets import WIDTH\n\n\ndef make():\n    return WIDTH\n")
    target = resolve("models/by_path.py:make")
    assert target.what() == 7
    assert (target.name, target.where) == ("make", "models/by_path.py:4")


def test_a_path_may_be_absolute_and_the_folder_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("absolute.py", "def make():\n    return 1\n")
    monkeypatch.chdir("/")
    assert resolve(f"{folder}/absolute.py:make").what() == 1


def test_two_files_of_one_name_are_two_modules() -> None:
    write("a/twice.py", "def make():\n    return 'a'\n")
    write("b/twice.py", "def make():\n    return 'b'\n")
    assert [resolve(f"{name}/twice.py:make").what() for name in "ab"] == ["a", "b"]


def test_a_file_named_like_a_module_in_use_does_not_replace_it() -> None:
    import json

    write("json.py", "def make():\n    return 'mine'\n")
    assert resolve("json.py:make").what() == "mine"
    assert sys.modules["json"] is json


def test_a_file_of_a_package_may_import_relatively() -> None:
    write("pack_of_targets/__init__.py", "")
    write("pack_of_targets/deep/__init__.py", "")
    write("pack_of_targets/base.py", "WIDTH = 5\n")
    write("pack_of_targets/deep/net.py", "from ..base import WIDTH\n\n\ndef make():\n    return WIDTH\n")
    assert resolve("pack_of_targets/deep/net.py:make").what() == 5


def test_a_module_is_found_in_the_working_directory() -> None:
    write("here_of_targets/inner.py", "class Net:\n    @staticmethod\n    def make():\n        return 2\n")
    assert resolve("here_of_targets.inner:Net.make").what() == 2


def test_an_installed_module_is_found() -> None:
    import torch

    assert resolve("torch.nn:Linear") == Target("torch.nn:Linear", torch.nn.Linear)
    assert resolve("torch.nn:Linear").where is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("files.py:mkae", ["files.py has no 'mkae'", "Did you mean make?"]),
        ("files.py:make.more", ["files.py has no 'make.more'"]),
        ("files.py:", ["'files.py' names no callable", "files.py:make"]),
        (":make", ["names no callable"]),
        ("make", ["names no callable", "package.module:callable"]),
        ("fils.py:make", ["there is no file fils.py", "Did you mean files.py?"]),
        ("files.txt.py:make", ["there is no file files.txt.py"]),
        ("./data.txt:make", ["is not a .py file"]),
        ("torch.nnn:Linear", ["there is no module torch.nnn", "torch.nn"]),
        ("no such thing:make", ["is no module's name"]),
        ("lacking.py:make", ["ModuleNotFoundError: No module named 'nosuchlib'", "lacking.py:2", "Install"]),
        ("broken.py:make", ["raised SyntaxError", "broken.py:1"]),
        ("raising.py:make", ["raised ZeroDivisionError", "raising.py:1"]),
        ("leaving.py:make", ["called sys.exit(4)", "leaving.py:2"]),
    ],
)  # fmt: skip
def test_a_target_that_is_not_found_is_named(text: str, words: list[str]) -> None:
    write("files.py", "def make():\n    return 1\n")
    write("data.txt", "")
    write("lacking.py", "import os\nimport nosuchlib\n")
    write("broken.py", "def make(:\n")
    write("raising.py", "1 / 0\n")
    write("leaving.py", "import sys\nsys.exit(4)\n")
    with pytest.raises((TargetError, StepError)) as caught:
        resolve(text)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert "\n" not in message


def test_a_failed_import_leaves_no_half_module_behind() -> None:
    write("half_of_targets.py", "def make():\n    return 1\n1 / 0\n")
    with pytest.raises(TargetError):
        resolve("half_of_targets.py:make")
    write("half_of_targets.py", "def make():\n    return 1\n")
    assert resolve("half_of_targets.py:make").what() == 1


def test_exits_are_contained_and_interrupts_are_not() -> None:
    with pytest.raises(StepError, match=r"x called sys.exit\(\)"), contained("x"):
        sys.exit()
    with pytest.raises(KeyboardInterrupt), contained("x"):
        raise KeyboardInterrupt


def test_an_error_is_located_in_the_users_code() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    assert (location(caught.value) or "").rpartition("/")[2].startswith("test_targets.py:")
    assert location(ValueError("never raised")) is None


NOISY = """import logging
import sys

print("loading")
print("Failed to load _C.so", file=sys.stderr)
logging.getLogger(__name__).addHandler(logging.StreamHandler())
logging.getLogger(__name__).warning("deprecated")


def make():
    return 1
"""


def test_what_an_import_prints_is_counted_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    write("noisy.py", NOISY)
    assert resolve("noisy.py:make").printed_lines == 3
    assert resolve("noisy.py:make").printed_lines == 0, "it is imported once"
    assert capsys.readouterr() == ("", "")


def test_what_an_import_prints_is_shown_where_output_is(capsys: pytest.CaptureFixture[str]) -> None:
    write("shown_noisy.py", NOISY)
    with output_shown():
        assert resolve("shown_noisy.py:make").printed_lines == 0
    assert capsys.readouterr() == ("loading\n", "Failed to load _C.so\ndeprecated\n")


def test_an_import_that_fails_says_what_it_printed_last() -> None:
    write("failing_noisy.py", NOISY + "\nraise ValueError('no card')\n")
    with pytest.raises(TargetError, match="no card") as caught:
        resolve("failing_noisy.py:make")
    assert caught.value.__notes__ == ["it printed last:\nloading\nFailed to load _C.so\ndeprecated"]
