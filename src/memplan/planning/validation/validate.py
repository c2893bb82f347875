"""Check schedules independently: slow, obvious, and sharing no code with the scheduler and the simulator.

It tracks which memory is live and unchanged since its op: an op that reads only such memory computes the right result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from memplan.errors import ScheduleError
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph, Ref
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.schedule.actions import Action
from memplan.planning.schedule.scheduler import Schedule
from memplan.planning.validation.host_copies import ENDS, check_copies


def validate(
    graph: JointGraph, schedule: Schedule, budget: int | None = None, outside_memory: OutsideMemory | None = None
) -> int:
    """Return the peak of a schedule in bytes. Raises ScheduleError if it is above the budget or wrong."""
    check_copies(schedule)
    return _Walk(graph, schedule, float("inf") if budget is None else budget, outside_memory or OutsideMemory()).walk()


class _Walk:
    """Executes a schedule on sets of live values. Raises ScheduleError at the first action that is not allowed."""

    def __init__(self, graph: JointGraph, plan: Schedule, budget: float, outside_memory: OutsideMemory) -> None:
        self.graph, self.values, self.plan, self.budget = graph, graph.values, plan, budget
        self.outside_memory = outside_memory
        self.tangents, self.gradient_use = {v.id for v in graph.values if v.kind == "tangent"}, plan.choices.gradients
        self.resident = {v.id for v in graph.values if v.base == v.id and v.kind in RESIDENT}
        self.outputs = {graph.values[value].base for value in graph.outputs}
        self.live, self.changed = {*self.resident}, set[int]()
        """Live values, and those whose elements must not be read any more."""
        self.delivered = set[int]()
        """Gradients whose memory the receiver keeps."""
        self.recomputed = {*graph.irreplaceable}
        """Values that were recomputed, and those that must never be, as if they had been."""
        self.ran, self.written, self.returned = set[int](), set[int](), set[int]()
        """Ops that ran for the first time, values that were written, and values whose gradient was returned."""
        self.last_in_order = -1
        """Index of the last op that must not change its place: in the forward pass, random, or with a side effect."""
        # the actions on saved forms that a schedule may have
        allowed = self.allowed = dict[tuple[str, int | None, int | None], tuple[set[int], set[int], int]]()
        """(kind, form, value) of an action -> values that it reads, values that it makes, and bytes of scratch."""
        allowed["receive", None, None] = set[int](), self.tangents, outside_memory.loss_bytes
        for f in graph.forms:
            allowed["store", f.encoded, f.value] = {f.value}, {f.encoded}, f.store_scratch
            if f.can_restore_value:
                allowed["fetch", f.encoded, f.value] = {f.encoded, *f.fetch_operands}, {f.value}, f.fetch_scratch
            for kind in ENDS if f.copy_seconds is not None else ():
                allowed[kind, f.encoded, f.value] = {f.value, f.encoded}, set[int](), 0
        self.level = outside_memory.held_bytes + self.size(self.resident)
        """Bytes that are live."""
        if self.gradient_use.accumulates:  # gradients of earlier steps are live
            trained = [graph.values[of] for of, _ in graph.gradients if graph.values[of].kind == "parameter"]
            self.level += sum(value.contiguous_bytes for value in trained)
        self.peak = self.level
        """The most of these bytes, with what single actions allocate."""

    def walk(self) -> int:
        """Check all actions in order, and the state at the end of each pass; return the peak in bytes."""
        for phase, actions in (("forward", self.plan.forward), ("backward", self.plan.backward)):
            for index, action in enumerate(actions):
                subject = action.value if action.op is None else action.op
                self.place = f"{phase} action {index} ({action.kind} {subject})"
                is_first = (phase, index) == ("backward", 0)
                self.require((action.kind == "receive") == is_first, "tangents come first, once")
                names_no_op = action.op is None and action.overwritten is None
                self.require(action.kind == "run" or names_no_op, "only ops do that")
                self.check_action(action, phase)
                for value in action.frees:
                    self.free(value)
            self.place = f"the end of the {phase} pass"
            if phase == "forward":
                saved = self.live - self.resident - self.outputs
                self.require(saved == {*self.plan.saved} - self.outputs, f"{self.names(saved)} live, not what is saved")
                self.changed |= self.outputs - self.resident - {*self.plan.saved}  # the backward pass does not get them
        must_run = {op.index for op in self.graph.ops if op.makes or op.discarded or op.must_run_once}
        self.require(self.ran == must_run, "not all ran once")
        missing = {*dict(self.graph.mutations)} - self.written | {*dict(self.graph.gradients)} - self.returned
        self.require(not missing, f"the write or the gradient of {self.names(missing)} is missing")
        wrong = self.live ^ (self.resident | self.outputs | self.delivered)
        self.require(not wrong, f"{self.names(wrong)} should have been freed, or should not")
        update_bytes = 0 if self.gradient_use.updates_early else self.outside_memory.update_bytes
        self.allocate((), transient=update_bytes)
        return self.peak

    def check_action(self, action: Action, phase: str) -> None:
        """Check an action by its kind, and apply it to the live values and bytes."""
        value, source = (-1 if number is None else number for number in (action.value, action.source))
        reads, makes, scratch = self.allowed.get((action.kind, action.encoding, action.value), (None, set[int](), 0))
        if action.kind == "run" and action.op is not None:
            self.run(action, self.graph.ops[action.op], phase)
        elif reads is not None and makes.isdisjoint(self.graph.irreplaceable - self.tangents):
            self.check(action, reads, makes)
            self.allocate(makes, transient=scratch)
        elif (action.kind, phase) == ("write", "forward"):
            self.check(action, reads=(self.values[source].base,), makes=())
            is_due = (value, source) in self.graph.mutations and value not in self.written
            self.require(is_due, "not this, or not twice")
            self.written.add(value)
            self.changed.add(self.values[value].base)
        else:
            self.return_gradient(action, value, source, phase)

    def run(self, action: Action, op: GraphOp, phase: str) -> None:
        """Check that an op runs on its operands, once and in an allowed order, or again where it may."""
        op = op.cheaper_recompute if action.recomputed and op.cheaper_recompute else op
        scratch = op.scratch if action.overwritten is None else op.scratch - op.scratch_saved
        makes, idle, reads = {*action.makes}, set[int](), [*op.reads]  # idle: operands that its kernel does not read
        if action.recomputed:
            may = op.phase == "forward" and phase == "backward" and not (op.random or op.must_run_once)
            may = may and self.recomputed.isdisjoint(makes)
            self.require(may, f"{op.target} must not run again here, or so often")
            self.recomputed |= makes
            is_norm = op.target == "aten._native_batch_norm_legit_functional.default"
            # (input, weight, bias, running_mean, running_var, training, ...) -> (output, mean, rstd, new
            # running_mean...)
            if is_norm and op.args[5] is True and makes <= {*op.outputs[:3]}:
                running_statistics = op.args[3:5]
                idle = {self.values[arg.value].base for arg in running_statistics if isinstance(arg, Ref)}
        else:
            self.require(op.phase == phase and op.index not in self.ran, f"{op.target} runs twice, or in another pass")
            self.ran.add(op.index)
            if phase == "forward" or op.random or op.must_run_once:  # `check` finds whether others run too early
                self.require(op.index > self.last_in_order, f"{op.target} is out of its order")
                self.last_in_order = op.index
        if action.encoding is not None:
            forms = [f for f in self.graph.forms if f.encoded == action.encoding and op.index in f.direct_readers]
            forms = [f for f in forms if f.value in reads]
            self.require(bool(forms), f"{op.target} cannot read a kept form of it")
            reads[reads.index(forms[0].value)], scratch = forms[0].encoded, forms[0].direct_reader_scratch
        self.check(action, reads, action.makes, idle)
        self.require(makes <= {*op.makes}, f"{op.target} makes no {self.names(action.makes)}")
        if action.overwritten is not None:
            fits = action.makes[:1] == op.makes[:1] and self.size([action.overwritten]) == self.size(op.makes[:1])
            fits = fits and action.overwritten in {*op.overwrites} & {*reads} - self.tangents
            self.require(fits, f"{op.target} must not write over {self.names([action.overwritten])}")
            self.free(action.overwritten)
        unread_results = {*op.makes} - makes
        self.allocate(makes, transient=op.discarded + scratch + self.size(unread_results))

    def return_gradient(self, action: Action, value: int, gradient: int, phase: str) -> None:
        """Check that ``gradient`` of ``value`` is returned once, and copied if it shares memory or has other
        strides."""
        values, base, is_parameter = self.values, self.values[gradient].base, self.values[value].kind == "parameter"
        updates, adds = is_parameter and self.gradient_use.updates_early, is_parameter and self.gradient_use.accumulates
        known = (action.kind, phase) == ("give", "backward") and (value, gradient) in self.graph.gradients
        self.require(known and value not in self.returned, "there is no such thing to do here, or it is done")
        self.check(action, reads=(base,), makes=())
        shares_memory = sum(values[other].base == base for _, other in self.graph.gradients) > 1
        shares_memory = shares_memory or base in self.resident | self.outputs | self.tangents
        may_stay = adds or not (shares_memory or values[gradient].stride != values[value].stride)
        self.require(action.returns_copy or may_stay, "a gradient that is not its alone must be copied")
        copy_bytes = values[value].contiguous_bytes if action.returns_copy else 0
        update_bytes = self.outside_memory.update_by_parameter.get(value, 0) if updates else 0
        self.allocate((), transient=copy_bytes + update_bytes)
        if not (updates or adds):
            self.level += copy_bytes
            self.delivered |= set[int]() if action.returns_copy else {base}
        self.changed |= self.delivered  # the receiver may change them
        self.changed |= {values[value].base} if updates or values[value].hooked else set[int]()
        self.returned.add(value)

    def check(self, action: Action, reads: Iterable[int], makes: Collection[int], idle: Iterable[int] = ()) -> None:
        """Check that the values that an action reads are live and unchanged, and that its results are not live yet.
        ``reads``, ``makes``: which the action must state; ``idle``: operands that its kernel does not read."""
        self.require({*action.reads} == {*reads} and sorted(action.makes) == sorted({*makes}), "it says otherwise")
        self.require(self.live >= {*reads}, f"{self.names({*reads} - self.live)} is not there to be read")
        changed = self.changed & {*reads} - {*idle}
        self.require(not changed, f"{self.names(changed)} has changed since, or is not saved")
        self.require(self.live.isdisjoint(makes), f"{self.names(self.live & {*makes})} is there already")

    def allocate(self, makes: Collection[int], transient: int) -> None:
        """Make values live, and check the budget. ``transient``: bytes that are freed right after."""
        self.live.update(makes)
        self.level += self.size(makes)
        self.peak = max(self.peak, self.level + transient)
        self.require(self.peak <= self.budget, f"{self.level + transient} bytes live, the budget is {self.budget}")

    def free(self, value: int) -> None:
        """Check that a value may be freed, and free it."""
        stays = value in self.resident or value in self.outputs or value in self.delivered
        is_freeable = value in self.live and not stays
        self.require(is_freeable, f"{self.names([value])} is not there to be freed, or has to stay")
        self.live.remove(value)
        if not self.values[value].kept_by_backward:  # else backward() keeps its memory
            self.level -= self.size([value])

    def size(self, values: Iterable[int]) -> int:
        """Return the bytes of values."""
        return sum(self.values[value].bytes for value in values)

    def names(self, values: Iterable[int]) -> str:
        return ", ".join(self.values[value].name for value in sorted(values)) or "nothing"

    def require(self, holds: bool, otherwise: str) -> None:
        """Raise ScheduleError unless a condition holds. ``otherwise``: the violation, for the message."""
        if not holds:
            raise ScheduleError(f"The schedule is wrong at {self.place}: {otherwise}")
