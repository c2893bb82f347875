import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class D(Dataset):
    def __init__(s, n):
        s.n = n

    def __len__(s):
        return s.n

    def __getitem__(s, i):
        g = torch.Generator().manual_seed(i)
        return {
            "input_ids": torch.randint(0, 1000, (64,), generator=g),
            "attention_mask": torch.ones(64, dtype=torch.long),
            "labels": i % 50,
        }


m = BertForSequenceClassification(
    BertConfig(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        num_labels=50,
    )
)
args = TrainingArguments(
    "out",
    num_train_epochs=2,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=16,
    gradient_accumulation_steps=2,
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
)
t = Trainer(
    m,
    args,
    train_dataset=D(120),
    eval_dataset=D(300),
    compute_metrics=lambda p: {"acc": float((p.predictions.argmax(-1) == p.label_ids).mean())},
)
t.train()
print(t.evaluate())
