"""What fits on a board: the same bytes as exports that train as much, arrays that lie within banks."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import slow
from hypothesis import given
from hypothesis import strategies as st
from models.microcontroller_networks import NETWORKS
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.devices.boards import Bank, Board, find_board
from memplan.errors import BudgetError, InputError, UsageError
from memplan.exporting import board_fit
from memplan.exporting.board_fit import BoardFit, TrainedPart, arena_room, fit_on_board, placed
from memplan.trace.step import StepOptions

KIB = 1 << 10


def small_board(**banks: int) -> Board:
    """A board with banks of so many KiB."""
    rows = tuple(Bank(name, size * KIB) for name, size in banks.items())
    return replace(find_board("stm32f446"), banks=rows, core="none")


def network(name: str) -> tuple[nn.Module, dict[str, Any], tuple[str, ...]]:
    make, inputs, targets, loss = NETWORKS[name]
    torch.manual_seed(0)
    return make(), {"targets": targets, "loss": getattr(F, loss), "optimizer": "sgd:lr=0.1"}, inputs


def options_of(inputs: tuple[str, ...], step: dict[str, Any]) -> StepOptions:
    return StepOptions(inputs, {}, step["targets"], step["loss"], step["optimizer"], None)


def fitted(name: str, board: Board, reserve: int = 0) -> BoardFit:
    model, step, inputs = network(name)
    return fit_on_board(model, options_of(inputs, step), board, reserve=reserve)


def exported(name: str, parameters: tuple[str, ...], budget: int, folder: Path, apart: bool) -> memplan.Exported:
    """The export of a step that trains these parameters alone."""
    model, step, inputs = network(name)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(path in parameters)
    return memplan.export(model, *inputs, **step, budget=budget, folder=folder, arena_apart=apart, verify=False)


def test_rows_are_the_bytes_of_exports(tmp_path: Path) -> None:
    fit = fitted("lenet", small_board(A=96, B=24), 20 * KIB)
    assert [part.what for part in fit.parts] == ["all 5 layers", "last 2 layers", "biases and head", "head alone"]
    assert [part.weights for part in fit.parts] == [61706, 11014, 6 + 16 + 120 + 84 + 850, 850]
    assert fit.best is fit.parts[1]
    for at, part in enumerate(fit.parts):
        if part.fits:
            done = exported("lenet", part.parameters, part.ram, tmp_path / str(at), apart=True)
            assert done.ram <= part.ram
            assert (done.state, done.inputs, done.flash) == (part.state, part.inputs, part.flash)
        else:
            with pytest.raises(BudgetError) as raised:
                exported("lenet", part.parameters, part.ram - 4, tmp_path / str(at), apart=True)
            smallest = raised.value.smallest_budget
            assert smallest == part.ram if part.arena else smallest > part.ram == part.state + part.inputs
    plain = json.loads(fit.to_json())
    assert (plain["format"], plain["fits"], plain["board"]["name"]) == ("memplan.board_fit", True, "stm32f446")


def test_what_does_not_fit_in_floats_is_planned_in_eight_bits(tmp_path: Path) -> None:
    model, step, inputs = network("lenet")
    fit = fit_on_board(model, options_of(inputs, step), small_board(A=96), trained_weights="int8")
    whole, narrow, *others = fit.parts
    assert (whole.what, whole.lacks) == ("all 5 layers", "SRAM")
    assert (narrow.what, narrow.means, narrow.lacks) == ("all 5 layers", ("weights in eight bits",), "")
    assert fit.best is narrow
    assert narrow.parameters == whole.parameters
    weights = 61_706 - 236
    assert whole.state - narrow.state == 3 * weights - -weights % 4, "all but the biases, in whole words"
    assert all(part.trained_weights == "float32" for part in others), "these fit as they are"
    done = memplan.export(
        model, *inputs, **step, budget=narrow.ram, folder=tmp_path, trained_weights="int8", verify=False
    )  # fmt: skip
    assert done.ram <= narrow.ram
    assert (done.state, done.inputs, done.flash) == (narrow.state, narrow.inputs, narrow.flash)


def camera() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, 2, 1), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))


CAMERA: dict[str, Any] = {"targets": ("1:int64<4",), "loss": F.cross_entropy, "optimizer": "sgd:lr=0.1"}
PHOTO = "1x3x32x32"


def exported_camera(part: TrainedPart, folder: Path, **options: Any) -> memplan.Exported:
    model = camera()
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(path in part.parameters)
    return memplan.export(model, PHOTO, **CAMERA, folder=folder, verify=False, **options)


def test_what_does_not_fit_is_planned_with_the_input_in_the_arena(tmp_path: Path) -> None:
    """The head alone: input and first result take 16 KiB, with the second one 18 KiB."""
    fit = fit_on_board(camera(), options_of((PHOTO,), CAMERA), small_board(A=17))
    rows = {(part.what, part.means): part for part in fit.parts}
    names = ("all 3 layers", "biases and head", "head alone")
    assert list(rows) == [(what, means) for what in names for means in ((), ("input in the arena",))]
    assert [part.lacks for part in fit.parts] == ["SRAM", "SRAM", "SRAM", "", "SRAM", ""]
    plain, smaller = rows["head alone", ()], rows["head alone", ("input in the arena",)]
    assert (plain.lacks, smaller.lacks) == ("SRAM", "")
    assert plain.inputs - smaller.inputs == 4 * 3 * 32 * 32, "its bytes are the arena's"
    assert fit.best is rows["biases and head", ("input in the arena",)]
    done = exported_camera(smaller, tmp_path, budget=smaller.budget, input_in_arena=True)
    assert done.ram <= smaller.ram == smaller.arena + smaller.state + smaller.inputs <= 17 * KIB
    assert (done.state, done.inputs, done.flash) == (smaller.state, smaller.inputs, smaller.flash)
    with pytest.raises(BudgetError):
        exported_camera(plain, tmp_path, budget=17 * KIB)


def test_frozen_layers_are_in_eight_bits_where_data_says_their_ranges(tmp_path: Path) -> None:
    """The input takes 12 KiB, and as integers 3 KiB besides."""
    board, step = small_board(A=16), options_of((PHOTO,), CAMERA)
    batches = [(torch.randn(1, 3, 32, 32), torch.tensor([1])) for _ in range(3)]
    without, fit = (fit_on_board(camera(), step, board, calibrate=data) for data in (None, iter(batches)))
    assert (without.best, without.calibrated, fit.calibrated) == (None, False, True)
    best = fit.best
    assert best is not None
    assert (best.what, best.means) == ("head alone", ("input in the arena", "frozen layers in eight bits"))
    assert [(part.what, part.means) for part in fit.parts if not part.fits] == [
        ("all 3 layers", ()), ("all 3 layers", ("input in the arena",)),
        ("biases and head", ()), ("biases and head", ("input in the arena",)), ("head alone", ()),
    ]  # fmt: skip
    options = {"input_in_arena": True, "frozen_layers": "int8", "calibrate": batches}
    done = exported_camera(best, tmp_path, budget=best.budget, **options)
    assert done.ram <= best.ram <= 16 * KIB
    assert (done.state, done.inputs, done.flash) == (best.state, best.inputs, best.flash)
    assert str(done.int8) == best.frozen_error


def photos() -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    return [(torch.randn(1, 3, 32, 32), torch.tensor([1])) for _ in range(3)]


def test_frozen_layers_are_in_eight_bits_beside_an_input_in_a_bank_of_its_own(tmp_path: Path) -> None:
    """The input takes 12 of 13 KiB; the first result 4 KiB and the second one 2 KiB, as integers a quarter."""
    fit = fit_on_board(camera(), options_of((PHOTO,), CAMERA), small_board(A=13, B=5), calibrate=photos())
    best = fit.best
    assert best is not None
    assert (best.what, best.means) == ("head alone", ("frozen layers in eight bits",))
    assert (best.banks["inputs"], best.banks["arena"]) == ("A", "B")
    options = {"arena_apart": True, "frozen_layers": "int8", "calibrate": photos()}
    done = exported_camera(best, tmp_path, budget=best.budget, **options)
    assert (done.state, done.inputs, done.flash) == (best.state, best.inputs, best.flash)
    assert done.ram <= best.ram
    with pytest.raises(BudgetError):
        exported_camera(best, tmp_path, budget=13 * KIB, input_in_arena=True, force=True, **options)


def test_what_lacks_flash_is_planned_with_frozen_layers_in_eight_bits(tmp_path: Path) -> None:
    """61,706 floats are 241 KiB; of the last two layers, 11,014 floats are 43 KiB and the rest 50 KiB of integers."""
    model, step, inputs = network("lenet")
    batches = [(torch.randn(1, 1, 28, 28), torch.tensor([at])) for at in range(2)]
    fit = fit_on_board(
        model, options_of(inputs, step), replace(small_board(A=1000), flash=110 * KIB), calibrate=batches
    )  # fmt: skip
    best = fit.best
    assert best is not None
    assert (best.what, best.means) == ("last 2 layers", ("frozen layers in eight bits",))
    plain = next(part for part in fit.parts if part.what == best.what)
    assert (plain.means, plain.lacks) == ((), "flash")
    assert plain.flash is not None
    assert best.flash is not None
    convolutions, linear = (6 * 25, 16 * 6 * 25), 400 * 120
    saved, channels = 3 * (sum(convolutions) + linear), 6 + 16 + 120
    assert saved - 32 * channels <= plain.flash - best.flash <= saved, "less the scales of the channels"
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(path in best.parameters)
    done = memplan.export(
        model, *inputs, **step, budget=best.budget, folder=tmp_path, frozen_layers="int8", calibrate=batches,
        verify=False,
    )  # fmt: skip
    assert done.flash == best.flash


def test_of_what_fits_in_no_way_the_last_one_is_a_row() -> None:
    board = replace(small_board(A=1000), flash=KIB)
    fit = fit_on_board(camera(), options_of((PHOTO,), CAMERA), board, calibrate=photos())
    rows = [(part.what, part.means) for part in fit.parts]
    eight_bits = ("frozen layers in eight bits",)
    assert rows == [
        ("all 3 layers", ()), ("biases and head", ()), ("head alone", ()), ("head alone", eight_bits)
    ]  # fmt: skip
    assert {part.lacks for part in fit.parts} == {"flash"}


@pytest.mark.parametrize("data", [3, nn.Linear(2, 2), {"x": 1}, "photos"], ids=lambda data: type(data).__name__)
def test_calibration_data_is_batches(data: Any) -> None:
    with pytest.raises(UsageError, match=f"calibrate=a {type(data).__name__}"):
        fit_on_board(camera(), options_of((PHOTO,), CAMERA), small_board(A=1000), calibrate=data)


def test_batches_fit_the_step_even_where_nothing_needs_them() -> None:
    batches = [(torch.randn(1, 3, 16, 16), torch.tensor([1]))]
    with pytest.raises(InputError, match="batch 0 of calibrate: tensors of 1x3x16x16"):
        fit_on_board(camera(), options_of((PHOTO,), CAMERA), small_board(A=1000), calibrate=batches)


def test_each_part_is_quantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of parts that fit in no way, each is tried four times with frozen layers in eight bits."""
    trained, quantize = list[frozenset[str]](), board_fit.int8_step

    def counted(request: Any, passes: Any, batches: Any) -> Any:
        graph = passes[0].graph
        trained.append(frozenset(graph.values[of].path for of, _ in graph.gradients))
        return quantize(request, passes, batches)

    monkeypatch.setattr(board_fit, "int8_step", counted)
    fit = fit_on_board(
        camera(), options_of((PHOTO,), CAMERA), small_board(A=2, B=1), trained_weights="int8", calibrate=photos()
    )
    assert not fit.fits
    assert len(trained) == len(set(trained)) == len({part.parameters for part in fit.parts})


@pytest.mark.slow
def test_arrays_lie_within_banks_beside_the_reserve() -> None:
    board = small_board(A=40, B=32)
    alone, beside = fitted("lenet", board), fitted("lenet", board, 30 * KIB)
    for fit in (alone, beside):
        for part in filter(lambda part: part.fits, fit.parts):
            left = {bank.name: bank.bytes for bank in board.banks}
            for what, size in {"arena": part.arena, "state": part.state, "inputs": part.inputs}.items():
                left[part.banks[what]] -= size
            left[part.banks["reserve"]] -= fit.reserve
            assert min(left.values()) >= 0
    by_name = {part.what: part.fits for part in alone.parts}
    assert (by_name["all 5 layers"], by_name["head alone"]) == (False, True)
    assert not fitted("lenet", board, 33 * KIB + 40 * KIB).fits, "nothing is left"
    assert len(alone.parts) == len(beside.parts)


@pytest.mark.slow
def test_flash_is_counted() -> None:
    board = replace(small_board(A=1000), flash=200 * KIB)
    parts = fitted("lenet", board).parts
    assert {part.lacks for part in parts} == {"flash"}, "61,706 floats are 241 KiB"
    outside = fitted("lenet", replace(board, flash=None))
    assert outside.best is outside.parts[0]


def test_constants_count_as_sram_where_they_are_copied_there() -> None:
    avr = find_board("mega2560")
    fit = fitted("mlp", replace(avr, core="none"))
    (part, *_), weights = fit.parts, 4 * (12 * 16 + 16 + 16 * 8 + 8 + 8 * 4 + 4)
    assert part.flash is not None
    assert part.flash >= weights, "the initial weights"
    assert part.banks == dict.fromkeys(("arena", "state", "inputs", "reserve", "constants"), "SRAM")
    needed = part.ram
    assert needed == part.arena + part.state + part.inputs + part.constants
    assert part.constants == part.flash
    for spared, fits in ((avr.sram - needed, True), (avr.sram - needed + 512, False)):
        assert fitted("mlp", replace(avr, core="none"), spared).parts[0].fits is fits
        assert fitted("mlp", replace(avr, core="none", constants_in_sram=False), spared).parts[0].fits


@pytest.mark.skipif(shutil.which("avr-gcc") is None, reason="no avr-gcc")
@pytest.mark.parametrize("name", ["mlp", *slow("denoiser")])
def test_constants_are_those_that_avr_size_counts(name: str, tmp_path: Path) -> None:
    """Weights, tables and the table of CRC-32; at -O1 the compiler drops some of them."""
    board = replace(small_board(A=200), constants_in_sram=True)
    part = fitted(name, board).parts[0]
    exported(name, part.parameters, part.budget, tmp_path, apart=False)
    (file,) = (file for file in tmp_path.glob("*.c") if not file.name.startswith("test_"))
    build = ["avr-gcc", "-std=c99", "-O0", "-mmcu=atmega2560", "-c", file.name, "-o", "net.o"]
    subprocess.run(build, cwd=tmp_path, check=True)
    sizes = subprocess.run(["avr-size", "-A", "net.o"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    found = sum(int(size) for size in re.findall(r"^\.(?:rodata|data|bss)\S*\s+(\d+)", sizes, re.MULTILINE))
    assert part.constants == found


@pytest.mark.slow
def test_the_model_stays_as_it_was() -> None:
    model, step, inputs = network("sensor_cnn")
    before = {name: (one.clone(), one.requires_grad) for name, one in model.named_parameters()}
    fit_on_board(model, options_of(inputs, step), small_board(A=64))
    assert all(torch.equal(one, before[name][0]) for name, one in model.named_parameters())
    assert all(one.requires_grad is before[name][1] for name, one in model.named_parameters())


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=4), st.lists(st.integers(0, 15), min_size=1, max_size=3),
    st.integers(0, 25),
)  # fmt: skip
def test_placing_is_exact(capacities: list[int], sizes: list[int], arena: int) -> None:
    banks = [Bank(f"bank {at}", capacity) for at, capacity in enumerate(capacities)]
    named = {"arena": arena, **{str(at): size for at, size in enumerate(sizes)}}
    where = placed(banks, named)
    assert bool(where) is (arena <= arena_room(banks, sizes))
    if where:
        for bank in banks:
            assert sum(named[what] for what, name in where.items() if name == bank.name) <= bank.bytes
