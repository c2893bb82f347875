"""NAME.md: its example compiles as it stands, in C and in C++, and computes what PyTorch does."""

from __future__ import annotations

import re
import shutil
import subprocess
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

STRICT = ("-Wall", "-Wextra", "-Werror", "-pedantic")


def sensor() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 4))


def words() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 6), nn.Flatten(), nn.Linear(18, 4))


CASES: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
    "floats": (sensor, "1x3x8", {}),
    "bytes in the arena": (sensor, "1x3x8:uint8<256", {"normalize": (10, 20), "input_in_arena": True}),
    "words": (words, "1x3:int64<50", {"accumulate": 2}),
    "a file of weights": (sensor, "1x3x8", {"weights_file": True, "arena_apart": True}),
}


def exported(name: str, folder: Path) -> nn.Module:
    make, inputs, options = CASES[name]
    model = make()
    memplan.export(
        model, inputs, targets="1:int64<4", loss=F.cross_entropy, optimizer="sgd:lr=0.1", folder=folder, name="net",
        verify=False, **options,
    )  # fmt: skip
    return model


def example(folder: Path) -> str:
    found = re.search(r"^```c\n(.*?)^```$", (folder / "net.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def losses(name: str, model: nn.Module) -> list[float]:
    """Twenty steps of PyTorch by the example's data, which are zeros."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
    x = torch.zeros(1, 3, dtype=torch.int64) if name == "words" else torch.zeros(1, 3, 8)
    mean, deviation = CASES[name][2].get("normalize", (0, 1))
    for step in range(1, 21):
        loss = F.cross_entropy(model(x if name == "words" else (x - mean) / deviation), torch.tensor([0]))
        loss.backward()
        found.append(loss.item())
        if step % CASES[name][2].get("accumulate", 1) == 0:
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("compiler", ["cc -std=c99", *slow("c++ -x c++")])
@pytest.mark.parametrize("name", CASES)
def test_the_example_is_a_program(name: str, compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler.split()[0]) is None:
        pytest.skip(f"no {compiler}")
    model = exported(name, tmp_path)
    (tmp_path / "main.c").write_text(example(tmp_path))
    sources = ["main.c", "net.c"]
    if CASES[name][2].get("weights_file"):
        numbers = np.fromfile(tmp_path / "net.bin", np.float32)
        (tmp_path / "bin.c").write_text(
            f"extern const float net_bin[];\nconst float net_bin[] = {{{', '.join(f'{x:.9e}f' for x in numbers)}}};\n"
        )
        sources.append("bin.c")
    subprocess.run([*compiler.split(), *STRICT, *sources, "-lm", "-o", "main"], cwd=tmp_path, check=True)
    printed = subprocess.run(["./main"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()
    expected = losses(name, model)
    assert len(printed) == len(expected) + 1, "losses, and an output"
    assert np.allclose([float(text) for text in printed[:-1]], expected, atol=2e-5)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("flags", ["-O0", *slow("-O2")])
def test_the_example_says_why_a_loss_is_no_number(flags: str, tmp_path: Path) -> None:
    """An element that is no number, a label out of range, an input that overflows; then the steps of PyTorch."""
    model: Any = exported("floats", tmp_path)
    signs = model[0].weight[0].sign().repeat(1, 3)[:, :8].int()
    data = f"""\
        static const int signs[NET_X_ELEMENTS] = {{{", ".join(map(str, signs.flatten().tolist()))}}};
        for (int at = 0; at < NET_X_ELEMENTS; at++)
            x[at] = step == 2 ? 3e38f * (float)signs[at] : step == 0 && at == 5 ? NAN : 0.0f;
        y[0] = step == 1 ? 4 : 0;
"""
    text = re.sub(r"^ */\* write a sample to x and y here \*/\n", data, example(tmp_path), flags=re.MULTILINE)
    assert data in text
    header = (tmp_path / "net.h").read_text()
    codes = [re.search(rf"\bNET_{name}\b\D*(\d+)", header) for name in ("NOT_A_NUMBER", "BAD_INDEX")]
    (tmp_path / "main.c").write_text(f"#include <math.h>\n{text}")
    build = ["cc", "-std=c99", flags, *STRICT, "main.c", "net.c", "-lm", "-o", "main"]
    subprocess.run(build, cwd=tmp_path, check=True)
    lines = subprocess.run(["./main"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines[:2] == [f"refused: {code[1]}" for code in codes if code is not None]
    assert lines[2].startswith("not finite, no weight was updated: ")
    assert np.allclose([float(line) for line in lines[3:-1]], losses("floats", model)[:17], atol=2e-5)


def test_the_table_says_what_each_argument_holds(tmp_path: Path) -> None:
    exported("words", tmp_path)
    text = (tmp_path / "net.md").read_text()
    assert "| `x` | `const int32_t *` | 1x3 | NET_X_ELEMENTS | an index: 0 to 49 |" in text
    assert "| `y` | `const int32_t *` | 1 | NET_Y_ELEMENTS | an index: 0 to 3, or -100: left out |" in text
    header = (tmp_path / "net.h").read_text()
    assert re.search(r"^#define NET_X_ELEMENTS 3 ", header, re.MULTILINE)
    assert re.search(r"^#define NET_Y_ELEMENTS 1 ", header, re.MULTILINE)


def test_an_input_in_the_arena_is_in_the_text(tmp_path: Path) -> None:
    exported("bytes in the arena", tmp_path)
    text = (tmp_path / "net.md").read_text()
    assert "| `x` | `const uint8_t *` | 1x3x8 | NET_X_ELEMENTS | as recorded, not normalized |" in text
    assert "`x` lies in the arena, at `NET_X(&state)`" in text
    assert "its 24 bytes there are RAM besides" in text
    exported("floats", other := tmp_path / "other")
    assert "in the arena, at" not in (other / "net.md").read_text()
