import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

WORDS = [f"w{n}" for n in range(500)]
vocabulary = {word: n for n, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tok = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(seed, n):
    return " ".join(WORDS[(seed * 31 + i * 7) % 500] for i in range(n))


def rows(n):
    return Dataset.from_list(
        [{"prompt": text(i, 8), "chosen": text(i + 1, 24), "rejected": text(i + 2, 24)} for i in range(n)]
    )


def model():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=1,
        )
    )  # fmt: skip


torch.manual_seed(0)
args = DPOConfig(
    output_dir="out", num_train_epochs=2, per_device_train_batch_size=4, per_device_eval_batch_size=4,
    eval_strategy="epoch", save_strategy="epoch", report_to=[], use_cpu=not torch.cuda.is_available(), bf16=False,
    gradient_checkpointing=False, disable_tqdm=True,
)  # fmt: skip
DPOTrainer(
    model=model(), ref_model=model(), args=args, processing_class=tok, train_dataset=rows(60), eval_dataset=rows(40)
).train()
