"""Accelerate with bfloat16 and two micro-batches: its copies of the outputs in float32 outlive the step."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", cpu=True)
    config = GPT2Config(vocab_size=1000, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(0, 1000, (32, 64))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    loader = DataLoader(rows, batch_size=4)  # pyright: ignore[reportArgumentType]  # a list is a data set
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            out = model(**batch)
            accelerator.backward(out.loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(out.loss.item())


if __name__ == "__main__":
    main()
