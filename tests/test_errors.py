from __future__ import annotations

import pickle

import pytest

from memplan import errors
from memplan.errors import (
    BudgetError,
    DataDependentError,
    InputError,
    MemplanError,
    RecordingError,
    StepError,
    TargetError,
    UsageError,
)

PARENTS = {
    "UsageError": (MemplanError, ValueError),
    "TargetError": (UsageError,),
    "InputError": (UsageError,),
    "DeviceError": (UsageError,),
    "UnitError": (UsageError,),
    "FormatError": (InputError,),
    "SnapshotFormatError": (UsageError,),
    "TraceFormatError": (InputError,),
    "PlanFormatError": (InputError,),
    "BaselineError": (UsageError,),
    "BudgetError": (UsageError,),
    "RecordingError": (MemplanError, RuntimeError),
    "DataDependentError": (RecordingError,),
    "StepError": (RecordingError,),
    "EndlessError": (RecordingError,),
    "VerificationError": (MemplanError, RuntimeError),
    "CompileError": (MemplanError, RuntimeError),
    "BackwardError": (MemplanError, RuntimeError),
    "PeakError": (MemplanError, AssertionError),
    "ScheduleError": (MemplanError, AssertionError),
}


def test_the_tree_is_this_one_and_its_docstring_draws_it_all() -> None:
    kinds = {
        name: kind.__bases__
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception)
    }
    assert kinds.pop("MemplanError") == (Exception,)
    assert kinds == PARENTS
    drawn = errors.__doc__ or ""
    assert [name for name in ["MemplanError", *PARENTS] if name not in drawn] == []


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemplanError("Found a cat"), "Found a cat."),
        (MemplanError("Found a cat", expected="a dog"), "Found a cat. Expected a dog."),
        (MemplanError("Found a cat", do="Call it"), "Found a cat. Call it."),
        (
            TargetError("No file train.py", expected="file.py:callable", do="Name a file that exists"),
            "No file train.py. Expected file.py:callable. Name a file that exists.",
        ),
        (RecordingError("It broke"), "It broke."),
        (RecordingError("It broke", layer="net.0"), "It broke (in layer net.0)."),
        (StepError("It broke", where="a.py:3", do="Mend it"), "It broke (at a.py:3). Mend it."),
        (
            DataDependentError("A shape depends on values", layer="net.0", where="a.py:3"),
            "A shape depends on values (in layer net.0, at a.py:3).",
        ),
        (
            BudgetError("Too little", expected="2 B or more", smallest_budget=2),
            "Too little. Expected 2 B or more.",
        ),
    ],
)
def test_a_message_says_what_was_found_what_was_expected_and_what_to_do(error: MemplanError, text: str) -> None:
    assert str(error) == text
    assert "\n" not in text


def test_attributes() -> None:
    error = StepError("It broke", layer="net.0", where="a.py:3")
    assert (error.layer, error.where) == ("net.0", "a.py:3")
    assert (RecordingError("It broke").layer, RecordingError("It broke").where) == (None, None)
    assert BudgetError("Too little", smallest_budget=7).smallest_budget == 7


@pytest.mark.parametrize(
    "error",
    [
        UsageError("Found a cat", expected="a dog", do="Call it"),
        BudgetError("Too little", do="Give more", smallest_budget=7),
        DataDependentError("A shape depends on values", layer="net.0", where="a.py:3"),
    ],
)
def test_an_error_survives_the_way_between_processes(error: MemplanError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_an_error_about_one_of_two_is_another_and_leaves_the_first_as_it_is() -> None:
    first = BudgetError("Too little", expected="2 B", smallest_budget=7)
    told = first.about("net B")
    assert type(told) is BudgetError
    assert str(told) == "net B: Too little. Expected 2 B."
    assert (told.found, told.expected, told.do, told.smallest_budget) == ("net B: Too little", "2 B", None, 7)
    assert (str(first), first.found) == ("Too little. Expected 2 B.", "Too little")


def test_a_question_has_no_full_stop() -> None:
    assert str(MemplanError("No loss 'mse'", do="Did you mean mse_loss?")) == "No loss 'mse'. Did you mean mse_loss?"


def test_a_message_is_one_line_of_bounded_length() -> None:
    error = MemplanError("found\n  two lines" + "x" * 100_000 + "end", do="a\r\nb")
    text = str(error.about("file\nname"))
    assert len(text.splitlines()) == 1
    assert len(text) < 3000
    assert text.startswith("file name: found two lines")
    assert "end. a b." in text
