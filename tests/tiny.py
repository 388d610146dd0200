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


def llama(folder: Path, seed: int = 0, steps: int = 0, **changes) -> Path:
    """Write the checkpoint to ``folder``; ``changes`` go over its config, ``steps`` of training make it predictable."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": LAYERS,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 1024,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True,
    } | changes  # fmt: skip
    torch.manual_seed(seed)
    words, model = tokenizer(), LlamaForCausalLM(LlamaConfig(**config))
    # As in real models: with a weight of ones, a norm left out or applied twice would change no prediction.
    torch.nn.init.uniform_(model.model.norm.weight, 0.2, 3.0)
    if steps:
        _teach(model, words, steps)
    model.to(torch.bfloat16).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def _teach(model, words, steps: int) -> None:
    """Let the model learn the built-in prompts by heart a little: its greedy answers become ones a draft can learn."""
    import torch

    texts = [row["messages"][0]["content"] for row in read_source("builtin:train_prompts")]
    chats = [[{"role": "user", "content": t}, {"role": "assistant", "content": t}] for t in texts]
    stream = torch.tensor([i for chat in chats for i in words.apply_chat_template(chat, return_dict=False)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        starts = torch.randint(len(stream) - 64, (16,)).tolist()
        batch = torch.stack([stream[k : k + 64] for k in starts])  # (16, 64)
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
