"""Run a program piece by piece along an axis, forward and backward.

Each piece makes its part of the results, from as much of the operands as these need: neighbours compute their common
border twice. The inner values of a segment so exist one piece at a time. Norms over the axis need their statistics
first: a pass over all pieces for each, which goes as far as its input. The backward pass computes each piece again
under autograd. For each such norm, the last first, a pass adds up the two sums of its derivative, and a last one
computes the gradients of what the segment reads. Values are those of the whole but for the order of sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from memplan.planning.graph.tensor_like import Like
from memplan.planning.tiles.norms import Norm, Normalize, Statistics, gradient_sums, norm_of
from memplan.planning.tiles.program import Node, NotTileable, Program
from memplan.planning.tiles.rules import RULES, Along, Call, Window, elements, run_whole


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
        self._shapes = {value: like.shape for value, like in program.likes.items()}
        self.along = dict[int, Along]()
        """Values along the axis."""
        self._calls = dict[int, Call]()
        self.norms = dict[int, Norm]()
        """Norms over the axis, by the index of their node."""
        for value in program.inputs:
            self._place_input(value)
        for at, node in enumerate(program.nodes):
            self._place(at, node)
        read = {value for node in program.nodes for value in node.reads} | set(program.outputs)
        second = [node.name for node in program.nodes if read.intersection(node.outputs[1:])]
        if second:
            raise NotTileable(f"something reads the second result of {second[0]}")
        if any(0 in self._strides_of_many(value) for value in program.outputs):
            raise NotTileable("a result of the segment repeats its elements")
        missing = [value for value in program.outputs if value not in self.along]
        if missing:
            raise NotTileable("a result of the segment does not lie along the axis")
        if not program.outputs:
            raise NotTileable("nothing reads a result of the segment")
        if pieces > self.elements:
            raise NotTileable(f"there are {self.elements} elements for {pieces} pieces")
        ends = (0, pieces - 1) if axis.dim else ()
        if any(low >= high for at in ends for low, high in self._windows(self._goals(at)).values()):
            raise NotTileable("a piece would read nothing but padding")

    def _place_input(self, value: int) -> None:
        shape, dim = self._shapes[value], self.axis.dim
        if value in self.program.static or len(shape) <= dim:
            return
        if dim:
            if shape[dim] > 1:  # a single element is read by each piece
                self.along[value] = Along(dim)
        elif shape[0] and shape[0] % self.axis.samples == 0:
            self.along[value] = Along(0, shape[0] // self.axis.samples)

    def _place(self, at: int, node: Node) -> None:
        if not any(value in self.along for value in node.reads):
            return  # it is computed as a whole, once a piece
        first = next(value for value in node.reads if value in self.along)
        norm = norm_of(node, len(self._shapes[first]), self.along[first].dim)
        if norm is not None and norm.input == first:
            self.norms[at], self.along[norm.output] = norm, self.along[first]
            return
        rule = RULES.get(node.target)
        if rule is None:
            raise NotTileable(f"{node.name} has no rule to run piece by piece")
        call = self._calls[at] = Call(node, self._shapes, self.along)
        self.along[node.outputs[0]] = rule.placed(call)

    def _strides_of_many(self, value: int) -> list[int]:
        """Return the strides of the dimensions of a value that have more than one element."""
        like = self.program.likes[value]
        return [stride for size, stride in zip(like.shape, like.stride, strict=True) if size > 1]

    def _size(self, value: int) -> int:
        """Return the number of elements of the axis in a value."""
        along = self.along[value]
        return self._shapes[value][along.dim] // along.unit

    def _own(self, value: int, piece: int) -> Window:
        """Return the part of a value that a piece makes and no other."""
        size = self._size(value)
        return piece * size // self.pieces, (piece + 1) * size // self.pieces

    @cached_property
    def elements(self) -> int:
        """Elements of the axis in the smallest result, or input of a norm over the axis: each piece has some of all."""
        return min(self._size(value) for value in (*self.program.outputs, *self._normed))

    def runs(self, backward: bool) -> list[float]:
        """Return how often each op runs in a forward or backward pass, in whole ops; a derivative counts as two.

        Forward: the ops before each norm over the axis, then all. Backward: all ops again, with a derivative that ends
        at each norm, and once with one that goes to the inputs.
        """
        count = len(self.program.nodes)
        if not backward:
            return [1.0 + sum(at < norm for norm in self.norms) for at in range(count)]
        return [3.0 + sum(1.0 if at < norm else 3.0 for norm in self.norms) for at in range(count)]

    @cached_property
    def largest_piece(self) -> int:
        """The piece that computes most: with the borders on both sides, and a row more where pieces do not divide."""
        return max(range(self.pieces), key=self._computed_bytes)

    def _computed_bytes(self, piece: int) -> int:
        windows, likes = self._windows(self._goals(piece)), self.program.likes
        return sum(likes[value].bytes * (high - low) // self._size(value) for value, (low, high) in windows.items())

    def overlap(self, pieces: int) -> list[float]:
        """Return for each node how often a run in so many pieces computes an element of its result, on average."""
        tiled = self if pieces == self.pieces else Tiled(self.program, self.axis, pieces)
        windows = tiled._windows(tiled._goals(pieces // 2))
        shares = list[float]()
        for node in self.program.nodes:
            value = node.outputs[0] if node.outputs else None
            if value is None or value not in self.along or value not in windows:
                shares.append(1.0)
                continue
            low, high = windows[value]
            shares.append((high - low) * pieces / self._size(value))
        return shares

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

    # -- windows

    def _windows(self, goals: Mapping[int, Window]) -> dict[int, Window]:
        """Return the window of each value along the axis that these windows need, by going back through the nodes."""
        windows = dict(goals)
        for at in reversed(range(len(self.program.nodes))):
            node = self.program.nodes[at]
            window = windows.get(node.outputs[0]) if node.outputs else None
            if window is None:
                continue
            for value, (_, (low, high)) in self._needs(at, window).items():
                if value in self.along:
                    unit = self.along[value].unit
                    windows[value] = _hull(windows.get(value), (low // unit, -(-high // unit)))
        return windows

    def _needs(self, at: int, window: Window) -> Mapping[int, tuple[int, Window]]:
        norm = self.norms.get(at)
        if norm is not None:
            along = self.along[norm.input]
            return {norm.input: (along.dim, elements(along, window))}
        call = self._calls.get(at)
        return {} if call is None else RULES[call.node.target].needs(call, window)

    def _goals(self, piece: int) -> dict[int, Window]:
        """Return what a piece must compute: its part of the results, and of what the norms over the axis read."""
        return {value: self._own(value, piece) for value in (*self.program.outputs, *self._normed)}

    @cached_property
    def _normed(self) -> tuple[int, ...]:
        return tuple(norm.input for norm in self.norms.values())

    # -- passes

    def forward(
        self, tensors: Sequence[Tensor], pieces: Sequence[int] | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the results, and the statistics (mean and variance) of the norms over the axis.

        ``pieces``: only these run, for what memory a piece takes.
        """
        statistics = dict[int, tuple[Tensor, Tensor]]()
        with torch.no_grad():
            for at, norm in self.norms.items():
                collected = Statistics(norm)
                for piece in pieces or range(self.pieces):
                    run = _Run(self, tensors, statistics, {norm.input: self._own(norm.input, piece)}, piece)
                    collected.add(run.until(at)[norm.input])
                    del run
                statistics[at] = collected.result(self.program.likes[norm.input].dtype)
            results = [like.empty() for like in self.result_likes]
            for piece in pieces or range(self.pieces):
                goals = {value: self._own(value, piece) for value in self.program.outputs}
                run = _Run(self, tensors, statistics, goals, piece)
                run.until(None)
                for value, result in zip(self.program.outputs, results, strict=True):
                    self._part(result, value, goals[value]).copy_(run.part(value, goals[value]))
                del run
        return results, [tensor for pair in statistics.values() for tensor in pair]

    def backward(
        self, tensors: Sequence[Tensor], statistics: Sequence[Tensor], gradients: Sequence[Tensor | None],
        needed: Sequence[bool], pieces: Sequence[int] | None = None,
    ) -> list[Tensor | None]:  # fmt: skip
        """Return the gradients of the inputs that need one. ``gradients``: those of the results; ``pieces``: as for
        `forward`."""
        known = dict(zip(self.norms, zip(statistics[::2], statistics[1::2], strict=True), strict=True))
        sums = dict[int, tuple[Tensor, Tensor]]()
        for at in reversed(self.norms):
            self._collect(at, tensors, known, sums, gradients, pieces)
        results: list[Tensor | None] = [
            torch.zeros_like(t) if n else None for t, n in zip(tensors, needed, strict=True)
        ]
        for piece in pieces or range(self.pieces):
            run = _Run(self, tensors, known, self._goals(piece), piece, sums)
            leaves = run.leaves(needed)
            with torch.enable_grad():
                run.until(None)
            for at, gradient in zip(leaves, self._derivative(run, piece, gradients, leaves.values()), strict=True):
                result = results[at]
                if gradient is not None and result is not None:
                    run.input_part(result, self.program.inputs[at]).add_(gradient)
            del run, leaves
        return results

    def _collect(
        self, at: int, tensors: Sequence[Tensor], known: Mapping[int, tuple[Tensor, Tensor]],
        sums: dict[int, tuple[Tensor, Tensor]], gradients: Sequence[Tensor | None], pieces: Sequence[int] | None,
    ) -> None:  # fmt: skip
        """Add up the sums of a norm's derivative, with those of all later norms known."""
        norm, total = self.norms[at], None
        for piece in pieces or range(self.pieces):
            run = _Run(self, tensors, known, self._goals(piece), piece, sums)
            if not run.reads(norm.output):
                continue
            with torch.no_grad():
                run.until(at)
                x = run.normed(at)
                output = run.normalize(at).detach().requires_grad_()
            with torch.enable_grad():
                run.until(None, known_output=(norm.output, output))
            (dy,) = self._derivative(run, piece, gradients, [output])
            if dy is not None:
                part = gradient_sums(norm, x, *known[at], dy)
                total = part if total is None else (total[0] + part[0], total[1] + part[1])
            del run, x, output, dy
        if total is None:
            mean, _ = known[at]
            zeros = mean.new_zeros(mean.shape[0], self._shapes[norm.input][1])
            total = zeros, zeros
        sums[at] = total

    def _derivative(
        self, run: _Run, piece: int, gradients: Sequence[Tensor | None], leaves: Any
    ) -> Sequence[Tensor | None]:
        """Return the gradients of leaves for a piece of the results."""
        parts, incoming = list[Tensor](), list[Tensor]()
        for value, gradient in zip(self.program.outputs, gradients, strict=True):
            own = self._own(value, piece)
            with torch.enable_grad():
                part = run.part(value, own)
            if gradient is not None and part.requires_grad:
                parts.append(part)
                incoming.append(self._part(gradient, value, own))
        leaves = list(leaves)
        if not parts or not leaves:
            return [None] * len(leaves)
        run.release()
        return torch.autograd.grad(parts, leaves, incoming, allow_unused=True)

    def _part(self, tensor: Tensor, value: int, window: Window) -> Tensor:
        """Return a window of a whole value."""
        along = self.along[value]
        low, high = elements(along, window)
        return tensor.narrow(along.dim, low, high - low)


class _Run:
    """One piece of a program: the values that it has computed so far."""

    def __init__(
        self, tiled: Tiled, tensors: Sequence[Tensor], statistics: Mapping[int, tuple[Tensor, Tensor]],
        goals: Mapping[int, Window], piece: int, sums: Mapping[int, tuple[Tensor, Tensor]] = {},  # read only
    ) -> None:  # fmt: skip
        self._tiled, self._statistics, self._sums, self._piece = tiled, statistics, sums, piece
        self._goals, self._windows = goals, tiled._windows(goals)
        self._next = 0
        self._values: dict[int, Tensor] = {}
        for value, tensor in zip(tiled.program.inputs, tensors, strict=True):
            self._values[value] = self.input_part(tensor, value)
        self._last = self._last_reads()

    def input_part(self, tensor: Tensor, value: int) -> Tensor:
        """Return the part of an input, or of its gradient, that the piece reads."""
        window = self._windows.get(value)
        return tensor if window is None else self._tiled._part(tensor, value, window)

    def reads(self, value: int) -> bool:
        """Return whether a result of the piece depends on a value along the axis."""
        return value in self._windows

    def leaves(self, needed: Sequence[bool]) -> dict[int, Tensor]:
        """Return the parts of the inputs that need a gradient, by position, as leaves of autograd."""
        leaves = dict[int, Tensor]()
        for at, value in enumerate(self._tiled.program.inputs):
            if needed[at]:
                leaves[at] = self._values[value] = self._values[value].detach().requires_grad_()
        return leaves

    def until(self, stop: int | None, known_output: tuple[int, Tensor] | None = None) -> Mapping[int, Tensor]:
        """Run the nodes before ``stop``, all for None, and return the values that are alive."""
        nodes = self._tiled.program.nodes
        if known_output is not None:
            value, self._values[value] = known_output
            self._next += 1
        stop = len(nodes) if stop is None else stop
        for at in range(self._next, stop):
            self._run(at, nodes[at])
            for value in self._last.get(at, ()):
                self._values.pop(value, None)
        self._next = max(self._next, stop)
        return self._values

    def _last_reads(self) -> dict[int, list[int]]:
        """Return the values that nothing reads after a node, by its index."""
        last = dict[int, int]()
        for at, node in enumerate(self._tiled.program.nodes):
            for value in (*node.reads, *node.outputs):
                last[value] = at
        ends = dict[int, list[int]]()
        for value, at in last.items():
            if value not in self._goals:
                ends.setdefault(at, []).append(value)
        return ends

    def _run(self, at: int, node: Node) -> None:
        tiled = self._tiled
        if not node.outputs or (node.outputs[0] in tiled.along and node.outputs[0] not in self._windows):
            return  # nothing of this pass needs it
        if at in tiled.norms:
            self._values[node.outputs[0]] = self.normalize(at)
            return
        call = tiled._calls.get(at)
        if call is None:
            result = run_whole(node, self._values.__getitem__)
        else:
            window = self._windows[node.outputs[0]]
            needs = tiled._needs(at, window)
            result = RULES[node.target].run(call, window, lambda value: self._operand(value, needs.get(value)))
        results = [result] if isinstance(result, Tensor) else list(result)
        self._values[node.outputs[0]] = results[0]
        if call is None:
            self._values.update(zip(node.outputs, results, strict=True))

    def _operand(self, value: int, need: tuple[int, Window] | None) -> Tensor:
        """Return what an op needs of a value."""
        tensor = self._values[value]
        if need is None:
            return tensor
        dim, (low, high) = need
        along = self._tiled.along.get(value)
        begin = 0 if along is None else elements(along, self._windows[value])[0]
        return (
            tensor
            if (low == begin and high - low == tensor.shape[dim])
            else tensor.narrow(dim, low - begin, high - low)
        )

    def normalize(self, at: int) -> Tensor:
        """Return the result of a norm over the axis."""
        tiled, norm = self._tiled, self._tiled.norms[at]
        x, window, along = self._values[norm.input], self._windows[norm.input], tiled.along[norm.input]
        mean, variance = self._statistics[at]
        weight, bias = (None if v is None else self._values[v] for v in (norm.weight, norm.bias))
        wanted = self._windows[norm.output]
        count = math.prod(tiled._shapes[norm.input]) // mean.numel()
        own = tiled._own(norm.input, self._piece)
        low, high = max(own[0], window[0]), min(own[1], window[1])
        first, length = (low - window[0]) * along.unit, max(0, high - low) * along.unit
        y: Tensor = Normalize.apply(
            norm,
            x,
            weight,
            bias,
            mean,
            variance,
            self._sums.get(at),
            count,
            (along.dim, first, length),
            self._piece == 0,
        )  # pyright: ignore[reportAssignmentType]
        begin = (wanted[0] - window[0]) * along.unit
        return y if wanted == window else y.narrow(along.dim, begin, (wanted[1] - wanted[0]) * along.unit)

    def normed(self, at: int) -> Tensor:
        """Return the input of a norm over the axis where the piece needs its result."""
        norm = self._tiled.norms[at]
        return self.part(norm.input, self._windows[norm.output])

    def part(self, value: int, window: Window) -> Tensor:
        """Return a window of a computed value."""
        along, have = self._tiled.along[value], self._windows[value]
        low, high = elements(along, window)
        return self._values[value].narrow(along.dim, low - have[0] * along.unit, high - low)

    def release(self) -> None:
        """Forget the values, so that the derivative frees what it has used."""
        self._values.clear()


def _hull(first: Window | None, second: Window) -> Window:
    return second if first is None else (min(first[0], second[0]), max(first[1], second[1]))
