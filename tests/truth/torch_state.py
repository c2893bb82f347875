"""The state of torch and of this process that a call may not change: one snapshot before, one after, what differs.

`kept` compares around a call that may fail: all attributes of torch's loaded modules and their classes, and of the
modules of Python that a recording or a fit replaces parts of; torch's modes, flags, defaults and hooks; random states,
environment, signals, gc, warnings and threads.
"""

from __future__ import annotations

import builtins
import concurrent.futures
import contextlib
import functools
import gc
import io
import logging
import multiprocessing.process
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torch._dynamo.eval_frame
import torch._inductor.compile_fx  # pyright: ignore[reportUnusedImport]  # whose import changes torch, once
import torch.optim.optimizer as optimizer_hooks
from torch.nn.modules import module as module_hooks

_DETERMINISTIC: Any = torch.utils.deterministic
_OTHERS = (
    builtins, concurrent.futures, io, logging, multiprocessing.process, os, random, shutil, socket, subprocess, sys,
    tempfile, threading, warnings,
)  # fmt: skip
_COUNTED = (
    "torch._subclasses.meta_utils.DESCRIBER_NEXT_ID", "torch.autograd.profiler._cupti_monitor_",
    "torch._opaque_base._FakeScriptObject_cls", "torch.utils.hooks.RemovableHandle.next_id",
    "torch._subclasses.fake_tensor.FakeTensorMode.cache_", "torch._dynamo.utils.CHROMIUM_EVENT_LOG",
    "torch._decomp.decompositions_for_rng.PhiloxStateTracker.", "sys.last_", "builtins._", "threading._",
    "torch._functorch._aot_autograd.logging_utils.callback_set",
)  # fmt: skip
"""Beginnings of names that torch or Python count in, or set when they are first needed."""
_MADE_ONCE = ("__doc__", "__signature__", "__abstractmethods__", "_abc_impl")
for _kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
    _kind([torch.zeros(1)])  # its class's method `step` is wrapped with the first one

Names = dict[str, tuple[Any, dict[str, Any]]]
"""Full name of a module or a class -> it, and its attributes."""


@functools.lru_cache(maxsize=1)
def _owners(modules: int) -> dict[str, Any]:
    """Return modules and their classes by full name; ``modules``: how many are loaded."""
    torchs = [one for name, one in list(sys.modules.items()) if name.partition(".")[0] == "torch"]
    found: dict[str, Any] = {}
    for module in (*(one for one in torchs if type(one) is types.ModuleType), *_OTHERS):
        title = module.__name__
        found[title] = module
        for name, value in list(vars(module).items()):
            if issubclass(type(value), type) and vars(value).get("__module__") == title:
                found[f"{title}.{name}"] = value
    return found


def names() -> Names:
    """Return the attributes of modules and of their classes."""
    return {name: (one, dict(vars(one))) for name, one in _owners(len(sys.modules)).items()}


def switches() -> dict[str, Any]:
    """Return torch's modes, flags, defaults and hooks."""
    backends, c = torch.backends, torch._C
    return {
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "autocast": [(torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in ("cpu", "cuda")],
        "autocast's cache": torch.is_autocast_cache_enabled(),
        "dtype and device": (torch.get_default_dtype(), str(torch.get_default_device())),
        "deterministic": (torch.get_deterministic_debug_mode(), _DETERMINISTIC.fill_uninitialized_memory),
        "threads of ops": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "precision": (torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32),
        "cuDNN": (backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic),
        "attention": (
            backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(), backends.cuda.cudnn_sdp_enabled(),
        ),
        "oneDNN": backends.mkldnn.enabled,
        "modes": (c._len_torch_dispatch_stack(), c._len_torch_function_stack(), c._is_torch_function_enabled()),
        "functorch": c._functorch.peek_interpreter_stack() is None,
        "backward": (c._is_multithreading_enabled(), c._autograd._top_saved_tensors_default_hooks(True)),
        "stance": str(torch._dynamo.eval_frame._stance),
        "profiler": c._autograd._profiler_enabled(),
        "hooks": [
            len(value)
            for hooks in (module_hooks, optimizer_hooks)
            for name, value in vars(hooks).items()
            if name.startswith("_global_") and hasattr(value, "__len__")
        ],
    }  # fmt: skip


def process() -> dict[str, Any]:
    """Return what of the process a call may not change."""
    return {
        "random state of torch": torch.get_rng_state().tolist(),
        "random state of Python": random.getstate(),
        "random state of numpy": str(numpy.random.get_state(legacy=True)),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "arguments": list(sys.argv),
        "import path": list(sys.path),
        "signals": [signal.getsignal(one) for one in signal.valid_signals()],
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks), gc.get_debug()),
        "tracing": (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
        "warnings": list(warnings.filters),
        "logging": (logging.root.level, logging.root.manager.disable, list(logging.root.handlers)),
        "threads": sorted(one.name for one in threading.enumerate()),
        "recursion": sys.getrecursionlimit(),
    }


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Check that a block leaves all of it as before, whether it raises or not."""
    attributes, before = names(), {**switches(), **process()}
    try:
        yield
    finally:
        after = {**switches(), **process()}
        wrong = [
            f"{name}: {before[name]!s:.200} -> {after[name]!s:.200}" for name in before if before[name] != after[name]
        ]
        wrong += differing(attributes)
        assert not wrong, "\n".join(["left changed:", *wrong])


def differing(before: Names) -> list[str]:
    """Return the attributes that are not the same objects as before; what was imported or made since is left out."""
    found: list[str] = []
    for owner, (one, attributes) in before.items():
        now = vars(one)
        for name, value in attributes.items():
            full = f"{owner}.{name}"
            if now.get(name) is value or full.startswith(_COUNTED) or name in _MADE_ONCE:
                continue
            found.append(f"{full}: {value!s:.100} -> {now.get(name)!s:.100}")
    return found
