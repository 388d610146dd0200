"""A random Llama checkpoint with a working tokenizer and chat template; loads in vLLM and transformers."""

from pathlib import Path

from eagle3nb.conversations import read_source

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LAYERS, HIDDEN, VOCABULARY = 6, 128, 1024


def tokenizer():
    """A byte-level BPE of the built-in prompts, ``VOCABULARY`` tokens, ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    texts = (turn["content"] for row in read_source("builtin:train_prompts") for turn in row["messages"])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    model.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>",
        unk_token="<|endoftext|>", chat_template=TEMPLATE,
    )  # fmt: skip


def llama(folder: Path, seed: int = 0, **changes) -> Path:
    """Write the checkpoint to ``folder``; ``changes`` go over its config."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 1024,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True,
        # Wide enough that the next token depends on the context, and greedy decoding does not end in a loop at once.
        "initializer_range": 0.1,
    } | changes  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
