"""The examples of the documentation run, in the order in which they stand."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from environment import needs_avx512, slow, thinned

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.mark.slow
def test_the_examples_of_fit_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "fit.md").read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 12
    names: dict[str, object] = {}
    for block in blocks:
        if 'backend="memplan"' in block and not entry_points(group="torch_dynamo_backends", name="memplan"):
            continue  # an installation from before the backend
        exec(block, names)
    assert (tmp_path / "plan.json").exists()


PAGES = [DOCS / "check.md", *sorted((DOCS / "checks").glob("*.md"))]


# two pages show what torch warns of
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.parametrize("page", thinned(PAGES, 8), ids=lambda page: page.stem)
def test_the_examples_of_checks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    assert len(blocks) >= 2
    # a file of its own, since comments that ignore a finding are read from the source
    (tmp_path / "example.py").write_text("".join(blocks), encoding="utf-8")
    exec(compile("".join(blocks), str(tmp_path / "example.py"), "exec"), {"__name__": "example"})


@pytest.mark.parametrize("name", ["lines", *slow("compare", "export", "kernels", "quantize", "watch")])
def test_the_examples_of_a_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "quantize":
        pytest.importorskip("torchao")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{name}.md").read_text(encoding="utf-8"), re.S)
    assert len(blocks) >= (1 if name in ("export", "kernels") else 2)
    exec("".join(blocks), {"__name__": "example"})


def test_the_example_of_guard_runs(request: pytest.FixtureRequest) -> None:
    from memplan.integrations.pytest_plugin import pytest_configure

    pytest_configure(request.config)  # of an installation from before the plugin
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "guard.md").read_text(encoding="utf-8"), re.S)
    names: dict[str, Any] = {}
    exec(block, names)
    names["test_the_step_stays_small"]()
    ((mark,), made) = names["test_the_same"].pytestmark, names["test_the_same"]()
    assert (mark.name, mark.kwargs["peak"], made[0].in_features) == ("memplan", "80 MiB", 256)


def test_every_check_has_a_page_with_its_title() -> None:
    from memplan.checks.registry import CHECKS

    rows = re.findall(r"^\| \[`([\w-]+)`\]\(checks/([\w-]+)\.md\) \| (.+) \|$", PAGES[0].read_text("utf-8"), re.M)
    assert rows == [(check.id, check.id, check.title) for check in CHECKS]
    assert {page.stem for page in PAGES[1:]} == {check.id for check in CHECKS}


def test_every_switch_of_the_search_is_described() -> None:
    from dataclasses import fields

    from memplan import Heuristics

    def shown(default: object) -> str:
        return "on" if default is True else str(default)

    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", (DOCS / "fit.md").read_text(encoding="utf-8"), re.M)
    assert rows == [(one.name, shown(one.default)) for one in fields(Heuristics)]


@pytest.mark.parametrize("name", [pytest.param("sweep", marks=needs_avx512), *slow("largest")])
def test_the_examples_of_studies_run_and_print_what_they_show(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(block, names)
    shown = capsys.readouterr().out, "".join(re.findall(r"```text\n(.*?)```", text, re.S))
    one, other = (re.sub(r"fixed [\d.]+ KiB", "fixed", each) for each in shown)  # of oneDNN: another on each processor
    assert one == other


@pytest.mark.parametrize(("page", "folder"), [("docs/architecture.md", "src/memplan"), ("CONTRIBUTING.md", "")])
def test_the_files_that_a_map_names_exist(page: str, folder: str) -> None:
    root = DOCS.parent
    text = (root / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[\w-]+/)+(?:[\w-]+\.\w+)?)`", text))
    assert len(named) > 20
    assert [path for path in sorted(named) if not any((root / at / path).exists() for at in (folder, ""))] == []
