"""Models as libraries write them, held to the accuracy that the README promises."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import slow
from torch import nn
from truth.cpu_allocator import measured_peak

import memplan

Step = Callable[[], Any]


def _train(model: Any, optimizer: Any, forward: Callable[[], torch.Tensor]) -> Step:
    updater = optimizer([p for p in model.parameters() if p.requires_grad])

    def step() -> None:
        updater.zero_grad()
        forward().backward()
        updater.step()

    return step


def _language(name: str, **config: Any) -> Step:
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))
    tokens = torch.randint(0, 1000, (4, 128))
    return _train(model, torch.optim.AdamW, lambda: model(input_ids=tokens, labels=tokens).loss)


_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 1000,
}


def llama() -> Step:
    return _language("Llama", **_SIZES, num_key_value_heads=4)


def mixtral() -> Step:
    return _language("Mixtral", **_SIZES, num_key_value_heads=4, num_local_experts=4)


def bert() -> Step:
    transformers = pytest.importorskip("transformers")
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**_SIZES))
    tokens, labels = torch.randint(0, 1000, (4, 128)), torch.randint(0, 2, (4,))
    return _train(model, torch.optim.SGD, lambda: model(input_ids=tokens, labels=labels).loss)


def vit() -> Step:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**{k: v for k, v in _SIZES.items() if k != "vocab_size"}, image_size=64)
    model, x = transformers.ViTModel(config), torch.randn(4, 3, 64, 64)
    return _train(model, torch.optim.SGD, lambda: model(x).pooler_output.pow(2).mean())


def lora() -> Step:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, num_key_value_heads=4))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    tokens = torch.randint(0, 1000, (4, 128))
    return _train(model, torch.optim.AdamW, lambda: model(input_ids=tokens, labels=tokens).loss)


def unet_3d() -> Step:
    nets, losses = pytest.importorskip("monai.networks.nets"), pytest.importorskip("monai.losses")
    model = nets.UNet(3, 1, 3, (8, 16, 32), (2, 2), num_res_units=1)
    loss = losses.DiceCELoss(to_onehot_y=True, softmax=True)
    x, y = torch.randn(1, 1, 16, 16, 16), torch.randint(0, 3, (1, 1, 16, 16, 16))
    return _train(model, torch.optim.Adam, lambda: loss(model(x), y))


def seg_res_net() -> Step:
    nets = pytest.importorskip("monai.networks.nets")
    model, x = nets.SegResNet(3, 8, 1, 2), torch.randn(1, 1, 32, 32, 32)
    return _train(model, torch.optim.SGD, lambda: model(x).pow(2).mean())


@pytest.mark.parametrize("build", [llama, *slow(unet_3d, lora, mixtral, bert, vit, seg_res_net)])
def test_peak_is_within_a_percent_and_not_below_by_half_of_one(build: Callable[[], Step]) -> None:
    torch.manual_seed(0)
    predicted, measured = memplan.simulate(memplan.record(build)).peak_allocated, measured_peak(build)
    assert -0.005 * measured <= predicted - measured <= 0.01 * measured


@pytest.mark.parametrize("build", [lora, *slow(llama, unet_3d)])
def test_sums_hold(build: Callable[[], Step]) -> None:
    explanation = memplan.explain(build)
    assert sum(explanation.by_cause.values()) == explanation.timeline.peak_allocated
    assert sum(row.saved_bytes for row in explanation.layers) == explanation.saved_bytes > 0


class Quantized(nn.Parameter):
    """Made as bitsandbytes makes its parameters."""

    def __new__(cls, data: torch.Tensor, bits: int) -> Any:
        made: Any = torch.Tensor._make_subclass(cls, data)
        made.bits = bits
        return made


class Tagged(nn.Parameter):
    """Made by the constructor of its base."""

    def __new__(cls, data: torch.Tensor, bits: int) -> Any:
        made: Any = super().__new__(cls, data)
        made.bits = bits
        return made


@pytest.mark.parametrize("kind", [Quantized, Tagged])
def test_parameters_of_subclasses_are_made_and_converted(kind: Any) -> None:
    def build() -> Step:
        model, x = nn.Linear(64, 64), torch.randn(8, 64, dtype=torch.float64)
        model.weight = kind(model.weight.data, 4)
        model = model.double()
        assert isinstance(model.weight, kind)
        assert vars(model.weight)["bits"] == 4
        return _train(model.requires_grad_(), torch.optim.AdamW, lambda: model(x).sum())

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)


@pytest.mark.parametrize("copied", [False, True])
def test_a_file_of_safetensors_is_mapped(tmp_path: Path, copied: bool) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    safetensors.save_file(nn.Linear(256, 256).state_dict(), path)

    def build() -> Step:
        model, x = nn.Linear(256, 256), torch.randn(8, 256)
        model.load_state_dict(safetensors.load_file(path), assign=not copied)
        return lambda: model(x).sum().backward()

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == measured_peak(build)


SCRIPTED = """
import torch
def helper(x: int) -> int:
    return x + 1
@torch.jit.script
class Counter:
    def __init__(self, start: int) -> None:
        self.count = helper(start)
"""


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_module_of_torch_is_imported_that_scripts_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.distributed.optim` does, which ignite imports: the class's globals are looked up in its caller's frame."""
    path = tmp_path / "scripts_a_class.py"
    path.write_text(SCRIPTED, encoding="utf-8")
    spec: Any = importlib.util.spec_from_file_location("torch._scripts_a_class", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)

    def build() -> Step:
        spec.loader.exec_module(module)
        return lambda: torch.ones(module.Counter(3).count)

    assert memplan.simulate(memplan.record(build, device="cpu", steps=1)).peak_allocated == 16


@pytest.mark.parametrize("nested", [False, True])
def test_weights_of_four_bits_are_unpacked_for_each_product(nested: bool) -> None:
    """bitsandbytes: the unpacked weight is a temporary of its op, and nothing of a recording stays in its tables."""
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def build() -> Step:
        packed = bitsandbytes.nn.Linear4bit(512, 1024, compress_statistics=nested, quant_type="nf4")
        model = nn.Sequential(nn.Linear(512, 512), packed.requires_grad_(False), nn.ReLU()).to("cpu")  # packs it
        x = torch.randn(64, 512)
        return _train(model, torch.optim.AdamW, lambda: model(x).square().mean())

    first = memplan.record(build, device="cpu")  # fills the tables without data
    measured = memplan.simulate(memplan.measure(build))
    recorded = memplan.record(build, device="cpu")
    peaks = [step.peak_allocated for step in measured.steps]
    tables = 1024 + 15 * 4 + 16 * 8  # codes of eight bits; bounds between those of four, and their order
    assert [step.peak_allocated for step in memplan.simulate(recorded).steps] == peaks
    assert [step.peak_allocated for step in memplan.simulate(first).steps] == pytest.approx(peaks, abs=tables)
    assert not any("gemm_4bit" in assumption.text for assumption in recorded.assumptions)


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit", "PagedAdamW8bit", "Lion8bit", "SGD8bit"])
def test_states_of_eight_bits_are_unpacked_for_each_update(name: str) -> None:
    """bitsandbytes: weights above 4,096 elements have states of eight bits, and biases such of float32."""
    optimizers = pytest.importorskip("bitsandbytes").optim
    more = {"momentum": 0.9} if name == "SGD8bit" else {}

    def build() -> Step:
        model, x = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)), torch.randn(16, 128)
        optimizer = partial(getattr(optimizers, name), lr=1e-3, **more)
        return _train(model, optimizer, lambda: model(x).square().mean())

    memplan.record(build, device="cpu")  # fills the tables without data
    measured = measured_peak(build)
    recorded = memplan.record(build, device="cpu")
    assert memplan.simulate(recorded).peak_allocated == pytest.approx(measured, abs=16)
    assert not any("bitsandbytes" in assumption.text for assumption in recorded.assumptions)


def test_states_of_eight_bits_on_a_card() -> None:
    """Two bytes an element, and a scale of four bytes for each 256 of both; the update's kernel takes no more."""
    optimizers = pytest.importorskip("bitsandbytes").optim
    elements = 1024 * 1024

    def peak(optimizer: Any) -> int:
        def build() -> Step:
            model, x = nn.Linear(1024, 1024, bias=False).cuda(), torch.randn(8, 1024).cuda()
            return _train(model, optimizer, lambda: model(x).square().mean())

        recorded = memplan.record(build, device="h100")
        assert not any("bitsandbytes" in assumption.text for assumption in recorded.assumptions)
        return memplan.simulate(recorded).steps[1].peak_allocated

    states = peak(optimizers.AdamW8bit) - peak(torch.optim.SGD)
    assert states == pytest.approx(2 * elements + 2 * elements // 256 * 4, abs=4096)  # both tables of codes


def test_what_a_library_registers_while_a_step_is_recorded_is_for_torch_itself() -> None:
    """torchao, which transformers imports: its tensors find their own `linear` by the function."""
    utils = pytest.importorskip("torchao.utils")
    kinds = list[Any]()

    def build() -> Step:
        class Packed(utils.TorchAOBaseTensor):
            pass

        Packed.implements_torch_function([nn.functional.linear])(lambda *_: None)
        kinds.append(Packed)
        return lambda: None

    memplan.record(build, device="cpu")
    assert list(kinds[0]._TORCH_FN_TABLE[kinds[0]]) == [nn.functional.linear]


def _torchao_training(name: str, device: str = "cpu") -> Callable[[], Step]:
    optimizers = pytest.importorskip("torchao.optim")

    def build() -> Step:
        model, x = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(device), torch.randn(16, 256)
        x = x.to(device)
        return _train(model, partial(getattr(optimizers, name), lr=1e-3), lambda: model(x).square().mean())

    return build


@pytest.mark.parametrize("name", ["AdamW4bit", *slow("AdamW8bit", "AdamWFp8")])
def test_states_of_torchao_are_tensors_within_tensors(name: str) -> None:
    """Codes and scales, which a wrapper has inside; recorded, and measured by memplan as by torch's profiler."""
    build = _torchao_training(name)
    with torch.compiler.set_stance("force_eager"):
        recorded = memplan.record(build, device="cpu")
        assert memplan.simulate(recorded).peak_allocated == measured_peak(build)
        assert memplan.simulate(memplan.measure(build)).peak_allocated == measured_peak(build)
    states = sum(s.bytes for s in recorded.storages if s.cause == "optimizer_state" and s.dtype[0] in "uf")
    elements, bits, block = 2 * 256 * 512, 4 if "4" in name else 8, 128 if "4" in name else 256
    codes = 2 * elements * bits // 8
    assert states == pytest.approx(codes + 2 * elements // block * 4, rel=0.1)  # biases are in float32, and tables


def test_states_of_torchao_on_a_card() -> None:
    def states(name: str) -> int:
        recorded = memplan.record(_torchao_training(name, "cuda"), device="h100")
        kept = [s for s in recorded.counted if s.cause == "optimizer_state" and s.died is None]
        return sum(storage.bytes for storage in kept)

    with torch.compiler.set_stance("force_eager"):
        elements = 2 * 256 * 512
        assert states("AdamW8bit") == pytest.approx(2 * elements * (1 + 4 / 256), rel=0.05)
        assert states("AdamW4bit") == pytest.approx(2 * elements * (1 / 2 + 4 / 128), rel=0.05)


def test_measuring_changes_states_within_wrappers_once() -> None:
    """A measurement runs the steps twice, and undoes the first run: of a wrapper, what is inside of it."""
    optimizers = pytest.importorskip("torchao.optim")

    def codes(run: Callable[[Step], Any]) -> torch.Tensor:
        torch.manual_seed(0)
        model, x = nn.Linear(256, 256), torch.randn(16, 256)
        optimizer = optimizers.AdamW8bit(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        step()
        run(step)
        return optimizer.state[model.weight]["exp_avg"].codes

    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(codes(lambda step: memplan.measure(lambda: step)), codes(lambda step: [step(), step()]))


@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", *slow("tensorwise", "rowwise")])
def test_float8_training(recipe: str) -> None:
    """torchao's products of float8 are torch's, which the CPU emulates in float32."""
    float8 = pytest.importorskip("torchao.float8")

    def build() -> Step:
        model, x = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)), torch.randn(64, 128)
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        model, x = float8.convert_to_float8_training(model.bfloat16(), config=config), x.bfloat16()
        return _train(model, torch.optim.AdamW, lambda: model(x).float().square().mean())

    assert memplan.simulate(memplan.record(build, device="cpu")).peak_allocated == pytest.approx(
        measured_peak(build), rel=1e-4
    )


@pytest.mark.filterwarnings("ignore:MatMul8bitLt")
@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.parametrize("train", [True, False])
def test_layers_of_eight_bits(threshold: float, train: bool) -> None:
    """bitsandbytes: its quantization while the model moves to its device, and products of integers in evaluation."""
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def build() -> Step:
        layer = bitsandbytes.nn.Linear8bitLt(256, 512, has_fp16_weights=False, threshold=threshold)
        model = nn.Sequential(nn.Linear(256, 256), layer.requires_grad_(False), nn.ReLU(), nn.Linear(512, 64))
        model, x = model.to("cpu").train(train), torch.randn(64, 256)
        if train:
            return _train(model, torch.optim.AdamW, lambda: model(x).square().mean())

        def step() -> None:
            with torch.no_grad():
                model(x)

        return step

    recorded, measured = memplan.record(build, device="cpu"), memplan.measure(build)
    assert memplan.simulate(recorded).peak_allocated == measured_peak(build)
    steps = [[step.peak_allocated for step in memplan.simulate(trace).steps] for trace in (recorded, measured)]
    assert steps[0] == steps[1]
    assert not any("bitsandbytes" in assumption.text for assumption in recorded.assumptions)


@pytest.mark.parametrize("rows", [1, 64])
def test_weights_of_four_bits_in_bfloat16(rows: int) -> None:
    """The product takes the workspace that one of a plain layer takes."""
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def build() -> Step:
        layer = bitsandbytes.nn.Linear4bit(512, 1024, quant_type="nf4", compute_dtype=torch.bfloat16).to("cpu")
        x = torch.randn(rows, 512, dtype=torch.bfloat16)

        def step() -> None:
            with torch.no_grad():
                layer(x)

        return step

    memplan.record(build, device="cpu")  # fills the tables without data
    recorded, measured = memplan.record(build, device="cpu"), memplan.measure(build)
    tables = 1024 + 15 * 4 + 16 * 8
    peaks = [memplan.simulate(trace).steps[1].peak_allocated for trace in (recorded, measured)]
    assert peaks[0] == pytest.approx(peaks[1], abs=tables)


def test_unpacked_scales_live_until_the_product_on_a_card() -> None:
    """bitsandbytes/backends/cuda/ops.py: `_dequant_linear_fallback` holds them, and their sum with the offset."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    elements, rows = 1024 * 1024, 4096

    def peak(nested: bool) -> int:
        def build() -> Step:
            layer = bitsandbytes.nn.Linear4bit(1024, 1024, bias=False, compress_statistics=nested, quant_type="nf4")
            layer, x = layer.requires_grad_(False).to("cpu").to("cuda"), torch.randn(rows, 1024).cuda()

            def step() -> None:
                with torch.no_grad():
                    layer(x)

            return step

        return memplan.simulate(memplan.record(build, device="h100")).steps[1].peak_allocated

    scales = elements // 64
    plain = 4 * scales
    nested = scales + 4 * scales // 256 + 2 * 4 * scales  # packed with scales of its own; unpacked, and with the offset
    assert peak(True) - peak(False) == pytest.approx(nested - plain, abs=4096)  # codes and the offset


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_layers_of_hqq(bits: int) -> None:
    quantize = pytest.importorskip("hqq.core.quantize")

    def build() -> Step:
        config = quantize.BaseQuantizeConfig(nbits=bits, group_size=64)
        layer = quantize.HQQLinear(nn.Linear(256, 512), config, compute_dtype=torch.float32, device="cpu")
        model, x = nn.Sequential(nn.Linear(256, 256), layer, nn.ReLU(), nn.Linear(512, 64)), torch.randn(64, 256)
        return _train(model, torch.optim.AdamW, lambda: model(x).square().mean())

    recorded, measured = memplan.record(build, device="cpu"), memplan.measure(build)
    assert memplan.simulate(recorded).peak_allocated == measured_peak(build)
    steps = [[step.peak_allocated for step in memplan.simulate(trace).steps] for trace in (recorded, measured)]
    assert steps[0] == steps[1]


def test_measuring_restores_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        table = torch.zeros(8)

    def step() -> None:
        with torch.inference_mode():
            table.add_(1)

    memplan.measure(lambda: step)
    assert table.tolist() == [2.0] * 8


@pytest.mark.parametrize(("name", "bytes_of_two"), [("PagedAdamW", 8), ("PagedAdamW8bit", 2)])
def test_paged_states_on_a_card_lie_outside_of_it(name: str, bytes_of_two: int) -> None:
    """bitsandbytes/optim/optimizer.py: those of 100,000 elements or more are in CUDA's managed memory."""
    optimizers = pytest.importorskip("bitsandbytes").optim
    elements = 512 * 512

    def trace(optimizer: Any) -> memplan.Trace:
        def build() -> Step:
            model, x = nn.Linear(512, 512, bias=False).cuda(), torch.randn(8, 512).cuda()
            return _train(model, optimizer, lambda: model(x).square().mean())

        return memplan.record(build, device="h100")

    paged = trace(getattr(optimizers, name))
    on_host = [s for s in paged.storages if s.cause == "optimizer_state" and s.device == "cpu"]
    assert sum(storage.bytes for storage in on_host) == bytes_of_two * elements
    kept = trace(getattr(optimizers, name.removeprefix("Paged")))
    less = memplan.simulate(kept).steps[1].peak_allocated - memplan.simulate(paged).steps[1].peak_allocated
    assert less == bytes_of_two * elements
    assert any("managed memory" in assumption.text for assumption in paged.assumptions)
    assert not any("HOST" in assumption.text for assumption in paged.assumptions)
