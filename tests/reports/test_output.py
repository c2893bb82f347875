"""Where a report goes: a terminal, a pipe, a file of an old encoding."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import RenderableType
from rich.padding import Padding
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


def test_no_line_is_a_command_of_github() -> None:
    """Wherever rich breaks it, and however far it is indented: the runner strips spaces, and looks for ``##[``
    anywhere."""
    text = "x" * 78 + " ::stop-commands::pause ##[add-mask]x"
    file = io.StringIO()
    print_parts(lambda page: [Text("::error::a"), Padding(Text(text), (0, 0, 0, 2)), Text("a::b")], file)
    lines = file.getvalue().splitlines()
    assert len(lines) == 4
    assert not any(line.lstrip().startswith("::") or "##[" in line for line in lines)
    assert lines[-1] == "a::b"
    assert "stop-commands" in file.getvalue()


def test_a_table_that_is_indented_is_as_much_narrower() -> None:
    columns = [Column("layer", ("a" * 60,), shrinks_to=16), Column("where", ("b" * 60 + ".py:193",), from_left=True,
               shrinks_to=16)]  # fmt: skip
    file = io.StringIO()
    print_parts(lambda page: [Padding(page.narrower(2).table(columns), (0, 0, 0, 2))], file)
    lines = file.getvalue().splitlines()
    assert lines[2].endswith(".py:193")
    assert max(map(len, lines)) <= 80
