"""The content of a page: the report of each result, and its charts. All sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from memplan.reports.document import Document
from memplan.reports.html.charts import Chart

Mood = Literal["good", "bad", "plain"]


@dataclass(frozen=True, slots=True)
class Result:
    """The page content of a result, beginning with the verdict.

    A page of several results compares their ``peak`` by ``causes``, with ``capacity``; None if the result has none.
    """

    kind: str
    title: str
    verdict: str
    mood: Mood
    document: Document
    """Shown without its title, and without lines that repeat the verdict."""
    charts: tuple[Chart, ...] = ()
    source: str = ""
    causes: Mapping[str, int] | None = None
    peak: int | None = None
    capacity: int | None = None
