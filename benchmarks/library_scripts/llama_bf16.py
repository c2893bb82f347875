"""Full fine-tuning of a Llama in bfloat16, as it is done on one card: converted after it is made."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
config = LlamaConfig(
    vocab_size=2000,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
model = LlamaForCausalLM(config).to(torch.bfloat16).to(device)
model.gradient_checkpointing_enable()
model.config.use_cache = False
tokens = torch.randint(0, config.vocab_size, (48, 128))
loader = DataLoader(TensorDataset(tokens), batch_size=4, shuffle=True, drop_last=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.0)
schedule = get_cosine_schedule_with_warmup(optimizer, 3, len(loader))

model.train()
for epoch in range(1):
    for step, (batch,) in enumerate(loader):
        batch = batch.to(device)
        out = model(input_ids=batch, labels=batch)
        (out.loss / 2).backward()
        if step % 2 == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 4 == 0:
            print(f"{epoch} {step} {out.loss.item():.3f}")
model.save_pretrained("finetuned")
