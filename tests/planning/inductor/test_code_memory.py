"""What Inductor's code takes on a card: code that Triton's backend wrote, followed without a card or Triton."""

from __future__ import annotations

import itertools
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.runtime.runtime_utils as utils
from torch import Tensor

import memplan
from memplan._torch import inductor, scheduled

CODES = sorted((Path(__file__).parent / "triton_code").glob("*.txt"))
"""As versions of torch wrote it for the same two functions, without the kernels' sources."""
ROWS, WIDTH = 32768, 768
GIVEN: dict[str, dict[str, tuple[int, ...]]] = {
    "forward": {
        "a_1": (64, 64), "w_1": (64, 64), "big_1": (64, 300_000), "im_1": (2, 3, 32, 32), "k_1": (8, 3, 3, 3),
    },
    "backward": {
        "x_1": (ROWS, WIDTH), "g_1": (ROWS, WIDTH), "w_1": (WIDTH,), "mean_1": (ROWS, 1), "rstd_1": (ROWS, 1),
        "q_1": (2, 4, 128, 64), "im_1": (2, 8, 32, 32), "k_1": (16, 8, 3, 3), "gi_1": (2, 16, 32, 32),
    },
}  # fmt: skip
BYTES = {"float32": 4, "bool": 1}
# Results of torch's calls, which the code does not say, in bytes.
MADE = {
    "native_dropout": [64 * 64 * 4, 64 * 64],
    "convolution": [2 * 8 * 32 * 32 * 4],
    "rand": [ROWS * 4],
    "convolution_backward": [2 * 8 * 32 * 32 * 4, 16 * 8 * 9 * 4],
    # what comes of it, the sums' logarithms of rows, and the state of random numbers, which is in host memory
    "_scaled_dot_product_efficient_attention": [2 * 4 * 128 * 64 * 4, 2 * 4 * 128 * 4],
}


class Part:
    """As `inductor.Lowerable`, as far as following the code asks for it."""

    graph: Any = None


class Text:
    """The code, read line by line: what its lines say is made, handed on and freed."""

    def __init__(self, text: str, given: dict[str, tuple[int, ...]]) -> None:
        self.names: dict[str, list[int]] = {name: [number] for number, name in enumerate(given)}
        self.sizes = [4 * prod(size) for size in given.values()]
        self.most = self.level
        for line in text[text.index("def call(self, args):") : text.index("return (")].splitlines():
            self.line(line.strip())
            self.most = max(self.most, self.level)

    @property
    def level(self) -> int:
        """Of memory that a name refers to, each once."""
        return sum(self.sizes[number] for number in {one for many in self.names.values() for one in many})

    def line(self, line: str) -> None:
        """Follow one."""
        name, _, value = line.partition(" = ")
        if made := re.match(r"empty_strided_cuda\(\((.*?)\), \(.*?\), torch\.(\w+)\)", value):
            self.made(name, prod(int(one) for one in made[1].split(",") if one.strip()) * BYTES[made[2]])
        elif re.match(r"workspace_\d+\[.*\.sum\(dim=0\)", value):
            self.made(name, WIDTH * 4)
        elif called := re.match(r"(?:torch\.ops\.aten|extern_kernels)\.(\w+)", value):
            self.made(name, *MADE[called[1]])
        elif part := re.match(r"(buf\d+)\[(\d+)\]$", value):
            self.names[name] = [self.names[part[1]][int(part[2])]]
        elif other := re.match(r"(buf\d+)(; del buf\d+)?$", value):
            self.names[name] = self.names[other[1]]
            if other[2]:
                del self.names[other[1]]
        elif freed := re.match(r"del (\w+)", line):
            del self.names[freed[1]]

    def made(self, name: str, *sizes: int) -> None:
        """A name of something new."""
        self.names[name] = [len(self.sizes) + at for at in range(len(sizes))]
        self.sizes += sizes


def most(trace: memplan.Trace) -> int:
    """Bytes at once, as asked for; what kernels and libraries hold besides is not said in the code."""
    changes = list[tuple[int, int]]()
    for one in trace.storages:
        if one.cause not in ("workspace", "temporary"):
            changes.append((one.born, one.bytes))
            changes += [] if one.died is None else [(one.died, -one.bytes)]
    return max(itertools.accumulate(size for _, size in sorted(changes)))


@pytest.mark.parametrize("path", CODES, ids=lambda path: path.stem)
def test_code_for_a_card_is_followed_to_the_byte(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, sizes = path.read_text(encoding="utf-8"), GIVEN[path.stem.partition("_")[0]]
    installed = tuple(map(int, torch.__version__.split(".")[:2]))
    if installed < (2, 13) and tuple(map(int, path.stem.split("_")[2:])) > installed:
        pytest.skip("newer code imports what this torch has not")
    guards: Any = getattr(torch._C, "_dynamo").guards  # noqa: B009
    for owner, name in ((utils, "assert_tensor_metadata"), (guards, "assert_size_stride_grouped")):
        if not hasattr(owner, name):  # newer than this torch
            monkeypatch.setattr(owner, name, None, raising=False)
    function = inductor.without_kernels(Part(), text)  # pyright: ignore[reportArgumentType]
    order = re.findall(r"\n +([\w, ]+) = args\n", text)[0].split(", ")

    def build() -> Any:
        def step() -> None:
            given: list[Tensor] = [torch.empty(sizes[name], device="cuda") for name in order]
            with torch.no_grad():
                assert len(function(given)) == len(re.findall(r"buf", text.split("return (")[1].splitlines()[0]))

        return step

    trace = memplan.record(build, device="rtx4090", steps=1)
    assert most(trace) == Text(text, sizes).most


def test_what_torch_adds_up_after_a_kernel_counts() -> None:
    class Partial:
        reduction_type = "sum"

    class Kernel:
        saved_partial_accumulate = (Partial(), Partial())
        numels = {"x": 32768, "r0_": 768}  # noqa: RUF012
        rsplit_size = 32

    record = scheduled.Record()
    record.sums_up(Kernel())
    # 1024 parts of 768 elements are written by the kernel, read again, and added up
    each = scheduled.Kernel("aten.sum.dim_IntList", False, 4 * (1024 * 768 + 1024 * 768 + 768), ())
    assert record.kernels == (each, each)
