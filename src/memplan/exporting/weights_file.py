"""Weights that a device wrote, put back into a PyTorch model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

from memplan.errors import InputError


def load_weights(model: nn.Module, file: str | Path, layout: str | Path | None = None) -> nn.Module:
    """Put the weights that ``NAME_get_weights`` wrote into a model, and return it.

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
    tensors = _layout(Path(file), layout)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, shape in tensors:
        if name not in state or tuple(state[name].shape) != shape:
            found = tuple(state[name].shape) if name in state else "nothing of that name"
            raise InputError(
                f"{name} in the model is {found}", expected=f"{shape}, as exported", do="Pass a model like it"
            )
    try:
        floats = np.fromfile(file, dtype="<f4")
    except OSError as error:
        raise InputError(
            f"{file} cannot be read ({error.strerror})", expected="weights of a device", do="Check the path"
        ) from error
    wanted = sum(math.prod(shape) for _, shape in tensors)
    if floats.size != wanted:
        raise InputError(
            f"{file} holds {floats.size} floats", expected=f"{wanted}, as exported", do="Write all of them"
        )
    at = 0
    with torch.no_grad():
        for name, shape in tensors:
            size = math.prod(shape)
            state[name].copy_(torch.from_numpy(floats[at : at + size].astype(np.float32).reshape(shape)))
            at += size
    return model


def _layout(file: Path, layout: str | Path | None) -> list[tuple[str, tuple[int, ...]]]:
    beside = sorted(file.parent.glob("*.json")) if layout is None else [Path(layout)]
    for path in beside:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and "tensors" in found and "export" in found:
            return [(one["name"], tuple(one["shape"])) for one in found["tensors"]]
    where = f"no layout of an export beside {file}" if layout is None else f"{layout} is no layout of an export"
    raise InputError(where, expected="the NAME.json that the export wrote", do="Pass layout=")
