"""Run a program piece by piece along an axis, forward and backward.

Each piece makes its part of the results, from as much of the operands as these need: neighbours compute their common
border twice. The inner values of a segment so exist one piece at a time. Norms over the axis need their statistics
first: a pass over all pieces for those that depend on no other, one for those that depend on these, and so on. The
backward pass computes each piece again under autograd. For such norms, the last first, passes add up the two sums of
their derivatives, and a last pass computes the gradients of what the segment reads.

A norm of what the segment reads itself costs no pass: its statistics are those of a tensor that is there. The gradient
of its result is collected in the place of that of its input, and turned into it at the end.

A sum over the axis, such as a loss, is a sum over the pieces. What only linear ops make of it is one, too. Where no
gradient flows into it, as into the number of targets that count, it is computed first, as statistics are.

A segment of which a single sum comes out needs no second run: its gradients for a gradient of 1 are computed together
with it, and are multiplied by the gradient once that is known.

Values are those of the whole but for the order of sums.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from memplan.planning.graph.joint_graph import Ref
from memplan.planning.graph.op_schema import arguments_of, overload
from memplan.planning.graph.tensor_like import Like
from memplan.planning.tiles import pools
from memplan.planning.tiles.convolutions import CONVOLUTIONS
from memplan.planning.tiles.norms import Norm, Normalize, Statistics, gradient_sums, input_gradient, norm_of
from memplan.planning.tiles.products import Factor, Product, weight_factor
from memplan.planning.tiles.program import Node, NotTileable, Program
from memplan.planning.tiles.rules import RULES, AxisPlacement, Call, Part, Window, element_range, run_whole
from memplan.planning.tiles.sums import Sum, keeps_sum, sum_of
from memplan.planning.tiles.unread import WITHOUT_VALUES

Phase = Literal["statistics", "forward", "backward"]
DerivativeSums = tuple[Tensor, Tensor]
"""sum(dy) and sum(dy x') in the derivative of a norm, see `gradient_sums`."""
StatisticsByNode = Mapping[int, tuple[Tensor, ...]]
"""By index of a node: mean and variance of a norm, or the total of a sum."""


@dataclass(frozen=True)
class Axis:
    """Dimension along which a segment runs piece by piece."""

    dim: int
    """0: samples of the batch; 1: tokens of a batch; 2 and more: a dimension of space."""
    samples: int = 0
    """Samples of the batch, for dimensions 0 and 1."""
    tokens: int = 0
    """Tokens of a sample, for dimension 1."""


@dataclass(frozen=True)
class Tile:
    """A segment of a step that runs piece by piece."""

    first: int
    """Number of its first call of a torch function in the trace."""
    last: int
    """Number of its last call."""
    axis: Axis
    pieces: int
    repeats: tuple[int, ...] = ()
    """First calls of earlier tiles of the step whose ops each piece runs again, so that it needs none of their results
    as a whole: the encoder's level for a decoder's, in a U-Net."""


class Tiled:
    """A program that runs piece by piece.

    Args:
        program: the segment.
        axis: where to cut.
        pieces: number of pieces.

    Raises:
        NotTileable: an op has no rule along the axis, or mixes its elements.
    """

    def __init__(self, program: Program, axis: Axis, pieces: int) -> None:
        """Place the axis in each value, and check that each piece has something to compute."""
        self.program, self.axis, self.pieces = program, axis, pieces
        values = (*program.inputs, *(value for node in program.nodes for value in node.outputs))
        self.shapes = {value: program.likes[value].shape for value in values}
        """By value: the shape of the whole, not of a piece."""
        self.placements = dict[int, AxisPlacement]()
        """By value that lies along the axis: where the axis is in it."""
        self.norms = dict[int, Norm]()
        """Norms over the axis, by the index of their node."""
        self.precomputed_sums = dict[int, Like]()
        """Sums over the axis that a pass computes before the pieces run: tensors like them, by index of the node."""
        self.partial_sums = set[int]()
        """Sums over the axis, and values computed from these, of which each piece computes its part: the parts of all
        pieces add up to the value."""
        self.measured_workspaces = dict[tuple[str, str], int]()
        """Bytes that an op of the tile allocates and frees again, by the op and its arguments, once measured."""
        self._maker_of = {value: node for node in program.nodes for value in node.outputs[:1]}
        """By value that is the first result of a node: the node."""
        self._differentiable = set(program.inputs) - program.inputs_without_gradient
        """Values into which a gradient flows."""
        self._known_windows = dict[tuple[tuple[int, Window], ...], Mapping[int, Window]]()
        """Results of `windows`, which each step asks for again."""
        self._known_last_reads = dict[frozenset[int], Mapping[int, Sequence[int]]]()
        """Results of `last_read_at`."""
        self._statistics_needed_by = dict[int, frozenset[int]]()
        """By value: indices of the norms and precomputed sums that it depends on."""
        # where the axis lies in each value, from the inputs on; an op without a rule raises
        for value in program.inputs:
            self._place_input(value)
        self.tiled_nodes = [self._tile_node(index, node) for index, node in enumerate(program.nodes)]
        """By index of a node: how a piece computes it."""
        # what can be cut so, but not run
        read = {value for node in program.nodes for value in node.reads} | set(program.outputs)
        second = [node.name for node in program.nodes if read.intersection(node.outputs[1:])]
        if second:
            raise NotTileable(f"something reads the second result of {second[0]}")
        for like in (program.likes[value] for value in program.outputs):
            if any(size > 1 and stride == 0 for size, stride in zip(like.shape, like.stride, strict=True)):
                raise NotTileable("a result of the segment repeats its elements")
        self._results_on_axis = tuple(value for value in program.outputs if value in self.placements)
        if not (self._results_on_axis or self.partial_sums):
            raise NotTileable("a result of the segment does not lie along the axis")
        if not program.outputs:
            raise NotTileable("nothing reads a result of the segment")
        if pieces > self.smallest_axis_size:
            raise NotTileable(f"there are {self.smallest_axis_size} elements for {pieces} pieces")
        border_pieces = (0, pieces - 1) if axis.dim else ()  # samples have no padding
        windows = (self.windows(self._windows_to_compute(piece)) for piece in border_pieces)
        if any(low >= high for of_piece in windows for low, high in of_piece.values()):
            raise NotTileable("a piece would read nothing but padding")

    def _place_input(self, value: int) -> None:
        """Note where the axis lies in an input of the segment, if it depends on the step's data and has the axis."""
        shape, dim, samples = self.shapes[value], self.axis.dim, self.axis.samples
        if value in self.program.static_inputs or not shape:
            return
        if dim == 1 and samples and shape[0] != samples:  # samples and tokens are merged
            tokens = shape[0] // samples
            # targets can lack the first token of a sample
            if shape[0] % samples == 0 and abs(tokens - self.axis.tokens) <= 1:
                self.placements[value] = AxisPlacement(dim=0, elements_per_position=1, repetitions=samples)
        elif dim:
            if dim > 1 and self._lacks_channels(value):
                dim -= 1
            if len(shape) > dim and shape[dim] > 1:  # a single element is read by each piece
                self.placements[value] = AxisPlacement(dim)
        elif shape[0] and shape[0] % samples == 0:  # samples, maybe merged with another dimension
            self.placements[value] = AxisPlacement(dim=0, elements_per_position=shape[0] // samples)

    def _lacks_channels(self, value: int) -> bool:
        """Return whether an input has samples and space, but no channels, as the class of each pixel."""
        shape, rank = self.shapes[value], max(len(self.shapes[v]) for v in self.program.inputs)
        spatial_shapes = {like.shape[2:] for like in self.program.likes.values() if len(like.shape) == rank}
        return value in self.program.inputs_without_gradient and len(shape) == rank - 1 and shape[1:] in spatial_shapes

    def _tile_node(self, index: int, node: Node) -> _TiledNode:
        """Return how a node runs piece by piece, and note which statistics and gradients its results depend on.

        ``index``: of the node.
        """
        if any(value in self._differentiable for value in node.reads) and node.name != "detach":
            floating = (value for value in node.outputs if self.program.likes[value].dtype.is_floating_point)
            self._differentiable.update(floating)
        tiled_node = self._place_result(index, node)
        needed = frozenset[int]().union(*(self._statistics_needed_by.get(value, ()) for value in node.reads))
        if index in self.norms or index in self.precomputed_sums:
            needed |= {index}
        self._statistics_needed_by.update(dict.fromkeys(node.outputs, needed))
        return tiled_node

    def _place_result(self, index: int, node: Node) -> _TiledNode:
        """Return how a node runs piece by piece, and note where the axis lies in its result. Raises NotTileable.

        ``index``: of the node.
        """
        if self.partial_sums.intersection(node.reads):
            arguments = arguments_of(node.target, node.args, node.kwargs)
            if not keeps_sum(node.name, arguments, _one_of(self.partial_sums), _one_of(self.placements)):
                raise NotTileable(f"{node.name} reads a sum over the axis, which each piece has only a part of")
            self.partial_sums.add(node.outputs[0])
            return _WholeNode(node)
        on_axis = [value for value in node.reads if value in self.placements]
        if not on_axis:
            return _WholeNode(node)
        first = on_axis[0]
        norm = norm_of(node, self.placements[first].dim)
        if norm is not None and norm.input == first:
            self.norms[index], self.placements[norm.output] = norm, self.placements[first]
            return _NormNode(node, index, norm, self.placements[first])
        call = Call(node, self.shapes, self.placements)
        rule = sum_of(call)
        if rule is not None:
            return self._place_sum(index, call, rule)
        self.placements[node.outputs[0]] = call.result_placement
        return _CutNode(node, index, call, weight_factor(node, self._maker_of, self.program))

    def _place_sum(self, index: int, call: Call, rule: Sum) -> _TiledNode:
        """Return how a sum over the axis runs piece by piece, and note whether a pass before the pieces computes it, or
        each piece its part.

        ``index``: of the node; ``rule``: of its op.
        """
        node, summed = call.node, call[rule.summed_operand].value
        rule.operand_parts(call, (0, self.size(summed)))  # raises where it combines axes
        result = self.program.likes[node.outputs[0]]
        if summed not in self._differentiable:  # all ops may read it then, not only those that are linear in it
            if rule.divides_by_weights(call):
                raise NotTileable(f"{node.name} has no gradient")
            self.precomputed_sums[index] = result
        else:
            self.partial_sums.add(node.outputs[0])
            if rule.divides_by_weights(call):  # a pass before the pieces computes the sum of its weights
                self.precomputed_sums[index] = Like((), (), torch.float64, result.device)
        return _SumNode(node, index, call, rule)

    def size(self, value: int) -> int:
        """Return the size of the axis in a value, in positions."""
        placement = self.placements[value]
        return self.shapes[value][placement.dim] // (placement.elements_per_position * placement.repetitions)

    def own_window(self, value: int, piece: int, pieces: int | None = None) -> Window:
        """Return the window of a value's axis that a piece counts as its own: those of all pieces do not overlap.

        ``pieces``: their number; None: that of the tile.
        """
        size, pieces = self.size(value), pieces or self.pieces
        return piece * size // pieces, (piece + 1) * size // pieces

    @cached_property
    def _computed_by_pieces(self) -> tuple[int, ...]:
        """Values along the axis of which every piece computes its own window: results, and operands of norms and sums
        over the axis."""
        return *self._results_on_axis, *self._norm_inputs, *self._operands_of_partial_sums

    @cached_property
    def smallest_axis_size(self) -> int:
        """Smallest size of the axis among the values of which every piece computes a window."""
        return min(map(self.size, self._computed_by_pieces))

    @cached_property
    def unlike_pieces(self) -> list[int]:
        """Pieces of which one takes the most memory, in order: the first and the last, which pad, and of all pieces
        whose windows have the same sizes the first. A smaller one can take more, as sizes select kernels."""
        piece_of_sizes = dict[tuple[tuple[int, int], ...], int]()
        for piece in range(self.pieces):
            windows = self.windows(self._windows_to_compute(piece))
            sizes = tuple(sorted((value, high - low) for value, (low, high) in windows.items()))
            at_border = self.axis.dim > 0 and piece in (0, self.pieces - 1)
            piece_of_sizes.setdefault((*sizes, (-1, piece)) if at_border else sizes, piece)
        return list(piece_of_sizes.values())

    @property
    def result_likes(self) -> list[Like]:
        """Shapes, strides and dtypes of the results."""
        return [self.program.likes[value] for value in self.program.outputs]

    @property
    def statistic_likes(self) -> list[Like]:
        """Shapes, strides and dtypes of the statistics: mean and variance of each norm over the axis, then totals of
        sums."""
        likes = list[Like]()
        for norm in self.norms.values():
            x = self.program.likes[norm.input]
            shape = (1, x.shape[1]) if norm.groups is None else (x.shape[0], norm.groups)
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            likes += [Like(shape, (shape[1], 1), wide, x.device)] * 2
        return [*likes, *self.precomputed_sums.values()]

    @cached_property
    def yields_gradients(self) -> bool:
        """Whether the gradients are computed together with the result: it is a single number, a sum over the axis.

        Not in float16, where small gradients need the scale of the loss, which the backward pass brings.
        """
        likes, outputs = self.program.likes, self.program.outputs
        if len(outputs) != 1 or outputs[0] not in self.partial_sums or likes[outputs[0]].shape != ():
            return False
        return all(likes[value].dtype != torch.float16 for value in self._differentiable)

    # -- passes and their work

    @cached_property
    def statistic_passes(self) -> list[list[int]]:
        """Passes over the pieces that compute statistics: for each, the nodes of the norms and sums whose statistics
        depend only on those of earlier passes."""
        pass_of = dict[int, int]()  # by node: the number of its pass
        for index in sorted((*self.norms, *self.precomputed_sums)):
            operands = self._operands_of_statistic(index)
            needed = frozenset[int]().union(*(self._statistics_needed_by.get(value, ()) for value in operands))
            pass_of[index] = 1 + max((pass_of[earlier] for earlier in needed), default=-1)
        return _grouped(pass_of)

    def _operands_of_statistic(self, index: int) -> Sequence[int]:
        """Return the values from which the statistic of node ``index`` is computed."""
        tiled_node = self.tiled_nodes[index]
        return tiled_node.read_by_total if isinstance(tiled_node, _SumNode) else [self.norms[index].input]

    @cached_property
    def derivative_sum_passes(self) -> list[list[int]]:
        """Passes over the pieces that compute sums of norms' derivatives: for each, the nodes of the norms on which
        only norms of earlier passes depend."""
        pass_of = dict[int, int]()  # by node of a norm: the number of its pass
        for index, norm in reversed(self.norms.items()):
            dependent = [
                later for later in pass_of if norm.output in self._dependencies_on_axis(self.norms[later].input)
            ]
            pass_of[index] = 1 + max((pass_of[later] for later in dependent), default=-1)
        return _grouped({index: number for index, number in pass_of.items() if index not in self.input_norms})

    @cached_property
    def input_norms(self) -> frozenset[int]:
        """Nodes of the norms of an input of the segment that nothing else reads: they need no pass of their own."""
        inputs, reads = set(self.program.inputs), Counter(v for node in self.program.nodes for v in node.reads)
        nodes = set[int]()
        for index, norm in self.norms.items():
            weights = {value for value in (norm.weight, norm.bias) if value is not None}
            if norm.input in inputs and reads[norm.input] == 1 and weights <= inputs:
                nodes.add(index)
        return frozenset(nodes)

    @cached_property
    def nodes_without_values(self) -> frozenset[int]:
        """Nodes whose results the backward pass does not need: neither the segment nor their own derivative reads
        them."""
        read = {value for node in self.program.nodes for value in node.reads}
        return frozenset(
            index
            for index, node in enumerate(self.program.nodes)
            if node.target in WITHOUT_VALUES
            and isinstance(self.tiled_nodes[index], _CutNode)
            and node.outputs[0] not in read
        )

    def _dependencies_on_axis(self, value: int) -> Collection[int]:
        """Return the values along the axis that a value depends on, itself included; none if it is off the axis."""
        if value not in self.placements:
            return ()
        return self.windows({value: (0, self.size(value))})

    def runs_by_op(self, phase: Phase) -> list[float]:
        """Return how often a phase computes each op of the program: 1.0 if all pieces compute it once.

        The statistics and the backward pass go over the pieces several times, or not at all.
        """
        if phase == "forward":
            return [1.0] * len(self.program.nodes)
        return self._runs_in_statistics if phase == "statistics" else self._runs_in_backward

    @cached_property
    def _runs_in_statistics(self) -> list[float]:
        """By op: how often the passes for statistics compute it."""
        counts = Counter[int]()
        for nodes in self.statistic_passes:
            reads = [read for index in nodes for read in self._operands_of_statistic(index)]
            counts.update({value for read in reads for value in self._dependencies_on_axis(read)})
        return [float(counts[node.outputs[0]]) if node.outputs else 0.0 for node in self.program.nodes]

    @cached_property
    def _runs_in_backward(self) -> list[float]:
        """By op: how often the backward pass computes it, without its derivative."""
        if self.yields_gradients:
            return [0.0] * len(self.program.nodes)
        passes = 1.0 + len(self.derivative_sum_passes)
        return [0.0 if at in self.nodes_without_values else passes for at in range(len(self.program.nodes))]

    @cached_property
    def derivatives_by_op(self) -> list[float]:
        """By op: how often the backward pass computes its derivative, 1.0 for the gradients of all operands.

        A pass for the sums of a norm goes back to that norm, and needs no gradients of weights: half of a derivative.
        """
        counts = list[float]()
        for index, node in enumerate(self.program.nodes):
            sum_passes = 0
            if self.derivative_sum_passes and node.outputs:
                dependencies = set(self._dependencies_on_axis(node.outputs[0]))
                norms_before = {n for n, norm in self.norms.items() if norm.output in dependencies and n != index}
                sum_passes = sum(not norms_before.isdisjoint(norms) for norms in self.derivative_sum_passes)
            has_weight = any(value in self.program.static_inputs for value in node.reads)
            counts.append(1.0 + (0.5 if has_weight else 1.0) * sum_passes)
        return counts

    def overlap_by_op(self, pieces: int) -> list[float]:
        """Return for each op how often a run in this number of pieces computes an element of its result, on average."""
        windows = self.windows(self._windows_to_compute(pieces // 2, pieces))  # of a piece with borders on both sides
        runs_per_element = list[float]()
        for node in self.program.nodes:
            value, runs = node.outputs[0] if node.outputs else -1, 1.0
            if value in self.placements and value in windows:
                low, high = windows[value]
                runs = max(1.0, (high - low) * pieces / self.size(value))
            runs_per_element.append(runs)
        return runs_per_element

    # -- windows

    def windows(self, goals: Mapping[int, Window]) -> Mapping[int, Window]:
        """Return the windows of all values along the axis that are needed to compute some windows, these included.

        ``goals``: the windows to compute, by value.
        """
        key = tuple(goals.items())
        if key not in self._known_windows:
            self._known_windows[key] = self._windows(goals)
        return self._known_windows[key]

    def _windows(self, goals: Mapping[int, Window]) -> dict[int, Window]:
        """Return the result of `windows`."""
        windows = dict(goals)
        for tiled_node in reversed(self.tiled_nodes):
            if tiled_node.output not in windows:
                continue
            for value, (_, (low, high)) in tiled_node.operand_parts(windows[tiled_node.output]).items():
                if value in self.placements:
                    # from elements of the dimension to positions of the axis, rounded outwards
                    elements_per_position = self.placements[value].elements_per_position
                    window = low // elements_per_position, -(-high // elements_per_position)
                    other = windows.get(value, window)  # what other readers need
                    windows[value] = min(other[0], window[0]), max(other[1], window[1])
        return windows

    def _windows_to_compute(self, piece: int, pieces: int | None = None) -> dict[int, Window]:
        """Return, by value, the windows that a piece of a backward pass must compute: all that are its own.
        ``pieces``: see `own_window`."""
        return {value: self.own_window(value, piece, pieces) for value in self._computed_by_pieces}

    def last_read_at(self, kept: frozenset[int]) -> Mapping[int, Sequence[int]]:
        """Return, by index of a node, the values that no later node reads, without those in ``kept``."""
        if kept not in self._known_last_reads:
            last_node = dict[int, int]()
            for index, node in enumerate(self.program.nodes):
                last_node.update(dict.fromkeys((*node.reads, *node.outputs), index))
            values_at = dict[int, list[int]]()
            for value, index in last_node.items():
                if value not in kept:
                    values_at.setdefault(index, []).append(value)
            self._known_last_reads[kept] = values_at
        return self._known_last_reads[kept]

    @cached_property
    def _norm_inputs(self) -> tuple[int, ...]:
        """Inputs of the norms over the axis."""
        return tuple(norm.input for norm in self.norms.values())

    @cached_property
    def _operands_of_partial_sums(self) -> tuple[int, ...]:
        """Operands along the axis of the sums of which each piece computes its part."""
        sums = [node for node in self.tiled_nodes if isinstance(node, _SumNode) and node.output in self.partial_sums]
        return tuple(value for sum_node in sums for value in sum_node.node.reads if value in self.placements)

    @cached_property
    def read_by_sums_alone(self) -> frozenset[int]:
        """Values that a piece must compute for its parts of sums, and that nothing reads afterwards."""
        return frozenset(self._operands_of_partial_sums) - {*self._results_on_axis, *self._norm_inputs}

    # -- computing

    def statistics(self, tensors: Sequence[Tensor], pieces: Sequence[int] | None = None) -> list[Tensor]:
        """Return mean and variance of each norm over the axis, then the totals of sums: tensors like `statistic_likes`.

        Args:
            tensors: inputs of the program.
            pieces: only these run, to measure what memory a piece takes; None: all.
        """
        known = dict[int, tuple[Tensor, ...]]()  # by node
        with torch.no_grad():
            for nodes in self.statistic_passes:
                statistics_of = {index: Statistics(self.norms[index]) for index in nodes if index in self.norms}
                total_of = {
                    index: _Total(self.precomputed_sums[index]) for index in nodes if index in self.precomputed_sums
                }
                operands = [value for index in nodes for value in self._operands_of_statistic(index)]
                for piece in pieces or range(self.pieces):
                    goals = {value: self.own_window(value, piece) for value in operands if value in self.placements}
                    run = _Run(self, tensors, known, goals, piece, computes_partial_sums=False)
                    run.until(max(nodes))  # no node after the pass's last is needed
                    for index, statistics in statistics_of.items():
                        norm_input = self.norms[index].input
                        statistics.add(run.part(norm_input, goals[norm_input]))
                    for index, total in total_of.items():
                        sum_node = self.tiled_nodes[index]
                        assert isinstance(sum_node, _SumNode)
                        total.add(sum_node.part_of_total(run))
                    del run  # before the next piece takes its memory
                for index, statistics in statistics_of.items():
                    known[index] = statistics.result(self.program.likes[self.norms[index].input].dtype)
                for index, total in total_of.items():
                    known[index] = (total.result(),)
        return [tensor for index in (*self.norms, *self.precomputed_sums) for tensor in known[index]]

    def forward(
        self, tensors: Sequence[Tensor], statistics: Sequence[Tensor], pieces: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Return the results.

        Args:
            tensors: inputs of the program.
            statistics: what `statistics` returned.
            pieces: only these run, to measure what memory a piece takes; None: all.
        """
        statistics_by_node, results = self._by_node(statistics), _Results(self)
        computed = (*self._results_on_axis, *self._operands_of_partial_sums)
        with torch.no_grad():
            for piece in pieces or range(self.pieces):
                goals = {value: self.own_window(value, piece) for value in computed}
                run = _Run(self, tensors, statistics_by_node, goals, piece)
                run.until(stop=None)
                results.add(run)
                del run  # before the next piece takes its memory
        return results.finished()

    def forward_with_gradients(
        self, tensors: Sequence[Tensor], statistics: Sequence[Tensor], needed: Sequence[bool],
        pieces: Sequence[int] | None = None,
    ) -> list[Tensor]:  # fmt: skip
        """Return the result of a segment that `yields_gradients`, then the gradients of the inputs for a gradient of 1.

        Arguments: see `backward`.
        """
        results = _Results(self)
        one = torch.ones((), dtype=self.result_likes[0].dtype, device=self.result_likes[0].device)
        computed = self.backward(tensors, statistics, [one], needed, pieces, results=results)
        return [*results.finished(), *(gradient for gradient in computed if gradient is not None)]

    def backward(
        self, tensors: Sequence[Tensor], statistics: Sequence[Tensor], gradients: Sequence[Tensor | None],
        needed: Sequence[bool], pieces: Sequence[int] | None = None, into: Tensor | None = None,
        results: _Results | None = None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Return the gradients of the inputs, None for those that need none.

        Args:
            tensors, statistics, pieces: see `forward`.
            gradients: of the results; None for zeros.
            needed: whether each input needs a gradient.
            into: gradient of the result at `overwritable_gradient`; the first gradient of an input is written over it.
            results: collects the results of the pieces, too.
        """
        overwriting_position = None if into is None else needed.index(True)
        # before all passes, so that what these take is the same with and without ``into``
        input_gradients = [
            into if position == overwriting_position
            else torch.zeros_like(tensor, dtype=self._sum_dtype(value)) if needs
            else None
            for position, (value, tensor, needs) in enumerate(zip(self.program.inputs, tensors, needed, strict=True))
        ]  # fmt: skip
        state = _BackwardState(tensors, self._by_node(statistics), gradients, needed, input_gradients)
        for norms in self.derivative_sum_passes:
            for piece in pieces or range(self.pieces):
                self._add_piece_to_derivative_sums(piece, norms, state)
            for index in norms:
                state.derivative_sums[index] = self._rounded_sums(index, state)
        for piece in pieces or range(self.pieces):
            self._add_piece_to_gradients(piece, state, overwriting_position, results)
        for index in self.input_norms:
            self._differentiate_input_norm(index, state)
        return [
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(input_gradients, tensors, strict=True)
        ]

    def gradient_sum_bytes(self, value: int) -> int:
        """Return the bytes of the sum over the pieces of the gradient of input ``value``."""
        return math.prod(self.program.likes[value].shape) * self._sum_dtype(value).itemsize

    def _sum_dtype(self, value: int) -> torch.dtype:
        """Return the dtype in which the gradients of the pieces are added up to that of input ``value``.

        A bias' gradient is often a small rest of large terms: rounded to float32 after each piece, it was five times as
        far from float64 as eager mode's. In half precision, so is that of a weight. One dimension takes few bytes.
        The gradients of `summed_factors` are added up by their product itself, which has one dtype.
        """
        like = self.program.likes[value]
        if value in self.placements or not like.dtype.is_floating_point:
            return like.dtype
        if len(like.shape) <= 1:
            return torch.float64
        is_half = like.dtype.itemsize < torch.float32.itemsize
        return torch.float32 if is_half and value not in self.summed_factors else like.dtype

    @cached_property
    def summed_factors(self) -> frozenset[int]:
        """Weights whose gradients products add up in place."""
        factors = (node.factor for node in self.tiled_nodes if isinstance(node, _CutNode))
        return frozenset(factor.weight for factor in factors if factor is not None)

    def overwritable_gradient(self, needed: Sequence[bool]) -> int | None:
        """Return the position of a result whose gradient can be overwritten by that of the first input which needs a
        gradient; None if there is none.

        Input and result must have the same layout, with the samples in the same place: then a piece writes only the
        part of the gradient that no later piece reads. Pieces of tokens or of space can read parts of their neighbours.
        ``needed``: whether each input needs a gradient.
        """
        value, likes = self.program.inputs[needed.index(True)], self.program.likes
        is_by_samples = self.axis.dim == 0
        if not is_by_samples or value not in self.placements:
            return None
        for position, output in enumerate(self.program.outputs):
            if likes[output] == likes[value] and self.placements[output] == self.placements[value]:
                return position
        return None

    def _by_node(self, statistics: Sequence[Tensor]) -> StatisticsByNode:
        """Return what `statistics` returned by node: mean and variance of norms, and the totals of sums."""
        of_norms, totals = statistics[: 2 * len(self.norms)], statistics[2 * len(self.norms) :]
        means_and_variances = zip(of_norms[::2], of_norms[1::2], strict=True)
        by_node: dict[int, tuple[Tensor, ...]] = dict(zip(self.norms, means_and_variances, strict=True))
        return by_node | {index: (total,) for index, total in zip(self.precomputed_sums, totals, strict=True)}

    # A piece is a call of its own: variables of a loop would hold its tensors while the next piece runs.

    def _add_piece_to_derivative_sums(self, piece: int, norms: Sequence[int], state: _BackwardState) -> None:
        """Add a piece's part of the sums in the derivatives of some norms to ``state.derivative_sums``, where those of
        all later norms are complete. ``norms``: indices of their nodes."""
        run = _Run(
            self, state.inputs, state.statistics, self._windows_to_compute(piece), piece, state.derivative_sums,
            detached_norms=norms, differentiates=True,
        )  # fmt: skip
        with torch.enable_grad():
            run.until(stop=None)
        norm_inputs = {index: norm_input for index, (norm_input, _) in run.detached.items()}
        leaves = [norm_result for _, norm_result in run.detached.values()]
        gradients_of_norm_results = self._derivative(run, piece, state.result_gradients, leaves)
        for (index, norm_input), dy in zip(norm_inputs.items(), gradients_of_norm_results, strict=True):
            self._add_to_derivative_sums(index, norm_input, dy, state)

    def _add_piece_to_gradients(
        self, piece: int, state: _BackwardState, overwriting_position: int | None, results: _Results | None
    ) -> None:
        """Add the gradients of a piece to ``state.input_gradients``, where all derivative sums are complete.

        In the place of the gradient of an input norm's input, that of the norm's result is collected.

        Args:
            piece: its number.
            state: of the pass.
            overwriting_position: of the input whose gradient is written over a result's; None: none is.
            results: collects the results of the pieces; None: they are not needed.
        """
        inputs, norm_inputs = self.program.inputs, {self.norms[index].input for index in self.input_norms}
        # run the piece under autograd, with the inputs and the results of norms of inputs as leaves
        run = _Run(
            self, state.inputs, state.statistics, self._windows_to_compute(piece), piece, state.derivative_sums,
            detached_norms=self.input_norms, differentiates=True,
        )  # fmt: skip
        run.weight_gradients = {
            value: state.input_gradients[position] for position, value in enumerate(inputs) if state.needed[position]
        }
        is_leaf = [needs and value not in norm_inputs for value, needs in zip(inputs, state.needed, strict=True)]
        leaves = run.leaves(is_leaf)
        with torch.enable_grad():
            run.until(stop=None)
        if results is not None:
            results.add(run)
        targets = [*leaves.values(), *(norm_result for _, norm_result in run.detached.values())]
        computed = self._derivative(run, piece, state.result_gradients, targets)
        if overwriting_position is not None:  # the result's gradient was read, in this part by this piece alone
            value, overwritten = inputs[overwriting_position], state.input_gradients[overwriting_position]
            assert overwritten is not None
            self.writable_part(overwritten, value, self.own_window(value, piece)).zero_()
        of_leaves, of_norm_results = computed[: len(leaves)], computed[len(leaves) :]
        for position, gradient in zip(leaves, of_leaves, strict=True):
            run.add_to_input_gradient(state.input_gradients[position], gradient, inputs[position])
        for (index, (norm_input, _)), dy in zip(run.detached.items(), of_norm_results, strict=True):
            norm = self.norms[index]
            whole = state.input_gradients[inputs.index(norm.input)]
            if whole is not None and dy is not None:
                place = self.writable_part(whole, norm.input, run.windows[norm.output])
                place.add_(dy.reshape(place.shape))
            self._add_to_derivative_sums(index, norm_input, dy, state)

    def _add_to_derivative_sums(self, index: int, x: Tensor, dy: Tensor | None, state: _BackwardState) -> None:
        """Add a part's contribution to the sums in the derivative of the norm at node ``index``, in float64.

        Args:
            index: of the node.
            x: part of the norm's input.
            dy: gradient of the part's result; None for zeros.
            state: of the pass.
        """
        if dy is None:
            return
        sums = gradient_sums(self.norms[index], x, *state.mean_and_variance(index), dy)
        sum_dy, sum_dy_x = (part.double() for part in sums)
        if index in state.derivative_sums:
            earlier_dy, earlier_dy_x = state.derivative_sums[index]
            sum_dy, sum_dy_x = earlier_dy + sum_dy, earlier_dy_x + sum_dy_x
        state.derivative_sums[index] = sum_dy, sum_dy_x

    def _rounded_sums(self, index: int, state: _BackwardState) -> DerivativeSums:
        """Return the sums in the derivative of the norm at node ``index`` in the dtype of its statistics; zeros if no
        gradient flows into it."""
        mean, _ = state.mean_and_variance(index)
        if index in state.derivative_sums:
            sum_dy, sum_dy_x = state.derivative_sums[index]
            return sum_dy.to(mean.dtype), sum_dy_x.to(mean.dtype)
        channels = self.shapes[self.norms[index].input][1]
        zeros = mean.new_zeros(mean.shape[0], channels)
        return zeros, zeros

    def _differentiate_input_norm(self, index: int, state: _BackwardState) -> None:
        """Turn the collected gradient of an input norm's result into that of its input, and add those of its weights.

        ``index``: of the norm's node.
        """
        norm, inputs = self.norms[index], self.program.inputs
        sums = self._rounded_sums(index, state)
        sum_dy, sum_dy_x = sums
        for parameter, total in ((norm.weight, sum_dy_x), (norm.bias, sum_dy)):
            gradient = None if parameter is None else state.input_gradients[inputs.index(parameter)]
            if gradient is not None:
                gradient.add_(total.sum(0))
        position = inputs.index(norm.input)
        gradient = state.input_gradients[position]
        if gradient is None:
            return
        whole_x = state.inputs[position].detach()
        weight = None if norm.weight is None else state.inputs[inputs.index(norm.weight)].detach()
        statistics, count = state.mean_and_variance(index), self.count(norm)
        for piece in range(self.pieces):
            window = self.own_window(norm.input, piece)
            x, dy = self.part(whole_x, norm.input, window), self.part(gradient, norm.input, window)
            input_gradient(norm, x, weight, *statistics, dy, sums, count, out=dy)

    def count(self, norm: Norm) -> int:
        """Return the number of elements that share a statistic of a norm."""
        x = self.shapes[norm.input]
        return math.prod(x) // (x[1] if norm.groups is None else x[0] * norm.groups)

    def _derivative(
        self, run: _Run, piece: int, result_gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of some leaves from a piece's part of the results' gradients; None for those without
        any.

        Args:
            run: the piece, after it ran under autograd.
            piece: its number.
            result_gradients: of the whole results; None for zeros.
            leaves: tensors of the run.
        """
        parts, gradients_of_parts = list[Tensor](), list[Tensor]()
        for value, gradient in zip(self.program.outputs, result_gradients, strict=True):
            own_window = self.own_window(value, piece) if value in self.placements else None
            if own_window is None and value not in self.partial_sums and piece:
                continue  # each piece computes the same: the first differentiates it
            with torch.enable_grad():
                part = run.values[value] if own_window is None else run.part(value, own_window)
            if gradient is not None and part.requires_grad:
                parts.append(part)
                gradients_of_parts.append(gradient if own_window is None else self.part(gradient, value, own_window))
            del part  # autograd is to hold the last reference
        if not parts or not leaves:
            return [None] * len(leaves)
        run.release()
        return torch.autograd.grad(parts, leaves, gradients_of_parts, allow_unused=True)

    def part(self, tensor: Tensor, value: int, window: Window) -> Tensor:
        """Return a window of a value that is there as a whole. ``value``: its id, which says where the axis lies."""
        return _narrowed(tensor, self.placements[value], *element_range(self.placements[value], window))

    def writable_part(self, tensor: Tensor, value: int, window: Window) -> Tensor:
        """Return a window of a whole value as a view to write to. A dimension that repeats the axis is split in two.

        ``value``: the value's id, which says where the axis lies.
        """
        return _narrowed_view(tensor, self.placements[value], *element_range(self.placements[value], window))


@dataclass(frozen=True)
class _BackwardState:
    """What the pieces of a backward pass read and add to."""

    inputs: Sequence[Tensor]
    """Inputs of the program."""
    statistics: StatisticsByNode
    result_gradients: Sequence[Tensor | None]
    """Gradients of the whole results; None for zeros."""
    needed: Sequence[bool]
    """Whether each input needs a gradient."""
    input_gradients: Sequence[Tensor | None]
    """By position of an input: the sum of its gradient over the pieces so far; None if it needs none."""
    derivative_sums: dict[int, DerivativeSums] = field(default_factory=dict)
    """By node of a norm: the sums in its derivative over the pieces so far."""

    def mean_and_variance(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the statistics of the norm at node ``index``."""
        mean, variance = self.statistics[index]
        return mean, variance


def _narrowed_view(tensor: Tensor, placement: AxisPlacement, low: int, high: int) -> Tensor:
    """Return a range of elements in each repetition of the axis, as a view; repetitions become a dimension of their
    own."""
    if placement.repetitions == 1:
        return tensor.narrow(placement.dim, low, high - low)
    return tensor.unflatten(placement.dim, (placement.repetitions, -1)).narrow(placement.dim + 1, low, high - low)


def _narrowed(tensor: Tensor, placement: AxisPlacement, low: int, high: int) -> Tensor:
    """Return a range of elements in each repetition of the axis, with the dimensions of the tensor."""
    part = _narrowed_view(tensor, placement, low, high)
    return part if placement.repetitions == 1 else part.flatten(placement.dim, placement.dim + 1)


class _Total:
    """A sum over the pieces, in float64 for floating-point numbers."""

    def __init__(self, like: Like) -> None:
        """``like``: a tensor like the sum, without data."""
        self._like = like
        dtype = torch.float64 if like.dtype.is_floating_point else like.dtype
        self._sum = torch.zeros(like.shape, dtype=dtype, device=like.device)
        """Of the pieces so far."""

    def add(self, part: Tensor) -> None:
        """Add the part of a piece."""
        self._sum += part

    def result(self) -> Tensor:
        """Return the sum, in its own dtype."""
        return self._like.empty().copy_(self._sum)


class _Results:
    """The results of a segment, filled piece by piece."""

    def __init__(self, tiled: Tiled) -> None:
        """Allocate the results along the axis, and sums for the others."""
        program = tiled.program
        self._tiled = tiled
        self._on_axis: dict[int, Tensor] = {}
        """Results along the axis, of which each piece computes a window."""
        self._off_axis: dict[int, _Total] = {}
        """Other results: partial sums, or the same in all pieces."""
        for value in program.outputs:
            if value in tiled.placements:
                self._on_axis[value] = program.likes[value].empty()
            else:
                self._off_axis[value] = _Total(program.likes[value])

    def add(self, run: _Run) -> None:
        """Add what a piece has computed."""
        tiled = self._tiled
        for value, result in self._on_axis.items():
            own_window = tiled.own_window(value, run.piece)
            place = tiled.writable_part(result, value, own_window)
            place.copy_(run.part(value, own_window).detach().reshape(place.shape))
        for value, total in self._off_axis.items():
            is_same_in_all = value not in tiled.partial_sums
            if run.piece == 0 or not is_same_in_all:
                total.add(run.values[value].detach())

    def finished(self) -> list[Tensor]:
        """Return the results in order."""
        outputs = self._tiled.program.outputs
        return [self._on_axis[value] if value in self._on_axis else self._off_axis[value].result() for value in outputs]


class _Run:
    """One piece of a program: the values that it has computed so far.

    Args:
        tiled: the program, cut along an axis.
        inputs: the whole inputs of the program.
        statistics: statistics of norms and totals of sums, by node.
        goals: windows to compute, by value.
        piece: number of the piece.
        derivative_sums: by node, the sums in the derivatives of norms.
        detached_norms: nodes of norms where derivatives end: their results become leaves of autograd.
        differentiates: whether only derivatives are wanted, so that some results need no values.
        computes_partial_sums: whether the piece computes its parts of sums over the axis.
    """

    def __init__(
        self, tiled: Tiled, inputs: Sequence[Tensor], statistics: StatisticsByNode, goals: Mapping[int, Window],
        piece: int, derivative_sums: Mapping[int, DerivativeSums] = {}, *, detached_norms: Collection[int] = (),
        differentiates: bool = False, computes_partial_sums: bool = True,
    ) -> None:  # fmt: skip
        self.tiled, self.piece, self.statistics, self._derivative_sums = tiled, piece, statistics, derivative_sums
        self.computes_partial_sums = computes_partial_sums
        self.windows, self._detached_norms = tiled.windows(goals), detached_norms
        """By value along the axis: the range of the axis that the piece needs of it."""
        kept = {*goals, *tiled.program.outputs, *tiled.program.static_inputs}  # after their last read
        if computes_partial_sums:
            kept -= tiled.read_by_sums_alone
        self.weight_gradients: Mapping[int, Tensor | None] = {}
        """By input: the gradient to which products with this weight add."""
        self._differentiates = differentiates
        self._nodes_without_values = tiled.nodes_without_values if differentiates else frozenset[int]()
        self.detached: dict[int, tuple[Tensor, Tensor]] = {}
        """By node in ``detached_norms``: the norm's input and its result, a leaf, both where the piece needs the
        result."""
        self.values: dict[int, Tensor] = {}
        """The piece's part of each value."""
        for value, tensor in zip(tiled.program.inputs, inputs, strict=True):
            self.values[value] = self._input_part(tensor.detach(), value)
        self._dropped_after = tiled.last_read_at(frozenset(kept))
        """By index of a node: values that are dropped after it."""

    def _input_part(self, whole: Tensor, value: int) -> Tensor:
        """Return the part of a whole input that the piece reads. ``value``: the input's id."""
        window = self.windows.get(value)
        return whole if window is None else self.tiled.part(whole, value, window)

    def add_to_input_gradient(self, whole: Tensor | None, part: Tensor | None, value: int) -> None:
        """Add the gradient of what the piece reads of an input where it lies in the gradient of the whole.

        None stands for zeros, or for a gradient that is not needed. ``value``: id of the input.
        """
        if whole is None or part is None:
            return
        window = self.windows.get(value)
        place = whole if window is None else self.tiled.writable_part(whole, value, window)
        place.add_(part.reshape(place.shape))

    def leaves(self, needed: Sequence[bool]) -> dict[int, Tensor]:
        """Make those inputs that need a gradient leaves of autograd, and return them by position."""
        leaves = dict[int, Tensor]()
        for position, value in enumerate(self.tiled.program.inputs):
            if needed[position]:
                leaves[position] = self.values[value] = self.values[value].detach().requires_grad_()
        return leaves

    def until(self, stop: int | None) -> None:
        """Run the nodes before node ``stop``, all for None, and drop each value after its last reader."""
        for index, tiled_node in enumerate(self.tiled.tiled_nodes[:stop]):
            if tiled_node.runs_in(self):
                tiled_node.run(self)
            for value in self._dropped_after.get(index, ()):
                self.values.pop(value, None)

    def op(self, index: int) -> Callable[..., Any]:
        """Return the function that computes node ``index``: its op, a faster function, or, where only its derivative is
        needed, a function without values."""
        target = self.tiled.program.nodes[index].target
        faster_pools = pools.POOLS_WITH_DERIVATIVE if self._differentiates else pools.POOLS_WITHOUT_DERIVATIVE
        if index in self._nodes_without_values:
            return WITHOUT_VALUES[target]
        return faster_pools.get(target) or CONVOLUTIONS.get(target) or overload(target)

    def operand(self, value: int, part: Part | None, result_placement: AxisPlacement) -> Tensor:
        """Return the part of a value that an op needs.

        Args:
            value: id of the value. The piece can have more of it than the part, for other readers.
            part: in elements of the whole; None for all.
            result_placement: of the axis in the op's result. A value off the axis, which is there as a whole, has the
                same repetitions.
        """
        tensor = self.values[value]
        if part is None:
            return tensor
        dim, (low, high) = part
        placement, begin = result_placement, 0
        if value in self.tiled.placements:  # the piece has a window of it, which begins at element `begin` of the whole
            placement = self.tiled.placements[value]
            begin, _ = element_range(placement, self.windows[value])
        if low == begin and high - low == tensor.shape[dim] // placement.repetitions:
            return tensor
        return _narrowed(tensor, replace(placement, dim=dim), low - begin, high - begin)

    def normalize(self, index: int, norm: Norm, placement: AxisPlacement) -> None:
        """Compute the result of the norm at node ``index`` over the axis. ``placement``: of the axis in its input."""
        tiled, x = self.tiled, self.values[norm.input]
        input_window, result_window = self.windows[norm.input], self.windows[norm.output]
        weight, bias = (None if v is None else self.values[v] for v in (norm.weight, norm.bias))
        # the elements of the input's window that no other piece counts
        own_window = tiled.own_window(norm.input, self.piece)
        low, high = max(own_window[0], input_window[0]), min(own_window[1], input_window[1])
        per_position = placement.elements_per_position
        own_range = placement.dim, (low - input_window[0]) * per_position, max(0, high - low) * per_position
        y: Tensor = Normalize.apply(
            norm, x, weight, bias, *self.statistics[index], self._derivative_sums.get(index), tiled.count(norm),
            own_range, self.piece == 0,
        )  # pyright: ignore[reportAssignmentType]  # fmt: skip
        if result_window != input_window:  # the piece has more of the input, for other readers
            begin = (result_window[0] - input_window[0]) * per_position
            y = y.narrow(placement.dim, begin, (result_window[1] - result_window[0]) * per_position)
        if index in self._detached_norms:
            y = y.detach().requires_grad_()
            self.detached[index] = self.part(norm.input, result_window).detach(), y
        self.values[norm.output] = y

    def part(self, value: int, window: Window) -> Tensor:
        """Return a window of a value that the piece has computed."""
        placement, (computed_begin, _) = self.tiled.placements[value], self.windows[value]
        begin, end = window
        shifted = begin - computed_begin, end - computed_begin
        return _narrowed(self.values[value], placement, *element_range(placement, shifted))

    def release(self) -> None:
        """Forget the values, so that the derivative frees what it has used."""
        self.values.clear()


@dataclass(frozen=True)
class _TiledNode:
    """A node of a program: which parts of operands it needs, and how a piece runs it."""

    node: Node

    @property
    def output(self) -> int:
        """Id of the first result; -1 without one."""
        return self.node.outputs[0] if self.node.outputs else -1

    def operand_parts(self, window: Window) -> Mapping[int, Part]:
        """Return the parts of operands that a window of the result needs, by value; operands without an entry as a
        whole."""
        return {}

    def runs_in(self, run: _Run) -> bool:
        """Return whether a piece has to compute the node."""
        return self.output in run.windows

    def run(self, run: _Run) -> None:
        """Compute the node and add its results to the values of a piece."""
        raise NotImplementedError


@dataclass(frozen=True)
class _WholeNode(_TiledNode):
    """A node off the axis, which each piece computes as a whole, or of its parts of sums."""

    def runs_in(self, run: _Run) -> bool:
        """Return whether its operands are known: those from sums may not be yet."""
        return all(value in run.values for value in self.node.reads)

    def run(self, run: _Run) -> None:
        """Compute all of the results."""
        result = run_whole(self.node, run.values.__getitem__)
        results = [result] if isinstance(result, Tensor) else list(result or ())
        run.values.update(zip(self.node.outputs, results, strict=False))


@dataclass(frozen=True)
class _CutNode(_TiledNode):
    """A node of which each piece computes a window, by its op's rule."""

    index: int
    call: Call
    factor: Factor | None = None
    """The weight of a product; None for other ops."""
    _known_parts: dict[Window, Mapping[int, Part]] = field(default_factory=dict, compare=False, repr=False)
    """Results of `operand_parts`, which each step asks for again."""

    def operand_parts(self, window: Window) -> Mapping[int, Part]:
        """Return the parts of operands that the op's rule needs for a window of the result."""
        if window not in self._known_parts:
            self._known_parts[window] = self.call.operand_parts(window)
        return self._known_parts[window]

    def run(self, run: _Run) -> None:
        """Compute the piece's window of the result. A product can add the gradient of its weight in place."""
        window = run.windows[self.output]
        parts, placement = self.operand_parts(window), run.tiled.placements[self.output]

        def part_of(value: int) -> Tensor:
            """Return the part of an operand that the window needs."""
            return run.operand(value, parts.get(value), placement)

        weight_gradient = None if self.factor is None else run.weight_gradients.get(self.factor.weight)
        if weight_gradient is not None and self.factor is not None:
            x, added_row = self.call["self"], None
            if self.call["mat1"]:  # addmm
                x, added_row = self.call["mat1"], run.values[self.call["self"].value]
            weight = run.values[self.factor.weight]
            run.values[self.output] = Product.apply(
                part_of(x.value), weight, added_row, self.factor.transposed, weight_gradient
            )  # pyright: ignore[reportArgumentType]
            return
        result = RULES[self.node.target].run(self.call, window, part_of, run.op(self.index))
        run.values[self.output] = result if isinstance(result, Tensor) else result[0]


@dataclass(frozen=True)
class _SumNode(_TiledNode):
    """A sum over the axis.

    Either it is one of `Tiled.partial_sums`: each piece computes its part of the result. Or an earlier pass has
    computed its total, and each piece uses that. Of a mean with weights, a partial sum, that pass computes the sum of
    the weights.
    """

    index: int
    call: Call
    rule: Sum

    @property
    def read_by_total(self) -> Sequence[int]:
        """Values from which the earlier pass computes its total: for a mean with weights their sum, else the sum
        itself."""
        if not self.rule.divides_by_weights(self.call):
            return self.node.reads
        return [self.call[name].value for name in ("target", "weight") if self.call[name] is not None]

    def runs_in(self, run: _Run) -> bool:
        """Return whether the node runs in a piece.

        Passes for statistics need no partial sums, of which some divide by weights that are not added up yet. Other
        sums run in all pieces: they hand on the total that an earlier pass has computed, if it has by then.
        """
        is_partial = self.output in run.tiled.partial_sums
        return run.computes_partial_sums if is_partial else True

    def run(self, run: _Run) -> None:
        """Compute the piece's part of the sum, or use the total that an earlier pass has computed."""
        (total,) = run.statistics.get(self.index, (None,))  # of the sum, or of its weights
        if self.output in run.tiled.partial_sums:
            run.values[self.output] = self.rule.piece_sum(self.call, self._part_of_operand(run), all_weights=total)
        elif total is not None:
            run.values[self.output] = total

    def part_of_total(self, run: _Run) -> Tensor:
        """Return a piece's part of what the earlier pass adds up: the sum, or the weights of a mean."""
        if self.rule.divides_by_weights(self.call):
            return self.rule.piece_weights(self.call, self._part_of_operand(run))
        return self.rule.piece_sum(self.call, self._part_of_operand(run), all_weights=None)

    def _part_of_operand(self, run: _Run) -> Callable[[int], Tensor]:
        """Return the function that returns a piece's part of an operand, by value: no element is in two pieces."""
        summed = self.call[self.rule.summed_operand].value
        parts = self.rule.operand_parts(self.call, run.tiled.own_window(summed, run.piece))
        return lambda value: run.operand(value, parts.get(value), run.tiled.placements[summed])


@dataclass(frozen=True)
class _NormNode(_TiledNode):
    """A norm over the axis."""

    index: int
    norm: Norm
    placement: AxisPlacement

    def operand_parts(self, window: Window) -> Mapping[int, Part]:
        """Return the same window of its input."""
        return {self.norm.input: Part(self.placement.dim, element_range(self.placement, window))}

    def run(self, run: _Run) -> None:
        """Normalize the piece's window by the statistics of the whole."""
        run.normalize(self.index, self.norm, self.placement)


def _grouped(group_of: Mapping[int, int]) -> list[list[int]]:
    """Return the keys by group, the smallest number of a group first."""
    return [[key for key, group in group_of.items() if group == number] for number in sorted(set(group_of.values()))]


def _one_of(values: Collection[int]) -> Callable[[Any], bool]:
    """Return the function that says whether an op's argument is one of these values."""
    return lambda argument: isinstance(argument, Ref) and argument.value in values
