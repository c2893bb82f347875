"""Count the live bytes during every action of a schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from memplan.planning.graph.joint_graph import RESIDENT, JointGraph
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.schedule.actions import Action, Choices
from memplan.planning.schedule.scheduler import Schedule, frees_gradient


@dataclass(frozen=True, slots=True)
class Levels:
    """Bytes on the device while a schedule runs."""

    forward: tuple[int, ...]
    """During each action of the forward pass: the highest level while it runs."""
    backward: tuple[int, ...]
    """During each action of the backward pass."""
    update: int
    """During the optimizer's update, or at the end of the backward pass if there is none."""
    between_passes: int
    """Between the forward and the backward pass."""

    @property
    def peak(self) -> int:
        """Highest level of the step."""
        return max(*self.forward, *self.backward, self.update, self.between_passes)

    @property
    def peak_action(self) -> int | None:
        """Index of the first action at the peak, counted through both passes; None if the peak is elsewhere, as in the
        optimizer's update."""
        levels = (*self.forward, *self.backward)
        return levels.index(self.peak) if self.peak in levels else None


def base_level(graph: JointGraph, choices: Choices, outside_memory: OutsideMemory) -> int:
    """Return the bytes that are live during the whole step: weights, inputs, accumulated gradients, optimizer state."""
    level = outside_memory.held_bytes + sum(value.bytes for value in graph.values if value.kind in RESIDENT)
    if choices.gradients.accumulates:  # then the accumulated gradient of each parameter exists when the step begins
        differentiated = [graph.values[value] for value, _ in graph.gradients]
        level += sum(value.contiguous_bytes for value in differentiated if value.kind == "parameter")
    return level


def levels(schedule: Schedule, outside_memory: OutsideMemory | None = None) -> Levels:
    """Count the bytes during every action of a schedule, and during the optimizer's update."""
    outside_memory = OutsideMemory() if outside_memory is None else outside_memory
    walk = _Walk(schedule, outside_memory)
    forward = tuple(walk.run(action) for action in schedule.forward)
    boundary = walk.live_bytes
    backward = tuple(walk.run(action) for action in schedule.backward)
    update = (
        walk.live_bytes if schedule.choices.gradients.updates_early else walk.live_bytes + outside_memory.update_bytes
    )
    return Levels(forward, backward, update, boundary)


class ActionBytes:
    """Bytes that actions allocate in addition to the values they make: workspaces, copies of gradients."""

    def __init__(self, schedule: Schedule, outside_memory: OutsideMemory) -> None:
        self.graph, self.choices, self.outside_memory = schedule.graph, schedule.choices, outside_memory

    def temporary_bytes(self, action: Action) -> int:
        """Return the bytes that an action allocates and frees again while it runs: its workspace and unread results."""
        if action.kind == "run":
            op = action.called_op(self.graph)
            unread = self.unread_bytes(action)
            if action.encoding is not None:  # it reads an encoding
                return unread + self.graph.form_by_encoded[action.encoding].direct_reader_scratch
            saved_in_place = 0 if action.overwritten is None else op.scratch_saved
            return unread + op.scratch - saved_in_place
        if action.kind == "receive":  # a loss outside of the graph runs between the passes
            return self.outside_memory.loss_bytes
        if action.value is None:
            return 0
        if action.kind == "store" and action.encoding is not None:
            return self.graph.form_by_encoded[action.encoding].store_scratch
        if action.kind == "fetch" and action.encoding is not None:
            return self.graph.form_by_encoded[action.encoding].fetch_scratch
        is_parameter = self.graph.values[action.value].kind == "parameter"
        if action.kind == "give" and self.choices.gradients.updates_early and is_parameter:
            return self._copied_bytes(action) + self.outside_memory.update_by_parameter.get(action.value, 0)
        return 0

    def unread_bytes(self, action: Action) -> int:
        """Return the bytes of results that an action's op allocates and nothing reads; of the results of a recomputed
        op, only those in ``action.makes`` are read."""
        op = action.called_op(self.graph)
        return op.discarded + self.owned_bytes(value for value in op.makes if value not in action.makes)

    def gradient_copy_bytes(self, action: Action) -> int:
        """Return the bytes of the copy that an action returns as a gradient, if autograd keeps it afterwards."""
        if action.kind != "give" or action.value is None or frees_gradient(self.graph, self.choices, action.value):
            return 0
        return self._copied_bytes(action)

    def owned_bytes(self, values: Iterable[int]) -> int:
        """Return the bytes of the memory that the values own, 0 for views."""
        return sum(self.graph.values[value].bytes for value in values)

    def _copied_bytes(self, action: Action) -> int:
        """Return the bytes of a copied gradient, 0 if the action copies none."""
        return (
            self.graph.values[action.value].contiguous_bytes if action.returns_copy and action.value is not None else 0
        )


class _Walk(ActionBytes):
    """Counts live bytes action by action."""

    def __init__(self, schedule: Schedule, outside_memory: OutsideMemory) -> None:
        """Begin before the first action, with the bytes that are live during the whole step."""
        super().__init__(schedule, outside_memory)
        self.live_bytes = base_level(schedule.graph, schedule.choices, outside_memory)
        """Bytes that are live."""

    def run(self, action: Action) -> int:
        """Return the bytes while the action runs, and set ``live_bytes`` to those after it."""
        # a result that overwrites an operand allocates nothing
        result_in_place = 0 if action.overwritten is None else self.graph.values[action.makes[0]].bytes
        self.live_bytes += self.owned_bytes(action.makes) - result_in_place + self.gradient_copy_bytes(action)
        bytes_during_action = self.live_bytes + self.temporary_bytes(action)
        self.live_bytes -= self.owned_bytes(
            value for value in action.frees if not self.graph.values[value].kept_by_backward
        )
        return bytes_during_action
