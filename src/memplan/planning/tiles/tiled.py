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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from memplan.planning.graph.joint_graph import Ref
from memplan.planning.graph.op_schema import arguments_of, overload
from memplan.planning.graph.tensor_like import Like
from memplan.planning.tiles import pools
from memplan.planning.tiles.norms import Norm, Normalize, Statistics, gradient_sums, input_gradient, norm_of
from memplan.planning.tiles.products import Factor, Product, summed_factor
from memplan.planning.tiles.program import Node, NotTileable, Program
from memplan.planning.tiles.rules import RULES, Along, Call, Part, Window, elements, run_whole
from memplan.planning.tiles.sums import Sum, keeps_sum, sum_of
from memplan.planning.tiles.unread import UNREAD

Phase = Literal["statistics", "forward", "backward"]
Pair = tuple[Tensor, Tensor]
Known = Mapping[int, tuple[Tensor, ...]]
"""By node: mean and variance of a norm, or the total of a sum."""


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
        self.along = dict[int, Along]()
        """By value that lies along the axis: where the axis is in it."""
        self.norms = dict[int, Norm]()
        """Norms over the axis, by the index of their node."""
        self.totals = dict[int, Like]()
        """Sums over the axis that are known before the pieces run, by the index of their node."""
        self.partial = set[int]()
        """Sums over the axis of which each piece computes its part."""
        self.scratch = dict[tuple[str, str], int]()
        """Bytes that an op of the tile allocates and frees again, by the op and its arguments, once measured."""
        self._makers = {value: node for node in program.nodes for value in node.outputs[:1]}
        """By value that is the first result of a node: the node."""
        self._differentiable = set(program.inputs) - program.fixed
        """Values into which a gradient flows."""
        self._statistics_behind = dict[int, frozenset[int]]()
        """Nodes of statistics that a value depends on."""
        # where the axis lies in each value, from the inputs on; an op without a rule raises
        for value in program.inputs:
            self._place_input(value)
        self.steps = [self._step(at, node) for at, node in enumerate(program.nodes)]
        """By index of a node: how a piece computes it."""
        # what can be cut so, but not run
        read = {value for node in program.nodes for value in node.reads} | set(program.outputs)
        second = [node.name for node in program.nodes if read.intersection(node.outputs[1:])]
        if second:
            raise NotTileable(f"something reads the second result of {second[0]}")
        for like in (program.likes[value] for value in program.outputs):
            if any(size > 1 and stride == 0 for size, stride in zip(like.shape, like.stride, strict=True)):
                raise NotTileable("a result of the segment repeats its elements")
        self._joined = tuple(value for value in program.outputs if value in self.along)
        """Results along the axis."""
        if not (self._joined or self.partial):
            raise NotTileable("a result of the segment does not lie along the axis")
        if not program.outputs:
            raise NotTileable("nothing reads a result of the segment")
        if pieces > self.elements:
            raise NotTileable(f"there are {self.elements} elements for {pieces} pieces")
        border_pieces = (0, pieces - 1) if axis.dim else ()
        if any(low >= high for piece in border_pieces for low, high in self.windows(self._goals(piece)).values()):
            raise NotTileable("a piece would read nothing but padding")

    def _place_input(self, value: int) -> None:
        """Note where the axis lies in an input of the segment, if it depends on the step's data and has the axis."""
        shape, dim, samples = self.shapes[value], self.axis.dim, self.axis.samples
        if value in self.program.static or not shape:
            return
        if dim == 1 and samples and shape[0] != samples:  # samples and tokens are merged
            tokens = shape[0] // samples
            # targets can lack the first token of a sample
            if shape[0] % samples == 0 and abs(tokens - self.axis.tokens) <= 1:
                self.along[value] = Along(dim=0, unit=1, repeats=samples)
        elif dim:
            dim -= dim > 1 and self._is_map(value)  # else the axis is that of tokens, and no space
            if len(shape) > dim and shape[dim] > 1:  # a single element is read by each piece
                self.along[value] = Along(dim)
        elif shape[0] and shape[0] % samples == 0:  # samples, maybe merged with another dimension
            self.along[value] = Along(dim=0, unit=shape[0] // samples)

    def _is_map(self, value: int) -> bool:
        """Return whether an input has samples and space, but no channels, as the class of each pixel."""
        shape, rank = self.shapes[value], max(len(self.shapes[v]) for v in self.program.inputs)
        spaces = {like.shape[2:] for like in self.program.likes.values() if len(like.shape) == rank}
        return value in self.program.fixed and len(shape) == rank - 1 and shape[1:] in spaces

    def _step(self, at: int, node: Node) -> _Step:
        """Return how a node runs piece by piece, and note which statistics and gradients its results depend on.

        ``at``: index of the node.
        """
        if any(value in self._differentiable for value in node.reads) and node.name != "detach":
            floating = (value for value in node.outputs if self.program.likes[value].dtype.is_floating_point)
            self._differentiable.update(floating)
        step = self._step_of(at, node)
        behind = frozenset[int]().union(*(self._statistics_behind.get(value, ()) for value in node.reads))
        if at in self.norms or at in self.totals:
            behind |= {at}
        self._statistics_behind.update(dict.fromkeys(node.outputs, behind))
        return step

    def _step_of(self, at: int, node: Node) -> _Step:
        """Return how a node runs piece by piece, and note where the axis lies in its result. Raises NotTileable.

        ``at``: index of the node.
        """
        if self.partial.intersection(node.reads):
            arguments = arguments_of(node.target, node.args, node.kwargs)
            if not keeps_sum(node.name, arguments, _one_of(self.partial), _one_of(self.along)):
                raise NotTileable(f"{node.name} reads a sum over the axis, which each piece has only a part of")
            self.partial.add(node.outputs[0])
            return _Whole(node)
        on_axis = [value for value in node.reads if value in self.along]
        if not on_axis:
            return _Whole(node)
        first = on_axis[0]
        norm = norm_of(node, self.along[first].dim)
        if norm is not None and norm.input == first:
            self.norms[at], self.along[norm.output] = norm, self.along[first]
            return _Normalization(node, at, norm, self.along[first])
        call = Call(node, self.shapes, self.along)
        rule = sum_of(call)
        if rule is not None:
            return self._sum(at, call, rule)
        self.along[node.outputs[0]] = call.result_axis
        return _InPart(node, at, call, summed_factor(node, self._makers, self.program))

    def _sum(self, at: int, call: Call, rule: Sum) -> _Step:
        """Return how a sum over the axis runs piece by piece, and note whether pieces or a pass before them compute it.

        ``at``: index of the node; ``rule``: of the sum.
        """
        node, value = call.node, call[rule.operand].value
        rule.operand_parts(call, (0, self.size(value)))  # raises where it combines axes
        step, result = _Sum(node, at, call, rule), self.program.likes[node.outputs[0]]
        if value not in self._differentiable:  # a pass before the pieces computes it
            if rule.weighs(call):
                raise NotTileable(f"{node.name} has no gradient")
            self.totals[at] = result
        else:
            self.partial.add(node.outputs[0])
            if rule.weighs(call):  # such a pass computes the sum of its weights
                self.totals[at] = Like((), (), torch.float64, result.device)
        return step

    def size(self, value: int) -> int:
        """Return the number of elements of the axis in a value."""
        along = self.along[value]
        return self.shapes[value][along.dim] // (along.unit * along.repeats)

    def own(self, value: int, piece: int, pieces: int | None = None) -> Window:
        """Return the window of a value's axis that a piece makes and no other. ``pieces``: in so many pieces instead of
        the tile's."""
        size, pieces = self.size(value), pieces or self.pieces
        return piece * size // pieces, (piece + 1) * size // pieces

    @cached_property
    def elements(self) -> int:
        """Elements of the axis in the smallest result, or operand of a norm or sum over the axis: each piece has some
        of all."""
        return min(self.size(value) for value in (*self._joined, *self._normed, *self._summed))

    @cached_property
    def largest_piece(self) -> int:
        """The piece that computes most: with the borders on both sides, and a row more where pieces do not divide."""
        return max(range(self.pieces), key=self._computed_bytes)

    def _computed_bytes(self, piece: int) -> int:
        """Return the bytes of all values along the axis that a piece computes, with their borders."""
        windows, likes = self.windows(self._goals(piece)), self.program.likes
        return sum(likes[value].bytes * (high - low) // self.size(value) for value, (low, high) in windows.items())

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
        return [*likes, *self.totals.values()]

    @cached_property
    def yields_gradients(self) -> bool:
        """Whether the gradients are computed together with the result: a single sum comes out. Not in float16, where
        small gradients need the scale of the loss."""
        likes, outputs = self.program.likes, self.program.outputs
        if len(outputs) != 1 or outputs[0] not in self.partial or likes[outputs[0]].shape != ():
            return False
        return all(likes[value].dtype != torch.float16 for value in self._differentiable)

    # -- passes and their work

    @cached_property
    def statistic_passes(self) -> list[list[int]]:
        """Passes over the pieces that compute statistics: for each, the nodes of the norms and sums whose statistics
        depend only on those of earlier passes."""
        depths = dict[int, int]()  # by node: the number of its pass
        for at in sorted((*self.norms, *self.totals)):
            before = frozenset[int]().union(*(self._statistics_behind.get(v, ()) for v in self._statistic_reads(at)))
            depths[at] = 1 + max((depths[b] for b in before), default=-1)
        return _grouped(depths)

    def _statistic_reads(self, at: int) -> Sequence[int]:
        """Return the values along the axis from which the statistic of node ``at`` is computed."""
        step = self.steps[at]
        return step.total_reads if isinstance(step, _Sum) else [self.norms[at].input]

    @cached_property
    def sum_passes(self) -> list[list[int]]:
        """Passes over the pieces that compute sums of norms' derivatives: for each, the nodes of the norms on which
        only norms of earlier passes depend."""
        depths = dict[int, int]()  # by node of a norm: the number of its pass
        for at, norm in reversed(self.norms.items()):
            # those of the later norms whose input depends on this norm's result
            later = (depth for b, depth in depths.items() if norm.output in self._windows_of(self.norms[b].input))
            depths[at] = 1 + max(later, default=-1)
        return _grouped({at: depth for at, depth in depths.items() if at not in self.first_norms})

    @cached_property
    def first_norms(self) -> frozenset[int]:
        """Nodes of the norms of an input of the segment that nothing else reads: they need no pass of their own."""
        inputs, reads = set(self.program.inputs), Counter(v for node in self.program.nodes for v in node.reads)
        first = set[int]()
        for at, norm in self.norms.items():
            weights = {value for value in (norm.weight, norm.bias) if value is not None}
            if norm.input in inputs and reads[norm.input] == 1 and weights <= inputs:
                first.add(at)
        return frozenset(first)

    @cached_property
    def unread(self) -> frozenset[int]:
        """Nodes whose results the backward pass does not need: neither the segment nor their own derivative reads
        them."""
        read = {value for node in self.program.nodes for value in node.reads}
        return frozenset(
            at for at, node in enumerate(self.program.nodes)
            if node.target in UNREAD and isinstance(self.steps[at], _InPart) and node.outputs[0] not in read
        )  # fmt: skip

    def _windows_of(self, value: int) -> Collection[int]:
        """Return the values along the axis that a value depends on, itself included; none if it is off the axis."""
        if value not in self.along:
            return ()
        return self.windows({value: (0, self.size(value))})

    def runs(self, phase: Phase) -> list[float]:
        """Return how often a pass computes each op of the program, in whole ops.

        The statistics' and the backward pass go over the pieces several times, or not at all.
        """
        outputs = [node.outputs[0] if node.outputs else None for node in self.program.nodes]
        if phase == "forward":
            return [1.0] * len(outputs)
        if phase == "statistics":
            counts = Counter[int]()
            for nodes in self.statistic_passes:
                reads = [read for at in nodes for read in self._statistic_reads(at)]
                counts.update({value for read in reads for value in self._windows_of(read)})
            return [0.0 if output is None else float(counts[output]) for output in outputs]
        if self.yields_gradients:
            return [0.0] * len(outputs)
        count = 1.0 + len(self.sum_passes)
        return [0.0 if at in self.unread else count for at in range(len(outputs))]

    def derivatives(self) -> list[float]:
        """Return how often the backward pass computes the derivative of each op, in whole derivatives.

        A pass for the sums of a norm goes back to that norm, and needs no gradients of weights: half of a derivative.
        """
        counts = list[float]()
        for at, node in enumerate(self.program.nodes):
            before = set(self._windows_of(node.outputs[0])) if node.outputs else set()
            norms_before = {n for n, norm in self.norms.items() if norm.output in before and n != at}
            further = sum(not norms_before.isdisjoint(norms) for norms in self.sum_passes)
            has_weight = any(value in self.program.static for value in node.reads)
            counts.append(1.0 + (0.5 if has_weight else 1.0) * further)
        return counts

    def overlap(self, pieces: int) -> list[float]:
        """Return for each op how often a run in this number of pieces computes an element of its result, on average."""
        windows = self.windows(self._goals(pieces // 2, pieces))
        shares = list[float]()
        for node in self.program.nodes:
            value, share = node.outputs[0] if node.outputs else -1, 1.0
            if value in self.along and value in windows:
                low, high = windows[value]
                share = max(1.0, (high - low) * pieces / self.size(value))
            shares.append(share)
        return shares

    # -- windows

    def windows(self, goals: Mapping[int, Window]) -> dict[int, Window]:
        """Return the window of each value along the axis that is needed to compute these windows, by value."""
        windows = dict(goals)
        for step in reversed(self.steps):
            if step.output not in windows:
                continue
            for value, (_, (low, high)) in step.operand_parts(windows[step.output]).items():
                if value in self.along:
                    unit = self.along[value].unit
                    window = low // unit, -(-high // unit)  # from elements to the axis, rounded outwards
                    before = windows.get(value, window)
                    windows[value] = min(before[0], window[0]), max(before[1], window[1])
        return windows

    def _goals(self, piece: int, pieces: int | None = None) -> dict[int, Window]:
        """Return what a piece must compute: its part of the results, and of what norms and sums over the axis read.
        ``pieces``: see `own`."""
        return {value: self.own(value, piece, pieces) for value in (*self._joined, *self._normed, *self._summed)}

    @cached_property
    def _normed(self) -> tuple[int, ...]:
        """Inputs of the norms over the axis."""
        return tuple(norm.input for norm in self.norms.values())

    @cached_property
    def _summed(self) -> tuple[int, ...]:
        """Values along the axis that are summed up, of sums of which each piece computes its part."""
        steps = [step for step in self.steps if isinstance(step, _Sum) and step.output in self.partial]
        return tuple(value for step in steps for value in step.call.node.reads if value in self.along)

    @cached_property
    def passing(self) -> frozenset[int]:
        """Values that a piece must compute for its parts of sums, and that nothing reads afterwards."""
        return frozenset(self._summed) - {*self._joined, *self._normed}

    # -- computing

    def statistics(self, tensors: Sequence[Tensor], pieces: Sequence[int] | None = None) -> list[Tensor]:
        """Return mean and variance of each norm over the axis, then the totals of sums: tensors like `statistic_likes`.

        Args:
            tensors: inputs of the program.
            pieces: only these run, to measure what memory a piece takes; None: all.
        """
        known = dict[int, tuple[Tensor, ...]]()
        with torch.no_grad():
            for group in self.statistic_passes:
                collected = {at: Statistics(self.norms[at]) for at in group if at in self.norms}
                totals = {at: _Total(self.totals[at]) for at in group if at in self.totals}
                for piece in pieces or range(self.pieces):  # `run` goes before the next piece takes its memory
                    reads = [value for at in group for value in self._statistic_reads(at) if value in self.along]
                    goals = {value: self.own(value, piece) for value in reads}
                    run = _Run(self, tensors, known, goals, piece, sums_up=False)
                    run.until(max(group))  # no node after the group's last is needed
                    for at, statistics in collected.items():
                        value = self.norms[at].input
                        statistics.add(run.part(value, goals[value]))
                    for at, total in totals.items():
                        total.add(self.steps[at].total(run))  # pyright: ignore[reportAttributeAccessIssue]
                    del run
                for at, statistics in collected.items():
                    known[at] = statistics.result(self.program.likes[self.norms[at].input].dtype)
                for at, total in totals.items():
                    known[at] = (total.result(),)
        return [tensor for at in (*self.norms, *self.totals) for tensor in known[at]]

    def forward(
        self, tensors: Sequence[Tensor], statistics: Sequence[Tensor], pieces: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Return the results.

        Args:
            tensors: inputs of the program.
            statistics: what `statistics` returned.
            pieces: only these run, to measure what memory a piece takes; None: all.
        """
        known = self._known(statistics)
        results = _Results(self)
        with torch.no_grad():
            for piece in pieces or range(self.pieces):
                goals = {value: self.own(value, piece) for value in (*self._joined, *self._summed)}
                run = _Run(self, tensors, known, goals, piece)
                run.until(stop=None)
                results.add(run)
                del run
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
            into: the gradient at `overwritten`: the first computed gradient takes its place.
            results: collects the results, too.
        """
        known, sums = self._known(statistics), dict[int, Pair]()
        positions = {value: at for at, value in enumerate(self.program.inputs)}
        # before all passes, so that what these take is the same with and without ``into``
        inputs = zip(self.program.inputs, tensors, needed, strict=True)
        totals = [
            torch.zeros_like(tensor, dtype=self._sum_dtype(value, tensor)) if needs else None
            for value, tensor, needs in inputs
        ]
        over = -1
        if into is not None:
            over = needed.index(True)
            totals[over] = into
        for norms in self.sum_passes:
            self._add_up(norms, tensors, known, sums, gradients, pieces)
        first = {at: positions[self.norms[at].input] for at in self.first_norms}
        for piece in pieces or range(self.pieces):
            self._add_piece(piece, tensors, known, sums, gradients, needed, totals, over, first, results)
        for at, position in first.items():
            self._finish(at, tensors, _pair(known[at]), sums, totals, position)
        return [
            None if total is None else total.to(tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)
        ]

    def _sum_dtype(self, value: int, tensor: Tensor) -> torch.dtype:
        """Return the dtype in which the gradients of the pieces are added up to that of input ``value``.

        A bias' gradient is often a small rest of large terms: rounded to float32 after each piece, it was five times as
        far from float64 as eager mode's. In half precision, so is that of a weight. One dimension takes few bytes.
        The gradients of `summed_factors` are added up by their product itself, which has one dtype.
        """
        if value in self.along or not tensor.dtype.is_floating_point:
            return tensor.dtype
        if tensor.dim() <= 1:
            return torch.float64
        is_half = tensor.dtype.itemsize < torch.float32.itemsize
        return torch.float32 if is_half and value not in self.summed_factors else tensor.dtype

    @cached_property
    def summed_factors(self) -> frozenset[int]:
        """Weights whose gradients products add up in place."""
        factors = (step.factor for step in self.steps if isinstance(step, _InPart))
        return frozenset(factor.weight for factor in factors if factor is not None)

    def overwritten(self, needed: Sequence[bool]) -> int | None:
        """Return the position of a result whose gradient the first gradient of an input can overwrite; None if there is
        none.

        Each piece of samples reads and writes the same part of both. ``needed``: whether each input needs a gradient.
        """
        value, likes = self.program.inputs[needed.index(True)], self.program.likes
        if self.axis.dim or value not in self.along:
            return None
        for at, output in enumerate(self.program.outputs):
            if likes[output] == likes[value] and self.along[output] == self.along[value]:
                return at
        return None

    def _known(self, statistics: Sequence[Tensor]) -> Known:
        """Return the statistics by node: mean and variance of norms, and the totals of sums.

        ``statistics``: what `statistics` returned.
        """
        norms, totals = statistics[: 2 * len(self.norms)], statistics[2 * len(self.norms) :]
        pairs = zip(norms[::2], norms[1::2], strict=True)
        known: dict[int, tuple[Tensor, ...]] = dict(zip(self.norms, pairs, strict=True))
        return known | {at: (total,) for at, total in zip(self.totals, totals, strict=True)}

    def _add_up(
        self, norms: Sequence[int], tensors: Sequence[Tensor], known: Known, sums: dict[int, Pair],
        gradients: Sequence[Tensor | None], pieces: Sequence[int] | None,
    ) -> None:  # fmt: skip
        """Compute the sums of the derivatives of some norms over all pieces, with those of all later norms known.

        Args:
            norms: nodes of the norms.
            tensors, gradients, pieces: see `backward`.
            known: statistics by node.
            sums: by node, the sums of later norms; those of ``norms`` are added.
        """
        for piece in pieces or range(self.pieces):
            self._add_piece_sums(piece, norms, tensors, known, sums, gradients)
        for at in norms:
            sums[at] = self._rounded_sums(at, sums, _pair(known[at]))

    # A piece is a call of its own: variables of a loop would hold its tensors while the next piece runs.

    def _add_piece_sums(
        self, piece: int, norms: Sequence[int], tensors: Sequence[Tensor], known: Known,
        sums: dict[int, Pair], gradients: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        """Add a piece's part of the sums of the derivatives of some norms to ``sums``. Arguments: see `_add_up`."""
        run = _Run(self, tensors, known, self._goals(piece), piece, sums, cut=norms, differentiates=True)
        with torch.enable_grad():
            run.until(stop=None)
        inputs = {at: x for at, (x, _) in run.cuts.items()}  # of the norms; their results are leaves of autograd
        gradients_of_results = self._derivative(run, piece, gradients, [leaf for _, leaf in run.cuts.values()])
        for (at, x), dy in zip(inputs.items(), gradients_of_results, strict=True):
            self._add(sums, at, x, _pair(known[at]), dy)

    def _add_piece(
        self, piece: int, tensors: Sequence[Tensor], known: Known, sums: dict[int, Pair],
        gradients: Sequence[Tensor | None], needed: Sequence[bool], totals: Sequence[Tensor | None], over: int,
        first: Mapping[int, int], results: _Results | None,
    ) -> None:  # fmt: skip
        """Add the gradients of a piece to those of the inputs.

        Args:
            piece: its number.
            tensors, gradients, needed, results: see `backward`.
            known: statistics by node.
            sums: by node, the sums of the derivatives of norms.
            totals: gradients of the inputs.
            over: position of the input whose gradient takes the place of a result's; -1: none does.
            first: position of the input of each norm of an input, whose gradient of the result is collected there.
        """
        # run the piece under autograd, with the inputs and the results of norms of inputs as leaves
        run = _Run(self, tensors, known, self._goals(piece), piece, sums, cut=self.first_norms, differentiates=True)
        run.into = {value: totals[at] for at, value in enumerate(self.program.inputs) if needed[at]}
        leaves = run.leaves([need and at not in first.values() for at, need in enumerate(needed)])
        with torch.enable_grad():
            run.until(stop=None)
        if results is not None:
            results.add(run)
        targets = [*leaves.values(), *(leaf for _, leaf in run.cuts.values())]
        computed = self._derivative(run, piece, gradients, targets)
        if over >= 0 and (into := totals[over]) is not None:  # only this piece reads and writes this part
            value = self.program.inputs[over]
            self.place(into, value, self.own(value, piece)).zero_()
        # add each leaf's gradient where the piece's part lies in the whole gradient
        places = [run.input_place(totals[at], self.program.inputs[at]) for at in leaves]
        for at, (x, _) in run.cuts.items():
            norm, result = self.norms[at], totals[first[at]]
            places.append(None if result is None else self.place(result, norm.input, run.windows[norm.output]))
            self._add(sums, at, x, _pair(known[at]), computed[len(places) - 1])
        for place, gradient in zip(places, computed, strict=True):
            if place is not None and gradient is not None:
                place.add_(gradient.reshape(place.shape))

    def _add(self, sums: dict[int, Pair], at: int, x: Tensor, known: Pair, dy: Tensor | None) -> None:
        """Add to ``sums[at]`` what a piece contributes to the sums of a norm's derivative, in float64.

        Args:
            sums: by node.
            at: node of the norm.
            x: part of the norm's input.
            known: its mean and variance.
            dy: gradient of the part's result; None for zeros.
        """
        if dy is not None:
            plain, weighted = (part.double() for part in gradient_sums(self.norms[at], x, *known, dy))
            sums[at] = (sums[at][0] + plain, sums[at][1] + weighted) if at in sums else (plain, weighted)

    def _rounded_sums(self, at: int, sums: Mapping[int, Pair], known: Pair) -> Pair:
        """Return the sums of the derivative of the norm at node ``at`` in the dtype of its statistics; zeros if no
        gradient flows into it.

        Args:
            at: the node.
            sums: over all pieces.
            known: mean and variance of the norm.
        """
        mean, _ = known
        if at in sums:
            plain, weighted = sums[at]
            return plain.to(mean.dtype), weighted.to(mean.dtype)
        zeros = mean.new_zeros(mean.shape[0], self.shapes[self.norms[at].input][1])
        return zeros, zeros

    def _finish(
        self, at: int, tensors: Sequence[Tensor], known: Pair, sums: Mapping[int, Pair],
        results: Sequence[Tensor | None], position: int,
    ) -> None:  # fmt: skip
        """Turn the gradient of the result of a norm of an input into that of the input, and add those of its weights.

        Args:
            at: node of the norm.
            tensors: inputs of the program.
            known: mean and variance of the norm.
            sums: by node, the sums of the derivatives of norms.
            results: gradients of the inputs; at ``position`` that of the norm's result.
            position: that of the norm's input among the inputs.
        """
        norm, inputs = self.norms[at], self.program.inputs
        rounded = self._rounded_sums(at, sums, known)
        for value, total in ((norm.weight, rounded[1]), (norm.bias, rounded[0])):
            if value is not None and (result := results[inputs.index(value)]) is not None:
                result.add_(total.sum(0))
        gradient = results[position]
        if gradient is None:
            return
        weight = None if norm.weight is None else tensors[inputs.index(norm.weight)].detach()
        for piece in range(self.pieces):
            window = self.own(norm.input, piece)
            x, dy = (self.part(whole, norm.input, window) for whole in (tensors[position].detach(), gradient))
            dy.copy_(input_gradient(norm, x, weight, *known, dy, rounded, self.count(norm)))

    def count(self, norm: Norm) -> int:
        """Return the number of elements that share a statistic of a norm."""
        x = self.shapes[norm.input]
        return math.prod(x) // (x[1] if norm.groups is None else x[0] * norm.groups)

    def _derivative(
        self, run: _Run, piece: int, gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of some leaves from a piece's part of the results' gradients; None for those without
        any.

        Args:
            run: the piece, after it ran under autograd.
            piece: its number.
            gradients: of the whole results.
            leaves: tensors of the run.
        """
        parts, incoming = list[Tensor](), list[Tensor]()
        for value, gradient in zip(self.program.outputs, gradients, strict=True):
            own = self.own(value, piece) if value in self.along else None
            if own is None and value not in self.partial and piece:
                continue  # each piece computes the same: the first differentiates it
            with torch.enable_grad():
                part = run.values[value] if own is None else run.part(value, own)
            if gradient is not None and part.requires_grad:
                parts.append(part)
                incoming.append(gradient if own is None else self.part(gradient, value, own))
            del part  # autograd is to hold the last reference
        if not parts or not leaves:
            return [None] * len(leaves)
        run.release()
        return torch.autograd.grad(parts, leaves, incoming, allow_unused=True)

    def part(self, tensor: Tensor, value: int, window: Window) -> Tensor:
        """Return a window of a value that is there as a whole. ``value``: its id, which says where the axis lies."""
        return _narrowed(tensor, self.along[value], *elements(self.along[value], window))

    def place(self, tensor: Tensor, value: int, window: Window) -> Tensor:
        """Return a window of a whole value as a view to write to. A dimension that repeats the axis is split in two.

        ``value``: the value's id, which says where the axis lies.
        """
        return _narrowed_view(tensor, self.along[value], *elements(self.along[value], window))


def _narrowed_view(tensor: Tensor, along: Along, low: int, high: int) -> Tensor:
    """Return a range of elements in each repetition of the axis, as a view; repetitions become a dimension of their
    own."""
    if along.repeats == 1:
        return tensor.narrow(along.dim, low, high - low)
    return tensor.unflatten(along.dim, (along.repeats, -1)).narrow(along.dim + 1, low, high - low)


def _narrowed(tensor: Tensor, along: Along, low: int, high: int) -> Tensor:
    """Return a range of elements in each repetition of the axis, with the dimensions of the tensor."""
    part = _narrowed_view(tensor, along, low, high)
    return part if along.repeats == 1 else part.flatten(along.dim, along.dim + 1)


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
        """Return the sum."""
        return self._like.empty().copy_(self._sum)


class _Results:
    """The results of a segment, filled piece by piece."""

    def __init__(self, tiled: Tiled) -> None:
        """Allocate the results along the axis, and sums for the others."""
        program = tiled.program
        self._tiled = tiled
        self._joined: dict[int, Tensor] = {}
        """Results that lie along the axis, of which each piece computes a window."""
        self._sums: dict[int, _Total] = {}
        """The others."""
        for value in program.outputs:
            if value in tiled.along:
                self._joined[value] = program.likes[value].empty()
            else:
                self._sums[value] = _Total(program.likes[value])

    def add(self, run: _Run) -> None:
        """Add what a piece has computed."""
        tiled = self._tiled
        for value, result in self._joined.items():
            own = tiled.own(value, run.piece)
            place = tiled.place(result, value, own)
            place.copy_(run.part(value, own).detach().reshape(place.shape))
        for value, total in self._sums.items():
            if value in tiled.partial or run.piece == 0:
                total.add(run.values[value].detach())

    def finished(self) -> list[Tensor]:
        """Return the results in order."""
        outputs = self._tiled.program.outputs
        return [self._joined[value] if value in self._joined else self._sums[value].result() for value in outputs]


class _Run:
    """One piece of a program: the values that it has computed so far.

    Args:
        tiled: the program, cut along an axis.
        tensors: its inputs.
        statistics: statistics of norms and sums by node.
        goals: windows to compute.
        piece: number of the piece.
        sums: by node, the sums of the derivatives of norms.
        cut: norms whose results become leaves of autograd.
        differentiates: whether only derivatives are wanted, so that some results need no values.
        sums_up: whether the piece computes its parts of sums over the axis.
    """

    def __init__(
        self, tiled: Tiled, tensors: Sequence[Tensor], statistics: Known, goals: Mapping[int, Window],
        piece: int, sums: Mapping[int, Pair] = {}, *, cut: Collection[int] = (), differentiates: bool = False,
        sums_up: bool = True,
    ) -> None:  # fmt: skip
        self.tiled, self.piece, self.statistics, self._sums, self.sums_up = tiled, piece, statistics, sums, sums_up
        self.windows, self._cut = tiled.windows(goals), cut
        """By value along the axis: the range of the axis that the piece needs of it."""
        self._kept = {*goals, *tiled.program.outputs, *tiled.program.static} - (tiled.passing if sums_up else set())
        """Values that stay in `values` after their last read."""
        self.into: Mapping[int, Tensor | None] = {}
        """Gradients of weights to which products add, by input."""
        self._differentiates, self._unread = differentiates, tiled.unread if differentiates else ()
        self.cuts: dict[int, Pair] = {}
        """Input and result of the norms in ``cut`` that the piece reads, where it reads them."""
        self.values: dict[int, Tensor] = {}
        """The piece's part of each value."""
        for value, tensor in zip(tiled.program.inputs, tensors, strict=True):
            self.values[value] = self.input_part(tensor.detach(), value)
        self._last = self._last_reads()
        """By index of a node: values that are dropped after it."""

    def input_part(self, tensor: Tensor, value: int) -> Tensor:
        """Return the part of a whole input that the piece reads. ``value``: the input's id."""
        window = self.windows.get(value)
        return tensor if window is None else self.tiled.part(tensor, value, window)

    def input_place(self, tensor: Tensor | None, value: int) -> Any:
        """Return the part of an input's gradient that the piece writes to, as a view; None for None.

        Args:
            tensor: the whole gradient.
            value: id of the input.
        """
        window = self.windows.get(value)
        return tensor if window is None or tensor is None else self.tiled.place(tensor, value, window)

    def leaves(self, needed: Sequence[bool]) -> dict[int, Tensor]:
        """Make those inputs that need a gradient leaves of autograd, and return them by position."""
        leaves = dict[int, Tensor]()
        for at, value in enumerate(self.tiled.program.inputs):
            if needed[at]:
                leaves[at] = self.values[value] = self.values[value].detach().requires_grad_()
        return leaves

    def until(self, stop: int | None) -> None:
        """Run the nodes before node ``stop``, all for None, and drop each value after its last reader."""
        for at, step in enumerate(self.tiled.steps[:stop]):
            if step.is_due(self):
                step.run(self)
            for value in self._last.get(at, ()):
                self.values.pop(value, None)

    def _last_reads(self) -> dict[int, list[int]]:
        """Return, by index of a node, the values that no later node reads."""
        last = dict[int, int]()
        for at, node in enumerate(self.tiled.program.nodes):
            for value in (*node.reads, *node.outputs):
                last[value] = at
        ends = dict[int, list[int]]()
        for value, at in last.items():
            if value not in self._kept:
                ends.setdefault(at, []).append(value)
        return ends

    def op(self, at: int) -> Callable[..., Any]:
        """Return the function that computes node ``at``: its op, a faster function, or for derivatives alone a function
        without values."""
        target = self.tiled.program.nodes[at].target
        faster = pools.DIFFERENTIABLE if self._differentiates else pools.VALUES
        return UNREAD[target] if at in self._unread else faster.get(target) or overload(target)

    def operand(self, value: int, need: Part | None, placed: Along) -> Tensor:
        """Return the part of a value that an op needs.

        Args:
            value: id of the value, of which the piece may have more than the part.
            need: the part; None for all.
            placed: where the axis lies, for a value off the axis that is there as a whole.
        """
        tensor = self.values[value]
        if need is None:
            return tensor
        dim, (low, high) = need
        along, begin = placed, 0
        if value in self.tiled.along:  # the piece has a window of it
            along = self.tiled.along[value]
            begin, _ = elements(along, self.windows[value])
        along = replace(along, dim=dim)
        if low == begin and high - low == tensor.shape[dim] // along.repeats:
            return tensor
        return _narrowed(tensor, along, low - begin, high - begin)

    def normalize(self, at: int, norm: Norm, along: Along) -> None:
        """Compute the result of the norm at node ``at`` over the axis. ``along``: where the axis lies in its input."""
        tiled, x = self.tiled, self.values[norm.input]
        # the piece may have more of the input than it needs of the result
        window, wanted = self.windows[norm.input], self.windows[norm.output]
        weight, bias = (None if v is None else self.values[v] for v in (norm.weight, norm.bias))
        # the elements that no other piece counts, as dimension, first element and number
        own = tiled.own(norm.input, self.piece)
        low, high = max(own[0], window[0]), min(own[1], window[1])
        mine = along.dim, (low - window[0]) * along.unit, max(0, high - low) * along.unit
        y: Tensor = Normalize.apply(
            norm, x, weight, bias, *self.statistics[at], self._sums.get(at), tiled.count(norm), mine, self.piece == 0
        )  # pyright: ignore[reportAssignmentType]  # fmt: skip
        if wanted != window:
            begin = (wanted[0] - window[0]) * along.unit
            y = y.narrow(along.dim, begin, (wanted[1] - wanted[0]) * along.unit)
        if at in self._cut:  # the derivative ends here
            y = y.detach().requires_grad_()
            self.cuts[at] = self.part(norm.input, wanted).detach(), y
        self.values[norm.output] = y

    def part(self, value: int, window: Window) -> Tensor:
        """Return a window of a value that the piece has computed."""
        along, have = self.tiled.along[value], self.windows[value]
        low, high = elements(along, window)
        return _narrowed(self.values[value], along, low - have[0] * along.unit, high - have[0] * along.unit)

    def release(self) -> None:
        """Forget the values, so that the derivative frees what it has used."""
        self.values.clear()


@dataclass(frozen=True)
class _Step:
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

    def is_due(self, run: _Run) -> bool:
        """Return whether a piece has to compute the node."""
        return self.output in run.windows

    def run(self, run: _Run) -> None:
        """Compute the node and add its results to the values of a piece."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Whole(_Step):
    """A node off the axis, which each piece computes as a whole, or of its parts of sums."""

    def is_due(self, run: _Run) -> bool:
        """Return whether its operands are known: those from sums may not be yet."""
        return all(value in run.values for value in self.node.reads)

    def run(self, run: _Run) -> None:
        """Compute all of the results."""
        result = run_whole(self.node, run.values.__getitem__)
        results = [result] if isinstance(result, Tensor) else list(result or ())
        run.values.update(zip(self.node.outputs, results, strict=False))


@dataclass(frozen=True)
class _InPart(_Step):
    """A node with a rule."""

    at: int
    """Index of the node."""
    call: Call
    factor: Factor | None = None
    """The weight of a product."""

    def operand_parts(self, window: Window) -> Mapping[int, Part]:
        """Return the parts of operands that the op's rule needs for a window of the result."""
        return self.call.operand_parts(window)

    def run(self, run: _Run) -> None:
        """Compute the piece's window of the result. A product can add the gradient of its weight in place."""
        window = run.windows[self.output]
        parts, axis = self.operand_parts(window), run.tiled.along[self.output]

        def operand(value: int) -> Tensor:
            """Return the part of an operand that the window needs."""
            return run.operand(value, parts.get(value), axis)

        into = None if self.factor is None else run.into.get(self.factor.weight)
        if into is not None and self.factor is not None:
            x, row = self.call["self"], None
            if self.call["mat1"]:  # addmm
                x, row = self.call["mat1"], run.values[self.call["self"].value]
            weight = run.values[self.factor.weight]
            run.values[self.output] = Product.apply(operand(x.value), weight, row, self.factor.transposed, into)  # pyright: ignore[reportArgumentType]
            return
        result = RULES[self.node.target].run(self.call, window, operand, run.op(self.at))
        run.values[self.output] = result if isinstance(result, Tensor) else result[0]


@dataclass(frozen=True)
class _Sum(_Step):
    """A sum over the axis: part of a result, or known from a pass before."""

    at: int
    """Index of the node."""
    call: Call
    rule: Sum

    @property
    def total_reads(self) -> Sequence[int]:
        """What its total is computed from: for a mean with weights their sum, else the result itself."""
        if not self.rule.weighs(self.call):
            return self.node.reads
        return [self.call[name].value for name in ("target", "weight") if self.call[name] is not None]

    def is_due(self, run: _Run) -> bool:
        """Return whether the sum runs in this pass over the pieces: only in the last (``sums_up``) if its parts are
        results of the pieces, to be added up; in each pass if an earlier pass has computed its total."""
        return self.output not in run.tiled.partial or run.sums_up

    def run(self, run: _Run) -> None:
        """Compute the piece's part of the result, or use the known total."""
        (known,) = run.statistics.get(self.at, (None,))  # its total, or the sum of its weights
        if self.output in run.tiled.partial:
            run.values[self.output] = self.rule.part(self.call, self._operands(run), known)
        elif known is not None:
            run.values[self.output] = known

    def total(self, run: _Run) -> Tensor:
        """Return a piece's part of the total."""
        if self.rule.weighs(self.call):
            return self.rule.weight(self.call, self._operands(run))
        return self.rule.part(self.call, self._operands(run), weight=None)

    def _operands(self, run: _Run) -> Callable[[int], Tensor]:
        """Return the function that returns a piece's part of an operand."""
        summed = self.call[self.rule.operand].value
        parts = self.rule.operand_parts(self.call, run.tiled.own(summed, run.piece))
        return lambda value: run.operand(value, parts.get(value), run.tiled.along[summed])


@dataclass(frozen=True)
class _Normalization(_Step):
    """A norm over the axis."""

    at: int
    """Index of the node."""
    norm: Norm
    along: Along

    def operand_parts(self, window: Window) -> Mapping[int, Part]:
        """Return the same window of its input."""
        return {self.norm.input: Part(self.along.dim, elements(self.along, window))}

    def run(self, run: _Run) -> None:
        """Normalize the piece's window by the statistics of the whole."""
        run.normalize(self.at, self.norm, self.along)


def _grouped(depths: Mapping[int, int]) -> list[list[int]]:
    """Return the keys in groups of equal depth, the smallest depth first."""
    return [[at for at, depth in depths.items() if depth == d] for d in sorted(set(depths.values()))]


def _one_of(values: Collection[int]) -> Callable[[Any], bool]:
    """Return the function that says whether an op's argument is one of these values."""
    return lambda argument: isinstance(argument, Ref) and argument.value in values


def _pair(statistics: tuple[Tensor, ...]) -> Pair:
    """Return the statistics of a norm as mean and variance."""
    mean, variance = statistics
    return mean, variance
