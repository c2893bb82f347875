"""Reports of why memory ran out, on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from memplan._bytes import format_bytes_as_torch
from memplan.explanation.why import Why, headline
from memplan.reports.output import Page, name_field, number_field, print_parts


def print_why(why: Why, file: TextIO | None = None) -> None:
    """Print why memory ran out to a file, stdout by default. See `print_parts`."""
    print_parts(lambda page: render(why, page), file)


def render(why: Why, page: Page) -> Iterator[RenderableType]:
    """Yield the parts of the report as rich renderables, in order."""
    title = headline(why.message)
    yield Text(title[:1].upper() + title[1:], "bold")
    if why.parts:
        total = why.message.total
        fields = [
            name_field("Where the memory was", lambda part: part.name, from_left=False),
            number_field("bytes", lambda part: part.bytes, format_signed),
        ]
        if total is not None:
            fields.append(number_field("share", lambda part: part.bytes, lambda size: f"{100 * size / total:.1f} %"))
        yield ""
        yield page.rows(why.parts, fields, total=None if total is None else "all")
    yield ""
    yield Text(why.reason)
    if why.advice:
        yield ""
        yield Text("What helps", "bold")
        yield from (Padding(Text(f"- {advice}"), (0, 0, 0, 2)) for advice in why.advice)


def format_signed(size: int) -> str:
    """Return bytes as torch prints them; they may be negative."""
    return f"-{format_bytes_as_torch(-size)}" if size < 0 else format_bytes_as_torch(size)
