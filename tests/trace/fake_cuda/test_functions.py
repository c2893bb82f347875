"""What `torch.cuda` answers without a GPU, and what stops a recording."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import StepError

GIB = 1 << 30
CUDA: Any = torch.cuda


def run(step: Callable[[], Any], steps: int = 1, device: str = "a100") -> memplan.Trace:
    """Record a step whose build has named CUDA already."""

    def build() -> Callable[[], Any]:
        torch.zeros(1, device="cuda")
        return step

    return memplan.record(build, device=device, steps=steps)


def test_questions_about_the_device() -> None:
    seen: dict[str, Any] = {}

    def step() -> None:
        seen["available"] = torch.cuda.is_available(), torch.accelerator.is_available()
        seen["count"] = torch.cuda.device_count(), torch.cuda.current_device()
        seen["name"] = torch.cuda.get_device_name()
        seen["capability"] = torch.cuda.get_device_capability("cuda")
        seen["properties"] = torch.cuda.get_device_properties(0)
        seen["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
        seen["accelerator"] = torch.accelerator.current_accelerator()

    run(step, device="t4")
    assert seen["available"] == (True, True)
    assert seen["count"] == (1, 0)
    assert "T4" in seen["name"]
    assert seen["capability"] == (7, 5)  # NVIDIA's list of compute capabilities
    assert (seen["properties"].major, seen["properties"].multi_processor_count) == (7, 40)
    assert 14 * GIB < seen["properties"].total_memory < 16 * GIB
    assert seen["bf16"] is False
    assert seen["accelerator"] == torch.device("cuda")


def test_the_generator_of_a_card_is_found_by_its_index() -> None:
    """As Megatron-core keeps a state for each kind of rank."""
    seen: list[bool] = []

    def step() -> None:
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.get_state()
        generator.set_state(state)
        seen.append(state.shape == torch.cuda.get_rng_state().shape)

    run(step)
    assert set(seen) == {True}


def test_memory_queries_count_what_is_live() -> None:
    seen: list[int] = []

    def step() -> None:
        start = torch.cuda.memory_allocated()
        x = torch.zeros(1000, device="cuda")  # 4,000 bytes: 8 blocks of 512
        seen.append(torch.cuda.memory_allocated() - start)
        del x
        seen.append(torch.cuda.memory_allocated() - start)
        seen.append(torch.cuda.max_memory_allocated() - start)
        torch.cuda.reset_peak_memory_stats()
        seen.append(torch.cuda.max_memory_allocated() - start)
        free, total = torch.cuda.mem_get_info()
        seen.append(total - free - start)

    run(step)
    assert seen == [4096, 0, 4096, 0, 0]


def test_what_does_nothing_without_a_gpu() -> None:
    def step() -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.accelerator.synchronize()
        torch.cuda.manual_seed_all(1)
        torch.cuda.set_device(0)
        torch.cuda.nvtx.range_push("x")
        torch.cuda.nvtx.range_pop()
        torch.cuda.ipc_collect()
        with torch.cuda.device(0):
            torch.cuda.reset_peak_memory_stats()
        state = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(state)
        with torch.random.fork_rng(devices=[0]):
            torch.zeros(2, device="cuda")

    trace = run(step)
    assert [call.kind for call in trace.calls] == ["synchronize", "empty_cache", "synchronize"]


def test_libraries_read_the_address_of_the_current_stream() -> None:
    """As Triton's users and bitsandbytes do when they are imported; a build without CUDA lacks the name."""
    read = list[int]()
    run(lambda: read.append(torch._C._cuda_getCurrentRawStream(0)))
    assert read == [0] * len(read)
    assert read


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: torch.cuda.memory_snapshot(), "torch.cuda.memory_snapshot"),
        (lambda: torch.cuda.utilization(), "torch.cuda.utilization"),
        (lambda: torch.cuda.MemPool(), "torch.cuda.MemPool"),
        (lambda: torch.cuda.memory._dump_snapshot("x"), "torch.cuda.memory._dump_snapshot"),
    ],
)
def test_what_needs_a_gpu_names_itself(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(StepError, match=rf"{name} needs a GPU.*test_functions.py:\d+"):
        run(call)


def test_what_no_table_lists_is_told_to_be_no_fault_of_the_devices_name() -> None:
    with pytest.raises(StepError, match="asks for a GPU in a way that a recording does not answer"):
        run(lambda: torch.Stream("cuda"))


def test_the_most_between_two_queries_is_known() -> None:
    seen: list[int] = []

    def step() -> None:
        start = torch.cuda.memory_allocated()
        x = torch.zeros(1000, device="cuda")
        del x
        seen.append(torch.cuda.max_memory_allocated() - start)

    run(step)
    assert seen == [4096]


def test_backward_runs_on_the_stream_of_its_forward() -> None:
    def step() -> None:
        x = torch.zeros(11, device="cuda", requires_grad=True)
        with torch.cuda.stream(torch.cuda.Stream()):
            y = x * 2
        y.sum().backward()

    trace = run(step)
    backward = [op for op in trace.ops if op.phase == "backward" and op.name == "aten.mul.Tensor"]
    assert [trace.storages[op.writes[0]].stream for op in backward] == [1]


def test_every_public_function_of_torch_cuda_answers_or_stops() -> None:
    """None may reach CUDA: it would fail with an error of torch's own, far from its cause."""
    failed: list[str] = []

    def step() -> None:
        for name in sorted(vars(torch.cuda)):
            value = getattr(torch.cuda, name)
            own = getattr(value, "__module__", "").startswith("torch.cuda")
            if name.startswith("_") or not callable(value) or not own or isinstance(value, type):
                continue
            try:
                value()
            except StepError:
                pass
            except Exception as error:  # whatever it is
                if "CUDA" in str(error) or "NVIDIA" in str(error):
                    failed.append(f"{name}: {error}")

    run(step)
    assert failed == []


def test_streams_have_pools_of_their_own() -> None:
    def step() -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x = torch.zeros(11, device="cuda")
            assert torch.cuda.current_stream() is side
        x.record_stream(torch.cuda.current_stream())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        torch.zeros(12, device="cuda")

    trace = run(step)
    streams = {s.shape: (s.stream, s.used_on) for s in trace.counted}
    assert streams[(11,)][0] != 0
    assert streams[(11,)][1] == (0,)
    assert streams[(12,)] == (0, ())


def test_a_block_that_another_stream_used_is_freed_at_the_next_synchronization() -> None:
    def step() -> None:
        side = torch.cuda.Stream()
        for _ in range(3):
            x = torch.zeros(4 << 20, device="cuda")
            x.record_stream(side)
            del x
        torch.cuda.synchronize()
        torch.zeros(4 << 20, device="cuda")

    trace = run(step)
    high, low = (memplan.simulate(trace, workspace=case) for case in ("high", "low"))
    assert high.peak_reserved == (3 * 16 + 2) << 20  # three segments of 16 MiB at once, and a small one of 2
    assert low.peak_reserved == (16 + 2) << 20


def test_emptying_the_cache_gives_segments_back() -> None:
    def step() -> None:
        torch.zeros(4 << 20, device="cuda")
        torch.cuda.empty_cache()
        torch.zeros(2 << 20, device="cuda")

    timeline = memplan.simulate(run(step))
    # 512 bytes in a small segment; 16 MiB in one of its own; both returned; 8 MiB in a segment of 20
    assert [reserved >> 20 for _, _, reserved in timeline.events] == [2, 2, 18, 18, 0, 20, 20]


def test_amp_as_users_write_it() -> None:
    def build() -> Callable[[], Any]:
        model = nn.Linear(256, 128).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        data = torch.randn(32, 256).pin_memory()

        def step() -> None:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(data.cuda(non_blocking=True)).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    trace = memplan.record(build, device="v100")
    half = [s for s in trace.counted if s.dtype == "float16" and s.cause == "saved"]
    # the input in float16, 32 x 256, and the weight, 128 x 256: what the two products of backward read
    assert {s.shape for s in half} >= {(32, 256)}
    assert any(op.name.startswith("aten._foreach_norm") for op in trace.ops)


def test_a_stream_as_a_context() -> None:
    def step() -> None:
        with torch.cuda.Stream():
            torch.zeros(11, device="cuda")
        torch.zeros(12, device="cuda")

    assert {s.shape: s.stream for s in run(step).counted if s.shape != (1,)} == {(11,): 1, (12,): 0}


def test_convolutions_without_cudnn_take_cublas_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """ConvolutionMM2d.cu multiplies by cuBLAS: in the thread of forward and in that of backward, on an A100."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")

    def build() -> Callable[[], Any]:
        torch.backends.cudnn.enabled = False
        model = nn.Conv2d(32, 64, 3).cuda()
        return lambda: model(torch.zeros(4, 32, 32, 32, device="cuda")).sum().backward()

    trace = memplan.record(build, device="a100", steps=1)
    kept = [s.bytes for s in trace.counted if s.cause == "workspace" and s.died is None]
    assert kept == [8_519_680, 8_519_680]
    columns = 32 * 9 * 30 * 30 * 4
    assert columns in {s.bytes for s in trace.counted if s.cause == "workspace" and s.died is not None}


@pytest.mark.parametrize(
    ("copy", "extra"),
    [
        (lambda h, c: h.to("cuda"), 0),
        (lambda h, c: h.to("cuda", memory_format=torch.channels_last), 1),
        (lambda h, c: h.to(memory_format=torch.channels_last).to("cuda"), 0),
        (lambda h, c: c[:, :2].copy_(h[:, :2]), 0.5),
        (lambda h, c: h[:, :2].copy_(c[:, :2]), 0.5),
        (lambda h, c: c.copy_(h), 0),
    ],
)
def test_copies_between_host_and_card_of_another_layout_are_staged(copy: Callable[..., Any], extra: float) -> None:
    """Copy.cu: a contiguous tensor of the card's side, as large as what is copied."""

    def build() -> Callable[[], Any]:
        host, card = torch.zeros(16, 4, 64, 64), torch.zeros(16, 4, 64, 64, device="cuda")
        return lambda: copy(host, card)

    trace = memplan.record(build, device="a100", steps=1)
    staged = [s.bytes for s in trace.counted if s.op is not None and s.shape == () and s.bytes > 4]
    assert sum(staged) == extra * 16 * 4 * 64 * 64 * 4


def test_ops_that_only_the_cpu_refuses() -> None:
    assert run(lambda: torch.histc(torch.zeros(9, dtype=torch.int32, device="cuda"), 4, 0, 3)).counted
