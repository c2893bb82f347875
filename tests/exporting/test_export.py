"""Whole steps as C: proven beside PyTorch, within their budgets, refused where they cannot be."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from environment import slow
from models.microcontroller_networks import NETWORKS
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.errors import BudgetError, InputError, RecordingError, UsageError, VerificationError
from memplan.exporting import export as exporting
from memplan.exporting import folder
from memplan.exporting.c_text import c_name
from memplan.exporting.exported import Exported

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

SGD = lambda parameters: torch.optim.SGD(parameters, lr=0.05)  # noqa: E731
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, weight_decay=0.1, maximize=True),
    "rmsprop, momentum": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.8),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.1, weight_decay=0.01),
    "adamw, two groups": lambda p: torch.optim.AdamW(
        [{"params": list(p)[:2], "lr": 0.02}, {"params": list(p)[2:], "betas": (0.8, 0.99)}], weight_decay=0.1
    ),
}


class Everything(nn.Module):
    """A norm of each kind, dropout, a residual, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.drop = nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.3)
        self.frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
        self.register_buffer("scale", torch.full((1, 4, 1, 1), 0.5))
        self.head = nn.Linear(4, 3)
        self.layer = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.first(x)))
        y = y + self.drop(F.silu(self.second(y))) * self.scale
        return self.head(self.layer(F.relu6(self.frozen(y)).mean((2, 3))))


STEP: dict[str, Any] = {"targets": "2:int64<3", "loss": F.cross_entropy, "optimizer": SGD}


def everything(folder: Path, input: str = "2x2x8x8", **options: Any) -> Exported:
    torch.manual_seed(0)
    return memplan.export(Everything(), input, folder=folder, **STEP | options)


def network(name: str, folder: Path, **options: Any) -> Exported:
    make, inputs, targets, loss = NETWORKS[name]
    torch.manual_seed(0)
    step = {"loss": getattr(F, loss), "optimizer": SGD, "budget": "100 MiB"} | options
    return memplan.export(make(), *inputs, targets=targets, folder=folder, **step)


@pytest.fixture(scope="module")
def lenet(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return network("lenet", tmp_path_factory.mktemp("lenet"), verify=False)


@needs_compiler
def test_a_step_of_everything_is_proven(tmp_path: Path) -> None:
    done = everything(tmp_path)
    assert done.verdict.proven
    assert len(done.verdict.losses) == exporting.STEPS
    assert len(set(done.verdict.losses)) == exporting.STEPS, "it trains"
    # 2 * 4 * 9 + 4, the norm's 4 + 4, 4 * 4 * 9 + 4, the head's 12 + 3, the other norm's 8
    assert done.trained == 76 + 8 + 148 + 15 + 8
    assert done.frozen == 4 * 4 + 4 + 4, "the frozen layer and the buffer"
    assert done.state == 4 * (done.trained + 8 + 3), "weights, running statistics, rate, step and random state"
    assert done.inputs == 2 * 2 * 8 * 8 * 4 + 2 * 4


@pytest.mark.slow
@needs_compiler
def test_a_bias_without_a_gradient_before_a_norm_is_no_error(tmp_path: Path) -> None:
    """Adam makes whole steps of its gradient's rounding; of one float32 run the evaluated loss was near by chance."""
    assert network("sensor_cnn", tmp_path, optimizer="adam").verdict.proven


@needs_compiler
def test_a_step_in_its_smallest_budget_is_proven(tmp_path: Path) -> None:
    roomy = everything(tmp_path / "a", input="2x2x24x24", verify=False)
    tight = everything(tmp_path / "b", input="2x2x24x24", budget=roomy.smallest_budget)
    assert tight.verdict.proven
    assert tight.recomputed > roomy.recomputed == 0
    assert tight.ram == roomy.smallest_budget < roomy.ram
    with pytest.raises(BudgetError) as caught:
        everything(tmp_path / "c", input="2x2x24x24", budget=tight.ram - 4, verify=False)
    assert caught.value.smallest_budget == roomy.smallest_budget
    assert "autocast" not in str(caught.value)


@needs_compiler
@pytest.mark.parametrize("name", ["adagrad", "adam", *slow(*sorted(set(OPTIMIZERS) - {"adagrad", "adam"}))])
def test_optimizers_do_as_torch_does(name: str, tmp_path: Path) -> None:
    done = network("mlp", tmp_path, optimizer=OPTIMIZERS[name])
    assert done.verdict.proven
    assert done.state == 4 * (
        done.trained * (2 if name in ("momentum", "nesterov", "rmsprop", "adagrad") else 3) + 3 + _numbers(name)
    )


def _numbers(name: str) -> int:
    """Return the number of bias corrections, and of learning rates of groups."""
    return {"adam": 2, "adamw, two groups": 4 + 2}.get(name, 0)


@needs_compiler
def test_a_wrong_kernel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memplan.exporting.kernels import templates

    right = templates.element_functions()
    wrong = {**right, "hyperbolic_tangent_gradient": right["hyperbolic_tangent_gradient"].replace("b * b", "b")}
    monkeypatch.setattr("memplan.exporting.kernels.call_writer.element_functions", lambda: wrong)
    with pytest.raises(VerificationError, match="differs from PyTorch"):
        network("mlp", tmp_path)


def test_arenas_are_no_larger_than_what_is_needed_at_once(lenet: Exported, tmp_path: Path) -> None:
    """Batch 1, float32, by hand: of the autoencoder nine activations, and what its loss is made of; of LeNet the first
    ReLU's result, the gradient of as large a plane, that of the pooled one, places in windows, and the loss."""
    done = network("autoencoder", tmp_path / "a", verify=False)
    assert done.arena == done.live <= 4 * (8 * 128 + 8 + 640 + 640 + 128 + 1)
    assert lenet.arena == lenet.live == 4 * 6 * (2 * 28 * 28 + 14 * 14) + 6 * 14 * 14 + 4


@needs_compiler
def test_weights_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Everything()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    memplan.export(model, "2x2x8x8", folder=tmp_path, **STEP)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items()), "the model is as it was"
    program, weights = tmp_path / "run", tmp_path / "weights.bin"
    sources = [str(tmp_path / name) for name in ("test_everything.c", "everything.c")]
    define = f'-DWEIGHTS_FILE="{weights}"'
    subprocess.run(["cc", "-std=c99", define, *sources, "-lm", "-o", str(program)], check=True)
    subprocess.run([str(program)], check=True, capture_output=True)
    floats = np.fromfile(weights, dtype=np.float32)
    floats[: floats.size - 6].tofile(weights)  # without what infer made: 2 x 3
    with torch.no_grad():
        for one in model.parameters():
            one.add_(1.0)
    memplan.load_weights(model, weights)
    after = model.state_dict()
    assert torch.equal(after["frozen.weight"], before["frozen.weight"] + 1)
    assert torch.equal(after["first.weight"].reshape(-1), torch.from_numpy(floats[:72]))
    assert not torch.equal(after["norm.running_mean"], before["norm.running_mean"])
    floats[:5].tofile(weights)
    with pytest.raises(InputError, match="holds 5 floats"):
        memplan.load_weights(model, weights)
    with pytest.raises(InputError, match="in the model is"):
        memplan.load_weights(nn.Linear(2, 2), weights)


@pytest.mark.parametrize(
    "damage",
    [
        lambda rows: rows[1].update(shape=3), lambda rows: rows[1].pop("name"), lambda rows: rows.clear(),
        lambda rows: rows[1].update(shape=[4.0]), lambda rows: rows[1].update(shape=[-4]), lambda rows: rows.pop(),
        lambda rows: rows[1].update(shape=[1 << 63]), lambda rows: rows.append(dict(rows[0])),
        lambda rows: rows[1].update(name="a\x1bb\n"), lambda rows: rows[1].update(name=[]),
        lambda rows: rows.insert(0, []), lambda rows: rows[1].update(more=1),
    ],
)  # fmt: skip
def test_a_layout_of_anything_else_loads_nothing(damage: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    rows: list[Any] = [{"name": name, "shape": list(one.shape)} for name, one in model.named_parameters()]
    weights, layout = tmp_path / "w.bin", tmp_path / "net.json"
    weights.write_bytes(np.arange(26, dtype="<f4").tobytes())
    layout.write_text(json.dumps({"export": "net", "tensors": rows}))
    memplan.load_weights(model, weights)
    assert model.state_dict()["1.bias"].tolist() == [24.0, 25.0]
    with torch.no_grad():
        for one in model.parameters():
            one.zero_()
    damage(rows)
    layout.write_text(json.dumps({"export": "net", "tensors": rows}))
    with pytest.raises(InputError) as raised:
        memplan.load_weights(model, weights, layout)
    assert len(str(raised.value).splitlines()) == 1
    assert all(not one.any() for one in model.parameters())


@pytest.mark.parametrize("more", [b"abc", b"abcd", b"\0" * 4096])
def test_weights_of_another_length_load_nothing(more: bytes, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    rows = [{"name": name, "shape": list(one.shape)} for name, one in model.named_parameters()]
    (tmp_path / "net.json").write_text(json.dumps({"export": "net", "tensors": rows}))
    (tmp_path / "w.bin").write_bytes(np.arange(8, dtype="<f4").tobytes() + more)
    with pytest.raises(InputError, match=r"holds more than 8 floats"):
        memplan.load_weights(model, tmp_path / "w.bin")
    (tmp_path / "other.json").write_text(json.dumps({"export": "other", "tensors": rows}))
    with pytest.raises(InputError, match="2 layouts of exports"):
        memplan.load_weights(model, tmp_path / "w.bin")
    assert torch.equal(model.weight, before)


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).sort(1).values


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"sort \(.*test_export.py:\d+\)"):
        memplan.export(Sorted(), "2x4", folder=tmp_path / "a", **STEP)
    broken = Sorted()
    broken.head.weight.data[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"head.weight has elements that are not finite"):
        memplan.export(broken, "2x4", folder=tmp_path / "a", **STEP)
    with pytest.raises(InputError, match="Adadelta"):
        everything(tmp_path / "a", optimizer=torch.optim.Adadelta)
    with pytest.raises(InputError, match=r"initial_accumulator_value=0\.1"):
        everything(tmp_path / "a", optimizer=lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1))
    with pytest.raises(InputError, match="float64"):
        memplan.export(Everything().double(), "2x2x8x8:float64", folder=tmp_path / "a", **STEP)
    with pytest.raises(UsageError, match="No optimizer"):
        everything(tmp_path / "a", optimizer=None)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds other files \(notes.txt\)"):
        everything(tmp_path / "theirs", verify=False)
    everything(tmp_path / "theirs", verify=False, force=True)
    assert (tmp_path / "theirs" / "notes.txt").read_text() == "mine"
    with pytest.raises(InputError, match="needs a gradient"):
        memplan.export(nn.Linear(4, 3).requires_grad_(False), "2x4", folder=tmp_path / "a", **STEP)


@pytest.mark.slow
@needs_compiler
def test_two_exports_live_in_one_folder(tmp_path: Path) -> None:
    step = {"optimizer": "sgd", "folder": tmp_path, "targets": "2:int64<3", "loss": F.cross_entropy}
    memplan.export(nn.Linear(4, 3), "2x4", name="net", **step)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert memplan.export(nn.Linear(4, 3), "2x4", name="weights", **step).verdict.proven
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert memplan.export(nn.Linear(4, 3), "2x4", name="net", **step).verdict.proven
    subprocess.run(["make", "test", "net.o", "weights.o"], cwd=tmp_path, check=True, capture_output=True)
    objects = [str(tmp_path / name) for name in ("net.o", "weights.o")]
    (tmp_path / "both.c").write_text(
        '#include "net.h"\n#include "weights.h"\nstatic net_state a;\nstatic weights_state b;\n'
        "int main(void)\n{\n    net_init(&a);\n    weights_init(&b);\n    return 0;\n}\n"
    )
    subprocess.run(["cc", str(tmp_path / "both.c"), *objects, "-lm", "-o", str(tmp_path / "both")], check=True)
    for name in ("net_weights", "test_net"):
        with pytest.raises(InputError, match="is a file of the export net"):
            memplan.export(nn.Linear(4, 3), "2x4", name=name, force=True, **step)
    with pytest.raises(InputError, match="other files"):
        memplan.export(nn.Linear(4, 3), "2x4", name="third", **step)
    (tmp_path / "both.c").unlink()
    (tmp_path / "both").unlink()
    assert memplan.export(nn.Linear(4, 3), "2x4", name="net", weights_file=True, verify=False, **step).name == "net"
    assert not (tmp_path / "net_weights.h").exists()


def test_an_export_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {"optimizer": "sgd", "folder": tmp_path, "targets": "2:int64<3", "loss": F.cross_entropy, "verify": False}
    memplan.export(nn.Linear(4, 3), "2x4", name="net", **step)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real = folder.os.replace
    for limit in range(0, 2 * len(before), 3):
        calls = iter(range(limit))

        def replace(source: Path, target: Path, calls: Any = calls) -> None:
            if next(calls, None) is None and "old" not in Path(source).parts:
                raise KeyboardInterrupt
            real(source, target)

        with monkeypatch.context() as patched:
            patched.setattr(folder.os, "replace", replace)
            with pytest.raises(KeyboardInterrupt):
                memplan.export(nn.Linear(4, 3), "2x4", name="net", weights_file=True, **step)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


class Table(nn.Module):
    """A row of a table for each sample, and a class."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(6, 3)

    def forward(self, rows: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.table(rows), more], 1))


@needs_compiler
@pytest.mark.parametrize("frozen", ["int8", *slow("float32")])
def test_what_cannot_be_trained_on_changes_nothing(frozen: Any, tmp_path: Path) -> None:
    """Under the sanitizers: indices out of range, data that is not a number, a loss that is not finite."""
    model = Table()
    model.table.requires_grad_(frozen == "float32")
    memplan.export(
        model, "2:int64<5", "2x2", targets="2:int64<3", loss=F.cross_entropy, optimizer="adam", folder=tmp_path,
        name="net", frozen_weights=frozen,
    )  # fmt: skip
    (tmp_path / "main.c").write_text(
        """
#include "net.h"
#include <math.h>
#include <stdio.h>
#include <string.h>
static net_state s, before;
static void step(int row, float x, int label)
{
    int32_t rows[2] = {1, row}, y[2] = {1, label};
    float more[4] = {1, 2, 3, x}, output[NET_OUTPUTS], loss;
    memcpy(&before, &s, sizeof s);
    loss = net_step(&s, rows, more, y);
    const int same = !memcmp(s.weights, before.weights, sizeof s.weights) && s.step == before.step;
    const int all = !memcmp(&s, &before, sizeof s);
    printf("%d %d %d ", isfinite(loss) != 0, same, all);
    printf("%d %d\\n", net_check(rows, more, y), net_infer(&s, rows, more, output));
}
int main(void)
{
    int32_t rows[2] = {0, 9};
    net_init(&s);
    step(1, 1, 1), step(1, 1, 3), step(1, 1, -1), step(1, 1, 1000000), step(5, 1, 1), step(-1, 1, 1);
    step(2000000000, 1, 1), step(1, NAN, 1), step(1, INFINITY, 1), step(1, 1, 2), step(1, 1, -100);
    printf("%d %d", net_check(0, 0, 0) == 0, net_check(rows, 0, 0) == NET_BAD_INDEX);
    return 0;
}
"""
    )
    program = str(tmp_path / "main")
    sources = [str(tmp_path / name) for name in ("main.c", "net.c")]
    subprocess.run(["cc", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *sources, "-lm", "-o", program],
                   check=True)  # fmt: skip
    found = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split("\n")
    trained, number, index, row = "1 0 0 0 0", "0 1 1 1 1", "0 1 1 2 0", "0 1 1 2 2"
    assert found == [
        trained, index, index, index, row, row, row, number, "0 1 0 0 0", trained, trained, "1 1"
    ]  # fmt: skip


@needs_compiler
def test_an_infinite_input_leaves_running_statistics_finite(tmp_path: Path) -> None:
    """In PyTorch a batch norm's statistics are infinite ever after. Those of other channels move as in PyTorch."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    memplan.export(
        model, "2x2", targets="2:int64<3", loss=F.cross_entropy, optimizer=SGD, folder=tmp_path, name="net",
        verify=False,
    )  # fmt: skip
    (tmp_path / "main.c").write_text(
        """
#include "net.h"
#include <math.h>
#include <stdio.h>
static net_state s;
static float weights[NET_WEIGHTS];
int main(void)
{
    const int32_t y[NET_Y_ELEMENTS] = {0, 1};
    const float broken[NET_X_ELEMENTS] = {INFINITY, 1, 2, 3}, whole[NET_X_ELEMENTS] = {1, 1, 2, 3};
    net_init(&s);
    const int finite = isfinite(net_step(&s, broken, y));
    net_get_weights(&s, weights);
    for (int k = NET_WEIGHTS - 4; k < NET_WEIGHTS; k++)
        printf("%g ", (double)weights[k]);
    printf("%d %d", finite != 0, isfinite(net_step(&s, whole, y)) != 0);
    return 0;
}
"""
    )
    subprocess.run(["cc", "main.c", "net.c", "-lm", "-o", "main"], cwd=tmp_path, check=True)
    found = subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout.split()
    # running mean and variance, momentum 0.1: of channel 1 the mean of 1 and 3, and their variance without bias
    assert found == ["0", "0.2", "1", "1.1", "0", "1"]


@needs_compiler
def test_a_frozen_norm_stays_in_float32_beside_weights_in_eight_bits(tmp_path: Path) -> None:
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU()).eval().requires_grad_(False)
    model = nn.Sequential(*backbone, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    done = memplan.export(
        model, "1x3x8x8", targets="1:int64<5", loss=F.cross_entropy, optimizer=SGD, folder=tmp_path,
        frozen_weights="int8",
    )  # fmt: skip
    assert done.verdict.proven
    assert done.rounding is not None
    assert done.rounding.weights == 4 * 3 * 3 * 3


def test_without_a_compiler_the_code_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    done = network("mlp", tmp_path)
    assert (tmp_path / "sequential.c").is_file()
    assert str(done.verdict) == "not verified: no C compiler was found"
    with pytest.raises(UsageError, match="No C compiler"):
        network("mlp", tmp_path, verify=True)


@pytest.mark.parametrize(
    ("text", "name"),
    [("ResNet-8", "resnet_8"), ("2d", "net_2d"), ("int", "net_int"), ("Größe", "gr_e"), ("--", "net")],
)
def test_names_are_c_identifiers(text: str, name: str) -> None:
    assert c_name(text) == name


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_small_networks_are_proven(name: str, tmp_path: Path) -> None:
    assert network(name, tmp_path).verdict.proven


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet", "resnet8", "ds_cnn", "sensor_cnn", "denoiser"])
def test_small_networks_are_proven_in_their_smallest_budget(name: str, tmp_path: Path) -> None:
    roomy = network(name, tmp_path / "a", verify=False)
    assert network(name, tmp_path / "b", budget=roomy.smallest_budget).verdict.proven
