"""An op's work against torch's own counter and by hand, and the seconds that follow from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from memplan import devices
from memplan.planning.capture.capture import capture
from memplan.planning.capture.flat_call import call_of
from memplan.planning.graph import roofline
from memplan.planning.graph.joint_graph import GraphOp, JointGraph, Ref, SavedForm, Value
from memplan.planning.levers.registry import find


def value(id: int, shape: tuple[int, ...], *, base: int | None = None, stride: tuple[int, ...] | None = None) -> Value:
    dense = tuple(int(torch.tensor(shape[at + 1 :]).prod()) for at in range(len(shape)))
    base = id if base is None else base
    size = 4 * int(torch.tensor(shape).prod()) if base == id else 0
    return Value(id, f"v{id}", "input", base, size, shape, stride or dense, "float32")


def graph_of(values: list[Value], target: str, args: tuple[object, ...], outputs: tuple[int, ...]) -> JointGraph:
    reads = tuple(dict.fromkeys(values[arg.value].base for arg in args if isinstance(arg, Ref)))
    op = GraphOp(0, target, args, {}, "forward", outputs, False, reads, outputs)
    return JointGraph(tuple(values), (op,), (), ())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.deconv = nn.ConvTranspose2d(8, 4, 2)
        self.head = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.deconv(self.conv(x).relu()).mean((2, 3))
        return (self.head(hidden) @ hidden.new_ones(10, 7)).square().sum()


def test_the_flops_of_a_step_are_those_that_torch_counts_when_it_runs() -> None:
    model, x = Net(), torch.randn(2, 3, 17, 19)
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    graph = capture(model, call_of((x,), {})).graph
    assert sum(roofline.work_of(graph, op).flops for op in graph.ops) == counter.get_total_flops() > 0


def test_attention_on_the_cpu_counts_as_two_products_and_its_gradient_as_five() -> None:
    batch, heads, length, size = 2, 3, 16, 8
    q = torch.randn(batch, heads, length, size, requires_grad=True)

    class Attention(nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(q, q * 2, q * 3).sum()

    graph = capture(Attention(), call_of((q,), {})).graph
    product = 2 * batch * heads * length * length * size
    found = {op.phase: roofline.work_of(graph, op).flops for op in graph.ops if "flash_attention" in op.target}
    assert found == {"forward": 2 * product, "backward": 5 * product}


def test_bytes_are_what_is_read_and_made_once_each() -> None:
    values = [value(0, (64, 32)), value(1, (64, 32))]
    graph = graph_of(values, "aten.mul.Tensor", (Ref(0), Ref(0)), (1,))
    assert roofline.work_of(graph, graph.ops[0]).bytes == 2 * 64 * 32 * 4
    discarding = replace(graph.ops[0], discarded=1000)
    assert roofline.work_of(graph, discarding).bytes == 2 * 64 * 32 * 4 + 1000


def test_of_a_view_the_part_counts_that_it_looks_at() -> None:
    rows, expanded = value(1, (8, 32), base=0), value(2, (64, 64, 32), base=0, stride=(0, 32, 1))
    for view, read in ((rows, 8 * 32 * 4), (expanded, 64 * 32 * 4)):
        values = [value(0, (64, 32)), rows, expanded, value(3, view.shape)]
        graph = graph_of(values, "aten.relu.default", (Ref(view.id),), (3,))
        assert roofline.work_of(graph, graph.ops[0]).bytes == read + values[3].bytes


def test_what_the_kernel_does_not_read_does_not_count() -> None:
    values = [value(0, (64, 32)), value(1, (1000, 1000)), value(2, (64, 32))]
    graph = graph_of(values, "aten.where.self", (Ref(0), Ref(1)), (2,))
    idle = replace(graph.ops[0], reads=(0,))
    assert roofline.work_of(graph, idle).bytes == 2 * 64 * 32 * 4


def test_an_encoding_moves_both_forms() -> None:
    values = [value(0, (64, 32)), value(1, (64,))]
    graph = graph_of(values, "aten.relu.default", (Ref(0),), ())
    encode, decode, direct = find("encode").works(graph, SavedForm("encode", 0, 1, "bits"))
    assert encode.bytes == decode.bytes == 64 * 32 * 4 + 64 * 4
    assert direct.bytes == 0


RATES = roofline.Rates((("float32", 100.0), ("bfloat16", 1000.0)), 10.0, 0.5)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (roofline.Work(0, 0, "float32"), 0.5),
        (roofline.Work(1000, 20, "float32"), 10.5),  # it computes longer than it reads
        (roofline.Work(1000, 200, "float32"), 20.5),  # and here it reads longer
        (roofline.Work(1000, 5, "bfloat16"), 1.5),
        (roofline.Work(1000, 5, "int64"), 10.5),  # a dtype without a rate of its own
        (roofline.Work(0, 20, "float32", foreign=True), 20.5),
    ],
)
def test_seconds_are_the_longer_of_computing_and_moving(work: roofline.Work, seconds: float) -> None:
    assert RATES.seconds(work) == pytest.approx(seconds)


@given(*[st.integers(0, 10**15)] * 4)
def test_more_work_never_takes_less(flops: int, moved: int, more_flops: int, more_moved: int) -> None:
    for rates in (roofline.CPU, *map(roofline.rates_of, devices.catalogue())):
        less = rates.seconds(roofline.Work(flops, moved, "float32"))
        assert 0 < less <= rates.seconds(roofline.Work(flops + more_flops, moved + more_moved, "float32"))


def test_a_card_has_the_rates_of_the_catalogue() -> None:
    card = devices.find("h100")
    rates = roofline.rates_of(card)
    assert dict(rates.flops_per_second) == dict(card.flops)
    assert rates.bandwidth == card.bandwidth
    slow, fast = (roofline.rates_of(devices.find(name)) for name in ("v100", "h100"))
    assert fast.seconds(roofline.Work(10**12, 0, "float16")) < slow.seconds(roofline.Work(10**12, 0, "float16"))


def test_a_card_of_which_nothing_is_known_still_gives_seconds() -> None:
    card = devices.device_of_properties("A laptop's GPU", 1 << 33, 8, 6, 20)
    assert roofline.rates_of(card).seconds(roofline.Work(10**12, 10**9, "bfloat16")) > 0


def test_a_convolution_in_float32_runs_as_tf32_where_the_card_can() -> None:
    values = [value(0, (2, 3, 8, 8)), value(1, (4, 3, 3, 3)), value(2, (2, 4, 6, 6))]
    none = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    graph = graph_of(values, "aten.convolution.default", (Ref(0), Ref(1), None, *none), (2,))
    work = roofline.work_of(graph, graph.ops[0])
    assert work.flops == 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
    only_compute = replace(work, bytes=0)
    card = devices.find("a100")
    expected = work.flops / card.flops["tf32"] + roofline.LAUNCH
    assert roofline.rates_of(card).seconds(only_compute) == pytest.approx(expected)


def test_an_op_of_another_library_is_dear() -> None:
    values = [value(0, (64, 32)), value(1, (64, 32))]
    own, foreign = (graph_of(values, target, (Ref(0),), (1,)) for target in ("aten.relu.default", "mine.relu.default"))
    times = [roofline.CPU.seconds(roofline.work_of(graph, graph.ops[0])) for graph in (own, foreign)]
    assert times[1] > 5 * times[0]
