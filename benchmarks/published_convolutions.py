"""Convolutions whose memory others printed or had refused, as data, and the steps that they are of.

Reports to PyTorch give the script and what it printed. What a script holds from its loop is held here, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Step = Callable[[], Any]
Measure = Literal["peak", "reserved", "built", "refused", "nvidia-smi"]
GIB, MIB, GB = 1 << 30, 1 << 20, 10**9


@dataclass(frozen=True, slots=True)
class Report:
    """A figure of a report, and the step that it is of.

    ``measure``: the most allocated or reserved in the step; what is allocated when the step begins; the request that
    was refused; or what ``nvidia-smi`` showed, the context with it. ``digits`` are the decimals that were printed.
    ``settings`` are the allocator's, ``note`` says what of torch's version is told apart, ``known`` why a figure is
    not met.
    """

    issue: int
    name: str
    figure: float
    unit: int
    digits: int
    measure: Measure
    build: Callable[[], Step]
    card: str = "a100-80gb"
    gpu: str = "NVIDIA A100 80GB"
    torch: str = "not said"
    settings: str = ""
    note: str = ""
    known: str = ""

    @property
    def source(self) -> str:
        """Where it was reported."""
        return f"https://github.com/pytorch/pytorch/issues/{self.issue}"

    def matches(self, found: int) -> bool:
        """Whether bytes are the figure to 512 bytes where all digits are given, else print as it does."""
        if self.digits >= 9:
            return abs(found - self.figure * self.unit) <= 512
        return f"{found / self.unit:.{self.digits}f}" == f"{self.figure:.{self.digits}f}"


def _layer(layer: nn.Module, data: torch.Tensor, *, cudnn: bool = True, autocast: bool = False) -> Step:
    def step() -> None:
        with (
            torch.no_grad(),
            torch.backends.cudnn.flags(enabled=cudnn),
            torch.autocast("cuda", torch.float16, enabled=autocast),
        ):
            layer(data)

    return step


def _zeros(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype, device="cuda")


def conv2d_in_a_loop(width: int) -> Step:
    """One turn of a loop over widths: the data of the turn before is let go of when the new one is there."""
    layer = nn.Conv2d(256, 256, 3, padding=1).half().cuda()
    kept = [_zeros(1, 256, 2048, width - 128, dtype=torch.half)] if width > 1024 else []
    torch.cuda.empty_cache()

    def step() -> None:
        kept[:] = [_zeros(1, 256, 2048, width, dtype=torch.half)]
        layer(kept[0])

    return step


def conv3d_361(depth: int = 361, *, cudnn: bool = True) -> Step:
    """In float16, 64 channels to 32."""
    layer = nn.Conv3d(64, 32, 3, padding=1).half().cuda()
    return _layer(layer, _zeros(1, 64, depth, 370, 251, dtype=torch.half), cudnn=cudnn)


def conv3d_depth(depth: int, *, cudnn: bool = True) -> Step:
    """In float32, 256 channels to 64; deterministic engines alone, as in the report."""
    torch.backends.cudnn.deterministic = True
    return _layer(nn.Conv3d(256, 64, 3).cuda(), _zeros(1, 256, depth, 1090, 1922), cudnn=cudnn)


def conv3d_autocast(size: int, *, cudnn: bool = True) -> Step:
    """Under autocast; the data is put on the card in float32 first, and its block stays cached."""
    data = _zeros(1, 128, size, size, size).half()
    return _layer(nn.Conv3d(128, 128, 3, padding=1).cuda(), data, cudnn=cudnn, autocast=True)


def conv3d_bfloat16(height: int, width: int) -> Step:
    """24 frames in bfloat16, 3 channels to 128."""
    layer = nn.Conv3d(3, 128, 3, padding=1).bfloat16().cuda()
    return _layer(layer, _zeros(1, 3, 24, height, width, dtype=torch.bfloat16))


_WIDTHS = {
    1024: 4.02, 1152: 5.52, 1280: 6.15, 1408: 6.77, 1536: 7.40, 1664: 8.02, 1792: 8.65, 1920: 9.27, 2048: 9.90,
    2176: 10.52,
}  # fmt: skip
_UNFOLDED = "torch before 2.5 did not ask cuDNN for so many elements; here cuDNN is turned off, for the same kernel"
_EXPANDABLE = "expandable_segments:True"
_EXACT = "the figure has no rest of a block of 2 MiB: that process had expandable segments"
_UNCLEAR = (
    "card and versions were not told apart: cuDNN plans no workspace here, and torch's own kernel takes 9.24 and "
    "12.59 GiB"
)


def _unfolded(issue: int, name: str, figure: float, build: Callable[..., Step], *sizes: int, **said: Any) -> Report:
    return Report(
        issue, name, figure, GIB, 2, "refused", functools.partial(build, *sizes, cudnn=False), note=_UNFOLDED, **said
    )


REPORTS: Sequence[Report] = (
    *(
        Report(123533, f"conv2d, width {width}", figure, GIB, 2, "reserved", functools.partial(conv2d_in_a_loop, width))
        for width, figure in _WIDTHS.items()
    ),
    Report(95024, "conv3d, 361", 12.874233344, GB, 9, "peak", conv3d_361),
    Report(95024, "conv3d, 361", 12.880707584, GB, 9, "reserved", conv3d_361),
    _unfolded(95024, "conv3d, 362", 108.21, conv3d_361, 362),
    Report(128947, "conv3d, depth 4", 7.993362903594971, GIB, 15, "built", functools.partial(conv3d_depth, 4),
           settings=_EXPANDABLE, note=_EXACT),
    Report(128947, "conv3d, depth 4", 17, GIB, 0, "peak", functools.partial(conv3d_depth, 4), settings=_EXPANDABLE),
    _unfolded(128947, "conv3d, depth 5", 161.37, conv3d_depth, 5),
    Report(136479, "conv3d under autocast, 248", 19171, MIB, 0, "nvidia-smi", functools.partial(conv3d_autocast, 248),
           torch="2.3.1+cu121", note="with a context that lies within what the catalogue says of the card"),
    _unfolded(136479, "conv3d under autocast, 256", 108.00, conv3d_autocast, 256, torch="2.3.1+cu121"),
    Report(132300, "conv3d, 24 x 740 x 1316", 9.26, GIB, 2, "peak", functools.partial(conv3d_bfloat16, 740, 1316),
           gpu="not said", known=_UNCLEAR),
    Report(132300, "conv3d, 24 x 864 x 1536", 12.67, GIB, 2, "peak", functools.partial(conv3d_bfloat16, 864, 1536),
           gpu="not said", known=_UNCLEAR),
)  # fmt: skip
