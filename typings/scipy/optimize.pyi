"""What pyright reads of scipy.optimize: names of any type. To infer that of a solver's result takes ten seconds."""

from typing import Any

def __getattr__(name: str) -> Any: ...
