"""Names of any text as C: what a compiler reads is a name, a comment, a string, and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from environment import slow
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import memplan
from memplan.errors import InputError
from memplan.exporting.c_text import c_name, comment, string_literal

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
STRICT = ("cc", "-std=c99", "-Wall", "-Wextra", "-Werror")
PARTS = ("*/", "/*", "//", "??/", "\\", "\n", "\r", '"', "'", "#define int", "*", "/", "\u202e", "\x00", "体", "int x;")
texts = st.lists(st.sampled_from(PARTS) | st.text(max_size=6), max_size=8).map("".join)
MARKER = "int marker_{} = {};"


def compiled(folder: Path, text: str) -> str:
    """The program's output, after it compiled without a warning."""
    source, program = folder / "a.c", folder / "a"
    source.write_text(text, encoding="utf-8")
    subprocess.run([*STRICT, str(source), "-o", str(program)], check=True, capture_output=True)
    return subprocess.run([str(program)], check=True, capture_output=True).stdout.decode("latin-1")


@needs_compiler
def test_comments_hold_no_code_and_hide_none(tmp_path: Path) -> None:
    """A definition behind each comment: the sum is right only if each of them is read, and nothing besides compiles."""
    found = list[str]()

    @settings(max_examples=400, deadline=None)
    @given(texts)
    @example("x??/")
    @example("a\\")
    @example("*/ int system(const char *); /*")
    def collect(text: str) -> None:
        found.append(text)

    collect()
    lines = [f"{comment(text)}\n{MARKER.format(k, k)}" for k, text in enumerate(found)]
    total = " + ".join(f"marker_{k}" for k in range(len(found)))
    program = "#include <stdio.h>\n" + "\n".join(lines) + f'\nint main(void) {{ printf("%d", {total}); return 0; }}\n'
    assert compiled(tmp_path, program) == str(sum(range(len(found))))
    without = re.sub(r"/\*.*?\*/", "", program, flags=re.DOTALL)
    assert len(re.findall(r"marker_\d+ =", without)) == len(found)


@given(texts)
def test_names_are_identifiers_and_lead_to_no_other_folder(text: str) -> None:
    name = c_name(text)
    assert re.fullmatch(r"[a-z][a-z0-9_]{0,43}", name)
    assert Path("folder", f"{name}.c").parent == Path("folder")
    assert f"{name}.h" not in {"math.h", "stdint.h", "stdio.h", "string.h"}
    assert c_name(name) == name


@pytest.mark.parametrize("text", ["math", "STDINT", "../stdio", "aux", "while", "a" * 5000, "", "体"])
def test_names_that_mean_something_else_are_changed(text: str) -> None:
    assert c_name(text) != text
    assert c_name(text).startswith(("net", "aaa"))


@needs_compiler
def test_strings_are_the_path(tmp_path: Path) -> None:
    paths = ['/tmp/a"; system("id"); "b', "a\\nb%s", "é??/", "\t\n", "7\x017"]
    prints = "".join(f"fputs({string_literal(path)}, stdout);" for path in paths)
    found = compiled(tmp_path, f"#include <stdio.h>\nint main(void) {{ {prints} return 0; }}\n")
    assert found == "".join(paths).encode().decode("latin-1")


def hostile(name: str) -> nn.Module:
    model = nn.Sequential()
    model.add_module(name, nn.Linear(8, 8, bias=False))
    model.add_module("activation", nn.ReLU())
    model.add_module("last", nn.Linear(8, 4))
    return model


@needs_compiler
@pytest.mark.parametrize(
    "name",
    [
        '*/ __attribute__((constructor)) void e(void){}//"\n#error no\n',
        *slow("y??/\n", "a*/ ; int more(void); /*"),
    ],
)
def test_a_layer_of_any_name_is_exported(name: str, tmp_path: Path) -> None:
    """Also into a folder whose path is no C, as the test program reads it."""
    torch.manual_seed(0)
    model = hostile(name)
    done = memplan.export(
        model, "2x8", targets="2:int64<4", loss="cross_entropy", optimizer="adam", folder=tmp_path / 'a"b\\ c',
        name="../" + name, weights_file=True,
    )  # fmt: skip
    assert done.verdict.proven
    assert {path.parent for path in tmp_path.rglob("*") if path.is_file()} == {tmp_path / 'a"b\\ c'}
    floats = torch.arange(done.trained, dtype=torch.float32)
    weights = tmp_path / "weights.bin"
    weights.write_bytes(floats.numpy().tobytes())
    memplan.load_weights(model, weights, done.folder / f"{done.name}.json")
    assert torch.equal(torch.cat([one.detach().reshape(-1) for one in model.parameters()]), floats)


def test_a_name_of_the_model_that_is_one_of_the_loss_is_refused(tmp_path: Path) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (output * self.weight - target).square().mean()

    model = nn.Sequential()
    model.add_module("(loss)", nn.Linear(8, 4))
    with pytest.raises(InputError, match="named as one of the loss"):
        memplan.export(model, "2x8", targets="2x4", loss=Loss(), optimizer="sgd", folder=tmp_path, verify=False)
