"""Tables of lines whole, at 80 columns."""

from __future__ import annotations

from memplan.explanation.line_profile import LineProfile, LineRow
from memplan.reports.line_tables import report
from memplan.reports.terminal import text_of

ROWS = (
    LineRow(7, 0, 0, 0, 0, 0, "def step(\x1b[31mmodel):"),
    LineRow(8, 12, 3 << 20, 2 << 20, 0, 5 << 20, "    loss = model(batch, labels, with_a_long_name=1, another=2)"),
    LineRow(9, 1, 0, 0, 3 << 20, 3 << 20, "\tdel loss"),
)
PROFILE = LineProfile("Trainer.step", "train.py", "h100", "recorded", ROWS, ("said",))

PRINTED = """\
Trainer.step (train.py), line by line, predicted on h100
line hits    held   added   freed    peak code
────────────────────────────────────────────────────────────────────────────────
   7                                      def step(?[31mmodel):
   8   12 3.0 MiB 2.0 MiB       - 5.0 MiB     loss = model(batch, labels, with_…
   9    1       -       - 3.0 MiB 3.0 MiB     del loss
note: said

held: allocated after the line. added, freed: what it leaves, and what it ends,
of that. peak: the most while it ran. Of several hits, the most of any."""


def test_what_is_printed() -> None:
    assert str(PROFILE) == text_of(report([PROFILE])) == PRINTED


def test_the_lines_of_a_file_go_by_its_name() -> None:
    profile = LineProfile("<module>", "train.py", "cpu", "measured", ())
    assert str(profile).splitlines()[0] == "train.py, line by line, measured on cpu"


def test_nothing_is_printed_of_nothing() -> None:
    assert text_of(report([])) == ""
