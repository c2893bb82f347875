"""`torch.load` of a real file in a recording: returns fake tensors, with storages of the same bytes as the file's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.serialization import config

from memplan import _torch
from memplan._bytes import format_bytes
from memplan.trace.recording.place import format_frame, user_frame
from memplan.trace.records import HOST

_KNOWN = 1024
"""Most elements of an integer tensor whose values are known in the recording."""
_ZIP = b"PK\x03\x04"


class _Storages:
    """The recording's counterparts of a real file's storages, by the address of the real storage."""

    def __init__(
        self,
        device_of: Callable[[int], str | torch.device],
        mapped_file: tuple[int, int] | None = None,
        card: torch.device | None = None,
    ) -> None:
        """Begin without storages.

        Args:
            device_of: address of a real storage -> device to which it is loaded.
            mapped_file: of a memory-mapped file, (address of its first storage, bytes of the file): its storages on the
                host are slices of it. None for a file that is read.
            card: this rank's. Tensors loaded to another card are put on the host, where they do not count.
        """
        self._device_of = device_of
        self._card = card
        self.elsewhere: dict[torch.device, int] = {}
        """Card of another rank -> bytes loaded to it."""
        self._file_address, file_size = mapped_file or (0, 0)
        self._file = torch.empty(file_size, dtype=torch.uint8) if mapped_file else None
        """The memory-mapped file."""
        self._recorded: dict[int, torch.Tensor] = {}
        """Address of a real storage -> the recording's tensor for it, as bytes."""

    def tensor_of(self, leaf: Any) -> Any:
        """Return the recording's tensor for a real tensor of the file: small integer tensors keep their values, aliases
        share a storage. A module's tensors are replaced in place; other leaves are returned unchanged."""
        if isinstance(leaf, nn.Module):
            for module in leaf.modules():
                named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
                for name, tensor in named:
                    setattr(module, name, self.tensor_of(tensor))
            return leaf
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, _torch.FakeTensor) or leaf.layout != torch.strided:
            return leaf
        with _torch.no_modes():
            real, needs_grad = leaf.detach().as_subclass(torch.Tensor), leaf.requires_grad
            storage, dtype, shape, strides = real.untyped_storage(), real.dtype, tuple(real.shape), real.stride()
            fills_storage = storage.nbytes() == real.numel() * real.element_size()
            is_integral = not dtype.is_floating_point and not dtype.is_complex
            values = real.tolist() if is_integral and fills_storage and real.numel() <= _KNOWN else None
            address, size, offset = storage.data_ptr(), storage.nbytes(), real.storage_offset()
        is_new = address not in self._recorded
        device = self._here(self._device_of(address), size if is_new else 0)
        if values is not None and self._file is None:  # tensors of a mapped file share its memory
            return torch.tensor(values, dtype=dtype, device=device)
        if not size:
            return torch.empty(shape, dtype=dtype, device=device)
        if is_new:
            self._recorded[address] = self._record(address, size, device)
        content = self._recorded[address].view(dtype)  # the whole storage, for a mapped file a slice of the file
        view = content.as_strided(shape, strides, content.storage_offset() + offset)
        if isinstance(leaf, nn.Parameter):
            return nn.Parameter(view.detach(), needs_grad)
        return view.requires_grad_(needs_grad)

    def _here(self, device: str | torch.device, size: int) -> str | torch.device:
        """Return the device of a storage in this rank's recording: the host if ``device`` is another rank's card. Its
        ``size`` bytes are then added to `elsewhere`."""
        target = torch.device(device)
        if self._card is None or target.type != "cuda" or target.index in (None, self._card.index):
            return device
        self.elsewhere[target] = self.elsewhere.get(target, 0) + size
        return HOST

    def _record(self, address: int, size: int, device: str | torch.device) -> torch.Tensor:
        """Return a new storage as a tensor of ``size`` bytes: in host memory, or a slice of the mapped file, and copied
        to ``device`` if that is a card. ``address``: of the real storage."""
        if self._file is None:
            loaded = torch.empty(size, dtype=torch.uint8)
        else:
            loaded = self._file[address - self._file_address :][:size]
        return loaded if torch.device(device).type == HOST else loaded.to(device)


def as_recorded(loaded: Any, map_location: Any = None) -> Any:
    """Return a loaded object with its real tensors replaced by tensors of the recording, which alias each other as the
    real tensors do.

    Args:
        loaded: an object with real tensors in nested lists and dicts, or a module.
        map_location: the device of its tensors, as for `torch.load`; a mapping or function counts as the host.
    """
    device = map_location if isinstance(map_location, (str, torch.device)) else HOST
    return _torch.tree_map(_Storages(lambda address: device).tensor_of, loaded)


class _Moved:
    """A storage as passed to a ``map_location`` function: notes the device to which the function would move it."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage
        self.device: str | torch.device = HOST
        """The device to which the function moves it."""

    def cpu(self) -> _Moved:
        return self.to(HOST)

    def cuda(self, device: Any = "cuda", **_: Any) -> _Moved:
        if device is None:
            device = "cuda"
        return self.to(f"cuda:{device}" if isinstance(device, int) else device)

    def to(self, device: Any = None, **_: Any) -> _Moved:
        """Note the device to which a ``map_location`` function moves the storage, which stays where it is."""
        self.device = device
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def place_of(storage: Any, location: str, map_location: Any) -> str | torch.device:
    """Return the device to which `torch.load` loads a storage that was saved at ``location``."""
    if isinstance(map_location, Mapping):
        return map_location.get(location, location)
    if isinstance(map_location, bytes):
        return map_location.decode()
    if callable(map_location):
        moved = map_location(_Moved(storage), location)
        if moved is None:  # torch then ignores map_location
            return location
        return moved.device if isinstance(moved, _Moved) else HOST
    return location if map_location is None else map_location


class Elsewhere(NamedTuple):
    """A call of `torch.load` that puts tensors on the card of another rank."""

    device: torch.device
    bytes: int
    where: str | None
    """``file:line``."""


_elsewhere: list[list[Elsewhere]] = []


@contextmanager
def loads_elsewhere() -> Iterator[list[Elsewhere]]:
    """Yield a list to which recorded calls of `torch.load` are added that put tensors on another rank's card."""
    calls: list[Elsewhere] = []
    _elsewhere.append(calls)
    try:
        yield calls
    finally:
        _elsewhere[:] = [others for others in _elsewhere if others is not calls]  # equal lists are not the same


@contextmanager
def loads_recorded(
    is_recorded: Callable[[], bool], report: Callable[[str], None], card: torch.device
) -> Iterator[None]:
    """Within this context `torch.load` returns tensors of the recording if ``is_recorded()``.

    Tensors loaded to another card than this rank's ``card`` are not counted, but reported by ``report(text)``.

    Only values of small integer tensors are read from the file. The bytes are those of the file's storages or, if the
    file is mapped (``mmap=True``), of the whole file, as torch's allocator counts them.
    """
    load_real = torch.load

    def load(
        f: Any, map_location: Any = None, pickle_module: Any = None, *, mmap: bool | None = None, **kwargs: Any
    ) -> Any:
        """Replace `torch.load`: load the real file on the host, and return tensors of the recording in its place."""
        if not is_recorded():
            return load_real(f, map_location, pickle_module, mmap=mmap, **kwargs)
        devices = dict[int, str | torch.device]()  # by address of a real storage: where it would be loaded

        def locate(storage: Any, location: str) -> Any:  # the map_location of the real load: all stays on the host
            devices[storage.data_ptr()] = place_of(storage, location, map_location)
            return storage

        is_mapped = config.load.mmap if mmap is None else mmap
        with _torch.no_modes():
            # a zip file is mapped anyway, so that its bytes are not read
            loaded = load_real(f, locate, pickle_module, mmap=is_mapped or _is_zip(f), **kwargs)
        mapped_file = (min(devices, default=0), os.path.getsize(f)) if is_mapped else None
        storages = _Storages(lambda address: devices.get(address, HOST), mapped_file, card)
        result = _torch.tree_map(storages.tensor_of, loaded)
        for device, size in storages.elsewhere.items():
            report(
                f"torch.load PUTS {format_bytes(size)} ON {device}, and this rank's card is {card}: "
                "they are NOT COUNTED; map_location says where tensors go"
            )
            for calls in _elsewhere:
                calls.append(Elsewhere(device, size, format_frame(user_frame())))
        return result

    with ExitStack() as stack:
        for module in (torch, torch.serialization):
            stack.enter_context(_torch.patched(module, load=load))
        yield


def _is_zip(f: Any) -> bool:
    """Return whether ``f`` is the path of a zip file, which can be mapped instead of being read."""
    if not isinstance(f, (str, os.PathLike)):
        return False
    try:
        with open(f, "rb") as file:
            return file.read(len(_ZIP)) == _ZIP
    except OSError:  # torch says what is wrong with it
        return False
