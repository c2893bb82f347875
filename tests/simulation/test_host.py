"""The host's memory over time, of traces written by hand and of recorded steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from truth.fresh_process import run_fresh

import memplan
from memplan.simulation.host import PYTHON, HostUse, host_use, pinned_block


class Samples(Dataset[torch.Tensor]):
    """Makes each sample of 48 KiB anew."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((3, 64, 64), number / 80)


BATCH = 8 * 3 * 64 * 64 * 4


def training(device: str, **options: object) -> HostUse:
    """Return the host's memory of a step that trains on five batches of a loader."""

    def build() -> object:
        net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 4)).to(device)

        def step() -> None:
            for number, batch in enumerate(DataLoader(Samples(), 8, **options)):  # pyright: ignore[reportArgumentType]
                net(batch.to(device)).sum().backward()
                if number == 4:
                    break

        return step

    return host_use(memplan.record(build, device="rtx4090" if device == "cuda" else "cpu"))  # pyright: ignore


@given(st.integers(1, 1 << 40))
def test_a_pinned_block_is_the_smallest_power_of_two_that_holds_it(size: int) -> None:
    block = pinned_block(size)
    assert block.bit_count() == 1
    assert block // 2 < size <= block


def test_workers_hold_their_batches_in_shared_memory() -> None:
    use = training("cuda", num_workers=2, prefetch_factor=3)
    assert use.shared == (2 * 3 + 1) * BATCH
    # the samples of a batch in each worker, which at the peak one of them makes
    assert (use.peak.terms["loading"], use.peak.terms["cached"]) == (BATCH, BATCH)
    assert use.peak.bytes == sum(use.peak.terms.values())


def test_a_loader_without_workers_holds_its_batch_alone() -> None:
    use = training("cuda")
    assert not use.shared
    assert "workers" not in use.peak.terms
    # a batch, the one before, and the samples that it is made of; while building, the weights
    assert use.steps[0].terms["tensors"] == 3 * BATCH


def test_pinned_batches_take_powers_of_two_and_stay() -> None:
    use = training("cuda", num_workers=2, pin_memory=True)
    block = pinned_block(BATCH)
    assert use.steps[0].terms["pinned"] == (2 * 2 + 1) * block
    assert use.steps[1].terms["pinned"] == use.steps[0].terms["pinned"]  # reused by the second pass


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_nothing_is_pinned_without_a_card() -> None:
    assert "pinned" not in training("cpu", num_workers=1, pin_memory=True).peak.terms


def test_a_spawned_worker_imports_torch_again() -> None:
    forked, spawned = (
        training("cpu", num_workers=1, multiprocessing_context=method).peak.terms["workers"]
        for method in ("fork", "spawn")
    )
    assert spawned > PYTHON > 4 * forked


def test_a_loader_of_a_stream_has_no_length_and_full_queues() -> None:
    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> object:  # pyright: ignore
            return (torch.zeros(3, 64, 64) for _ in range(80))

    def build() -> object:
        def step() -> None:
            for batch in DataLoader(Stream(), 8, num_workers=3):
                batch.sum()

        return step

    trace = memplan.record(build, device="cpu")  # pyright: ignore[reportArgumentType]
    assert {use.length for use in trace.loaders} == {None}
    assert host_use(trace).shared == (3 * 2 + 1) * BATCH


def test_tensors_pinned_by_hand() -> None:
    def build() -> object:
        kept = torch.zeros(3 << 20).pin_memory()
        more = torch.empty(3 << 20, pin_memory=True)
        assert kept.is_pinned()
        assert more.is_pinned()
        assert not torch.zeros(2).is_pinned()
        return lambda: kept.to("cuda", non_blocking=True).sum()

    use = host_use(memplan.record(build, device="h100"))  # pyright: ignore[reportArgumentType]
    assert use.peak.terms["pinned"] == 2 * (16 << 20)
    assert use.pinned_tensors == 2 * (12 << 20)


def test_a_trace_from_a_file_has_the_same_host_memory() -> None:
    def build() -> object:
        kept = torch.zeros(3 << 20).pin_memory()
        return lambda: [batch.sum() for batch in DataLoader(Samples(), 8, num_workers=1)] + [kept.sum()]

    trace = memplan.record(build, device="h100")  # pyright: ignore[reportArgumentType]
    assert host_use(type(trace).from_json(trace.to_json())) == host_use(trace)


def test_the_budget_is_first_exceeded_where_the_host_grows_over_it() -> None:
    def build() -> object:
        kept = [torch.zeros(1 << 20) for _ in range(3)]
        return lambda: kept[0].to("cuda").sum()

    trace = memplan.record(build, device="h100")  # pyright: ignore[reportArgumentType]
    second = sorted(storage.born for storage in trace.storages if storage.device == "cpu")[1]
    python = host_use(trace).peak.terms["python"]
    assert host_use(trace, python + (5 << 20)).exceeded == second
    assert host_use(trace, python + (13 << 20)).exceeded is None


def test_workers_load_all_batches_before_the_first_is_pinned() -> None:
    assert training("cuda", num_workers=2, prefetch_factor=3, pin_memory=True).shared == 2 * 3 * BATCH


def test_persistent_workers_hold_batches_only_during_a_pass() -> None:
    def build() -> object:
        loader = DataLoader(Samples(), 8, num_workers=2, persistent_workers=True)
        kept = []

        def step() -> None:
            for batch in loader:
                batch.sum()
            kept.append(torch.zeros(64 << 20))  # 256 MiB, after the pass
            return kept[-1].sum()

        return step

    peak = host_use(memplan.record(build, device="cpu")).peak  # pyright: ignore[reportArgumentType]
    assert peak.terms["tensors"] >= 256 << 20
    assert peak.terms["shared"] == BATCH  # the variable of the loop
    assert peak.terms["cached"] == 2 * BATCH
    assert peak.terms["workers"]
    assert "loading" not in peak.terms


def test_tensors_of_a_data_set_are_sent_to_spawned_workers_in_shared_memory() -> None:
    def use(method: str) -> HostUse:
        def build() -> object:
            data = TensorDataset(torch.zeros(64, 1 << 18))  # 64 MiB
            loader = DataLoader(data, 4, num_workers=1, multiprocessing_context=method)
            return lambda: [rows.sum() for (rows,) in loader]

        return host_use(memplan.record(build, device="cpu"))  # pyright: ignore[reportArgumentType]

    forked, spawned = use("fork"), use("spawn")
    assert spawned.shared - forked.shared == 64 << 20
    assert forked.peak.terms["tensors"] - spawned.peak.terms.get("tensors", 0) == 64 << 20


FORKING = """
import re
from pathlib import Path

import torch
from torch.utils.data import DataLoader


def held():
    pids = ["self", *(pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split())]
    texts = (Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids)
    return sum(int(re.search(r"Pss_Anon:\\s+(\\d+)", text)[1]) for text in texts) << 10


freed, written, read = (torch.ones(16 << 20) for _ in range(3))  # 64 MiB each
batches = iter(DataLoader(range(8), 1, num_workers=1))
next(batches)
before = held()
del freed
written.add_(1)
print(held() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc")
def test_a_forked_worker_keeps_what_the_main_process_frees_and_writes() -> None:
    def build() -> object:
        freed = [torch.ones(16 << 20)]
        written, read = torch.ones(16 << 20), torch.ones(16 << 20)

        def step() -> object:
            batches = iter(DataLoader(range(8), 1, num_workers=1))  # pyright: ignore[reportArgumentType]
            next(batches)
            freed.clear()
            written.add_(1)
            return read.sum(), batches

        return step

    terms = host_use(memplan.record(build, device="cpu", steps=1)).peak.terms  # pyright: ignore[reportArgumentType]
    predicted = terms["tensors"] - 3 * (64 << 20) + terms["workers"] - 11660 * 1024
    done = run_fresh(FORKING)
    assert done.returncode == 0, done.stderr
    assert predicted == pytest.approx(int(done.stdout), abs=2 << 20)
