"""Part of reports about the fused kernels of a planned step: number and bytes before and after, and the largest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memplan.planning.plan.fusion import Fusion, Group
from memplan.reports.document import Field, Line, Section, name_field, number_field, table_of
from memplan.trace.records import HOST

_LEGEND = (
    "bytes: read and written by a kernel in a step. FLOP/byte: products and convolutions, as torch.utils.flop_counter "
    "counts them; pointwise arithmetic counts none. bound: what takes longer on {}."
)


def sections(fusion: Fusion, top: int = 12) -> Iterator[Section]:
    """Yield a summary, and a table of the ``top`` kernels that move most bytes, 0 for all."""
    yield Section((fusion.summary,), "Fused kernels")
    if fusion.groups:
        groups = sorted(fusion.groups, key=lambda group: -group.bytes)  # stable: equal sizes stay in execution order
        legend = _LEGEND.format("a CPU of two cores" if fusion.device == HOST else fusion.device)
        yield Section((table_of(groups, _FIELDS, top), Line(legend, "dim")))


def _intensity(groups: Sequence[Group]) -> str:
    """Return the FLOPs for each byte that these kernels move together; "-" if they have none."""
    size, flops = sum(group.bytes for group in groups), sum(group.flops for group in groups)
    return f"{flops / size:.1f}" if flops and size else "-"


_FIELDS = (
    name_field("kernel", lambda group: group.kernel, shrinks_to=20, from_left=False),
    Field("layers", lambda group: ", ".join(group.layers), shrinks_to=12, drop=1),
    number_field("bytes", lambda group: group.bytes),
    Field("FLOP/byte", lambda group: _intensity([group]), _intensity, right=True),
    Field("bound", lambda group: group.bound),
)
