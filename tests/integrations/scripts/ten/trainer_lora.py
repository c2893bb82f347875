import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=96, n_head=4, vocab_size=300, n_positions=128))
model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=0.05))
model.print_trainable_parameters()
g = torch.Generator().manual_seed(1)
data = [
    {"input_ids": ids, "labels": ids}
    for ids in (torch.randint(0, 300, (64,), generator=g).tolist() for _ in range(200))
]
args = TrainingArguments(
    "out",
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    num_train_epochs=1,
    logging_steps=1,
    save_steps=5,
    report_to=[],
    learning_rate=1e-4,
    eval_strategy="steps",
    eval_steps=5,
    per_device_eval_batch_size=8,
)
trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:32])
trainer.train()
trainer.save_model("out/final")
