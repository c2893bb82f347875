import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

WORDS = [f"w{n}" for n in range(500)]
vocabulary = {word: n for n, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tok = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
net = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )
)  # fmt: skip
data = Dataset.from_list(
    [{"prompt": " ".join(WORDS[(i * 31 + j * 7) % 500] for j in range(8))} for i in range(8)]
)  # fmt: skip


def reward(completions, **kwargs):
    return [float(len(set(text.split()))) for text in completions]


args = GRPOConfig(
    output_dir="out", num_train_epochs=2, per_device_train_batch_size=8, num_generations=4, max_completion_length=6,
    save_strategy="epoch", report_to=[], use_cpu=not torch.cuda.is_available(), bf16=False,
    gradient_checkpointing=False, disable_tqdm=True, generation_kwargs={"min_new_tokens": 6},
)  # fmt: skip
GRPOTrainer(model=net, reward_funcs=reward, args=args, processing_class=tok, train_dataset=data).train()
