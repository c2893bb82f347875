"""Find the configuration of a model: in the catalogue, a file, a folder or the local Hugging Face cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memplan._json import Unreadable, parse, read_text
from memplan.errors import InputError, TargetError
from memplan.trace.naming.parsing import offer

_POSITIONS = ("max_target_positions", "max_position_embeddings", "n_positions")
"""Names of the longest sequence in configurations."""


@dataclass(frozen=True)
class Model:
    """An architecture and its configuration."""

    name: str
    architecture: str
    """Class in transformers, as the first of ``architectures`` in a config.json."""
    config: Mapping[str, Any]
    """Arguments of the configuration's class."""
    path: str | None = None
    """What ``AutoConfig.from_pretrained`` reads; None for a model of the catalogue."""

    @property
    def positions(self) -> int | None:
        """Length of the longest sequence; None if the configuration has none."""
        values = (self.config.get(name) for name in _POSITIONS)
        return next((value for value in values if isinstance(value, int)), None)


@cache
def catalogue() -> Mapping[str, Mapping[str, Any]]:
    """Return the public configurations by name: ``architecture`` and ``config``.

    What takes no memory, such as the frequencies of rotary embeddings and special tokens, is left out.
    """
    return parse(read_text(str(Path(__file__).with_name("catalogue.json"))))


def find_model(name: str) -> Model:
    """Return the model of a name of the catalogue, of a config.json, its folder, or an id in the local cache.

    Raises:
        TargetError: there is no such model, with the nearest names.
        InputError: a config.json that is damaged, or does not name its architecture.
    """
    entry = catalogue().get(name.lower().removesuffix("-hf"))  # of ids on the Hub
    path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
    if entry is not None:
        return Model(name.lower(), entry["architecture"], entry["config"])
    if path.is_file():
        return _read(name, path)
    cached = _cached(name)
    if cached is None:
        raise TargetError(
            f"there is no model {name!r}",
            expected="a name of the catalogue, a config.json, its folder, or an id in the local Hugging Face cache",
            do=offer(name.rpartition("/")[2].lower(), catalogue()),
        )
    return _read(name, cached)


def _cached(name: str) -> Path | None:
    """Return the config.json of an id in the local cache, or None. Nothing is downloaded."""
    if name.count("/") > 1 or find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # a name that no repository can have
        return None
    return Path(path) if isinstance(path, str) else None


def _read(name: str, path: Path) -> Model:
    """Read a config.json. Raises InputError if it is damaged, or names no architecture. ``name``: of the model."""
    try:
        config = parse(read_text(str(path)))
    except Unreadable as error:
        raise InputError(f"{path}: {error}", expected="a config.json of transformers", do="Check the file") from None
    architectures = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise InputError(
            f"{path} names no architecture",
            expected='a config.json of transformers, with "architectures": ["LlamaForCausalLM"]',
            do="Add it: the model's class in transformers",
        )
    return Model(name, architectures[0], config, path=name)
