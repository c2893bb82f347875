"""DeepSpeed is refused by name: it compiles kernels where it starts, and communicates by its own module.

Seen in DeepSpeed 0.19.8: ``deepspeed.initialize`` calls ``deepspeed.comm.init_distributed``, which compiles C++ on the
CPU, and needs a GPU's compiler elsewhere.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any, NoReturn

from memplan._torch.patches import patched
from memplan.errors import StepError

_BEGINNINGS = "initialize", "init_distributed", "init_inference"
_MODULES = "deepspeed", "deepspeed.comm"


@contextlib.contextmanager
def deepspeed_refused() -> Iterator[None]:
    """Raise StepError where DeepSpeed is started in this context, also where it is imported in it."""
    execute = SourceFileLoader.exec_module
    with contextlib.ExitStack() as stack:

        def refuse(module: ModuleType) -> None:
            """Replace the functions of a module of DeepSpeed by which it is started."""
            names = [name for name in _BEGINNINGS if name in vars(module)]
            stack.enter_context(patched(module, **dict.fromkeys(names, _refuse)))

        def execute_and_refuse(loader: Any, module: ModuleType) -> None:
            """Replace Python's execution of an imported module."""
            execute(loader, module)
            if module.__name__ in _MODULES:
                refuse(module)

        stack.enter_context(patched(SourceFileLoader, exec_module=execute_and_refuse))
        for name in _MODULES:
            if name in sys.modules:
                refuse(sys.modules[name])
        yield


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise StepError(
        "DeepSpeed is not recorded: it compiles its kernels and needs its own processes",
        expected="a model that torch shards",
        do="memplan layouts TARGET --world N shards the same: ZeRO-3 as its rows FSDP2, ZeRO-2 as FSDP2, kept "
        "(reshard_after_forward=False); ZeRO-1 is DDP with torch's ZeroRedundancyOptimizer",
    )
