"""Weights that a device wrote, put back into a PyTorch model."""

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
    """Fields of NAME.json: the tensors that a weights file holds, in order."""

    export: str
    tensors: tuple[StoredTensor, ...]


def load_weights(model: nn.Module, file: str | Path, layout: str | Path | None = None) -> nn.Module:
    """Put the weights that ``NAME_get_weights`` wrote into a model, and return it.

    All is checked before the first tensor is written: after an error the model is as it was.

    Args:
        model: like the one that was exported.
        file: the floats as the device wrote them, little-endian.
        layout: ``NAME.json`` of the export; None: the one beside the file.

    Raises:
        InputError: a file cannot be read, or is of another model.

    Example:
        >>> memplan.load_weights(model, "written/weights.bin") is model
        True
    """
    path, stored = _layout(Path(file), layout)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for place, one in enumerate(stored.tensors):
        found = tuple(state[one.name].shape) if one.name in state else "nothing of that name"
        if found != one.shape:
            raise InputError(
                f"{one.name:.80} in the model is {found}",
                expected=f"{_json.shown(one.shape)}, as in {path}",
                do="Pass a model like the one that was exported",
            )
        if one.name in (other.name for other in stored.tensors[:place]):
            raise InputError(f"{path} names {one.name:.80} twice", expected="each tensor once", do="Export again")
    parts = _floats(file, [math.prod(one.shape) for one in stored.tensors])
    with torch.no_grad():
        for one, part in zip(stored.tensors, parts, strict=True):
            state[one.name].copy_(torch.from_numpy(part.reshape(one.shape)))
    return model


def _floats(file: str | Path, sizes: list[int]) -> list[np.ndarray]:
    """Read so many floats for each tensor. Raises InputError: the file has another number of bytes."""
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
    """Return the layout that was named, or the only one beside the weights, and its path. Raises InputError."""
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
    found = list[tuple[Path, WeightsLayout]]()
    for path in sorted(one for one in file.parent.glob("*.json") if one.is_file()):
        try:
            found.append((path, _read_layout(path)))
        except (OSError, ValueError):
            continue  # JSON of somebody else
    if len(found) != 1:
        several = f"{len(found)} layouts of exports beside {file} ({', '.join(path.name for path, _ in found[:3])})"
        raise InputError(
            several if found else f"no layout of an export beside {file}",
            expected="the NAME.json that the export wrote",
            do="Pass layout=",
        )
    return found[0]


def _read_layout(path: Path) -> WeightsLayout:
    """Read NAME.json. Raises OSError, Unreadable."""
    stored = _json.from_plain(WeightsLayout, _json.parse(_json.read_text(path)), "it")
    if 4 * sum(math.prod(one.shape) for one in stored.tensors) > _json.MOST_BYTES:
        raise Unreadable("its tensors are larger than any file")
    return stored
