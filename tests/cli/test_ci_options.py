"""`memplan check` with the outputs for systems that run commands on every change."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memplan.cli import main

MODELS = """
from torch import nn


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(1, 1, 3) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""
LINE = 1 + MODELS[: MODELS.index("x = layer(x)")].count("\n")


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "models.py").write_text(MODELS)
    return tmp_path


def run(*arguments: str) -> Result:
    target = ("src/models.py:Stack", "--input", "1x1x32x32", "--device", "cpu")
    return CliRunner().invoke(main, ["check", *target, *arguments])


def test_a_finding_is_in_each_with_its_line(models: Path) -> None:
    done = run("--sarif", "out.sarif", "--junit", "out.xml", "--github")
    assert done.exit_code == 1
    assert done.output.splitlines()[-1].startswith(
        f"::error file=src/models.py,line={LINE},title=memplan border-erosion::The output covers the input without"
    )
    (result,) = json.loads((models / "out.sarif").read_text())["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "src/models.py", "uriBaseId": "%SRCROOT%"}
    assert (result["level"], place["region"]["startLine"]) == ("error", LINE)
    suite = ElementTree.parse(models / "out.xml").getroot()
    assert [case.get("name") for case in suite.iter("testcase") if len(case)] == ["border-erosion"]


def test_what_does_not_fail_is_a_warning(models: Path) -> None:
    assert run("--fail-on", "never", "--sarif", "out.sarif", "--junit", "out.xml").exit_code == 0
    (result,) = json.loads((models / "out.sarif").read_text())["runs"][0]["results"]
    assert result["level"] == "warning"
    assert ElementTree.parse(models / "out.xml").getroot().get("failures") == "0"


def test_the_same_finding_has_the_same_bytes() -> None:
    one, other = (run("--sarif", "-").output for _ in range(2))
    assert one == other
    assert json.loads(one)["version"] == "2.1.0"


def test_a_line_in_a_package_is_shown_at_the_target(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = models / "site-packages" / "layers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(MODELS)
    (models / "src" / "models.py").write_text("from layers import Stack\n")
    monkeypatch.syspath_prepend(str(models / "site-packages"))
    line = run("--github").output.splitlines()[-1]
    assert line.startswith("::error file=src/models.py,line=1,title=memplan border-erosion::")
    assert line.endswith(f" The line is layers/__init__.py:{LINE}.")


def test_two_outputs_do_not_mix() -> None:
    for arguments in (("--sarif", "-", "--github"), ("--sarif", "-", "--json", "-")):
        done = run(*arguments)
        assert done.exit_code == 2
        assert "two outputs at one place" in done.output
