"""Turn a schedule into a trace, so that planned and recorded steps go through the same simulator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from memplan.planning.capture import opaque_calls
from memplan.planning.graph.joint_graph import RESIDENT, Kind, Value, peak_of
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.levers.registry import find
from memplan.planning.schedule.actions import Action
from memplan.planning.schedule.byte_levels import ActionBytes
from memplan.planning.schedule.scheduler import Schedule
from memplan.simulation.allocator.allocator import CachingAllocator
from memplan.simulation.allocator.occupied import Begin
from memplan.simulation.simulate import simulate, simulate_from
from memplan.simulation.timeline import Timeline
from memplan.trace.records import Cause, Op, Operand, Phase, Storage
from memplan.trace.semantics.cuda.results import ORDER as RESULT_ORDER
from memplan.trace.trace import Trace

_CAUSES: dict[Kind, Cause] = {
    "parameter": "weight",
    "buffer": "buffer",
    "constant": "buffer",
    "input": "input",
    "tangent": "activation_gradient",
}


def timeline_of(schedule: Schedule, outside_memory: OutsideMemory | None = None) -> Timeline:
    """Simulate a planned step: its bytes over time. On a card, from the segments in which its tensors lie already."""
    outside_memory = outside_memory or OutsideMemory()
    tracer, home = _Tracer(schedule, outside_memory), outside_memory.home
    trace = tracer.trace()
    if home.card is None:
        return simulate(trace)
    occupied = home.occupied
    begin = None if occupied is None else Begin(occupied, tracer.addresses_of_storages)
    return simulate_from(trace, begin, home.allocator)


def trace_of(schedule: Schedule, outside_memory: OutsideMemory | None = None) -> Trace:
    """Return a planned step as a Trace: resident memory is allocated first, then the schedule is the only step."""
    return _Tracer(schedule, outside_memory or OutsideMemory()).trace()


def reserved_bytes(schedule: Schedule, outside_memory: OutsideMemory) -> int:
    """Return the bytes that a card's caching allocator reserves in a planned step: `Timeline.peak_reserved` of
    `timeline_of`, in half the time, as nothing else is recorded."""
    allocations = _Allocations(schedule, outside_memory)
    allocations.run()
    return allocations.allocator.reserved - allocations.others


@dataclass
class _StorageEntry:
    """A storage that may not be freed yet."""

    bytes: int
    cause: Cause
    allocated: int
    """Tick of its allocation."""
    value: Value | None
    op: int | None
    """Index of the op in the trace that allocates it; None if no op does."""
    freed: int | None = None
    """Tick of its free."""
    name: str = ""


class _Tracer:
    """Runs the actions of a schedule as a recording would see them: allocations, frees and ops, in ticks."""

    def __init__(self, schedule: Schedule, outside_memory: OutsideMemory) -> None:
        self.schedule, self.graph, self.outside_memory = schedule, schedule.graph, outside_memory
        self.device = outside_memory.home.target.name
        """Name of the device."""
        self.bytes = ActionBytes(schedule, outside_memory)
        """Computes what each action allocates."""
        self.gradient_paths = {
            self.graph.base(gradient): self.graph.values[of].path
            for of, gradient in self.graph.gradients
            if self.graph.values[of].kind == "parameter"
        }
        """By gradient of a parameter: the parameter's name."""
        self.saved = set(schedule.saved)
        """Values that the forward pass saves."""
        ops_that_run = {action.op for action in (*schedule.forward, *schedule.backward)}
        self.unallocated_workspaces = {
            op: size for op, size in outside_memory.workspace_by_op.items() if op in ops_that_run
        }
        """Bytes of libraries' workspaces that are not allocated yet, by the op that will."""
        self.tick = 0
        """Allocations and frees so far."""
        self.entries: list[_StorageEntry] = []
        """All storages, in the order of their allocation."""
        self.entry_of: dict[int, int] = {}
        """By value that owns memory: the index of its storage in ``entries``."""
        self.ops: list[Op] = []
        self.traced_op_of: dict[int, int] = {}
        """Index in the trace of the first run of an op, by op of the graph."""
        self.addresses_of_storages: dict[int, int] = {}
        """Addresses of the storages that lie in the card's segments before the step, by their index in ``entries``."""

    def run(self) -> int:
        """Run all actions, and return the tick at which the step begins."""
        self._allocate_resident()
        begin = self.tick
        for action in self.schedule.forward:
            self._run_action(action, "forward")
        for action in self.schedule.backward:
            self._run_action(action, "backward")
        if self.outside_memory.update_bytes and not self.schedule.choices.gradients.updates_early:
            start = self.tick
            self._allocate_temporary(self.outside_memory.update_bytes, len(self.ops))
            self._add_op("optimizer.step", "optimizer", start)
        return begin

    def trace(self) -> Trace:
        """Build the trace of all actions."""
        begin = self.run()
        storages: list[Storage] = []
        for number, entry in enumerate(self.entries):
            dtype, shape = ("", ()) if entry.value is None else (entry.value.dtype, entry.value.shape)
            storages.append(Storage(
                number, entry.bytes, entry.cause, entry.allocated, entry.freed, entry.op, dtype, shape, self.device,
                entry.name,
            ))  # fmt: skip
        return Trace(
            origin="recorded", device=self.device, torch=torch.__version__, ops=tuple(self.ops),
            storages=tuple(storages), layers=(), steps=(begin,), end=self.tick,
        )  # fmt: skip

    def _allocate_resident(self) -> None:
        """Allocate the storages that exist during the whole step: inputs, weights, and memory outside of the graph."""
        for value in self.graph.values:
            if value.kind in RESIDENT and not value.is_view:
                self.entry_of[value.id] = self._allocate_before(value)
        if self.schedule.choices.gradients.accumulates:
            for of, _ in self.graph.gradients:
                value = self.graph.values[of]
                if value.kind == "parameter":
                    self._allocate(value.contiguous_bytes, "parameter_gradient", value=value, op=None, name=value.path)
        for cause, size in self.outside_memory.by_cause().items():
            allocated_by_ops = sum(self.unallocated_workspaces.values()) if cause == "workspace" else 0
            if size > allocated_by_ops:
                self._allocate(size - allocated_by_ops, cause, value=None, op=None, name="")

    # -- storages

    def _allocate_before(self, value: Value) -> int:
        """Allocate the storage of a resident value, where it lies in the card's segments already or anew, and return
        its index in ``entries``."""
        storage = self._allocate(value.bytes, _CAUSES[value.kind], value=value, op=None, name=value.path)
        address = self.outside_memory.addresses.get(value.id)
        if address is not None:
            self.addresses_of_storages[storage] = address
        return storage

    def _allocate(self, size: int, cause: Cause, value: Value | None, op: int | None, name: str = "") -> int:
        """Allocate a storage and return its index in ``entries``. ``op``: in the trace; None if resident."""
        self.tick += 1
        self.entries.append(_StorageEntry(size, cause, self.tick, value, op, name=name))
        return len(self.entries) - 1

    def _release(self, entry: int) -> None:
        """Free a storage. ``entry``: its index in ``entries``."""
        self.tick += 1
        self.entries[entry].freed = self.tick

    def _allocate_temporary(
        self, size: int, op: int, requests: Sequence[int] = (), library_workspace: int = 0,
        allocated_before: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Allocate a workspace of an op and free it again.

        Args:
            size: bytes of the workspace.
            op: index in the trace.
            requests: as `GraphOp.requests`: what the kernel allocates and frees. Their peak is ``size``, else a single
                allocation is assumed.
            library_workspace: bytes that a library allocates after the first request, and does not free.
            allocated_before: storages of the first requests, if they are allocated already.
        """
        if peak_of(requests) != size or not requests:
            requests = (size, -1) if size else ()  # allocate, then free allocation 0
        allocated = list(allocated_before)
        for request in requests[len(allocated_before) :]:
            if request < 0:  # -1 - n frees allocation n
                self._release(allocated[-1 - request])
                continue
            allocated.append(self._allocate(request, "temporary", value=None, op=op))
            if library_workspace:
                self._allocate(library_workspace, "workspace", value=None, op=op)
                library_workspace = 0
        if library_workspace:
            self._allocate(library_workspace, "workspace", value=None, op=op)

    def _allocate_value(self, value: int, op: int, phase: Phase, into: int | None) -> None:
        """Allocate the storage of a value that an op makes, with its cause. ``into`` is the value whose storage it
        takes over, None for a new storage."""
        tensor = self.graph.values[value]
        maker, name = self.graph.maker.get(value), ""
        cause: Cause = "saved" if phase == "forward" and value in self.saved else "activation"
        if value in self.gradient_paths:
            cause, name = "parameter_gradient", self.gradient_paths[value]
        elif tensor.kind == "tangent" or (phase == "backward" and maker is not None and maker.phase == "backward"):
            cause = "activation_gradient"
        if into is None:
            self.entry_of[value] = self._allocate(tensor.bytes, cause, tensor, op, name)
            return
        entry = self.entry_of[value] = self.entry_of.pop(into)
        if cause in ("parameter_gradient", "saved"):  # the final use names the storage
            self.entries[entry].cause, self.entries[entry].name = cause, name

    # -- actions

    def _run_action(self, action: Action, phase: Phase) -> None:
        """Add an action to the trace as an op: allocations of its results and workspace, then its frees.

        Results that nothing reads are freed as soon as the op returns. Negative temporary bytes, of an op that needs
        less in place (`GraphOp.scratch_saved`), mean that it frees its operands before it allocates its results.
        """
        start, op = self.tick, len(self.ops)
        transient_bytes = self.bytes.temporary_bytes(action)
        frees_operands_first = transient_bytes < 0
        if frees_operands_first:
            transient_bytes += self._free(action)
        requests, library_workspace, unread_entries = tuple[int, ...](), 0, list[int]()
        if action.kind == "run" and action.op is not None:
            if action.encoding is None:
                requests = action.called_op(self.graph).requests
            else:  # it reads an encoding
                requests = self.graph.form_by_encoded[action.encoding].direct_reader_requests
            library_workspace = self.unallocated_workspaces.pop(action.op, 0)
        unread_bytes = self.bytes.unread_bytes(action) if action.kind == "run" else 0
        allocated_before = list[int]()
        if requests and peak_of(requests) == transient_bytes - unread_bytes and action.encoding is None:
            before_results = requests[: action.called_op(self.graph).requests_before_results]
            allocated_before = [self._allocate(request, "temporary", None, op) for request in before_results]
        needs_order = bool(unread_bytes or self._result_order(action))
        if needs_order and not frees_operands_first and transient_bytes >= unread_bytes:
            unread_entries = self._allocate_results(action, op, phase)
            transient_bytes -= unread_bytes
        else:
            for position, value in enumerate(self._without_host_values(action.makes)):
                self._allocate_value(value, op, phase, action.overwritten if position == 0 else None)
        self._allocate_temporary(transient_bytes, op, requests, library_workspace, allocated_before)
        for entry in unread_entries:
            self._release(entry)
        copy_bytes = self.bytes.gradient_copy_bytes(action)
        if copy_bytes and action.value is not None:
            differentiated = self.graph.values[action.value]
            self._allocate(copy_bytes, "parameter_gradient", differentiated, op, differentiated.path)
        if not frees_operands_first:
            self._free(action)
        self._add_op(self._op_name(action), phase, start, action)

    def _allocate_results(self, action: Action, op: int, phase: Phase) -> list[int]:
        """Allocate all results of an op in the order in which its kernel does, and return the storages of those that
        nothing reads, in the order of the results. ``op``: index in the trace."""
        called, unread_entries = action.called_op(self.graph), dict[int, int]()  # by position of the result
        made = self._without_host_values(action.makes)
        discarded_bytes = dict(enumerate(called.discarded_by_output))
        if sum(discarded_bytes.values()) != called.discarded:  # those of each result are not known
            discarded_bytes = {}
        for position in dict.fromkeys((*self._result_order(action), *range(len(called.outputs)))):
            value = called.outputs[position]
            if value in made:
                self._allocate_value(value, op, phase, action.overwritten if value == action.makes[0] else None)
                continue
            size = discarded_bytes.get(position, 0) if value is None else self.bytes.owned_bytes([value])
            if size:
                unread_entries[position] = self._allocate(size, "temporary", value=None, op=op)
        if called.discarded and not discarded_bytes:
            unread_entries[len(called.outputs)] = self._allocate(called.discarded, "temporary", value=None, op=op)
        return [unread_entries[position] for position in sorted(unread_entries)]

    def _result_order(self, action: Action) -> tuple[int, ...]:
        """Return the positions of the results that an op's kernel allocates first, in its order; () if it allocates
        the results in the order in which it returns them."""
        if action.op is None or self.outside_memory.home.card is None:
            return ()
        return RESULT_ORDER.get(action.called_op(self.graph).target, ())

    def _free(self, action: Action) -> int:
        """Free the values of ``action.frees`` and return their bytes."""
        freed = [
            value for value in self._without_host_values(action.frees) if not self.graph.values[value].kept_by_backward
        ]
        for value in freed:
            self._release(self.entry_of.pop(value))
        return sum(self.graph.values[value].bytes for value in freed)

    def _without_host_values(self, values: Iterable[int]) -> list[int]:
        """Return the values that are not in host memory."""
        return [value for value in values if self.graph.values[value].kind != "host"]

    def _op_name(self, action: Action) -> str:
        """Return the name of an action in the trace: of its op, or as in ``memplan.encode``."""
        if action.op is not None:
            op = action.called_op(self.graph)
            return opaque_calls.title_of(op.target, op.args)
        if action.encoding is not None and action.kind in ("store", "fetch"):
            stores, fetches = find(self.graph.form_by_encoded[action.encoding].lever).verbs
            return f"memplan.{stores if action.kind == 'store' else fetches}"
        if action.kind == "receive" and self.outside_memory.loss_bytes:
            return "the loss, outside of the plan"
        return f"memplan.{action.kind}"

    def _add_op(self, name: str, phase: Phase, start: int, action: Action | None = None) -> None:
        """Add an op to the trace that began at tick ``start`` and ends now. ``action``: what it reads and makes."""
        index, read, written = len(self.ops), tuple[int, ...](), tuple[int, ...]()
        graph_op, recomputed = None, False
        if action is not None:
            read = tuple(self.entry_of[value] for value in action.reads if value in self.entry_of)
            written = tuple(self.entry_of[value] for value in action.makes if value in self.entry_of)
            graph_op = None if action.op is None else action.called_op(self.graph)
            recomputed = action.recomputed
        layer, where, gradient_of = "", None, None
        if graph_op is not None:
            layer, where = graph_op.layer, graph_op.where
            gradient_of = None if graph_op.gradient_of is None else self.traced_op_of.get(graph_op.gradient_of)
            self.traced_op_of.setdefault(graph_op.index, index)
        operands = tuple(Operand(name="", storage=storage) for storage in read)
        self.ops.append(Op(
            index, name, phase, 0, layer, where, start, self.tick, operands, written, gradient_of=gradient_of,
            recomputed=recomputed,
        ))  # fmt: skip


class _Allocations(_Tracer):
    """Runs the actions of a schedule in the caching allocator of a card, without a record of ops and storages."""

    def __init__(self, schedule: Schedule, outside_memory: OutsideMemory) -> None:
        super().__init__(schedule, outside_memory)
        home, addresses = outside_memory.home, dict(outside_memory.addresses)
        occupied = home.occupied
        self.allocator = CachingAllocator(home.allocator) if occupied is None else occupied.allocator(home.allocator)
        self.others = 0 if occupied is None else Begin(occupied, addresses).others
        """Bytes of the allocator's blocks that are not the step's."""
        self.addresses: list[int] = []
        """By storage, in the order of their allocation; 0 for storages without bytes."""

    def _allocate(self, size: int, cause: Cause, value: Value | None, op: int | None, name: str = "") -> int:
        """Allocate in the card's allocator, and return the storage's index in ``addresses``. Arguments other than
        ``size`` are what `_Tracer` records of the storage: unused."""
        self.addresses.append(self.allocator.malloc(size))
        self.allocator.log.clear()  # nothing reads the allocator's events
        return len(self.addresses) - 1

    def _allocate_before(self, value: Value) -> int:
        """Return the index of a value's storage that exists before the step: at its address in the card's segments if
        that is known, else newly allocated."""
        address = self.outside_memory.addresses.get(value.id)
        if address is None or self.outside_memory.home.occupied is None:
            return self._allocate(value.bytes, _CAUSES[value.kind], value=value, op=None)
        self.addresses.append(address)
        return len(self.addresses) - 1

    def _release(self, entry: int) -> None:
        self.allocator.free(self.addresses[entry])

    def _allocate_value(self, value: int, op: int, phase: Phase, into: int | None) -> None:
        """Allocate the storage of a value, or let it take over that of the value ``into``. Causes are not recorded."""
        if into is None:
            self.entry_of[value] = self._allocate(self.graph.values[value].bytes, "activation", value=None, op=None)
        else:
            self.entry_of[value] = self.entry_of.pop(into)

    def _add_op(self, name: str, phase: Phase, start: int, action: Action | None = None) -> None:
        """Record nothing."""

    def _op_name(self, action: Action) -> str:
        return ""
