"""How near predictions are on other people's models: tiny ones of transformers, MONAI, diffusers, PyG and timm.

    pip install transformers monai diffusers torch_geometric timm
    python benchmarks/breadth.py                      # writes breadth.json and breadth.md to benchmarks/results
    python benchmarks/breadth.py --only gpt2,UNet     # prints, writes nothing
    python benchmarks/breadth.py --every 5 --family transformers
    python benchmarks/breadth.py --again gpt2,UNet    # these anew in breadth.json, after a change; the others stay
    python benchmarks/breadth.py --report             # breadth.md anew from breadth.json

Of transformers, every type of model that `AutoModel` knows is made with few and small layers, without a list of ours.
A step is forward, the sum of all outputs, backward and AdamW, twice. What does not run in eager mode with the inputs
given here is left out. `measured` is torch's profiler's, as in accuracy.py; each model has a process of its own.
Packages that are not installed are left out, and the report says so.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.accuracy import RESULTS, STEPS, measured_peak

Row = dict[str, Any]
Maker = Callable[[], Callable[[], None]]
FAMILIES = ("transformers", "monai", "diffusers", "torch_geometric", "timm")
SECONDS = 180
NEAR = 0.001
"""Relative error up to which a prediction counts as right."""
LARGEST = 40_000_000
"""Parameters beyond which a model is not tiny and is left out."""
FEW = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "depth"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
}
"""Attributes of a configuration that say how many layers and experts there are."""
SMALL = FEW | {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "projection_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "num_experts_per_tok": 2, "vocab_size": 128, "max_position_embeddings": 64, "n_positions": 64, "head_dim": 8,
    "d_kv": 8, "image_size": 32, "patch_size": 8,
}  # fmt: skip
"""Attributes of a configuration that are made small, where they are larger."""


def small(config: Any, limits: dict[str, int] = SMALL) -> Any:
    """Make a configuration of transformers, and those within it, small."""
    from transformers import PretrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            small(value, limits)
        elif type(value) is int and name in limits and value > limits[name]:
            setattr(config, name, limits[name])
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id") and type(value) is int and value >= 128:
            setattr(config, name, 1)
    return config


def transformers_step(kind: str, *, cache: bool = True, both: bool = False, wide: bool = False) -> Maker:
    """Make a step of a type of model that transformers knows.

    ``cache``: with one, if the model has it by default. ``both``: pictures and what is said of them, as CLIP takes.
    ``wide``: layers as wide as the model has them, and inputs as long; to be recorded, not run.
    """
    import torch
    from transformers import AutoConfig, AutoModel

    config = small(AutoConfig.for_model(kind), FEW if wide else SMALL)
    batch, tokens, samples, frames = (4, 512, 32000, 1000) if wide else (2, 16, 4000, 64)
    if not cache:
        config.use_cache = False

    def inputs_of(model: Any) -> dict[str, Any]:
        name = model.main_input_name
        size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 32)
        size = size if isinstance(size, int) else size[0]
        channels = getattr(config, "num_mel_bins", 80)
        given = {
            "input_ids": lambda: torch.randint(3, 100, (batch, tokens)),
            "pixel_values": lambda: torch.randn(batch, getattr(config, "num_channels", 3), size, size),
            "input_values": lambda: torch.randn(batch, samples),
            "input_features": lambda: torch.randn(batch, channels, frames),
        }
        names = {name, "input_ids", "pixel_values"} if both else {name}
        return {one: given[one]() for one in sorted(names)} | (
            {"decoder_input_ids": torch.randint(3, 100, (batch, tokens // 2))} if config.is_encoder_decoder else {}
        )

    def build() -> Callable[[], None]:
        torch.manual_seed(0)
        model = AutoModel.from_config(config).train()
        return trained(model, inputs_of(model), largest=None if wide else LARGEST)

    return build


def trained(
    model: Any, kwargs: dict[str, Any], args: tuple[Any, ...] = (), largest: int | None = LARGEST
) -> Callable[[], None]:
    """Return a step: forward, the sum of what comes out, backward, AdamW. ``step.called`` is what it calls."""
    import torch
    from torch.utils._pytree import tree_leaves

    if largest is not None and sum(parameter.numel() for parameter in model.parameters()) > largest:
        raise ValueError("not tiny")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        out = model(*args, **kwargs)
        leaves = tree_leaves(dict(out) if isinstance(out, dict) else out)
        loss = sum(one.float().sum() for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad)
        loss.backward()  # pyright: ignore[reportAttributeAccessIssue]  # a model without outputs is left out
        optimizer.step()

    step.called = model, args, kwargs  # pyright: ignore[reportFunctionMemberAccess]
    return step


def _of(make: Callable[[], Any], *shapes: tuple[int, ...], **kwargs: Any) -> Maker:
    """Return a build of a model and inputs of these shapes; what is called in ``kwargs`` is made anew, too."""

    def build() -> Callable[[], None]:
        import torch

        torch.manual_seed(0)
        made = {name: value() if callable(value) else value for name, value in kwargs.items()}
        return trained(make().train(), made, tuple(torch.randn(*shape) for shape in shapes))

    return build


def monai_steps(*, wide: bool = False) -> dict[str, Maker]:
    """Networks of MONAI, in two and three dimensions; ``wide``: on larger pictures and volumes."""
    nets: Any = importlib.import_module("monai.networks.nets")

    side3, side2 = (96, 256) if wide else (32, 64)
    small3, small2 = (1, 1, *(side3,) * 3), (1, 1, side2, side2)
    found: dict[str, Maker] = {}
    for dims, shape in ((2, small2), (3, small3)):
        options: dict[str, dict[str, Any]] = {
            "UNet": {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1},
            "BasicUNet": {"features": (8, 8, 16, 32, 32, 8)},
            "BasicUNetPlusPlus": {"features": (8, 8, 16, 32, 32, 8)},
            "AttentionUnet": {"channels": (8, 16, 32), "strides": (2, 2)},
            "SegResNet": {"init_filters": 8},
            "SegResNetDS": {"init_filters": 8},
            "DynUNet": {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]},
            "VNet": {},
            "HighResNet": {},
            "UNETR": {"img_size": shape[2:], "feature_size": 8, "hidden_size": 48, "mlp_dim": 64, "num_heads": 4},
            "SwinUNETR": {"feature_size": 12, "use_checkpoint": False},
            "AutoEncoder": {"channels": (8, 16), "strides": (2, 2)},
            "VarAutoEncoder": {"in_shape": (1, *shape[2:]), "latent_size": 8, "channels": (8, 16), "strides": (2, 2)},
            "FlexibleUNet": {"backbone": "efficientnet-b0"},
            "RegUNet": {"num_channel_initial": 8, "depth": 2},
        }
        for name, given in options.items():
            channels = {"out_channels": 2} | (
                {} if name == "VarAutoEncoder" else {"in_channels": 3 if name == "FlexibleUNet" else 1}
            )
            make = partial(getattr(nets, name), spatial_dims=dims, **channels, **given)
            found[f"{name} {dims}d"] = _of(make, (1, 3, *shape[2:]) if name == "FlexibleUNet" else shape)
        found[f"DenseNet121 {dims}d"] = _of(
            lambda dims=dims: nets.DenseNet121(spatial_dims=dims, in_channels=1, out_channels=2), shape
        )
        found[f"ResNet10 {dims}d"] = _of(
            lambda dims=dims: nets.resnet10(spatial_dims=dims, n_input_channels=1, num_classes=2), shape
        )
        found[f"EfficientNet-b0 {dims}d"] = _of(
            lambda dims=dims: nets.EfficientNetBN("efficientnet-b0", spatial_dims=dims, in_channels=1, num_classes=2),
            shape,
        )
        found[f"SEResNet50 {dims}d"] = _of(
            lambda dims=dims: nets.SEResNet50(spatial_dims=dims, in_channels=1, num_classes=2), shape
        )
    found["ViT 3d"] = _of(
        lambda: nets.ViT(1, (side3,) * 3, (8, 8, 8), hidden_size=48, mlp_dim=64, num_layers=2, num_heads=4), small3
    )
    found["MILModel"] = _of(lambda: nets.MILModel(2, mil_mode="att", pretrained=False), (1, 2, 3, 64, 64))
    return found


def diffusers_steps() -> dict[str, Maker]:
    """Networks of diffusion models."""
    import torch

    diffusers: Any = importlib.import_module("diffusers")

    time = lambda: torch.tensor([3, 7])  # noqa: E731
    text = lambda: torch.randn(2, 7, 32)  # noqa: E731
    blocks = {"block_out_channels": (32, 64), "layers_per_block": 1}
    return {
        "UNet2DModel": _of(
            lambda: diffusers.UNet2DModel(
                sample_size=32,
                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
                **blocks,
            ),
            (2, 3, 32, 32),
            timestep=time,
        ),
        "UNet2DConditionModel": _of(
            lambda: diffusers.UNet2DConditionModel(
                sample_size=16,
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
                cross_attention_dim=32,
                **blocks,
            ),
            (2, 4, 16, 16),
            timestep=time,
            encoder_hidden_states=text,
        ),
        "UNet1DModel": _of(
            lambda: diffusers.UNet1DModel(sample_size=64, block_out_channels=(16, 32, 32)), (2, 2, 64), timestep=time
        ),
        "UNet3DConditionModel": _of(
            lambda: diffusers.UNet3DConditionModel(
                sample_size=16,
                down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
                up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
                cross_attention_dim=32,
                attention_head_dim=4,
                **blocks,
            ),
            (2, 4, 3, 16, 16),
            timestep=time,
            encoder_hidden_states=text,
        ),
        "AutoencoderKL": _of(
            lambda: diffusers.AutoencoderKL(
                block_out_channels=(32, 64),
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
            ),
            (1, 3, 32, 32),
        ),
        "AutoencoderTiny": _of(
            lambda: diffusers.AutoencoderTiny(
                encoder_block_out_channels=(16, 16),
                decoder_block_out_channels=(16, 16),
                num_encoder_blocks=(1, 1),
                num_decoder_blocks=(1, 1),
            ),
            (2, 3, 32, 32),
        ),
        "VQModel": _of(lambda: diffusers.VQModel(block_out_channels=(32,), num_vq_embeddings=16), (2, 3, 32, 32)),
        "DiTTransformer2DModel": _of(
            lambda: diffusers.DiTTransformer2DModel(
                num_attention_heads=2, attention_head_dim=16, num_layers=2, sample_size=16, in_channels=4
            ),
            (2, 4, 16, 16),
            timestep=time,
            class_labels=lambda: torch.tensor([1, 2]),
        ),
        "PriorTransformer": _of(
            lambda: diffusers.PriorTransformer(
                num_attention_heads=2,
                attention_head_dim=16,
                num_layers=2,
                embedding_dim=32,
                num_embeddings=7,
                additional_embeddings=4,
            ),
            (2, 32),
            timestep=time,
            proj_embedding=lambda: torch.randn(2, 32),
            encoder_hidden_states=text,
        ),
        "ControlNetModel": _of(
            lambda: diffusers.ControlNetModel(
                down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                cross_attention_dim=32,
                conditioning_embedding_out_channels=(16, 32),
                **blocks,
            ),
            (2, 4, 16, 16),
            timestep=time,
            encoder_hidden_states=text,
            controlnet_cond=lambda: torch.randn(2, 3, 32, 32),
        ),
        "T2IAdapter": _of(
            lambda: diffusers.T2IAdapter(channels=[16, 32], num_res_blocks=1, downscale_factor=2), (2, 3, 32, 32)
        ),
        "SD3Transformer2DModel": _of(
            lambda: diffusers.SD3Transformer2DModel(
                sample_size=16,
                patch_size=2,
                in_channels=4,
                num_layers=2,
                attention_head_dim=8,
                num_attention_heads=4,
                joint_attention_dim=32,
                caption_projection_dim=32,
                pooled_projection_dim=32,
                out_channels=4,
            ),
            (2, 4, 16, 16),
            timestep=time,
            encoder_hidden_states=text,
            pooled_projections=lambda: torch.randn(2, 32),
        ),
        "PixArtTransformer2DModel": _of(
            lambda: diffusers.PixArtTransformer2DModel(
                num_attention_heads=2,
                attention_head_dim=16,
                in_channels=4,
                num_layers=2,
                cross_attention_dim=32,
                sample_size=16,
                caption_channels=32,
                use_additional_conditions=False,
            ),
            (2, 4, 16, 16),
            timestep=time,
            encoder_hidden_states=text,
            added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None},
        ),
        "Transformer2DModel": _of(
            lambda: diffusers.Transformer2DModel(
                num_attention_heads=2, attention_head_dim=16, in_channels=32, num_layers=2, cross_attention_dim=32
            ),
            (2, 32, 16, 16),
            encoder_hidden_states=text,
        ),
    }


def torch_geometric_steps() -> dict[str, Maker]:
    """Networks and layers of graphs, on a graph of 200 nodes."""
    import torch

    nets: Any = importlib.import_module("torch_geometric.nn")

    edges = lambda: torch.randint(0, 200, (2, 900))  # noqa: E731
    batch = lambda: torch.arange(200) // 50  # noqa: E731
    found: dict[str, Maker] = {}
    for name in ("GCN", "GraphSAGE", "GAT", "GIN", "PNA", "EdgeCNN"):
        given = (
            {"aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.ones(20)} if name == "PNA" else {}
        )
        found[name] = _of(
            lambda name=name, given=given: getattr(nets, name)(16, 32, 3, 8, **given), (200, 16), edge_index=edges
        )
    for name in (
        "GCNConv", "SAGEConv", "GraphConv", "GATConv", "GATv2Conv", "TransformerConv", "TAGConv", "ARMAConv", "SGConv",
        "ClusterGCNConv", "LEConv", "ResGatedGraphConv", "SuperGATConv", "GeneralConv", "FeaStConv", "MFConv", "EGConv",
        "HypergraphConv", "LGConv", "SSGConv",
    ):  # fmt: skip
        sizes = () if name == "LGConv" else (16, 16)
        make = partial(getattr(nets, name), *sizes)
        found[name] = _of(lambda make=make: _with_layer(make()), (200, 16), edge_index=edges)
    found["ChebConv"] = _of(lambda: nets.ChebConv(16, 16, 3), (200, 16), edge_index=edges)
    found["APPNP"] = _of(lambda: _with_layer(nets.APPNP(3, 0.1)), (200, 16), edge_index=edges)
    found["DenseGCNConv"] = _of(lambda: nets.DenseGCNConv(16, 16), (2, 50, 16), (2, 50, 50))
    for name in ("global_mean_pool", "global_max_pool", "global_add_pool"):
        found[name] = _of(lambda name=name: _pooled(getattr(nets, name)), (200, 16), batch=batch)
    found["GraphNorm"] = _of(lambda: nets.GraphNorm(16), (200, 16), batch=batch)
    found["DiffGroupNorm"] = _of(lambda: nets.DiffGroupNorm(16, 4), (200, 16))
    found["Set2Set"] = _of(lambda: nets.Set2Set(16, 3), (200, 16), index=batch)
    found["SchNet"] = _of(
        lambda: nets.SchNet(32, 32, 2, 10, interaction_graph=_pairs), z=lambda: torch.randint(1, 9, (40,)),
        pos=lambda: torch.randn(40, 3), batch=lambda: torch.zeros(40, dtype=torch.long),
    )  # fmt: skip
    return found


def _pairs(positions: Any, batch: Any) -> Any:
    """Return all pairs of points, and how far apart they are."""
    import torch

    edges = torch.combinations(torch.arange(len(positions))).t()
    return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)


def _with_layer(layer: Any) -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = torch.nn.Linear(16, 16), layer

        def forward(self, x: Any, edge_index: Any) -> Any:
            return self.layer(self.first(x).relu(), edge_index)

    return Net()


def _pooled(pool: Any) -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(16, 16)

        def forward(self, x: Any, batch: Any) -> Any:
            return pool(self.first(x).relu(), batch)

    return Net()


def timm_steps() -> dict[str, Maker]:
    """The smallest of each kind of timm's image models."""
    timm: Any = importlib.import_module("timm")

    kinds: dict[str, str] = {}
    for name in timm.list_models():
        if any(word in name for word in ("tiny", "nano", "pico", "atto", "18", "_xs", "small", "b0")):
            kinds.setdefault(timm.models.model_entrypoint(name).__module__, name)  # pyright: ignore[reportAttributeAccessIssue]
    return {
        name: _of(lambda name=name: timm.create_model(name, num_classes=10), (2, 3, 224, 224))
        for name in sorted(kinds.values())
    }


def names_of(family: str) -> list[str]:
    """Return the models of a family."""
    if family == "transformers":
        from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

        return list(MODEL_MAPPING_NAMES)
    return list(globals()[f"{family}_steps"]())


def runnable(family: str, name: str) -> Maker:
    """Return a model's step, after it ran in eager mode; raises what that raises."""
    if family != "transformers":
        build: Maker = globals()[f"{family}_steps"]()[name]
        _try_out(build)
        return build
    build = transformers_step(name)
    try:
        _try_out(build)
    except Exception:
        again: dict[str, bool] = {"cache": False}
        try:
            _try_out(transformers_step(name, **again))
        except Exception:
            again = {"both": True}
            _try_out(transformers_step(name, **again))
        build = transformers_step(name, **again)
    return build


def child(family: str, name: str) -> Row:
    """Measure and predict one model, in this process."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    row: Row = {"family": family, "name": name}
    try:
        build = runnable(family, name)
    except Exception as error:
        return row | {"left_out": f"{type(error).__name__}: {str(error)[:200]}"}
    import memplan

    try:
        trace = memplan.record(build, device="cpu", steps=STEPS)
        row["predicted"] = memplan.simulate(trace).peak_allocated
        row["assumed"] = sorted({one.kind for one in trace.assumptions})
    except memplan.MemplanError as error:
        row["refused"] = str(error)[:300]
    row["measured"] = measured_peak(build)
    if "predicted" in row:
        row["relative_error"] = row["predicted"] / row["measured"] - 1
    return row


def _try_out(build: Callable[[], Callable[[], None]]) -> None:
    step = build()
    for _ in range(STEPS):
        step()
    del step
    gc.collect()


def server() -> Any:
    """Return what starts processes by a fork of one that has imported the libraries, which takes most of the time."""
    os.environ.update({"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"})
    context = multiprocessing.get_context("forkserver")
    wanted = ("torch", "torch._dynamo", "memplan", *FAMILIES, "transformers.modeling_utils", "diffusers.models")
    context.set_forkserver_preload([name for name in wanted if importlib.util.find_spec(name.split(".")[0])])
    return context


def run(context: Any, family: str, name: str, work: Callable[[str, str], Row] = child, seconds: int = SECONDS) -> Row:
    """One model in a process of its own: ``work`` makes its row."""
    row: Row = {"family": family, "name": name}
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, work, family, name))
    process.start()
    there.close()
    try:
        if not here.poll(seconds):
            return row | {"left_out": f"it took more than {seconds} s"}
        return json.loads(here.recv())
    except EOFError:
        process.join()
        return row | {"crashed": f"exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _send(connection: Any, work: Callable[[str, str], Row], family: str, name: str) -> None:
    connection.send(json.dumps(work(family, name)))


def report(rows: list[Row]) -> str:
    """Return a table of the families, and the models whose peaks are not within NEAR, as Markdown."""
    lines = [
        f"| models of | ran | within {NEAR:.1%} | within 1 % | rest on values, and say so | refused |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for family in (*FAMILIES, "all"):
        mine = [row for row in rows if family in ("all", row["family"]) and "left_out" not in row]
        if not mine:
            continue
        told = [row for row in mine if _rests_on_values(row)]
        errors = [abs(row["relative_error"]) for row in mine if "relative_error" in row and row not in told]
        near, nearly = (sum(error <= limit for error in errors) for limit in (NEAR, 0.01))
        refused = sum("refused" in row for row in mine)
        lines.append("| " + " | ".join(map(str, (family, len(mine), near, nearly, len(told), refused))) + " |")
    off = [row for row in rows if abs(row.get("relative_error", 0)) > NEAR]
    for title, told in (("Not within it", False), ("What rests on values", True)):
        mine = [f"{row['name']} {row['relative_error']:+.2%}" for row in off if _rests_on_values(row) is told]
        lines += ["", f"{title}: " + (", ".join(mine) or "none")]
    failed = [row for row in rows if "refused" in row or "crashed" in row]
    refusals = [f"{row['name']} ({str(row.get('refused', row.get('crashed')))[:120]})" for row in failed]
    return "\n".join([*lines, "", "Refused: " + ("; ".join(refusals) or "none"), ""])


def _rests_on_values(row: Row) -> bool:
    """Return whether a prediction says that it rests on values: bounds, sizes that are read."""
    return bool({"bound", "branch", "sparse"} & set(row.get("assumed", ())))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names, with commas between; prints and writes nothing")
    parser.add_argument("--again", help="names, with commas between; writes their rows anew")
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--every", type=int, default=1, help="only every so many models of transformers")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="breadth.md anew")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(*given.child)))
        return
    results = RESULTS / "breadth.json"
    if given.report:
        (RESULTS / "breadth.md").write_text(report(json.loads(results.read_text())["rows"]))
        return
    some = given.only or given.again
    wanted = set(some.split(",")) if some else None
    models: list[tuple[str, str]] = []
    absent: list[str] = []
    for family in given.family or FAMILIES:
        try:
            names = names_of(family)
        except ImportError as error:
            absent.append(f"{family}: {error}")
            continue
        names = names[:: given.every] if family == "transformers" else names
        models += [(family, name) for name in names if wanted is None or name in wanted]
    context = server()
    with ThreadPoolExecutor(given.jobs) as pool:
        rows: list[Row] = []
        for row in pool.map(lambda model: run(context, *model), models):
            rows.append(row)
            print({key: value for key, value in row.items() if key != "family"}, flush=True)
    print(report(rows))
    print(Counter(next((key for key in ("left_out", "refused", "crashed") if key in row), "ran") for row in rows))
    if given.again:
        new = {(row["family"], row["name"]): row for row in rows}
        written = json.loads(results.read_text())
        written["rows"] = rows = [new.get((row["family"], row["name"])) or row for row in written["rows"]]
        results.write_text(json.dumps(written, indent=1) + "\n")
        (RESULTS / "breadth.md").write_text(report(rows))
    elif wanted is None:
        versions = {
            name: importlib.import_module(name).__version__
            for name in ("torch", *dict.fromkeys(family for family, _ in models))
        }
        results.write_text(json.dumps({"versions": versions, "absent": absent, "rows": rows}, indent=1) + "\n")
        (RESULTS / "breadth.md").write_text(report(rows))


if __name__ == "__main__":
    main()
