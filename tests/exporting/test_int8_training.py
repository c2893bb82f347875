"""Training in weights of eight bits."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from environment import slow
from models.drifting_bars import accuracy, bars, normed, settled_cnn
from models.microcontroller_networks import Inverted, mobilenet_v2
from torch import nn
from truth.c_program import array, floats_of, printed_by

import memplan
from memplan.errors import BudgetError, InputError, UsageError, VerificationError
from memplan.exporting import export as exporting
from memplan.exporting.exported import Exported
from memplan.exporting.int8_training import random_fractions
from memplan.exporting.source.program_text import program_text
from memplan.exporting.tiling import tilings

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def exported(model: nn.Module, x: Any, folder: Path, **options: Any) -> Exported:
    given: dict[str, Any] = {
        "targets": "2:int64<3", "loss": "cross_entropy", "optimizer": "sgd:lr=0.05", "name": "net",
        "trained_weights": "int8", "folder": folder, "budget": "1 MiB",
    } | options  # fmt: skip
    return memplan.export(model, x, **given)


def convolutions() -> nn.Sequential:
    """A frozen convolution, then trained ones of all kinds: whole, depthwise, transposed; a norm in training mode."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), *normed(6, 8, 3), nn.ReLU6(), nn.Conv2d(8, 8, 3, 2, 1, groups=8),
        nn.ReLU(), nn.ConvTranspose2d(8, 5, 2, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False),
    )  # fmt: skip
    model[0].requires_grad_(False)
    return model


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    some = list(parameters)
    return torch.optim.SGD([{"params": some[:3], "lr": 0.1}, {"params": some[3:]}], lr=0.03, weight_decay=0.02)


def upwards(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, maximize=True)


@needs_compiler
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": two_groups, "clip_value": 0.05, "frozen_weights": "int8", "weights_file": True},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"optimizer": upwards, "arena_apart": True, "budget": "20 KiB"}, marks=pytest.mark.slow),
    ],
)
def test_each_update_of_20_steps_is_that_of_a_reference(options: dict[str, Any], tmp_path: Path) -> None:
    model = convolutions()
    done = exported(model, "2x2x9x9", tmp_path, **options)
    assert done.verdict.proven
    elements = sum(one.numel() for one in model.parameters() if one.requires_grad and one.dim() > 1)
    said = re.search(r"all ([\d,]+) updates in eight bits .* \(for ([\d,]+) of them", str(done.verdict))
    assert said is not None
    updates, undecided = (int(number.replace(",", "")) for number in said.groups())
    assert updates == 20 * elements
    assert undecided < updates / 100, "the others are known exactly"
    assert done.int8_trained is not None
    assert done.int8_trained.elements == elements
    assert [row.name for row in done.int8_trained.weights] == [
        path for path, one in model.named_parameters() if one.requires_grad and one.dim() > 1
    ]
    floats = sum(one.numel() for one in model.parameters() if one.requires_grad and one.dim() == 1)
    statistics, counters = 2 * 8, 3 + 2 * ("clip_value" in options)
    pointers = ("weights_file" in options) + ("arena_apart" in options)
    assert done.state == 4 * (floats + statistics + counters + pointers) + -(-elements // 4) * 4


@pytest.mark.slow
@needs_compiler
def test_parts_of_weights_are_updated_by_groups_of_channels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the weight that makes the channels, columns of the one that reads them."""
    monkeypatch.setattr(tilings, "SMALL", 0)
    monkeypatch.setattr(tilings, "MOST", 150)
    torch.manual_seed(0)
    model = nn.Sequential(Inverted(3, 4, 2, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    with pytest.raises(BudgetError) as caught:
        exported(model, "1x3x12x12", tmp_path, targets="1:int64<3", budget=0)
    least = caught.value.smallest_budget
    done = exported(model, "1x3x12x12", tmp_path, targets="1:int64<3", budget=least, force=True)
    assert done.verdict.proven
    assert done.ram == least
    assert done.arena < 4 * 12 * 12 * 12, "the largest value is never whole"


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param("/ scale;", "/ (1.02f * scale);", marks=pytest.mark.slow),
        ("(down < 0)", ""),
        pytest.param("* 0x846CA68Bu", "* 0x846CA68Du", marks=pytest.mark.slow),
        pytest.param("next < -127 ? -127", "next < -126 ? -126", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_update_is_found(right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def text(layout: Any) -> str:
        whole = program_text(layout)
        if right == "(down < 0)":  # rounds to the nearest, as if nothing were drawn
            return re.sub(r"(drawn\(s, .*\)) - change", r"0.5f + 0 * \1 - change", whole)
        assert right in whole
        return whole.replace(right, wrong)

    monkeypatch.setattr(exporting, "program_text", text)
    torch.manual_seed(0)
    with pytest.raises(VerificationError, match=r"integers of .* after step|loss of step|the C code differs"):
        exported(
            nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3)), "2x40", tmp_path, optimizer="sgd:lr=0.5"
        )


@needs_compiler
def test_20_steps_are_those_of_integers_and_floats_bit_for_bit(tmp_path: Path) -> None:
    """One sample: no sum of the backward pass has several terms in an order that a compiler could choose."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4, bias=False))
    start = {path: one.detach().numpy().copy() for path, one in model.named_parameters()}
    exported(model, "1x6", tmp_path, targets="1x4", loss="mse_loss", optimizer="sgd:lr=0.125", verify=False)
    x, y = torch.randn(20, 6), torch.randn(20, 4)
    text = f"""
#include "net.h"
#include <stdio.h>
static net_state s;
{array("x", x)}
{array("y", y)}
int main(void)
{{
    static float weights[NET_WEIGHTS];
    net_init(&s);
    net_seed(&s, 77);
    for (int k = 0; k < 20; k++) {{
        net_step(&s, x + 6 * k, y + 4 * k);
        net_get_weights(&s, weights);
        for (int i = 0; i < NET_WEIGHTS; i++)
            printf("%.9g\\n", (double)weights[i]);
    }}
    return 0;
}}
"""
    found = floats_of(printed_by(tmp_path, text, "-ffp-contract=off")).astype(np.float32).reshape(20, -1)
    f4, scales, numbers, bias = np.float32, {}, {}, start["0.bias"].copy()
    for name in ("0.weight", "2.weight"):
        scales[name] = (np.abs(start[name]).max(1) * f4(1.25) / f4(127)).astype(f4)  # the headroom
        numbers[name] = np.rint(start[name] / scales[name][:, None]).astype(int)
    places = {"0.weight": np.arange(30).reshape(5, 6), "2.weight": 30 + np.arange(20).reshape(4, 5)}

    def product(name: str, row: np.ndarray) -> np.ndarray:
        sums = np.zeros(len(numbers[name]), f4)
        for k in range(len(row)):
            sums = sums + row[k] * numbers[name][:, k].astype(f4)
        return scales[name] * sums

    def updated(name: str, outer: np.ndarray, inner: np.ndarray, step: int) -> None:
        for i, j in np.ndindex(numbers[name].shape):
            key = (77 + step * 0x9E3779B9 + int(places[name][i, j]) * 0x85EBCA6B) % 2**32
            key = (key ^ key >> 16) * 0x7FEB352D % 2**32
            key = (key ^ key >> 15) * 0x846CA68B % 2**32
            chance = f4((key ^ key >> 16) >> 8) / f4(2**24)
            change = f4(0.125) * (outer[i] * inner[j]) / scales[name][i]
            moved = numbers[name][i, j] + int(np.floor(chance - change))
            numbers[name][i, j] = min(max(moved, -127), 127)

    for k in range(20):
        before = bias + product("0.weight", x[k].numpy())
        hidden = np.maximum(before, 0)
        out = product("2.weight", hidden)
        gradient = f4(2) / f4(4) * (out - y[k].numpy())
        back = np.zeros(5, f4)
        for i in range(4):
            back = back + (gradient[i] * scales["2.weight"][i]) * numbers["2.weight"][i].astype(f4)
        back = np.where(hidden > 0, back, f4(0))
        updated("2.weight", gradient, hidden, k + 1)
        updated("0.weight", back, x[k].numpy(), k + 1)
        bias = bias - f4(0.125) * back
        expected = [bias, *((scales[n][:, None] * numbers[n].astype(f4)).reshape(-1) for n in numbers)]
        assert np.array_equal(found[k], np.concatenate(expected)), f"step {k}"


def test_rounding_by_chance_keeps_the_mean() -> None:
    places = np.arange(100_000)
    for change in (0.003, 0.4, 1.7):
        moved = np.concatenate([np.floor(random_fractions(1, step, places) - change) for step in range(1, 6)])
        share = change % 1
        assert abs(moved.mean() + change) < 5 * np.sqrt(share * (1 - share) / moved.size)
    one, next_step, other_seed = (
        random_fractions(1, 1, places),
        random_fractions(1, 2, places),
        random_fractions(2, 1, places),
    )
    for other in (next_step, other_seed, np.roll(one, 1), np.roll(one, 6)):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(len(places))


@pytest.mark.slow
@needs_compiler
def test_a_network_learns_in_eight_bits_most_of_what_it_learns_in_floats(tmp_path: Path) -> None:
    """Roundings are by chance, and each sample is a step: mean and spread over networks, images and roundings."""
    reached: dict[str, list[float]] = {"float32": [], "int8": []}
    at_bound = list[float]()
    kinds: tuple[Literal["float32", "int8"], ...] = ("float32", "int8")
    for seed in range(1, 6):
        model = settled_cnn(seed)
        new, test = bars(200, 10 * seed + 2, drifted=True), bars(300, 10 * seed + 3, drifted=True)
        with torch.no_grad():
            before = (model((test[0].float() - 100) / 50).argmax(1) == test[1]).float().mean().item()
        assert before < 0.5
        for kind in kinds:
            done = memplan.export(
                model, "1x1x16x16:uint8<256", targets="1:int64<6", loss="cross_entropy", optimizer="sgd:lr=0.01",
                normalize=(100.0, 50.0), folder=tmp_path / kind, name="net", trained_weights=kind, verify=False,
                force=True,
            )  # fmt: skip
            reached[kind].append(accuracy(tmp_path / kind, new, test, seed))
            if done.int8_trained is not None:
                at_bound += [weight.at_bound for weight in done.int8_trained.weights]
                assert abs(done.int8_trained.int8_loss - done.int8_trained.loss) < 0.1
                assert done.int8_trained.worst < 0.0125
    means = {kind: float(np.mean(of)) for kind, of in reached.items()}
    spreads = {kind: float(np.std(of, ddof=1)) for kind, of in reached.items()}
    assert means["float32"] > 0.9
    assert means["int8"] > means["float32"] - 0.03, "docs/export.md says both"
    assert max(spreads.values()) < 0.06
    assert float(np.mean(at_bound)) < 0.001, "without headroom each channel begins with one element at its bound"


@pytest.mark.slow
@needs_compiler
def test_weights_and_state_come_back(tmp_path: Path) -> None:
    model = convolutions()
    exported(model, "2x2x9x9", tmp_path, verify=False)
    text = """
#include "net.h"
#include <stdio.h>
static net_state s, t;
static FILE *file;
static int put(void *context, size_t offset, const void *page, size_t length)
{
    (void)context, (void)offset;
    return fwrite(page, length, 1, file) != 1;
}
static int get(void *context, size_t offset, void *page, size_t length)
{
    (void)context;
    return fseek(file, (long)offset, SEEK_SET) || fread(page, length, 1, file) != 1;
}
int main(void)
{
    static float x[324], weights[NET_WEIGHTS], other[NET_WEIGHTS];
    static int32_t y[2] = {1, 2};
    static unsigned char page[64];
    int wrong = 0;
    for (int k = 0; k < 324; k++)
        x[k] = (float)(k % 7) - 3;
    net_init(&s);
    for (int k = 0; k < 5; k++)
        net_step(&s, x, y);
    file = fopen("FOLDER/state.bin", "wb+");
    wrong += net_save(&s, page, sizeof page, put, 0);
    net_init(&t);
    wrong += net_load(&t, page, sizeof page, get, 0);
    fclose(file);
    net_step(&s, x, y);
    net_step(&t, x, y);
    net_get_weights(&s, weights);
    net_get_weights(&t, other);
    for (int k = 0; k < NET_WEIGHTS; k++)
        wrong += weights[k] != other[k];
    net_init(&t);
    net_set_weights(&t, weights);
    net_get_weights(&t, other);
    for (int k = 0; k < NET_WEIGHTS; k++)
        wrong += weights[k] != other[k];
    printf("%d\\n", wrong);
    net_init(&t);
    file = fopen("FOLDER/state.bin", "rb");
    net_load(&t, page, sizeof page, get, 0);
    fclose(file);
    net_get_weights(&t, weights);
    file = fopen("FOLDER/weights.bin", "wb");
    fwrite(weights, sizeof weights, 1, file);
    fclose(file);
    return 0;
}
"""
    assert printed_by(tmp_path, text.replace("FOLDER", str(tmp_path))).split() == ["0"], "resumed bit for bit"
    loaded = [memplan.load_weights(convolutions(), tmp_path / file) for file in ("weights.bin", "state.bin")]
    states = [one.state_dict() for one in loaded]
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(states[0][name], tensor)]
    assert "12.weight" in changed
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    memplan.load_weights(model, tmp_path / "state.bin", optimizer=optimizer)


def settled_mobilenet() -> nn.Sequential:
    """Frozen, in evaluation mode."""
    torch.manual_seed(0)
    model = mobilenet_v2()
    with torch.no_grad():
        model(torch.randn(8, 3, 128, 128))
    assert isinstance(model, nn.Sequential)
    return model.eval().requires_grad_(False)


def of_photos(model: nn.Module, folder: Path, **options: Any) -> Exported:
    """Export with a photo in bytes as the input, and layers before the first trained one in eight bits."""
    photos = torch.randint(256, (5, 3, 128, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return exported(
        model, photos[:1], folder, targets=torch.tensor([1]), normalize=(127.5, 58.0), frozen_layers="int8",
        calibrate=[(photos[1:], torch.arange(4) % 2)], **options,
    )  # fmt: skip


@needs_compiler
@pytest.mark.slow
def test_the_last_four_blocks_of_a_mobilenet_are_trained_in_400_kb(tmp_path: Path) -> None:
    model = settled_mobilenet()
    for part in list(model)[14:]:
        part.requires_grad_(True)
        for norm in part.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.weight.requires_grad_(False)
    done = of_photos(model, tmp_path, budget="400000 B", input_in_arena=True)
    assert done.verdict.proven
    assert done.inputs == 4, "the target"
    assert done.arena > 3 * 128 * 128, "the photo lies there"
    assert done.ram <= 400_000
    assert done.trained == sum(one.numel() for one in model.parameters() if one.requires_grad) == 309_290
    assert done.smallest_budget == 393_896, "as docs/export.md says"
    body = '{ printf("%zu", sizeof(net_state)); return 0; }'
    size = printed_by(tmp_path, f'#include "net.h"\n#include <stdio.h>\nint main(void) {body}\n')
    assert int(size) == done.arena + done.state, "as the compiler counts it"


@pytest.mark.slow
def test_biases_and_head_of_a_mobilenet_are_trained_in_300_kb(tmp_path: Path) -> None:
    """Of all norms: but for the first convolution, nothing is frozen with all that is before it."""
    model = settled_mobilenet()
    model[-1].requires_grad_(True)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.bias.requires_grad_(True)
    with pytest.raises(BudgetError) as caught:
        of_photos(model, tmp_path, budget=0, verify=False, trained_weights="float32", input_in_arena=True)
    assert caught.value.smallest_budget == 282_648, "as docs/export.md says"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": "adam"}, "Adam keeps moments in float32"),
        ({"optimizer": "rmsprop"}, "RMSprop keeps moments in float32"),
        ({"optimizer": "sgd:lr=0.1,momentum=0.9"}, "momentum is an array in float32"),
        ({"accumulate": 4}, "accumulate=4 adds gradients up in float32"),
        ({"clip_norm": 1.0}, "clip_norm needs all gradients"),
        ({"trained_weights": "int4"}, "trained_weights='int4'"),
    ],
)
def test_what_keeps_floats_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises((InputError, UsageError), match=said):
        exported(nn.Linear(6, 3), "2x6", tmp_path, verify=False, **options)


def test_a_weight_without_a_range_is_named(tmp_path: Path) -> None:
    last = nn.Linear(4, 3)
    model = nn.Sequential(nn.Linear(6, 4), last)
    nn.init.zeros_(last.weight)
    with pytest.raises(InputError, match=r"1\.weight has zeros alone"):
        exported(model, "2x6", tmp_path, verify=False)
    nn.init.ones_(last.weight[1])
    done = exported(model, "2x6", tmp_path, verify=False)
    assert done.int8_trained is not None, "rows of zeros have the range of the others"


@pytest.mark.parametrize("size", [1e-44, 3e38])
def test_a_range_beyond_float32_is_named(size: float, tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    nn.init.constant_(model.weight, size)
    with pytest.raises(InputError, match=r"weight has a largest magnitude of .* is no range of eight bits"):
        exported(model, "2x6", tmp_path, verify=False)


def test_a_model_without_weights_for_eight_bits_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)
    with pytest.raises(InputError, match=r"stays in float32: 0\.bias, 2\.bias"):
        exported(model, "2x6", tmp_path, verify=False)
    assert not list(tmp_path.glob("net*")), "nothing is written"


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("int8", two_groups),
        ("int8", "sgd:lr=0.05"),
        *slow(
            ("float32", "sgd:lr=0.1"),
            ("float32", two_groups),
            ("float32", "sgd:lr=0.1,momentum=0.9"),
            ("float32", "adam"),
        ),
    ],
)
def test_no_gradient_of_an_embedding_is_whole(kind: Literal["float32", "int8"], optimizer: Any, tmp_path: Path) -> None:
    """Rows that no index reads change by weight decay and moments, too; they are looked for 256 at a time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(600, 8, padding_idx=258), nn.Flatten(), nn.Linear(40, 3))
    x = torch.tensor([[3, 255, 256, 258, 599], [0, 256, 511, 512, 512]])
    done = exported(model, x, tmp_path, trained_weights=kind, optimizer=optimizer)
    assert done.verdict.proven
    assert done.live < 4 * 600 * 8, "less than the gradient of the table"
    if kind == "int8":
        assert done.int8_trained is not None
        assert [row.name for row in done.int8_trained.weights] == ["0.weight", "2.weight"]


COUNTED = """
#include "net.h"
#include <stdio.h>
static net_state s;
static long calls;
__attribute__((no_instrument_function)) void __cyg_profile_func_enter(void *f, void *from) { calls += f != from; }
__attribute__((no_instrument_function)) void __cyg_profile_func_exit(void *f, void *from) { calls += f == from; }
int main(void)
{
    const int32_t x[5] = {3, 1, 3, 2, 19}, y[1] = {1};
    net_init(&s);
    calls = 0;
    net_step(&s, x, y);
    printf("%ld", calls);
    return 0;
}
"""


@needs_compiler
@pytest.mark.parametrize("kind", ["int8", *slow("float32")])
def test_rows_that_no_index_reads_cost_nothing(kind: Literal["float32", "int8"], tmp_path: Path) -> None:
    """The compiler counts the calls, an update of an element each: without decay, they do not depend on the table."""

    def counted(rows: int, decay: float) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(rows, 8, padding_idx=2), nn.Flatten(), nn.Linear(40, 3))
        folder = tmp_path / f"{rows}-{decay}"
        exported(
            model, f"1x5:int64<{rows}", folder, targets="1:int64<3", trained_weights=kind, verify=False,
            optimizer=f"sgd:lr=0.05,weight_decay={decay}",
        )  # fmt: skip
        (folder / "count.c").write_text(COUNTED)
        build = ["cc", "-O0", "-finstrument-functions", "count.c", "net.c", "-lm", "-o", "count"]
        subprocess.run(build, cwd=folder, check=True)
        return int(subprocess.run(["./count"], cwd=folder, check=True, capture_output=True, text=True).stdout)

    few = counted(20, 0.0)
    assert counted(300, 0.0) == few
    assert counted(20, 0.1) - few >= (20 - 3) * 8, "all rows but 1, 3 and 19 as well"
