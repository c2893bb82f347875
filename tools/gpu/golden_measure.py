"""What is measured on the card: one step in a process of its own, whose first tensor on the GPU is that step's."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable
from typing import Any

import golden_steps
import torch
from golden_steps import Subject
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.trace.card_run import golden_format, machine

DEVICE = 0
MOST_EVENTS = 4_000_000
_LIBRARIES = ("transformers", "peft", "monai", "einops")
_KINDS = ("conv", "mm", "addmv", "linear", "matmul", "attention", "norm", "rnn", "lstm", "gru", "dot", "embedding")
Pair = list[int]
"""Bytes [allocated, reserved]."""


def golden(subject: Subject, *, alone: bool) -> dict[str, Any]:
    """Run a step on the card and return the content of its golden file.

    Args:
        subject: the step.
        alone: whether no other process uses the card, so that what is missing from it is this process's.
    """
    torch.cuda.init()
    torch.cuda.set_device(DEVICE)
    notes: list[str] = []
    record_history(True)
    start = _held()
    if any(start):
        notes.append(f"{start} bytes were held before the step: its history is not the whole one")
    torch.cuda.reset_peak_memory_stats(DEVICE)
    step = golden_steps.on_card(subject.build)()
    build = _settled_peak()
    peaks = []
    for _ in range(subject.steps):
        torch.cuda.reset_peak_memory_stats(DEVICE)
        step()
        peaks.append(_settled_peak())
    end = _held()
    context = _context(alone)
    events, segments, settings = _history(notes)
    record_history(False)
    workspaces, calls = _workspaces(step, notes)
    return {
        "format": golden_format.FORMAT, "version": golden_format.VERSION,
        "name": subject.name, "set": subject.set, "steps": subject.steps,
        "gpu": machine.gpu(DEVICE), "versions": machine.versions(_LIBRARIES),
        "environment": machine.environment(), "flags": machine.flags(),
        "allocator_settings": settings, "build": build, "peaks": peaks, "end": end, "context": context,
        "events": events, "segments": segments, "workspaces": workspaces, "calls": calls,
        "notes": notes,
    }  # fmt: skip


def record_history(on: bool) -> None:
    """Turn the history of the caching allocator on, without any stacks, or off."""
    if on:
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=MOST_EVENTS)
    else:
        torch.cuda.memory._record_memory_history(None)


def _held() -> Pair:
    return [torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_reserved(DEVICE)]


def _settled_peak() -> Pair:
    """The peak since the last reset, read when all work is done. Cyclic garbage goes now, as in a recording."""
    torch.cuda.synchronize(DEVICE)
    gc.collect()
    return [torch.cuda.max_memory_allocated(DEVICE), torch.cuda.max_memory_reserved(DEVICE)]


def _history(notes: list[str]) -> tuple[dict[str, Any] | None, list[list[Any]], dict[str, Any]]:
    """Events, segments and settings; without the events, and a note, where they cannot be had."""
    try:
        snapshot = torch.cuda.memory._snapshot()
        settings = golden_format.plain(snapshot.get("allocator_settings") or {})
        events, segments = golden_format.compact(snapshot, DEVICE)
    except Exception as error:  # the peaks stand without it
        notes.append(f"no events: {told(error)}")
        return None, [], {}
    if len(events["actions"]) >= MOST_EVENTS // 2:
        notes.append(f"no events: there are more than {MOST_EVENTS // 2}")
        return None, [], settings
    return events, segments, settings


def _context(alone: bool) -> dict[str, Any] | None:
    """Bytes of the card that this process holds and the caching allocator does not."""
    reserved = torch.cuda.memory_reserved(DEVICE)
    if alone:
        free, total = torch.cuda.mem_get_info(DEVICE)
        return {"bytes": total - free - reserved, "how": "total - free - reserved, alone on the card"}
    used = _used_by_this_process()
    return None if used is None else {"bytes": used - reserved, "how": "NVML's for the process - reserved"}


def _used_by_this_process() -> int | None:
    """What NVML says that this process holds of the card; None where it does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(DEVICE)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        found = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    except Exception:  # not installed, or forbidden: another way is given in `contexts`
        return None
    return int(found[0]) if found and found[0] else None


def told(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"[:300]


def _workspaces(
    step: Callable[[], Any], notes: list[str]
) -> tuple[list[list[Any]] | None, dict[str, list[int]] | None]:
    """Run the step once more and measure what every op takes beyond its results: rows, and calls by op."""
    mode = Workspaces()
    try:
        # Those of cuBLAS are kept once taken: let them be taken again, so that they show.
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
        with mode:
            step()
        torch.cuda.synchronize(DEVICE)
    except Exception as error:  # the events stand without it
        notes.append(f"no workspaces: {told(error)}")
        return None, None
    return mode.rows(), mode.calls()


class Workspaces(TorchDispatchMode):
    """For every aten op: bytes at its peak, less those before it, less those of the new storages that it returns.

    In bytes as requested, so that neither the allocator's rounding nor what it leaves uncut counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[tuple[str, str], list[Any]] = {}
        self._order: dict[str, list[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, measured."""
        kwargs = kwargs or {}
        before, _ = self.requested()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        result = func(*args, **kwargs)
        after, peak = self.requested()
        given = storages((args, kwargs))
        new = [size for place, size in storages(result).items() if place not in given]
        self.note(str(func), args, kwargs, peak - before - sum(new), after - before - sum(new), new)
        return result

    def requested(self) -> tuple[int, int]:
        """Bytes that tensors and libraries asked for and hold, and the most of it since the last reset."""
        stats = torch.cuda.memory_stats_as_nested_dict(DEVICE)["requested_bytes"]["all"]
        return stats["current"], stats["peak"]

    def note(self, name: str, args: Any, kwargs: Any, taken: int, kept: int, new: list[int]) -> None:
        """Enter one call, if its kind has workspaces or it took any."""
        listed = any(kind in name for kind in _KINDS)
        if taken <= 0 and kept <= 0 and not listed:
            return
        key = golden_format.op_key(args, kwargs)
        row = self._found.setdefault((name, key), [taken, taken, 0, 0, new])
        row[0], row[1] = max(row[0], taken), min(row[1], taken)
        row[2] += max(0, kept)
        row[3] += 1
        if listed:
            self._order.setdefault(name, []).append(key)

    def rows(self) -> list[list[Any]]:
        """[op, key, most, least, kept, count, results], in order of op and key.

        ``most`` and ``least`` are the bytes that a call took beyond its results; ``kept`` of them, in all calls, were
        still held afterwards (a library's workspace, the first time); ``count`` calls were alike; ``results`` are the
        bytes of each new storage that the first one returned.
        """
        return [[*names, *row] for names, row in sorted(self._found.items(), key=lambda item: item[0])]

    def calls(self) -> dict[str, list[int]]:
        """Which row each call of an op was, in order of time, for the ops whose kind has workspaces."""
        number = {names: index for index, names in enumerate(sorted(self._found))}
        return {name: [number[name, key] for key in keys] for name, keys in self._order.items()}


def storages(value: Any) -> dict[int, int]:
    """Address and bytes of every storage in nested lists, tuples and dicts that has any."""
    found: dict[int, int] = {}
    for tensor in _tensors(value):
        try:
            storage = tensor.untyped_storage()
            place, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # sparse, or without data
            continue
        if place and tensor.is_cuda:
            found[place] = size
    return found


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


CONTEXT_STEPS = (("vision", "resnet18"), ("sequences", "bf16_transformer"))


def contexts() -> list[dict[str, Any]]:
    """What CUDA takes as more and more kernels are loaded, in a process that is alone on the card. Bytes."""
    torch.cuda.init()
    torch.cuda.set_device(DEVICE)
    rows: list[dict[str, Any]] = []

    def note(after: str) -> None:
        torch.cuda.synchronize(DEVICE)
        free, total = torch.cuda.mem_get_info(DEVICE)
        reserved = torch.cuda.memory_reserved(DEVICE)
        rows.append({"after": after, "context": total - free - reserved, "total": total, "free": free,
                     "reserved": reserved})  # fmt: skip

    def try_out(after: str, run: Callable[[], Any]) -> None:
        try:
            run()
            note(after)
        except Exception as error:  # the rows so far stand
            rows.append({"after": after, "error": told(error)})

    try_out("nothing but the context", lambda: None)
    x = torch.zeros(256, 256, device="cuda")
    try_out("one elementwise op", lambda: x + 1)
    try_out("a product in float32", lambda: x @ x)
    try_out("a product in bfloat16", lambda: x.bfloat16() @ x.bfloat16())
    pictures = torch.zeros(2, 8, 32, 32, device="cuda")
    filters = torch.zeros(8, 8, 3, 3, device="cuda")
    try_out("a convolution", lambda: torch.nn.functional.conv2d(pictures, filters))
    for module, name in CONTEXT_STEPS:
        found, _ = golden_steps.subjects(module)
        if name in found:
            try_out(f"a step of {name}", lambda build=found[name].build: golden_steps.on_card(build)()())
    return rows
