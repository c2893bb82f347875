"""Inference of a volume in overlapping patches, as MONAI's ``sliding_window_inference`` runs it.

Besides a patch's forward pass it allocates the volume, an aggregation buffer with a float for each voxel and class, and
a count of covering patches for each voxel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memplan import _torch
from memplan.errors import InputError
from memplan.trace.recording.boundaries import Build
from memplan.trace.spec import Spec
from memplan.trace.step import StepOptions, build_of
from memplan.trace.trace import Trace

Region = tuple[slice, ...]
"""Spatial slices of a patch in the volume."""
RECORDED = 3
"""Batches of patches to record: from the second on all allocate the same, except for the last, which may be smaller."""


@dataclass(frozen=True)
class Window:
    """Inference of a volume patch by patch; the input of the step is a patch, (1, channels, ...)."""

    volume: tuple[int, ...]
    """Spatial dimensions."""
    overlap: float = 0.25
    """Share by which neighboring patches overlap in each dimension: 0 <= overlap < 1."""
    batch: int = 1
    """Patches per call of the model."""

    def checked(self) -> Window:
        """Return the window if it is valid. Raises InputError if the volume, overlap or batch is out of range."""
        if not self.volume or any(size < 1 for size in self.volume):
            raise InputError(f"a volume of {self.volume}", expected="sizes above 0, as in 512x512x320", do="Give these")
        if not 0 <= self.overlap < 1:
            raise InputError(
                f"overlap {self.overlap}", expected="a share of the patch, 0 <= overlap < 1", do="Give one"
            )
        if self.batch < 1:
            raise InputError(f"{self.batch} patches at a time", expected="1 or more", do="Give that")
        return self


def sliding_build(make: Callable[[], Any], options: StepOptions, window: Window, *, on_card: bool) -> Build:
    """Return a ``build`` whose step runs inference of a whole volume, patch by patch, with the model that ``make()``
    returns. Raises InputError if the step's only input is not a patch with as many dimensions as the volume."""
    patch = options.inputs[0] if len(options.inputs) == 1 and not options.kwargs else None
    if not isinstance(patch, (Spec, torch.Tensor)) or len(patch.shape) != 2 + len(window.volume):
        keywords = f" and the keywords {', '.join(options.kwargs)}" if options.kwargs else ""
        raise InputError(
            f"{len(options.inputs)} input(s){keywords} for a volume of {'x'.join(map(str, window.volume))}",
            expected=f"one input, a patch of (1, channels, {len(window.volume)} sizes), and nothing else",
            do="Give the patch alone, such as 1x1x96x96x96",
        )
    size = tuple(int(n) for n in patch.shape[2:])
    volume = Spec((1, int(patch.shape[1]), *window.volume), patch.dtype)

    def make_sliding_model() -> Any:
        model = make()
        return Sliding(model, size, window, RECORDED) if isinstance(model, nn.Module) else model

    make_sliding_model.__qualname__ = getattr(make, "__qualname__", "the model")  # its name in messages
    inference = replace(options, inputs=(volume,), targets=(), loss=None, optimizer=None, train=False)
    return build_of(make_sliding_model, inference, on_card=on_card)


class Sliding(nn.Module):
    """(1, channels, *volume) -> the model's output for the volume, averaged where patches overlap.

    Allocates and frees in the order of MONAI 1.6's ``sliding_window_inference`` with ``mode="constant"``.
    """

    def __init__(self, model: nn.Module, patch: Sequence[int], window: Window, batch_limit: int | None = None) -> None:
        """``patch``: spatial sizes of what ``model`` takes. ``batch_limit``: how many batches of patches to run at most
        (see `forward`); None: all."""
        super().__init__()
        self.model, self._patch, self._window, self._batch_limit = model, tuple(patch), window, batch_limit

    def forward(self, volume: torch.Tensor) -> Any:
        """Run the model over all patches, or over the first ``batch_limit`` - 1 batches and the last.

        ``volume``: (1, channels, sizes ...). Returns the averaged output, or outputs in the model's structure.
        """
        sizes = volume.shape[2:]
        missing = [max(size - int(extent), 0) for size, extent in zip(self._patch, sizes, strict=True)]
        volume = _pad(volume, missing)
        regions = list(_regions(volume.shape[2:], self._patch, self._window.overlap))
        if self._batch_limit is not None:
            regions = _first_and_last(regions, self._window.batch, self._batch_limit)
        weight = torch.ones((1, 1, *self._patch), dtype=volume.dtype, device=volume.device)
        sums: list[torch.Tensor] = []
        counts: list[torch.Tensor] = []
        structure: Any = None
        for first in range(0, len(regions), self._window.batch):
            batch = regions[first : first + self._window.batch]
            patches = [volume[(slice(None), slice(None), *region)] for region in batch]
            # output and parts of the previous batch stay alive while the model runs, as in MONAI's loop
            data = torch.cat(patches) if self._window.batch > 1 else patches[0]
            output = self.model(data)
            # each tensor of the output is added up over patches, at its own resolution
            parts, structure = _torch.tree_flatten(output)
            for index, part in enumerate(parts):
                scale = [out / size for out, size in zip(part.shape[2:], self._patch, strict=True)]
                part_weight = weight
                if any(factor != 1 for factor in scale):
                    part_weight = functional.interpolate(weight, tuple(part.shape[2:]), mode="nearest-exact")
                if len(sums) <= index:  # the first batch: allocate the buffers, and count the patches over each voxel
                    whole = [int(size * factor) for size, factor in zip(volume.shape[2:], scale, strict=True)]
                    sums.append(torch.zeros((1, part.shape[1], *whole), dtype=volume.dtype, device=volume.device))
                    counts.append(torch.zeros((1, 1, *whole), dtype=volume.dtype, device=volume.device))
                    for region in regions:
                        counts[index][(slice(None), slice(None), *_scale_region(region, scale))] += part_weight
                part *= part_weight
                for row, region in enumerate(batch):
                    sums[index][(slice(None), slice(None), *_scale_region(region, scale))] += part[row : row + 1]
        for index in range(len(sums)):
            sums[index] /= counts.pop(0)
        if any(missing):
            unpadded = [slice(pad // 2, pad // 2 + int(size)) for pad, size in zip(missing, sizes, strict=True)]
            for index, part in enumerate(sums):
                scale = [int(out) / int(size) for out, size in zip(part.shape[2:], volume.shape[2:], strict=True)]
                sums[index] = part[(slice(None), slice(None), *_scale_region(unpadded, scale))]
        return sums[0] if len(sums) == 1 else _torch.tree_unflatten(sums, structure)


def aggregation_bytes(trace: Trace) -> int:
    """Return the bytes of the aggregation buffers and counts of covering patches of a recorded `Sliding`."""
    calls = [returned for returned in trace.returned if returned.layer == Sliding.__name__]
    storages = {storage.id: storage for storage in trace.storages}
    total = 0
    for view in calls[0].tensors if calls else ():
        storage = storages.get(view.storage)
        if storage is not None:
            total += storage.bytes + storage.bytes // max(1, view.shape[1])  # counts have a single channel
    return total


def _pad(volume: torch.Tensor, missing: Sequence[int]) -> torch.Tensor:
    """Pad a volume on both sides by ``missing`` voxels in total, a number for each dimension."""
    if not any(missing):
        return volume
    return functional.pad(volume, [side for pad in reversed(missing) for side in (pad // 2, pad - pad // 2)])


def _first_and_last(regions: Sequence[Region], batch: int, batch_limit: int) -> list[Region]:
    """Return the regions of the first ``batch_limit`` - 1 batches and the last, which may be smaller.

    The last is included because a smaller batch may need a larger workspace. ``batch``: patches in a batch.
    """
    first, others = regions[: (batch_limit - 1) * batch], regions[(batch_limit - 1) * batch :]
    last = len(others) % batch or batch  # number of patches in the last batch
    return [*first, *others[-last:]]


def _regions(volume: Sequence[int], patch: Sequence[int], overlap: float) -> Iterator[Region]:
    """Yield the regions of all patches; the last of each dimension is moved back to end with the volume."""
    starts: list[list[int]] = []
    for whole, size in zip(volume, patch, strict=True):
        step = size if size == whole else max(1, int(size * (1 - overlap)))
        count = 1 if size >= whole else math.ceil((whole - size) / step) + 1  # of patches along this dimension
        starts.append([min(number * step, whole - size) for number in range(count)])
    for corner in itertools.product(*starts):
        yield tuple(slice(first, first + size) for first, size in zip(corner, patch, strict=True))


def _scale_region(region: Sequence[slice], scale: Sequence[float]) -> Region:
    """Return a region of the volume in the coordinates of an output whose resolution differs by ``scale``."""
    return tuple(
        slice(int(extent.start * factor), int(extent.stop * factor))
        for extent, factor in zip(region, scale, strict=True)
    )
