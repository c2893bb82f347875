"""What an op takes on the CPU besides its results: the temporaries inside its kernel."""

from __future__ import annotations

from typing import Any


def transient_bytes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Bytes that the kernel holds together with the op's results, before it returns."""
    return 0
