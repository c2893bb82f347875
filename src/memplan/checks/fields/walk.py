"""Compute the receptive field of every tensor in the first forward pass of a step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from memplan.checks.fields.op_call import Call, shifted
from memplan.checks.fields.rules import fields_of, has_spatial_dim, loses_positions
from memplan.checks.fields.tensor_fields import Dim, Factor, Field, Fields, resolved, size_of, union, unknown
from memplan.checks.op_names import base_name
from memplan.trace.records import Form, View
from memplan.trace.trace import Trace

_MIN_RANK = 3
"""Tensors with a spatial dimension have at least (batch, channels, length)."""
_TILING = ("slice", "split", "split_with_sizes", "chunk")
_REAL = ("float", "bfloat", "complex", "uint8", "double", "half")
"""Dtypes of data; those of indices are others."""


@dataclass(frozen=True, slots=True)
class Source:
    """A dimension that fields refer to: of an input of the step, or of the result of an op that lost the positions."""

    view: View
    dim: int
    op: int | None = None
    """Index of that op; None for an input of the step."""


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a model returns, with the fields of its dimensions."""

    layer: str
    view: View
    fields: Fields

    @property
    def spatial(self) -> tuple[tuple[int, Field], ...]:
        """Size and field of each dimension that a kernel slid along, in the order of the input's dimensions.

        Of an output of several inputs, only dimensions of the first input are returned.
        """
        by_source = {
            field.source: (size_of(dim), field) for dim in self.fields for field in resolved(dim) if field.is_spatial
        }
        # sources are numbered dimension by dimension: `end` is the same dimension of the next input of this rank
        end = min(by_source, default=0) + len(self.fields)
        return tuple(by_source[source] for source in sorted(by_source) if source < end)


@dataclass(frozen=True, slots=True)
class Followed:
    """Fields of a step's tensors: its sources, the models' outputs, and the results of each op, by the op's index."""

    sources: tuple[Source, ...]
    """Numbered as `Field.source` has them."""
    outputs: tuple[Output, ...]
    results: dict[int, tuple[Fields, ...]]
    last_traced: dict[int, Output] = field(default_factory=dict)
    """Inputs of ops that lose the positions (`loses_positions`), by the op's index."""


def follow(trace: Trace) -> Followed:
    """Return the fields of every tensor of the first step's forward ops.

    Where a step calls a model on several tiles of an input, positions are those of the tile: the outputs together cover
    the input. A trace without forms (hand-made, or of an older version) has no outputs.
    """
    followed = _FieldPropagation(trace).run()
    # tiled: again, with each tile as an input of its own
    return _FieldPropagation(trace, tiled=True).run() if _are_of_tiles(followed.outputs) else followed


def _are_of_tiles(outputs: tuple[Output, ...]) -> bool:
    """Return whether outputs of a model's calls cover different positions of the same input."""
    lost_by_input: dict[Any, set[Any]] = {}  # model and dimensions of its input -> positions lost there by each output
    for output in outputs:
        sources = tuple(field.source for _, field in output.spatial)
        lost = tuple(field.lost(size) for size, field in output.spatial)
        lost_by_input.setdefault((output.layer, sources), set()).add(lost)
    return any(len(losses) > 1 for losses in lost_by_input.values())


class _FieldPropagation:
    """Goes through the recorded forward ops in order and computes the fields of each result from its operands'."""

    def __init__(self, trace: Trace, tiled: bool = False) -> None:
        self._trace = trace
        self._tiled = tiled
        """Whether a slice of an input, outside of modules, is an input of its own."""
        self._models = _models(trace)
        """Paths of the modules that the step calls as models, not as losses."""
        self._sources: list[Source] = []
        """Dimensions of inputs; a `Field` names its source by the index in this list."""
        self._fields_by_view: dict[View, Fields] = {}
        """By canonical view of a tensor: the receptive fields of its dimensions."""
        self._results: dict[int, tuple[Fields, ...]] = {}
        """Index of an op -> the fields of its results."""
        self._makers: dict[int, Call] = {}
        """Storage -> the call that wrote it last."""
        self._first_view: dict[int, View] = {}
        """Storage -> the view of it that was written first: the whole tensor."""
        self._last_traced: dict[int, Output] = {}
        """As `Followed.last_traced`."""

    def run(self) -> Followed:
        """Return the fields of all results. Outputs are tensors that models return and no later layer reads."""
        forms = iter(self._trace.forms)
        form = next(forms, None)
        outputs: list[Output] = []
        for call in self._trace.returned:
            while form is not None and form.op < call.after:  # a later op may write to a returned tensor in place
                self._add_op(form)
                form = next(forms, None)
            returned = [self._output(call.layer, view) for view in call.tensors if call.layer in self._models]
            outputs += [output for output in returned if not self._is_read_by_model(output, call.after)]
        while form is not None:
            self._add_op(form)
            form = next(forms, None)
        return Followed(tuple(self._sources), tuple(outputs) or self._last_result(), self._results, self._last_traced)

    def _output(self, layer: str, view: View) -> Output:
        """Return a tensor that a model returns, with its receptive fields so far."""
        return Output(layer, view, self._fields_by_view.get(canonical(view), unknown(view.shape)))

    def _add_op(self, form: Form) -> None:
        """Compute the receptive fields of an op's results and store them by view, for the ops that read them later.
        ``form`` has the arguments and results of the op as views."""
        op = self._trace.ops[form.op]
        reads = tuple((name, self._fields(view)) for name, view in form.reads)
        for view in form.writes:
            self._first_view.setdefault(view.storage, view)
        if not reads or not form.writes:
            return  # a constant or random numbers: an input, if something reads it
        call = Call(base_name(op.name), form, reads, self._makers)
        results = fields_of(call)
        if self._tiled and not op.layer and call.name in _TILING and not has_spatial_dim(fields for _, fields in reads):
            results = [self._new_source(view) for view in form.writes]
        if loses_positions(call, results):
            self._last_traced[form.op] = Output(op.layer, form.reads[0][1], reads[0][1])
            results = [self._new_source(view, form.op) for view in form.writes]
        self._results[form.op] = tuple(results)
        for view, fields in zip(form.writes, results, strict=True):
            self._fields_by_view[canonical(view)] = fields
            self._makers[view.storage] = call
        if call.name == "copy":
            self._copy_into_part(form, reads)

    def _copy_into_part(self, form: Form, reads: tuple[tuple[str, Fields], ...]) -> None:
        """After ``whole[part] = x``, let the positions of ``whole`` see those of ``x``: a pad written by hand. ``form``
        and ``reads`` are those of the copy. Nothing changes if positions of ``whole`` see an input already."""
        part, whole = form.writes[0], self._first_view.get(form.writes[0].storage)
        if whole is None or part.shape == whole.shape or part.strides != whole.strides or len(reads) < 2:
            return
        whole_fields = self._fields_by_view.get(canonical(whole))
        if whole_fields is None or any(factor.axis for dim in whole_fields for factor in dim):
            return
        copied = union([reads[1][1]], part.shape, form.op)  # x, broadcast to the part
        offset = part.offset - whole.offset
        fields: list[Dim] = []
        for dim, size, stride in zip(copied, whole.shape, whole.strides, strict=True):
            start, offset = divmod(offset, stride) if stride else (0, offset)  # where the part begins in this dimension
            fields.append(shifted(dim, size, form.op, offset=-start) if size_of(dim) != size else dim)
        self._fields_by_view[canonical(whole)] = tuple(fields)

    def _fields(self, view: View) -> Fields:
        """Return the receptive fields of a tensor. Without known fields, the step's data becomes an input of its own,
        and other tensors are unknown."""
        key = canonical(view)
        if key not in self._fields_by_view:
            self._fields_by_view[key] = self._new_source(view) if self._is_input(view) else unknown(view.shape)
        return self._fields_by_view[key]

    def _is_input(self, view: View) -> bool:
        """Return whether a view shows data of the step: from before it, or created in it outside of every layer."""
        if view.storage < 0 or len(view.shape) < _MIN_RANK:
            return False
        storage = self._trace.storages[view.storage]
        maker = self._trace.ops[storage.op] if storage.op is not None else None
        computed = maker is not None and maker.phase == "forward" and bool(maker.reads or maker.layer)
        return storage.cause not in ("weight", "buffer") and not computed and storage.dtype.startswith(_REAL)

    def _new_source(self, view: View, op: int | None = None) -> Fields:
        """Add the dimensions of a tensor as sources, and return its fields: each position sees itself. ``op`` is None
        for an input of the step, else the index of an op through which positions cannot be traced."""
        fields: list[Dim] = []
        for dim, size in enumerate(view.shape):
            fields.append((Factor(size, (Field(len(self._sources), size),)),))
            self._sources.append(Source(view, dim, op))
        return tuple(fields)

    def _is_read_by_model(self, output: Output, after: int) -> bool:
        """Return whether a layer reads an output after the first ``after`` ops of the trace; losses do not count."""
        key = canonical(output.view)
        losses = {returned.layer for returned in self._trace.returned} - self._models
        for form in self._trace.forms:
            layer = self._trace.ops[form.op].layer
            in_model = layer and not any(_is_within(layer, loss) for loss in losses)
            if form.op >= after and in_model and any(canonical(view) == key for _, view in form.reads):
                return True
        return False

    def _last_result(self) -> tuple[Output, ...]:
        """Return the last result with a spatial dimension, for a step in which no module returned a tensor."""
        for form in reversed(self._trace.forms):
            for view, fields in zip(form.writes, self._results.get(form.op, ()), strict=False):
                output = Output(self._trace.ops[form.op].layer, view, fields)
                if output.spatial:
                    return (output,)
        return ()


def _models(trace: Trace) -> set[str]:
    """Return the paths of the modules that the step calls as models, not as losses: those that own weights. If there is
    none, or if weights belong to no called module by its path, the first other module called is a model, too."""
    called = list(dict.fromkeys(returned.layer for returned in trace.returned))
    owners = [layer.name for layer in trace.layers if layer.weights]
    models = {name for name in called if any(_is_within(owner, name) for owner in owners)}
    has_other_owner = any(not any(_is_within(owner, name) for name in called) for owner in owners)
    if has_other_owner or not models:
        models.update([name for name in called if name not in models][:1])
    return models


def _is_within(layer: str, module: str) -> bool:
    return layer == module or layer.startswith(module + ".")


def canonical(view: View) -> View:
    """Return the view with stride 0 in dimensions of size 1, so that tensors of the same elements are equal."""
    strides = tuple(0 if size == 1 else stride for size, stride in zip(view.shape, view.strides, strict=True))
    return replace(view, strides=strides)
