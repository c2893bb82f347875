"""Checkpoints of a recording. Its tensors have no values: a short text with a number is saved in their place.

The text goes wherever a checkpoint goes: through buffers, open files, copies and renames. What is loaded from it has
the shapes that were saved.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn

from memplan import _torch
from memplan.integrations.scripts.effects import Effects
from memplan.integrations.scripts.loaded import as_recorded, new_tensors, shapes_of
from memplan.integrations.scripts.sandbox.messages import MARK

_DIGITS = 16
_LENGTH = len(MARK) + _DIGITS
"""Bytes of the text."""


class Checkpoints:
    """Saves and loads of one run of a script.

    Args:
        effects: told of each.
        values: whether tensors have values, which are saved and loaded as they are.
        writes: whether a path that is saved to is written; if not, it is known by its path alone.
    """

    def __init__(self, effects: Effects, *, values: bool, writes: bool) -> None:
        self._effects = effects
        self._values = values
        self._writes = writes
        self._saved: list[Any] = []
        """What was saved, as shapes; the text in its file has its place here."""
        self._by_path: dict[str, bytes] = {}
        """Texts of paths that were not written."""

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Replace the functions that save and load tensors."""
        with ExitStack() as stack:
            stack.enter_context(_torch.patched(torch, save=self._saving(torch.save), load=self._loading(torch.load)))
            jit = torch.jit
            stack.enter_context(_torch.patched(jit, save=self._saving(jit.save), load=self._loading(jit.load)))
            if not self._values:
                stack.enter_context(_torch.pickled_fakes(self._pickled))
                # what torch.jit makes of a module runs as that module, and scripts save it by its method
                stack.enter_context(
                    _torch.patched(nn.Module, save=lambda module, f, **kwargs: torch.jit.save(module, f))
                )
            with suppress(ImportError):
                import safetensors.torch as tensors  # before the script's libraries take functions from it

                save, load = self._saving(tensors.save_file), self._loading(tensors.load_file)
                storage_ptr = tensors.storage_ptr
                if not self._values:  # storages without data all have the address 0: tell them apart by their identity
                    storage_ptr = lambda tensor: _torch.storage_key(tensor.untyped_storage())  # noqa: E731
                stack.enter_context(
                    _torch.patched(
                        tensors, save_file=save, load_file=lambda filename, device="cpu": load(filename, str(device)),
                        save_model=lambda model, filename, *args, **kwargs: save(model.state_dict(), filename),
                        save=tensors.save if self._values else lambda tensors, *args, **kwargs: self._kept(tensors),
                        load=self._loading_bytes(tensors.load),
                        storage_ptr=storage_ptr,
                    )
                )  # fmt: skip
            yield

    def _kept(self, saved: Any) -> bytes:
        """Keep the shapes of what is saved, and return the text that stands for it."""
        self._saved.append(shapes_of(saved))
        return MARK + f"{len(self._saved) - 1:0{_DIGITS}d}".encode()

    def _found(self, text: bytes, device: Any) -> Any:
        """Return what a text stands for, as new tensors; None where it is none of this run's."""
        if text[: len(MARK)] != MARK or not text[len(MARK) : _LENGTH].isdigit():
            return None
        number = int(text[len(MARK) : _LENGTH])
        return new_tensors(self._saved[number], device) if number < len(self._saved) else None

    def _saving(self, plain: Callable[..., None]) -> Callable[..., None]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            is_path = isinstance(f, (str, os.PathLike))
            path = os.path.abspath(os.fsdecode(f)) if is_path else str(getattr(f, "name", type(f).__name__))
            if is_path or hasattr(f, "name"):
                self._effects.note("checkpoint", path)
            if self._values:
                return plain(obj, f, *args, **kwargs)
            text = self._kept(obj)
            if not is_path:
                f.write(text)
            elif self._writes:
                with open(path, "wb") as file:
                    file.write(text)
            else:
                self._by_path[path] = text

        return save

    def _loading(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that loads; in a recording, as tensors of the recording."""
        if self._values:
            return plain

        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            found = self._found(self._text_in(f), map_location)
            if found is not None:
                return found
            with _torch.no_modes():
                loaded = plain(f, "cpu", *args, **kwargs)
            return as_recorded(loaded, map_location)

        return load

    def _text_in(self, f: Any) -> bytes:
        """Return what a file begins with; a file that is open goes on from where it was."""
        if isinstance(f, (str, os.PathLike)):
            path = os.path.abspath(os.fsdecode(f))
            if path in self._by_path:
                return self._by_path[path]
            with suppress(OSError), open(path, "rb") as file:
                return file.read(_LENGTH)
            return b""
        try:
            place = f.tell()
            text = f.read(_LENGTH)
            f.seek(place)
        except (AttributeError, io.UnsupportedOperation):  # what cannot be read twice
            return b""
        return text if isinstance(text, bytes) else b""

    def _loading_bytes(self, plain: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        def load(data: bytes) -> Any:
            found = None if self._values else self._found(data, "cpu")
            return plain(data) if found is None else found

        return load

    def _pickled(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return how pickle writes a tensor without values: with the mark, by which its file is known."""
        layout = (tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."))
        return _unpickled, (MARK, *layout, tensor.requires_grad, isinstance(tensor, nn.Parameter))


def _unpickled(
    mark: bytes, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, needs: bool, is_parameter: bool
) -> torch.Tensor:
    tensor = torch.empty_strided(shape, strides, dtype=getattr(torch, dtype))
    return nn.Parameter(tensor, needs) if is_parameter else tensor.requires_grad_(needs)
