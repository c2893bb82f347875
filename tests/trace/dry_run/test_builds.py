"""A build reaches another process by its name where it has one, else as code of the same Python."""

from __future__ import annotations

import functools
import gc
import json
import sys
from pathlib import Path

import pytest

from memplan.errors import TargetError, UsageError
from memplan.trace.dry_run.builds import VERSION, Packed, packed, unpacked

OTHER = (3, 99)


def build() -> object:
    return "built"


def test_a_function_of_a_module_goes_by_its_name() -> None:
    found = packed(gc.collect, OTHER)
    assert (found.module, found.name, found.code, found.data) == ("gc", "collect", None, None)
    assert unpacked(found) is gc.collect


def test_a_file_stands_in_for_a_module_that_cannot_be_imported_there(tmp_path: Path) -> None:
    file = tmp_path / "steps_over_there.py"
    file.write_text("def build():\n    return 42\n")
    found = unpacked(Packed("steps_over_there", "build", str(file)))
    assert found() == 42
    sys.modules.pop("steps_over_there")


def test_a_partial_of_a_function_is_pickled() -> None:
    found = packed(functools.partial(json.dumps, [1]), OTHER)
    assert found.data is not None
    assert unpacked(found)() == "[1]"


def test_a_closure_goes_as_code_to_the_same_python_alone() -> None:
    number = 7
    found = packed(lambda: number, VERSION)
    assert found.code is not None
    assert unpacked(found)() == 7
    with pytest.raises(UsageError, match=r"no name that Python 3.99 could import.*Define it at the top of a file"):
        packed(lambda: number, OTHER)


def test_what_no_pickle_takes_is_refused() -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(UsageError, match="build cannot be sent to another process"):
        packed(lambda: lock, VERSION)


def test_a_name_that_is_missing_there_is_said() -> None:
    with pytest.raises(TargetError, match="json has no 'nothing' there"):
        unpacked(Packed("json", "nothing"))
