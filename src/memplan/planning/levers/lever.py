"""The one Protocol that says all that the planner needs to know of a lever: a way to use less memory.

Two kinds of levers share it, and each overrides the parts that apply:

* one that keeps *values* in another form between the passes (encode, offload): `forms` says of which values and what
  that takes; `store`, `fetch` and `read_directly` write its calls. Search, schedule, validator and both engines handle
  the forms of any lever, by what the record `memplan.planning.graph.joint_graph.KeptForm` declares;
* one about the whole *step* (in place, accumulate): `decide` reports what it did.

`memplan.planning.levers.registry` lists the levers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from memplan._bytes import format_bytes
from memplan._json import Json
from memplan.devices import Device
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, KeptForm, Value
from memplan.planning.graph.precision import Precision, Save
from memplan.planning.graph.roofline import Work

Grade = Literal["exact", "reordered", "lossy"]
"""What a lever may change of the result: nothing, the order of additions, or more."""

Called = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A call: an op's target, its arguments with Ref in place of tensors, and its keyword arguments, as in GraphOp."""


@dataclass(frozen=True, slots=True)
class Situation:
    """Facts, beside the graph, that decide which forms may be kept."""

    save: Save = "exact"
    """Precision in which values may be kept that are not got back bit for bit."""
    card: Device | None = None
    """Card whose host memory may hold values; None: no memory but the device's own."""


@dataclass(frozen=True, slots=True)
class GradientUse:
    """What a step does with the gradient of a parameter once it is complete. By default it stays until the update."""

    updates: bool = False
    """The optimizer applies it at once: the parameter changes in the backward pass."""
    adds: bool = False
    """It is added to a gradient that is held when the step begins."""

    @property
    def frees(self) -> bool:
        """Return whether it is used up at once, and freed."""
        return self.updates or self.adds

    def held(self, held: bool) -> GradientUse:
        """Return the same for a step at whose beginning gradients are held, or not."""
        return replace(self, adds=held)


STAYS = GradientUse()
"""Gradients stay until the update."""


@dataclass(frozen=True, slots=True)
class Reason:
    """What a lever did in one place, for the plan's table."""

    bytes: int
    """Bytes that it frees from the forward to the backward pass, or of the step."""
    text: str
    """The reason, in a sentence that a person can argue with."""
    details: Mapping[str, Json] = field(default_factory=dict)
    grade: Grade = "exact"


class PlannedStep(Protocol):
    """What a lever may ask about a planned step, to give its reasons."""

    graph: JointGraph

    @property
    def seconds(self) -> Mapping[int, float]:
        """Seconds that each value adds to the step, by id; of several that one op makes again, the first has them."""
        ...

    def is_saved(self, value: int) -> bool:
        """Return whether the value itself is kept between the passes."""
        ...

    def is_recomputed(self, value: int) -> bool:
        """Return whether an op makes the value again in the backward pass."""
        ...

    def needed(self, value: int) -> str:
        """Describe what reads the value in the backward pass; empty where nothing does."""
        ...

    def direct_readers(self, form: KeptForm) -> str:
        """Describe the ops that read the kept form itself; empty where none does."""
        ...

    def freed_after(self, form: KeptForm) -> str:
        """Describe the op after which the value of a copied form is freed."""
        ...

    def fetched_before(self, form: KeptForm) -> str:
        """Describe the op before which the copy back begins."""
        ...

    def waits(self, form: KeptForm) -> float:
        """Return the seconds that the step waits for the copies of a form."""
        ...

    def other_forms(self, form: KeptForm) -> Sequence[KeptForm]:
        """Return what else the same value is kept as."""
        ...

    @property
    def reuses(self) -> Sequence[tuple[str, str, int]]:
        """Return (value whose memory is taken over, result that lies there, bytes)."""
        ...

    @property
    def gradients(self) -> GradientUse:
        """Return what becomes of the parameters' gradients."""
        ...

    @property
    def trained(self) -> Sequence[Value]:
        """Parameters that get a gradient."""
        ...


class Lever(Protocol):
    """A way to use less memory. Subclass it, override what applies, and list an instance in the registry."""

    name: str
    """In choices (`KeptForm.lever`), in saved plans and in the plan's table."""
    verbs: tuple[str, str] = ("store", "fetch")
    """What the two actions of a form are called in a planned step's trace."""
    comments: tuple[str, str] = ("stores", "fetches")
    """What they are called in the program's comments."""
    imports: tuple[str, ...] = ()
    """Lines that a program with its calls needs."""
    option: tuple[str, str] = ("", "")
    """How a lever of the whole step is asked for, and how its absence: in messages."""
    switch: str = ""
    """Field of `memplan.planning.search.search.Heuristics` that turns the lever off; empty: none does."""

    # -- what it changes before anything is chosen

    def rewrite(self, graph: JointGraph, precision: Precision) -> JointGraph:
        """Return the captured graph with ops replaced; most levers leave it."""
        return graph

    # -- to which values it applies

    def why_not(self, graph: JointGraph, value: Value, situation: Situation) -> str:
        """Say why a forward value may not be kept in a form of this lever; empty where it may."""
        return f"{self.name} is about the step, not about single values"

    def forms(self, graph: JointGraph, situation: Situation) -> Iterable[tuple[KeptForm, Value]]:
        """Yield each form that a value may be kept in, and the value that stands for it.

        Ids of these values are given anew by the registry: any number will do. Seconds of a form without a copy are
        set later, from `works` or from a measurement, unless they are given here.
        """
        return ()

    # -- what a form costs

    def works(self, graph: JointGraph, form: KeptForm) -> tuple[Work, Work, Work]:
        """Return the work of storing, of fetching, and what direct readers add: by it, seconds are estimated.

        By default each action reads one form and writes the other.

        On the CPU that `roofline.CPU` describes, large values were packed into bits at 4 to 21 GB/s, unpacked at 11,
        and integers narrowed at 7 and widened at 2 to 3: near enough to its bandwidth.
        """
        value = graph.values[form.value]
        work = Work(0, value.bytes + graph.values[form.kept].bytes, value.dtype)
        return work, work, Work(0, 0, value.dtype)

    # -- how it is written

    def store(self, graph: JointGraph, form: KeptForm) -> Called:
        """Return the call that makes the kept form of the value."""
        raise AssertionError(f"{self.name} keeps no values")

    def fetch(self, graph: JointGraph, form: KeptForm) -> Called:
        """Return the call that makes the value again of the kept form and of ``form.also_reads``."""
        raise AssertionError(f"{self.name} keeps no values")

    def read_directly(self, graph: JointGraph, form: KeptForm, op: GraphOp, *, in_place: bool) -> Called:
        """Return the call of one of ``form.direct`` that reads the kept form.

        ``in_place``: whether its result goes over its first operand.
        """
        raise AssertionError(f"{self.name} has no kept form that ops read")

    def lowered(self) -> Mapping[Any, Callable[..., Any]]:
        """Return, by op of its calls, a function of torch's own ops: what the engine ``inductor`` can fuse.

        An op without one runs as it is.
        """
        return {}

    # -- what is said of it

    def grade(self, form: KeptForm) -> Grade:
        """Return whether the value that is fetched is the one that was stored, bit for bit."""
        return "exact"

    def reason(self, planned: PlannedStep, form: KeptForm) -> Reason:
        """Say what keeping a value in this form frees, and why it is done."""
        graph = planned.graph
        before, after = graph.values[form.value].bytes, graph.values[form.kept].bytes
        needed = planned.needed(form.value)
        text = f"{format_bytes(after)} instead of {format_bytes(before)}" + (f"; {needed}" if needed else "")
        return Reason(max(0, before - after), text, {"kept_bytes": after}, self.grade(form))

    def decide(self, planned: PlannedStep) -> Reason | None:
        """Say what the lever did about the whole step; None where it did nothing."""
        return None

    def counted(self, values: int, host_bytes: int) -> str:
        """Say in a plan's summary how many values are kept in its forms; ``host_bytes`` are in host memory."""
        return f"{values} by {self.name}" if values else ""

    def missing(self, values: str, device: str) -> tuple[str, str, str]:
        """Say what is wrong, expected and to be done where a plan has forms of so many values that the step cannot."""
        return (
            f"The plan keeps {values} by {self.name}, which is not possible on {device}",
            "a plan for where the step is to run",
            "Plan this step anew",
        )
