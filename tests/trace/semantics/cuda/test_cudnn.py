"""cuDNN's choices, reserves and workspaces, against figures that maintainers published and rules worked by hand."""

from __future__ import annotations

import dataclasses
import importlib
import json
from typing import Any

import pytest
import torch
from goldens.handmade import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

from memplan.cudnn.recurrent import RecurrentQuestion, expected_recurrent, rnn_weight_bytes
from memplan.trace.semantics.cuda import cudnn, cudnn_convolution, results
from memplan.trace.semantics.cuda.arch import A100, Arch

T4, V100, H100 = Arch((7, 5), 40), Arch((7, 0), 80), Arch((9, 0), 132)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def fake() -> Any:
    with FakeTensorMode() as mode:
        yield mode


# pytorch#2895: four layers of 320 on 123 inputs; the maintainer printed what cuDNN asked for, for 25,000 rows.
ROWS, BATCH, INPUTS, HIDDEN, LAYERS = 25_000, 100, 123, 320, 4


@pytest.mark.parametrize(
    ("kind", "reserve", "workspace", "parameters"),
    [("lstm", 736_000_000, 17_730_560, 3_038_090), ("gru", 864_000_000, 13_169_920, 2_279_370)],
)
def test_recurrent_networks_take_what_a_maintainer_printed(
    kind: Any, reserve: int, workspace: int, parameters: int
) -> None:
    question = RecurrentQuestion(
        kind, "standard", ROWS, BATCH, INPUTS, HIDDEN, LAYERS, False, 0.0, itemsize=4, projection=0, training=True
    )
    low, high = cudnn.reserve_of(question)
    assert low == high == reserve + 256  # later versions of cuDNN add 256 bytes
    # later versions of cuDNN add a part for every step
    assert cudnn.workspace_of(dataclasses.replace(question, rows=0)) == (0, workspace)
    head = HIDDEN * 10 + 10
    assert rnn_weight_bytes(kind, INPUTS, HIDDEN, LAYERS, False, 4) == (parameters - head) * 4


@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_buffer_of_weights_holds_all_of_a_modules(kind: Any, bidirectional: bool, layers: int) -> None:
    module = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}[kind](20, 32, layers)
    module = type(module)(20, 32, layers, bidirectional=bidirectional)
    expected = sum(p.numel() for p in module.parameters()) * 4
    assert rnn_weight_bytes(kind, 20, 32, layers, bidirectional, 4) == expected


def test_the_buffer_of_weights_with_a_projection() -> None:
    module = torch.nn.LSTM(20, 32, 2, proj_size=8, bidirectional=True)
    expected = sum(p.numel() for p in module.parameters()) * 4
    assert rnn_weight_bytes("lstm", 20, 32, 2, True, 4, 8) == expected


# What a real H100 and a real H200 took (goldens/, cuDNN 9.19): steps, batch, inputs, hidden, layers, both directions,
# dropout, bytes of an element, then the reserve and the workspace.
TAKEN = [
    ("lstm", 128, 64, 256, 512, 1, False, 0.0, 4, 83_886_336, 108_266_240),
    ("lstm", 128, 64, 256, 512, 1, False, 0.0, 2, 41_943_296, 58_327_808),
    ("lstm", 128, 64, 256, 512, 2, False, 0.2, 4, 185_073_920, 143_131_392),
    ("lstm", 128, 64, 256, 512, 2, True, 0.0, 4, 369_099_008, 320_865_024),
    ("lstm", 128, 16, 256, 256, 2, False, 0.2, 4, 23_134_464, 35_979_648),
    ("gru", 128, 64, 256, 512, 2, False, 0.0, 4, 218_104_064, 104_596_224),
    ("gru", 128, 32, 128, 128, 2, True, 0.0, 4, 54_526_208, 94_700_032),
]


@pytest.mark.parametrize("taken", TAKEN)
def test_recurrent_networks_take_what_two_cards_took(taken: tuple[Any, ...]) -> None:
    reserve, workspace = taken[-2:]
    question = cudnn.recurrent_question(described(taken), H100)
    assert cudnn.reserve_of(question) == (reserve, reserve)
    low, high = cudnn.reserve_of(dataclasses.replace(question, kind="rnn"))
    assert 0 < low < high < reserve
    low, high = cudnn.workspace_of(question)
    assert low <= workspace <= high < 4 * workspace
    expected = expected_recurrent(question, (9, 0))
    assert expected.bytes == pytest.approx(workspace, rel=0.01)
    assert expected.sizes[0] < 0.85 * workspace < 1.2 * workspace < expected.sizes[-1]


def described(taken: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of ``_cudnn_rnn`` for a row of `TAKEN`."""
    kind, steps, batch, inputs, hidden, layers, both, dropout, itemsize, *_ = taken
    dtype, mode = {2: torch.bfloat16, 4: torch.float32}[itemsize], {"lstm": 2, "gru": 3}[kind]
    x = torch.empty(steps, batch, inputs, dtype=dtype)
    return x, [], 4, None, x, x, mode, hidden, 0, layers, False, dropout, True, both, [], None


@pytest.mark.parametrize(
    "change",
    [{"training": False}, {"kind": "rnn"}, {"algorithm": "persistent"}, {"projection": 8}, {"itemsize": 8}],
    ids=str,
)
def test_a_network_unlike_the_measured_ones_may_take_nothing(change: dict[str, Any]) -> None:
    question = cudnn.recurrent_question(described(TAKEN[0]), H100)
    assert expected_recurrent(dataclasses.replace(question, **change), (9, 0)).sizes[0] == 0
    assert expected_recurrent(question, (8, 0)).sizes[0] == 0


def test_torch_chooses_the_algorithm_as_in_its_source() -> None:
    """native/cudnn/RNN.cpp, get_algo."""

    def algorithm(arch: Arch = H100, backward: bool = False, **given: Any) -> str:
        values = {"mode": 2, "hidden": 512, "layers": 1, "dtype": torch.float16, "batch": 64, "packed": [], "proj": 0}
        values |= given
        x = torch.empty(128, values["batch"], 256, dtype=values["dtype"])
        args = (x, [], 4, None, x, x, values["mode"], values["hidden"], values["proj"], values["layers"], False, 0.0)
        return cudnn.recurrent_question((*args, True, False, values["packed"], None), arch, backward=backward).algorithm

    assert algorithm(hidden=192) == "small hidden"
    assert algorithm(hidden=193) == "standard"
    assert algorithm(hidden=128, backward=True) == "small hidden"
    assert algorithm(hidden=192, backward=True) == "standard"
    assert algorithm(hidden=384, mode=0) == "small hidden"
    assert algorithm(hidden=128, packed=[64] * 128) == algorithm(hidden=128, proj=8) == "standard"
    assert algorithm(hidden=128, dtype=torch.float64) == "standard"
    assert algorithm() == "persistent"
    assert algorithm(T4) == algorithm(Arch((8, 6), 108)) == algorithm(Arch((8, 0), 56)) == "standard"
    assert algorithm(dtype=torch.bfloat16) == algorithm(mode=3) == algorithm(layers=2) == "standard"
    assert algorithm(batch=136) == algorithm(batch=60) == algorithm(V100, batch=80) == "standard"
    assert algorithm(V100) == "persistent"


def test_the_states_of_dropout() -> None:
    """As both cards took them."""
    assert cudnn.dropout_state_bytes(Arch((9, 0), 132)) == 6_488_064


def call(train: bool = True, batch_first: bool = False) -> tuple[Any, ...]:
    shape = (3, 7, 4) if batch_first else (7, 3, 4)
    weights = [torch.empty(20, 4), torch.empty(20, 5), torch.empty(20), torch.empty(20)]
    hx = torch.empty(1, 3, 5)
    x, buffer = torch.empty(shape), torch.empty(220)
    return x, weights, 4, buffer, hx, hx, 2, 5, 0, 1, batch_first, 0.0, train, False, [], None


def test_a_call_is_read_from_its_arguments() -> None:
    for batch_first in (False, True):
        question = cudnn.recurrent_question(call(batch_first=batch_first), A100)
        assert (question.kind, question.rows, question.batch) == ("lstm", 7 * 3, 3)
        assert cudnn.reserve_of(question) == (7 * 3 * 5 * 5 * 4 + 256,) * 2
    assert cudnn.reserve_of(cudnn.recurrent_question(call(train=False), A100)) == (0, 0)
    packed = call()
    packed = (torch.empty(11, 4), *packed[1:14], [5, 4, 2], None)
    assert cudnn.reserve_of(cudnn.recurrent_question(packed, A100))[0] == 11 * 5 * 5 * 4 + 256


def test_gradients_of_recurrent_weights_share_a_buffer() -> None:
    x, weights, stride, buffer, hx, cx, *rest = call()
    y = torch.empty(7, 3, 5)
    args = (x, weights, stride, buffer, hx, cx, y, y, None, None, *rest, torch.empty(0), [True] * 4)
    dx, dh, dc, views = results.INSTEAD["aten._cudnn_rnn_backward.default"](args, {})
    assert (dx.shape, dh.shape, dc.shape) == (x.shape, hx.shape, cx.shape)
    assert [v.shape for v in views] == [w.shape for w in weights]
    assert {v.untyped_storage()._cdata for v in views} == {views[0].untyped_storage()._cdata}
    assert views[0].untyped_storage().nbytes() == 220 * 4
    assert cudnn.gradient_copies(args, batch_first=False) == ([hx.numel() * 4] * 2, 0)
    first = (*args[:7], None, *args[8:])  # zeros for the output's gradient are batch first, and so are copied
    assert cudnn.gradient_copies(first, batch_first=True) == ([y.numel() * 4, *[hx.numel() * 4] * 2], y.numel() * 4)
    flat = results.INSTEAD["aten._cudnn_rnn_flatten_weight.default"]((weights, 4, 4, 2, 5, 0, 1, False, False), {})
    assert flat.numel() == 220


def chosen(x: torch.Tensor, weight: torch.Tensor | None, **changes: Any) -> cudnn.Choice:
    running = torch.empty(8)
    given: dict[str, Any] = {"bias": weight, "running_mean": running, "running_var": running, "training": True}
    given |= {"epsilon": 1e-5} | changes
    return cudnn.uses_batch_norm(x, weight, **given)


def test_batch_norm_is_cudnns_but_for_a_list_of_cases() -> None:
    x, weight = torch.empty(2, 8, 4, 4), torch.empty(8)
    assert chosen(x, weight).cudnn
    assert chosen(x.half(), weight).cudnn
    assert chosen(x, weight, running_mean=None, running_var=None).cudnn
    refused = {
        "bfloat16": chosen(x.bfloat16(), weight.bfloat16()),
        "bfloat16 ": chosen(x.bfloat16(), weight),
        "float16": chosen(x.half(), weight.half()),
        "weight": chosen(x, None),
        "spatial": chosen(torch.empty(2, 8), weight),
        "statistics": chosen(x, weight, running_mean=None, running_var=None, training=False),
        "65535": chosen(torch.empty(65_536, 8, 1), weight, training=False),
        "880801": chosen(torch.empty(880_802, 8, 1), weight),
        "switched": chosen(x, weight, enabled=False),
        "2^31": chosen(torch.empty(2, 8, 1 << 27), weight),
    }
    for word, choice in refused.items():
        assert not choice.cudnn
        assert word.strip() in choice.reason
    assert chosen(torch.empty(65_536, 8, 1), weight).cudnn


def test_batch_norm_keeps_at_most_a_bit_an_element() -> None:
    x = torch.empty(2, 8, 4, 4)
    last = x.to(memory_format=torch.channels_last)
    assert cudnn.batch_norm_reserve_bytes(x, True, A100) == (0, 0)
    assert cudnn.batch_norm_reserve_bytes(last, True, A100) == (0, 32)
    assert cudnn.batch_norm_reserve_bytes(last, True, H100) == (0, 0)
    assert cudnn.batch_norm_reserve_bytes(last, False, A100) == (0, 0)


def batch_norms(name: str) -> list[Any]:
    """What cuDNN's batch norms of a golden file took on a real H100."""
    folder = ROOT / "goldens" / "nvidia-h100-80gb-hbm3" / "2.11.0-cu130"
    golden = importlib.import_module("golden_file").read(folder / f"{name}.json.gz")
    return [one for one in golden.workspaces if one.op.startswith("aten.cudnn_batch_norm")]


@pytest.mark.parametrize(
    ("name", "shapes"), [("batch_norm_channels_last", 1), ("resnet18_channels_last", 5), ("resnet50", 12)]
)
def test_batch_norm_takes_what_a_real_card_took(name: str, shapes: int) -> None:
    found = batch_norms(name)
    assert len(found) == 2 * shapes
    for one in found:
        text = one.key.split(" ")[0]
        x = torch.empty(json.loads(text[text.index("[") :].partition("/")[0]), device="meta")
        x = x.to(memory_format=torch.channels_last) if "/" in text else x
        backward = "backward" in one.op
        took = cudnn.batch_norm_workspace_bytes(x, True, H100, backward=backward)
        assert took == (one.most, one.most), one
        assert cudnn.batch_norm_workspace_bytes(x, True, A100, backward=backward) == (0, one.most)
        assert "u8[0]" in one.key or not backward, "no reserve"


def convolve(
    x: torch.Tensor, weight: torch.Tensor, stride: int = 1, groups: int = 1, arch: Arch = A100, **options: Any
) -> cudnn_convolution.Workspace:
    n = x.dim() - 2
    padding = [weight.shape[-1] // 2] * n
    rest = ([stride] * n, padding, [1] * n, False, [0] * n, groups)
    y = torch.empty(x.shape[0], weight.shape[0], *((s - 1) // stride + 1 for s in x.shape[2:]), dtype=x.dtype)
    if options.pop("backward", False):
        args = (y, x, weight, None, *rest, [True, True, False])
        return cudnn_convolution.convolution_workspace(args, None, arch, backward=True, **options)
    return cudnn_convolution.convolution_workspace((x, weight, None, *rest), y, arch, **options)


def test_the_interval_begins_at_nothing_and_grows_with_the_ways_there_are() -> None:
    x, weight = torch.empty(32, 64, 56, 56), torch.empty(64, 64, 3, 3)
    plain = convolve(x, weight)
    assert plain.low == 0
    assert "cuDNN" in plain.reason
    # A layout for the tensor cores (TF32) and Winograd's 36 values for 16: both images and the weights.
    image = 32 * 64 * 56 * 56
    assert plain.high == (2 * image + 64 * 64 * 9) * 4 + (2 * image * 36 // 16 + 64 * 64 * 36) * 4
    assert convolve(x, weight, stride=2).high < plain.high
    assert convolve(x, weight, benchmark=True).high > plain.high
    assert convolve(x, weight, arch=V100).high < plain.high
    last = x.to(memory_format=torch.channels_last)
    assert convolve(last, weight).high == plain.high - (2 * image + 64 * 64 * 9) * 4
    pointwise = convolve(last, torch.empty(64, 64, 1, 1), backward=True)
    # 1 tile of 128 x 128 of the weight's gradient: 216 parts of it fill an A100 twice.
    assert pointwise.high == 216 * 64 * 64 * 4


def test_large_three_dimensional_convolutions_count_their_columns() -> None:
    # pytorch#128947 reports 17 GB for one in float16: the interval has to reach that order.
    x = torch.empty(1, 512, 5, 1024, 1024, dtype=torch.float16)
    assert convolve(x, torch.empty(512, 512, 3, 3, 3, dtype=torch.float16)).high > 17 * 10**9


def backing(x: torch.Tensor, weight: torch.Tensor, groups: int = 1, arch: Arch = A100, **options: Any) -> str:
    return cudnn_convolution.convolution_backend(
        x, weight, [1, 1], False, [0, 0], [1, 1], groups, arch, **options
    ).backend


def test_depthwise_convolutions_are_torchs_own_but_in_channels_last() -> None:
    x, weight = torch.empty(2, 64, 8, 8), torch.empty(64, 1, 3, 3)
    assert backing(x, weight, 64) == "depthwise"
    assert backing(x.to(memory_format=torch.channels_last), weight, 64) == "cudnn"
    assert backing(x.half(), weight.half(), 64) == "cudnn"
    assert backing(x.bfloat16(), weight.bfloat16(), 64) == "depthwise"
    assert backing(x, torch.empty(64, 2, 3, 3), 32) == "cudnn"
    assert convolve(x, weight, groups=64).high == 0
    assert "own" in convolve(x, weight, groups=64).reason


@pytest.mark.parametrize(
    ("shape", "taps", "stride", "expected"),
    # (batch, channels, width): every branch of torch's table.
    [
        ((8, 64, 56), 3, 1, "cudnn"),
        ((8, 16, 56), 3, 1, "depthwise"),
        ((8, 64, 56), 7, 1, "depthwise"),
        ((8, 64, 6), 3, 1, "depthwise"),
        ((8, 64, 56), 3, 2, "depthwise"),
        ((8, 256, 28), 3, 2, "cudnn"),
        ((8, 512, 7), 5, 2, "cudnn"),
        ((8, 128, 7), 1, 2, "cudnn"),
        ((32, 128, 7), 1, 2, "depthwise"),
        ((1, 64, 56), 3, 2, "cudnn"),
        ((1, 64, 56), 1, 2, "depthwise"),
        ((8, 64, 56), 3, 3, "depthwise"),
    ],
)
def test_depthwise_convolutions_in_float16_go_by_a_table(
    shape: tuple[int, int, int], taps: int, stride: int, expected: str
) -> None:
    batch, channels, width = shape
    x = torch.empty(batch, channels, width, width, dtype=torch.float16)
    weight = torch.empty(channels, 1, taps, taps, dtype=torch.float16)
    chosen = cudnn_convolution.convolution_backend(x, weight, [1, 1], False, [0, 0], [stride] * 2, channels, A100)
    assert chosen.backend == expected


def test_when_cudnn_is_not_taken() -> None:
    x, weight = torch.empty(2, 8, 8, 8), torch.empty(8, 8, 3, 3)
    assert backing(x, weight) == "cudnn"
    assert backing(x, weight, enabled=False) == "slow"
    assert backing(x.bfloat16(), weight.bfloat16()) == "cudnn"
    assert backing(x.bfloat16(), weight.bfloat16(), arch=T4) == "slow"
    assert backing(x[:0], weight) == "empty"


def test_operands_are_copied_into_one_format() -> None:
    x, weight = torch.empty(2, 8, 16, 16), torch.empty(4, 8, 3, 3)
    last = weight.to(memory_format=torch.channels_last)
    forward = cudnn_convolution.FORMULAS["aten.convolution.default"]
    backward = cudnn_convolution.FORMULAS["aten.convolution_backward.default"]
    y = torch.empty(2, 4, 16, 16)
    assert forward((x, weight), {}, y, A100) == ()
    assert forward((x, last), {}, y, A100) == (2 * 8 * 256 * 4,)
    assert forward((x.double(), last.double()), {}, y, A100) == (4 * 8 * 9 * 8,)
    assert backward((y, x, last), {}, None, A100) == (2 * 4 * 256 * 4, 2 * 8 * 256 * 4)
    assert forward((x[:, :, ::2], weight), {}, y, A100) == (2 * 8 * 128 * 4,)
