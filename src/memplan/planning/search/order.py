"""Find an order of the backward ops in which the step has a lower peak.

The captured order is autograd's: an op runs as soon as its operands are there. The gradient of a late layer's weights
is then allocated while the activations of all earlier layers are, though its operands may be much smaller; and of
parallel branches, the one that frees the most need not be the first. Under fixed choices, a local search moves ops,
together with the ops between that depend on them or that they depend on, from one side of a high position to the other.
Ops that draw random numbers or have side effects keep their order. Forward ops are not moved.

An op is moved with the recomputations that run just before it, so that the schedule of the new order is the one that
was evaluated. Several choices are evaluated together: a move that lowers the peak where everything is saved must not
raise it where values are recomputed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from memplan._interrupts import safe_point
from memplan.planning.graph.dependencies import must_precede
from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.schedule.actions import Action, Choices
from memplan.planning.schedule.byte_levels import ActionBytes, levels
from memplan.planning.schedule.scheduler import Schedule, frees_gradient, may_change_after_return, schedule
from memplan.planning.search.search import Search

WORTHWHILE = 0.001
"""Smallest share of the peak for which ops are moved."""
STEPS = (0.02, 0.005, 0.00125)
"""Shares of the peak below it: positions above are lowered, first the high positions together, then the highest."""
MOVES = 300
"""Most moves of a search."""
HOTTEST = 6
"""Highest positions around which a move is looked for."""
BLOCKS = 8
"""Most blocks of ops that are evaluated for a position, those with the largest gain there."""
SMALL = 4096
"""Values smaller than the largest by this factor are no reason to move an op."""
LARGEST_BLOCK = 30
"""Most ops that are moved together."""


def in_lower_order(search: Search) -> Search:
    """Return the search on the graph in an order of backward ops in which the step needs less memory: with all values
    saved, or near the floor. Return the same search if no such order was found."""
    as_captured = search.deterministic
    states = (as_captured.nearest_to_bound, as_captured.save_all)
    choices = [as_captured.evaluator.choices(state.column) for state in states]
    order = lower_order(as_captured.graph, choices, search.outside_memory)
    if order == search.graph.order:
        return search
    ordered = search.in_order(order)
    return ordered if ordered.deterministic.nearest_to_bound.peak <= as_captured.nearest_to_bound.peak else search


def lower_order(graph: JointGraph, choices: Sequence[Choices], outside_memory: OutsideMemory) -> tuple[int, ...]:
    """Return an order of the backward ops in which no peak is higher than in the graph's order, and one peak is lower
    by `WORTHWHILE`; the graph's order if no such order was found.

    Args:
        graph: in the order from which the search starts.
        choices: the peak of each counts; copies to host memory are left out.
        outside_memory: memory on the device in addition to the graph's.
    """
    if len(graph.backward_ops) < 2:
        return graph.order
    copied = {(form.lever, form.value) for form in graph.forms if form.is_copied}
    without_copies = [replace(each, saved_forms=each.saved_forms - copied, order=graph.order) for each in choices]
    planned = [schedule(graph, each) for each in without_copies]
    order = _Search(graph, [_Profile(each, outside_memory) for each in planned]).run()
    peaks_before = [levels(each, outside_memory).peak for each in planned]
    peaks_after = [levels(schedule(graph, replace(each, order=order)), outside_memory).peak for each in without_copies]
    peaks = list(zip(peaks_before, peaks_after, strict=True))
    is_worthwhile = any(before - after >= WORTHWHILE * before for before, after in peaks)
    return order if is_worthwhile and all(after <= before for before, after in peaks) else graph.order


@dataclass(frozen=True, slots=True)
class _Node:
    """An action of the backward pass."""

    makes: tuple[int, ...]
    """Values that it computes."""
    uses: tuple[int, ...]
    """Values that are live while it runs: those it computes and reads, and gradients that must not be freed before."""
    allocated: int
    """Bytes of the values that it computes."""
    temporary: int
    """Bytes of workspace and unread results."""
    overwrites: tuple[int, ...]
    """Operands in whose memory its result can lie."""
    in_place_saved: int
    """Bytes that it does not need if it overwrites an operand."""


class _Profile:
    """Bytes during the backward ops of a schedule, for any order of these ops. An op is known by its index in the
    graph, a position is a place in the order."""

    def __init__(self, planned: Schedule, outside_memory: OutsideMemory) -> None:
        """Turn the actions of the backward pass into nodes, grouped by the op that they run before."""
        graph, choices = planned.graph, planned.choices
        counted = levels(planned, outside_memory)
        self.size = [value.bytes for value in graph.values]
        """By value."""
        self.small_bytes = max(self.size) // SMALL
        """Bytes up to which a value is no reason to move an op."""
        tangents = {value.id for value in graph.values if value.kind == "tangent"}
        resident = {value.id for value in graph.values if value.kind in RESIDENT}
        outputs = {graph.base(value) for value in graph.outputs}
        self.never_freed = outputs | {value for value in tangents if graph.values[value].kept_by_backward}
        """Values that are never freed."""
        delayed_gradient = dict[int, int]()
        """By parameter that may change at once: its gradient, which is freed after the parameter's last read."""
        for value, gradient in graph.gradients:
            base = graph.base(gradient)
            if not frees_gradient(graph, choices, value):
                self.never_freed.add(base)
            elif may_change_after_return(graph, choices, value):
                delayed_gradient[graph.base(value)] = base
        self.nodes: dict[int, tuple[_Node, ...]] = {}
        """By op: the recomputations and fetches before it, then the op itself."""
        group, action_bytes = list[_Node](), ActionBytes(planned, outside_memory)
        for action in planned.backward:
            if action.kind in ("receive", "give"):
                continue
            read = (value for value in action.reads if value not in resident)
            delayed = (delayed_gradient[value] for value in action.reads if value in delayed_gradient)
            group.append(_node(graph, choices, action, (*read, *delayed), action_bytes, outputs | tangents))
            if action.kind == "run" and not action.recomputed and action.op is not None:  # the group's backward op
                self.nodes[action.op] = tuple(group)
                group.clear()
        self.start = counted.between_passes + sum(self.size[value] for value in tangents)
        """Bytes before the first op."""
        self.makes = {op: frozenset(v for node in nodes for v in node.makes) for op, nodes in self.nodes.items()}
        """By op: values that its nodes make."""
        self.uses = {op: frozenset(v for node in nodes for v in node.uses) for op, nodes in self.nodes.items()}
        """By op: values that its nodes use."""
        self.users = defaultdict[int, list[int]](list)
        """By value: the ops that use it."""
        for op, used in self.uses.items():
            for value in used:
                self.users[value].append(op)

    def set(self, order: Sequence[int]) -> None:
        """Compute the bytes at all positions if the backward ops run in this order. ``order``: indices of ops."""
        self.position = {op: at for at, op in enumerate(order)}
        self.last = {value: max(self.position[op] for op in ops) for value, ops in self.users.items()}
        """By value: the position of the last op that uses it."""
        self.made = {value: at for at, op in enumerate(order) for value in self.makes[op]}
        """By value that the backward pass computes: the position of the op that computes it."""
        freed = defaultdict[int, int](int)  # bytes by position
        for value, at in self.last.items():
            if value not in self.never_freed:
                freed[at] += self.size[value]
        level = self.start
        self.before = [level]
        """Bytes before each position, and after the last."""
        for at, op in enumerate(order):
            level += sum(self.size[value] for value in self.makes[op]) - freed[at]
            self.before.append(level)
        self.levels = self.levels_of(begin=0, end=len(order), ops=order)
        """Highest level during each op and the recomputations before it."""
        self.peak = max(self.levels)

    def levels_of(self, begin: int, end: int, ops: Sequence[int]) -> list[int]:
        """Return the highest levels at the positions from ``begin`` up to ``end`` (excluded) if ``ops`` run there in
        this order. They are the ops that run there now, in another order."""
        level, highest, last_position, never_freed = self.before[begin], list[int](), self.last, self.never_freed
        last_user = {value: node for op in ops for node in self.nodes[op] for value in node.uses}  # among these ops
        for op in ops:
            op_level = 0
            for node in self.nodes[op]:
                level += node.allocated
                freed = [
                    value for value in node.uses
                    if last_user[value] is node and value not in never_freed and last_position[value] < end
                ]  # fmt: skip
                during = level + node.temporary
                if node.overwrites and not set(freed).isdisjoint(node.overwrites):
                    during -= node.in_place_saved
                op_level = max(op_level, during)
                for value in freed:
                    level -= self.size[value]
            highest.append(op_level)
        return highest

    def lives_at(self, at: int) -> list[int]:
        """Return the values that are live throughout a position although its op does not use them, without small
        values."""
        values = list[int]()
        for value, last in self.last.items():
            exists = self.made.get(value, -1) < at  # -1: made in the forward pass
            is_needed = last > at or (last < at and value in self.never_freed)
            if exists and is_needed and self.size[value] > self.small_bytes:
                values.append(value)
        return values

    def gain_later(self, block: Iterable[int], at: int) -> int:
        """Return by how many bytes the level at position ``at`` falls if the ops of a block, which now run before it,
        run after it: their results are not allocated yet there, but what they read last is not freed yet."""
        makes, uses = self._of(block)
        # results that are live at the position: those used there or later
        not_yet_made = [value for value in makes if value in self.never_freed or self.last[value] >= at]
        # operands that are freed before the position now: their last use moves behind it with the block
        not_yet_freed = [value for value in uses - makes if value not in self.never_freed and self.last[value] < at]
        return sum(self.size[value] for value in not_yet_made) - sum(self.size[value] for value in not_yet_freed)

    def gain_earlier(self, block: frozenset[int], at: int) -> int:
        """Return by how many bytes the level at position ``at`` falls if the ops of a block, which now run after it,
        run before it."""
        makes, uses = self._of(block)
        gain = 0
        for value in uses - makes:  # what the block frees is not live there any more
            can_be_freed = value not in self.never_freed and self.made.get(value, -1) < at
            if can_be_freed and all(op in block or self.position[op] < at for op in self.users[value]):
                gain += self.size[value]
        for value in makes:  # what it makes for other ops is
            if value in self.never_freed or any(op not in block for op in self.users[value]):
                gain -= self.size[value]
        return gain

    def _of(self, block: Iterable[int]) -> tuple[set[int], set[int]]:
        """Return the values that the ops of a block make, and those that are live while they run."""
        makes, uses = set[int](), set[int]()
        for op in block:
            makes |= self.makes[op]
            uses |= self.uses[op]
        return makes, uses


def _node(
    graph: JointGraph,
    choices: Choices,
    action: Action,
    reads: tuple[int, ...],
    action_bytes: ActionBytes,
    fixed: set[int],
) -> _Node:
    """Return an action as a node.

    Args:
        graph: the step.
        choices: whether ops may run in place.
        action: an action of the backward pass.
        reads: what it reads, without resident values, and gradients that must not be freed before it.
        action_bytes: counts its temporary bytes.
        fixed: values that no op overwrites.
    """
    overwrites, in_place_saved = tuple[int, ...](), 0
    if action.kind == "run":
        op: GraphOp = action.called_op(graph)
        temporary = action_bytes.temporary_bytes(replace(action, overwritten=None))  # as if it did not run in place
        if choices.in_place and action.makes and action.makes[0] == op.makes[0]:  # only a first result overwrites
            overwrites = tuple(value for value in op.overwrites if value in reads and value not in fixed)
            scratch_saved = 0 if action.encoding is not None else op.scratch_saved
            in_place_saved = graph.values[action.makes[0]].bytes + scratch_saved
    else:
        temporary = action_bytes.temporary_bytes(action)
    uses = tuple(dict.fromkeys((*action.makes, *reads)))
    return _Node(action.makes, uses, action_bytes.owned_bytes(action.makes), temporary, overwrites, in_place_saved)


_Move = tuple[int, int, list[int]]
"""First position, the position after the last, and the ops there in their new order."""


class _Search:
    """Local search for an order of the backward ops."""

    def __init__(self, graph: JointGraph, profiles: Sequence[_Profile]) -> None:
        """Collect which ops must run before each op: those that it depends on, and those whose recomputations it
        uses."""
        self.profiles, self.order = profiles, [op.index for op in graph.backward_ops]
        self.before = must_precede(graph)
        """By op: the ops that must run before it."""
        for profile in profiles:  # a recomputed value is computed just before the op that needs it first
            maker = {value: op for op in self.order for value in profile.makes[op]}
            for op in self.order:
                self.before[op] |= {maker[v] for v in profile.uses[op] if v in maker and maker[v] != op}
        self.after = defaultdict[int, set[int]](set)
        """By op: the ops that must run after it; the reverse of ``before``."""
        for op, others in self.before.items():
            for other in others:
                self.after[other].add(op)

    def run(self) -> tuple[int, ...]:
        """Return the best order."""
        moves, steps = 0, list(STEPS)
        self._update()
        while steps and moves < MOVES:
            safe_point()
            self.targets = [int(profile.peak * (1 - steps[0])) for profile in self.profiles]
            """By profile: bytes above which a position is high."""
            for index in range(len(self.profiles)):
                move = self._best_move(index)
                if move is not None:
                    break
            else:  # no profile has a move that helps: lower the positions nearer to the peak
                del steps[0]
                continue
            begin, end, ops = move
            self.order[begin:end] = ops
            self._update()
            moves += 1
        return tuple(self.order)

    def _update(self) -> None:
        """Compute the bytes of all profiles in the present order."""
        for profile in self.profiles:
            profile.set(self.order)
        self.position = self.profiles[0].position

    def _best_move(self, index: int) -> _Move | None:
        """Return the move that lowers a high position of profile ``index`` the most; None if none does.

        The highest positions are tried first, until a move helps.
        """
        profile, target = self.profiles[index], self.targets[index]
        high = [at for at, level in enumerate(profile.levels) if level > target]
        for at in sorted(high, key=lambda at: -profile.levels[at])[:HOTTEST]:
            best, best_change = None, 0
            for move in self._moves(profile, at, first=high[0], last=high[-1]):
                change = self._change(move)
                if change is not None and change < best_change:
                    best, best_change = move, change
            if best is not None:
                return best
        return None

    def _moves(self, profile: _Profile, at: int, first: int, last: int) -> Iterable[_Move]:
        """Yield moves that lower the bytes at a position, the largest reduction there first.

        What is live at the position either was allocated before it, and its op can move behind it, or is read after it,
        and its readers can move before it. An op moves in a block with the ops between that it depends on, or that
        depend on it.

        Args:
            profile: bytes at each position of the backward pass, under some choices.
            at: the position.
            first, last: the first and last position whose bytes exceed the search's target.
        """
        blocks = dict[tuple[bool, frozenset[int]], int]()  # (whether it runs later, ops): bytes that the move gains
        for value in profile.lives_at(at):
            if value in profile.made:
                maker = self.order[profile.made[value]]
                block = self._block([maker], self.after, lambda there: there <= at, at)
                if block is not None:
                    blocks[True, block] = profile.gain_later(block, at)
            readers = [op for op in profile.users[value] if self.position[op] > at]
            if readers and value not in profile.never_freed:
                block = self._block(readers, self.before, lambda there: there >= at, at)
                if block is not None:
                    blocks[False, block] = profile.gain_earlier(block, at)
        gains = sorted((-gain, later, sorted(block)) for (later, block), gain in blocks.items() if gain > 0)
        for _, later, block in gains[:BLOCKS]:
            yield from self._later(block, at, last) if later else self._earlier(block, at, first)

    def _block(
        self, ops: Iterable[int], following: dict[int, set[int]], inside: Callable[[int], bool], at: int
    ) -> frozenset[int] | None:
        """Return some ops with all others that have to move with them to the other side of a position.

        None if the position's own op would have to move, too, or more than `LARGEST_BLOCK` ops.

        Args:
            ops: indices of ops.
            following: by op, the ops that must stay after it; for moves to the front, those that must stay before it.
            inside: returns whether a position is on the side from which the ops move, or is ``at``.
            at: the position.
        """
        block = set(ops)
        stack = list(block)
        while stack:
            for other in following.get(stack.pop(), ()):
                there = self.position[other]
                if inside(there) and other not in block:
                    if there == at or len(block) == LARGEST_BLOCK:
                        return None
                    block.add(other)
                    stack.append(other)
        return frozenset(block)

    def _later(self, block: Sequence[int], at: int, last: int) -> Iterable[_Move]:
        """Yield the moves of a block to right after a position, to after the last high position, and to the latest
        possible.

        Args:
            block: indices of ops.
            at: the position.
            last: the last high position.
        """
        inside = set(block)
        moved = sorted(block, key=self.position.__getitem__)  # in their present order
        begin = self.position[moved[0]]
        followers = (self.position[op] for each in block for op in self.after[each] if op not in inside)
        latest_end = min(followers, default=len(self.order))
        for end in sorted({at + 1, min(latest_end, last + 1), latest_end}):
            if at < end <= latest_end:
                yield begin, end, [op for op in self.order[begin:end] if op not in inside] + moved

    def _earlier(self, block: Sequence[int], at: int, first: int) -> Iterable[_Move]:
        """Yield the moves of a block to right before a position, to before the first high position, and to the earliest
        possible.

        Args:
            block: indices of ops.
            at: the position.
            first: the first high position.
        """
        inside = set(block)
        moved = sorted(block, key=self.position.__getitem__)  # in their present order
        end = self.position[moved[-1]] + 1
        predecessors = (self.position[op] for each in block for op in self.before[each] if op not in inside)
        earliest = max(predecessors, default=-1) + 1
        for begin in sorted({at, max(earliest, first), earliest}, reverse=True):
            if earliest <= begin <= at:
                yield begin, end, moved + [op for op in self.order[begin:end] if op not in inside]

    def _change(self, move: _Move) -> int | None:
        """Return by how much a move changes the squared bytes above the targets, summed over all profiles; None if it
        raises a peak."""
        begin, end, ops = move
        change = 0
        for profile, target in zip(self.profiles, self.targets, strict=True):
            new = profile.levels_of(begin, end, ops)
            if max(new) > profile.peak:
                return None
            present = profile.levels[begin:end]
            change += sum((level - target) ** 2 for level in new if level > target)
            change -= sum((level - target) ** 2 for level in present if level > target)
        return change
