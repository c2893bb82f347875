"""Settings of the caching allocator, held against torch's own reader, which the CPU build has, too."""

from __future__ import annotations

import json
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from truth.fresh_process import run_fresh

from memplan.errors import UsageError
from memplan.simulation.allocator.settings import (
    AllocatorSettings,
    parse_settings,
    settings_of_process,
    settings_of_snapshot,
)

MIB = 1 << 20


def table(*divisions: int) -> tuple[tuple[int, int], ...]:
    return tuple((1 << k, parts) for k, parts in enumerate(divisions))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", AllocatorSettings()),
        ("max_split_size_mb:20", AllocatorSettings(max_split_size=20 * MIB)),
        (" max_split_size_mb : 512 ,", AllocatorSettings(max_split_size=512 * MIB)),
        ("max_split_size_mb:64,max_split_size_mb:32", AllocatorSettings(max_split_size=32 * MIB)),
        ("garbage_collection_threshold:0.8", AllocatorSettings(garbage_collection_threshold=0.8)),
        ("expandable_segments:True", AllocatorSettings(expandable_segments=True)),
        ("expandable_segments:False", AllocatorSettings()),
        ("large_segment_size_mb:12", AllocatorSettings(large_segment_size=12 * MIB)),
        ("max_split_size_mb:12,large_segment_size_mb:11", AllocatorSettings(12 * MIB, large_segment_size=11 * MIB)),
        ("max_non_split_rounding_mb:30", AllocatorSettings(max_non_split_rounding=30 * MIB)),
        ("per_process_memory_fraction:0.5", AllocatorSettings(memory_fraction=0.5)),
        ("throw_on_cudamalloc_oom:True", AllocatorSettings(reject_over_limit=True)),
        ("roundup_power2_divisions:4", AllocatorSettings(roundup_power2_divisions=table(*[4] * 16))),
        (  # the example of torch's notes on memory management
            "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
            AllocatorSettings(roundup_power2_divisions=table(*[1] * 9, 2, 4, *[8] * 5)),
        ),
        ("roundup_power2_divisions:[1:0,2:0]", AllocatorSettings()),
        ("backend:native,release_lock_on_cudamalloc:True", AllocatorSettings()),
        ("pinned_use_cuda_host_register:True,pinned_num_register_threads:8", AllocatorSettings()),
        ("expandable_segments_reserve:40G,expandable_segments_reserve_by_class:[a:0.5,b:2G]", AllocatorSettings()),
    ],
)
def test_settings_are_read(text: str, expected: AllocatorSettings) -> None:
    assert parse_settings(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_split_size:128", ["'max_split_size' is unknown", "max_split_size_mb"]),
        ("expandable_segment:True", ["'expandable_segment' is unknown", "expandable_segments"]),
        ("zzzz:1", ["'zzzz' is unknown", "one of backend"]),
        ("max_split_size_mb:19", ["max_split_size_mb:19", "from 20"]),
        ("max_split_size_mb:20,large_segment_size_mb:30", ["from 30"]),
        ("max_split_size_mb:-1", ["max_split_size_mb:-1"]),
        ("max_split_size_mb:64x", ["max_split_size_mb:64x"]),
        ("max_split_size_mb:²0", ["max_split_size_mb:²0"]),
        ("max_split_size_mb:" + "9" * 5000, ["a number of MiB"]),
        ("max_split_size_mb:[1:2]", ["max_split_size_mb:[1:2]"]),
        ("large_segment_size_mb:10", ["above 10"]),
        ("garbage_collection_threshold:1.0", ["between 0 and 1"]),
        ("garbage_collection_threshold:0", ["between 0 and 1"]),
        ("garbage_collection_threshold:nan", ["between 0 and 1"]),
        ("per_process_memory_fraction:1.5", ["from 0 to 1"]),
        ("expandable_segments:true", ["expandable_segments:true", "True or False"]),
        ("roundup_power2_divisions:3", ["powers of two"]),
        ("roundup_power2_divisions:0", ["powers of two"]),
        ("roundup_power2_divisions:[3:4]", ["powers of two"]),
        ("roundup_power2_divisions:[256:3]", ["[256:3]"]),
        ("roundup_power2_divisions:[256:1", ["cannot be read", "256:1"]),
        ("roundup_power2_divisions:[256:1]]", ["cannot be read"]),
        ("pinned_num_register_threads:256", ["up to 128"]),
        ("pinned_reserve_segment_size_mb:0", ["above 0"]),
        ("backend:cudaMallocAsync", ["backend:cudaMallocAsync", "driver"]),
        ("backend:other", ["backend:other", "native"]),
        ("expandable_segments", ["name:value"]),
        ("expandable_segments:", ["name:value"]),
        (",", ["name:value"]),
        ("max_split_size_mb=128", ["name:value"]),
        ("max_split_size_mb:64 expandable_segments:True", ["cannot be read"]),
    ],
)
def test_what_torch_would_not_take_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_settings(text)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


powers = st.sampled_from([0, 1, 2, 4, 8, 16, 64])
tables = st.one_of(
    st.just([0] * 16),
    st.lists(powers, min_size=16, max_size=16),
    st.tuples(powers, st.integers(0, 15), powers).map(lambda t: [t[0]] * t[1] + [t[2]] * (16 - t[1])),
)
settings = st.builds(
    lambda split, divisions, threshold, expandable, large, rounding, fraction, reject: AllocatorSettings(
        None if split is None else (large + split) * MIB,
        table(*divisions) if any(divisions) else (),
        threshold,
        expandable,
        large * MIB,
        None if rounding is None else (large + rounding) * MIB,
        fraction,
        reject,
    ),
    st.none() | st.integers(0, 5000),
    tables,
    st.just(0.0) | st.floats(0, 1, exclude_min=True, exclude_max=True),
    st.booleans(),
    st.just(20) | st.integers(11, 600),
    st.none() | st.integers(0, 5000),
    st.just(1.0) | st.floats(0, 1),
    st.booleans(),
)


@given(settings)
def test_text_and_back(given_settings: AllocatorSettings) -> None:
    assert parse_settings(str(given_settings)) == given_settings


def test_defaults_are_the_empty_text() -> None:
    assert str(AllocatorSettings()) == ""


def test_text_is_short() -> None:
    text = "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"
    assert str(parse_settings(text)) == text
    assert str(parse_settings("roundup_power2_divisions:[1024:4]")) == "roundup_power2_divisions:[1024:4]"
    assert str(parse_settings("roundup_power2_divisions:[1:2,2:2,>:2]")) == "roundup_power2_divisions:2"


# Against torch


CHILD = """
import ctypes, json, os, sys, torch
library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
prefix = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig"
try:
    divisions, instance = library[prefix + "24roundup_power2_divisionsEm"], library[prefix + "8instanceEv"]
except AttributeError:
    print(json.dumps(None))
    sys.exit()
divisions.argtypes, divisions.restype, instance.restype = [ctypes.c_size_t], ctypes.c_size_t, ctypes.c_void_p

def read():
    # The first fields of AcceleratorAllocatorConfig, as its header has them: three sizes, a vector, a double, a bool.
    at = instance()
    sizes = list((ctypes.c_size_t * 3).from_address(at))
    return sizes + [ctypes.c_double.from_address(at + 48).value, ctypes.c_bool.from_address(at + 56).value]

if read() != [20 << 20, 2**64 - 1, 20 << 20, 0.0, False]:
    print(json.dumps(None))
    sys.exit()
found = []
for text in json.load(sys.stdin):
    # Neither of these two goes back to its default by itself.
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20,expandable_segments:False")
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except (ValueError, RuntimeError):
        found.append(None)
    else:
        found.append([*read(), [divisions(1 << k) for k in range(40)]])
print(json.dumps(found))
"""


def written(number: random.Random) -> str:
    """A text of torch's grammar, with values inside and outside of what it takes."""
    size = lambda: str(number.choice([0, 9, 10, 11, 19, 20, 21, 30, 64, 500, 10**6]))  # noqa: E731
    power = lambda: str(number.choice([0, 1, 2, 4, 8, 64, 3, 12]))  # noqa: E731
    bucket = lambda: number.choice([">", "1", "2", "64", "256", "1024", "32768", "65536", "1048576", "3", "0"])  # noqa: E731
    value = {
        "max_split_size_mb": size,
        "max_non_split_rounding_mb": size,
        "large_segment_size_mb": size,
        "garbage_collection_threshold": lambda: number.choice(["0", "0.5", ".25", "1", "1e-3", "0.999", "-0.5", "2"]),
        "expandable_segments": lambda: number.choice(["True", "False", "true", "1"]),
        "pinned_use_background_threads": lambda: number.choice(["True", "False", "no"]),
        "roundup_power2_divisions": lambda: number.choice(
            [power(), f"[{','.join(f'{bucket()}:{power()}' for _ in range(number.randrange(5)))}]"]
        ),
    }
    names = number.sample(sorted(value), number.randrange(4))
    if number.random() < 0.1 and names:
        names.append(names[0])
    return number.choice([",", " , "]).join(f"{name}:{value[name]()}" for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="reads torch's library by its Linux name")
def test_as_torch_reads_them() -> None:
    number = random.Random(7)
    texts = [written(number) for _ in range(3000)]
    done = run_fresh(CHILD, json.dumps(texts))
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    if answers is None:
        pytest.skip("this torch keeps its settings elsewhere")
    accepted = 0
    for text, answer in zip(texts, answers, strict=True):
        if answer is None:
            with pytest.raises(UsageError):
                parse_settings(text)
            continue
        accepted += 1
        large, split, rounding, threshold, expandable, divisions = answer
        found = parse_settings(text)
        assert found.large_segment_size == large, text
        assert found.max_split_size == (None if split == 2**64 - 1 else split), text
        rounded = found.large_segment_size if found.max_non_split_rounding is None else found.max_non_split_rounding
        assert rounded == rounding, text
        assert found.garbage_collection_threshold == threshold, text
        assert found.expandable_segments is expandable, text
        assert [found.divisions(1 << k) for k in range(40)] == divisions, text
    assert 500 < accepted < 2500


# Snapshots


def test_settings_of_a_real_snapshot() -> None:
    none = {str(1 << k): 0 for k in range(16)}
    recorded = {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "roundup_power2_divisions": none,
    }
    assert settings_of_snapshot(recorded) == AllocatorSettings()
    recorded |= {"max_split_size": 64 * MIB, "expandable_segments": True, "garbage_collection_threshold": 0.5}
    recorded["roundup_power2_divisions"] = none | {"256": 4}
    expected = AllocatorSettings(64 * MIB, table(*[0] * 8, 4, *[0] * 7), 0.5, True)
    assert settings_of_snapshot(recorded) == expected


def test_settings_of_a_snapshot_that_lacks_some() -> None:
    assert settings_of_snapshot({}) == AllocatorSettings()
    assert settings_of_snapshot({"max_split_size": 2**64 - 1}) == AllocatorSettings()


def test_what_stands_only_in_the_text_of_a_snapshot() -> None:
    text = "large_segment_size_mb:30,per_process_memory_fraction:0.5,of_tomorrow:[1:2],max_split_size_mb:64"
    recorded = {"PYTORCH_CUDA_ALLOC_CONF": text, "max_split_size": 96 * MIB, "expandable_segments": True}
    expected = AllocatorSettings(96 * MIB, expandable_segments=True, large_segment_size=30 * MIB, memory_fraction=0.5)
    assert settings_of_snapshot(recorded) == expected
    assert settings_of_snapshot({"PYTORCH_CUDA_ALLOC_CONF": "no text:["}) == AllocatorSettings()


@pytest.mark.parametrize(
    "recorded",
    [{"max_split_size": "big"}, {"roundup_power2_divisions": [1, 2]}, {"garbage_collection_threshold": {}}],
)
def test_a_snapshot_with_foreign_settings_is_refused(recorded: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="allocator settings of the snapshot"):
        settings_of_snapshot(recorded)


def test_settings_of_the_process_are_those_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert settings_of_process() == AllocatorSettings()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert settings_of_process() == AllocatorSettings(max_split_size=64 << 20)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,some_new_setting:3")
    assert settings_of_process() == AllocatorSettings(expandable_segments=True)
