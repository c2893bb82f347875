"""Encodings of small graphs, each executed: what comes out of them against what the ops themselves give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memplan.planning.ops.piecewise  # noqa: F401  # registers the ops that the calls name
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph import op_schema
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Kind, Phase, Ref, SavedForm, Value, map_refs
from memplan.planning.graph.precision import Save
from memplan.planning.levers import encode
from memplan.planning.levers.lever import Called, Situation
from memplan.planning.levers.registry import find, with_encodings

ATEN = torch.ops.aten

ENCODE = find("encode")


def dtype_of(tensor: Tensor) -> str:
    """As a captured graph writes it."""
    return str(tensor.dtype).removeprefix("torch.")


class Recorder:
    """A graph written by hand: each call really runs, and is written down."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[GraphOp] = []
        self.tensors: dict[int, Tensor] = {}

    def put(self, tensor: Tensor, kind: Kind = "input", op: int | None = None) -> Ref:
        base = next((k for k, one in self.tensors.items() if one.data_ptr() == tensor.data_ptr()), len(self.values))
        number = len(self.values)
        size = tensor.untyped_storage().nbytes() if base == number else 0
        self.values.append(
            Value(number, f"v{number}", kind, base, size, tuple(tensor.shape), tensor.stride(), dtype_of(tensor), op)
        )
        self.tensors[number] = tensor
        return Ref(number)

    def call(self, target: str, *args: Any, phase: Phase = "forward") -> Any:
        result = op_schema.overload(target)(*map_refs(args, self.tensors.__getitem__))
        index = len(self.ops)
        results = result if isinstance(result, tuple) else (result,)
        made = [self.put(one, "result", index) for one in results]
        ids = tuple(one.value for one in made)
        reads = tuple(dict.fromkeys(self.values[one.value].base for one in args if isinstance(one, Ref)))
        owns = tuple(one for one in ids if not self.values[one].is_view)
        self.ops.append(GraphOp(index, target, args, {}, phase, ids, len(made) > 1, reads, owns))
        return tuple(made) if len(made) > 1 else made[0]

    def graph(self) -> JointGraph:
        return with_encodings(JointGraph(tuple(self.values), tuple(self.ops), (), ()), Situation())

    def run(self, call: Called, more: dict[int, Tensor] | None = None) -> Tensor:
        target, args, kwargs = call
        return op_schema.overload(target)(*map_refs(args, (self.tensors | (more or {})).__getitem__), **kwargs)


def bits(one: Tensor) -> Tensor:
    return one.contiguous().view(torch.uint8)


def same(one: Tensor, other: Tensor) -> bool:
    return one.stride() == other.stride() and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def encoded(recorder: Recorder, graph: JointGraph, encoding: SavedForm) -> Tensor:
    """The encoded form, which must be what the graph says of it."""
    one, value = recorder.run(ENCODE.store(graph, encoding)), graph.values[encoding.encoded]
    assert (value.kind, value.base, value.id) == ("encoded", encoding.encoded, encoding.encoded)
    assert (tuple(one.shape), one.stride(), dtype_of(one)) == (value.shape, value.stride, value.dtype)
    assert one.untyped_storage().nbytes() == value.bytes
    return one


def check_direct(recorder: Recorder, graph: JointGraph, encoding: SavedForm) -> None:
    form = encoded(recorder, graph, encoding)
    for index in encoding.direct_readers:
        op = graph.ops[index]
        expected = recorder.tensors[op.outputs[0] or 0]
        given = op_schema.arguments_of(op.target, op.args, op.kwargs)[
            encode.BITS_READERS[op.target].same_layout_operand
        ].value
        for in_place in (False, True):
            copy = recorder.tensors[given].clone()
            call = ENCODE.read_directly(graph, encoding, op, in_place=in_place)
            got = recorder.run(call, {encoding.encoded: form, given: copy})
            assert (got.data_ptr() == copy.data_ptr()) == in_place
            assert same(got, expected)


def special(*shape: int, seed: int = 0) -> Tensor:
    one = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for at, number in enumerate((float("nan"), float("inf"), float("-inf"), 0.0, -0.0)):
        one.view(-1)[at::50] = number
    return one


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("forward", "backward", "rest", "codec"),
    [
        ("relu", "threshold_backward", (0,), "sign"),
        ("leaky_relu", "leaky_relu_backward", (0.01, False), "positive"),
    ],
)
def test_a_gradient_reads_bits(
    forward: str, backward: str, rest: tuple[Any, ...], codec: str, channels_last: bool
) -> None:
    r = Recorder()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = r.put(special(2, 8, 16, 16).contiguous(memory_format=layout))
    g = r.put(special(2, 8, 16, 16, seed=1).contiguous(memory_format=layout), "tangent")
    y = r.call(f"aten.{forward}.default", x)
    r.call(f"aten.{backward}.default", g, y, *rest, phase="backward")
    (encoding,) = r.graph().forms
    assert (encoding.value, encoding.codec, encoding.can_restore_value, encoding.direct_readers) == (
        y.value,
        codec,
        False,
        (1,),
    )
    assert r.graph().values[encoding.encoded].bytes == r.values[y.value].bytes // 32
    check_direct(r, r.graph(), encoding)


def test_a_mask_becomes_bits_and_comes_back() -> None:
    r = Recorder()
    x, g = r.put(special(64, 129)), r.put(special(64, 129, seed=1), "tangent")
    _, mask = r.call("aten.native_dropout.default", x, 0.3, True)
    r.call("aten.native_dropout_backward.default", g, mask, 1 / 0.7, phase="backward")
    r.call("aten.masked_fill.Scalar", g, mask, 0.5, phase="backward")
    r.call("aten.mul.Tensor", g, mask, phase="backward")
    graph = r.graph()
    (encoding,) = graph.forms
    assert (encoding.value, encoding.codec, encoding.can_restore_value, encoding.direct_readers) == (
        mask.value,
        "bits",
        True,
        (1, 2),
    )
    form = encoded(r, graph, encoding)
    assert form.numel() == 64 * 129 // 8
    back = r.run(ENCODE.fetch(graph, encoding), {encoding.encoded: form})
    assert same(back, r.tensors[mask.value])
    check_direct(r, graph, encoding)


INDEXED: list[tuple[tuple[int, ...], str, tuple[Any, ...], torch.dtype]] = [
    ((4, 64, 16, 16), "aten.max_pool2d_with_indices.default", ([2, 2], [2, 2]), torch.uint8),
    ((2, 8, 32, 32), "aten.max_pool2d_with_indices.default", ([3, 3], [2, 2], [1, 1]), torch.int16),
    ((1, 1, 256, 256), "aten.max_pool2d_with_indices.default", ([2, 2], [2, 2]), torch.int32),
    ((2, 3, 16, 16, 16), "aten.max_pool3d_with_indices.default", ([2, 2, 2], [2, 2, 2]), torch.int16),
    ((2, 64, 20, 20), "aten.adaptive_max_pool2d.default", ([7, 7],), torch.int16),
    ((100, 200), "aten.topk.default", (50,), torch.uint8),
    ((600, 700), "aten.max.dim", (0,), torch.int16),
    ((700, 300), "aten.sort.default", (), torch.int16),
    ((700, 300), "aten.argmax.default", (1,), torch.int16),
    ((2, 8, 12, 12, 12), "aten.adaptive_max_pool3d.default", ([7, 7, 7],), torch.int16),
    ((700, 300), "aten.argmin.default", (1,), torch.int16),
    ((600, 700), "aten.min.dim", (1,), torch.int16),
]


@pytest.mark.parametrize(("shape", "target", "rest", "dtype"), INDEXED)
def test_indices_become_the_smallest_integers_that_hold_them(
    shape: tuple[int, ...], target: str, rest: tuple[Any, ...], dtype: torch.dtype
) -> None:
    r = Recorder()
    x = r.put(torch.randn(shape).contiguous())
    # The largest index that there can be is among them.
    r.tensors[x.value].view(-1)[-1] = -99 if "min" in target else 99
    found = r.call(target, x, *rest)
    indices = found[1] if isinstance(found, tuple) else found
    r.call("aten.neg.default", indices, phase="backward")
    graph = r.graph()
    (encoding,) = graph.forms
    form = encoded(r, graph, encoding)
    assert (encoding.value, encoding.codec, encoding.can_restore_value, form.dtype) == (
        indices.value,
        "index",
        True,
        dtype,
    )
    assert same(r.run(ENCODE.fetch(graph, encoding), {encoding.encoded: form}), r.tensors[indices.value])


def test_every_op_with_indices_is_tried() -> None:
    assert {case[1] for case in INDEXED} == set(encode.INDEX_RESULTS)


class Stem(nn.Module):
    """What a captured graph has to encode: a ReLU, indices of a pool, a dropout's mask, and flags that choose."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop, self.last = nn.Conv2d(3, 32, 3, padding=1), nn.Dropout(0.2), nn.Conv2d(32, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(nn.functional.max_pool2d(self.conv(x).relu(), 2))
        return self.last(torch.where(h > 0.5, h, 2 * h))


def test_a_captured_graph_has_the_encodings_that_its_ops_allow() -> None:
    graph = capture(Stem(), call_of((torch.randn(4, 3, 32, 32),), {})).graph
    found = [(one.codec, graph.values[one.encoded].dtype, one.can_restore_value) for one in graph.forms]
    assert sorted(found) == [
        ("bits", "uint8", True), ("bits", "uint8", True), ("index", "int16", True), ("sign", "uint8", False),
    ]  # fmt: skip


@pytest.mark.parametrize(("extent", "dtype"), [(256, torch.uint8), (257, torch.int16), (1 << 15, torch.int16)])
def test_the_range_of_indices_is_used_to_the_last(extent: int, dtype: torch.dtype) -> None:
    r = Recorder()
    x = r.put(torch.zeros(extent, 513))
    r.tensors[x.value][-1] = 1
    _, indices = r.call("aten.max.dim", x, 0)
    r.call("aten.neg.default", indices, phase="backward")
    (encoding,) = r.graph().forms
    form = encoded(r, r.graph(), encoding)
    assert form.dtype == dtype
    assert same(r.run(ENCODE.fetch(r.graph(), encoding), {encoding.encoded: form}), r.tensors[indices.value])


def test_what_is_small_or_read_in_another_layout_is_not_encoded() -> None:
    r = Recorder()
    small, x = r.put(torch.randn(9, 9)), r.put(torch.randn(8, 64, 64).transpose(0, 1))
    g_small, g = r.put(torch.randn(9, 9), "tangent"), r.put(torch.randn(64, 8, 64), "tangent")
    first, second = r.call("aten.relu.default", small), r.call("aten.relu.default", x)
    r.call("aten.threshold_backward.default", g_small, first, 0, phase="backward")
    r.call("aten.threshold_backward.default", g, second, 0, phase="backward")
    other = r.call("aten.relu.default", g)
    r.call("aten.threshold_backward.default", g, other, 0.5, phase="backward")
    assert r.graph().forms == ()


def test_readers_of_the_value_itself_are_not_direct() -> None:
    r = Recorder()
    x, g = r.put(special(64, 64)), r.put(special(64, 64, seed=1), "tangent")
    y = r.call("aten.relu.default", x)
    r.call("aten.mm.default", g, y, phase="backward")
    r.call("aten.threshold_backward.default", g, y, 0, phase="backward")
    r.call("aten.threshold_backward.default", y, y, 0, phase="backward")
    (encoding,) = r.graph().forms
    assert encoding.direct_readers == (2,)
    check_direct(r, r.graph(), encoding)


def test_on_a_card_readers_of_bits_make_requests_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: of 4,096 elements in bfloat16, flags of a byte each, and a product where there is a scale."""
    r = Recorder()
    x, g = r.put(torch.randn(64, 64).bfloat16()), r.put(torch.randn(64, 64).bfloat16(), "tangent")
    _, mask = r.call("aten.native_dropout.default", x, 0.5, True)
    y = r.call("aten.relu.default", x)
    r.call("aten.native_dropout_backward.default", g, mask, 2.0, phase="backward")
    r.call("aten.threshold_backward.default", g, y, 0, phase="backward")
    z = r.call("aten.leaky_relu.default", x, 0.1)
    r.call("aten.leaky_relu_backward.default", g, z, 0.1, True, phase="backward")
    values = [replace(value, place="cuda:0") for value in r.graph().values]
    graph = with_encodings(replace(r.graph(), values=tuple(values), forms=()), Situation())
    by_codec = {form.codec: form for form in graph.forms if form.direct_readers}
    assert (by_codec["bits"].direct_reader_scratch, by_codec["bits"].direct_reader_requests) == (
        12_288,
        (4096, 8192, -2, -1),
    )
    for codec in ("sign", "positive"):
        assert (by_codec[codec].direct_reader_scratch, by_codec[codec].direct_reader_requests) == (4096, (4096, -1))
    monkeypatch.setattr(encode, "most", lambda place: 3072)
    dropout = next(op for op in graph.ops if op.target == "aten.native_dropout_backward.default")
    requests = (3072, 6144, -2, -1, 1024, 2048, -4, -3)
    assert encode._bits_reader_workspace(graph, dropout) == (9216, requests)


def test_a_view_in_another_shape_reads_the_same_bits() -> None:
    r = Recorder()
    x, g = r.put(special(64, 64)), r.put(special(4096, seed=1), "tangent")
    y = r.call("aten.relu.default", x)
    flat = r.call("aten.view.default", y, [4096])
    assert r.values[flat.value].is_view
    r.call("aten.threshold_backward.default", g, flat, 0, phase="backward")
    (encoding,) = r.graph().forms
    assert encoding.value == y.value
    check_direct(r, r.graph(), encoding)


def residual(save: Save) -> JointGraph:
    """A value of floating point that a convolution and a ReLU's derivative read, one that is divided by, and a mask's
    worth of signs."""
    r = Recorder()
    x, w = r.put(torch.randn(2, 8, 16, 16)), r.put(torch.randn(8, 8, 3, 3))
    g = r.put(torch.randn(2, 8, 16, 16), "tangent")
    y = r.call("aten.relu.default", x)
    z = r.call("aten.sub.Tensor", y, x)
    s = r.call("aten.relu.default", z)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    r.call("aten.convolution_backward.default", g, y, w, [8], *rest, [True] * 3, phase="backward")
    r.call("aten.threshold_backward.default", g, y, 0, phase="backward")
    r.call("aten.div.Tensor", g, z, phase="backward")
    r.call("aten.threshold_backward.default", g, s, 0, phase="backward")
    return with_encodings(r.graph(), Situation(save))


@pytest.mark.parametrize(
    ("save", "expected"),
    [
        ("exact", [("sign", False), ("sign", False)]),
        ("bfloat16", [("bfloat16", True), ("bfloat16", True), ("sign", False)]),
        ("int8", [("uint8", True), ("bfloat16", True), ("sign", False)]),
    ],
)
def test_what_may_be_lost_decides_what_a_value_is_kept_in(save: Save, expected: list[tuple[str, bool]]) -> None:
    graph = residual(save)
    assert [(one.codec, one.can_restore_value) for one in graph.forms] == expected
    assert with_encodings(graph, Situation(save)) == graph  # encodings are replaced, not added


@pytest.mark.parametrize("channels_last", [False, True])
def test_bfloat16_gives_back_every_element_rounded(channels_last: bool) -> None:
    r = Recorder()
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x, w = r.put(special(2, 8, 16, 16).contiguous(memory_format=layout)), r.put(torch.randn(8, 8, 3, 3))
    y = r.call("aten.tanh.default", x)
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    r.call("aten.convolution_backward.default", x, y, w, [8], *rest, [True] * 3, phase="backward")
    graph = with_encodings(r.graph(), Situation("bfloat16"))
    (encoding,) = graph.forms
    form = encoded(r, graph, encoding)
    back = r.run(ENCODE.fetch(graph, encoding), {encoding.encoded: form})
    assert same(back, r.tensors[y.value].bfloat16().float())
    assert graph.values[encoding.encoded].bytes * 2 == graph.values[y.value].bytes


def test_a_cast_of_what_is_there_is_cast_again_and_not_kept_in_fewer_bits() -> None:
    r = Recorder()
    w = r.put(torch.randn(64, 64), "parameter")
    low = r.call("aten._to_copy.default", w)
    r.call("aten.mm.default", low, low, phase="backward")
    assert with_encodings(r.graph(), Situation("int8")).forms == ()
