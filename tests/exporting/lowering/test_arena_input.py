"""An input in the arena: the same step, in less RAM by what other buffers can use of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import slow
from torch import nn
from truth.c_program import array, printed_by

import memplan
from memplan.errors import InputError
from memplan.exporting.exported import Exported

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


class Two(nn.Module):
    """A picture, and a few numbers that are read late."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, 2, 1), nn.ReLU())
        self.body.requires_grad_(False)
        self.head = nn.Linear(6 + 3, 3)

    def forward(self, picture: torch.Tensor, few: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.body(picture).mean((2, 3)), few], 1))


def exported(folder: Path, first: str = "1x2x24x24", **options: Any) -> Exported:
    torch.manual_seed(0)
    step: dict[str, Any] = {"targets": "1:int64<3", "loss": "cross_entropy", "optimizer": "sgd:lr=0.05", "name": "net"}
    return memplan.export(Two(), first, "1x3", folder=folder, budget="1 MiB", **step | options)


PROGRAM = """
#include "net.h"
#include <stdio.h>
#include <string.h>
static net_state s;
{data}
int main(void)
{{
    float output[NET_OUTPUTS], weights[NET_WEIGHTS];
    const float few[3] = {{1, -2, 3}};
    const int32_t y = 2;
    net_init(&s);
    for (int k = 0; k < 3; k++) {{
        {place}
        printf("%.9g\\n", (double)net_step(&s, {given}, few, &y));
        {place}
        net_infer(&s, {given}, output);
        {place}
        printf("%.9g %.9g\\n", (double)output[k], (double)net_evaluate(&s, {given}, few, &y, 0));
    }}
    net_get_weights(&s, weights);
    for (int k = 0; k < NET_WEIGHTS; k++)
        printf("%.9g\\n", (double)weights[k]);
    {last}
    return 0;
}}
"""


@needs_compiler
@pytest.mark.parametrize("apart", [False, *slow(True)])
def test_steps_are_the_same_and_ram_is_less(apart: bool, tmp_path: Path) -> None:
    plain = exported(tmp_path / "a", verify=False)
    done = exported(tmp_path / "b", input_in_arena=True, arena_apart=apart)
    assert done.verdict.proven
    picture = 4 * 2 * 24 * 24
    assert (plain.in_arena, done.in_arena) == (None, ("x0", picture))
    assert json.loads(done.to_json())["in_arena"] == {"name": "x0", "bytes": picture}
    assert "x0, in the arena" in str(done)
    assert f"its {picture} bytes there are RAM besides" in " ".join((tmp_path / "b" / "net.h").read_text().split())
    program = (tmp_path / "b" / "test_net.c").read_text()
    assert program.count("x0 = NET_X0(&memory.state);") == 1, "the proof runs that path"
    assert "static float *x0;" in program
    assert "NET_X0" not in (tmp_path / "a" / "test_net.c").read_text()
    assert plain.inputs == picture + 3 * 4 + 4
    assert done.inputs == 3 * 4 + 4
    first, second = 4 * 4 * 12 * 12, 4 * 6 * 6 * 6
    assert done.arena <= picture + first + 8, "the first convolution reads one and makes the other; the loss is live"
    assert done.ram < plain.ram - second + 8
    data = array("given", torch.randn(2 * 24 * 24, generator=torch.Generator().manual_seed(1)))
    program = PROGRAM.replace("net_infer(&s, {given}", "net_infer(&s, {given}, few")
    elsewhere = printed_by(tmp_path / "a", program.format(data=data, place="", given="given", last=""))
    place, last = "memcpy(NET_X0(&s), given, sizeof given);", ""
    if not apart:
        last = 'printf("%zu\\n", sizeof s);'
    else:
        data += "\nstatic float arena[NET_ARENA_BYTES / 4];"
        program = program.replace("net_init(&s)", "net_init(&s, arena)")
    within = printed_by(tmp_path / "b", program.format(data=data, place=place, given="NET_X0(&s)", last=last))
    lines = within.split()
    if not apart:
        assert int(lines.pop()) == done.arena + done.state, "as the compiler counts it"
    assert lines == elsewhere.split(), "bit for bit"


@pytest.mark.slow
@needs_compiler
def test_bytes_lie_in_the_arena_too(tmp_path: Path) -> None:
    """A gradient of the first layer reads them at the end of the step: they stay there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    options: dict[str, Any] = {"targets": "1:int64<3", "loss": "cross_entropy", "optimizer": "sgd:lr=0.05"}
    done = memplan.export(
        model, "1x2x9x9:uint8<256", normalize=(100.0, 50.0), input_in_arena=True, budget="1 MiB", folder=tmp_path,
        name="net", **options,
    )  # fmt: skip
    assert done.verdict.proven
    assert done.byte_inputs == (("x", False),)
    assert "#define NET_X(s) ((uint8_t *)((s)->arena + " in (tmp_path / "net.h").read_text()
    assert done.inputs == 4
    assert done.arena >= 2 * 9 * 9


def test_an_input_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3)

        def forward(self, large: torch.Tensor, few: torch.Tensor) -> torch.Tensor:
            return self.head(few)

    with pytest.raises(InputError, match="no op of the step reads the largest input"):
        memplan.export(
            Small(), "1x90", "1x3", targets="1:int64<3", loss="cross_entropy", optimizer="sgd", folder=tmp_path,
            verify=False, input_in_arena=True,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_long_integers_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(InputError, match="integers of more than eight bits"):
        memplan.export(
            model, "1x3:int64<9", targets="1:int64<3", loss="cross_entropy", optimizer="sgd", folder=tmp_path,
            verify=False, input_in_arena=True,
        )  # fmt: skip
