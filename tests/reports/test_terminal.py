"""Where a report goes: a terminal, a pipe, a file of an old encoding; and no text of it steers any of them."""

from __future__ import annotations

import io
import re

import pytest

from memplan.reports.document import (
    Code,
    Column,
    Facts,
    Line,
    Section,
    Table,
    document,
    name_field,
    number_field,
    table_of,
)
from memplan.reports.terminal import show, text_of

WIDE = document("title", [Table((Column("a", ("x" * 200, "é")), Column("b", ("1", "22"), right=True)), sums_from=1)])


def test_a_pipe_is_80_columns_of_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    show(WIDE)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert sum(set(line.strip()) == {"─"} for line in text.splitlines()) == 2  # below the header, above the sums
    assert text == text_of(WIDE) + "\n"


def test_a_notebook_gets_text_and_nothing_is_displayed_besides(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[object] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *parts: shown.append(parts))
    show(WIDE)
    assert capsys.readouterr().out == text_of(WIDE) + "\n"
    assert shown == []


def test_an_old_encoding_gets_what_it_has() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    show(WIDE, file)
    file.flush()
    assert b"-----" in raw.getvalue()
    assert raw.getvalue().decode("ascii").splitlines()[-1].startswith("?")


def test_sections_are_separated_by_an_empty_line_and_empty_ones_left_out() -> None:
    text = text_of(
        document("title", ["head"], [], Section(("one", Line("two", indent=2)), "heading"), Section((), "x"))
    )
    assert text == "title\nhead\n\nheading\none\n  two"


def test_no_line_is_a_command_of_github() -> None:
    """Wherever rich breaks it, and however far it is indented: the runner strips spaces, and looks for ``##[``
    anywhere."""
    text = "x" * 78 + " ::stop-commands::pause ##[add-mask]x"
    lines = text_of(document(None, ["::error::a", Line(text, indent=2), "a::b"])).splitlines()
    assert len(lines) == 4
    assert not any(line.lstrip().startswith("::") or "##[" in line for line in lines)
    assert lines[-1] == "a::b"
    assert "stop-commands" in lines[2]


@pytest.mark.parametrize("amount", ["24 %", "8 B", "1.5 GiB", "312.0 MiB", "9 ms", "2 s"])
@pytest.mark.parametrize("indent", [0, 3])
def test_no_line_breaks_between_a_number_and_its_unit(amount: str, indent: int) -> None:
    for before in range(55, 77):
        line = Line("x" * before + f" {amount} after, and 3 things", indent=indent)
        for part in [line] if indent else [line, line.text]:
            lines = text_of(document(None, [part])).splitlines()
            assert any(amount in line for line in lines)
            assert " ".join(" ".join(lines).split()) == line.text
            assert max(map(len, lines)) <= 80
    assert text_of(document(None, ["a\ue000b 1 "]))[:3] == "a?b"


def test_a_table_that_is_indented_is_as_much_narrower() -> None:
    columns = (
        Column("layer", ("a" * 60,), shrinks_to=16),
        Column("where", ("b" * 60 + ".py:193",), from_left=True, shrinks_to=16),
    )
    lines = text_of(document(None, [Table(columns, indent=2)])).splitlines()
    assert lines[2].endswith(".py:193")
    assert max(map(len, lines)) <= 80


def test_bars_are_as_long_as_their_shares() -> None:
    column = Column("", ("", ""), bars=((0.0, 1.0), (0.25, 0.75)))
    assert [line.count("█") for line in text_of(document(None, [Table((column,))])).splitlines()[2:]] == [24, 12]
    assert "######" in text_of(document(None, [Table((column,))]), ascii_only=True)


EVIL = "a\x1b[2J\x9b31m\u202e"


@pytest.mark.parametrize("terminal", [False, True])
def test_no_text_steers_a_terminal(terminal: bool) -> None:
    table = table_of([EVIL, "b"], [name_field(EVIL, str), number_field(EVIL, len)], total=EVIL)
    below = Table((Column("a", ("1",)),), below=(EVIL,))
    parts = [EVIL, Line(EVIL, indent=2), Facts({EVIL: EVIL}), Code(EVIL), table, below]
    file = io.StringIO()
    if terminal:
        file.isatty = lambda: True
    show(document(EVIL, parts, Section((EVIL,), EVIL)), file)
    text = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())  # rich's own colours
    assert all(char.isprintable() for char in text.replace("\n", ""))
    assert text.count("?[2J?31m?") == 13


def test_code_is_not_wrapped() -> None:
    line = "model = Model(" + ", ".join(f"argument_{number}={number}" for number in range(20)) + ")"
    code = document(None, [Code(f"def make():\n    {line}")])
    assert text_of(code, 40).splitlines() == ["    def make():", f"        {line}"]
