"""Small models of transformers, made from their configurations, and a LoRA fine-tune."""

import torch
from examples.gpt2 import build as gpt2_build
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from .registry import Step, training_with_labels, zoo

VOCABULARY = 8000


def tokens(batch: int, sequence: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, sequence))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-4)


def llama_model(layers: int = 4, width: int = 384) -> LlamaForCausalLM:
    """Heads of 64 features, two of them for keys and values (grouped-query attention)."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@zoo
def gpt2() -> Step:
    """The whole vocabulary of 50257, tied to the input embedding: logits and their gradient make the peak."""
    return gpt2_build(batch=2, sequence=256, layers=4, width=384)


@zoo
def llama() -> Step:
    model, ids = llama_model(), tokens(4, 256)
    return training_with_labels(model, adamw(model), input_ids=ids, labels=ids)


@zoo
def llama_gradient_checkpointing() -> Step:
    """The switch that transformers offers for recomputing every layer in the backward."""
    model, ids = llama_model(), tokens(4, 256)
    model.gradient_checkpointing_enable()
    model.train()
    return training_with_labels(model, adamw(model), input_ids=ids, labels=ids)


@zoo
def llama_lora() -> Step:
    """Only low-rank matrices beside the attention's projections learn; the rest keeps no weight gradient."""
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model, ids = get_peft_model(llama_model(), config), tokens(4, 256)
    return training_with_labels(model, adamw(model), input_ids=ids, labels=ids)


@zoo
def bert() -> Step:
    """Masked language model with a padding mask, dropout, and labels at some places only (-100 elsewhere)."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        intermediate_size=1536,
    )
    model, ids = BertForMaskedLM(config), tokens(8, 128)
    lengths = torch.randint(64, 129, (8, 1))
    mask = (torch.arange(128) < lengths).long()
    labels = torch.where(torch.rand(8, 128) < 0.15, ids, -100)
    model.train()
    return training_with_labels(model, adamw(model), input_ids=ids, attention_mask=mask, labels=labels)


@zoo
def t5() -> Step:
    """Encoder and decoder, cross-attention, a bias by relative position in every attention."""
    config = T5Config(
        vocab_size=VOCABULARY, d_model=256, d_kv=32, d_ff=1024, num_layers=3, num_heads=8, use_cache=False,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config)
    model.train()
    return training_with_labels(model, adamw(model), input_ids=tokens(4, 192), labels=tokens(4, 96))


@zoo
def gpt2_inference() -> Step:
    """Logits of all positions under no_grad, with the cache of keys and values that is on by default."""
    config = GPT2Config(vocab_size=VOCABULARY, n_layer=6, n_embd=384, n_head=6)
    model, ids = GPT2LMHeadModel(config).eval(), tokens(8, 384)

    def step() -> None:
        with torch.no_grad():
            model(input_ids=ids).logits[:, -1].argmax(-1)

    return step
