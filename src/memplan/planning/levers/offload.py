"""Values that wait for the backward pass in host memory: which may, when each is copied, and what the step waits.

A copy runs beside the ops, on a stream of its own; of each direction there is one queue, first come, first served.

* Out: the copy begins when the value is made. Its memory is freed after the first op, from the last one of the forward
  pass that reads the value on, by whose end the copy is done: by the seconds of the graph's ops, with what is in the
  queue before it. At the end of the forward pass the step waits for what is not done.
* Back: the value's memory is taken, and the copy begins, as late as it can to be done when the value is first needed,
  with what has to be copied after it. At the beginning of the backward pass that may be too late: then the step waits
  where the value is needed.

What is made again meanwhile, encoded or decoded is not in these seconds. It takes time, too, so that a copy is done
earlier than planned, seen from the ops, and never later. What the step really waits is counted with it (`waits`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from memplan._bytes import format_bytes
from memplan._text import format_seconds
from memplan.planning.graph import roofline
from memplan.planning.graph.joint_graph import JointGraph, KeptForm, Ref, Value
from memplan.planning.graph.op_schema import is_dense, itemsize
from memplan.planning.levers.lever import Called, Lever, PlannedStep, Reason, Situation

WORTHWHILE = 1 << 20
"""Bytes that a value must at least have: calls and events of a smaller one take as long as its copy."""


@dataclass(frozen=True)
class Offload(Lever):
    """Let values wait for the backward pass in host memory. Only a card has one, and only a link of known speed."""

    least: int = WORTHWHILE
    """Bytes that a value must have."""

    name = "offload"
    comments = ("offloads", "fetches")
    imports = ("from memplan.planning.ops import host_copies as transfers",)
    switch = "offload"

    def why_not(self, graph: JointGraph, value: Value, situation: Situation) -> str:
        """Say why a value may not wait in host memory; empty where it may."""
        if situation.card is None or situation.card.link is None:
            return "the step runs on no card whose link to host memory is known"
        if value.bytes < self.least:
            return f"it is smaller than {format_bytes(self.least)}"
        if not is_dense(value) or value.bytes != prod(value.shape) * itemsize(value.dtype):
            return "its memory has gaps"
        if value.id in graph.irreplaceable:
            return "a call holds its very memory"
        if value.id in {graph.base(one) for one in graph.outputs}:
            return "the model returns it"
        if value.id in {graph.base(source) for _, source in graph.mutations}:
            return "the forward pass writes it into something"
        return ""

    def forms(self, graph: JointGraph, situation: Situation) -> Iterator[tuple[KeptForm, Value]]:
        """Yield the values that may be offloaded, in the order in which they are made."""
        if situation.card is None or situation.card.link is None:
            return
        rates, link = roofline.rates_of(situation.card), situation.card.link * roofline.LINK_SHARE
        needed = {value for op in graph.backward_ops for value in op.reads}
        needed |= {value for op in graph.forward_ops for value in op.reads}  # so that another one can be made again
        for op in graph.forward_ops:
            for value in map(graph.values.__getitem__, op.makes):
                if value.id not in needed or self.why_not(graph, value, situation):
                    continue
                host = replace(value, name=f"{value.name}_host", kind="host", bytes=0, op=None)
                copied = roofline.Work(0, value.bytes, value.dtype)  # out of the card's memory, and once into it
                taken = 2 * rates.seconds(copied)
                yield KeptForm(self.name, value.id, -1, store_seconds=taken, copy_seconds=value.bytes / link), host

    def store(self, graph: JointGraph, form: KeptForm) -> Called:
        """Return the call that begins the copy to host memory."""
        return "transfers.store", (Ref(form.value),), {}

    def fetch(self, graph: JointGraph, form: KeptForm) -> Called:
        """Return the call that begins the copy back."""
        return "transfers.fetch", (Ref(form.kept),), {}

    def counted(self, values: int, host_bytes: int) -> str:
        """Say how many values wait in host memory, and how much of it they take."""
        return f"{values} offloaded ({format_bytes(host_bytes)} of host memory)" if values else ""

    def missing(self, values: str, device: str) -> tuple[str, str, str]:
        """Say that the step runs where there is no host memory to wait in."""
        return (
            f"The plan keeps {values} in host memory while the step runs on {device}",
            "a plan for where the step is to run: on the CPU there is no other memory",
            "Plan this step anew, or for that card without offloading: heuristics=Heuristics(offload=False)",
        )

    def reason(self, planned: PlannedStep, form: KeptForm) -> Reason:
        """Say when the value is copied and what the step waits for it; where some ops read another form, that one is
        there meanwhile."""
        values, wait, copy_seconds = planned.graph.values, planned.waits(form), form.copy_seconds or 0.0
        size, others = values[form.value].bytes, planned.other_forms(form)
        smaller = sum(values[other.kept].bytes for other in others)
        parts = [
            f"copied to host memory in {format_seconds(copy_seconds)}, freed after {planned.freed_after(form)}",
            f"fetched before {planned.fetched_before(form)}; {planned.needed(form.value)}",
            f"the step waits {format_seconds(wait)} for it" if wait else "the step waits for neither copy",
        ]
        if smaller:
            parts.append(f"{format_bytes(smaller)} of it stay ({', '.join(other.how for other in others)})")
        details = {"copy_seconds": copy_seconds, "waits": wait, "host_bytes": size}
        return Reason(max(0, size - smaller), "; ".join(parts), details)
