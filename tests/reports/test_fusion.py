"""What fusion brings, on the terminal: it adds up, it fits, and names steer nothing."""

from __future__ import annotations

from dataclasses import replace

from reports.plans import PLAN, piped

from memplan.planning.plan.fusion import Fusion, Group
from memplan.reports.document import document
from memplan.reports.fusion import sections
from memplan.reports.terminal import text_of

MIB = 1 << 20
CONV = Group(
    "aten.convolution.default", False, "forward", ("aten.convolution.default",), ("conv1",), "net.py:3", 4 * MIB,
    160 * MIB, 40.0, "compute",
)  # fmt: skip
NORM = Group(
    "cpp_fused_native_batch_norm_relu_0", True, "forward", ("aten.native_batch_norm.default", "aten.relu.default"),
    ("norm1", "relu"), "net.py:4", 12 * MIB, 0, 0.0, "bandwidth",
)  # fmt: skip
SMALL = replace(NORM, kernel="cpp_fused_sum_1", phase="backward", layers=("last",), bytes=MIB)
PRODUCT = replace(
    CONV, kernel="aten.mm.out", layers=("last",), bytes=3 * MIB, flops=6 * MIB, intensity=2.0, bound="bandwidth"
)
GROUPS = (CONV, NORM, SMALL, PRODUCT)
FUSION = Fusion("cpu", 9, 4, 50 * MIB, 20 * MIB, GROUPS)


def drawn(fusion: Fusion, width: int = 80, top: int = 12, *, ascii_only: bool = False) -> str:
    return text_of(document(None, *sections(fusion, top)), width, ascii_only=ascii_only)


def test_the_whole_report() -> None:
    lines = drawn(FUSION, top=2).split("\n")
    assert [line.rstrip() for line in lines] == [
        "Fused kernels",
        "kernels 9 -> 4, bytes moved 50.0 MiB -> 20.0 MiB a step; 80 % of what is left is",
        "bound by bandwidth",
        "",
        "kernel                              layers          bytes  FLOP/byte  bound",
        "───────────────────────────────────────────────────────────────────────────────",
        "cpp_fused_native_batch_norm_relu_0  norm1, relu  12.0 MiB          -  bandwidth",
        "aten.convolution.default            conv1         4.0 MiB       40.0  compute",
        "... 2 more                                        4.0 MiB        1.5",
        "bytes: read and written by a kernel in a step. FLOP/byte: products and",
        "convolutions, as torch.utils.flop_counter counts them; pointwise arithmetic",
        "counts none. bound: what takes longer on a CPU of two cores.",
    ]


def test_it_is_a_part_of_the_plans_report_and_text() -> None:
    plan = replace(PLAN, fusion=FUSION)
    assert "Fused kernels" not in piped(PLAN)
    text = piped(plan)
    assert text.index("all 1") < text.index("Fused kernels") < text.index("note: no optimizer")
    assert "more" not in drawn(FUSION, top=0)


def test_a_step_that_calls_nothing() -> None:
    assert drawn(Fusion("cpu", 0, 0, 0, 0, ())).strip().endswith("0 B -> 0 B a step")
