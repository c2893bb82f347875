"""Peaks of `torch.cuda.max_memory_allocated` that others measured and published, as plain data. In MiB.

Liger-Kernel's benchmark files give, for each kernel of theirs, what the same step takes in plain PyTorch: those rows
are here. Each is the median of ten steps in a row, the peak reset before each, gradients held from the second on
(`benchmark/scripts/utils.py` there). Figures pass through float32, so from 16 GiB on they are rounded to 1 KiB or more.
The files name no release of torch; by their dates it is 2.4 to 2.12.

Rows left out, and why: those whose process held an unknown amount from earlier runs (`rope` and `rms_norm` of January
2025, `distill_jsd_loss`), `softmax` (0.09 MiB, less than its operand), and steps with convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Measure = Literal["peak", "growth", "left"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where figures were published: a repository, a file or thread of it, and the commit it was read at."""

    repository: str
    where: str
    commit: str = ""

    @property
    def address(self) -> str:
        kind = f"blob/{self.commit}/{self.where}" if self.commit else self.where
        return f"https://github.com/{self.repository}/{kind}"


LIGER = Source(
    "linkedin/Liger-Kernel", "benchmark/data/all_benchmark_data.csv", "0400d313579a7609c5a531c948c1546370a3aa0a"
)
LIGER_H100 = Source(
    "linkedin/Liger-Kernel", "benchmark/data/h100_all_benchmark_data.csv", "3534d4461ca89319e29c890c1a4c20cb2a615d5f"
)
CUT_CROSS_ENTROPY = Source("apple/ml-cross-entropy", "README.md", "18e76ada05706ad9bc672804a35a940a07a21a13")
LINEAR_LEAK = Source("pytorch/pytorch", "issues/95668")


@dataclass(frozen=True, slots=True)
class Series:
    """One step at several sizes.

    ``step`` names a function of `published_steps`, ``axis`` its argument that varies, ``fixed`` the others.
    ``measure``: the peak of the last step; its growth over what is allocated when it begins; or what is left at the
    end. ``held``: MiB that earlier runs of the process left allocated, taken off each figure; ``note`` says how that
    is known. ``increase``: what earlier runs left is not known, but constant: the growth over the first size counts.
    """

    step: str
    axis: str
    figures: Mapping[Any, float]
    card: str
    gpu: str
    source: Source
    date: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    measure: Measure = "peak"
    held: float = 0.0
    increase: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure: the step that it is of, and what has to be taken off to compare."""

    series: Series
    size: Any

    @property
    def name(self) -> str:
        fixed = "".join(f" {key} {value}" for key, value in self.series.fixed.items())
        first = f"{next(iter(self.series.figures))} to " if self.series.increase else ""
        return f"{self.series.step}{fixed} {self.series.axis} {first}{self.size}"

    @property
    def published(self) -> float:
        """MiB to compare with: as published, less what is not of this step."""
        figures = self.series.figures
        return figures[self.size] - (next(iter(figures.values())) if self.series.increase else self.series.held)

    def arguments(self, size: Any) -> dict[str, Any]:
        return {**self.series.fixed, self.series.axis: size}


_A100 = "NVIDIA A100-SXM4-80GB"
_H100 = "NVIDIA H100 80GB HBM3"
_PCIE = "NVIDIA H100 PCIe"
_NVL = "NVIDIA H100 NVL"
_ROPE = "the rotary embedding's product takes one cuBLAS workspace"
_TWO_HEADS = "their own head's weight is on the card too"
_COMPILED = "three times the weights of 1024 to 131072 rows of 4096: torch.compile kept the embeddings of earlier runs"
_COMPILED_MORE = f"{_COMPILED}; and twice those of 768"
_HELD = "the process held more from earlier runs, as much at every size"

SERIES: tuple[Series, ...] = (
    Series(
        "cross_entropy", "vocabulary", date="2024-09-03", card="a100", gpu=_A100, source=LIGER,
        figures={4096: 1280.1259765625, 8192: 2560.1259765625, 16384: 5120.1259765625, 32768: 10240.1259765625,
                 65536: 20480.125, 131072: 40960.125},
    ),
    Series(
        "cross_entropy", "vocabulary", date="2025-01-25", card="h100", gpu=_NVL, source=LIGER_H100,
        figures={4096: 1280.1259765625, 131072: 40960.125},
    ),
    Series(
        "cross_entropy_in_float32", "vocabulary", date="2026-06-10", card="h100", gpu=_H100, source=LIGER,
        figures={4096: 512.0947265625, 8192: 1024.0947265625, 16384: 2048.0947265625, 32768: 4096.0947265625,
                 65536: 8192.0947265625, 131072: 16384.09375},
    ),
    Series(
        "gated_mlp", "tokens", fixed={"batch": 4, "activation": "silu"}, date="2024-09-03", card="a100", gpu=_A100,
        source=LIGER, figures={1024: 1294.25, 2048: 1992.25, 4096: 3452.25, 8192: 6372.25},
    ),
    Series(
        "gated_mlp", "tokens", fixed={"batch": 4, "activation": "silu"}, date="2025-01-25", card="h100", gpu=_NVL,
        source=LIGER_H100, figures={1024: 1342.0, 2048: 2040.0, 4096: 3500.0, 8192: 6420.0},
    ),
    Series(
        "gated_mlp", "tokens", fixed={"batch": 8, "activation": "gelu"}, date="2025-01-25", card="h100", gpu=_NVL,
        source=LIGER_H100, figures={1024: 2040.0, 2048: 3500.0, 4096: 6420.0, 8192: 12260.0},
    ),
    Series(
        "rms_norm", "width", date="2024-09-03", card="a100", gpu=_A100, source=LIGER, note=_TWO_HEADS,
        figures={1024: 80.01953125, 2048: 160.03125, 4096: 320.0546875, 8192: 640.1015625},
    ),
    Series(
        "layer_norm", "width", date="2024-09-03", card="a100", gpu=_A100, source=LIGER, note=_TWO_HEADS,
        figures={1024: 80.0625, 2048: 160.09375, 4096: 320.15625, 8192: 640.28125, 16384: 1280.53125},
    ),
    Series(
        "rope", "tokens", fixed={"width": 8192}, date="2024-09-03", card="a100", gpu=_A100, source=LIGER, note=_ROPE,
        figures={1024: 121.13330078125, 2048: 234.14111328125, 4096: 460.15673828125, 8192: 912.18798828125,
                 16384: 1816.25048828125},
    ),
    Series(
        "rope", "width", fixed={"tokens": 2048}, date="2024-09-03", card="a100", gpu=_A100, source=LIGER, note=_ROPE,
        figures={2048: 64.64111328125, 8192: 234.14111328125},
    ),
    Series(
        "embedding", "rows", fixed={"width": 768, "batch": 32, "tokens": 512}, date="2024-09-03", card="a100",
        gpu=_A100, source=LIGER, held=12240.0, note=_COMPILED,
        figures={1024: 12356.537109375, 2048: 12371.359375, 4096: 12401.40625, 8192: 12461.5, 16384: 12581.6875,
                 32768: 12773.6875, 65536: 13157.6875, 131072: 13925.6875},
    ),
    Series(
        "embedding", "rows", fixed={"width": 4096, "batch": 8, "tokens": 2048}, date="2024-09-03", card="a100",
        gpu=_A100, source=LIGER, held=13770.0, note=_COMPILED_MORE,
        figures={65536: 18660.482421875, 131072: 22756.482421875},
    ),
    Series(
        "kl_divergence", "vocabulary", date="2024-09-04", card="h100", gpu=_PCIE, source=LIGER,
        figures={4096: 1792.0, 8192: 3584.0, 16384: 7168.0, 32768: 14336.0, 65536: 28672.0, 131072: 57344.0},
    ),
    Series(
        "jensen_shannon", "vocabulary", date="2024-10-02", card="h100", gpu=_PCIE, source=LIGER,
        figures={4096: 1664.0009765625, 8192: 3328.0009765625, 16384: 6656.0009765625, 32768: 13312.0009765625,
                 65536: 26624.0, 131072: 53248.0},
    ),
    Series(
        "head_cross_entropy", "tokens", date="2024-11-22", card="a100", gpu=_A100, source=LIGER, note=_TWO_HEADS,
        figures={4096: 6092.2822265625, 8192: 9162.3134765625, 16384: 15302.3759765625, 32768: 27582.5},
    ),
    Series(
        "heads_jensen_shannon", "tokens", date="2024-10-09", card="h100", gpu=_H100, source=LIGER,
        note="larger runs had left larger blocks; a process of its own has 1 MiB a block that it cannot split off",
        figures={1024: 10609.005859375, 2048: 17146.009765625, 4096: 30220.017578125, 8192: 56368.015625},
    ),
    Series(
        "orpo_of_means", "batch", fixed={"tokens": 4096}, date="2024-11-13", card="a100", gpu=_A100, source=LIGER,
        increase=True, note=_HELD, figures={2: 12488.501953125, 4: 19630.564453125, 8: 33914.6875, 16: 62482.9375},
    ),
    Series(
        "orpo", "batch", fixed={"tokens": 1024}, date="2024-11-13", card="a100", gpu=_A100, source=LIGER,
        increase=True, note=f"{_HELD}; CPO and SimPO have the same figures",
        figures={2: 8645.314453125, 4: 12184.330078125, 8: 19262.361328125, 16: 33418.421875},
    ),
    Series(
        "kto", "batch", fixed={"tokens": 512}, date="2025-03-03", card="h100", gpu=_H100, source=LIGER,
        increase=True, note=_HELD,
        figures={2: 4341.74951171875, 4: 6099.26513671875, 8: 9613.298828125, 16: 16643.365234375,
                 32: 30703.498046875},
    ),
    Series(
        "banded_attention", "tokens", fixed={"batch": 2, "width": 512, "heads": 8, "band": 7}, date="2025-05-27",
        card="h100", gpu=_H100, source=LIGER, note=_TWO_HEADS,
        figures={64: 80.28125, 128: 84.5546875, 256: 101.0859375, 512: 158.2734375, 1024: 369.0234375,
                 2048: 1176.0234375, 4096: 4332.0234375},
    ),
    Series(
        "banded_attention", "tokens", fixed={"batch": 4, "width": 768, "heads": 12, "band": 7}, date="2025-05-27",
        card="h100", gpu=_H100, source=LIGER, note=_TWO_HEADS,
        figures={64: 103.0419921875, 128: 117.05078125, 256: 167.34765625, 512: 337.28515625, 1024: 968.03515625,
                 2048: 3383.03515625, 4096: 12827.03515625},
    ),
    Series(
        "banded_attention", "tokens", fixed={"batch": 2, "width": 1024, "heads": 16, "band": 9}, date="2025-05-27",
        card="h100", gpu=_H100, source=LIGER, note=_TWO_HEADS,
        figures={64: 122.5546875, 128: 130.06640625, 256: 162.109375, 512: 276.296875, 1024: 697.046875,
                 2048: 2308.046875, 4096: 8608.046875},
    ),
    Series(
        "sparsemax", "width", date="2025-04-28", card="rtx3090", gpu="NVIDIA GeForce RTX 3090", source=LIGER,
        figures={1024: 82.03515625, 2048: 164.0390625, 4096: 328.046875, 8192: 704.00048828125,
                 16384: 1408.00048828125, 32768: 2816.00048828125},
    ),
    Series(
        "capped_head", "backward", date="2024-11", card="a100", gpu="A100 SXM4, torch 2.4.1", source=CUT_CROSS_ENTROPY,
        measure="growth", figures={False: 24000.0, True: 28000.0},
        note="published to 0.1 MiB; the benchmark's code was not at hand: Gemma 2's head, soft cap 30, in float32",
    ),
    Series(
        "one_linear", "width", date="2023-02-28", card="a10", gpu="NVIDIA A10G, torch 2.0", source=LINEAR_LEAK,
        measure="left", figures={1: 8519680 / 2**20}, note="8,519,680 bytes are left: one cuBLAS workspace",
    ),
)  # fmt: skip

_BLOCKS = (
    "by the remainders of blocks above 1 MiB: the tensors are 116.551 MiB, the published figure has 0.5 more, the "
    "prediction for a process of its own 1.75; it depends on the blocks that earlier runs had cached"
)

KNOWN: Mapping[str, str] = {
    "banded_attention batch 4 width 768 heads 12 band 7 tokens 128": _BLOCKS,
}
"""Rows that are more than the limit off -> what memplan gets wrong there."""


def rows() -> list[Row]:
    """Every row that can be compared; of a series that compares growth all but the first."""
    return [
        Row(series, size)
        for series in SERIES
        for size in list(series.figures)[1 if series.increase else 0 :]
    ]  # fmt: skip
