from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from memplan.reports.columns import fit, shortened, shortened_distinct
from memplan.reports.document import Column

NAMES = Column("name", ("encoder.layer.0.attention", "head"), shrinks_to=8, from_left=True)
KINDS = Column("kind", ("Linear", "Conv2d"), drop=1)
SIZES = Column("size", ("12.3 MiB", "1 B"), right=True, drop=2)


def width(column: Column) -> int:
    return max(map(cell_len, (*column.cells, *column.header.split("\n"))))


def total(columns: list[Column], gap: int) -> int:
    return sum(width(column) for column in columns) + gap * (len(columns) - 1)


@pytest.mark.parametrize("room", range(8, 60))
def test_what_is_kept_fits(room: int) -> None:
    kept, gap = fit([NAMES, KINDS, SIZES], room)
    assert total(kept, gap) <= room
    assert kept[0].header == "name"


def test_the_last_to_be_dropped_stay() -> None:
    assert [column.header for column in fit([NAMES, KINDS, SIZES], 60)[0]] == ["name", "kind", "size"]
    assert [column.header for column in fit([NAMES, KINDS, SIZES], 20)[0]] == ["name", "kind"]
    assert [column.header for column in fit([NAMES, KINDS, SIZES], 10)[0]] == ["name"]


def test_nothing_is_cut_where_there_is_room() -> None:
    assert [column.cells for column in fit([NAMES, KINDS, SIZES], 60)[0]] == [
        NAMES.cells,
        KINDS.cells,
        SIZES.cells,
    ]


def test_a_header_is_never_cut() -> None:
    column = Column("a long header\nb", ("x" * 40,), shrinks_to=2)
    assert width(fit([column], 5)[0][0]) == len("a long header")


def test_texts_are_cut_at_the_end_that_matters_less() -> None:
    assert shortened("encoder.layer.0", 8, True) == "…layer.0"
    assert shortened("encoder.layer.0", 8, False) == "encoder…"
    assert shortened("encoder.layer.0", 8, False, "...") == "encod..."
    assert shortened("head", 8, True) == "head"


@pytest.mark.parametrize("from_left", [True, False])
@pytest.mark.parametrize("width", range(2, 12))
def test_wide_characters_count_double(width: int, from_left: bool) -> None:
    assert cell_len(shortened("層層層層層層", width, from_left)) <= width


names = st.text("ab.", min_size=1, max_size=24)


@given(st.lists(names, min_size=1, max_size=12), st.integers(6, 20), st.booleans())
def test_names_that_differ_differ_when_they_are_cut(texts: list[str], width: int, from_left: bool) -> None:
    cut = shortened_distinct(texts, width, from_left)
    assert all(len(short) <= width for short in cut)
    assert len(set(cut)) == len(set(texts))
    assert all(short == text for text, short in zip(texts, cut, strict=True) if len(text) <= width)


def test_a_cut_goes_to_where_names_are_alike() -> None:
    layers = [f"{half}_blocks.{number}.attentions.0.to_out" for half in ("down", "up") for number in (0, 1)]
    assert shortened_distinct(layers, 26, from_left=True) == (
        "d…ks.0.attentions.0.to_out", "d…ks.1.attentions.0.to_out",
        "u…ks.0.attentions.0.to_out", "u…ks.1.attentions.0.to_out",
    )  # fmt: skip
