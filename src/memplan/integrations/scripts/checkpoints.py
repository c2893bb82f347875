"""Checkpoints of a recording. Its tensors have no values: a short text with a number is saved instead.

The text goes wherever a checkpoint goes: through buffers, open files, copies and renames. Loading it returns new
tensors of the shapes that were saved.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

import torch
from torch import nn

from memplan import _torch
from memplan._json import compact
from memplan.integrations.scripts.effects import Effects
from memplan.integrations.scripts.loaded import new_tensors, shapes_of
from memplan.integrations.scripts.sandbox.messages import MARK
from memplan.trace.recording.loads import as_recorded

_DIGITS = 16
_LENGTH = len(MARK) + _DIGITS
"""Bytes of the text."""


class Checkpoints:
    """Saves and loads of a run of a script.

    Args:
        effects: gets a note of each save to a path.
        values: whether tensors have values, which are saved and loaded as they are.
        writes: whether saving to a path writes the text to the file; if not, this object remembers it by path.
        before: called before each save and each load.
    """

    def __init__(
        self, effects: Effects, *, values: bool, writes: bool, before: Callable[[Literal["save", "load"]], None]
    ) -> None:
        """``values``: whether tensors have values to save and load; ``writes``: whether saving to a path writes a file;
        ``before``: called with the kind before each save and load."""
        self._effects = effects
        self._before = before
        self._has_values = values
        self._writes_paths = writes
        self._saved: list[Any] = []
        """Saved objects, with shapes for tensors; the text that a file contains instead has the index here."""
        self._by_path: dict[str, bytes] = {}
        """By path that a save was not to write: the text that its file would contain."""

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Within this context the functions of torch and safetensors that save and load go by way of this object."""
        with ExitStack() as stack:
            load = self._loader(torch.load, is_recorded=True)
            stack.enter_context(_torch.patched(torch, save=self._saver(torch.save), load=load))
            jit = torch.jit
            stack.enter_context(_torch.patched(jit, save=self._saver(jit.save), load=self._loader(jit.load)))
            if not self._has_values:
                stack.enter_context(_torch.pickled_fakes(self._reduce))
                # what torch.jit makes of a module runs as that module, and scripts save it by its method
                stack.enter_context(
                    _torch.patched(nn.Module, save=lambda module, f, **kwargs: torch.jit.save(module, f))
                )
            with suppress(ImportError):
                import safetensors
                import safetensors.torch as tensors  # before the script's libraries take functions from it

                save, load = self._saver(tensors.save_file), self._loader(tensors.load_file)
                storage_ptr = tensors.storage_ptr
                if not self._has_values:  # storages without data all have the address 0: identity tells them apart
                    storage_ptr = lambda tensor: _torch.storage_key(tensor.untyped_storage())  # noqa: E731
                stack.enter_context(
                    _torch.patched(
                        tensors, save_file=save, load_file=lambda filename, device="cpu": load(filename, str(device)),
                        save_model=lambda model, filename, *args, **kwargs: save(model.state_dict(), filename),
                        save=tensors.save if self._has_values else lambda tensors, *_, **__: self._store(tensors),
                        load=self._loader_of_bytes(tensors.load),
                        storage_ptr=storage_ptr,
                    )
                )  # fmt: skip
                if not self._has_values and hasattr(os, "memfd_create"):
                    dtype_names = {dtype: name for name, dtype in tensors._TYPES.items()}
                    safe_open = self._opener(safetensors.safe_open, dtype_names)
                    for module in (safetensors, tensors):
                        stack.enter_context(_torch.patched(module, safe_open=safe_open))
            yield

    def _store(self, saved: Any) -> bytes:
        """Remember the shapes of a saved object, and return the text to write to its file."""
        self._saved.append(shapes_of(saved))
        return MARK + f"{len(self._saved) - 1:0{_DIGITS}d}".encode()

    def _load_stored(self, text: bytes, device: Any) -> Any:
        """Return the object for which `_store` wrote this text, with new tensors; None if it is another text.
        ``device`` is the ``map_location`` of `torch.load`."""
        number = self._number_of(text)
        return None if number is None else new_tensors(self._saved[number], device)

    def _number_of(self, text: bytes) -> int | None:
        """Return the index in ``_saved`` that a text of `_store` has; None if it is another text."""
        if text[: len(MARK)] != MARK or not text[len(MARK) : _LENGTH].isdigit():
            return None
        number = int(text[len(MARK) : _LENGTH])
        return number if number < len(self._saved) else None

    def _saver(self, original: Callable[..., None]) -> Callable[..., None]:
        """Return a replacement for ``original``, a function that saves an object to a path or an open file.

        It notes the path of the checkpoint. Tensors with values are saved as usual, else a text of `_store` is.
        """

        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            self._before("save")
            is_path = isinstance(f, (str, os.PathLike))
            path = os.path.abspath(os.fsdecode(f)) if is_path else str(getattr(f, "name", type(f).__name__))
            if is_path or hasattr(f, "name"):
                self._effects.note("checkpoint", path)
            if self._has_values:
                return original(obj, f, *args, **kwargs)
            text = self._store(obj)
            if not is_path:
                f.write(text)
            elif self._writes_paths:
                with open(path, "wb") as file:
                    file.write(text)
            else:
                self._by_path[path] = text

        return save

    def _loader(self, original: Callable[..., Any], *, is_recorded: bool = False) -> Callable[..., Any]:
        """Return a replacement for ``original``, a function that loads a checkpoint from a path or an open file.

        Texts of `_store` and real files are both loaded as tensors of the recording. ``is_recorded``: ``original``
        itself loads a real file so, as `torch.load` does during a recording.
        """

        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._before("load")
            if self._has_values:
                return original(f, map_location, *args, **kwargs)
            stored = self._load_stored(self._first_bytes(f), map_location)
            if stored is not None:
                return stored
            if is_recorded:
                return original(f, map_location, *args, **kwargs)
            with _torch.no_modes():
                loaded = original(f, "cpu", *args, **kwargs)
            return as_recorded(loaded, map_location)

        return load

    def _first_bytes(self, f: Any) -> bytes:
        """Return the first bytes of a path or open file, enough for a text of `_store`; b"" if it cannot be read.

        An open file is left at its position.
        """
        if isinstance(f, (str, os.PathLike)):
            path = os.path.abspath(os.fsdecode(f))
            if path in self._by_path:
                return self._by_path[path]
            with suppress(OSError), open(path, "rb") as file:
                return file.read(_LENGTH)
            return b""
        try:
            position = f.tell()
            text = f.read(_LENGTH)
            f.seek(position)
        except (AttributeError, io.UnsupportedOperation):  # not seekable
            return b""
        return text if isinstance(text, bytes) else b""

    def _loader_of_bytes(self, original: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        """Return a replacement for ``original``, which loads bytes, that also reads texts of `_store`."""

        def load(data: bytes) -> Any:
            stored = None if self._has_values else self._load_stored(data, "cpu")
            return original(data) if stored is None else stored

        return load

    def _opener(self, original: Any, names: Mapping[torch.dtype, str]) -> type:
        """Return a replacement for the class ``safetensors.safe_open`` that opens checkpoints of this recording.

        It opens a sparse file with the saved header. The tensors' bytes are zeros, which a recording does not read.

        ``names``: dtype -> its name in a header.
        """

        class safe_open:  # its name in safetensors
            def __new__(cls, filename: Any, *args: Any, **kwargs: Any) -> Any:
                self._before("load")
                number = self._number_of(self._first_bytes(filename))
                if number is None:
                    return original(filename, *args, **kwargs)
                file = os.memfd_create("checkpoint")
                try:
                    header, data = _header(self._saved[number], names)
                    os.write(file, header)
                    os.truncate(file, len(header) + data)
                    return original(f"/proc/self/fd/{file}", *args, **kwargs)
                finally:
                    os.close(file)

        return safe_open

    def _reduce(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return how to pickle a tensor without values, as ``__reduce__`` does: a function and its arguments. The
        sandbox recognizes a checkpoint by `MARK` among them."""
        layout = (tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."))
        return _rebuild, (MARK, *layout, tensor.requires_grad, isinstance(tensor, nn.Parameter))


def _header(saved: Mapping[str, Any], names: Mapping[torch.dtype, str]) -> tuple[bytes, int]:
    """Return the first bytes of a safetensors file with these tensors (of `shapes_of`), and the bytes of its data."""
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in sorted(saved.items(), key=lambda item: (-item[1].meta.itemsize, item[0])):
        begin, end = end, end + tensor.meta.nbytes
        shape = list(tensor.meta.shape)
        content[name] = {"dtype": names[tensor.meta.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = compact(content).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def _rebuild(
    mark: bytes, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, needs_grad: bool, is_parameter: bool
) -> torch.Tensor:
    """Return a new tensor in place of one that was pickled without values; ``mark`` is only there to be recognized."""
    tensor = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype))
    return nn.Parameter(tensor, needs_grad) if is_parameter else tensor.requires_grad_(needs_grad)
