"""Which storages lie on the card: what names CUDA, what is moved, and everything where nothing names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import DeviceError
from memplan.trace.records import Storage

FLOAT = 4


def on_card(trace: memplan.Trace, **wanted: Any) -> list[Storage]:
    return [s for s in trace.counted if all(getattr(s, name) == value for name, value in wanted.items())]


def record(build: Callable[[], Callable[[], Any]], **more: Any) -> memplan.Trace:
    return memplan.record(build, device="a100", **more)


def test_what_goes_to_cuda_counts_and_what_stays_does_not() -> None:
    def build() -> Callable[[], Any]:
        weight = torch.randn(1000, 10).cuda()
        kept = torch.randn(500, 10)  # host memory
        return lambda: (weight * 2, kept * 2)

    trace = record(build)
    assert sorted({s.shape for s in trace.counted}) == [(1000, 10)]
    assert {s.shape for s in trace.storages if s.device == "cpu"} == {(1000, 10), (500, 10)}
    assert memplan.simulate(trace).peak_allocated == 2 * 79 * 512  # 40,000 bytes in blocks of 512, twice


def test_everything_counts_where_nothing_names_cuda() -> None:
    def build() -> Callable[[], Any]:
        weight = torch.randn(1000, 10)
        return lambda: weight * 2

    trace = record(build)
    assert len(trace.counted) == len(trace.storages) == 3
    assert memplan.simulate(trace).steps[0].peak_allocated == 2 * 79 * 512


@pytest.mark.parametrize("grad", [False, True])
def test_results_that_are_moved_to_the_host_count_as_if_cuda_were_named(grad: bool) -> None:
    def build(cuda: bool) -> Callable[[], Any]:
        model, x, kept = nn.Linear(64, 32), torch.randn(128, 64), list[torch.Tensor]()
        if cuda:
            model, x = model.cuda(), x.cuda()

        def step() -> None:
            with torch.set_grad_enabled(grad):
                host = model(x).cpu()
                kept.append(host.detach() * 2)
            if grad:
                host.sum().backward()

        return step

    plain, named = (record(lambda cuda=cuda: build(cuda)) for cuda in (False, True))
    places, wanted = ([s.device for s in one.storages if s.born > one.steps[0]] for one in (plain, named))
    assert places == wanted
    assert places.count("cpu") >= 4
    assert memplan.simulate(plain).peak_allocated == memplan.simulate(named).peak_allocated


def test_cuda_named_in_a_step_only_makes_what_was_built_the_hosts() -> None:
    built: list[int] = []

    def build() -> Callable[[], Any]:
        built.append(1)
        data = torch.randn(300)
        return lambda: data.to("cuda") * 2

    trace = record(build, steps=1)
    assert [s.shape for s in trace.counted] == [(300,), (300,)]
    assert len(built) == 2  # recorded anew once it was known


@pytest.mark.parametrize("device", [lambda x: x.device, lambda x: str(x.device), lambda x: torch.device(x.device)])
def test_a_tensors_own_device_is_no_name(device: Callable[[torch.Tensor], Any]) -> None:
    """As losses write: ``torch.zeros(shape, device=labels.device)``. The model was never moved: all is on the card."""

    def build() -> Callable[[], Any]:
        model, data = nn.Linear(100, 10), torch.randn(4, 100)
        return lambda: model(data) + torch.zeros(4, 10, device=device(data))

    trace = record(build, steps=1)
    assert len(trace.counted) == len(trace.storages)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(7, device="cuda"),
        lambda: torch.zeros(7, device=torch.device("cuda", 0)),
        lambda: torch.zeros(7, device=0),
        lambda: torch.zeros(7).to("cuda:0"),
        lambda: torch.zeros(7).to(device="cuda", non_blocking=True),
        lambda: torch.zeros(7).to(torch.zeros(1, device="cuda")),
        lambda: torch.zeros(7).cuda(),
        lambda: torch.zeros(7).cuda(0, non_blocking=True),
        lambda: torch.zeros(7).pin_memory().cuda(),
        lambda: torch.zeros_like(torch.zeros(7), device="cuda"),
        lambda: torch.zeros(3, device="cuda").new_zeros(7),
        lambda: torch.zeros(3).new_zeros(7, device="cuda"),
        lambda: torch.tensor([0.0] * 7, device="cuda"),
        lambda: torch.as_tensor([0.0] * 7, device="cuda"),
        lambda: torch.randn(7, device="cuda"),
        lambda: torch.arange(7, device="cuda"),
        lambda: torch.normal(0.0, 1.0, (7,), device="cuda"),
        lambda: nn.Linear(3, 7, bias=False, device="cuda").weight.sum(1),
        lambda: nn.Linear(3, 7, bias=False).cuda().weight.sum(1),
        lambda: nn.Linear(3, 7, bias=False).to("cuda").weight.sum(1),
        lambda: torch.zeros(7).cuda().cpu().cuda(),
        lambda: torch.zeros(7).type("torch.cuda.FloatTensor"),
        lambda: _with_new_data(torch.zeros(7, dtype=torch.bfloat16, device="cuda"), torch.Tensor.float),
        lambda: _with_new_data(torch.zeros(7), torch.Tensor.cuda),
        lambda: _with_new_data(nn.Parameter(torch.zeros(7)), torch.Tensor.cuda),
    ],
)
def test_ways_to_the_card(make: Callable[[], torch.Tensor]) -> None:
    seen: list[tuple[torch.device, bool, bool, int]] = []

    def build() -> Callable[[], Any]:
        def step() -> None:
            x = make()
            y = x * 2
            seen.append((x.device, x.is_cuda, y.is_cpu, y.get_device()))
            assert tuple(y.shape) == (7,)

        torch.zeros(1, device="cuda")
        return step

    record(build, steps=1)
    assert seen == [(torch.device("cuda:0"), True, False, 0)]


def _with_new_data(x: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """As libraries convert the parameters of a model that was loaded in few bits."""
    x.data = convert(x.data)
    return x


def test_a_default_device_and_its_context() -> None:
    seen: list[torch.device] = []

    def build() -> Callable[[], Any]:
        with torch.device("cuda"):
            model = nn.Linear(3, 4)
            seen.append(torch.zeros(3, device="cpu").device)
        seen.extend((model.weight.device, torch.zeros(3).device))
        torch.set_default_device("cuda")
        try:
            seen.append(torch.ones(3).device)
        finally:
            torch.set_default_device(None)
        return lambda: None

    record(build, steps=1)
    assert [device.type for device in seen] == ["cpu", "cuda", "cpu", "cuda"]


def test_a_result_is_where_an_operand_is_and_a_host_scalar_does_not_count() -> None:
    seen: dict[str, str] = {}

    def build() -> Callable[[], Any]:
        card, host, scalar = torch.zeros(5, device="cuda"), torch.zeros(5), torch.tensor(2.0)

        def step() -> None:
            seen["card and scalar"] = (card * scalar).device.type
            seen["scalar and card"] = (scalar * card).device.type
            seen["host and scalar"] = (host * scalar).device.type
            seen["view"] = card[1:].device.type
            seen["in place"] = card.add_(1).device.type
            seen["copied into"] = host.copy_(card).device.type

        return step

    record(build, steps=1)
    assert seen == {
        "card and scalar": "cuda",
        "scalar and card": "cuda",
        "host and scalar": "cpu",
        "view": "cuda",
        "in place": "cuda",
        "copied into": "cpu",
    }


def test_a_gradient_goes_back_where_its_tensor_came_from() -> None:
    seen: list[str] = []

    def build() -> Callable[[], Any]:
        offloaded = torch.randn(100, requires_grad=True)

        def step() -> None:
            (offloaded.cuda() * 2).sum().backward()
            assert offloaded.grad is not None
            seen.append(offloaded.grad.device.type)

        torch.zeros(1, device="cuda")
        return step

    trace = record(build, steps=1)
    assert seen == ["cpu"]
    births = [(trace.ops[s.op].phase, s.device) for s in trace.storages if s.op is not None and s.shape == (100,)]
    assert births == [
        ("build", "cpu"),
        ("forward", "cuda:0"),  # its copy
        ("forward", "cuda:0"),  # times 2
        ("backward", "cuda:0"),  # the gradient of the copy
        ("backward", "cpu"),  # its way back
    ]


def test_a_second_card_is_refused() -> None:
    def build() -> Callable[[], Any]:
        torch.zeros(3, device="cuda:1")
        return lambda: None

    with pytest.raises(DeviceError, match=r"cuda:1.*one card"):
        record(build)


def test_nothing_of_torch_stays_changed() -> None:
    def build() -> Callable[[], Any]:
        raise RuntimeError("stops here")

    names = ["to", "cuda", "cpu", "type", "device", "is_cuda", "pin_memory", "new_zeros", "record_stream"]
    before = [torch.Tensor.__dict__.get(name) for name in names], torch.zeros, torch.cuda.synchronize
    with pytest.raises(memplan.MemplanError, match="stops here"):
        record(build)
    assert ([torch.Tensor.__dict__.get(name) for name in names], torch.zeros, torch.cuda.synchronize) == before
    assert torch.zeros(3).device.type == "cpu"
    assert (torch.nn.functional.dropout(torch.ones(100), 0.5) != 0).any()


def test_what_a_build_sets_for_the_process_is_as_before() -> None:
    def build() -> Callable[[], Any]:
        torch.set_default_device("cuda")
        torch.set_default_dtype(torch.float64)
        torch.backends.cudnn.benchmark = True
        weight = torch.zeros(3)
        assert weight.is_cuda
        return lambda: weight * 2

    before = torch.backends.cudnn.benchmark
    record(build, steps=1)
    assert torch.zeros(3).device.type == "cpu"
    assert torch.zeros(3).dtype is torch.float32
    assert torch.backends.cudnn.benchmark is before


@pytest.mark.parametrize(
    "made",
    [
        lambda x: nn.functional.affine_grid(x, [2, 3, 64, 64], align_corners=False),
        lambda x: x.cumprod(1),
        lambda x: torch.fft.fft(x).abs(),
        lambda x: x.kthvalue(1).values,
    ],
)
def test_what_cpp_makes_from_nothing_lies_on_the_card(made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The same bytes whether CUDA is named or everything is taken to be on the card."""

    def build(place: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Callable[[], Any]]:
        def build() -> Callable[[], Any]:
            x = place(torch.rand(2, 2, 3)).requires_grad_()
            return lambda: made(x).sum().backward()

        return build

    named, unnamed = (memplan.simulate(record(build(place))) for place in (lambda x: x.cuda(), lambda x: x))
    assert named.steps[1].peak_allocated == unnamed.steps[1].peak_allocated


def test_a_host_tensor_beside_one_on_the_card_is_told() -> None:
    def build() -> Callable[[], Any]:
        model, data = nn.Linear(3, 4).cuda(), torch.zeros(2, 3)
        return lambda: model(data)

    trace = record(build, steps=1)
    assert [a.kind for a in trace.assumptions] == ["host"]
    assert "addmm READS A TENSOR OF THE HOST" in trace.assumptions[0].text


def test_a_step_on_a_card_reads_the_same_twice() -> None:
    def build() -> Callable[[], Any]:
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(torch.randn(4, 8, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    assert record(build).to_json() == record(build).to_json()
    assert memplan.simulate(record(build)) == memplan.simulate(record(build))


def test_what_is_computed_while_building_is_computed_as_on_cuda() -> None:
    """A product in a build that names no CUDA takes cuBLAS's workspace, 8,519,680 bytes on an A100, all the same."""
    built: list[int] = []

    def build() -> Callable[[], Any]:
        built.append(1)
        product = torch.randn(64, 64) @ torch.randn(64, 64)
        return lambda: product + 1

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        patch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
        trace = record(build, steps=1)
    assert next(s.bytes for s in trace.counted if s.cause == "workspace") == 8_519_680
    assert len(trace.counted) == len(trace.storages)
    assert len(built) == 2


def test_another_thread_neither_sees_nor_spoils_a_recording() -> None:
    import threading

    def build() -> Callable[[], Any]:
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 8))
        return lambda: model(torch.zeros(16, 64)).sum().backward()

    alone = memplan.simulate(record(build)).peak_allocated
    stop, devices = threading.Event(), set[str]()

    def other() -> None:
        model = nn.Linear(32, 32)
        while not stop.is_set():
            devices.add(model(torch.ones(4, 32)).sum().device.type)
            devices.add(torch.zeros(3).device.type)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        peaks = {memplan.simulate(record(build)).peak_allocated for _ in range(5)}
    finally:
        stop.set()
        thread.join()
    assert peaks == {alone}
    assert devices == {"cpu"}


def test_the_device_of_a_vectorized_tensor() -> None:
    def build() -> Callable[[], Any]:
        weights = torch.randn(4, 8, device="cuda")
        return lambda: torch.vmap(lambda w: w + torch.arange(8, device=w.device))(weights)

    assert {s.shape for s in record(build, steps=1).counted} >= {(4, 8)}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_torchscript_that_makes_tensors() -> None:
    def build() -> Callable[[], Any]:
        w = torch.randn(3, device="cuda")
        return lambda: torch.func.hessian(lambda x: (x**3).sum())(w)

    assert record(build, steps=1).counted
