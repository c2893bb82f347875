"""What pyright reads of scipy.sparse: names of any type, as of scipy.optimize."""

from typing import Any

def __getattr__(name: str) -> Any: ...
