"""The site: what Sphinx makes of the pages, the questions' answers, the commands that pages show, the notebooks."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import memplan.cli

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
QUESTIONS = sorted(page for page in (DOCS / "questions").glob("*.md") if page.stem != "index")
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
GENERATED = re.compile(r"<!-- (?:run|include)(?:\[[-\d,]+\])?: .+? -->\n(.*?)<!-- end -->", re.S)
AMOUNT = re.compile(r"\d[\d.,]* (?:[KMGT]iB|%)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def spaced(text: str) -> str:
    """One space where a line is broken, as outputs of 80 columns are."""
    return re.sub(r"\s+", " ", text)


def test_every_question_is_listed_by_its_title() -> None:
    listed = re.findall(r"^- \[(.+)\]\(([\w-]+)\.md\)$", text_of(DOCS / "questions" / "index.md"), re.M)
    titles = {page.stem: text_of(page).partition("\n")[0].removeprefix("# ") for page in QUESTIONS}
    assert {name: title for title, name in listed} == titles
    assert len(listed) == len(QUESTIONS) == 21
    assert [title for title in titles.values() if not title.endswith("?")] == []


@pytest.mark.parametrize("page", QUESTIONS, ids=lambda page: page.stem)
def test_an_answer_is_short_and_its_numbers_are_those_of_the_outputs(page: Path) -> None:
    text = text_of(page)
    outputs = spaced(" ".join(GENERATED.findall(text)))
    prose = GENERATED.sub("", text)
    answer = spaced(prose.split("\n\n")[1])
    assert AMOUNT.findall(answer), "the first paragraph answers with numbers"
    assert [amount for amount in AMOUNT.findall(answer) if amount not in outputs] == []
    assert len(re.findall(r"[.:](?: |$)", answer)) <= 4, "two sentences, or three"
    assert "## Why\n" in prose
    assert re.search(r"\]\(\.\./[\w/-]+\.md", prose), "a link to the page that goes deeper"
    assert len(prose.splitlines()) <= 60
    # in the words of those who ask, for the search of the site
    assert re.search(r'^Also asked: "[^"]{5,}"', prose.rstrip().splitlines()[-1])


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each memplan command that a page shows and that is not run to make the page."""
    text = GENERATED.sub("", text_of(page)).replace("\\\n", " ")  # a command goes on behind a backslash
    lines = re.findall(r"^(?:\$ |    )(memplan .+?)(?:  +#.*)?$", text, re.M)
    lines += [spaced(code) for code in re.findall(r"(?<!`)`(memplan [^`]+)`(?!`)", text)]
    for line in lines:
        if not re.search(r"[\[(]|\.\.\.", line):
            yield shlex.split(line)[1:]


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_a_page_shows_exist(page: Path) -> None:
    context = click.Context(memplan.cli.main)
    for arguments in commands(page):
        name, *rest = arguments or ["--help"]
        command = memplan.cli.main if name.startswith("-") else memplan.cli.main.get_command(context, name)
        assert command is not None, f"memplan {name}"
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        known |= {"--help", "-h"}
        own = rest[: rest.index("--")] if "--" in rest else rest
        script = [place for place, word in enumerate(own) if name == "run" and (word == "-m" or word.endswith(".py"))]
        own = own[: script[0]] if script else own  # what follows are the script's arguments
        assert [word for word in own if word.startswith("--") and word not in known] == [], arguments


def cells(notebook: Path) -> list[Any]:
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(notebook, as_version=4).cells


def printed(cell: Any) -> str:
    """What a cell printed and returned. A file is named after a checksum of its cell."""
    texts = [one.get("text") or one.get("data", {}).get("text/plain", "") for one in cell.get("outputs", [])]
    return re.sub(r"\d+\.py", "cell.py", "".join(texts))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_shows(notebook: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`jupyter execute --inplace docs/notebooks/*.ipynb` makes them anew. A cell of the tag "varies" has times."""
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)  # importing MONAI sets it
    fresh = nbformat.read(notebook, as_version=4)
    client.NotebookClient(fresh, timeout=300, kernel_name="python3").execute()
    shown = cells(notebook)
    assert len(shown) == len(fresh.cells)
    for before, after in zip(shown, fresh.cells, strict=True):
        assert "varies" in after.metadata.get("tags", []) or printed(after) == printed(before)
        assert bool(before.get("outputs")) == bool(after.get("outputs"))


def test_links_of_notebooks_lead_somewhere() -> None:
    for notebook in NOTEBOOKS:
        text = "\n".join(cell.source for cell in cells(notebook) if cell.cell_type == "markdown")
        for link in re.findall(r"\]\(([^)\s#]+)", text):
            assert "://" in link or (notebook.parent / link).exists(), f"{notebook.name}: {link}"


def gallery() -> Any:
    spec = importlib.util.spec_from_file_location("gallery_tool", ROOT / "tools" / "gallery.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_each_picture_of_the_gallery_has_its_sentence_and_its_commands() -> None:
    tool = gallery()
    _, *sections = re.split(r"^## .+$", text_of(tool.PAGE), flags=re.M)
    kinds = set()
    for section in sections:
        sentence, *blocks = re.split(tool.BLOCK, section)
        assert spaced(sentence).strip().endswith(".")
        (block,) = tool.BLOCK.findall(section)
        written: set[str] = set()
        for name, *words in tool.commands(block):
            kinds.add(name)
            own = [word for word in words if re.search(r"\.(json|pickle|html|png)$", word)]
            read = [word for place, word in enumerate(words) if word in own and not words[place - 1].startswith("--")]
            assert set(read) <= written, "what a command reads, one before it has written"
            written |= set(own)
        assert tool.report_of(block) in written
        assert blocks
    assert len(sections) >= 8
    assert kinds >= {"explain", "fit", "sweep", "check", "replay", "compare", "largest", "report"}


@pytest.mark.slow
def test_a_report_of_the_gallery_is_what_its_command_writes(tmp_path: Path) -> None:
    tool = gallery()
    block = next(one for one in tool.BLOCK.findall(text_of(tool.PAGE)) if "memplan check" in one)
    (made,) = tool.make([block], tmp_path / "reports")
    assert made == tmp_path / "reports" / "findings.html"
    text = made.read_text(encoding="utf-8")
    assert "examples/unpadded_unet.py:make" in text
    assert str(ROOT) not in text
    assert re.search(r"border-erosion.*examples/unpadded_unet\.py:\d+", text, re.S)
    with pytest.raises(RuntimeError, match=r"nowhere\.py:make --html a\.html ended with 2:\nmemplan: there is no file"):
        tool.make(["$ memplan explain nowhere.py:make --html a.html"], tmp_path / "none")


@pytest.mark.slow  # the reference imports everything, furo writes each page, and the gallery's reports are made
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    pytest.importorskip("myst_nb")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    made = {path.relative_to(tmp_path).with_suffix("").as_posix() for path in tmp_path.rglob("*.html")}
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in [*DOCS.rglob("*.md"), *NOTEBOOKS]}
    assert pages <= made
    index = (tmp_path / "index.html").read_text(encoding="utf-8")
    tool, linked = gallery(), (tmp_path / "gallery.html").read_text(encoding="utf-8")
    for block in tool.BLOCK.findall(text_of(tool.PAGE)):
        report = tool.report_of(block)
        assert f'href="reports/{report}"' in linked
        assert (tmp_path / "reports" / report).read_text(encoding="utf-8").startswith("<!doctype html>")
        assert 5_000 < (tmp_path / "reports" / report).stat().st_size < 6_500_000
    assert [page for page in pages if "/" not in page and page != "index" and f'href="{page}.html"' not in index] == []
