"""Peak against time, from all kept to the floor, and peers beside: as tables, and as a picture by matplotlib."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

from memplan._bytes import format_bytes
from memplan._text import format_seconds, printable
from memplan.reports.chart import plain, unit_of
from memplan.reports.output import Field, Page
from memplan.verification.peers.trials import PeerResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOOKS = {
    "eager": {"marker": "s", "color": "tab:red"},
    "compiled": {"marker": "^", "color": "tab:purple"},
    "lossy": {"marker": "v", "color": "tab:green"},
    "wrong gradients": {"marker": "x", "color": "red"},
}


@dataclass(frozen=True, slots=True)
class Point:
    """A plan that was found."""

    peak: int
    """Predicted bytes."""
    seconds: float
    """What it adds to the step, predicted; below 0 where computing in fewer bits is faster."""
    lost: str = ""
    """What it computes and saves in fewer bits, where it does."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """Plans of one step; none has both a larger peak and more added seconds than another."""

    title: str
    points: tuple[Point, ...]
    """From all kept to the floor: the largest peak first."""
    eager_peak: int
    """Predicted bytes of the step without a plan."""
    step_seconds: float | None = None
    """Predicted, without a plan."""
    budget: int | None = None
    """Bytes that were asked for, marked."""
    peers: tuple[PeerResult, ...] = ()
    """What others take, measured; eager mode first."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON: bytes and seconds."""
        data: dict[str, Any] = {
            "eager_peak": self.eager_peak,
            "step_seconds": self.step_seconds,
            "points": [
                {"peak": point.peak, "seconds": point.seconds, **({"lost": point.lost} if point.lost else {})}
                for point in self.points
            ],
        }
        return data | ({"peers": [peer.to_dict() for peer in self.peers]} if self.peers else {})


def table(frontier: Frontier, page: Page) -> Table:
    """Return a row for each plan, with what it frees and what that adds; the first within the budget is marked."""
    points, most = frontier.points, frontier.eager_peak
    fitting = next((p for p in points if frontier.budget is not None and p.peak <= frontier.budget), None)

    def name(point: Point) -> str:
        marks = ("the first in the budget" * (point is fitting), "the floor" * (point is points[-1]))
        return ", ".join(filter(None, marks))

    fields = [
        Field("Frontier", lambda p: format_bytes(p.peak), right=True),
        Field("of eager", lambda p: f"{100 * p.peak / most:.0f} %" if most else "", right=True, drop=2),
        Field("added time", lambda p: format_seconds(p.seconds), right=True),
    ]
    if step := frontier.step_seconds:
        fields.append(Field("of the step", lambda p: f"{100 * p.seconds / step:.1f} %", right=True, drop=1))
    if any(point.lost for point in points):
        fields.append(Field("lossy by", lambda p: p.lost))
    return page.rows(points, [*fields, Field("", name, drop=3)])


def peers_table(frontier: Frontier, page: Page) -> Table:
    """Draw a row for each peer: measured peak, time beside eager mode, and whether its gradients are right."""
    most = next((one.peak for one in frontier.peers if one.failed is None), 0)
    fields = [
        Field("Peers, measured", lambda one: one.peer.name),
        Field("peak", lambda one: format_bytes(one.peak) if one.failed is None else "", right=True),
        Field(
            "of eager", lambda one: f"{100 * one.peak / most:.0f} %" if most and one.failed is None else "",
            right=True, drop=2,
        ),
        Field("added time", lambda p: "" if p.times is None else f"{100 * (p.times.ratio - 1):+.0f} %", right=True),
        Field("gradients", _gradients),
    ]  # fmt: skip
    return page.rows(frontier.peers, fields)


def why_not(frontier: Frontier) -> list[str]:
    """Give the reason of each peer that did not run."""
    return [f"{one.peer.name} did not run: {printable(one.failed)}" for one in frontier.peers if one.failed is not None]


def _gradients(one: PeerResult) -> str:
    if one.failed is not None:
        return "did not run"
    if one.gradients == "lossy":
        return f"off by {one.error:.2%}"
    return one.gradients if one.worst is None else f"WRONG by {one.worst:.0%}"


def draw(frontier: Frontier) -> Figure:
    """Return the picture: bytes at the peak to the right, seconds upwards."""
    from matplotlib.figure import Figure

    shown = [one for one in frontier.peers if one.times is not None]
    largest = max((frontier.eager_peak, *(point.peak for point in (*frontier.points, *shown))))
    unit, unit_name = unit_of(largest)
    base, how = frontier.step_seconds or 0.0, "predicted: " if shown else ""
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for lossy, label in ((False, "planned"), (True, "planned, lossy")):
        points = [point for point in frontier.points if bool(point.lost) is lossy]
        if points:
            axes.plot([p.peak / unit for p in points], [base + p.seconds for p in points], "o-", label=how + label)
    axes.plot([frontier.eager_peak / unit], [base], "s", color="black", label=f"{how}without a plan")
    for name, look in _LOOKS.items():
        places = [(one.peak / unit, _height(one, base)) for one in shown if _kind(one) == name]
        if places:
            axes.scatter(*zip(*places, strict=True), label=f"measured: {name}", **look)
    if frontier.budget is not None and frontier.budget <= largest:
        axes.axvline(frontier.budget / unit, linestyle="--", color="gray", label="budget")
    axes.set_xlabel(f"{'' if shown else 'predicted '}peak ({unit_name})")
    axes.set_ylabel(f"{'' if shown else 'predicted '}seconds {'of a step' if base else 'added'}")
    axes.set_title(plain(frontier.title))
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _kind(one: PeerResult) -> str:
    return "wrong gradients" if one.wrong else one.peer.group


def _height(one: PeerResult, base: float) -> float:
    """Return seconds on the plans' scale: a measured ratio of the predicted time in eager mode."""
    assert one.times is not None, "only those that ran are shown"
    return base + (one.times.ratio - 1) * (base or one.times.before)
