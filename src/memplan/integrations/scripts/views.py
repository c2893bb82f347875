"""The file system as a script's process sees it, for each protection of the real files; anew for each run."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from memplan.errors import StepError
from memplan.integrations.scripts.effects import Effects
from memplan.integrations.scripts.redirected_files import RedirectedFiles
from memplan.integrations.scripts.renames import renames_copied
from memplan.integrations.scripts.sandbox.messages import NEXT, Change, Changes


class View:
    """The real files, without protection."""

    protects = False
    """Whether writes do not reach the real files, or only after a check for checkpoints."""
    own: tuple[str, ...] = ()
    """memplan's own folders: changes below these are not the script's."""

    @contextmanager
    def one_run(self, effects: Effects) -> Iterator[None]:
        """Within this context a run sees these files; changes are noted in ``effects``."""
        yield

    def changes(self) -> Changes:
        """Return the changes of the last run, and discard them: the next run sees the real files again."""
        return Changes()


class OverlaidView(View):
    """Overlays mounted by the supervisor, which answers requests on the socket ``control``."""

    protects = True

    def __init__(self, control: int, own: tuple[str, ...]) -> None:
        """``control``: socket to the supervisor, which mounts the overlays; ``own``: folders of memplan's files, whose
        changes are not the script's."""
        self._control = control
        self.own = own

    @contextmanager
    def one_run(self, effects: Effects) -> Iterator[None]:
        """Within this context, renames that an overlay refuses (of an older folder, to another overlay) are copies."""
        with renames_copied():
            yield

    def changes(self) -> Changes:
        """Return the changes in the overlays of the last run; the supervisor mounts new overlays."""
        folder = os.getcwd()
        answer = b""
        try:
            os.write(self._control, NEXT)
            while not answer.endswith(b"\n"):
                block = os.read(self._control, 1 << 16)
                if not block:
                    return Changes()
                answer += block
        except OSError as error:
            raise StepError(
                f"the script closed the descriptor on which memplan asks for its files ({error})",
                expected="a script that closes its own descriptors",
                do="Close them with os.close or os.closerange, which leave memplan's open",
            ) from None
        os.chdir(folder if os.path.isdir(folder) else "/")  # into the new overlay
        changes = json.loads(answer)
        return Changes(tuple(Change(**row) for row in changes["rows"]), changes["more"])


class RedirectedView(View):
    """Redirects Python's writes to a folder; the kernel refuses all other writes."""

    protects = True

    def __init__(self, folder: str) -> None:
        """``folder``: gets the files that the script writes."""
        self._folder = folder
        self._changes: list[Change] = []
        """Files that were written or removed."""

    @contextmanager
    def one_run(self, effects: Effects) -> Iterator[None]:
        """Within this context, redirect writes to a new folder."""
        from memplan.integrations.scripts.shared_memory import private_shared_memory  # of POSIX

        self._changes = []

        def note(path: str, *, removed: bool = False) -> None:
            effects.note_change(path)
            self._changes.append(Change(path, "removed" if removed else "file"))

        folder = tempfile.mkdtemp(dir=self._folder)
        with private_shared_memory(os.path.join(folder, "shm")), RedirectedFiles(folder, note).redirecting():
            yield

    def changes(self) -> Changes:
        """Return the changes of the last run."""
        return Changes(tuple(self._changes))
