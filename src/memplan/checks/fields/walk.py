"""Follow the fields of every tensor through the first forward pass of a step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from memplan.checks.fields.op_call import Call, shifted
from memplan.checks.fields.rules import ends, fields_of
from memplan.checks.fields.tensor_fields import Factor, Field, Fields, resolved, size_of, union, unknown
from memplan.checks.op_names import base_name
from memplan.trace.records import Form, View
from memplan.trace.trace import Trace

_LEAST = 3
"""Dimensions of the smallest tensor that can have a spatial one: (batch, channels, length)."""


@dataclass(frozen=True, slots=True)
class Source:
    """A dimension of an input, or of what an op made at which the path to the inputs ended."""

    view: View
    dim: int
    op: int | None = None
    """Index of that op; None for an input of the step."""


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a model gives back, with the fields of its dimensions."""

    layer: str
    view: View
    fields: Fields

    @property
    def spatial(self) -> tuple[tuple[int, Field], ...]:
        """Size and field of each dimension that a kernel slid along, in the order of the input's dimensions."""
        axes = [(size_of(dim), resolved(dim)) for dim in self.fields]
        found = [(size, field) for size, axis in axes for field in axis if field.windowed]
        first = min((field.source for _, field in found), default=0)  # of several inputs the first one's
        by_source = {field.source: (size, field) for size, field in found}
        return tuple(by_source[source] for source in sorted(by_source) if source < first + len(self.fields))


@dataclass(frozen=True, slots=True)
class Followed:
    """The dimensions of the inputs, the models' outputs, and the fields of each op's results, by the op's index."""

    sources: tuple[Source, ...]
    outputs: tuple[Output, ...]
    results: dict[int, tuple[Fields, ...]]
    ended: dict[int, Output] = field(default_factory=dict)
    """Inputs of the ops behind which positions are unknown, by the op's index."""


def follow(trace: Trace) -> Followed:
    """Follow the fields of every tensor through the forward ops of the first step.

    A trace without forms (one that is hand-made, or older) has no outputs.
    """
    return _Walk(trace).run()


class _Walk:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._sources: list[Source] = []
        self._known: dict[View, Fields] = {}
        self._results: dict[int, tuple[Fields, ...]] = {}
        self._makers: dict[int, Call] = {}
        self._whole: dict[int, View] = {}
        self._ended: dict[int, Output] = {}

    def run(self) -> Followed:
        waiting = list(self._trace.returned)
        outputs: list[tuple[int, Output]] = []
        for form in self._trace.forms:
            while waiting and waiting[0].after <= form.op:
                one = waiting.pop(0)
                outputs += [(one.after, self._output(one.layer, view)) for view in one.tensors]
            self._op(form)
        for one in waiting:
            outputs += [(one.after, self._output(one.layer, view)) for view in one.tensors]
        models = _models(self._trace)
        final = [output for after, output in outputs if output.layer in models and not self._is_read(output, after)]
        return Followed(tuple(self._sources), tuple(final) or self._last(), self._results, self._ended)

    def _output(self, layer: str, view: View) -> Output:
        return Output(layer, view, self._known.get(shown(view), unknown(view.shape)))

    def _op(self, form: Form) -> None:
        op = self._trace.ops[form.op]
        reads = tuple((name, self._fields(view)) for name, view in form.reads)
        if not form.writes:
            return
        for view in form.writes:
            self._whole.setdefault(view.storage, view)
        if not reads:
            return  # made from nothing: an input, if it is read
        call = Call(base_name(op.name), form, reads, self._makers)
        results = fields_of(call)
        if ends(call, results):
            self._ended[form.op] = Output(op.layer, form.reads[0][1], reads[0][1])
            results = [self._input(view, form.op) for view in form.writes]
        self._results[form.op] = tuple(results)
        for view, fields in zip(form.writes, results, strict=True):
            self._known[shown(view)] = fields
            self._makers[view.storage] = call
        if call.name == "copy":
            self._put_into(form, reads)

    def _put_into(self, form: Form, reads: tuple[tuple[str, Fields], ...]) -> None:
        """Give an empty tensor, part of which is written, the positions of what is written there (a pad by hand)."""
        part, whole = form.writes[0], self._whole.get(form.writes[0].storage)
        if whole is None or part.shape == whole.shape or part.strides != whole.strides or len(reads) < 2:
            return
        known = self._known.get(shown(whole))
        if known is None or any(factor.axis for dim in known for factor in dim):
            return
        offset, fields = part.offset - whole.offset, list[tuple[Factor, ...]]()
        for dim, size, stride in zip(
            union([reads[1][1]], part.shape, form.op), whole.shape, whole.strides, strict=True
        ):
            start, offset = divmod(offset, stride) if stride else (0, offset)
            fields.append(shifted(dim, size, -start, 1, form.op) if size_of(dim) != size else dim)
        self._known[shown(whole)] = tuple(fields)

    def _fields(self, view: View) -> Fields:
        known = self._known.get(shown(view))
        if known is None:
            known = self._known[shown(view)] = self._input(view) if self._is_input(view) else unknown(view.shape)
        return known

    def _is_input(self, view: View) -> bool:
        """Return whether a view shows data of the step: made while building, or from nothing outside of every layer."""
        if view.storage < 0 or len(view.shape) < _LEAST:
            return False
        storage = self._trace.storages[view.storage]
        maker = self._trace.ops[storage.op] if storage.op is not None else None
        made_here = maker is not None and maker.phase == "forward" and bool(maker.reads or maker.layer)
        return storage.cause not in ("weight", "buffer") and not made_here and storage.dtype.startswith(_REAL)

    def _input(self, view: View, op: int | None = None) -> Fields:
        fields: list[tuple[Factor, ...]] = []
        for dim, size in enumerate(view.shape):
            fields.append((Factor(size, (Field(len(self._sources), size),)),))
            self._sources.append(Source(view, dim, op))
        return tuple(fields)

    def _is_read(self, output: Output, after: int) -> bool:
        """Return whether a model that runs later reads an output."""
        key, models = shown(output.view), _models(self._trace)
        losses = {one.layer for one in self._trace.returned} - models
        for form in self._trace.forms:
            layer = self._trace.ops[form.op].layer
            if form.op < after or not layer or any(layer == one or layer.startswith(one + ".") for one in losses):
                continue
            if any(shown(view) == key for _, view in form.reads):
                return True
        return False

    def _last(self) -> tuple[Output, ...]:
        """Return the last result with a spatial dimension, where no module returned anything."""
        for form in reversed(self._trace.forms):
            for view, fields in zip(form.writes, self._results.get(form.op, ()), strict=False):
                output = Output(self._trace.ops[form.op].layer, view, fields)
                if output.spatial:
                    return (output,)
        return ()


_REAL = ("float", "bfloat", "complex", "uint8", "double", "half")


def _models(trace: Trace) -> set[str]:
    """Return the layers called from outside that own weights; where the only model's layers do not carry its name, the
    first."""
    called = list(dict.fromkeys(one.layer for one in trace.returned))
    owners = [layer.name for layer in trace.layers if layer.weights]
    found = {name for name in called if any(own == name or own.startswith(name + ".") for own in owners)}
    apart = [own for own in owners if not any(own == name or own.startswith(name + ".") for name in called)]
    rest = [name for name in called if name not in found]
    return found | set(rest[:1]) if apart or not found else found


def shown(view: View) -> View:
    """Return a view that is equal for tensors of the same elements: a dimension of one element has the stride 0."""
    strides = tuple(0 if size == 1 else stride for size, stride in zip(view.shape, view.strides, strict=True))
    return replace(view, strides=strides)
