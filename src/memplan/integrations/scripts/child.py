"""The process in which a script runs: its request, its protection, its answer."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch

from memplan.dry.library import cache_folder
from memplan.errors import MemplanError
from memplan.integrations.scripts.answer import text_of_error, text_of_run
from memplan.integrations.scripts.landlock import refuse_effects
from memplan.integrations.scripts.recorded import run_request
from memplan.integrations.scripts.request import Request
from memplan.integrations.scripts.sandbox.messages import TRACEBACK, Setting
from memplan.integrations.scripts.views import OverlaidView, RedirectedView, View
from memplan.trace.measure import is_cuda

_INPUT, _ERRORS = 0, 2


def answer(text: str) -> NoReturn:
    """Answer the request on standard input, a `Setting` as JSON, and end at once: threads may be left."""
    setting = Setting(**json.loads(text))
    with open(_INPUT, "rb", closefd=False) as file:
        request: Request = pickle.loads(file.read())
    null_device = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_device, _INPUT)
    os.close(null_device)
    if TRACEBACK is not None:
        faulthandler.register(TRACEBACK, file=_ERRORS, all_threads=True)
    sys.argv = [request.command.target]
    if request.contribute is not None:
        request = replace(request, contribute=os.path.join(setting.temporary, "contributed.json"))
    # opened now, as the script may close descriptors or change its working folder
    channel = os.open(setting.answer, os.O_WRONLY)
    _protect_descriptors(channel, *([] if setting.control is None else [setting.control]))
    view = _protect(request, setting)

    def give_up(error: MemplanError) -> NoReturn:
        """Answer with an error, and end."""
        _write(channel, text_of_error(error))
        _end()

    try:
        ran = run_request(request, view, give_up)
        contributed = None
        if request.contribute is not None:
            contributed = Path(request.contribute).read_text(encoding="utf-8")
        _write(channel, text_of_run(ran, contributed))
    except MemplanError as error:
        if error.__cause__ is not None:  # shown with what the script prints
            traceback.print_exception(error.__cause__)
        give_up(error)
    _end()


def _protect(request: Request, setting: Setting) -> View:
    """Set up the protection of the real files in this process, and return the view of the files that the script gets:
    overlays, files redirected under Landlock, or the files themselves."""
    tempfile.tempdir = setting.temporary
    own_folders = (os.path.dirname(setting.temporary), str(cache_folder().parent))
    if setting.control is not None:
        return OverlaidView(setting.control, own_folders)
    if setting.protection == "landlock":
        if (request.device is None or is_cuda(request.device)) and torch.cuda.is_available():
            torch.cuda.init()  # under Landlock it would find no GPU
        refuse_effects(setting.temporary)
        return RedirectedView(setting.temporary)
    return View()


# the originals: when they are needed, the script or its sandbox may have replaced them in os
_write_all, _exit, _close, _close_range = os.write, os._exit, os.close, os.closerange


def _protect_descriptors(*protected: int) -> None:
    """Make os.close and os.closerange spare these descriptors: a daemon closes all when it starts."""

    def close(fd: int) -> None:
        if fd not in protected:
            _close(fd)

    def close_range(low: int, high: int, /) -> None:
        for descriptor in sorted(protected):
            if low <= descriptor < high:
                _close_range(low, descriptor)
                low = descriptor + 1
        _close_range(low, high)

    os.close, os.closerange = close, close_range


def _write(channel: int, text: str) -> None:
    """Write the answer to a descriptor; if the script has closed it, tell the user on stderr and exit."""
    data, written = text.encode("utf-8", "replace"), 0
    try:
        while written < len(data):
            written += _write_all(channel, data[written:])
    except OSError as error:
        print(f"the script closed the descriptor on which memplan answers ({error})", file=sys.stderr, flush=True)
        _exit(1)


def _end() -> NoReturn:
    """End the process at once, without waiting for threads of the script."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed by the script
            stream.flush()
    _exit(0)
