"""Tiny checkpoints of known shapes, made in seconds: for tests, and for a whole run without any model at hand.

=============  ==============================================================================================
``llama``      a Llama with tied embeddings: 6 layers, hidden 128, 1,024 tokens, ChatML
``kimi-k2.5``  Kimi-K2.5's shape: nested config, published tensor names, multi-head latent attention, mixture of
               experts, vision tower (random, never used for text); 6 layers, hidden 256, 1,024 tokens
=============  ==============================================================================================

Weights are random and then taught the built-in prompts for some seconds, so that a draft has something to learn. The
tokenizer is a byte-level BPE of the same prompts. Both load in transformers and vLLM.
"""

import json
from pathlib import Path
from typing import Any

from eagle3nb.conversations import read_source
from eagle3nb.errors import Refused
from eagle3nb.files import in_locked_folder, write_json

VOCABULARY = 1024
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Kimi opens a turn with a token of the role, its name, and <|im_middle|>.
KIMI = (
    "{% for message in messages %}{{ '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' "
    "+ message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
KIMI_SPECIAL = [
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
    "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>", "[UNK]", "[PAD]",
]  # fmt: skip


def make(name: str, folder: Path) -> Path:
    """Write the tiny checkpoint called ``name`` to ``folder``."""
    if name not in MAKERS:
        raise Refused(f"tiny:{name}: unknown; known: {', '.join(MAKERS)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder} is not empty or a file; give a new directory for the tiny checkpoint")
    return MAKERS[name](folder, steps=STEPS[name])


def in_cache(name: str, cache_dir: Path) -> Path:
    """The tiny checkpoint called ``name`` in the cache directory, made once."""
    if name not in MAKERS:
        raise Refused(f"verifier tiny:{name}: unknown; known: {', '.join(f'tiny:{known}' for known in MAKERS)}")
    return in_locked_folder(cache_dir / f"tiny-{name}-3", lambda folder: make(name, folder))


def tokenizer(
    special: list[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), template: str = CHATML, **names: str
) -> Any:
    """A byte-level BPE of the built-in prompts, ``VOCABULARY`` tokens; ``special`` have the lowest ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    texts = (turn["content"] for row in read_source("builtin:train_prompts") for turn in row["messages"])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    model.train_from_iterator(texts, trainer)
    names = names or {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
    }  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=model, chat_template=template, **names)


def llama(folder: Path, seed: int = 0, steps: int = 0, **changes: Any) -> Path:
    """Write a tiny Llama to ``folder``; ``changes`` go over its config, ``steps`` of training make it predictable."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 1024,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True,
    } | changes  # fmt: skip
    torch.manual_seed(seed)
    words, model = tokenizer(), LlamaForCausalLM(LlamaConfig(**config))
    _teach(model, words, steps)
    model.to(torch.bfloat16).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def kimi(folder: Path, seed: int = 0, steps: int = 0, **changes: Any) -> Path:
    """Write a tiny Kimi-K2.5 to ``folder``; ``changes`` go over its text config.

    The head sizes of its attention are the published ones: vLLM's MLA kernels know no others. The norms' epsilon is
    1e-6 because transformers takes that for the norms inside the attention whatever the config says, and vLLM does not.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    text = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": True, "max_position_embeddings": 1024,
        "rope_parameters": YARN, "rms_norm_eps": 1e-6, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 12, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
    } | changes  # fmt: skip
    torch.manual_seed(seed)
    words = tokenizer(
        KIMI_SPECIAL, KIMI, bos_token="[BOS]", eos_token="<|im_end|>", pad_token="[PAD]", unk_token="[UNK]"
    )
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**text))
    _teach(model, words, steps)
    # transformers' own class for the whole model writes names that no published checkpoint has; its text class writes
    # the published ones but for their prefix.
    model.to(torch.bfloat16).save_pretrained(folder)
    tensors = {f"language_model.{key}": value for key, value in load_file(folder / "model.safetensors").items()}
    vision = {
        "patch_size": 14, "init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4,
        "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128,
        "merge_kernel_size": [2, 2],
    }  # fmt: skip
    save_file(tensors | _vision(vision, text["hidden_size"]), folder / "model.safetensors", {"format": "pt"})
    special = {token: words.convert_tokens_to_ids(token) for token in KIMI_SPECIAL}
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16",
        "text_config": json.loads((folder / "config.json").read_text()) | {"model_type": "kimi_k2"},
        "vision_config": vision | {
            "model_type": "kimi_k25_vision", "pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 4,
        },
        "media_placeholder_token_id": special["<|media_pad|>"], "image_token_id": special["<|media_pad|>"],
        "video_token_id": special["<|media_pad|>"], "vision_start_token_id": special["<|media_begin|>"],
        "vision_end_token_id": special["<|media_end|>"], "bos_token_id": special["[BOS]"],
        "eos_token_id": special["<|im_end|>"], "pad_token_id": special["[PAD]"], "tie_word_embeddings": False,
        "projection_hidden_size": vision["hidden_size"],
    }  # fmt: skip
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": special["<|im_end|>"]})
    write_json(folder / "preprocessor_config.json", {"media_proc_cfg": MEDIA})
    words.save_pretrained(folder)
    return folder


# As published, only shorter. Without it vLLM 0.32 takes a rotary embedding that is wrong for such heads on a CPU: most
# positions are not rotated at all (seen against transformers' forward).
YARN = {
    "rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 256,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
# What vLLM's image processor for Kimi-K2.5 wants to know, also where no image is ever sent.
MEDIA = {
    "patch_size": 14, "merge_kernel_size": 2, "temporal_merge_kernel_size": 4, "in_patch_limit": 64,
    "in_patch_limit_each_frame": 64, "in_patch_limit_video": 256, "patch_limit_on_one_side": 16,
    "fixed_output_tokens": None, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "sample_fps": 2.0,
    "timestamp_mode": "hh:mm:ss.fff",
}  # fmt: skip


def _vision(config: dict[str, Any], text_hidden: int) -> dict[str, Any]:
    """Random tensors of the vision tower and the projector, under their published names."""
    import torch

    hidden, inside, merged = config["hidden_size"], config["intermediate_size"], 4 * config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (hidden, 3, config["patch_size"], config["patch_size"]),
        "vision_tower.patch_embed.proj.bias": (hidden,),
        "vision_tower.patch_embed.pos_emb.weight": (8, 8, hidden),
    }
    linear = {"mm_projector.proj.0": (merged, merged), "mm_projector.proj.2": (text_hidden, merged)}
    norms = ["vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"]
    for k in range(config["num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{k}"
        linear |= {f"{block}.wqkv": (3 * hidden, hidden), f"{block}.wo": (hidden, hidden)}
        linear |= {f"{block}.mlp.fc0": (inside, hidden), f"{block}.mlp.fc1": (hidden, inside)}
        norms += [f"{block}.norm0", f"{block}.norm1"]
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    tensors = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    for name in norms:
        tensors |= {f"{name}.weight": torch.ones(hidden), f"{name}.bias": torch.zeros(hidden)}
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def _teach(model: Any, words: Any, steps: int) -> None:
    """Let the model learn the built-in prompts by heart a little: its greedy answers become ones a draft can learn."""
    import torch

    if not steps:
        return
    # As in real models: with a weight of ones, a norm left out or applied twice would change no prediction.
    torch.nn.init.uniform_(model.model.norm.weight, 0.2, 3.0)
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


MAKERS = {"llama": llama, "kimi-k2.5": kimi}
STEPS = {"llama": 150, "kimi-k2.5": 75}  # of teaching
