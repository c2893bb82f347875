"""What fusion brings a planned step: kernels and bytes before and after, and a table of what moves most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from memplan._bytes import format_bytes
from memplan._text import printable
from memplan.planning.plan.fusion import Fusion, Group
from memplan.reports.columns import Column
from memplan.reports.output import Page
from memplan.trace.records import HOST

_LEGEND = (
    "bytes: read and written by a kernel in a step. FLOP/byte: products and convolutions, as torch.utils.flop_counter "
    "counts them; pointwise arithmetic counts none. bound: what takes longer on {}."
)
_HEADERS = ("kernel", "layers", "bytes", "FLOP/byte", "bound")


def render(fusion: Fusion, page: Page, top: int = 12) -> Iterator[RenderableType]:
    """The parts of the report as rich renderables, in order.

    Args:
        fusion: what to print.
        page: where to.
        top: how many kernels to list, those that move most first; 0 for all.
    """
    yield Text("Fused kernels", "bold")
    yield Text(printable(fusion.summary))
    if not fusion.groups:
        return
    groups = sorted(fusion.groups, key=lambda group: -group.bytes)  # of the same size in the order in which they run
    shown = groups[:top] if top else groups
    left = groups[len(shown) :]
    rows = [*map(_row, shown), *([_rest(left)] if left else [])]
    kernel, layers, size, intensity, bound = (tuple(row[at] for row in rows) for at in range(len(_HEADERS)))
    yield ""
    yield page.table(
        [
            Column(_HEADERS[0], kernel, shrinks_to=20),
            Column(_HEADERS[1], layers, shrinks_to=12, drop=1),
            Column(_HEADERS[2], size, right=True),
            Column(_HEADERS[3], intensity, right=True),
            Column(_HEADERS[4], bound),
        ]
    )
    yield Text(_LEGEND.format("a CPU of two cores" if fusion.device == HOST else printable(fusion.device)), "dim")


def _row(group: Group) -> tuple[str, ...]:
    intensity = f"{group.intensity:.1f}" if group.flops else "-"
    layers = ", ".join(map(printable, group.layers))
    return printable(group.kernel), layers, format_bytes(group.bytes), intensity, group.bound


def _rest(groups: Sequence[Group]) -> tuple[str, ...]:
    size, flops = sum(group.bytes for group in groups), sum(group.flops for group in groups)
    intensity = f"{flops / size:.1f}" if flops and size else "-"
    return f"... {len(groups)} more", "", format_bytes(size), intensity, ""
