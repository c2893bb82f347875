"""An explanation as JSON text: the same text for the same explanation."""

from __future__ import annotations

import json

from memplan.explanation.model import Explanation


def dumps(explanation: Explanation) -> str:
    """``explanation.to_dict()`` as JSON, indented, in the order of its fields. All sizes are bytes.

    Example:
        >>> json.loads(dumps(explanation)) == explanation.to_dict()
        True
    """
    return json.dumps(explanation.to_dict(), indent=1, allow_nan=False) + "\n"
