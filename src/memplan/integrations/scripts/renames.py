"""Renames that an overlay refuses as if the target were on another disk.

Every folder below the root has an overlay of its own, and one that a user may mount renames no folder that was there
before: its option ``redirect_dir`` is for root alone. https://docs.kernel.org/filesystems/overlayfs.html
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from memplan import _torch


@contextmanager
def renames_copied() -> Iterator[None]:
    """Let `os.rename` and `os.replace` copy what cannot be renamed, and remove the source."""
    with _torch.patched(os, rename=_copying(os.rename), replace=_copying(os.replace)):
        yield


def _copying(rename: Callable[..., None]) -> Callable[..., None]:
    def renamed(src: Any, dst: Any, **folders: int | None) -> None:
        try:
            return rename(src, dst, **folders)
        except OSError as error:
            if error.errno != errno.EXDEV or any(folder is not None for folder in folders.values()):
                raise
        source, target = os.fsdecode(src), os.fsdecode(dst)
        # beside the target, so that what it may replace is decided by the system's own rename
        with tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.abspath(target))) as beside:
            copy = os.path.join(beside, "copy")
            if os.path.isdir(source) and not os.path.islink(source):
                shutil.copytree(source, copy, symlinks=True)
                rename(copy, target)
                shutil.rmtree(source)
            else:
                shutil.copy2(source, copy, follow_symlinks=False)
                rename(copy, target)
                os.unlink(source)

    return renamed
