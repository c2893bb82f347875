"""The working folder, at a cost that does not grow with its depth."""

from __future__ import annotations

import errno
import os

_readlink, _getcwd = os.readlink, os.getcwd


def working_folder() -> str:
    """Return the path of the working folder.

    Where that is longer than paths can be, glibc's getcwd looks through every folder above; this raises OSError.
    """
    try:
        return _readlink("/proc/self/cwd")
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise
        return _getcwd()  # not Linux
