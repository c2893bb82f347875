"""Recipes of training: the trained parameters (``full``, ``freeze:layers=2``, ``lora:r=16,targets=all``, ``dora``,
``qlora``), or a trainer of trl (``sft``, ``dpo:r=16``, ``grpo``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memplan.errors import InputError
from memplan.trace.naming.parsing import check_arguments, keywords, offer


@dataclass(frozen=True)
class Full:
    """Every parameter is trained."""


@dataclass(frozen=True)
class Freeze:
    """Only the last ``layers`` blocks are trained."""

    layers: int = 2

    def __post_init__(self) -> None:
        _require_whole("freeze:layers", self.layers)


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters of peft; the model is frozen."""

    r: int = 8
    alpha: int = 16
    dropout: float = 0.0
    targets: str = "default"
    """Layers with an adapter: ``default`` (peft's for the architecture), ``all`` linear layers, or names joined by
    +."""

    def __post_init__(self) -> None:
        _require_whole("lora:r", self.r)
        _require_whole("lora:alpha", self.alpha)
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise InputError(f"lora:dropout={self.dropout}", expected="a share from 0 to less than 1", do="Give one")
        # no name may be empty
        if not isinstance(self.targets, str) or not all(self.target_names or [self.targets]):
            raise InputError(
                f"lora:targets={self.targets}", expected="all, default, or names joined by +: q_proj+v_proj",
                do="Write them so",
            )  # fmt: skip

    @property
    def target_names(self) -> list[str]:
        """Names of layers, [] for ``default`` and ``all``."""
        return [] if self.targets in ("default", "all") else [name.strip() for name in self.targets.split("+")]


@dataclass(frozen=True)
class Dora(Lora):
    """Low-rank adapters with a magnitude of their own for each output."""


@dataclass(frozen=True)
class Qlora(Lora):
    """Low-rank adapters of a model whose linear layers are packed to four bits by bitsandbytes."""

    kind: str = "nf4"
    double: bool = True
    """Pack the scales of the packed weights, too."""
    prepare: bool = True
    """Cast other parameters to fp32 and checkpoint, as peft's ``prepare_model_for_kbit_training``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in ("nf4", "fp4"):
            raise InputError(f"qlora:kind={self.kind}", expected="nf4 or fp4", do="Name one")
        for name in ("double", "prepare"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"qlora:{name}={getattr(self, name)}", expected="true or false", do="Give one")


@dataclass(frozen=True)
class Adapted:
    """All parameters are trained, or with ``r`` low-rank adapters."""

    r: int = 0
    """Rank of the adapters; 0: none, every parameter is trained."""
    alpha: int = 16
    dropout: float = 0.0
    targets: str = "default"
    """As of `Lora`."""

    def __post_init__(self) -> None:
        if self.r != 0:
            _ = self.adapters  # raises for invalid options

    @property
    def adapters(self) -> Lora | None:
        """The adapters that are trained, None where all parameters are."""
        return Lora(self.r, self.alpha, self.dropout, self.targets) if self.r != 0 else None


@dataclass(frozen=True)
class Trained(Adapted):
    """A step of one of trl's trainers."""


@dataclass(frozen=True)
class Sft(Trained):
    """trl's SFTTrainer: the loss of the next token."""


@dataclass(frozen=True)
class Dpo(Trained):
    """trl's DPOTrainer: chosen and rejected answers in one batch, and a reference: a second model, or with adapters
    the model without them."""


@dataclass(frozen=True)
class Grpo(Trained):
    """trl's GRPOTrainer: answers are generated, compared with those of a reference, and trained on."""

    generations: int = 8
    """Answers to a prompt, all generated at once."""
    prompt: int = 0
    """Tokens of the prompt, before those of the answer; 0: a quarter of the sequence."""
    beta: float = 0.04
    """Weight of the distance to the reference; 0: no reference."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.generations, bool) or not isinstance(self.generations, int) or self.generations < 2:
            raise InputError(f"grpo:generations={self.generations}", expected="2 or more", do="Give so many")
        if self.prompt != 0:
            _require_whole("grpo:prompt", self.prompt)
        if isinstance(self.beta, bool) or not isinstance(self.beta, (int, float)) or self.beta < 0:
            raise InputError(f"grpo:beta={self.beta}", expected="a number from 0", do="Give one")


@dataclass(frozen=True)
class Diffusion(Adapted):
    """The UNet of a text-to-image pipeline learns to predict noise; its autoencoder and text encoder are frozen."""

    targets: str = "to_q+to_k+to_v+to_out.0"
    """Layers with an adapter; by default those that diffusers' example adapts."""
    size: int = 0
    """Pixels of an image in each dimension; 0: as the pipeline has."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 0 or self.size % 64:
            raise InputError(f"diffusion:size={self.size}", expected="a multiple of 64", do="Give one")


Recipe = Full | Freeze | Lora | Trained | Diffusion
_KINDS: dict[str, type[Recipe]] = {
    "full": Full, "freeze": Freeze, "lora": Lora, "dora": Dora, "qlora": Qlora, "sft": Sft, "dpo": Dpo, "grpo": Grpo,
    "diffusion": Diffusion,
}  # fmt: skip


def recipe_of(text: str) -> Recipe:
    """Parse ``kind`` or ``kind:name=value,name=value``. Raises InputError: no such recipe or option, or a value that it
    cannot have; with the nearest names.

    Example:
        >>> recipe_of("lora:r=16,targets=q_proj+v_proj")
        Lora(r=16, alpha=16, dropout=0.0, targets='q_proj+v_proj')
    """
    name, _, options = text.partition(":")
    kind = _KINDS.get(name.strip().lower())
    if kind is None:
        raise InputError(
            f"there is no recipe {name!r}",
            expected=f"one of {', '.join(_KINDS)}, as in lora:r=16",
            do=offer(name, _KINDS),
        )
    arguments: dict[str, Any] = keywords(options, "--recipe") if options else {}
    check_arguments(kind, arguments, title=f"the recipe {name}", option="--recipe")
    return kind(**arguments)


def _require_whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}={value}", expected="a whole number from 1", do="Give one")
