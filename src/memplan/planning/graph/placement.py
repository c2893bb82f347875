"""The device that a planned step runs on: the CPU, or the CUDA card that holds its parameters."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan._bytes import round_to_blocks
from memplan.cudnn.cudnn_library import find_cudnn
from memplan.devices import Device
from memplan.errors import DeviceError
from memplan.simulation.allocator.occupied import Occupied
from memplan.simulation.allocator.settings import AllocatorSettings, is_native_in_process, settings_of_process
from memplan.simulation.snapshots.read import read_snapshot
from memplan.trace.recording.session import Target, own_card
from memplan.trace.records import HOST


@dataclass(frozen=True)
class Home:
    """The device that holds a step's tensors and computes it."""

    name: str = HOST
    """Device as torch names it: ``cpu``, ``cuda:0``."""
    card: Device | None = None
    """The CUDA card; None for the CPU."""
    allocator: AllocatorSettings = field(default_factory=AllocatorSettings)
    """Settings of the card's caching allocator."""
    occupied: Occupied | None = field(default=None, compare=False, repr=False)
    """What lies in its segments before the step; None: the step's tensors, one behind the other."""

    @property
    def type(self) -> str:
        """``cpu`` or ``cuda``."""
        return torch.device(self.name).type

    def allocated(self, size: int) -> int:
        """Return the bytes that the device's allocator reserves for a tensor of ``size`` bytes."""
        return size if self.card is None else round_to_blocks(size)

    @property
    def allocator_conf(self) -> str | None:
        """Settings of the caching allocator, as `memplan.simulate` takes them; None for torch's defaults, and for the
        CPU."""
        return str(self.allocator) or None

    @property
    def target(self) -> Target:
        """Target for recording the unplanned step, with the workspaces of the installed cuDNN."""
        return (
            Target(HOST) if self.card is None else Target(self.card.name, self.card, cudnn=find_cudnn(environment=None))
        )


def home_of(step: nn.Module, tensors: Iterable[torch.Tensor]) -> Home:
    """Return the home of a step. Inputs in host memory, such as sizes or masks, are ignored. Raises DeviceError for
    parameters and buffers on several devices, inputs on another card, or a device that is neither."""
    devices = {name: tensor.device for name, tensor in (*step.named_parameters(), *step.named_buffers())}
    devices |= {f"input {index}": tensor.device for index, tensor in enumerate(tensors) if tensor.device.type != HOST}
    # The name of the first tensor on each device. Meta tensors can stand for any device.
    first_on = {device: name for name, device in reversed(devices.items()) if device.type != "meta"}
    for device, name in first_on.items():
        if device.type not in (HOST, "cuda"):
            raise DeviceError(
                f"{name} is on {device}", expected="a module on the CPU or on a CUDA card", do="Move the module there"
            )
    if len(first_on) > 1:
        names = sorted((name, device) for device, name in first_on.items())
        raise DeviceError(
            " and ".join(f"{name} on {device}" for name, device in names),
            expected="a step that runs on one device: all of its parameters, buffers and inputs are there",
            do="Move the module and its inputs to one device, by .to(device)",
        )
    device = next(iter(first_on), torch.device(HOST))
    return Home() if device.type == HOST else Home(str(device), own_card(device), settings_of_process())


def as_occupied(home: Home, step: nn.Module) -> Home:
    """Return the home of a step whose tensors are on this process's card, with what lies in the card's segments now,
    but for workspaces of cuBLAS and gradients, which a step allocates anew."""
    if home.card is None or not is_native_in_process() or torch.cuda.is_current_stream_capturing():
        return home
    gc.collect()
    torch.cuda.synchronize(home.name)
    _torch.clear_cublas_workspaces()
    snapshot = read_snapshot({"segments": torch.cuda.memory_snapshot()}, torch.device(home.name).index)
    gradients = (parameter.grad for parameter in step.parameters())
    storages = (
        gradient.untyped_storage()
        for gradient in gradients
        if gradient is not None and gradient.layout == torch.strided and _torch.untraceable_reason(gradient) is None
    )
    freed = {storage.data_ptr() for storage in storages}
    return replace(home, occupied=Occupied.of(snapshot.segments, home.allocator, freed))


def is_on_card(model: Any) -> bool:
    """Return whether a parameter or buffer of a model is on a CUDA card."""
    tensors = (*model.parameters(), *model.buffers()) if isinstance(model, nn.Module) else ()
    return any(tensor.device.type == "cuda" for tensor in tensors)
