from __future__ import annotations

from memplan._text import printable


def test_what_steers_a_terminal_becomes_question_marks() -> None:
    assert printable("a\tb\x07\x1b[31mc\nd\u202ee\x9bf") == "a?b??[31mc?d?e?f"
    assert printable("größe 3×3, 体积") == "größe 3×3, 体积"
