"""The layers before the first trained one in eight bits."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from environment import slow, thinned
from models.drifting_bars import accuracy, bars, normed, settled_cnn
from models.microcontroller_networks import mobilenet_v2
from torch import nn
from torch.nn import functional as F
from truth.c_program import array, floats_of, printed_by
from truth.integer_layers import Gate, Integer, Network, Plus

import memplan
from memplan.errors import BudgetError, InputError, UsageError
from memplan.exporting.exported import Exported
from memplan.exporting.int8.arithmetic import Affine, multiplier, shifted_right

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
MEAN, STD = (124.0, 116.3, 104.5), (58.0, 57.0, 57.5)


class Features(nn.Module):
    """A frozen body, a trained head, and what the body hands on as an output."""

    def __init__(self, body: nn.Sequential, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        features = self.body(x)
        return {"features": features, "logits": self.head(features)}


def inverted() -> nn.Sequential:
    """What lies between the first five convolutions is large: they run row by row."""
    return nn.Sequential(
        *normed(3, 8, 3, 2), nn.ReLU6(), *normed(8, 8, 3, groups=8), nn.Hardswish(), *normed(8, 12, 1),
        *normed(12, 24, 1), nn.ReLU6(), *normed(24, 24, 5, 2, groups=24), nn.ReLU6(), *normed(24, 8, 1),
        Plus(*normed(8, 8, 3), nn.ReLU()), Gate(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Sigmoid()),
        nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 10), nn.ReLU(),
    )  # fmt: skip


def branched() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=2, dilation=2), nn.Tanh(), nn.Conv2d(6, 8, (3, 1), (2, 1), groups=2), nn.ReLU(),
        Plus(nn.Conv2d(8, 8, 3, padding=1)), nn.ReLU(), nn.AvgPool2d(2, 2, 1), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 6),
    )  # fmt: skip


def series() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(3, 8, 5, padding=2), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3, 2, groups=4), nn.ReLU6(),
        nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12), nn.Hardswish(), nn.Linear(12, 4), nn.ReLU())


def alone() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


CASES: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], int, torch.dtype]] = {
    "inverted": (inverted, (1, 3, 48, 48), 10, torch.uint8),
    "branched": (branched, (2, 2, 12, 11), 6, torch.float32),
    "series": (series, (2, 3, 40), 5, torch.int8),
    "alone": (alone, (1, 3, 9, 9), 6, torch.uint8),
    "perceptron": (perceptron, (2, 20), 4, torch.float32),
}
"""By name: the body, the shape of its input, its width, and the input's dtype."""


def settled(body: nn.Sequential, shape: tuple[int, ...]) -> nn.Sequential:
    """With statistics of some data, and frozen."""
    with torch.no_grad():
        for _ in range(20):
            body(torch.randn(4, *shape[1:]))
        for module in body.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, 0, 0.3)
    return body.eval().requires_grad_(False)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.float32:
        return torch.randn(shape, generator=generator)
    low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
    return torch.randint(low, high, shape, generator=generator, dtype=dtype)


def data(shape: tuple[int, ...], dtype: torch.dtype, count: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of two calls' samples each."""
    large = (2 * shape[0], *shape[1:])
    return [(drawn(large, dtype, k), torch.arange(large[0]) % 3) for k in range(count)]


def loss_of(output: dict[str, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["logits"], target)


def exported(model: nn.Module, x: torch.Tensor, folder: Path, **options: Any) -> Exported:
    byte = {} if x.is_floating_point() else {"normalize": (MEAN, STD) if x.dtype == torch.uint8 else (3.0, 40.0)}
    given: dict[str, Any] = {
        "targets": torch.arange(len(x)) % 3, "loss": loss_of, "optimizer": "sgd:lr=0.05", "name": "net",
        "frozen_layers": "int8", "calibrate": data(tuple(x.shape), x.dtype), "folder": folder, "budget": "1 MiB",
    } | byte | options  # fmt: skip
    return memplan.export(model, x, **given)


def as_integers(x: torch.Tensor, done: Exported, low: float, high: float) -> Integer:
    """The input as the device reads it: bytes as they are, floats by the range on the data."""
    if x.is_floating_point():
        scale = float(np.float32((high - low) / 255))
        zero = round(-128 - low / scale)
        scaled = (x.numpy() * np.float32(1 / scale)).astype(np.float64)
        rounded = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled)
        numbers = np.clip(rounded + zero, -128, 127).astype(int).astype(object)
        return Integer(numbers, scale, np.array(zero))
    return Integer(x.numpy().astype(int).astype(object), 1.0, np.array(0))


def by_hand(model: Features, x: torch.Tensor, done: Exported, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """The features that the device has to compute, by a reference that shares no code with the export."""
    assert done.int8 is not None
    modules = list(copy.deepcopy(model.body))
    if not x.is_floating_point():
        # (x - mean) / std = (x - z) / std + (z - mean) / std, where z is an integer: into weight and bias
        first = modules[0]
        assert isinstance(first, (nn.Conv1d, nn.Conv2d))
        channels = first.in_channels
        mean, std = (MEAN, STD) if x.dtype == torch.uint8 else ([3.0] * channels, [40.0] * channels)
        zeros = np.rint(mean)
        shape = (1, -1, *[1] * (first.weight.dim() - 2))
        first.double()
        largest = max(1 / s for s in std)
        left = torch.tensor([(z - m) / s for z, m, s in zip(zeros, mean, std, strict=True)], dtype=torch.float64)
        bias = (first.weight.flatten(2).sum(2) * left).sum(1)
        bias = bias if first.bias is None else bias + first.bias
        first.bias = nn.Parameter(bias.detach())
        factor = 1 / torch.tensor(std, dtype=torch.float64) / largest
        first.weight = nn.Parameter((first.weight * factor.reshape(shape)).detach())
        given = Integer(x.numpy().astype(int).astype(object), largest, zeros.astype(int).astype(object))
    else:
        every = torch.cat([inputs.reshape(-1) for inputs, _ in batches])
        given = as_integers(x, done, float(every.min()), float(every.max()))
    found = Network(done.int8.layers).run(modules, given)
    return np.float32(found.scale) * (found.numbers - found.zeros).astype(np.float32)


@needs_compiler
@pytest.mark.parametrize("name", ["branched", *slow("inverted", "series", "alone", "perceptron")])
def test_the_frozen_part_computes_the_integers_of_a_reference(name: str, tmp_path: Path) -> None:
    make, shape, width, dtype = CASES[name]
    torch.manual_seed(0)
    model = Features(settled(make(), shape), width)
    x = drawn(shape, dtype, 99)
    done = exported(model, x, tmp_path)
    assert done.verdict.proven, "the head beside PyTorch, which reads the same features"
    assert done.int8 is not None
    assert not done.int8.stays
    kind = {torch.uint8: "uint8_t", torch.int8: "int8_t", torch.float32: "float"}[dtype]
    text = f"""
#include "net.h"
#include <stdio.h>
static net_state s;
{array("x", x if x.is_floating_point() else x.int()).replace("int32_t", kind)}
int main(void)
{{
    static float output[{len(x)} * {width + 3}];
    net_init(&s);
    net_infer(&s, x, output);
    for (int k = 0; k < {len(x)} * {width}; k++)
        printf("%.9g\\n", (double)output[k]);
    return 0;
}}
"""
    found = floats_of(printed_by(tmp_path, text)).astype(np.float32).reshape(len(x), -1)
    wanted = by_hand(model, x, done, data(shape, dtype))
    assert np.array_equal(found, wanted.reshape(len(x), -1))
    with torch.no_grad():
        seen = x if x.is_floating_point() else (
            (x.float() - torch.tensor(MEAN).reshape(3, 1, 1)) / torch.tensor(STD).reshape(3, 1, 1)
            if dtype == torch.uint8 else (x.float() - 3) / 40
        )  # fmt: skip
        exact = model.body(seen).numpy()
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 0 < error < 0.06
    assert error < 3 * done.int8.worst, "what the report says of other data"


def test_a_product_by_multiply_and_shift_is_the_rounded_real_one() -> None:
    generator = np.random.default_rng(0)
    sums = np.concatenate([generator.integers(-(2**31), 2**31, 200), [0, 1, -1, 2**31 - 1, -(2**31)]])
    for real in (*2.0 ** generator.uniform(-40, 20, 100), 0.5, 1.0, 0.0, 2.0**-61, 1 - 2.0**-40):
        m, shift = multiplier(float(real))
        assert 0 <= m < 2**31
        assert 0 < shift < 63
        exact = [Fraction(int(x)) * Fraction(float(real)) for x in sums]
        for found, wanted in zip(shifted_right(sums * m, shift), exact, strict=True):
            assert abs(int(found) - wanted) <= Fraction(1, 2) + abs(wanted) / 2**30 + Fraction(1, 10**9)
    assert shifted_right(np.array([1, 3, -1, -3]), 1).tolist() == [1, 2, 0, -1], "halves are rounded up"


def test_the_integer_of_0_is_exact() -> None:
    for low, high in ((0.0, 6.0), (-1.0, 3.0), (2.0, 5.0), (-7.0, -1.0)):
        type = Affine.of_range(low, high)
        assert type.floats(type.integers(np.zeros(1))) == 0
        wide = np.array([min(low, 0.0), max(high, 0.0)])
        assert np.abs(type.floats(type.integers(wide)) - wide).max() <= type.scale / 2 * 1.001
    assert Affine.of_range(0.0, 0.0).floats(np.zeros(1, np.int8)) == 0


class Blocks(nn.Module):
    """A softmax has no integer kernel, so what reads it stays in float32; what lies beside it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = F.relu(self.first(x))
        y = self.third(torch.softmax(y, 1)) + self.second(y)
        return {"logits": self.head(y.mean((2, 3)))}


@needs_compiler
def test_an_op_without_integer_kernel_stays_in_float_and_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"frozen_weights": "int8", "weights_file": True, "arena_apart": True}
    done = exported(Blocks(), drawn((1, 2, 8, 8), torch.float32, 5), tmp_path, **options)
    assert done.verdict.proven, "two results go on in float32, and PyTorch reads both"
    assert done.rounding is not None
    assert (done.rounding.weights, done.int8.weights if done.int8 else 0) == (4 * 4, 4 * 2 * 9 + 4 * 4)
    assert done.int8 is not None
    assert [row.layer for row in done.int8.layers] == ["", "second"]
    assert [row.layer for row in done.int8.borders] == ["", "second"]
    assert done.int8.stays == ("the model (softmax): no integer kernel computes it",)
    assert "In float32: the model (softmax): no integer kernel computes it" in " ".join(str(done).split())


def test_a_norm_in_training_mode_ends_the_frozen_part(tmp_path: Path) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model, x = Features(body.requires_grad_(False), 4), drawn((2, 2, 8, 8), torch.float32, 5)
    done = exported(model, x, tmp_path, verify=False)
    assert done.int8 is not None
    assert [row.layer for row in done.int8.layers] == ["body.0"]
    assert len(done.int8.stays) == 1
    assert "call .eval() on the layer" in done.int8.stays[0]
    model.body.eval()
    assert exported(model, x, tmp_path, verify=False).int8 is not None


def test_nothing_before_the_first_trained_layer_is_as_without(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Features(nn.Sequential(nn.Linear(6, 4), nn.ReLU()), 4), drawn((1, 6), torch.float32, 5)
    done = exported(model, x, tmp_path / "a", verify=False)
    plain = exported(model, x, tmp_path / "b", verify=False, frozen_layers="float32", calibrate=None)
    assert done.int8 is None
    assert (tmp_path / "a" / "net.c").read_text() == (tmp_path / "b" / "net.c").read_text()
    assert done.ram == plain.ram


@needs_compiler
def test_long_sums_and_large_biases_stay_within_32_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(70_000, 2)
    body = nn.Sequential(linear, nn.ReLU()).requires_grad_(False)
    nn.init.ones_(linear.weight)
    with torch.no_grad():
        linear.bias.copy_(torch.tensor([1e9, 3.0]))
    model, x = Features(body, 2), torch.ones(1, 70_000)
    done = exported(model, x, tmp_path, calibrate=[(x, torch.tensor([0]))], budget="16 MiB")
    assert done.verdict.proven, "UBSan reports no overflow"
    assert done.int8 is not None
    assert done.int8.worst < 0.01


def test_rows_take_less_memory_than_planes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, shape, width, dtype = CASES["inverted"]
    model, x = Features(settled(make(), shape), width), drawn(shape, dtype, 5)
    done = exported(model, x, tmp_path, verify=False)
    plain = exported(model, x, tmp_path, verify=False, frozen_layers="float32", calibrate=None, force=True)
    rows = 8 * 24 * 3 + 8 * 24 + 12 * 24 + 24 * 24 * 5 + 24 * 12  # what the next convolution reads of each result
    assert 8 * 12 * 12 + rows <= done.arena < 24 * 24 * 24, "the largest result is never whole"
    assert done.arena < plain.arena / 4
    assert done.flash < plain.flash


@pytest.mark.slow
def test_the_head_of_a_mobilenet_is_trained_in_less_than_100_kb(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = mobilenet_v2(), drawn((1, 3, 128, 128), torch.uint8, 0)
    with torch.no_grad():
        model(torch.randn(8, 3, 128, 128))
    model.eval().requires_grad_(False)
    assert isinstance(model, nn.Sequential)
    model[-1].requires_grad_(True)
    done = exported(
        model, x, tmp_path, targets=torch.tensor([1]), loss="cross_entropy", normalize=(127.5, 58.0), budget="100 KB",
        calibrate=[(drawn((4, 3, 128, 128), torch.uint8, 1), torch.arange(4) % 2)], verify=False,
    )  # fmt: skip
    assert done.ram == done.arena + done.state + done.inputs == 82_968, "as docs/export.md says"
    assert done.inputs >= 3 * 128 * 128
    assert done.int8 is not None
    assert done.int8.worst < 0.02
    with pytest.raises(BudgetError) as error:
        exported(
            model, x, tmp_path, targets=torch.tensor([1]), loss="cross_entropy", normalize=(127.5, 58.0), budget=0,
            frozen_layers="float32", calibrate=None, verify=False, force=True,
        )  # fmt: skip
    assert error.value.smallest_budget == 243_736, "as docs/export.md says"


@pytest.mark.parametrize(
    ("options", "said"),
    thinned(
        [
            ({"calibrate": None}, "frozen_layers='int8' without calibrate"),
            ({"frozen_layers": "float32"}, "calibrate without frozen_layers='int8'"),
            ({"frozen_layers": "int4"}, "frozen_layers='int4'"),
            ({"calibrate": torch.zeros(1)}, "calibrate=a Tensor"),
            ({"calibrate": 3}, "calibrate=a int"),
            ({"calibrate": []}, "calibrate has no batch"),
            ({"calibrate": [(torch.zeros(1, 7), torch.tensor([0]))]}, "batch 0 of calibrate: tensors of 1x7, 1"),
            ({"calibrate": [(torch.zeros(1, 6),)]}, "batch 0 of calibrate: tensors of 1x6"),
            ({"calibrate": [(torch.zeros(3, 6), torch.tensor([0]))]}, "batch 0 of calibrate: tensors of 3x6, 1"),
            ({"calibrate": [(torch.full((1, 6), math.nan), torch.tensor([0]))]}, "batch 0 of calibrate: .*not finite"),
            (
                {
                    "calibrate": [
                        (torch.ones(1, 6), torch.tensor([0])),
                        (torch.full((1, 6), math.inf), torch.tensor([0])),
                    ]
                },
                "batch 1 of calibrate: .*not finite",
            ),
        ],
        2,
    ),
)
def test_wrong_data_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = Features(nn.Sequential(nn.Linear(6, 4), nn.ReLU()).requires_grad_(False), 4)
    with pytest.raises((UsageError, InputError), match=said.replace("(", "\\(")):
        exported(model, torch.zeros(1, 6), tmp_path, verify=False, **options)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8])
def test_integers_that_wrap_around_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = Features(series().eval().requires_grad_(False), 5), torch.zeros(1, 3, 40, dtype=torch.int8)
    batch = torch.full((1, 3, 40), 200, dtype=dtype)
    with pytest.raises(InputError, match="batch 0 of calibrate: integers from 200 to 200") as error:
        exported(model, x, tmp_path, verify=False, calibrate=[(batch, torch.tensor([0]))])
    assert "-128 to 127" in str(error.value)


def test_a_smaller_last_batch_is_to_be_dropped(tmp_path: Path) -> None:
    model, x = Features(nn.Sequential(nn.Linear(6, 4)).requires_grad_(False), 4), torch.zeros(4, 6)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(10, 6), torch.arange(10) % 3), 4)
    with pytest.raises(InputError, match="batch 2 of calibrate: tensors of 2x6, 2") as error:
        exported(model, x, tmp_path, verify=False, calibrate=loader)
    assert "Drop the last, smaller batch" in str(error.value)


class Logarithm(nn.Module):
    """Not finite for negative numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.log(self.first(x)))


def test_a_layer_that_is_not_finite_on_the_data_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Features(nn.Sequential(Logarithm()).requires_grad_(False), 4)
    batch = (torch.randn(1, 6), torch.tensor([0]))
    with pytest.raises(InputError, match=r"body\.0: results that are not finite on the data of calibrate"):
        exported(model, torch.zeros(1, 6), tmp_path, verify=False, calibrate=[batch])


def test_a_layer_with_a_tiny_range_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 4), nn.Hardtanh(0.0, 1e-12))
    model, batch = Features(body.requires_grad_(False), 4), (torch.randn(1, 6), torch.tensor([0]))
    with pytest.raises(InputError, match=r"body\.1: results from 0 to 1e-12 on the data of calibrate"):
        exported(model, torch.zeros(1, 6), tmp_path, verify=False, calibrate=[batch])


# -- a small training


@pytest.mark.slow
@needs_compiler
def test_a_head_learns_on_eight_bits_what_it_learns_on_floats(tmp_path: Path) -> None:
    model = settled_cnn()
    model.requires_grad_(False)[-1].requires_grad_(True)
    new, test = bars(200, 2, drifted=True), bars(300, 3, drifted=True)
    with torch.no_grad():
        before = (model((test[0].float() - 100) / 50).argmax(1) == test[1]).float().mean().item()
    reached = {}
    for kind in ("float32", "int8"):
        memplan.export(
            model, "1x1x16x16:uint8<256", targets="1:int64<6", loss="cross_entropy", optimizer="sgd:lr=0.02",
            normalize=(100.0, 50.0), folder=tmp_path / kind, name="net", frozen_layers=kind, verify=False,
            calibrate=[new] if kind == "int8" else None,
        )  # fmt: skip
        reached[kind] = accuracy(tmp_path / kind, new, test)
    assert before < reached["float32"] - 0.1, "there is something to learn"
    assert reached["int8"] > reached["float32"] - 0.03
