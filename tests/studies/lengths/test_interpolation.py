"""What lies between recorded lengths is what a recording there says."""

from __future__ import annotations

import pytest
from models.decoders import Decoder

from memplan.simulation.simulate import simulate
from memplan.studies.axes.axes import Length
from memplan.studies.axes.subject import Subject
from memplan.studies.lengths.interpolation import interpolated, lengths_to_record
from memplan.trace.record import record_for
from memplan.trace.recording.session import choose_target
from memplan.trace.step import StepOptions
from memplan.trace.trace import Trace


def recorded(length: int, device: str) -> Trace:
    options = StepOptions(inputs=("4x32:int64<257",), optimizer="adamw").checked()
    subject = Length().at(Subject(Decoder, options), length)
    return record_for(subject.build(on_card=device != "cpu"), choose_target(device))


def test_bytes_between_are_those_of_a_recording() -> None:
    traces = {length: recorded(length, "cpu") for length in (64, 128, 256)}
    for length in (96, 200, 320):
        trace, real = interpolated(traces, length), recorded(length, "cpu")
        assert trace is not None
        assert [s.bytes for s in trace.storages] == [s.bytes for s in real.storages]
        assert simulate(trace).events == simulate(real).events


def test_on_a_card_all_but_temporaries_are_those_of_a_recording() -> None:
    traces = {length: recorded(length, "h100") for length in (64, 128, 256)}
    for length in (96, 200, 320):
        trace, real = interpolated(traces, length), recorded(length, "h100")
        assert trace is not None
        # reductions take fewer or more temporaries; attention rounds the length of its sums up to a multiple of 32
        sizes, expected = ([s.bytes for s in t.storages if s.cause != "temporary"] for t in (trace, real))
        assert length % 32 or sizes == expected
        assert simulate(trace).peak_allocated == pytest.approx(simulate(real).peak_allocated, rel=0.001)


def test_one_recording_says_nothing_of_other_lengths() -> None:
    assert interpolated({64: recorded(64, "cpu")}, 96) is None


def test_few_lengths_are_all_recorded_and_of_many_the_ends_and_some_between() -> None:
    assert lengths_to_record([512, 64, 64, 128]) == [64, 128, 512]
    many = lengths_to_record(range(10, 1011))
    assert (len(many), many[0], many[-1]) == (6, 10, 1010)
