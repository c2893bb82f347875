"""Compile the kernels of `memplan.kernels` for cards that are not here, and say what they take of them.

python tools/kernel_table.py            compares with benchmarks/results/kernels.json
python tools/kernel_table.py --write    writes it

Needs Triton, whose compiler and NVIDIA's assembler are in its wheel, and no GPU. What a kernel is compiled for is what
the public functions start it with, on tensors of usual sizes.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memplan import kernels
from memplan.kernels.launch import Launch, without_data

TABLE = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "kernels.json"
ARCHITECTURES = (75, 80, 90, 120)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32",
    torch.int16: "*i16", torch.uint8: "*u8",
}  # fmt: skip


def calls(dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Calls of the public functions by name, on small tensors with rows as long as usual ones."""

    def tensor(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    def norm(function: Any, width: int, **residual: Tensor) -> Tensor:
        results = function(tensor(4, width), tensor(width), **residual)
        return results[0] + results[1] if residual else results

    ids = torch.zeros(4, dtype=torch.int64)
    made: dict[str, Callable[[], Tensor]] = {
        "cross_entropy": lambda: kernels.cross_entropy(tensor(4, 64), tensor(1024, 64), ids),
        "cross_entropy, softcap, smoothing": lambda: kernels.cross_entropy(
            tensor(4, 64), tensor(1024, 64), ids, softcap=30.0, label_smoothing=0.1
        ),
        "swiglu": lambda: kernels.swiglu(tensor(4, 4096), tensor(4, 4096)),
        "geglu": lambda: kernels.geglu(tensor(4, 4096), tensor(4, 4096)),
        "geglu, tanh": lambda: kernels.geglu(tensor(4, 4096), tensor(4, 4096), approximate="tanh"),
    }
    image, labels = tensor(2, 64, 32, 32), torch.zeros(2, 1, 16, 16, 16, dtype=torch.int64)
    made["batch_norm_act with residual, channels last"] = lambda: kernels.batch_norm_act(
        image.contiguous(memory_format=torch.channels_last), tensor(64), tensor(64), residual=image
    )
    made["instance_norm_act, silu"] = lambda: kernels.instance_norm_act(image, activation="silu")
    volume = tensor(2, 64, 16, 16, 16)
    made["depthwise_conv, 3D"] = lambda: kernels.depthwise_conv(volume, tensor(64, 1, 3, 3, 3), tensor(64), padding=1)
    made["depthwise_conv, stride, channels last"] = lambda: kernels.depthwise_conv(
        image.contiguous(memory_format=torch.channels_last), tensor(64, 1, 7, 7), stride=2, padding=3
    )
    made |= _updates(tensor(2048).detach())
    made["dice_cross_entropy, 3 classes"] = lambda: kernels.dice_cross_entropy(tensor(2, 3, 16, 16, 16), labels)
    made["dice_cross_entropy, 117 classes, channels last"] = lambda: kernels.dice_cross_entropy(
        tensor(2, 117, 16, 16).contiguous(memory_format=torch.channels_last), labels[:, 0, 0], squared=True
    )
    for width in (8192, 16384):
        made[f"softmax_dropout {width}, hidden"] = lambda width=width: kernels.softmax_dropout(
            tensor(2, 4, 8, width), torch.zeros(8, width, dtype=torch.bool), p=0.1
        )
    made["softmax_dropout 1024, added, no dropout"] = lambda: kernels.softmax_dropout(
        tensor(2, 4, 8, 1024), torch.zeros(2, 1, 8, 1024, dtype=dtype)
    )
    for width in (128, 4096, 8192, 16384):
        made[f"rms_norm {width}"] = functools.partial(norm, kernels.rms_norm, width)
        made[f"layer_norm with residual {width}"] = lambda width=width: norm(
            functools.partial(kernels.layer_norm, bias=tensor(width)), width, residual=tensor(4, width)
        )
    return made


def _updates(parameter: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Updates of a parameter, one in bfloat16 with its master weights packed."""
    moments, clip = torch.zeros(2, *parameter.shape), torch.ones(())
    packed: Any = {}
    if parameter.dtype == torch.bfloat16:
        packed = {"low": torch.zeros_like(parameter, dtype=torch.int16), "ties": torch.zeros(1, dtype=torch.int64)}

    def adamw() -> Tensor:
        kernels.adamw_step(parameter, parameter, *moments, step=1, clip=clip, **packed)
        return parameter

    def sgd() -> Tensor:
        kernels.sgd_step(parameter, parameter, moments[0], momentum=0.9, weight_decay=0.1, nesterov=True, **packed)
        return parameter

    return {"adamw_step, clip": adamw, "sgd_step, nesterov": sgd}


def launches(call: Callable[[], Tensor]) -> list[Launch]:
    """The kernels that a call and its backward pass start."""
    started: list[Launch] = []
    with without_data("cuda", started.append):
        result = call()
        if result.requires_grad:
            result.sum().backward()
    return started


def resources(started: Launch, architecture: int) -> dict[str, int]:
    """Registers of a thread, bytes of it that are spilled or indexed, and a program's shared memory, in bytes."""
    compiled = compile_for(started, architecture)
    tool = Path(sys.modules["triton"].__file__ or "").parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return {
        "registers": int(found["REG"]),
        "spilled": int(found["STACK"]) + int(found["LOCAL"]),
        "shared": compiled.metadata.shared,
    }


def compile_for(started: Launch, architecture: int) -> Any:
    """The kernel as Triton compiles it: pointers and sizes that 16 divides are told so, as when it is started."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    constants = dict(started.constants)
    options = {"num_warps": constants.pop("num_warps"), "enable_fp_fusion": constants.pop("enable_fp_fusion", True)}
    signature: dict[str, str] = {}
    divisible: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, (name, arg) in enumerate(zip(started.kernel.arg_names, started.args, strict=False)):
        of_numbers = "i32" if isinstance(arg, int) else "fp32"
        signature[name] = _POINTERS[arg.dtype] if isinstance(arg, Tensor) else of_numbers
        if isinstance(arg, Tensor) or (isinstance(arg, int) and arg % 16 == 0):
            divisible[(position,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(started.kernel, signature=signature, constexprs=constants, attrs=divisible)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def table(architectures: tuple[int, ...] = ARCHITECTURES, dtypes: tuple[str, ...] = tuple(DTYPES)) -> dict[str, Any]:
    """Call, kernel, dtype and architecture -> resources."""
    return dict(_rows(architectures, dtypes))


def _rows(architectures: tuple[int, ...], dtypes: tuple[str, ...]) -> Iterator[tuple[str, dict[str, int]]]:
    for dtype in dtypes:
        for name, call in calls(DTYPES[dtype]).items():
            unique = {started.kernel.fn.__name__: started for started in launches(call)}
            for kernel, started in unique.items():
                for architecture in architectures:
                    yield f"{name}: {kernel}, {dtype}, sm_{architecture}", resources(started, architecture)


def main() -> None:
    """Compare the table with the kept one, or write it."""
    import triton  # pyright: ignore[reportMissingImports]

    made = {"triton": triton.__version__, "kernels": table()}
    if "--write" in sys.argv:
        rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in made["kernels"].items())
        text = f'{{\n  "triton": "{made["triton"]}",\n  "kernels": {{\n{rows}\n  }}\n}}\n'
        TABLE.write_text(text, encoding="utf-8")
    else:
        kept = json.loads(TABLE.read_text(encoding="utf-8"))
        names = {**made["kernels"], **kept["kernels"]}
        differing = [name for name in names if made["kernels"].get(name) != kept["kernels"].get(name)]
        print("\n".join(differing) or f"{len(made['kernels'])} as kept")


if __name__ == "__main__":
    main()
