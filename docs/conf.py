"""How the site is built: `make docs`. Pages are the Markdown files beside this one, the reference is docstrings.

Pages are written for GitHub, too: links are plain Markdown. What Sphinx needs besides is made here, from these links.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from sphinx.application import Sphinx

from memplan._version import __version__

project = "memplan"
release = __version__
project_copyright = "the authors of memplan"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "memplan"
html_show_sphinx = False
html_copy_source = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the tests execute them
nb_merge_streams = True

autodoc_typehints = "description"
autodoc_member_order = "bysource"

_LINK = re.compile(r"\[([^\]]+)\]\(((?!\w+:)[^)#]+\.(?:md|ipynb))(?:#[^)]*)?\)")
_CONTENTS = ("index", "questions/index", "check")
"""Pages whose links are the table of contents: a section of it for each of their headings."""
_GALLERY = Path(__file__).resolve().parent.parent / "tools" / "gallery.py"
_REPORTS = "reports"


def _prepare(app: Sphinx, name: str, source: list[str]) -> None:
    """Make of a page's Markdown what Sphinx needs."""
    text = _contributing(app) if name == "contributing" else source[0]
    text = text.replace("(../CONTRIBUTING.md)", "(contributing.md)")
    if name == "gallery":
        text = _with_reports(text)
    contents = _contents(app, name, text) if name in _CONTENTS else ""
    source[0] = _LINK.sub(lambda link: _outside(name, link), text) + contents


def _with_reports(text: str) -> str:
    """Link behind the commands of the gallery the report that they make."""
    spec = spec_from_file_location("gallery", _GALLERY)
    assert spec is not None
    assert spec.loader is not None
    gallery = module_from_spec(spec)
    spec.loader.exec_module(gallery)
    report_of: Callable[[str], str | None] = gallery.report_of

    def linked(block: re.Match[str]) -> str:
        name = report_of(block[1])
        return block[0] if name is None else f'{block[0]}\n\n<a href="{_REPORTS}/{name}">Open {name}</a>'

    return gallery.BLOCK.sub(linked, text)


def _make_reports(app: Sphinx, error: Exception | None) -> None:
    """Make the gallery's reports, in a process of its own: recording sets much of torch that docstrings do not need."""
    if error is None and app.builder.format == "html":
        command = [sys.executable, str(_GALLERY), str(app.outdir / _REPORTS)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _contributing(app: Sphinx) -> str:
    """Return the repository's own page, with links from where the site has it."""
    text = Path(app.srcdir, "..", "CONTRIBUTING.md").read_text(encoding="utf-8")
    return _LINK.sub(lambda link: f"[{link[1]}](../{link[2]})".replace("(../docs/", "("), text)


def _outside(name: str, link: re.Match[str]) -> str:
    """Offer Markdown that lies outside of the site, which a browser of the repository shows, as a download."""
    label, path = link[1].replace("`", ""), link[2]
    return f"{{download}}`{label} <{path}>`" if path.startswith("../" * (name.count("/") + 1)) else link[0]


def _contents(app: Sphinx, name: str, text: str) -> str:
    """Return hidden tables of contents: the pages that each section links, once, where no other page lists them."""
    folder, seen, made = Path(app.srcdir, name).parent, set(), ""
    for section in re.split(r"^## ", text, flags=re.M):
        pages = []
        for link in _LINK.finditer(section):
            page = (folder / link[2]).resolve()
            if page.is_relative_to(app.srcdir) and page not in seen and (name == "index" or _below(page, app)):
                seen.add(page)
                pages.append("/" + page.relative_to(app.srcdir).as_posix())
        if pages:
            caption = section.partition("\n")[0].lstrip("# ")
            made += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])
    return made


def _below(page: Path, app: Sphinx) -> bool:
    """Return whether a page lies in one of the folders that pages of contents have for themselves."""
    return page.parent in (Path(app.srcdir, "questions"), Path(app.srcdir, "checks"))


def setup(app: Sphinx) -> None:
    """Register what the site needs besides extensions."""
    app.connect("source-read", _prepare)
    app.connect("build-finished", _make_reports)
