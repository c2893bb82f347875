"""What a device saves, it goes on with later, bit for bit; anything else is refused, and nothing has changed."""

from __future__ import annotations

import json
import shutil
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from environment import slow
from torch import nn
from torch.nn import functional as F

import memplan
from memplan.errors import InputError

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
FLAGS = ("-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
PROGRAM = r"""
#include "net.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* STEPS PAGE FROM TO: reads a state from FROM if it is not "-", takes steps, writes the state to TO, and says how many
   pages differ from those that were there. */
static net_state state, before;
static unsigned char flash[NET_SAVED_BYTES + 4096];
static size_t length, changed;

static int on_write(void *context, size_t offset, const void *page, size_t size)
{
    if (offset + size > *(size_t *)context)
        return 1;
    changed += memcmp(flash + offset, page, size) != 0;
    memcpy(flash + offset, page, size);
    return 0;
}

static int on_read(void *context, size_t offset, void *page, size_t size)
{
    if (offset + size > *(size_t *)context)
        return 1;
    memcpy(page, flash + offset, size);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 5)
        return 9;
    const int steps = atoi(argv[1]);
    const size_t size = (size_t)atoi(argv[2]);
    void *page = malloc(size);
    net_init(&state);
    net_seed(&state, 7);
    state.rate = 0.5f;
    if (strcmp(argv[3], "-")) {
        FILE *file = fopen(argv[3], "rb");
        length = fread(flash, 1, sizeof flash, file);
        fclose(file);
        before = state;
        const int status = net_load(&state, page, size, on_read, &length);
        if (status) {
            printf("refused %d %d\n", status, memcmp(&before, &state, sizeof state) != 0);
            free(page);
            return 0;
        }
    }
    for (int k = 0; k < steps; k++) {
        float x[24];
        int32_t y[2];
        for (int i = 0; i < 24; i++)
            x[i] = (float)((i * 7 + (int)state.step * 5) % 11) / 11.0f - 0.4f;
        y[0] = (int32_t)(state.step % 3);
        y[1] = 1;
        net_step(&state, x, y);
    }
    length = sizeof flash;
    const int status = net_save(&state, page, size, on_write, &length);
    printf("saved %d step %u changed %u\n", status, (unsigned)state.step, (unsigned)changed);
    FILE *file = fopen(argv[4], "wb");
    fwrite(flash, 1, NET_SAVED_BYTES, file);
    fclose(file);
    free(page);
    return 0;
}
"""


class Net(nn.Module):
    """Trained and frozen weights, statistics, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.norm = nn.Linear(12, 6).requires_grad_(False), nn.BatchNorm1d(6)
        self.hidden, self.drop, self.head = nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(torch.tanh(self.hidden(self.norm(self.frozen(x))))))


def two_rates(model: Net) -> torch.optim.Optimizer:
    groups = [{"params": model.hidden.parameters(), "lr": 0.2}, {"params": model.head.parameters()}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def exported(folder: Path, optimizer: Any = OPTIMIZERS["adam"], seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    model = Net()
    memplan.export(
        model, "2x12", targets="2:int64<3", loss=F.cross_entropy, optimizer=optimizer, budget="64 KiB", folder=folder,
        name="net", verify=False, **options,
    )  # fmt: skip
    return model


def built(folder: Path, optimizer: Any = OPTIMIZERS["adam"], **options: Any) -> Net:
    """Export a step, and compile the program beside it."""
    model = exported(folder, optimizer, **options)
    (folder / "main.c").write_text(PROGRAM)
    subprocess.run(["gcc", *FLAGS, "main.c", "net.c", "-lm", "-o", "main"], cwd=folder, check=True)
    return model


def ran(folder: Path, steps: int, source: str, to: str, page: int = 64) -> str:
    """Run the program in a process of its own."""
    command = ["./main", str(steps), str(page), source, to]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@needs_compiler
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("adam", {"accumulate": 3}), *slow(("momentum", {}), ("adamw", {"arena_apart": False}), ("rmsprop", {}))],
)
def test_ten_steps_and_ten_more_are_twenty(optimizer: str, options: dict[str, Any], tmp_path: Path) -> None:
    built(tmp_path, OPTIMIZERS[optimizer], **options)
    ran(tmp_path, 20, "-", "twenty")
    ran(tmp_path, 10, "-", "ten")
    assert "saved 0" in ran(tmp_path, 10, "ten", "resumed")
    assert (tmp_path / "ten").read_bytes() != (tmp_path / "twenty").read_bytes()
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "twenty").read_bytes()


@pytest.mark.slow
@needs_compiler
def test_states_are_written_page_by_page(tmp_path: Path) -> None:
    built(tmp_path)
    for page in (16, 17, 64, 4096):  # a page may be larger than all of it
        ran(tmp_path, 3, "-", f"of_{page}", page)
    contents = {(tmp_path / f"of_{page}").read_bytes() for page in (16, 17, 64, 4096)}
    assert len(contents) == 1
    content = contents.pop()
    magic, number, length, crc = (content[:4], *np.frombuffer(content[4:16], "<u4").tolist())
    layout = json.loads((tmp_path / "net.json").read_text())
    assert (magic, number, length) == (b"MPS1", layout["layout"], len(content) - 16)
    assert zlib.crc32(content[16:]) == crc
    assert ran(tmp_path, 0, "of_64", "same") == "saved 0 step 3 changed 0", "every page is as it was"
    assert ran(tmp_path, 0, "of_64", "same", 15) == "refused 6 0", "a page has room for the header"


@needs_compiler
def test_what_is_no_state_of_this_export_is_refused(tmp_path: Path) -> None:
    built(tmp_path / "a")
    ran(tmp_path / "a", 5, "-", "state")
    whole = (tmp_path / "a" / "state").read_bytes()
    assert ran(tmp_path / "a", 0, "state", "same").startswith("saved 0")
    wrong: dict[str, tuple[bytes, int]] = {
        "empty": (b"", 6), "erased": (b"\xff" * len(whole), 3), "truncated": (whole[:-1], 6),
        "torn": (whole[:100] + b"\xff" * (len(whole) - 100), 5), "longer": (b"", 0),
    }  # fmt: skip
    for bit in (0, 37, 66, 101, 8 * 16, 8 * len(whole) // 2 + 3, 8 * len(whole) - 1):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        wrong[f"bit {bit}"] = (bytes(flipped), 3 if bit < 32 else 4 if bit < 96 else 5)
    wrong["longer"] = (whole + b"\xff" * 100, 0)
    for name, (content, status) in wrong.items():
        (tmp_path / "a" / "wrong").write_bytes(content)
        answer = ran(tmp_path / "a", 0, "wrong", "after")
        assert answer.startswith(f"refused {status} 0" if status else "saved 0"), name


@needs_compiler
def test_a_state_of_another_export_is_refused(tmp_path: Path) -> None:
    built(tmp_path / "a", OPTIMIZERS["rmsprop"])
    ran(tmp_path / "a", 5, "-", "state")
    state = (tmp_path / "a" / "state").read_bytes()
    others: dict[str, tuple[Any, dict[str, Any]]] = {
        "adam": (OPTIMIZERS["adam"], {}), "seed": (OPTIMIZERS["rmsprop"], {"seed": 1}),
        "rate": (lambda p: torch.optim.RMSprop(p, lr=0.5, momentum=0.5), {}),
    }  # fmt: skip
    answers = dict[str, str]()
    for name, (optimizer, options) in others.items():
        built(tmp_path / name, optimizer, **options)
        (tmp_path / name / "state").write_bytes(state)
        answers[name] = ran(tmp_path / name, 0, "state", "after")
    assert answers["adam"] == answers["seed"] == "refused 4 0", "the same sizes, other moments or frozen weights"
    assert answers["rate"].startswith("saved 0"), "the same model with another learning rate"


def step_of(model: Net, step: int) -> torch.Tensor:
    """The loss of the program's data at a step, without dropout."""
    x = [((i * 7 + step * 5) % 11) / 11.0 - 0.4 for i in range(24)]
    model.drop.p = 0.0
    return F.cross_entropy(model(torch.tensor(x).reshape(2, 12)), torch.tensor([step % 3, 1]))


@needs_compiler
@pytest.mark.parametrize("name", ["adamw", "adagrad", *slow("sgd", "momentum", "adam", "rmsprop")])
def test_training_goes_on_in_pytorch(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: x)
    built(tmp_path, OPTIMIZERS[name])
    ran(tmp_path, 10, "-", "ten")
    ran(tmp_path, 15, "-", "fifteen")
    model = Net()
    with torch.no_grad():
        torch.manual_seed(0)
        model.frozen.load_state_dict(Net().frozen.state_dict())
    optimizer = OPTIMIZERS[name]([one for one in model.parameters() if one.requires_grad])
    assert memplan.load_weights(model, tmp_path / "ten", optimizer=optimizer) is model
    assert optimizer.param_groups[0]["lr"] == OPTIMIZERS[name](model.parameters()).param_groups[0]["lr"] / 2
    for step in range(10, 15):
        optimizer.zero_grad()
        step_of(model, step).backward()
        optimizer.step()
    after = memplan.load_weights(Net(), tmp_path / "fifteen")
    for (path, ours), (_, device) in zip(model.named_parameters(), after.named_parameters(), strict=True):
        if ours.requires_grad:
            assert torch.allclose(ours, device, rtol=1e-5, atol=2e-6), path


@needs_compiler
def test_gradients_and_rates_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    model.norm.requires_grad_(False)
    memplan.export(
        model, "2x12", targets="2:int64<3", loss=F.cross_entropy, optimizer=lambda _: two_rates(model), accumulate=4,
        budget="64 KiB", folder=tmp_path, name="net", verify=False,
    )  # fmt: skip
    (tmp_path / "main.c").write_text(PROGRAM.replace("state.rate = 0.5f;", "state.rates[1] = 3;"))
    subprocess.run(["gcc", *FLAGS, "main.c", "net.c", "-lm", "-o", "main"], cwd=tmp_path, check=True)
    ran(tmp_path, 6, "-", "state")
    loaded = Net()
    optimizer = two_rates(loaded)
    memplan.load_weights(loaded, tmp_path / "state", optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.3])
    assert loaded.head.weight.grad is not None
    assert loaded.head.weight.grad.any()
    assert loaded.frozen.weight.grad is None
    one_group = torch.optim.SGD([*loaded.hidden.parameters(), *loaded.head.parameters()], lr=0.1, momentum=0.9)
    with pytest.raises(InputError, match="another learning rate"):
        memplan.load_weights(loaded, tmp_path / "state", optimizer=one_group)


@needs_compiler
def test_states_that_do_not_match_change_nothing_in_pytorch(tmp_path: Path) -> None:
    model = built(tmp_path)
    ran(tmp_path, 5, "-", "state")
    whole = (tmp_path / "state").read_bytes()
    parameters = [one for one in model.parameters() if one.requires_grad]
    optimizer = OPTIMIZERS["adam"](parameters)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    flipped = bytearray(whole)
    flipped[50] ^= 1
    layout = json.loads((tmp_path / "net.json").read_text())
    floats = sum(int(np.prod(tensor["shape"])) for tensor in layout["tensors"])
    cases: list[tuple[bytes, Any, str]] = [
        (bytes(flipped), optimizer, "is damaged"), (whole[:-4], optimizer, "holds .* bytes of"),
        (whole[:4] + b"abcd" + whole[8:], optimizer, "the state of another export"),
        (whole, OPTIMIZERS["rmsprop"](parameters), "The optimizer is RMSprop"),
        (whole, OPTIMIZERS["adamw"](parameters), "max_exp_avg_sq"),
        (whole, OPTIMIZERS["adam"](parameters[:2]), "is not in the optimizer"),
        (whole, torch.optim.NAdam(parameters), "The optimizer is NAdam"),
        (np.zeros(floats, "<f4").tobytes(), optimizer, "holds weights alone"),
    ]  # fmt: skip
    for content, given, message in cases:
        (tmp_path / "wrong").write_bytes(content)
        with pytest.raises(InputError, match=message):
            memplan.load_weights(model, tmp_path / "wrong", optimizer=given)
        assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
        assert not given.state_dict()["state"]
    (tmp_path / "padded").write_bytes(whole + b"\xff" * 64)
    memplan.load_weights(model, tmp_path / "padded", optimizer=optimizer)
    assert not torch.equal(model.head.weight, before["head.weight"])
    assert optimizer.state[model.head.weight]["step"] == 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda it: it["state"].pop(), lambda it: it["state"].pop(0), lambda it: it.update(optimizer="adagrad"),
        lambda it: it["state"][0].update(count=3), lambda it: it["state"].append({"name": "rate", "count": 1}),
        lambda it: it.update(rates=[]), lambda it: it["tensors"][0].update(group=1),
        lambda it: it["tensors"].reverse(), lambda it: it["state"][1].update(count=1 << 62),
    ],
)  # fmt: skip
def test_a_layout_with_another_state_is_refused(damage: Any, tmp_path: Path) -> None:
    model = exported(tmp_path)
    layout = json.loads((tmp_path / "net.json").read_text())
    damage(layout)
    (tmp_path / "net.json").write_text(json.dumps(layout))
    content = b"MPS1" + np.array([layout["layout"], 0, 0], "<u4").tobytes() + bytes(4000)
    (tmp_path / "state").write_bytes(content)
    with pytest.raises(InputError) as raised:
        memplan.load_weights(model, tmp_path / "state", tmp_path / "net.json")
    assert len(str(raised.value).splitlines()) == 1
