"""Trace segments of a step as calls that run piece by piece (`memplan.planning.tiles`).

A segment is a range of calls of torch functions, by their number in the trace. Its calls run without data, so that the
user's code goes on, and are recorded as a program. After the last, the program becomes one op of the traced graph, and
its results take the place of the tensors that the calls returned.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memplan import _torch
from memplan.planning.capture.allocation_probe import Allocations
from memplan.planning.capture.changed_tensors import ChangedTensors, updated_statistics
from memplan.planning.graph.tensor_like import Like
from memplan.planning.ops.tile import TILE_OPS, TracedTile, register, run_pieces, tile_of
from memplan.planning.tiles.program import NotTileable, Recorder
from memplan.planning.tiles.tiled import Tile, Tiled

_HOOKS = frozenset(("register_hook", "retain_grad"))
_GRADIENT_QUERIES = frozenset(("requires_grad", "requires_grad_", "grad_fn", "is_leaf"))


class Tiling:
    """The segments of a trace, in each of its passes. The model's parameters and buffers are the same for each."""

    def __init__(self, tiles: Sequence[Tile], model: nn.Module) -> None:
        self.tiles, self._model = tiles, model
        self.registered_tiles: list[Tiled] = []
        """Tiles of the last pass: their ops find them while they live."""
        self._read_in_last_pass = set[tuple[int, int]]()
        """Results of segments that a later call read in the pass before; keys as in `_replacements`."""
        self._first_pass = True
        self.in_place_calls = set[int]()
        """Numbers of the calls outside of segments that change an operand that depends on data."""
        self.begin_pass()

    def begin_pass(self) -> None:
        """Begin a pass of the trace."""
        self._static: dict[int, Tensor] | None = None
        """See `_static_tensors`; None: not read yet."""
        self.registered_tiles = []
        self._recorder: Recorder | None = None
        """Recording of the current segment; None before its first call that reads data, and outside of segments."""
        self._finished: list[tuple[int, Recorder]] = []
        """Index and recording of each segment that has become an op."""
        self._call_results: list[weakref.ref[Tensor]] = []
        """Tensors that the recorded calls of the current segment returned, in order."""
        self._replacements: dict[int, tuple[Tensor, Tensor, tuple[int, int]]] = {}
        """id() of a tensor that a segment's call returned -> (tensor, the result of the segment's op that replaces it,
        (index of the segment, position among the results of its calls))."""
        self._read_in_this_pass = set[tuple[int, int]]()
        """As `_read_in_last_pass`, so far."""
        self._segment_of_result: dict[int, tuple[Tensor, int, Recorder]] = {}
        """id() of a tensor that a segment's call returned -> (tensor, first call of the segment, its recording)."""

    def end_pass(self) -> None:
        """End a pass: in the next, the segments return only the results that were read in this pass.

        Raises:
            NotTileable: a segment's last call was not made.
        """
        if len(self._finished) < len(self.tiles):
            refusal = NotTileable("the step ends before the segment does")
            refusal.at = next(index for index in range(len(self.tiles)) if index not in dict(self._finished))
            raise refusal
        self._read_in_last_pass, self._first_pass = self._read_in_this_pass, False

    def call(self, number: int, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call of a torch function of the traced model, or record it as part of a segment."""
        index = next((index for index, tile in enumerate(self.tiles) if tile.first <= number <= tile.last), None)
        try:
            return self._call_or_replace(index, number, func, args, kwargs)
        except NotTileable as refusal:
            refusal.at = index if refusal.at is None else refusal.at
            raise

    def _call_or_replace(self, index: int | None, number: int, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a call of a torch function, or record it if it is part of a segment and reads data. ``index`` is that of
        the segment that the call is in, None outside of segments; ``number`` is the call's in the trace.

        Returns:
            The result of the call; of a segment's last call, in terms of the op that replaces the segment.
        """
        self._refuse_hooks_and_gradient_queries(func, args)
        # First calls of the earlier segments whose calls this segment records again, instead of reading their results.
        repeats = () if index is None else self.tiles[index].repeats
        args, kwargs = _torch.tree_map(lambda leaf: self._replaced(leaf, repeats), (args, kwargs))
        operands, static = ChangedTensors(func, args, kwargs), self._static_tensors()
        if index is None:
            result = func(*args, **kwargs)
            changed = operands.changed_operands()
            changes_data = any(id(tensor) not in static for tensor in changed)
            if changes_data:
                self.in_place_calls.add(number)
                self._forget_recordings_of(changed)
            self._refuse_changes_of_operands((*changed, *updated_statistics(func, args, kwargs)))
            return result
        if all(id(tensor) in static for tensor in operands.operands):  # the same for each piece: runs once, as it is
            result = func(*args, **kwargs)
            if self._recorder is not None and any(map(self._recorder.reads, operands.changed_operands())):
                raise NotTileable("the segment changes a buffer that it read before")
            self._refuse_changes_of_operands(operands.changed_operands())
            static |= {id(leaf): leaf for leaf in _torch.tree_leaves(result) if isinstance(leaf, Tensor)}
        else:
            result = self._run_recorded(func, args, kwargs, repeats)
        return self._finish(index, result) if number == self.tiles[index].last else result

    def _refuse_hooks_and_gradient_queries(self, func: Callable[..., Any], args: Sequence[Any]) -> None:
        """Raise NotTileable for two uses of a segment's tensors: a hook, as a piece has only a part of the gradient;
        and a query whether they need a gradient, which tensors without data would deny."""
        tensor, name = args[0] if args else None, getattr(func, "__name__", "")
        if name == "__get__":  # of a property, such as requires_grad
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        inside = isinstance(tensor, Tensor) and self._recorder is not None and self._recorder.owns(tensor)
        is_result = id(tensor) in self._replacements
        if (name in _HOOKS and (inside or is_result)) or (name in _GRADIENT_QUERIES and inside):
            refusal = NotTileable(f"{name} of a tensor of the segment")
            if is_result:
                _, _, (refusal.at, _) = self._replacements[id(tensor)]
            raise refusal

    def _forget_recordings_of(self, changed: Sequence[Tensor]) -> None:
        """Have no segment repeat what computed these tensors, which a call outside of segments has changed."""
        bases = {id(_torch.viewed(tensor)) for tensor in changed}
        for tensor, output, _ in self._replacements.values():
            if id(_torch.viewed(output)) in bases:
                self._segment_of_result.pop(id(tensor), None)

    def _refuse_changes_of_operands(self, changed: Sequence[Tensor]) -> None:
        """Raise NotTileable if an earlier segment has read memory of these tensors, which are changed now: its
        derivative, and segments that repeat it, would read that later. Autograd's versions miss some changes."""
        for index, recorder in self._finished:
            if any(map(recorder.reads, changed)):
                refusal = NotTileable("a later call changes what the segment reads")
                refusal.at = index
                raise refusal

    def _run_recorded(self, func: Callable[..., Any], args: Any, kwargs: Any, repeats: Sequence[int]) -> Any:
        """Add a call to the program of the current segment, and return its results without data.

        ``repeats``: earlier segments, each named by the number of its first call. Where this call reads a result of
        one, the ops that compute the result are recorded in this segment, too, instead of an input for the result.
        """
        if not torch.is_grad_enabled():
            raise NotTileable("a part of the segment has no gradient")
        if self._recorder is None:
            self._recorder = Recorder()
        static = self._static_tensors()

        def recording_to_repeat(tensor: Tensor) -> Recorder | None:
            """Return the recording of the segment in ``repeats`` that computed a tensor, None for other tensors."""
            _, first_call, recorder = self._segment_of_result.get(id(tensor), (None, None, None))
            return recorder if first_call in repeats else None

        result = self._recorder.call(func, args, kwargs, lambda tensor: id(tensor) in static, recording_to_repeat)
        self._call_results += [weakref.ref(leaf) for leaf in _torch.tree_leaves(result) if isinstance(leaf, Tensor)]
        return result

    def _finish(self, index: int, result: Any) -> Any:
        """Add the segment at an index to the traced graph as one op.

        Returns ``result``, which its last call returned, with the op's results in place of tensors without data. Raises
        NotTileable if the segment cannot run piece by piece.
        """
        recorder, tile = self._recorder, self.tiles[index]
        if recorder is None:
            raise NotTileable("no call of the segment reads data")
        self._recorder = None
        recorder.release()
        results = self._referenced_results(recorder)
        for tensor in results.values():
            self._segment_of_result[id(tensor)] = tensor, tile.first, recorder
        self._call_results = []
        if not self._first_pass:  # which does not know yet which results later calls read
            results = {n: tensor for n, tensor in results.items() if (index, n) in self._read_in_last_pass}
            if recorder.share_memory(list(results.values())):
                raise NotTileable(
                    "a result is a view of another, or of what the segment reads: writes would not reach it"
                )
        tiled, key = register(recorder.program(list(results.values())), tile.axis, tile.pieces)
        _check_running_statistics(recorder, tiled)
        self.registered_tiles.append(tiled)
        outputs = TracedTile.apply(key, *recorder.sources.values())  # results, then statistics of batch norms
        for (n, tensor), output in zip(results.items(), outputs, strict=False):  # without the statistics
            self._replacements[id(tensor)] = tensor, output, (index, n)
        self._refuse_changes_of_operands([source for sources, _ in recorder.running.values() for source in sources])
        self._update_running(tiled, recorder, outputs[len(results) :])
        self._finished.append((index, recorder))
        return _torch.tree_map(self._replaced, result)

    def _referenced_results(self, recorder: Recorder) -> dict[int, Tensor]:
        """Return the results of the segment's calls that the user's code still references, by position in
        ``_call_results``: the last position of a tensor that several calls returned, as calls in place do."""
        last_positions = dict[int, tuple[int, Tensor]]()  # by id() of the tensor
        for position, reference in enumerate(self._call_results):
            tensor = reference()
            if tensor is not None and recorder.owns(tensor):
                last_positions[id(tensor)] = position, tensor
        return dict(last_positions.values())

    def _update_running(self, tiled: Tiled, recorder: Recorder, statistics: Sequence[Tensor]) -> None:
        """Update the running statistics of the segment's batch norms as torch does. ``statistics``: mean and biased
        variance of each of ``tiled.norms``, in turn."""
        statistics = statistics[: 2 * len(tiled.norms)]
        means, variances = statistics[0::2], statistics[1::2]
        for (index, norm), mean, variance in zip(tiled.norms.items(), means, variances, strict=True):
            shape = tiled.program.likes[norm.input].shape
            elements_per_channel = math.prod((shape[0], *shape[2:]))
            unbiased = variance * (elements_per_channel / max(elements_per_channel - 1, 1))
            # Without running statistics there is nothing to update.
            running_statistics, momentum = recorder.running.get(index, ((), 0.0))
            with torch.no_grad():
                for running, new in zip(running_statistics, (mean, unbiased), strict=False):
                    running.mul_(1 - momentum).add_(new.reshape(-1).to(running.dtype), alpha=momentum)

    def returned(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the model's output tensors; those of a segment's calls are replaced by results of the segment's op."""
        return [self._replaced(output) for output in outputs]

    def _replaced(self, leaf: Any, repeats: Sequence[int] = ()) -> Any:
        """Return the result of a segment's op that replaces a tensor of its calls, and note that it is read. Other
        leaves are returned unchanged, and so are those of the segments that begin with the calls ``repeats``."""
        if not isinstance(leaf, Tensor) or id(leaf) not in self._replacements:
            return leaf
        _, first_call, _ = self._segment_of_result.get(id(leaf), (None, None, None))
        if first_call in repeats:
            return leaf
        _, output, key = self._replacements[id(leaf)]
        self._read_in_this_pass.add(key)
        return output

    def _static_tensors(self) -> dict[int, Tensor]:
        """Return parameters, buffers and all tensors that the segments' calls computed from them alone, by id()."""
        if self._static is None:
            self._static = {id(tensor): tensor for tensor in (*self._model.parameters(), *self._model.buffers())}
        return self._static


def _check_running_statistics(recorder: Recorder, tiled: Tiled) -> None:
    """Raise NotTileable if the running statistics of a segment's batch norms cannot be updated after its op: they are
    not over the axis that is cut into pieces, or the segment reads them, too."""
    norm_by_statistic = {id(source): norm for norm, (sources, _) in recorder.running.items() for source in sources}
    if not tiled.norms.keys() >= set(norm_by_statistic.values()):
        raise NotTileable("a batch norm updates statistics that are not over the axis")
    if any(id(_torch.viewed(source)) in norm_by_statistic for source in recorder.sources.values()):
        raise NotTileable("the segment reads running statistics that it updates")


def tile_scratch(target: str, args: Sequence[Any]) -> int | None:
    """Return the workspace of a segment's op in bytes, in addition to its results; None for other ops. Tensors among
    the arguments have no data."""
    if target not in TILE_OPS:
        return None
    layouts = _torch.tree_map(lambda leaf: Like.of(leaf) if isinstance(leaf, Tensor) else leaf, args)
    cached, key = tile_of(args[-1]).measured_workspaces, (target, repr(layouts))
    if key not in cached:  # kept for further captures with this tile
        cached[key] = _measured_scratch(target, args)
    return cached[key]


def _measured_scratch(target: str, args: Sequence[Any]) -> int:
    """Return the workspace of a segment's op in bytes, by recording the pieces that can need most."""
    with Allocations(real=False) as allocations:
        arguments = _torch.tree_map(lambda leaf: torch.empty_like(leaf) if isinstance(leaf, Tensor) else leaf, args)
        pieces = tile_of(arguments[-1]).unlike_pieces
        with allocations.span("op"):
            results = run_pieces(target, arguments, pieces)
        del results
    return allocations.peak_bytes("op") - allocations.remaining_bytes("op")
