"""The mark as pytest runs it in a project of somebody else: found by its entry point, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODELS = """
import sys
import pytest
from torch import nn
import memplan, torch


def net(width=64):
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)])


def build():
    model, data = net(), torch.randn(256, 64)
    return lambda: model(data).sum().backward()
"""
PASSING = (
    MODELS
    + """
@pytest.fixture
def width():
    return 64


@pytest.fixture
def made():
    return net()


def limit(**more):
    return pytest.mark.memplan(**{"peak": "2 MiB", "device": "cpu"} | more)


@limit(inputs="256x64")
def test_a_module(width):
    return net(width)


@limit(inputs="256x64")
def test_a_module_of_a_fixture(made):
    return made


@limit(inputs=["256x64"], optimizer=torch.optim.AdamW, train=True)
def test_a_callable_that_makes_a_module():
    return net


@limit()
def test_a_build():
    return build


@limit(device="h100", peak="80 MiB", reserved="90 MiB")
@limit()
def test_a_step():
    return build()


@limit()
def test_a_trace():
    return memplan.record(build, device="cpu")


@limit(peak="900 GiB", inputs="1x262144")
def test_nothing_is_allocated():
    return nn.Linear(262144, 262144)  # 256 GiB


@limit()
def test_skipped():
    pytest.skip("not today")


@pytest.mark.parametrize("width", [32, 64])
class TestOfAClass:
    @limit(inputs="8x64")
    def test_a_method(self, width):
        return nn.Linear(64, width)


def test_without_a_mark():
    assert "torch" in sys.modules
"""
)
FAILING = """
import unittest


@pytest.mark.memplan(peak="64 KiB", device="cpu", inputs="256x64")
def test_too_much():
    return net()


@pytest.mark.memplan(peak="2 MiB", reserved="1 MiB", device="h100")
def test_too_much_reserved():
    return build()


@pytest.mark.memplan(peak="2 MiB", device="cpu")
def test_own_assertion():
    assert net is None, "my own words"


@pytest.mark.memplan(peak="2 MiB", device="cpu")
def test_returns_nothing():
    net()


@pytest.mark.memplan(peak="2 MiB", device="cpu")
def test_no_inputs():
    return net()


@pytest.mark.memplan(peak="2 MiB", device="h1000", inputs="1x64")
def test_no_such_card():
    return net()


@pytest.mark.memplan(peak="2 bananas", inputs="1x64")
def test_no_size():
    return net()


@pytest.mark.memplan("2 MiB")
def test_no_name():
    return net()


@pytest.mark.memplan(peek="2 MiB")
def test_no_such_argument():
    return net()


@pytest.mark.memplan(device="cpu")
def test_no_limit():
    return net()


@pytest.mark.memplan(peak="2 MiB")
async def test_a_coroutine():
    return net()


class TestCase(unittest.TestCase):
    @pytest.mark.memplan(peak="2 MiB")
    def test_of_unittest(self):
        return None
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return project_in(tmp_path)


def project_in(folder: Path) -> Path:
    """Return a folder with an installation's entry points, as pip would write them from pyproject.toml."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    info = folder / "site" / "memplan_of_the_test-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: memplan-of-the-test\nVersion: 1\n")
    lines = [f"{name} = {place}" for name, place in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    (folder / "project").mkdir()
    return folder / "project"


def run(project: Path, *arguments: str, test: str = "") -> subprocess.CompletedProcess[str]:
    (project / "test_memory.py").write_text(test)
    path = os.pathsep.join([str(project.parent / "site"), str(ROOT / "src")])
    # an environment in which memplan is installed has the plugin already, under the same name
    env = os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
    flags = ["-W", "error", "--strict-markers", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *flags], cwd=project, env=env, capture_output=True, text=True, check=False
    )


def outcomes(project: Path) -> dict[str | None, str]:
    """Return what became of each test, and its message."""
    cases = ElementTree.parse(project / "out.xml").getroot().iter("testcase")
    return {case.get("name"): _said(case[0]) if len(case) else "passed" for case in cases}


def _said(part: ElementTree.Element) -> str:
    return f"{part.tag}: {part.get('message')}\n{part.text}"


def passed(found: dict[str | None, str], printed: str) -> None:
    """Check that all of `PASSING` passed."""
    assert found.pop("test_skipped").startswith("skipped: not today")
    assert set(found.values()) == {"passed"}, printed
    assert len(found) == 10


@pytest.mark.slow
def test_whatever_describes_a_step_is_taken_in_another_process(project: Path) -> None:
    done = run(project, "--junit-xml=out.xml", "-n", "1", test=PASSING)
    passed(outcomes(project), done.stdout)


def test_whatever_describes_a_step_is_taken_and_what_fails_says_why(project: Path) -> None:
    done = run(project, "--junit-xml=out.xml", test=PASSING + FAILING)
    found = outcomes(project)
    described = {name: text for name, text in found.items() if f"def {str(name).partition('[')[0]}(" in PASSING}
    passed(described, done.stdout)
    much = found["test_too_much"]
    # four layers of 64 x 64 weights and 64 biases
    assert "test_too_much takes " in much
    assert "Expected at most 65536 bytes" in much
    assert "weights 65.0 KiB" in much
    assert "(layers 0 to 3).0: " in much
    said = {
        "test_too_much_reserved": "Expected at most",
        "test_own_assertion": "my own words",
        "test_returns_nothing": "test_returns_nothing returned None. Expected a module, or a step",
        "test_no_inputs": 'In the mark: inputs="8x3x224x224", or a list of them.',
        "test_no_such_card": "There is no card 'h1000'",
        "test_no_size": "'2 bananas' is not a number of bytes",
        "test_no_name": 'Write peak="2 GiB"',
        "test_no_such_argument": "it has no argument 'peek'",
        "test_no_limit": "no limit was given",
        "test_a_coroutine": "found a test that is a coroutine",
        "test_of_unittest": "found a method of a unittest.TestCase",
    }
    assert {name: text for name, text in said.items() if text not in found[name]} == {}
    assert len(found) == 11 + len({"test_too_much", *said})
    assert [name for name, text in found.items() if "memplan/trace" in text] == []  # no traceback of memplan's own


def test_nothing_is_imported_before_a_test_has_the_mark(project: Path) -> None:
    test = "import sys\n\ndef test_it():\n    assert 'memplan.integrations.pytest_plugin' in sys.modules\n"
    test += "    assert not {'torch', 'numpy', 'memplan.trace', 'memplan.studies'} & set(sys.modules)\n"
    done = run(project, test=test)
    assert done.returncode == 0, done.stdout
    markers = run(project, "--markers").stdout
    assert "@pytest.mark.memplan(peak=None, reserved=None, inputs=(), device=None, ...): the step that" in markers


def test_it_can_be_left_out(project: Path) -> None:
    done = run(project, "-p", "no:memplan", test="import pytest\n\n@pytest.mark.memplan(peak=1)\ndef test_it(): pass\n")
    assert "'memplan' not found in `markers` configuration option" in done.stdout
