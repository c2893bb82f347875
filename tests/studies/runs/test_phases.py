"""Parts of runs, written out by hand, are joined to the phases that a reader of the script would name."""

from __future__ import annotations

from memplan.studies.runs.phases import phases_of
from memplan.trace.program_facts import RunPart

_LENGTH = 10


def train(
    loader: int | None = 0, *, begins: bool = False, exhausted: bool = False, loads: bool = True
) -> RunPart:  # fmt: skip
    return RunPart(
        where="train.py:5", calls=1, training_calls=1, updates=1, loader=loader, begins_pass=begins,
        loads=loads and loader is not None, exhausted=exhausted, length=_LENGTH,
    )  # fmt: skip


def evaluate(loader: int | None = 1, *, begins: bool = False) -> RunPart:
    return RunPart(
        where="train.py:9", calls=1, loader=loader, loads=loader is not None, begins_pass=begins, length=_LENGTH
    )


def no_call(loader: int, *, begins: bool = False, exhausted: bool = False) -> RunPart:
    return RunPart(where="x.py:1", loader=loader, loads=True, begins_pass=begins, exhausted=exhausted, length=_LENGTH)


def names(parts: list[RunPart]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return [(span.kind, span.parts, span.active) for span in phases_of(parts)]


SAVE = RunPart("save", "train.py:12")
GENERATE = RunPart("generate", "train.py:6", calls=24, loader=0, length=_LENGTH)


def test_epochs_of_training_evaluation_and_a_checkpoint() -> None:
    epoch = [
        train(begins=True), train(), no_call(0, exhausted=True), evaluate(begins=True), evaluate(),
        no_call(1, exhausted=True), SAVE,
    ]  # fmt: skip
    assert names(epoch + epoch) == [
        ("train", (0, 1, 2), (0, 1)), ("evaluate", (3, 4, 5), (3, 4)), ("save", (6,), ()),
        ("train", (7, 8, 9), (7, 8)), ("evaluate", (10, 11, 12), (10, 11)), ("save", (13,), ()),
    ]  # fmt: skip


def test_an_evaluation_within_a_pass_interrupts_it() -> None:
    parts = [train(begins=True), evaluate(begins=True), evaluate(), no_call(1, exhausted=True), SAVE, train()]
    assert names(parts) == [("train", (0, 5), (0, 5)), ("evaluate", (1, 2, 3), (1, 2)), ("save", (4,), ())]


def test_rollouts_within_a_pass_are_one_phase() -> None:
    batch = [GENERATE, train(loads=False)]
    parts = [no_call(0, begins=True), *batch, no_call(0), *batch, no_call(0, exhausted=True)]
    assert names(parts) == [("generate", (0, 1, 3, 4), ()), ("train", (2, 5, 6), (2, 5))]
    assert phases_of(parts)[1].batches == (0, 3)


def test_a_loader_that_fetches_one_batch_ahead() -> None:
    """As Accelerate's does: the last batch is trained on after the loader found no further one."""
    parts = [no_call(0, begins=True), train(), train(), train(exhausted=True)]
    assert names(parts) == [("train", (0, 1, 2, 3), (1, 2, 3))]


def test_images_sampled_after_each_epoch_are_no_batch_of_the_loader() -> None:
    sample = RunPart(where="train.py:9", calls=1, loader=0, exhausted=True, length=_LENGTH)
    spans = phases_of([train(begins=True), train(), sample, train(begins=True), train(), sample])
    assert [(span.kind, span.active, span.length) for span in spans] == [
        ("train", (0, 1), _LENGTH), ("evaluate", (2,), None), ("train", (3, 4), _LENGTH), ("evaluate", (5,), None),
    ]  # fmt: skip


def test_loops_without_loaders() -> None:
    parts = [train(None), train(None), evaluate(None), train(None)]
    assert names(parts) == [("train", (0, 1), (0, 1)), ("evaluate", (2,), (2,)), ("train", (3,), (3,))]


def test_batches_that_no_model_sees() -> None:
    assert names([no_call(0, begins=True), no_call(0)]) == [("data", (0, 1), ())]
