"""The steps that tools/gpu/fit.py measures, and a counter of the bytes that one moves. Needs no GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
for _path in (str(ROOT), str(ROOT / "src")):  # the latter where memplan is not installed
    if _path not in sys.path:
        sys.path.insert(0, _path)

from benchmarks.frontier import models  # noqa: E402
from benchmarks.frontier.models import Subject, chain, token_loss  # noqa: E402
from benchmarks.frontier.networks import Gpt, ResNet50  # noqa: E402

GPT_VOCABULARY, GPT_LENGTH = 50257, 1024


def resnet50(batch: int = 256) -> Subject:
    """ResNet-50 on pictures of 224 x 224."""
    data = {"inputs": (torch.randn(batch, 3, 224, 224),), "targets": (torch.randint(1000, (batch,)),)}
    return chain(ResNet50(), data | {"loss": F.cross_entropy})


def gpt2_medium(batch: int = 8, layers: int = 24, width: int = 1024) -> Subject:
    """24 layers of 1024 with dropout 0.1, and an output layer of its own, on 1024 tokens."""
    model = Gpt(layers=layers, width=width, vocabulary=GPT_VOCABULARY, length=GPT_LENGTH, dropout=0.1)
    ids, labels = (torch.randint(GPT_VOCABULARY, (batch, GPT_LENGTH)) for _ in range(2))
    return chain(model, {"inputs": (ids,), "targets": (labels,), "loss": token_loss})


class Twice(nn.Sequential):
    """Two 3 x 3 x 3 convolutions, each with a norm and a ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv3d(channels, outputs, 3, padding=1, bias=False), nn.InstanceNorm3d(outputs, affine=True)]
            layers += [nn.ReLU(inplace=True)]
        super().__init__(*layers)


class UNet3d(nn.Module):
    """Cicek et al. 2016, arXiv:1606.06650: (N, 1, D, H, W) -> (N, classes, D, H, W)."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        ins = (1, *widths[:-1])
        self.down = nn.ModuleList(Twice(inputs, width) for inputs, width in zip(ins, widths, strict=True))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.lift = nn.ModuleList(nn.ConvTranspose3d(deep, width, 2, 2) for deep, width in pairs)
        self.up = nn.ModuleList(Twice(2 * width, width) for _, width in pairs)
        self.head = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The classes' scores of each voxel."""
        kept: list[Tensor] = []
        for stage in self.down:
            x = stage(F.max_pool3d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for lift, stage in zip(self.lift, self.up, strict=True):
            x = stage(torch.cat((kept.pop(), lift(x)), 1))
        return self.head(x)


def unet3d(batch: int = 2, size: int = 128, widths: tuple[int, ...] = (32, 64, 128, 256, 320)) -> Subject:
    """A 3D U-Net on volumes of 128 x 128 x 128, the widths those of nnU-Net."""
    model = UNet3d(widths, 3)
    inputs, targets = torch.randn(batch, 1, size, size, size), torch.randint(3, (batch, size, size, size))
    blocks: list[nn.Module] = [*model.down, *model.up]
    return Subject(model, (inputs,), (targets,), F.cross_entropy, {"per_block": blocks})


LARGE: dict[str, Callable[[], Subject]] = {"resnet50": resnet50, "unet3d": unet3d, "gpt2_medium": gpt2_medium}
"""At real sizes."""
_SAME_NAME = {"resnet50": "resnet50_b8"}
STEPS = LARGE | {_SAME_NAME.get(name, name): make for name, make in models.MODELS.items()}
"""With those of the frontier benchmark, which are small."""
TITLES = {
    "resnet50": "ResNet-50, batch 256, 224²",
    "unet3d": "3D U-Net, batch 2, 128³",
    "gpt2_medium": "GPT-2 medium, batch 8, 1024 tokens",
} | {_SAME_NAME.get(name, name): title for name, title in models.TITLES.items()}


def on(device: str, make: Callable[[], Subject]) -> Subject:
    """A step whose model and data are on a device, the same every time."""
    torch.manual_seed(0)
    subject = make()
    subject.model.to(device)
    subject.inputs = tuple(one.to(device) for one in subject.inputs)
    subject.targets = tuple(one.to(device) for one in subject.targets)
    return subject


class Moved(TorchDispatchMode):
    """Counts what the ops of a step read and write, each tensor once per op: views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, counted."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not any(name in func.name() for name in ("aten::detach", "aten::_unsafe_view")):
            self.bytes += distinct((args, kwargs)) + distinct(result)
        return result


def distinct(value: Any) -> int:
    """Bytes that the tensors in nested containers look at, each storage once."""
    sizes: dict[int, int] = {}
    for tensor in _tensors(value):
        storage = tensor.untyped_storage()
        looked_at = min(tensor.numel() * tensor.element_size(), storage.nbytes())
        sizes[storage.data_ptr()] = max(looked_at, sizes.get(storage.data_ptr(), 0))
    return sum(sizes.values())


def _tensors(value: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.layout == torch.strided)
