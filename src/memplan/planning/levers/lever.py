"""Protocol of a lever, a technique to use less memory: all that the planner knows about it.

There are two kinds of levers, and each overrides the methods that apply:

* those that save *values* in another encoding between the passes (encode, offload): `forms` lists the values and costs;
  `store`, `fetch` and `read_directly` return the calls. Search, schedule, validator and both engines handle the
  encodings of any lever from their declaration, `memplan.planning.graph.joint_graph.SavedForm`;
* those about the whole *step* (in place, accumulate): `decide` reports what they changed.

`memplan.planning.levers.registry` lists the levers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from memplan._bytes import format_bytes
from memplan._json import Json
from memplan.devices import Device
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, SavedForm, Value
from memplan.planning.graph.precision import Precision, Save
from memplan.planning.graph.roofline import Work

Grade = Literal["exact", "reordered", "lossy"]
"""How a lever may change results: not at all, by the order of additions, or by more."""

Called = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A call: an op's target, its arguments with Ref in place of tensors, and its keyword arguments, as in GraphOp."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Settings that decide which encodings are allowed."""

    save: Save = "exact"
    """Lowest precision in which values may be saved."""
    card: Device | None = None
    """Card that may offload values to host memory; None: no offloading."""


@dataclass(frozen=True, slots=True)
class GradientUse:
    """Use of a parameter's gradient once it is complete. By default it stays allocated until the update."""

    updates_early: bool = False
    """The optimizer applies it at once: the parameter changes in the backward pass."""
    accumulates: bool = False
    """It is added to the parameter's ``.grad``, the gradient of earlier micro-batches, which exists during the whole
    step."""

    @property
    def frees(self) -> bool:
        """Whether the gradient is freed as soon as it is complete."""
        return self.updates_early or self.accumulates

    def with_accumulation(self, held: bool) -> GradientUse:
        """Return this use with ``accumulates``: whether gradients of earlier micro-batches exist when the step
        begins."""
        return replace(self, accumulates=held)


KEPT_UNTIL_UPDATE = GradientUse()
"""Gradients stay allocated until the update."""


@dataclass(frozen=True, slots=True)
class Reason:
    """What a lever did for a value or the step, for the plan's table."""

    bytes: int
    """Bytes that it frees, between the passes or of the whole step."""
    text: str
    """The reason, in a sentence for the user."""
    details: Mapping[str, Json] = field(default_factory=dict)
    grade: Grade = "exact"


class PlannedStep(Protocol):
    """Facts about a planned step from which levers give their reasons."""

    graph: JointGraph

    @property
    def added_seconds(self) -> Mapping[int, float]:
        """Seconds that each recomputed value adds to the step, by id; counted for the first result of an op."""
        ...

    def is_saved(self, value: int) -> bool:
        """Return whether the value itself is saved between the passes."""
        ...

    def is_recomputed(self, value: int) -> bool:
        """Return whether the backward pass recomputes the value."""
        ...

    def value_readers(self, value: int) -> str:
        """Describe what reads the value in the backward pass, empty if nothing does."""
        ...

    def encoding_readers(self, form: SavedForm) -> str:
        """Describe the ops that read the encoding itself, empty if none does."""
        ...

    def freed_after(self, form: SavedForm) -> str:
        """Describe the op after which an offloaded value is freed."""
        ...

    def fetched_before(self, form: SavedForm) -> str:
        """Describe the op before which the copy to the device begins."""
        ...

    def wait_seconds(self, form: SavedForm) -> float:
        """Return the seconds that the step waits for the copies of an offloaded value."""
        ...

    def other_forms(self, form: SavedForm) -> Sequence[SavedForm]:
        """Return the other encodings of the same value."""
        ...

    @property
    def overwritten_values(self) -> Sequence[tuple[str, str, int]]:
        """Return (overwritten value, result, bytes) of each in-place op."""
        ...

    @property
    def moved_ops(self) -> Sequence[GraphOp]:
        """Return the backward ops that do not run where they were captured, as few as explain the order."""
        ...

    @property
    def freed_by_order(self) -> int:
        """Return the bytes by which the peak would be higher in the captured order of ops."""
        ...

    @property
    def gradient_use(self) -> GradientUse:
        """Return what the step does with the parameters' gradients."""
        ...

    @property
    def packed_bytes(self) -> int:
        """Return the bytes of the low halves of master weights, of an optimizer `memplan.PackedMasters`."""
        ...

    @property
    def moment_bytes_saved(self) -> int:
        """Return the bytes by which moments in 8 bits make the optimizer's state smaller; 0 for other optimizers."""
        ...

    @property
    def trained_parameters(self) -> Sequence[Value]:
        """Parameters that get a gradient."""
        ...


class Lever(Protocol):
    """A technique to use less memory. Subclass it, override what applies, and add an instance to the registry."""

    name: str
    """Name in choices (`SavedForm.lever`), in saved plans and in the plan's table."""
    verbs: tuple[str, str] = ("store", "fetch")
    """Names of storing and fetching an encoding in a planned step's trace."""
    comments: tuple[str, str] = ("stores", "fetches")
    """The same verbs in the program's comments."""
    imports: tuple[str, ...] = ()
    """Import statements that a program with its calls needs."""
    option: tuple[str, str] = ("", "")
    """For a lever of the whole step: the options that turn it on and off, in messages."""
    switch: str = ""
    """Field of `memplan.planning.search.search.Heuristics` that turns the lever off; empty if there is none."""

    # -- rewrites before the search

    def rewrite(self, graph: JointGraph, precision: Precision) -> JointGraph:
        """Return the captured graph with ops replaced, unchanged by default."""
        return graph

    # -- to which values it applies

    def why_not(self, graph: JointGraph, value: Value, situation: Situation) -> str:
        """Return the reason why a forward value has no encoding of this lever, empty if it may have one."""
        return f"{self.name} is about the step, not about single values"

    def forms(self, graph: JointGraph, situation: Situation) -> Iterable[tuple[SavedForm, Value]]:
        """Yield each encoding that a value may be saved in, and the encoded value.

        The registry assigns the ids of encoded values. The seconds to encode and decode are set later, from `works` or
        from a measurement; those of a copy to the host follow from the link's bandwidth, and are set here.
        """
        return ()

    # -- costs

    def works(self, graph: JointGraph, form: SavedForm) -> tuple[Work, Work, Work]:
        """Return the work of storing, of fetching, and of direct readers beyond the original ops, to estimate seconds.

        By default each action reads the value and writes the encoding, or the reverse.

        On the CPU that `roofline.CPU` describes, large values were packed into bits at 4 to 21 GB/s, unpacked at 11,
        and integers narrowed at 7 and widened at 2 to 3: near enough to its bandwidth.
        """
        value = graph.values[form.value]
        work = Work(flops=0, bytes=value.bytes + graph.values[form.encoded].bytes, rate_dtype=value.dtype)
        return work, work, Work(flops=0, bytes=0, rate_dtype=value.dtype)

    # -- calls

    def store(self, graph: JointGraph, form: SavedForm) -> Called:
        """Return the call that encodes the value."""
        raise AssertionError(f"{self.name} keeps no values")

    def fetch(self, graph: JointGraph, form: SavedForm) -> Called:
        """Return the call that decodes the value from the encoding and ``form.fetch_operands``."""
        raise AssertionError(f"{self.name} keeps no values")

    def read_directly(self, graph: JointGraph, form: SavedForm, op: GraphOp, *, in_place: bool) -> Called:
        """Return the call by which ``op``, of those in ``form.direct_readers``, reads the encoding instead of the
        value.

        ``in_place``: whether it writes its result over its first operand.
        """
        raise AssertionError(f"{self.name} has no kept form that ops read")

    def lowered(self) -> Mapping[Any, Callable[..., Any]]:
        """Return decompositions into torch's ops, by op, of the ops that `store`, `fetch` and `read_directly` call: the
        engine ``inductor`` fuses these. An op without a decomposition runs as it is."""
        return {}

    # -- reports

    def grade(self, form: SavedForm) -> Grade:
        """Return ``exact`` if decoding restores the value bit for bit."""
        return "exact"

    def reason(self, planned: PlannedStep, form: SavedForm) -> Reason:
        """Describe what saving a value in this encoding frees, and why it is needed."""
        graph = planned.graph
        value_bytes, encoded_bytes = graph.values[form.value].bytes, graph.values[form.encoded].bytes
        readers = planned.value_readers(form.value)
        text = f"{format_bytes(encoded_bytes)} instead of {format_bytes(value_bytes)}"
        text += f"; {readers}" if readers else ""
        return Reason(max(0, value_bytes - encoded_bytes), text, {"kept_bytes": encoded_bytes}, self.grade(form))

    def decide(self, planned: PlannedStep) -> Reason | None:
        """Describe what the lever changed in the whole step, None if nothing."""
        return None

    def counted(self, values: int, host_bytes: int) -> str:
        """Return the summary's part on encoded values, of which ``host_bytes`` are in host memory."""
        return f"{values} by {self.name}" if values else ""

    def missing(self, values: str, device: str) -> tuple[str, str, str]:
        """Return (problem, expected, remedy) for a plan whose encodings the device does not support. ``values``: their
        number, as text; ``device``: its name."""
        return (
            f"The plan keeps {values} by {self.name}, which is not possible on {device}",
            "a plan for where the step is to run",
            "Plan this step anew",
        )
