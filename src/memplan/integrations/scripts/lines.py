"""The line of the script that leads to what is happening now."""

from __future__ import annotations

import os

from memplan._frames import callers
from memplan.trace.recording.place import format_frame, user_frame


def script_line(folder: str) -> str | None:
    """Return ``file:line`` of the innermost frame whose file lies in the script's folder, else of the user's code."""
    for frame in callers():
        file = frame.f_code.co_filename
        if not file.startswith("<") and "-packages" not in file and os.path.abspath(file).startswith(folder + os.sep):
            return format_frame((file, frame.f_lineno))
    return format_frame(user_frame())
