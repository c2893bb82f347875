"""What the pages show is what the code prints and what the benchmarks wrote."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("readme_tool", ROOT / "tools" / "readme.py")
assert _spec is not None
assert _spec.loader is not None
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)

PAGES: list[Path] = tool.pages()
README = PAGES[0]
BLOCKS = [(page, block) for page in PAGES for block in tool.BLOCK.finditer(page.read_text(encoding="utf-8"))]
# a part of an output stands in the README, the whole in a page: one run each
RUNS = [(page, block) for page, block in BLOCKS if block[1] == "run"]


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 180


def test_tables_are_those_of_the_benchmarks() -> None:
    tables = [(page.name, block) for page, block in BLOCKS if block[1] != "run"]
    assert len(tables) >= 8
    assert [f"{page}: {block[3]}" for page, block in tables if tool.filled(block[0]) != block[0]] == []


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="the pages were made with AVX2"
)
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the pages were made with torch 2.13")
@pytest.mark.parametrize(
    ("page", "block"),
    [pytest.param(*run, marks=[] if run[0] == README and "fit" not in run[1][0] else pytest.mark.slow) for run in RUNS],
    ids=[f"{page.stem}-{number}" for number, (page, _) in enumerate(RUNS)],
)
def test_outputs_are_those_of_the_commands(page: Path, block: re.Match[str]) -> None:
    """In a process with the threads and instructions that the pages were made with, whatever the tests have."""
    assert tool.filled(block[0]) == block[0], f"python tools/readme.py makes {page.name} anew"


def test_a_part_of_an_output_is_shown_with_what_is_left_out() -> None:
    text = "first\n\nsecond\n\nthird"
    assert tool._parts(text, None, "...") == text
    assert tool._parts(text, "1,2", "...") == "first\n\nsecond\n..."
    assert tool._parts(text, "3", "...") == "third"


def test_links_lead_somewhere() -> None:
    """Relative links of all pages name a file, and a heading of it where they say one."""
    broken = []
    for page in [*PAGES, *ROOT.glob("*.md"), *(ROOT / "tools").rglob("*.md"), *(ROOT / "goldens").glob("*.md")]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, heading = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if "://" in link:
                continue
            if not target.exists() or (heading and heading not in headings(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings, as they are made from their words."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in found}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"\]\(([\w/.-]+\.md)\)", index))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]} - {"index.md", "contributing.md"}
    assert {page for page in pages if "/" not in page} <= listed
