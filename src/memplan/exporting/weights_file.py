"""Load weights, or a whole state, that a device wrote into a PyTorch model and its optimizer."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from memplan import _json
from memplan._json import Unreadable
from memplan.errors import InputError
from memplan.exporting.optimizer_rules import ARRAYS, OPTIMIZER_KINDS, arrays_of

MAGIC = b"MPS1"
"""First bytes of a saved state; the digit is the version of its header."""
HEADER_BYTES = 16
"""Bytes of the header: magic, layout number, bytes that follow it, and their CRC-32."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a weights file."""

    name: str
    shape: tuple[int, ...]
    group: int | None = None
    """Index of its parameter group; None: not trained, such as running statistics."""
    scales: tuple[float, ...] = ()
    """Of a tensor that is trained in eight bits: one for each index of the first dimension."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class StateMember:
    """A member of a saved state: elements of four bytes."""

    name: str
    count: int


@dataclass(frozen=True, slots=True)
class WeightsLayout:
    """Contents of NAME.json: the tensors of a weights file, and the members of a saved state, both in order."""

    export: str
    tensors: tuple[StoredTensor, ...]
    layout: int = 0
    """The number in the header of the export's saved states."""
    optimizer: str = ""
    rates: tuple[float, ...] = ()
    """Learning rate of each parameter group as exported."""
    state: tuple[StateMember, ...] = ()
    """Empty for exports that cannot save their state."""

    @property
    def floats(self) -> int:
        """Number of elements of a weights file."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def state_bytes(self) -> int:
        """Bytes of a saved state, without the header."""
        return 4 * sum(member.count for member in self.state)


@dataclass(frozen=True)
class _SavedState:
    """A saved state that was read."""

    weights: np.ndarray
    """Of all tensors, as in a weights file."""
    arrays: Mapping[str, Sequence[np.ndarray]]
    """The optimizer's arrays by their names in PyTorch: for each trained tensor, its elements."""
    gradients: Sequence[np.ndarray]
    """Sums of gradients that are not applied yet, for each trained tensor; empty if there are none."""
    step: int
    rates: Sequence[float]
    """Learning rate of each parameter group on the device."""


def load_weights(
    model: nn.Module,
    file: str | Path,
    layout: str | Path | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> nn.Module:
    """Load what ``NAME_get_weights`` or ``NAME_save`` wrote into a model, and return the model.

    Everything is checked before the first tensor is written, so an error leaves model and optimizer unchanged.

    Args:
        model: of the same architecture as the exported model.
        file: little-endian floats, or a saved state, as the device wrote them.
        layout: ``NAME.json`` of the export; None: the only layout in the file's folder.
        optimizer: of the model's parameters, of the kind that was exported. It gets the moments, step counts and
            learning rates of a saved state; gradients that are added up for its next step become `.grad`.

    Raises:
        InputError: a file cannot be read, does not match model or optimizer, or is damaged.

    Example:
        >>> memplan.load_weights(model, "written/weights.bin") is model
        True
    """
    path, stored = _layout(Path(file), layout)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for position, tensor in enumerate(stored.tensors):
        shape = tuple(named[tensor.name].shape) if tensor.name in named else "nothing of that name"
        if shape != tensor.shape:
            raise InputError(
                f"{tensor.name:.80} in the model is {shape}",
                expected=f"{_json.shown(tensor.shape)}, as in {path}",
                do="Pass a model like the one that was exported",
            )
        if tensor.name in (other.name for other in stored.tensors[:position]):
            raise InputError(f"{path} names {tensor.name:.80} twice", expected="each tensor once", do="Export again")
    weights_bytes = 4 * stored.floats
    # + 1: to see that it is too long
    content = _content(file, max(weights_bytes + 1, HEADER_BYTES + stored.state_bytes))
    saved = None
    if content.startswith(MAGIC) and len(content) != weights_bytes:
        saved = _saved_state(file, content, stored)
    weights = _floats(file, content, stored) if saved is None else _split(saved.weights, stored.tensors)
    optimizer_state = None
    if optimizer is not None:
        optimizer_state = _optimizer_state(optimizer, named, stored, _needed(file, saved))
    with torch.no_grad():
        for tensor, elements in zip(stored.tensors, weights, strict=True):
            named[tensor.name].copy_(_tensor(elements, tensor))
    if optimizer is not None and optimizer_state is not None and saved is not None:
        optimizer.load_state_dict(optimizer_state)
        for tensor, gradient in zip(_trained(stored), saved.gradients, strict=False):  # there may be none
            named[tensor.name].grad = _tensor(gradient, tensor).to(named[tensor.name])
    return model


def _content(file: str | Path, byte_limit: int) -> bytes:
    """Read a file, or its first `byte_limit` bytes. Raises InputError."""
    try:
        return _json.read_bytes(file, byte_limit)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{file} cannot be read ({getattr(error, 'strerror', None) or error})",
            expected="weights of a device",
            do="Check the path",
        ) from None


def _floats(file: str | Path, content: bytes, stored: WeightsLayout) -> list[np.ndarray]:
    """Return the elements of each tensor of a weights file. Raises InputError if it has another number of bytes."""
    count, size = stored.floats, len(content)
    if size != 4 * count:
        found = f"{size // 4} floats" if not size % 4 else f"{size} bytes"
        if size > 4 * count:  # the rest was not read
            found = f"more than {count} floats"
        raise InputError(
            f"{file} holds {found}",
            expected=f"{count}, as exported",
            do="Write all of them, and nothing else",
        )
    return _split(np.frombuffer(content, dtype="<f4").astype(np.float32), stored.tensors)


def _saved_state(file: str | Path, content: bytes, stored: WeightsLayout) -> _SavedState:
    """Read a saved state; what follows it, such as the rest of a page, is left out.

    Raises:
        InputError: it is of another export, or damaged.
    """
    number, length, crc = np.frombuffer(content[4:HEADER_BYTES].ljust(HEADER_BYTES - 4, b"\0"), dtype="<u4").tolist()
    payload = content[HEADER_BYTES : HEADER_BYTES + stored.state_bytes]
    if not stored.state or number != stored.layout or length != stored.state_bytes:
        raise InputError(
            f"{file} is the state of another export",
            expected=f"one of {stored.export:.80}: layout number {stored.layout:#010x}",
            do="Pass the NAME.json of its export: layout=",
        )
    if len(payload) != length or zlib.crc32(payload) != crc:
        found = "is damaged" if len(payload) == length else f"holds {len(payload)} bytes of {length}"
        raise InputError(f"{file} {found}", expected="a state as NAME_save wrote it", do="Save it again")
    parts = np.split(np.frombuffer(payload, dtype="<u4"), _ends(member.count for member in stored.state))
    empty = np.zeros(0, np.float32)
    words = {member.name: part for member, part in zip(stored.state, parts, strict=False)}  # an empty part is behind
    floats = {name: part.astype("u4").view(np.float32) for name, part in words.items()}  # words of integers, too
    int8_weights = _int8_weights(words["int8"], stored) if "int8" in words else empty
    trained = _trained(stored)
    rate_factors = floats.get("rates", np.ones(len(stored.rates), np.float32)) * floats["rate"]
    return _SavedState(
        weights=np.concatenate([floats.get("weights", empty), int8_weights, floats.get("statistics", empty)]),
        arrays={
            key: _split(floats[name], trained)
            for name, key in ARRAYS[stored.optimizer].items()
            if name in floats
        },
        gradients=_split(floats["gradients"], trained) if any(words.get("calls", ())) else [],
        step=int(words["step"][0]),
        rates=[rate * float(factor) for rate, factor in zip(stored.rates, rate_factors, strict=True)],
    )  # fmt: skip


def _int8_weights(words: np.ndarray, stored: WeightsLayout) -> np.ndarray:
    """Return the elements in float32 of tensors that are trained in eight bits."""
    tensors = [tensor for tensor in stored.tensors if tensor.scales]
    scaled = list[np.ndarray]()
    for tensor, integers in zip(tensors, _split(words.astype("<u4").view(np.int8), tensors), strict=True):
        scales = np.array(tensor.scales, np.float32).reshape(-1, 1)
        scaled.append((scales * integers.reshape(len(scales), -1).astype("f4")).reshape(-1))
    return np.concatenate(scaled)


def _needed(file: str | Path, saved: _SavedState | None) -> _SavedState:
    """Return the saved state. Raises InputError if there is none."""
    if saved is None:
        raise InputError(
            f"{file} holds weights alone", expected="a state for the optimizer, as NAME_save writes it", do="Save that"
        )
    return saved


def _optimizer_state(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor], stored: WeightsLayout, saved: _SavedState
) -> dict[str, Any]:
    """Return the `state_dict` of an optimizer with what the device has of it.

    Raises:
        InputError: it is of another kind or has other options, or does not have all trained parameters.
    """
    kind, moments = OPTIMIZER_KINDS.get(type(optimizer), ""), set[str]()
    if kind:
        moments = {ARRAYS[kind][name] for group in optimizer.param_groups for name in arrays_of(kind, group)}
    if kind != stored.optimizer or moments != set(saved.arrays):
        found = f"{type(optimizer).__name__} with {', '.join(sorted(moments)) or 'no moments'}"
        expected = f"one of the kind {stored.optimizer} with {', '.join(sorted(saved.arrays)) or 'no moments'}"
        raise InputError(f"The optimizer is {found}", expected=expected, do="Pass an optimizer of the exported kind")
    result = optimizer.state_dict()  # which has numbers in the place of parameters, in their order
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in result["param_groups"] for index in group["params"]]
    index_of = {id(parameter): index for parameter, index in zip(parameters, indices, strict=True)}
    group_of = {index: group for group in result["param_groups"] for index in group["params"]}
    states = dict(result["state"])
    rate_of_group = dict[int, float]()  # by id of the group
    for position, tensor in enumerate(_trained(stored)):
        index = index_of.get(id(named[tensor.name]))
        if index is None:
            raise InputError(
                f"{tensor.name:.80} is not in the optimizer", expected="all parameters that the device trains",
                do="Make the optimizer of this model's parameters",
            )  # fmt: skip
        group, rate = group_of[index], saved.rates[tensor.group or 0]
        if rate_of_group.setdefault(id(group), rate) != rate:
            raise InputError(
                f"{tensor.name:.80} has another learning rate than its group", expected="parameter groups as exported",
                do="Make them likewise",
            )  # fmt: skip
        group["lr"] = rate
        keys = [ARRAYS[kind][name] for name in arrays_of(kind, group)]
        state: dict[str, Any] = {key: _tensor(saved.arrays[key][position], tensor) for key in keys}
        if kind != "sgd":
            state["step"] = torch.tensor(float(saved.step))
        states[index] = state if saved.step or kind == "adagrad" else {}  # Adagrad's exist before its first step
    return {**result, "state": states}


def _trained(stored: WeightsLayout) -> list[StoredTensor]:
    return [tensor for tensor in stored.tensors if tensor.group is not None]


def _split(floats: np.ndarray, tensors: Sequence[StoredTensor]) -> list[np.ndarray]:
    """Return the elements of each tensor."""
    return np.split(floats, _ends(tensor.size for tensor in tensors))[: len(tensors)]  # without what follows


def _ends(counts: Iterable[int]) -> list[int]:
    """Return the end of each of successive parts with so many elements."""
    return list(itertools.accumulate(counts))


def _tensor(elements: np.ndarray, stored: StoredTensor) -> torch.Tensor:
    return torch.from_numpy(elements.reshape(stored.shape).copy())


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
    if stored.state and not _is_consistent(stored):
        raise Unreadable("its state does not match its tensors")
    return stored


def _is_consistent(stored: WeightsLayout) -> bool:
    """Whether the members of the saved state are those of an export with such tensors and optimizer."""
    counts = {member.name: member.count for member in stored.state}
    groups = [tensor.group for tensor in stored.tensors]
    int8_tensors = [tensor for tensor in stored.tensors if tensor.scales]
    int8_elements = sum(tensor.size for tensor in int8_tensors)
    float_elements = sum(tensor.size for tensor in _trained(stored)) - int8_elements
    arrays = {"weights", "gradients", *ARRAYS.get(stored.optimizer, ())} & set(counts)
    trained_come_first = groups == sorted(groups, key=lambda group: group is None)
    return (
        len(counts) == len(stored.state)
        and stored.state_bytes < _json.MOST_BYTES
        and stored.optimizer in ARRAYS
        and trained_come_first
        and all(group is None or group < len(stored.rates) for group in groups)
        and ("weights" in arrays) == (float_elements > 0)
        and counts.get("int8", 0) == -(-int8_elements // 4)
        and all(tensor.group is not None and (len(tensor.scales),) == tensor.shape[:1] for tensor in int8_tensors)
        and all(counts[name] == float_elements for name in arrays)
        and ("calls" in counts) == ("gradients" in counts)
        and counts.get("statistics", 0) == stored.floats - float_elements - int8_elements
        and counts.get("rate") == counts.get("step") == 1
        and counts.get("rates", len(stored.rates)) == len(stored.rates)
    )
