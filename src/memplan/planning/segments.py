"""Choose segments of a step to run piece by piece, so that the step's peak falls.

For an op at which the step is above its budget, the candidates are all ranges of calls around it whose ops can run
piece by piece along an axis. Chosen is the one that saves the most bytes per second that it adds, where bytes below the
budget do not count: several cheap segments can be better than a slow one that is expected to fit by itself. Expected
bytes are the sum of other live values, the segment's operands and results with their gradients, and the inner values of
a piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch

from memplan.planning.graph.joint_graph import RESIDENT, GraphOp, JointGraph
from memplan.planning.graph.resident import OutsideMemory
from memplan.planning.graph.tensor_like import Like
from memplan.planning.ops.tile import TILE_OPS
from memplan.planning.piece_memory import Derivatives, PieceMemory
from memplan.planning.schedule.byte_levels import levels
from memplan.planning.schedule.scheduler import Schedule
from memplan.planning.tiles.program import (
    SEVERAL_VIEWS,
    Node,
    NotTileable,
    Program,
    views_one_by_one,
    without_running_statistics,
)
from memplan.planning.tiles.tiled import Axis, Tile, Tiled

MAX_CALLS = 24
"""Length of a segment at most, in calls with data."""
MAX_NORM_PASSES = 3
"""Passes over the pieces for norms over the axis in a segment at most, forward, and as many backward. Norms that do not
depend on each other, as that of a shortcut and the last of the branch beside it, share a pass."""
MOST_PIECES = 128
PIECES = (2, 4, 8, 16, 32, 64)
"""Numbers of pieces to try at first; more, where these do not suffice."""
PIECE_SHARE = 8
"""At first, a piece of a level takes at most 1/8 of the budget."""
LEAST_ELEMENTS = 4
"""Fewest elements of a spatial dimension in a piece of the smallest result."""
_INTEGERS = "int64", "int32"
"""Dtypes of tokens."""
LEAST_SHARE = 4
"""A segment saves at least 1/4 of the bytes above the budget."""
CALL_SECONDS = 1e-3
"""Seconds added to those of each segment: of segments that add next to none, the one that saves the most is chosen."""
BACKWARD_FACTOR = 2.0
"""Bytes live in the backward pass of a piece, per byte of the piece's inner values."""

CallRanges = tuple[tuple[int, int], ...]
"""First and last calls of segments."""


@dataclass(frozen=True)
class Segment:
    """A range of calls that can run piece by piece."""

    first: int
    last: int
    """Numbers of its first and last call."""
    tiled: Tiled
    """The segment as a program that runs piece by piece."""
    operands: tuple[tuple[int, int], ...]
    """(call that computes it, bytes) of each value from before the segment, without weights and the step's inputs."""
    result_bytes: int
    """Bytes of its results that are read after it."""
    inner_bytes: int
    """Bytes of the values that only ops of the segment read."""
    ops: tuple[GraphOp, ...]
    """Ops that a piece runs: the segment's, after ``repeated_count`` ones of earlier segments."""
    repeated_count: int
    """Number of these repeated ops."""
    derivative_seconds: tuple[float, ...]
    """Seconds of the derivative of each op."""
    weight_bytes: int
    """Bytes of the sums of the gradients of the weights that it reads."""
    memory: PieceMemory
    """What its pieces allocate."""
    overwritten_bytes: int
    """Bytes of a result's gradient over which the derivative writes the gradient of an operand; 0 if it does not."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of its results and operands while its derivative runs."""
        return self.result_bytes + sum(size for _, size in self.operands) - self.overwritten_bytes

    def derivative_bytes(self, pieces: int) -> int:
        """Return the expected bytes of its derivative in this number of pieces, without gradients of weights."""
        return self.gradient_bytes + self.memory.backward(pieces)

    def seconds(self, pieces: int) -> float:
        """Return the seconds that running the segment in this number of pieces adds to the step.

        Unsplit, each op and its derivative run once. In pieces, an op runs in every pass for the statistics of norms,
        in the forward pass and again in the backward pass; a derivative also runs in every pass for the sums of norms.
        Each run is longer by the elements at borders that two pieces compute (factor ``overlap``, 1.0 without). Of
        repeated ops, all runs are additional.
        """
        tiled = self.tiled
        unsplit_runs = [0] * self.repeated_count + [1] * (len(self.ops) - self.repeated_count)
        by_op = zip(
            self.ops, self.derivative_seconds, unsplit_runs, tiled.runs_by_op("statistics"),
            tiled.runs_by_op("backward"), tiled.derivatives_by_op, tiled.overlap_by_op(pieces), strict=True,
        )  # fmt: skip
        added = 0.0
        for op, derivative_seconds, unsplit, statistics_runs, backward_runs, derivative_runs, overlap in by_op:
            op_runs = statistics_runs + 1 + backward_runs  # 1: the forward pass
            added_of_op = op.seconds * (op_runs * overlap - unsplit)
            added += added_of_op + derivative_seconds * (derivative_runs * overlap - unsplit)
        return added


@dataclass(frozen=True)
class LiveValue:
    """A value that is live during an op, other than the step's inputs and weights."""

    bytes: int
    call: int
    """Number of the call whose op or derivative computes the value; -1 for none."""
    by_derivative: bool
    """Whether a derivative computes the value."""
    readers: frozenset[int]
    """Calls whose derivatives read the value."""
    is_returned_gradient: bool
    """Whether the value is a gradient that the step returns."""


@dataclass(frozen=True)
class OverBudgetOp:
    """An op of a schedule during which more bytes are live than the budget."""

    call: int
    """Number of the call that the op is part of, or whose derivative it computes."""
    level: int
    """Live bytes."""
    live: tuple[LiveValue, ...]
    """Values that are live during the op."""
    scratch: int
    """Bytes of its workspace, part of the level."""
    in_backward: bool
    """Whether the op runs in the backward pass."""
    is_tile: bool
    """Whether the op is a segment that runs piece by piece already."""


class Segments:
    """The segments that a step can be cut into: ranges of calls of torch functions. The graph is without tiles, with
    seconds; ``in_place`` are calls that change an operand, with which no segment may begin."""

    def __init__(self, graph: JointGraph, in_place: Collection[int] = ()) -> None:
        """Note which values depend on data and get gradients, and the seconds of derivatives."""
        self._graph, self._in_place = graph, in_place
        self._ops = _one_result_each(_without_copies_for_backward(graph))
        """Forward ops; in the place of one that returns several views, an op for each."""
        self._view_of = {v: op.call for op in graph.ops if op.target in SEVERAL_VIEWS for v in op.outputs}
        """By result of an op that returns several views: its call."""
        self._nodes = {op.index: _node(op) for op in self._ops}
        """By index of a forward op: the op as a node of a program."""
        self._likes = {
            value.id: Like(value.shape, value.stride, getattr(torch, value.dtype), torch.device(value.place))
            for value in graph.values
        }
        """By value: shape, strides, dtype and device."""
        self._readers: dict[int, set[int]] = {}
        """Forward ops that read a value, by index."""
        for op in self._ops:
            for value in self._nodes[op.index].reads:
                self._readers.setdefault(value, set()).add(op.index)
        self._static = {value.id for value in graph.values if value.kind in ("parameter", "buffer", "constant")}
        """Values that do not depend on data: weights, and what ops compute from these alone."""
        self._fixed = {value.id for value in graph.values if value.kind in ("input", "buffer", "constant")}
        """Values into which no gradient flows."""
        self._fixed -= {value for value, _ in graph.gradients}  # inputs may get gradients
        for op in self._ops:
            reads, results = self._nodes[op.index].reads, [value for value in op.outputs if value is not None]
            stops_gradient = op.target == "aten.detach.default" or self._fixed.issuperset(reads)
            self._fixed.update(v for v in results if stops_gradient or not self._likes[v].dtype.is_floating_point)
            if self._static.issuperset(reads):
                self._static.update(results)
        self._data_ops = [op for op in self._ops if not self._static.issuperset(self._nodes[op.index].reads)]
        """Forward ops that depend on data."""
        self._derivatives = Derivatives(graph)
        self._derivative_seconds = Counter[int]()
        """Seconds of the ops of its derivative, by index of the forward op."""
        for op in graph.ops:
            if op.gradient_of is not None:
                self._derivative_seconds[op.gradient_of] += op.seconds  # pyright: ignore[reportArgumentType]
        self.calls = list(dict.fromkeys(op.call for op in self._data_ops if op.call is not None))
        """Calls that depend on data, in order."""
        self._segments: dict[tuple[int, int, Axis, int, CallRanges], Segment | None] = {}
        """Results of `segment` by its arguments."""
        self._sharing = set[tuple[int, int]]()
        """Ranges of calls that only a longer segment can contain: they end between an op that returns several views and
        their readers, and the results of a segment must not share memory."""
        self._refused: dict[tuple[int, int], str] = {}
        """Reasons for which a trace refused ranges of calls."""
        self._untileable: dict[int, str] = {}
        """Reasons for which single calls cannot run piece by piece."""

    def refuse(self, tile: Tile, reason: str) -> None:
        """Exclude a segment that could not be traced, whatever its axis and pieces. ``reason``: for the user."""
        self._refused[tile.first, tile.last] = reason
        self._segments = {key: segment for key, segment in self._segments.items() if key[:2] != (tile.first, tile.last)}

    def _base_bytes(self, value: int) -> int:
        """Return the bytes of a value, of a view those of what it views."""
        return self._graph.values[self._graph.base(value)].bytes

    @cached_property
    def _bytes(self) -> Mapping[int, int]:
        """By call: bytes of its largest result; of a concatenation, of the largest operand."""
        sizes = Counter[int]()
        for op in self._data_ops:
            node = self._nodes[op.index]
            for value in node.reads if node.name == "cat" else node.outputs:
                if op.call is not None:
                    sizes[op.call] = max(sizes[op.call], self._base_bytes(value))
        return sizes

    def reasons(self, ops: Iterable[OverBudgetOp]) -> list[str]:
        """Return why refused segments and these ops' calls do not run piece by piece: "layer1.0: ..."."""
        reasons = list(self._refused.items())
        reasons += [((op.call, op.call), self._untileable[op.call]) for op in ops if op.call in self._untileable]
        return list(dict.fromkeys(f"{self._layer(first, last)}{reason}" for (first, last), reason in reasons))

    def _layer(self, first: int, last: int) -> str:
        """Return the layer of the first op between two calls as "layer1.0: ", empty if unknown."""
        for op in self._data_ops:
            if op.layer and op.call is not None and first <= op.call <= last:
                return f"{op.layer}: "
        return ""

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """Axes to try: the batch, and the largest spatial dimension."""
        axes = list[Axis]()
        inputs = [value.shape for value in self._graph.values if value.kind == "input" and len(value.shape) > 1]
        if inputs and inputs[0][0] > 1:
            axes.append(Axis(0, inputs[0][0]))
        rank = max((len(shape) for shape in inputs), default=0)
        if rank >= 3:
            shape = next(shape for shape in inputs if len(shape) == rank)
            spatial_dims = range(2, rank)  # after samples and channels
            axes.append(Axis(max(spatial_dims, key=lambda dim: (shape[dim], -dim))))  # the first of equal sizes
        return tuple(axes)

    def token_axes(self, call: int) -> tuple[Axis, ...]:
        """Axes to try for a call: the tokens of a batch, and the rows of the call's matrices.

        Tokens are the second dimension of the step's 2-d integer inputs and of the call's 3-d results.
        """
        values, batch = self._graph.values, [axis.samples for axis in self.axes if axis.dim == 0]
        results = [values[v].shape for op in self._data_ops if op.call == call for v in op.outputs if v is not None]
        tokens = [value.shape for value in values if value.kind == "input" and value.dtype in _INTEGERS]
        shapes = [shape for shape in tokens if len(shape) == 2] + [shape for shape in results if len(shape) == 3]
        # by batch size: of several shapes with the same batch size, the first counts
        axes = {
            shape[0]: Axis(1, samples=shape[0], tokens=shape[1])
            for shape in reversed(shapes) if shape[0] and shape[1] > 1
        }  # fmt: skip
        rows = dict.fromkeys(shape[0] for shape in results if len(shape) == 2)
        return (*axes.values(), *(Axis(0, samples=count) for count in rows if count > 1 and count not in batch))

    def segment(self, first: int, last: int, axis: Axis, pieces: int, repeats: CallRanges = ()) -> Segment | None:
        """Return the segment from call ``first`` to call ``last``, cut along ``axis``; None if it cannot run piece by
        piece. ``repeats``: first and last calls of the earlier segments that its pieces run again."""
        key = first, last, axis, pieces, repeats
        if key not in self._segments:
            self._segments[key] = self._build(*key)
        return self._segments[key]

    def _build(self, first: int, last: int, axis: Axis, pieces: int, repeats: CallRanges) -> Segment | None:
        """Build the result of `segment`; note the reason if a single call cannot run piece by piece."""
        if (first, last) in self._refused:
            return None
        indices = [index for index, op in enumerate(self._data_ops) if op.call in (first, last)]
        inside = self._data_ops[indices[0] : indices[-1] + 1]
        try:
            if any(op.random for op in inside):
                raise NotTileable("it draws random numbers")
            if any(op.must_run_once or op.call is None for op in inside):
                raise NotTileable("it has a side effect")
            earlier = self._repeated(inside, repeats)
            program = self._program(inside, earlier)
            tiled = Tiled(program, axis, pieces)
        except NotTileable as reason:
            if first == last:
                self._untileable[first] = str(reason)
            return None
        views = Counter(self._view_of[value] for value in program.outputs if value in self._view_of)
        if any(count > 1 for count in views.values()):
            self._sharing.add((first, last))
        own_norms = {at for at in tiled.norms if at >= len(earlier)}  # not those of repeated ops
        if sum(not own_norms.isdisjoint(nodes) for nodes in tiled.statistic_passes) > MAX_NORM_PASSES:
            return None
        ops = *earlier, *inside
        values = self._graph.values
        data_inputs = {values[v].base for v in program.inputs if v not in program.static_inputs}
        operands = tuple((self._call_of(v), values[v].bytes) for v in data_inputs if values[v].kind not in RESIDENT)
        results = {values[v].base for v in program.outputs}
        return Segment(
            first, last, tiled, operands,
            result_bytes=sum(values[v].bytes for v in results),
            inner_bytes=sum(values[v].bytes for op in ops for v in op.makes if v not in results),
            ops=ops, repeated_count=len(earlier),
            derivative_seconds=tuple(self._derivative_seconds.get(op.index, 0.0) for op in ops),
            weight_bytes=sum(
                tiled.gradient_sum_bytes(value) for value in program.static_inputs - program.inputs_without_gradient
            ),
            memory=PieceMemory(tiled, ops, self._derivatives),
            overwritten_bytes=self._overwritten(tiled, inside),
        )  # fmt: skip

    def _repeated(self, inside: Sequence[GraphOp], repeats: CallRanges) -> list[GraphOp]:
        """Return the ops in ranges of earlier calls whose results the ops of a segment (``inside``) depend on, in their
        order."""
        needed = {value for op in inside for value in self._nodes[op.index].reads}
        ops = list[GraphOp]()
        for op in reversed(self._data_ops):
            in_ranges = op.call is not None and any(first <= op.call <= last for first, last in repeats)
            if in_ranges and not needed.isdisjoint(self._nodes[op.index].outputs):
                needed.update(self._nodes[op.index].reads)
                ops.append(op)
        if any(op.random or op.must_run_once for op in ops):
            raise NotTileable("it would run an op again that draws random numbers or has a side effect")
        return ops[::-1]

    def _program(self, inside: Sequence[GraphOp], earlier: Sequence[GraphOp]) -> Program:
        """Return the ops of a segment with the values that they read from outside and that ops outside read.

        ``earlier``: ops of earlier segments that come first, and of which nothing else is read.
        """
        nodes = tuple(self._nodes[op.index] for op in (*earlier, *inside))
        indices = {op.index for op in inside}
        computed = {value for node in nodes for value in node.outputs}
        inputs = tuple(dict.fromkeys(v for node in nodes for v in node.reads if v not in computed))
        results = (node.outputs[0] for node in nodes[len(earlier) :] if node.outputs)
        # those that the step returns, or that an op outside of the segment reads
        outputs = tuple(v for v in results if v in self._graph.outputs or self._readers.get(v, set()) - indices)
        static = self._static.intersection(inputs)  # they do not depend on data
        fixed = self._fixed.intersection(inputs)  # they get no gradient
        return Program(nodes, inputs, frozenset(static), outputs, self._likes, frozenset(fixed))

    def tile_around(self, op: OverBudgetOp, target: int, tiles: Sequence[Tile], premium: float) -> Tile | None:
        """Return the segment around an op to run piece by piece, in addition to ``tiles``, so that the op's live bytes
        come nearer to ``target``; None if no segment is expected to lower them by much.

        A segment replaces the tiles that it contains, whose seconds it saves.

        ``premium``: a segment that does not reach the target by itself is chosen only if it saves more than this many
        times the bytes per second of the best segment that does.
        """
        excess = op.level - target
        # the best segment that reaches the target, and the best that does not: (bytes per second, -ops, tile)
        reaching, others = (0.0, 0, None), (0.0, 0, None)
        seconds_of_tiles = [(tile, self._seconds_of(tile, tiles)) for tile in tiles]
        for segment, axis, max_pieces in self._candidates(op.call, tiles):
            beside_pieces = self._bytes_beside_pieces(segment, op)
            if (op.level - beside_pieces) * LEAST_SHARE < excess:
                continue  # too few, whatever a piece takes
            replaced_seconds = sum(
                seconds for tile, seconds in seconds_of_tiles
                if segment.first <= tile.first and tile.last <= segment.last
            )  # fmt: skip
            for pieces in PIECES:
                if pieces > max_pieces:
                    break
                of_piece = segment.memory.backward if self._differentiates(segment, op) else segment.memory.forward
                saved = min(op.level - beside_pieces - of_piece(pieces), excess)
                added_seconds = max(0.0, segment.seconds(pieces) - replaced_seconds)
                bytes_per_second = saved / (added_seconds + CALL_SECONDS)
                rated = bytes_per_second, -len(segment.ops), Tile(segment.first, segment.last, axis, pieces)
                if saved == excess:  # more pieces would only add borders
                    reaching = max(reaching, rated, key=lambda known: known[:2])
                    break
                if saved * LEAST_SHARE >= excess:
                    others = max(others, rated, key=lambda known: known[:2])
        (reaching_rate, _, reaching_tile), (other_rate, _, other_tile) = reaching, others
        return reaching_tile if reaching_rate * premium >= other_rate else other_tile

    def tile_in_more_pieces(self, tile: Tile, tiles: Sequence[Tile] = ()) -> Tile | None:
        """Return the segment in twice as many pieces; None if no axis has enough elements, or if these are too many
        pieces. ``tiles``: all tiles, some of which it may repeat.

        Along another axis it may take more memory: only along samples is a gradient written over another.
        """
        pieces = 2 * tile.pieces
        repeats = repeated_ranges(tile, tiles)
        present = self.segment(tile.first, tile.last, tile.axis, tile.pieces, repeats)
        other_axes = () if repeats else (*self.axes, *self.token_axes(tile.last))  # repeated tiles keep their axis
        for axis in dict.fromkeys((tile.axis, *other_axes)):
            finer = self.segment(tile.first, tile.last, axis, pieces, repeats) if pieces <= MOST_PIECES else None
            if finer is None:
                continue
            if (
                axis == tile.axis
                or present is None
                or finer.derivative_bytes(pieces) < present.derivative_bytes(tile.pieces)
            ):
                return replace(tile, axis=axis, pieces=pieces)
        return None

    def with_next_level(self, tiles: Sequence[Tile], budget: int) -> tuple[Tile, ...]:
        """Return ``tiles`` and those of the next level: the calls outside of tiles that make or read the largest
        results. ``tiles`` alone if there is no further level.

        A concatenation counts as large as its largest operand. A tile repeats the earlier tiles of its level whose
        results it reads: in a U-Net, the decoder's tile computes again what the encoder's tile of that level computes.

        ``budget``: bytes, of which a piece takes a small part.
        """
        outside = {call for call in self.calls if not any(tile.first <= call <= tile.last for tile in tiles)}
        largest = max((self._bytes[call] for call in outside), default=0)
        large = {  # values of more than half of the largest
            v for op in self._data_ops if op.call is not None and 2 * self._bytes[op.call] > largest
            for v in self._nodes[op.index].outputs if 2 * self._base_bytes(v) > largest
        }  # fmt: skip
        using_large = {
            op.call for op in self._data_ops
            if not large.isdisjoint((*self._nodes[op.index].reads, *self._nodes[op.index].outputs))
        }  # fmt: skip
        groups = groupby(self.calls, lambda call: call in using_large and call in outside)
        successive_calls = [list(calls) for is_in_level, calls in groups if is_in_level]
        level = list[Tile]()
        for calls in successive_calls:
            new = self._tiles_of(calls, level, large, budget)
            if new and calls is successive_calls[-1]:
                new[-1] = self._up_to_loss(new[-1], tiles, [*level, *new[:-1]], large, budget)
            level += new
        return tuple(sorted((*tiles, *level), key=lambda tile: tile.first))

    def _tiles_of(self, calls: Sequence[int], level: Sequence[Tile], large: Collection[int], budget: int) -> list[Tile]:
        """Return tiles of some successive calls, each of as many calls as can run piece by piece together.

        Args:
            calls: the calls.
            level: earlier tiles of the same level, which can be repeated.
            large: values whose tiles are repeated by the tiles that read them.
            budget: bytes, of which a piece takes a small part.
        """
        new, begin = list[Tile](), 0
        while begin < len(calls):
            longest = None  # (index of its last call, tile)
            for end in range(begin, len(calls)) if calls[begin] not in self._in_place else ():
                tile = self._tile_of(calls[begin], calls[end], [*level, *new], large, budget)
                if tile is None:
                    break
                if (calls[begin], calls[end]) not in self._sharing:
                    longest = end, tile
            begin = begin + 1 if longest is None else longest[0] + 1
            if longest is not None:
                new.append(longest[1])
        return new

    def _up_to_loss(
        self, tile: Tile, tiles: Sequence[Tile], level: Sequence[Tile], large: Collection[int], budget: int
    ) -> Tile:
        """Return the tile up to the loss, if a few calls after it compute that: its gradients then need no second run.
        Else the tile unchanged. ``tiles``: those of earlier levels; other arguments: see `_tiles_of`."""
        begin = self.calls.index(tile.last) + 1
        for last in self.calls[begin : begin + MAX_CALLS]:
            longer = self._tile_of(tile.first, last, level, large, budget)
            if longer is None or any(tile.last < other.first <= last for other in tiles):
                break
            segment = self.segment(longer.first, last, longer.axis, longer.pieces, repeated_ranges(longer, level))
            if segment is not None and segment.tiled.yields_gradients:
                return longer
        return tile

    def _tile_of(
        self, first: int, last: int, level: Sequence[Tile], large: Collection[int], budget: int
    ) -> Tile | None:
        """Return the tile of the calls from ``first`` to ``last`` in the fewest pieces that are small; None if they
        cannot run piece by piece. Other arguments: see `_tiles_of`."""
        large_reads = {
            value for op in self._data_ops if op.call is not None and first <= op.call <= last
            for value in self._nodes[op.index].reads if value in large
        }  # fmt: skip
        makers = {self._call_of(value) for value in large_reads}
        for axis in self.axes:
            repeats = tuple(
                tile.first for tile in level
                if tile.last < first and tile.axis == axis and any(tile.first <= call <= tile.last for call in makers)
            )  # fmt: skip
            smallest_pieces = None
            for pieces in PIECES:
                tile = Tile(first, last, axis, pieces, repeats)
                segment = self.segment(first, last, axis, pieces, repeated_ranges(tile, level))
                if segment is None or pieces > _max_pieces(segment, axis):
                    break
                smallest_pieces = tile
                if BACKWARD_FACTOR * segment.inner_bytes * PIECE_SHARE <= pieces * budget:
                    break
            if smallest_pieces is not None:
                return smallest_pieces
        return None

    def _candidates(self, call: int, tiles: Sequence[Tile]) -> Iterator[tuple[Segment, Axis, int]]:
        """Yield (segment, axis, largest number of pieces) of the segments around a call.

        A segment contains each of ``tiles`` as a whole or not at all.
        """
        if call not in self.calls:
            return
        index = self.calls.index(call)
        for axis in (*self.axes, *self.token_axes(call)):
            # longer and longer, until calls cannot run piece by piece, even in two: backward, then forward
            for begin in range(index, max(-1, index - MAX_CALLS), -1):
                first = self.calls[begin]
                if self.segment(first, call, axis, pieces=2) is None:
                    break
                if first in self._in_place:
                    continue
                for last in self.calls[index : begin + MAX_CALLS]:
                    segment = self.segment(first, last, axis, pieces=2)
                    if segment is None:
                        break
                    if (first, last) not in self._sharing and not any(_cuts(tile, first, last) for tile in tiles):
                        yield segment, axis, _max_pieces(segment, axis)

    def _overwritten(self, tiled: Tiled, inside: Sequence[GraphOp]) -> int:
        """Return the bytes of a result's gradient whose memory the segment's derivative reuses; 0 if it reuses none.

        The derivative may write the gradient of its first differentiable input over the gradient of a result that has
        the same layout (`Tiled.overwritable_gradient`), unless an op outside of the segment reads that result's
        gradient.
        """
        values, program = self._graph.values, tiled.program
        kinds = (values[values[v].base].kind for v in program.inputs)
        gets_gradient = [kind not in ("input", "buffer", "constant") for kind in kinds]  # by input
        if True not in gets_gradient or tiled.overwritable_gradient(gets_gradient) is None:
            return 0
        indices = {op.index for op in inside}
        derivatives = {op.index for op in self._graph.backward_ops if op.gradient_of in indices}
        operands = {value for index in derivatives for value in self._graph.ops[index].reads}
        maker = self._graph.maker
        gradients = {v for v in operands if v in maker and maker[v].phase == "backward"}
        incoming = {v for v in gradients if maker[v].index not in derivatives}  # of the segment's results
        if any(incoming.intersection(op.reads) for op in self._graph.backward_ops if op.index not in derivatives):
            return 0  # an op outside of the segment reads it, too
        first_input = program.inputs[gets_gradient.index(True)]
        return program.likes[first_input].bytes  # as many as the overwritten gradient has

    def _call_of(self, value: int) -> int:
        """Return the number of the call that computes a value, -1 if none or unknown."""
        maker = self._graph.values[value].op
        call = None if maker is None else self._graph.ops[maker].call
        return -1 if call is None else call

    def _seconds_of(self, tile: Tile, tiles: Sequence[Tile]) -> float:
        """Return the seconds that a tile adds to the step. ``tiles``: all tiles, some of which it may repeat."""
        segment = self.segment(tile.first, tile.last, tile.axis, tile.pieces, repeated_ranges(tile, tiles))
        return 0.0 if segment is None else segment.seconds(tile.pieces)

    def _differentiates(self, segment: Segment, op: OverBudgetOp) -> bool:
        """Return whether the pieces that run in the place of an op compute gradients, as some do in the forward
        pass."""
        return op.in_backward or segment.tiled.yields_gradients

    def _bytes_beside_pieces(self, segment: Segment, op: OverBudgetOp) -> int:
        """Return the bytes expected to be live at an op if a segment around it runs piece by piece, without those of a
        piece.

        The values of the segment's ops, and in the backward pass the gradients of its results, are subtracted from the
        present level.
        """
        first, last = segment.first, segment.last
        own = [live for live in op.live if first <= live.call <= last and not live.is_returned_gradient]
        later_gradients = (live for live in op.live if live.by_derivative and live.call > last)
        incoming = [live for live in later_gradients if any(first <= reader <= last for reader in live.readers)]
        other_bytes = op.level - op.scratch - sum(live.bytes for live in (*own, *incoming))
        # the segment's operands have to be live: those that are not yet are added, recognized by their bytes
        live_before = Counter(live.bytes for live in op.live if not live.by_derivative and live.call < first)
        missing = Counter(size for _, size in segment.operands) - live_before
        other_bytes += sum(size * count for size, count in missing.items())
        if not self._differentiates(segment, op):
            return other_bytes + segment.result_bytes
        # gradients of weights are allocated before the first piece; those of later ops of the segment may be there
        returned = sum(live.bytes for live in op.live if first <= live.call <= last and live.is_returned_gradient)
        return other_bytes + max(0, segment.weight_bytes - returned) + segment.gradient_bytes


def repeated_ranges(tile: Tile, tiles: Sequence[Tile]) -> CallRanges:
    """Return first and last calls of the tiles that a tile repeats, and of those that these repeat.

    ``tile.repeats`` has the first calls of the tiles, which are among ``tiles``."""
    repeated = [other for other in tiles if other.first in tile.repeats and other.first < tile.first]
    nested = {pair for other in repeated for pair in repeated_ranges(other, tiles)}
    return tuple(sorted({(other.first, other.last) for other in repeated} | nested))


def _cuts(tile: Tile, first: int, last: int) -> bool:
    """Return whether the calls ``first`` to ``last`` overlap a tile without containing the whole tile and more."""
    overlaps = first <= tile.last and tile.first <= last
    contains_more = first <= tile.first and tile.last <= last and (first, last) != (tile.first, tile.last)
    return overlaps and not contains_more


def _max_pieces(segment: Segment, axis: Axis) -> int:
    """Return the most pieces of a segment: each has a sample, or `LEAST_ELEMENTS` elements of a spatial dimension."""
    return segment.tiled.smallest_axis_size // (LEAST_ELEMENTS if axis.dim else 1)


def over_budget_ops(
    graph: JointGraph, schedule: Schedule, outside_memory: OutsideMemory, target: int
) -> list[OverBudgetOp]:
    """Return the ops of a schedule at which more than ``target`` bytes are live, the most first. Of a call's ops, only
    the one with the most live bytes is returned."""
    counted = levels(schedule, outside_memory)
    actions = (*schedule.forward, *schedule.backward)
    values = {value: _live_value(graph, value) for value in {v for action in actions for v in action.makes}}
    live, highest = set[int](), dict[int, OverBudgetOp]()  # ids of values; by call
    for index, (level, action) in enumerate(zip((*counted.forward, *counted.backward), actions, strict=True)):
        live.update(action.makes)
        if level > target and action.op is not None:
            op = graph.ops[action.op]
            call = graph.call_of(op)
            if call is not None and (call not in highest or highest[call].level < level):
                highest[call] = OverBudgetOp(
                    call, level, live=tuple(values[value] for value in live), scratch=max(0, op.scratch),
                    in_backward=index >= len(counted.forward), is_tile=op.target in TILE_OPS,
                )  # fmt: skip
        live.difference_update(action.frees)
        if action.overwritten is not None:  # its memory is the result's now
            live.discard(action.overwritten)
    return sorted(highest.values(), key=lambda op: -op.level)


def _live_value(graph: JointGraph, value: int) -> LiveValue:
    """Return what a tile's expected bytes depend on: a value's size, and the calls that compute and read it."""
    maker = graph.values[value].op
    op = None if maker is None else graph.ops[maker]
    call = None if op is None else graph.call_of(op)
    readers = {graph.call_of(op) for op in graph.backward_ops if value in op.reads} - {None}
    return LiveValue(
        graph.values[value].bytes,
        call=-1 if call is None else call,
        by_derivative=op is not None and op.phase == "backward",
        readers=frozenset(reader for reader in readers if reader is not None),
        is_returned_gradient=any(graph.base(gradient) == value for _, gradient in graph.gradients),
    )


def _without_copies_for_backward(graph: JointGraph) -> list[GraphOp]:
    """Return the forward ops without the ``detach`` of values that only the derivative reads, such as the statistics of
    a group norm. The derivative of a segment computes such values itself."""
    forward = [op for op in graph.ops if op.phase == "forward"]
    read = {value for op in forward for value in _node(op).reads} | set(graph.outputs)
    return [op for op in forward if op.target != "aten.detach.default" or not read.isdisjoint(_node(op).outputs)]


def _one_result_each(ops: Sequence[GraphOp]) -> list[GraphOp]:
    """Return the ops with one for each result in the place of an op that returns several views. The first keeps its
    index; those of the others are negative."""
    split, parts_with_new_index = list[GraphOp](), 0
    for op in ops:
        views = views_one_by_one(op.target, op.args, op.kwargs, len(op.outputs))
        if not views:
            split.append(op)
        index = op.index
        for (target, args), value in zip(views, op.outputs, strict=False):
            if value is None:  # nothing reads it
                continue
            seconds = op.seconds / len(views)
            split.append(
                replace(op, index=index, target=target, args=args, kwargs={}, outputs=(value,), seconds=seconds)
            )
            parts_with_new_index += 1
            index = -parts_with_new_index
    return split


def _node(op: GraphOp) -> Node:
    """Return a forward op as a node of a segment's program. A batch norm updates no running statistics there."""
    target, args, kwargs = op.target, op.args, op.kwargs
    if target == "aten._native_batch_norm_legit_functional.default":
        target = "aten._native_batch_norm_legit.default"
        args, kwargs = without_running_statistics(target, args, kwargs), {}
    return Node(target, args, kwargs, tuple(value for value in op.outputs if value is not None))
