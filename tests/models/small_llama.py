"""A Llama of three blocks, as a folder with its config.json."""

from __future__ import annotations

import json
from pathlib import Path

from memplan.studies.recipes.models import Model, find_model


def small_llama(folder: Path, *, vocabulary: int = 320) -> Model:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": 64,
        "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return find_model(str(folder))
