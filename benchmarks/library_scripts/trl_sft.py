"""Supervised fine-tuning with TRL: a tokenizer made on the spot, a data set of texts, the trainer's own loop."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = "the a cat dog sat ran on under mat tree and then it was very happy".split()
vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
core.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")

texts = [" ".join(words[(i * 7 + j) % len(words)] for j in range(20 + i % 13)) for i in range(64)]
config = GPT2Config(vocab_size=len(vocabulary), n_positions=64, n_embd=128, n_layer=3, n_head=4)
trainer = SFTTrainer(
    model=GPT2LMHeadModel(config),
    args=SFTConfig(
        output_dir="sft",
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=2,
        learning_rate=1e-3,
        max_length=48,
        report_to=[],
        save_strategy="no",
        bf16=False,
    ),
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
)
trainer.train()
trainer.save_model("sft/last")
