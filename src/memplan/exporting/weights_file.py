"""Load weights that a device wrote into a PyTorch model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from memplan import _json
from memplan._json import Unreadable
from memplan.errors import InputError


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a weights file."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """Contents of NAME.json: the tensors of a weights file, in order."""

    export: str
    tensors: tuple[StoredTensor, ...]


def load_weights(model: nn.Module, file: str | Path, layout: str | Path | None = None) -> nn.Module:
    """Load the weights that ``NAME_get_weights`` wrote into a model, and return the model.

    Everything is checked before the first tensor is written, so an error leaves the model unchanged.

    Args:
        model: of the same architecture as the exported model.
        file: little-endian floats, as the device wrote them.
        layout: ``NAME.json`` of the export; None: the only layout in the file's folder.

    Raises:
        InputError: a file cannot be read, or does not match the model.

    Example:
        >>> memplan.load_weights(model, "written/weights.bin") is model
        True
    """
    path, stored = _layout(Path(file), layout)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for position, tensor in enumerate(stored.tensors):
        shape = tuple(state[tensor.name].shape) if tensor.name in state else "nothing of that name"
        if shape != tensor.shape:
            raise InputError(
                f"{tensor.name:.80} in the model is {shape}",
                expected=f"{_json.shown(tensor.shape)}, as in {path}",
                do="Pass a model like the one that was exported",
            )
        if tensor.name in (other.name for other in stored.tensors[:position]):
            raise InputError(f"{path} names {tensor.name:.80} twice", expected="each tensor once", do="Export again")
    parts = _floats(file, [math.prod(tensor.shape) for tensor in stored.tensors])
    with torch.no_grad():
        for tensor, part in zip(stored.tensors, parts, strict=True):
            state[tensor.name].copy_(torch.from_numpy(part.reshape(tensor.shape)))
    return model


def _floats(file: str | Path, sizes: list[int]) -> list[np.ndarray]:
    """Read arrays of these sizes. Raises InputError if the file has another number of bytes."""
    wanted = 4 * sum(sizes)
    try:
        content = _json.read_bytes(file, wanted + 1)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file} cannot be read ({getattr(error, 'strerror', None) or error})",
            expected="weights of a device",
            do="Check the path",
        ) from None
    if len(content) != wanted:
        count = f"{len(content) // 4} floats" if not len(content) % 4 else f"{len(content)} bytes"
        more = "more than " if len(content) > wanted else ""
        raise InputError(
            f"{file} holds {more}{f'{wanted // 4} floats' if more else count}",
            expected=f"{wanted // 4}, as exported",
            do="Write all of them, and nothing else",
        )
    floats = np.frombuffer(content, dtype="<f4").astype(np.float32)
    return np.split(floats, np.cumsum(sizes[:-1], dtype=np.int64)) if sizes else []


def _layout(file: Path, layout: str | Path | None) -> tuple[Path, WeightsLayout]:
    """Read `layout`, or the only layout in the folder of the weights. Raises InputError if there is none or several."""
    if layout is not None:
        try:
            return Path(layout), _read_layout(Path(layout))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"{layout} is no layout of an export ({reason})",
                expected="the NAME.json that the export wrote",
                do="Pass layout=",
            ) from None
    layouts = list[tuple[Path, WeightsLayout]]()
    for path in sorted(path for path in file.parent.glob("*.json") if path.is_file()):
        try:
            layouts.append((path, _read_layout(path)))
        except (OSError, ValueError):
            continue  # another JSON file
    if len(layouts) != 1:
        names = ", ".join(path.name for path, _ in layouts[:3])
        several = f"{len(layouts)} layouts of exports beside {file} ({names})"
        raise InputError(
            several if layouts else f"no layout of an export beside {file}",
            expected="the NAME.json that the export wrote",
            do="Pass layout=",
        )
    return layouts[0]


def _read_layout(path: Path) -> WeightsLayout:
    """Read NAME.json. Raises OSError, Unreadable."""
    stored = _json.from_plain(WeightsLayout, _json.parse(_json.read_text(path)), "it")
    if 4 * sum(math.prod(tensor.shape) for tensor in stored.tensors) > _json.MOST_BYTES:
        raise Unreadable("its tensors are larger than any file")
    return stored
