"""Where a report goes: a terminal, a pipe, a file of an old encoding."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import RenderableType
from rich.text import Text

from memplan.reports.columns import Column
from memplan.reports.output import Page, print_parts


def parts(page: Page) -> Iterator[RenderableType]:
    yield Text(f"{page.width} {page.ascii_only}", "bold")
    yield page.table([Column("a", ("x" * 200, "é")), Column("b", ("1", "22"), right=True)], sums_from=1)


def test_a_pipe_is_80_columns_of_plain_text() -> None:
    file = io.StringIO()
    print_parts(parts, file)
    lines = file.getvalue().splitlines()
    assert lines[0].split()[0] == "80"
    assert "\x1b" not in file.getvalue()
    assert all(line == line.rstrip() for line in lines)
    assert sum(set(line.strip()) == {"─"} for line in lines) == 2  # below the header, above the sums


def test_an_old_encoding_gets_what_it_has() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    print_parts(parts, file)
    file.flush()
    assert raw.getvalue().startswith(b"80 True")


def test_stdout_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    print_parts(parts)
    assert capsys.readouterr().out.startswith("80 ")
