"""Offload values to host memory between the passes, by asynchronous copies (see `schedule.host_copies`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from memplan._bytes import format_bytes
from memplan._text import format_seconds
from memplan.planning.graph import roofline
from memplan.planning.graph.joint_graph import JointGraph, Ref, SavedForm, Value
from memplan.planning.graph.op_schema import is_dense, itemsize
from memplan.planning.levers.lever import Called, Lever, PlannedStep, Reason, Situation

SMALLEST_OFFLOADED_BYTES = 1 << 20
"""Smallest value in bytes that is offloaded: for smaller ones calls and events take as long as the copy."""


@dataclass(frozen=True)
class Offload(Lever):
    """Move values to host memory between the passes, for steps on a card whose link to the host has a known speed."""

    smallest_offloaded_bytes: int = SMALLEST_OFFLOADED_BYTES
    """Smallest value in bytes that is offloaded."""

    name = "offload"
    comments = ("offloads", "fetches")
    imports = ("from memplan.planning.ops import host_copies as transfers",)
    switch = "offload"

    def why_not(self, graph: JointGraph, value: Value, situation: Situation) -> str:
        """Return the reason why a value may not be offloaded, empty if it may."""
        if situation.card is None or situation.card.link is None:
            return "the step runs on no card whose link to host memory is known"
        if value.bytes < self.smallest_offloaded_bytes:
            return f"it is smaller than {format_bytes(self.smallest_offloaded_bytes)}"
        if not is_dense(value) or value.bytes != prod(value.shape) * itemsize(value.dtype):
            return "its memory has gaps"
        if value.id in graph.irreplaceable:
            return "a call holds its very memory"
        if value.id in {graph.base(output) for output in graph.outputs}:
            return "the model returns it"
        if value.id in {graph.base(source) for _, source in graph.mutations}:
            return "the forward pass writes it into something"
        return ""

    def forms(self, graph: JointGraph, situation: Situation) -> Iterator[tuple[SavedForm, Value]]:
        """Yield (the form in host memory, its value) for each value that may be offloaded, as computed."""
        if situation.card is None or situation.card.link is None:
            return
        rates = roofline.rates_of(situation.card)
        link_bandwidth = situation.card.link * roofline.LINK_SHARE  # bytes/s
        read = {value for op in graph.backward_ops for value in op.reads}
        read |= {value for op in graph.forward_ops for value in op.reads}  # to recompute other values
        for op in graph.forward_ops:
            for value_id in op.makes:
                value = graph.values[value_id]
                if value_id not in read or self.why_not(graph, value, situation):
                    continue
                host = replace(value, name=f"{value.name}_host", kind="host", bytes=0, op=None)
                # the card's memory is read when the value is stored, written when it is fetched
                pass_over_value = roofline.Work(flops=0, bytes=value.bytes, rate_dtype=value.dtype)
                form = SavedForm(
                    self.name, value.id, encoded=-1, store_seconds=2 * rates.seconds(pass_over_value),
                    copy_seconds=value.bytes / link_bandwidth,
                )  # fmt: skip
                yield form, host

    def store(self, graph: JointGraph, form: SavedForm) -> Called:
        """Return the call that begins the copy to host memory. It returns the copy, and a handle to wait for."""
        return "transfers.store", (Ref(form.value),), {}

    def fetch(self, graph: JointGraph, form: SavedForm) -> Called:
        """Return the call that begins the copy to the device. It returns the value, and a handle to wait for."""
        return "transfers.fetch", (Ref(form.encoded),), {}

    def counted(self, values: int, host_bytes: int) -> str:
        """Return the number of offloaded values and their bytes in host memory."""
        return f"{values} offloaded ({format_bytes(host_bytes)} of host memory)" if values else ""

    def missing(self, values: str, device: str) -> tuple[str, str, str]:
        """Return the error message for a device without separate host memory."""
        return (
            f"The plan keeps {values} in host memory while the step runs on {device}",
            "a plan for where the step is to run: on the CPU there is no other memory",
            "Plan this step anew, or for that card without offloading: heuristics=Heuristics(offload=False)",
        )

    def reason(self, planned: PlannedStep, form: SavedForm) -> Reason:
        """Describe when the value is copied and how long the step waits; other encodings stay on the device."""
        values, wait, copy_seconds = planned.graph.values, planned.wait_seconds(form), form.copy_seconds or 0.0
        value_bytes, others = values[form.value].bytes, planned.other_forms(form)
        staying_bytes = sum(values[other.encoded].bytes for other in others)
        parts = [
            f"copied to host memory in {format_seconds(copy_seconds)}, freed after {planned.freed_after(form)}",
            f"fetched before {planned.fetched_before(form)}; {planned.value_readers(form.value)}",
            f"the step waits {format_seconds(wait)} for it" if wait else "the step waits for neither copy",
        ]
        if staying_bytes:
            parts.append(f"{format_bytes(staying_bytes)} of it stay ({', '.join(other.codec for other in others)})")
        pinned = 1 << (value_bytes - 1).bit_length()  # CachingHostAllocator.h: pinned blocks are powers of two
        details = {"copy_seconds": copy_seconds, "waits": wait, "host_bytes": pinned}
        return Reason(max(0, value_bytes - staying_bytes), "; ".join(parts), details)
