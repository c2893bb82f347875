"""Report part about the fused kernels of a planned step: number and bytes before and after, and the largest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from memplan._text import printable
from memplan.planning.plan.fusion import Fusion, Group
from memplan.reports.output import Field, Page, name_field, number_field
from memplan.trace.records import HOST

_LEGEND = (
    "bytes: read and written by a kernel in a step. FLOP/byte: products and convolutions, as torch.utils.flop_counter "
    "counts them; pointwise arithmetic counts none. bound: what takes longer on {}."
)


def render(fusion: Fusion, page: Page, top: int = 12) -> Iterator[RenderableType]:
    """Yield the parts of the report as rich renderables, in order.

    Args:
        fusion: the fused kernels of a plan.
        page: width and encoding of the output.
        top: how many kernels to list, those that move most bytes first; 0 for all.
    """
    yield Text("Fused kernels", "bold")
    yield Text(printable(fusion.summary))
    if not fusion.groups:
        return
    groups = sorted(fusion.groups, key=lambda group: -group.bytes)  # stable: equal sizes stay in execution order
    yield ""
    yield page.rows(groups, _FIELDS, top)
    yield Text(_LEGEND.format("a CPU of two cores" if fusion.device == HOST else printable(fusion.device)), "dim")


def _intensity(groups: Sequence[Group]) -> str:
    size, flops = sum(group.bytes for group in groups), sum(group.flops for group in groups)
    return f"{flops / size:.1f}" if flops and size else "-"


_FIELDS = (
    name_field("kernel", lambda group: printable(group.kernel), 20, from_left=False),
    Field("layers", lambda group: ", ".join(map(printable, group.layers)), shrinks_to=12, drop=1),
    number_field("bytes", lambda group: group.bytes),
    Field("FLOP/byte", lambda group: _intensity([group]), _intensity, right=True),
    Field("bound", lambda group: group.bound),
)
