"""What a script does beyond files, held back: checkpoints, connections, other processes."""

from __future__ import annotations

import concurrent.futures
import errno
import multiprocessing
import multiprocessing.process
import os
import socket
import subprocess
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.pool import ThreadPool
from typing import Any

import torch

from memplan import _torch
from memplan.errors import StepError
from memplan.integrations.scripts.held_files import HeldFiles
from memplan.integrations.scripts.lines import script_line
from memplan.integrations.scripts.loaded import as_recorded, made_again, shapes_of
from memplan.trace.program_facts import Held, HeldKind

OFFLINE = {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
"""Switches of libraries that would try the network again and again."""
_HERE = ("127.", "localhost", "::1", "0.0.0.0")


def _pool(own: Any, processes: int | None = None, *rest: Any, **kwargs: Any) -> ThreadPool:
    """Return a pool that works in this process."""
    return ThreadPool(1, *rest[:2], **{name: value for name, value in kwargs.items() if name.startswith("init")})


def _executor(max_workers: int | None = None, **kwargs: Any) -> concurrent.futures.Executor:
    known = {name: value for name, value in kwargs.items() if name.startswith("init")}
    return concurrent.futures.ThreadPoolExecutor(1, **known)


class HeldCalls:
    """Keeps a script from writing files, saving checkpoints, connecting and starting processes, and notes each.

    Args:
        folder: an empty one, for what it writes.
        script: the folder of the script's own code.
        writes: whether files, connections and processes are its own after all.
        values: whether its tensors have values; without, a checkpoint is never written.
    """

    def __init__(self, folder: str, script: str, *, writes: bool = False, values: bool = False) -> None:
        self._script = script
        self._writes = writes
        self._values = values
        self._seen: dict[tuple[HeldKind, str, str | None], int] = {}
        self._saved: dict[str, Any] = {}
        """Path of a checkpoint -> the shapes of what the script saved there."""
        self._buffers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._files = HeldFiles(folder, lambda path: self._note("file", path))

    def rows(self) -> tuple[Held, ...]:
        """Return what was held back, in order."""
        return tuple(Held(kind, what, where, count) for (kind, what, where), count in self._seen.items())

    @contextmanager
    def back(self) -> Iterator[None]:
        """Hold back all of it in here."""
        with ExitStack() as stack:
            if not (self._writes and self._values):
                save, load = self._saving(torch.save), self._loading(torch.load)
                stack.enter_context(_torch.patched(torch, save=save, load=load))
                with suppress(ImportError):
                    import safetensors.torch as tensors  # before the script's libraries take functions from it

                    save = self._saving(tensors.save_file)
                    named = {"save_file": save, "load_file": self._loading_named(tensors.load_file)}
                    stack.enter_context(_torch.patched(tensors, **named, save_model=self._saving_model(save)))
            stack.enter_context(_torch.patched(multiprocessing.process.BaseProcess, start=self._fork))
            stack.enter_context(_torch.patched(os, fork=self._fork))
            stack.enter_context(_torch.patched(BaseContext, Pool=_pool))
            stack.enter_context(_torch.patched(multiprocessing, Pool=partial(_pool, None)))
            stack.enter_context(_torch.patched(concurrent.futures, ProcessPoolExecutor=_executor))
            if not self._writes:
                stack.enter_context(self._world())
            yield

    @contextmanager
    def _world(self) -> Iterator[None]:
        """Hold back files, the network and other programs."""
        with ExitStack() as stack:
            for owner, new in (
                (socket.socket, {"connect": self._connecting(socket.socket.connect)}),
                (socket.socket, {"connect_ex": self._connecting(socket.socket.connect_ex)}),
                (socket, {"getaddrinfo": self._asking(socket.getaddrinfo)}),
                (subprocess.Popen, {"__init__": self._starting()}),
                (os, {"system": self._run}),
            ):
                stack.enter_context(_torch.patched(owner, **new))
            stack.enter_context(self._files.over_all())
            yield

    def _note(self, kind: HeldKind, what: str) -> None:
        key = kind, what, script_line(self._script)
        self._seen[key] = self._seen.get(key, 0) + 1

    def _saving(self, plain: Callable[..., None]) -> Callable[..., None]:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if not isinstance(f, (str, os.PathLike)):
                self._note("checkpoint", str(getattr(f, "name", type(f).__name__)))
                if self._values:  # a file of the script's own, which is held back itself
                    return plain(obj, f, *args, **kwargs)
                with suppress(TypeError):  # of what takes no weak reference
                    self._buffers[f] = shapes_of(obj)
                return
            path = os.path.abspath(os.fsdecode(f))
            self._note("checkpoint", path)
            if self._values:
                return plain(obj, self._files.written(path, copy=False, silent=True), *args, **kwargs)
            self._saved[path] = shapes_of(obj)
            if not self._writes:
                with open(self._files.written(path, copy=False, silent=True), "wb"):
                    pass  # whoever looks sees that there is a file

        return save

    def _saving_model(self, save: Callable[..., None]) -> Callable[..., None]:
        return lambda model, filename, *args, **kwargs: save(model.state_dict(), filename)

    def _loading(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return `torch.load`; in a recording it makes tensors of the recording."""
        if self._values:
            return plain

        def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
            saved = None
            if isinstance(f, (str, os.PathLike)):
                saved = self._saved.get(os.path.abspath(os.fsdecode(f)))
            else:
                with suppress(TypeError):  # of what takes no weak reference
                    saved = self._buffers.get(f)
            if saved is not None:
                return made_again(saved, map_location)
            with _torch.no_modes():
                loaded = plain(f, "cpu", *args, **kwargs)
            return as_recorded(loaded, map_location)

        return load

    def _loading_named(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        load = self._loading(lambda f, device, *args, **kwargs: plain(f, device, *args, **kwargs))
        return lambda filename, device="cpu": load(filename, str(device))

    def _connecting(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def connect(own: Any, address: Any) -> Any:
            if own.family not in (socket.AF_INET, socket.AF_INET6) or str(address[0]).startswith(_HERE):
                return plain(own, address)
            self._note("network", f"{address[0]}:{address[1]}")
            raise ConnectionRefusedError("memplan run holds the network back")

        return connect

    def _asking(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def ask(host: Any, *args: Any, **kwargs: Any) -> Any:
            if host is None or str(host).startswith(_HERE):
                return plain(host, *args, **kwargs)
            self._note("network", str(host))
            raise socket.gaierror(socket.EAI_AGAIN, "memplan run holds the network back")

        return ask

    def _starting(self) -> Callable[..., None]:
        def start(own: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
            words = [args] if isinstance(args, (str, bytes, os.PathLike)) else list(args)
            own.returncode, own._child_created = 127, False  # what its finalizer reads
            self._note("process", " ".join(os.fsdecode(word) for word in words)[:200])
            raise FileNotFoundError(errno.ENOENT, "memplan run starts no other programs", os.fsdecode(words[0]))

        return start

    def _run(self, command: Any) -> int:
        self._note("process", os.fsdecode(command)[:200])
        return 127

    def _fork(self, *args: Any) -> None:
        raise StepError(
            "the script starts processes of its own, and what they do is not seen",
            expected="a script that trains in one process",
            do="Run the function that one of them runs, alone (of several ranks: one)",
            where=script_line(self._script),
        )
