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
    with _torch.patched(os, rename=_with_copy(os.rename), replace=_with_copy(os.replace)):
        yield


def _with_copy(rename: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement for ``rename`` that on EXDEV copies the source into place and removes it."""

    def rename_or_copy(src: Any, dst: Any, **folders: int | None) -> None:
        try:
            return rename(src, dst, **folders)
        except OSError as error:
            if error.errno != errno.EXDEV or any(folder is not None for folder in folders.values()):
                raise
        source, target = os.fsdecode(src), os.fsdecode(dst)
        # in the target's folder, so that the system's own rename decides what may be replaced
        with tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.abspath(target))) as folder:
            copy = os.path.join(folder, "copy")
            if os.path.isdir(source) and not os.path.islink(source):
                shutil.copytree(source, copy, symlinks=True)
                rename(copy, target)
                shutil.rmtree(source)
            else:
                shutil.copy2(source, copy, follow_symlinks=False)
                rename(copy, target)
                os.unlink(source)

    return rename_or_copy
