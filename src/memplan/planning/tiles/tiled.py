"""Run a program piece by piece along an axis, forward and backward.

Each piece makes its part of the results, from as much of the operands as these need: neighbours compute their common
border twice. The inner values of a segment so exist one piece at a time. Norms over the axis need their statistics
first: a pass over all pieces for those that depend on no other, one for those that depend on these, and so on. The
backward pass computes each piece again under autograd. For such norms, the last first, passes add up the two sums of
their derivatives, and a last pass computes the gradients of what the segment reads.

A norm of what the segment reads itself costs no pass: its statistics are those of a tensor that is there. The gradient
of its result is collected in the place of that of its input, and turned into it at the end.

Values are those of the whole but for the order of sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from memplan.planning.graph.op_schema import overload
from memplan.planning.graph.tensor_like import Like
from memplan.planning.tiles.norms import Norm, Normalize, Statistics, gradient_sums, input_gradient, norm_of
from memplan.planning.tiles.program import Node, NotTileable, Program
from memplan.planning.tiles.rules import RULES, Along, Call, Window, elements, run_whole
from memplan.planning.tiles.unread import UNREAD

Phase = Literal["statistics", "forward", "backward"]
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Axis:
    """Dimension along which a segment runs piece by piece."""

    dim: int
    """0: samples of the batch; 2 and more: a dimension of space."""
    samples: int = 0
    """Samples of the batch, for dimension 0."""


@dataclass(frozen=True)
class Tile:
    """A segment of a step that runs piece by piece."""

    first: int
    """Number of its first call of a torch function in the trace."""
    last: int
    axis: Axis
    pieces: int


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
        self.program, self.axis, self.pieces = program, axis, pieces
        self.shapes = {value: like.shape for value, like in program.likes.items()}
        self.along = dict[int, Along]()
        """Values along the axis."""
        self.norms = dict[int, Norm]()
        """Norms over the axis, by the index of their node."""
        for value in program.inputs:
            self._place_input(value)
        self.steps = [self._step(at, node) for at, node in enumerate(program.nodes)]
        read = {value for node in program.nodes for value in node.reads} | set(program.outputs)
        second = [node.name for node in program.nodes if read.intersection(node.outputs[1:])]
        if second:
            raise NotTileable(f"something reads the second result of {second[0]}")
        if any(0 in self._strides_of_many(value) for value in program.outputs):
            raise NotTileable("a result of the segment repeats its elements")
        if any(value not in self.along or self.along[value].outer > 1 for value in program.outputs):
            raise NotTileable("a result of the segment does not lie along the axis")
        if not program.outputs:
            raise NotTileable("nothing reads a result of the segment")
        if pieces > self.elements:
            raise NotTileable(f"there are {self.elements} elements for {pieces} pieces")
        ends = (0, pieces - 1) if axis.dim else ()
        if any(low >= high for at in ends for low, high in self.windows(self._goals(at)).values()):
            raise NotTileable("a piece would read nothing but padding")

    def _place_input(self, value: int) -> None:
        shape, dim = self.shapes[value], self.axis.dim
        if value in self.program.static or len(shape) <= dim:
            return
        if dim:
            if shape[dim] > 1:  # a single element is read by each piece
                self.along[value] = Along(dim)
        elif shape[0] and shape[0] % self.axis.samples == 0:
            self.along[value] = Along(0, shape[0] // self.axis.samples)

    def _step(self, at: int, node: Node) -> _Step:
        """Return how a node runs, and note where the axis lies in its result."""
        first = next((value for value in node.reads if value in self.along), None)
        if first is None:
            return _Whole(node)
        norm = norm_of(node, len(self.shapes[first]), self.along[first].dim)
        if norm is not None and norm.input == first:
            self.norms[at], self.along[norm.output] = norm, self.along[first]
            return _Normalization(at, norm, self.along[first])
        call = Call(node, self.shapes, self.along)
        self.along[node.outputs[0]] = call.placed
        if call.placed.outer > 1 and self.axis.dim:
            raise NotTileable(f"{node.name} mixes the axis with the dimension before it")
        return _InPart(at, call)

    def _strides_of_many(self, value: int) -> list[int]:
        """Return the strides of the dimensions of a value that have more than one element."""
        like = self.program.likes[value]
        return [stride for size, stride in zip(like.shape, like.stride, strict=True) if size > 1]

    def size(self, value: int) -> int:
        """Return the number of elements of the axis in a value."""
        along = self.along[value]
        return self.shapes[value][along.dim] // (along.unit * along.outer)

    def own(self, value: int, piece: int) -> Window:
        """Return the part of a value that a piece makes and no other."""
        size = self.size(value)
        return piece * size // self.pieces, (piece + 1) * size // self.pieces

    @cached_property
    def elements(self) -> int:
        """Elements of the axis in the smallest result, or input of a norm over the axis: each piece has some of all."""
        return min(self.size(value) for value in (*self.program.outputs, *self._normed))

    @cached_property
    def largest_piece(self) -> int:
        """The piece that computes most: with the borders on both sides, and a row more where pieces do not divide."""
        return max(range(self.pieces), key=self._computed_bytes)

    def _computed_bytes(self, piece: int) -> int:
        windows, likes = self.windows(self._goals(piece)), self.program.likes
        return sum(likes[value].bytes * (high - low) // self.size(value) for value, (low, high) in windows.items())

    @property
    def result_likes(self) -> list[Like]:
        """Shapes, strides and dtypes of the results."""
        return [self.program.likes[value] for value in self.program.outputs]

    @property
    def statistic_likes(self) -> list[Like]:
        """Those of the statistics: mean and variance of each norm over the axis."""
        likes = list[Like]()
        for norm in self.norms.values():
            x = self.program.likes[norm.input]
            shape = (1, x.shape[1]) if norm.groups is None else (x.shape[0], norm.groups)
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            likes += [Like(shape, (shape[1], 1), wide, x.device)] * 2
        return likes

    # -- passes and their work

    @cached_property
    def statistic_passes(self) -> list[list[int]]:
        """Norms whose statistics a pass over the pieces computes, for each pass: those that depend only on norms of
        passes before."""
        depths = dict[int, int]()
        for at, norm in self.norms.items():
            before = self._windows_of(norm.input)
            depths[at] = 1 + max((depths[b] for b, other in self.norms.items() if other.output in before), default=-1)
        return _grouped(depths)

    @cached_property
    def sum_passes(self) -> list[list[int]]:
        """Norms whose sums of the derivative a pass over the pieces computes, for each pass: those on which only norms
        of passes before depend."""
        depths = dict[int, int]()
        for at, norm in reversed(self.norms.items()):
            behind = (d for b, d in depths.items() if norm.output in self._windows_of(self.norms[b].input))
            depths[at] = 1 + max(behind, default=-1)
        return _grouped({at: depth for at, depth in depths.items() if at not in self.first_norms})

    @cached_property
    def first_norms(self) -> frozenset[int]:
        """Norms of what only they read of an input of the segment."""
        inputs, reads = set(self.program.inputs), [value for node in self.program.nodes for value in node.reads]
        return frozenset(
            at for at, norm in self.norms.items()
            if norm.input in inputs and reads.count(norm.input) == 1
            and inputs.issuperset(v for v in (norm.weight, norm.bias) if v is not None)
        )  # fmt: skip

    @cached_property
    def unread(self) -> frozenset[int]:
        """Ops whose results the backward pass does not need: nothing in the segment reads them, nor their own
        derivative."""
        read = {value for node in self.program.nodes for value in node.reads}
        return frozenset(
            at for at, node in enumerate(self.program.nodes)
            if node.target in UNREAD and isinstance(self.steps[at], _InPart) and node.outputs[0] not in read
        )  # fmt: skip

    def _windows_of(self, value: int) -> Collection[int]:
        """Return the values along the axis that a value depends on, and itself."""
        return self.windows({value: (0, self.size(value))})

    def runs(self, phase: Phase) -> list[float]:
        """Return how often a pass computes each op, in whole ops."""
        outputs = [node.outputs[0] if node.outputs else None for node in self.program.nodes]
        if phase == "forward":
            return [1.0] * len(outputs)
        if phase == "statistics":
            needed = [{v for at in p for v in self._windows_of(self.norms[at].input)} for p in self.statistic_passes]
            return [float(sum(output in values for values in needed)) for output in outputs]
        count = 1.0 + len(self.sum_passes)
        return [0.0 if at in self.unread else count for at in range(len(outputs))]

    def derivatives(self) -> list[float]:
        """Return how often the backward pass computes the derivative of each op, in whole derivatives. For the sums of
        a norm, what is behind it needs no gradients of weights: half of a derivative."""
        counts = list[float]()
        for at, node in enumerate(self.program.nodes):
            behind = set(self._windows_of(node.outputs[0])) if node.outputs and node.outputs[0] in self.along else set()
            half = 0.5 if any(value in self.program.static for value in node.reads) else 1.0
            counts.append(1.0 + half * sum(
                any(self.norms[n].output in behind and n != at for n in norms) for norms in self.sum_passes
            ))  # fmt: skip
        return counts

    def overlap(self, pieces: int) -> list[float]:
        """Return for each node how often a run in so many pieces computes an element of its result, on average."""
        tiled = self if pieces == self.pieces else Tiled(self.program, self.axis, pieces)
        windows = tiled.windows(tiled._goals(pieces // 2))
        shares = list[float]()
        for node in self.program.nodes:
            value = node.outputs[0] if node.outputs else None
            if value is None or value not in self.along or value not in windows:
                shares.append(1.0)
                continue
            low, high = windows[value]
            shares.append((high - low) * pieces / self.size(value))
        return shares

    # -- windows

    def windows(self, goals: Mapping[int, Window]) -> dict[int, Window]:
        """Return the window of each value along the axis that these windows need, by going back through the nodes."""
        windows = dict(goals)
        for step in reversed(self.steps):
            window = windows.get(step.output)
            if window is None:
                continue
            for value, (_, (low, high)) in step.needs(window).items():
                if value in self.along:
                    unit = self.along[value].unit
                    windows[value] = _hull(windows.get(value), (low // unit, -(-high // unit)))
        return windows

    def _goals(self, piece: int) -> dict[int, Window]:
        """Return what a piece must compute: its part of the results, and of what the norms over the axis read."""
        return {value: self.own(value, piece) for value in (*self.program.outputs, *self._normed)}

    @cached_property
    def _normed(self) -> tuple[int, ...]:
        return tuple(norm.input for norm in self.norms.values())

    # -- computing

    def statistics(self, tensors: Sequence[Tensor], pieces: Sequence[int] | None = None) -> list[Tensor]:
        """Return mean and variance of each norm over the axis.

        Args:
            tensors: inputs of the program.
            pieces: only these run, for what memory a piece takes.
        """
        known = dict[int, Pair]()
        with torch.no_grad():
            for norms in self.statistic_passes:
                collected = {at: Statistics(self.norms[at]) for at in norms}
                for piece in pieces or range(self.pieces):
                    values = {self.norms[at].input: self.own(self.norms[at].input, piece) for at in norms}
                    run = _Run(self, tensors, known, values, piece)
                    run.until(max(norms))
                    for at, statistics in collected.items():
                        value = self.norms[at].input
                        statistics.add(run.part(value, values[value]))
                    del run
                for at, statistics in collected.items():
                    known[at] = statistics.result(self.program.likes[self.norms[at].input].dtype)
        return [tensor for at in self.norms for tensor in known[at]]

    def forward(
        self, tensors: Sequence[Tensor], statistics: Sequence[Tensor], pieces: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Return the results. Arguments: see `statistics`, and what it returned."""
        results = [like.empty() for like in self.result_likes]
        with torch.no_grad():
            for piece in pieces or range(self.pieces):
                goals = {value: self.own(value, piece) for value in self.program.outputs}
                run = _Run(self, tensors, self._by_norm(statistics), goals, piece)
                run.until(None)
                for value, result in zip(self.program.outputs, results, strict=True):
                    self.part(result, value, goals[value]).copy_(run.part(value, goals[value]))
                del run
        return results

    def backward(
        self, tensors: Sequence[Tensor], statistics: Sequence[Tensor], gradients: Sequence[Tensor | None],
        needed: Sequence[bool], pieces: Sequence[int] | None = None, into: Tensor | None = None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Return the gradients of the inputs that need one.

        Args:
            tensors, statistics, pieces: see `forward`.
            gradients: those of the results.
            needed: whether each input needs one.
            into: the gradient at `overwritten`: the first computed gradient takes its place.
        """
        known, sums = self._by_norm(statistics), dict[int, Pair]()
        positions = {value: at for at, value in enumerate(self.program.inputs)}
        over = needed.index(True) if into is not None else -1
        results = [
            into if at == over else torch.zeros_like(tensor) if needed[at] else None
            for at, tensor in enumerate(tensors)
        ]  # before all passes, so that what these take is the same with and without ``into``
        for norms in self.sum_passes:
            self._add_up(norms, tensors, known, sums, gradients, pieces)
        first = {at: positions[self.norms[at].input] for at in self.first_norms}
        for piece in pieces or range(self.pieces):
            self._add_piece(piece, tensors, known, sums, gradients, needed, results, over, first)
        for at, position in first.items():
            self._finish(at, tensors, known[at], sums.get(at), results, position)
        return results

    def overwritten(self, needed: Sequence[bool]) -> int | None:
        """Return the position of a result whose gradient the first gradient of an input can overwrite: each piece of
        samples reads and writes the same part of both. None: there is no such result."""
        value, likes = self.program.inputs[needed.index(True)], self.program.likes
        if self.axis.dim or value not in self.along:
            return None
        outputs = enumerate(self.program.outputs)
        return next((at for at, v in outputs if likes[v] == likes[value] and self.along[v] == self.along[value]), None)

    def _by_norm(self, statistics: Sequence[Tensor]) -> dict[int, Pair]:
        return dict(zip(self.norms, zip(statistics[::2], statistics[1::2], strict=True), strict=True))

    def _add_up(
        self, norms: Sequence[int], tensors: Sequence[Tensor], known: Mapping[int, Pair], sums: dict[int, Pair],
        gradients: Sequence[Tensor | None], pieces: Sequence[int] | None,
    ) -> None:  # fmt: skip
        """Add up the sums of the derivatives of norms, with those of all later norms known."""
        for piece in pieces or range(self.pieces):
            self._add_piece_sums(piece, norms, tensors, known, sums, gradients)
        for at in norms:
            sums.setdefault(at, self._no_sums(at, known[at]))

    # A piece is a call of its own: variables of a loop would hold its tensors while the next piece runs.

    def _add_piece_sums(
        self, piece: int, norms: Sequence[int], tensors: Sequence[Tensor], known: Mapping[int, Pair],
        sums: dict[int, Pair], gradients: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        run = _Run(self, tensors, known, self._goals(piece), piece, sums, cut=norms, differentiates=True)
        with torch.enable_grad():
            run.until(None)
        computed = self._derivative(run, piece, gradients, [leaf for _, leaf in run.cuts.values()])
        for (at, (x, _)), dy in zip(run.cuts.items(), computed, strict=True):
            self._add(sums, at, x, known[at], dy)

    def _add_piece(
        self, piece: int, tensors: Sequence[Tensor], known: Mapping[int, Pair], sums: dict[int, Pair],
        gradients: Sequence[Tensor | None], needed: Sequence[bool], results: Sequence[Tensor | None], over: int,
        first: Mapping[int, int],
    ) -> None:  # fmt: skip
        """Add the gradients of a piece to those of the inputs.

        Args:
            results: gradients of the inputs.
            over: position of that which takes the place of a gradient of a result; -1: none does.
            first: position of the input of each norm of an input, whose gradient of the result is collected there.
        """
        run = _Run(self, tensors, known, self._goals(piece), piece, sums, cut=self.first_norms, differentiates=True)
        leaves = run.leaves([need and at not in first.values() for at, need in enumerate(needed)])
        with torch.enable_grad():
            run.until(None)
        targets = [*leaves.values(), *(leaf for _, leaf in run.cuts.values())]
        computed = self._derivative(run, piece, gradients, targets)
        if over >= 0 and (into := results[over]) is not None:  # only this piece reads and writes this part
            value = self.program.inputs[over]
            self.part(into, value, self.own(value, piece)).zero_()
        places = [run.input_part(results[at], self.program.inputs[at]) for at in leaves]
        for at, (x, _) in run.cuts.items():
            norm, result = self.norms[at], results[first[at]]
            places.append(None if result is None else self.part(result, norm.input, run.windows[norm.output]))
            self._add(sums, at, x, known[at], computed[len(places) - 1])
        for place, gradient in zip(places, computed, strict=True):
            if place is not None and gradient is not None:
                place.add_(gradient)

    def _add(self, sums: dict[int, Pair], at: int, x: Tensor, known: Pair, dy: Tensor | None) -> None:
        if dy is not None:
            part = gradient_sums(self.norms[at], x, *known, dy)
            sums[at] = (sums[at][0] + part[0], sums[at][1] + part[1]) if at in sums else part

    def _no_sums(self, at: int, known: Pair) -> Pair:
        zeros = known[0].new_zeros(known[0].shape[0], self.shapes[self.norms[at].input][1])
        return zeros, zeros

    def _finish(
        self, at: int, tensors: Sequence[Tensor], known: Pair, sums: Pair | None, results: Sequence[Tensor | None],
        position: int,
    ) -> None:  # fmt: skip
        """Turn the gradient of the result of a norm of an input into that of the input, and add those of its weights.

        Args:
            at: index of the norm.
            tensors, known, sums: inputs of the program, and statistics and sums of the norm.
            results: gradients of the inputs.
            position: that of the norm's input among the inputs.
        """
        norm, inputs = self.norms[at], self.program.inputs
        sums = sums or self._no_sums(at, known)
        for value, total in ((norm.weight, sums[1]), (norm.bias, sums[0])):
            if value is not None and (result := results[inputs.index(value)]) is not None:
                result.add_(total.sum(0))
        gradient = results[position]
        if gradient is None:
            return
        weight = None if norm.weight is None else tensors[inputs.index(norm.weight)].detach()
        for piece in range(self.pieces):
            window = self.own(norm.input, piece)
            x, dy = (self.part(whole, norm.input, window) for whole in (tensors[position].detach(), gradient))
            dy.copy_(input_gradient(norm, x, weight, *known, dy, sums, self.count(norm)))

    def count(self, norm: Norm) -> int:
        """Return the number of elements that share a statistic of a norm."""
        x = self.shapes[norm.input]
        return math.prod(x) // (x[1] if norm.groups is None else x[0] * norm.groups)

    def _derivative(
        self, run: _Run, piece: int, gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of leaves for a piece of the results."""
        parts, incoming = list[Tensor](), list[Tensor]()
        for value, gradient in zip(self.program.outputs, gradients, strict=True):
            own = self.own(value, piece)
            with torch.enable_grad():
                part = run.part(value, own)
            if gradient is not None and part.requires_grad:
                parts.append(part)
                incoming.append(self.part(gradient, value, own))
        if not parts or not leaves:
            return [None] * len(leaves)
        run.release()
        return torch.autograd.grad(parts, leaves, incoming, allow_unused=True)

    def part(self, tensor: Tensor, value: int, window: Window) -> Tensor:
        """Return a window of a whole value."""
        along = self.along[value]
        low, high = elements(along, window)
        return tensor.narrow(along.dim, low, high - low)


class _Run:
    """One piece of a program: the values that it has computed so far.

    Args:
        tiled, tensors, statistics, sums: the program, its inputs, and what is known of its norms.
        goals: windows to compute.
        piece: number of the piece.
        cut: norms whose results become leaves of autograd.
        differentiates: whether only derivatives are wanted, so that some results need no values.
    """

    def __init__(
        self, tiled: Tiled, tensors: Sequence[Tensor], statistics: Mapping[int, Pair], goals: Mapping[int, Window],
        piece: int, sums: Mapping[int, Pair] = {}, *, cut: Collection[int] = (), differentiates: bool = False,
    ) -> None:  # fmt: skip
        self.tiled, self.piece, self._statistics, self._sums = tiled, piece, statistics, sums
        self._goals, self.windows, self._cut = goals, tiled.windows(goals), cut
        self._unread = tiled.unread if differentiates else ()
        self.cuts: dict[int, Pair] = {}
        """Input and result of the norms in ``cut`` that the piece reads, where it reads them."""
        self.values: dict[int, Tensor] = {}
        for value, tensor in zip(tiled.program.inputs, tensors, strict=True):
            self.values[value] = self.input_part(tensor.detach(), value)
        self._last = self._last_reads()

    def input_part(self, tensor: Tensor | None, value: int) -> Any:
        """Return the part of an input, or of its gradient, that the piece reads; None for None."""
        window = self.windows.get(value)
        return tensor if window is None or tensor is None else self.tiled.part(tensor, value, window)

    def leaves(self, needed: Sequence[bool]) -> dict[int, Tensor]:
        """Return the parts of the inputs that need a gradient, by position, as leaves of autograd."""
        leaves = dict[int, Tensor]()
        for at, value in enumerate(self.tiled.program.inputs):
            if needed[at]:
                leaves[at] = self.values[value] = self.values[value].detach().requires_grad_()
        return leaves

    def until(self, stop: int | None) -> None:
        """Run the nodes before ``stop``, all for None."""
        for at, step in enumerate(self.tiled.steps[:stop]):
            if step.output not in self.tiled.along or step.output in self.windows:
                step.run(self)
            for value in self._last.get(at, ()):
                self.values.pop(value, None)

    def _last_reads(self) -> dict[int, list[int]]:
        """Return the values that nothing reads after a node, by its index."""
        last = dict[int, int]()
        for at, node in enumerate(self.tiled.program.nodes):
            for value in (*node.reads, *node.outputs):
                last[value] = at
        ends = dict[int, list[int]]()
        for value, at in last.items():
            if value not in self._goals:
                ends.setdefault(at, []).append(value)
        return ends

    def op(self, at: int) -> Callable[..., Any]:
        """Return what computes a node: its op, or a function that has its derivative alone."""
        target = self.tiled.program.nodes[at].target
        return UNREAD[target] if at in self._unread else overload(target)

    def operand(self, value: int, need: tuple[int, Window] | None) -> Tensor:
        """Return what an op needs of a value."""
        tensor = self.values[value]
        if need is None:
            return tensor
        dim, (low, high) = need
        along = self.tiled.along.get(value)
        begin = 0 if along is None else elements(along, self.windows[value])[0]
        whole = low == begin and high - low == tensor.shape[dim] // (1 if along is None else along.outer)
        return tensor if whole else tensor.narrow(dim, low - begin, high - low)

    def normalize(self, at: int, norm: Norm, along: Along) -> None:
        """Compute the result of a norm over the axis."""
        tiled, x = self.tiled, self.values[norm.input]
        window, wanted = self.windows[norm.input], self.windows[norm.output]
        weight, bias = (None if v is None else self.values[v] for v in (norm.weight, norm.bias))
        own = tiled.own(norm.input, self.piece)
        low, high = max(own[0], window[0]), min(own[1], window[1])
        mine = along.dim, (low - window[0]) * along.unit, max(0, high - low) * along.unit
        y: Tensor = Normalize.apply(
            norm, x, weight, bias, *self._statistics[at], self._sums.get(at), tiled.count(norm), mine, self.piece == 0
        )  # pyright: ignore[reportAssignmentType]  # fmt: skip
        if wanted != window:
            begin = (wanted[0] - window[0]) * along.unit
            y = y.narrow(along.dim, begin, (wanted[1] - wanted[0]) * along.unit)
        if at in self._cut:
            y = y.detach().requires_grad_()
            self.cuts[at] = self.part(norm.input, wanted).detach(), y
        self.values[norm.output] = y

    def part(self, value: int, window: Window) -> Tensor:
        """Return a window of a computed value."""
        along, have = self.tiled.along[value], self.windows[value]
        low, high = elements(along, window)
        return self.values[value].narrow(along.dim, low - have[0] * along.unit, high - low)

    def release(self) -> None:
        """Forget the values, so that the derivative frees what it has used."""
        self.values.clear()


class _Step(Protocol):
    """A node of a program: which parts it needs, and how a piece runs it."""

    @property
    def output(self) -> int:
        """First result; -1 for none."""
        ...

    def needs(self, window: Window) -> Mapping[int, tuple[int, Window]]:
        """Return for each operand of which only a part is needed its dimension, and its range in elements."""
        ...

    def run(self, run: _Run) -> None:
        """Add the results to the values of a run."""
        ...


@dataclass(frozen=True)
class _Whole:
    """A node off the axis, which each piece computes as a whole."""

    node: Node

    @property
    def output(self) -> int:
        return self.node.outputs[0] if self.node.outputs else -1

    def needs(self, window: Window) -> Mapping[int, tuple[int, Window]]:
        return {}

    def run(self, run: _Run) -> None:
        result = run_whole(self.node, run.values.__getitem__)
        results = [result] if isinstance(result, Tensor) else list(result or ())
        run.values.update(zip(self.node.outputs, results, strict=False))


@dataclass(frozen=True)
class _InPart:
    """A node with a rule."""

    at: int
    call: Call

    @property
    def output(self) -> int:
        return self.call.node.outputs[0]

    def needs(self, window: Window) -> Mapping[int, tuple[int, Window]]:
        return self.call.needs(window)

    def run(self, run: _Run) -> None:
        window = run.windows[self.output]
        needs = self.needs(window)
        rule = RULES[self.call.node.target]
        result = rule.run(self.call, window, lambda value: run.operand(value, needs.get(value)), run.op(self.at))
        run.values[self.output] = result if isinstance(result, Tensor) else result[0]


@dataclass(frozen=True)
class _Normalization:
    """A norm over the axis."""

    at: int
    norm: Norm
    along: Along

    @property
    def output(self) -> int:
        return self.norm.output

    def needs(self, window: Window) -> Mapping[int, tuple[int, Window]]:
        return {self.norm.input: (self.along.dim, elements(self.along, window))}

    def run(self, run: _Run) -> None:
        run.normalize(self.at, self.norm, self.along)


def _grouped(depths: Mapping[int, int]) -> list[list[int]]:
    """Return the keys by value, the smallest value first."""
    return [[at for at, depth in depths.items() if depth == d] for d in sorted(set(depths.values()))]


def _hull(first: Window | None, second: Window) -> Window:
    return second if first is None else (min(first[0], second[0]), max(first[1], second[1]))
