"""Annotations with whatever a name can hold, for each of the formats."""

from __future__ import annotations

from memplan.reports.ci.annotations import Annotation

HOSTILE = ']]><b a="1">&\'\x1b[31m\x00\u202e\ud800\n::error::%0A, 100 %'
ANNOTATIONS = [
    Annotation("held-graph", "error", f"{HOSTILE} is held", f"h.0.{HOSTILE}", "src/a b,c:d.py:12", "net.py:make", 5),
    Annotation("loss-memory", "note", "It could be smaller", where="src\\net.py:3", also=("use another one", "")),
    Annotation("memory-growth", "warning", "It grew", target="./models/net.py:make"),
    Annotation("memory-growth", "error", "It grew more", where="C:\\work\\net.py:7", target="package.net:make"),
    Annotation("memory-growth", "error", "Nowhere", where="<string>", target="package.net:make"),
]
