"""``%load_ext memplan``: what IPython calls to load it."""

from __future__ import annotations

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """Register ``%%memplan``, ``%memplan`` and ``%mprun``."""
    from memplan.integrations.notebook.magics import MemoryMagics

    magics = MemoryMagics(shell)
    shell.register_magic_function(magics.memplan, "line_cell", "memplan")
    shell.register_magic_function(magics.mprun, "line", "mprun")
