"""What pyright reads of transformers: names of any type.

Its own ``__init__`` imports all of its models for type checkers. With these a check of memplan reads 2,700 files more
and exceeds pyright's memory, so that it forgets types and infers them again.
"""

from typing import Any

def __getattr__(name: str) -> Any: ...
