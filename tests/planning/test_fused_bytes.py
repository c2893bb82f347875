"""What Inductor's code takes on a card: code that Triton's backend wrote, followed without a card or Triton."""

from __future__ import annotations

import itertools
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import memplan
from memplan._torch import inductor

CODES = sorted((Path(__file__).parent / "triton_code").glob("*.txt"))
"""As versions of torch wrote it for the same function, without the kernels' sources."""
SIZES = {"a_1": (64, 64), "w_1": (64, 64), "big_1": (64, 300_000), "im_1": (2, 3, 32, 32), "k_1": (8, 3, 3, 3)}
BYTES = {"float32": 4, "bool": 1}
# What calls of torch's make that is not said in the code.
MADE = {"native_dropout": 64 * 64 * (4 + 1), "convolution": 2 * 8 * 32 * 32 * 4}


class Part:
    """As `inductor.Lowerable`, as far as following the code asks for it."""

    graph: Any = None


def peak_by_the_text(text: str) -> int:
    """The most that is there at once, of what the code's lines say is made, handed on and freed."""
    call = text[text.index("def call(self, args):") : text.index("return (")]
    sizes = {name: 4 * prod(size) for name, size in SIZES.items()}
    level = most = sum(sizes.values())
    for line in call.splitlines():
        made = re.match(r"\s+(buf\d+) = empty_strided_cuda\(\((.*?)\), \(.*?\), torch\.(\w+)\)", line)
        handed = re.match(r"\s+(buf\d+) = (buf\d+); del buf\d+", line)
        called = re.match(r"\s+(buf\d+) = (?:torch\.ops\.aten|extern_kernels)\.(\w+)", line)
        taken = re.match(r"\s+(buf\d+) = (buf\d+)\[0\]", line)
        freed = re.match(r"\s+del (\w+)", line)
        if made:
            shape = [int(one) for one in made[2].split(",") if one.strip()]
            sizes[made[1]] = prod(shape) * BYTES[made[3]]
            level += sizes[made[1]]
        elif handed:
            sizes[handed[1]] = sizes.pop(handed[2])
        elif called:
            sizes[called[1]] = MADE[called[2]]
            level += sizes[called[1]]
        elif taken:  # the mask is dropped with the rest
            sizes[taken[1]] = 64 * 64 * 4
            sizes[taken[2]] -= sizes[taken[1]]
        elif freed:
            level -= sizes.pop(freed[1])
        most = max(most, level)
    return most


def most(trace: memplan.Trace) -> int:
    """Bytes at once, as asked for; workspaces of libraries are not said in the code."""
    changes = list[tuple[int, int]]()
    for one in trace.storages:
        if one.cause != "workspace":
            changes.append((one.born, one.bytes))
            changes += [] if one.died is None else [(one.died, -one.bytes)]
    return max(itertools.accumulate(size for _, size in sorted(changes)))


@pytest.mark.parametrize("path", CODES, ids=lambda path: path.stem)
def test_code_for_a_card_is_followed_to_the_byte(path: Path) -> None:
    if not torch.__version__.startswith(path.stem.removeprefix("torch_").replace("_", ".") + "."):
        pytest.skip(f"the code imports what {path.stem} has")
    text = path.read_text(encoding="utf-8")
    function = inductor.without_kernels(Part(), text)  # pyright: ignore[reportArgumentType]
    order = re.findall(r"\n +([\w, ]+) = args\n", text)[0].split(", ")

    def build() -> Any:
        def step() -> None:
            given: list[Tensor] = [torch.empty(SIZES[name], device="cuda") for name in order]
            with torch.no_grad():
                assert len(function(given)) == len(re.findall(r"buf", text.split("return (")[1].splitlines()[0]))

        return step

    trace = memplan.record(build, device="rtx4090", steps=1)
    assert most(trace) == peak_by_the_text(text)
