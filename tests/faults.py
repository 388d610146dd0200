"""Silent faults, each made in a copy of a finished run: shapes and dtypes stay right, unless the fault is about them.

`FAULTS`: name -> (function that makes it in a run directory, ids of the checks that must fail, words of the message).
All other checks must stay as quiet as they are on the healthy run.
"""

import itertools
import json
import os
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from eagle3nb import stage
from eagle3nb.bridges.store import StoreFiles
from eagle3nb.engine import reference
from eagle3nb.files import sha256_file

FAULTS: dict[str, tuple[Callable[[Path], None], set[str], str]] = {}


def fault(*ids: str, says: str = "") -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register a fault: the checks that must fail on it, the first of them with these words in its message."""

    def register(make: Callable[[Path], None]) -> Callable[[Path], None]:
        FAULTS[make.__name__] = (make, ids, says)
        return make

    return register


# ---- tools ---------------------------------------------------------------------------------------------------


LOAD = reference.load


@cache
def model_for_tests(path: str, trust_remote_code: bool = False) -> torch.nn.Module:
    """The reference's model, loaded once."""
    return LOAD(path, trust_remote_code)


def layers(run: Path, ids: torch.Tensor) -> torch.Tensor:
    """[num_layers + 2, seq, hidden]: all layer inputs, the last state, and the normed one."""
    return reference.layers_of(model_for_tests(str(stage.verifier(run).path)), ids)


def store(run: Path) -> Path:
    return stage.folder(run, "extract_hidden_states") / "store"


def samples(run: Path, change: Callable[[torch.Tensor, torch.Tensor], Any], only: set[int] | None = None) -> None:
    """Rewrite samples: ``change(states, ids)`` gives the new states, or (states, ids)."""
    for path in sorted((store(run) / "hidden_states").iterdir()):
        if only is None or int(path.stem[3:]) in only:
            old = load_file(path)
            new = change(old["hidden_states"].clone(), old["token_ids"].clone())
            states, ids = new if isinstance(new, tuple) else (new, old["token_ids"])
            save_file({"hidden_states": states.contiguous(), "token_ids": ids}, path)


def checksums(run: Path) -> None:
    """Write the checksums anew: the fault is to be found by its meaning, not because bytes changed."""
    path = store(run) / "samples.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        file = store(run) / "hidden_states" / f"hs_{line['i']}.safetensors"
        if file.is_file() and not file.is_symlink():
            line["sha256"] = sha256_file(file)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def column(run: Path, c: int, layer: int) -> None:
    """Put the input of ``layer`` into a column of every sample."""

    def change(states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        states[:, c] = layers(run, ids)[layer].to(states.dtype)
        return states

    samples(run, change)


def rows(folder: Path, change: Callable[[int, dict], dict]) -> None:
    """Rewrite the rows of an arrow dataset."""
    from datasets import Dataset, load_from_disk

    old = load_from_disk(str(folder))
    new = [change(i, dict(row)) for i, row in enumerate(old.with_format(None))]
    features, keep = old.features, {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".json", ".jsonl")}
    temporary = folder.with_name("rewritten")
    Dataset.from_list(new, features=features).save_to_disk(temporary)
    for file in temporary.iterdir():
        file.replace(folder / file.name)
    for name in ("store.json", "samples.jsonl"):
        if name in keep:
            (folder / name).write_bytes(keep[name])


def masks(run: Path, change: Callable[[list[int], list[int]], list[int]]) -> None:
    """Rewrite the loss masks of the store: ``change(mask, ids)``."""
    rows(store(run), lambda i, row: row | {"loss_mask": change(list(row["loss_mask"]), list(row["input_ids"]))})


def edit(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file (``a__b`` is field b of a); ... removes one."""
    value = json.loads(path.read_text())
    for key, new in fields.items():
        *way, last = key.split("__")
        target = value
        for step in way:
            target = target.setdefault(step, {})
        if new is ...:
            target.pop(last, None)
        else:
            target[last] = new
    path.write_text(json.dumps(value))


def checkpoint(run: Path) -> Path:
    return stage.folder(run, "train") / stage.result(run, "train")["best_checkpoint"]


def tensors(run: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the draft's tensors."""
    path = checkpoint(run) / "model.safetensors"
    value = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(value)
    save_file({name: tensor.contiguous() for name, tensor in value.items()}, path)


def config(run: Path, **fields: Any) -> None:
    edit(checkpoint(run) / "config.json", **fields)


def mapping(run: Path, **new: Any) -> None:
    """Replace t2d or d2t, in both forms."""
    folder = stage.folder(run, "build_vocab_mapping")
    for name, tensor in new.items():
        np.save(folder / f"{name}.npy", tensor.numpy())
        torch.save(tensor, folder / f"{name}.pt")


def pair(run: Path) -> tuple[torch.Tensor, torch.Tensor]:
    folder = stage.folder(run, "build_vocab_mapping")
    return tuple(torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("t2d", "d2t"))


def both(run: Path, ids: torch.Tensor) -> None:
    """A mapping of these ids, right in form, in the run and in the checkpoint."""
    t2d = torch.zeros_like(pair(run)[0])
    t2d[ids] = True
    d2t = ids - torch.arange(len(ids))
    mapping(run, t2d=t2d, d2t=d2t)
    head = stage.verifier(run).weight("lm_head")
    tensors(
        run, lambda t: t.update({"d2t": d2t, "t2d": t2d, "lm_head.weight": head[ids].to(t["lm_head.weight"].dtype)})
    )


# ---- samples -------------------------------------------------------------------------------------------------


@fault("samples.layers", says="is the input of layer 2 (")
def a_layer_captured_one_too_late(run: Path) -> None:
    column(run, 0, 2)


@fault("samples.layers", says="one layer too early")
def a_layer_captured_one_too_early(run: Path) -> None:
    column(run, 1, 2)


@fault("samples.last_state", "samples.target_agreement", says="the state after the final norm")
def last_state_after_the_final_norm(run: Path) -> None:
    column(run, 3, 7)


@fault("samples.last_state", "samples.target_agreement", says="the input of layer 5")
def last_state_is_the_layer_before(run: Path) -> None:
    column(run, 3, 5)


@fault("samples.columns", "samples.last_state", "samples.target_agreement", says="the last state is missing")
def last_state_missing(run: Path) -> None:
    samples(run, lambda states, ids: states[:, :3])


@fault("samples.shift", "samples.target_agreement", says="one position late")
def states_shifted_back(run: Path) -> None:
    samples(run, lambda states, ids: torch.cat([states[:1], states[:-1]]))


@fault("samples.shift", "samples.target_agreement", says="one position early")
def states_shifted_forward(run: Path) -> None:
    samples(run, lambda states, ids: torch.cat([states[1:], states[-1:]]))


@fault("samples.other_sample", says="holds the states of row")
def states_of_another_sample(run: Path) -> None:
    """A sample that is looked at gets the first states of a longer one, whose answer is another."""
    files, data = StoreFiles(store(run)), StoreFiles(store(run)).rows
    for a, b in itertools.permutations(files.some(16), 2):
        n, mine, other = len(data.ids(a)), data.mask(a) == 1, data.mask(b)[: len(data.ids(a))] == 1
        if len(data.ids(b)) >= n and other.sum() > 5 and (data.ids(a) != data.ids(b)[:n])[mine].mean() > 0.7:
            states = load_file(files.path(b))["hidden_states"][:n]
            samples(run, lambda old, ids: states, only={a})  # noqa: B023
            return
    raise AssertionError("no two samples of different answers in the run")


@fault("samples.token_ids", "samples.length", says="token ids are not those of row")
def files_of_other_rows(run: Path) -> None:
    folder = store(run) / "hidden_states"
    paths = [folder / f"hs_{i}.safetensors" for i in range(8)]
    data = [p.read_bytes() for p in paths]
    for path, other in zip(paths, data[1:] + data[:1], strict=True):
        path.write_bytes(other)
    # one more pair of equal length, so that it is the ids that differ
    sizes = {}
    for path in sorted(folder.iterdir()):
        if path in paths:
            continue
        if path.stat().st_size in sizes:
            a, b = path, sizes[path.stat().st_size]
            one, two = a.read_bytes(), b.read_bytes()
            a.write_bytes(two), b.write_bytes(one)
            return
        sizes[path.stat().st_size] = path
    raise AssertionError("no two samples of equal length in the run")


@fault("samples.length", says="states, ")
def fewer_states_than_tokens(run: Path) -> None:
    samples(run, lambda states, ids: states[:-3], only={1, 7})


@fault("samples.finite", says="NaN or Inf")
def a_nan(run: Path) -> None:
    def change(states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        states[5, 1, 7] = torch.nan
        return states

    samples(run, change)


@fault("samples.finite", says="NaN or Inf")
def an_inf(run: Path) -> None:
    def change(states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        states[3, 0, 0] = -torch.inf
        return states

    samples(run, change)


@fault("samples.constant", says="column 1 is all zero")
def a_layer_of_zeros(run: Path) -> None:
    def change(states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        states[:, 1] = 0
        return states

    samples(run, change)


@fault("samples.constant", says="the same at every position")
def a_constant_layer(run: Path) -> None:
    def change(states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        states[:, 2] = states[4, 2]
        return states

    samples(run, change)


@fault("samples.dtype", says="F16")
def float16(run: Path) -> None:
    samples(run, lambda states, ids: states.half())


@fault("samples.readable", says="cut short")
def a_file_cut_short(run: Path) -> None:
    path = store(run) / "hidden_states" / "hs_5.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@fault("samples.readable", says="leaves the directory")
def a_link_out_of_the_store(run: Path) -> None:
    path = store(run) / "hidden_states" / "hs_5.safetensors"
    path.rename(run / "elsewhere.safetensors")
    path.symlink_to(run / "elsewhere.safetensors")


@fault("samples.complete", says="row 5 has no")
def a_file_missing(run: Path) -> None:
    (store(run) / "hidden_states" / "hs_5.safetensors").unlink()


@fault("samples.checksum", says="1 files are not listed: hs_5")
def a_file_without_a_checksum(run: Path) -> None:
    path = store(run) / "samples.jsonl"
    lines = [line for line in path.read_text().splitlines() if json.loads(line)["i"] != 5]
    path.write_text("\n".join(lines) + "\n")


@fault("samples.readable", says="no ordinary file")
def a_pipe_in_place_of_a_file(run: Path) -> None:
    path = store(run) / "hidden_states" / "hs_5.safetensors"
    path.unlink()
    os.mkfifo(path)


@fault("samples.readable", says="leaves the directory")
def a_link_to_itself(run: Path) -> None:
    path = store(run) / "hidden_states" / "hs_5.safetensors"
    path.unlink()
    path.symlink_to(path)


@fault("samples.checksum", says="hs_5")
def bytes_changed_but_not_the_size(run: Path) -> None:
    path = store(run) / "hidden_states" / "hs_5.safetensors"
    data = bytearray(path.read_bytes())
    data[-40000] ^= 1
    path.write_bytes(data)


@fault("samples.vocabulary", says="outside the vocabulary")
def a_token_id_beyond_the_vocabulary(run: Path) -> None:
    _token(run, 1024)


@fault("samples.vocabulary", says="a padding row")
def a_token_id_of_a_padding_row(run: Path) -> None:
    # the tokenizer of this copy knows one token less than the embedding has rows
    from eagle3nb.verifier import Verifier

    seen = max(max(load_file(p)["token_ids"].tolist()) for p in (store(run) / "hidden_states").iterdir())
    words = Verifier("tiny", stage.verifier(run).path).tokenizer
    assert seen < len(words)
    _token(run, 1023)
    _fewer_words(run, 1000)


def _token(run: Path, token: int) -> None:
    """A wild token in a prompt, in file and row alike."""
    where = 5  # inside the user's words

    def change(states: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids[where] = token
        return states, ids

    samples(run, change, only={2})

    def row(i: int, row: dict) -> dict:
        ids = list(row["input_ids"])
        if i == 2:
            ids[where] = token
        return row | {"input_ids": ids}

    rows(store(run), row)


def _fewer_words(run: Path, size: int) -> None:
    """Cut the tokenizer of a copy of the verifier down, and point the run to the copy."""
    import shutil

    new = run / "verifier-with-fewer-words"
    shutil.copytree(stage.verifier(run).path, new)
    path = new / "tokenizer.json"
    value = json.loads(path.read_text())
    words = value["model"]["vocab"]
    value["model"]["vocab"] = {w: i for w, i in words.items() if i < size}
    kept = value["model"]["vocab"]
    merges = [m if isinstance(m, list) else m.split(" ") for m in value["model"]["merges"]]
    value["model"]["merges"] = [m for m in merges if m[0] in kept and m[1] in kept and m[0] + m[1] in kept]
    path.write_text(json.dumps(value))
    edit(stage.folder(run, "preflight") / "result.json", verifier__path=str(new))
    from eagle3nb.verifier import Verifier

    edit(store(run) / "store.json", verifier=Verifier("tiny", new).identity())


@fault("samples.declared", says="not finished")
def a_store_not_finished(run: Path) -> None:
    edit(store(run) / "store.json", count=None)


@fault("samples.declared", says="convention")
def a_store_of_another_convention(run: Path) -> None:
    edit(store(run) / "store.json", convention="output of layer k")


@fault("samples.verifier", says="chat_template")
def another_chat_template_than_recorded(run: Path) -> None:
    edit(store(run) / "store.json", verifier__chat_template_sha256="0" * 64)


# ---- loss mask and data --------------------------------------------------------------------------------------


@fault("mask.all_ones", "samples.target_agreement", says="is 1 throughout")
def mask_of_ones(run: Path) -> None:
    masks(run, lambda mask, ids: [1] * len(mask))


@fault("mask.all_zeros", says="is 0 throughout")
def mask_of_zeros(run: Path) -> None:
    masks(run, lambda mask, ids: [0] * len(mask))


@fault("mask.shift", says="one token early")
def mask_one_early(run: Path) -> None:
    masks(run, lambda mask, ids: [*mask[1:], mask[-1]])


@fault("mask.shift", says="one token late")
def mask_one_late(run: Path) -> None:
    masks(run, lambda mask, ids: [0, *mask[:-1]])


@fault("mask.user_turn", "samples.target_agreement", says="in the user's")
def mask_from_the_users_turn(run: Path) -> None:
    masks(run, lambda mask, ids: [0] * 3 + [1] * (len(mask) - 3))


@fault("mask.start", says="after its first tokens")
def mask_without_the_first_tokens(run: Path) -> None:
    def change(mask: list[int], ids: list[int]) -> list[int]:
        start = mask.index(1)
        return [0] * (start + 3) + mask[start + 3 :]

    masks(run, change)


@fault("mask.end", says="ends before it")
def mask_without_the_end_of_turn(run: Path) -> None:
    def change(mask: list[int], ids: list[int]) -> list[int]:
        return [*mask[:-1], 0] if ids[-1] == 2 else mask

    masks(run, change)


@fault("mask.end", "data.truncated", says="ends after it")
def mask_beyond_the_end_of_turn(run: Path) -> None:
    """The newline that the template writes after the end of turn, trained on."""
    newline = stage.verifier(run).tokenizer.encode("\n")[0]

    def row(i: int, row: dict) -> dict:
        longer = {"input_ids": [*row["input_ids"], newline], "loss_mask": [*row["loss_mask"], 1]}
        return row | longer | {"seq_len": row["seq_len"] + 1}

    rows(store(run), row)
    samples(run, lambda states, ids: (torch.cat([states, states[-1:]]), torch.tensor([*ids.tolist(), newline])))


@fault("mask.values", says="values 0 to 2")
def mask_with_other_values(run: Path) -> None:
    masks(run, lambda mask, ids: [*mask[:-1], 2])


@fault("mask.template", says="rows open otherwise")
def another_system_prompt(run: Path) -> None:
    edit(stage.folder(run, "prepare_data") / "result.json", system_prompt="Answer in verse.")


@fault("data.duplicates", says="stand there already")
def duplicate_rows(run: Path) -> None:
    first = {}
    folder = store(run) / "hidden_states"

    def row(i: int, row: dict) -> dict:
        first.setdefault(i % 4, row)
        return first[i % 4]

    rows(store(run), row)
    for path in list(folder.iterdir()):
        source = folder / f"hs_{int(path.stem[3:]) % 4}.safetensors"
        if source != path:
            path.write_bytes(source.read_bytes())


@fault("data.heldout_overlap", says="begin with a held-out prompt")
def a_heldout_prompt_in_the_training_data(run: Path) -> None:
    from datasets import load_from_disk

    row = load_from_disk(str(store(run)))[0]
    prompt = row["input_ids"].tolist()[: row["loss_mask"].tolist().index(1)]
    change = {"input_ids": prompt, "prompt_tokens": len(prompt), "loss_mask": [0] * len(prompt)}
    rows(stage.folder(run, "prepare_data") / "heldout", lambda i, row: row | change if i == 0 else row)


@fault("data.on_policy", says="response tokens")
def answers_of_somebody_else(run: Path) -> None:
    chance = random.Random(1)
    answers: dict[int, list[int]] = {}

    def row(i: int, row: dict) -> dict:
        start = list(row["loss_mask"]).index(1)
        body = [*(chance.randrange(3, 1000) for _ in row["input_ids"][start + 1 :]), 2]
        answers[i] = [*row["input_ids"][:start], *body]
        return row | {"input_ids": answers[i]}

    rows(store(run), row)
    for i, ids in answers.items():
        chosen = torch.tensor(ids)
        states = layers(run, chosen)[[1, 3, 4, 6]].transpose(0, 1)
        samples(run, lambda old, _, states=states, chosen=chosen: (states.to(old.dtype), chosen), only={i})
    edit(store(run) / "store.json", responses="given")


@fault("data.truncated", says="of 40 rows")
def answers_cut_off(run: Path) -> None:
    def row(i: int, row: dict) -> dict:
        return row | {k: row[k][:-1] for k in ("input_ids", "loss_mask")} | {"seq_len": row["seq_len"] - 1}

    rows(store(run), row)
    samples(run, lambda states, ids: (states[:-1], ids[:-1]))
    edit(store(run) / "store.json", responses="given")


# ---- vocabulary ----------------------------------------------------------------------------------------------


@fault("vocab.offsets", says="not their offsets")
def d2t_of_ids(run: Path) -> None:
    mapping(run, d2t=pair(run)[0].nonzero().flatten())
    tensors(run, lambda t: t.update({"d2t": t["d2t"]}))


@fault("vocab.arange", says="0, 1, 2")
def d2t_is_arange(run: Path) -> None:
    mapping(run, d2t=torch.arange(len(pair(run)[1])))


@fault("vocab.pair", says="two different builds")
def halves_of_different_builds(run: Path) -> None:
    t2d, _ = pair(run)
    chosen = t2d.nonzero().flatten()
    other = (~t2d).nonzero().flatten()
    t2d[chosen[-40:]], t2d[other[other > 2][:40]] = False, True
    mapping(run, t2d=t2d)


@fault("vocab.pair", says="t2d selects")
def t2d_of_another_size(run: Path) -> None:
    t2d, _ = pair(run)
    seen = torch.load(stage.folder(run, "build_vocab_mapping") / "token_freq.pt")
    t2d[[i for i in t2d.nonzero().flatten().tolist() if i > 2 and i not in seen][:100]] = False
    mapping(run, t2d=t2d)


@fault("vocab.form", says="another verifier")
def mapping_of_another_verifier(run: Path) -> None:
    t2d, _ = pair(run)
    mapping(run, t2d=torch.cat([t2d, torch.zeros(500, dtype=torch.bool)]))


@fault("vocab.form", says="int32")
def d2t_of_another_dtype(run: Path) -> None:
    mapping(run, d2t=pair(run)[1].int())


@fault("vocab.form", says="int64")
def t2d_of_numbers(run: Path) -> None:
    mapping(run, t2d=pair(run)[0].long())


@fault("vocab.range", "vocab.pair", says="beyond the vocabulary")
def ids_beyond_the_vocabulary(run: Path) -> None:
    d2t = pair(run)[1].clone()
    d2t[-5:] += 1000
    mapping(run, d2t=d2t)


@fault("vocab.special", "vocab.frequent", "vocab.filler", says="<|im_end|>")
def no_end_of_turn(run: Path) -> None:
    t2d, _ = pair(run)
    ids = t2d.nonzero().flatten()
    spare = next(i for i in (~t2d).nonzero().flatten().tolist() if i > 2)
    both(run, torch.cat([ids[ids != 2], torch.tensor([spare])]).sort().values)


@fault("vocab.frequent", "vocab.filler", says="response tokens")
def vocabulary_of_other_data(run: Path) -> None:
    t2d, d2t = pair(run)
    unseen = (~t2d).nonzero().flatten()
    ids = torch.cat([torch.tensor([0, 1, 2]), unseen[unseen > 2]])[: len(d2t)]
    rest = torch.tensor(sorted(set(range(3, 1024)) - set(ids.tolist())))
    both(run, torch.cat([ids, rest[: len(d2t) - len(ids)]]).sort().values)


@fault("vocab.source", says="other data")
def counts_of_other_data(run: Path) -> None:
    path = stage.folder(run, "build_vocab_mapping") / "token_freq.pt"
    counts = torch.load(path)
    torch.save({token: n + (token == 2) for token, n in counts.items()}, path)


@fault("vocab.source", says="has changed since")
def a_store_that_changed_since(run: Path) -> None:
    edit(stage.folder(run, "build_vocab_mapping") / "result.json", store_fingerprint="0" * 64)


@fault("vocab.filler", says="only")
def filler_ids(run: Path) -> None:
    ids = torch.arange(900)
    both(run, torch.cat([ids, pair(run)[0].nonzero().flatten()]).unique())
    config(run, draft_vocab_size=len(pair(run)[1]))


@fault("vocab.counts", "vocab.source", says="from -1")
def counts_of_no_token(run: Path) -> None:
    path = stage.folder(run, "build_vocab_mapping") / "token_freq.pt"
    torch.save(torch.load(path) | {-1: 5}, path)


# ---- draft ---------------------------------------------------------------------------------------------------


@fault("draft.layer_ids", says="absent")
def layer_ids_absent(run: Path) -> None:
    config(run, eagle_aux_hidden_state_layer_ids=...)


@fault("draft.layers_of_store", says="[1, 2, 4]")
def layer_ids_of_another_store(run: Path) -> None:
    config(run, eagle_aux_hidden_state_layer_ids=[1, 2, 4])


@fault("draft.layer_convention", says="one more than captured")
def layer_ids_of_a_store_that_counts_outputs(run: Path) -> None:
    config(run, eagle_aux_hidden_state_layer_ids=[2, 4, 5])


@fault("draft.layer_convention", says="convention of layer outputs")
def layer_ids_in_the_convention_of_outputs(run: Path) -> None:
    config(run, eagle_aux_hidden_state_layer_ids=[0, 2, 3])


@fault("draft.layer_range", "draft.layers_of_store", says="of 6 layers")
def layer_ids_out_of_range(run: Path) -> None:
    config(run, eagle_aux_hidden_state_layer_ids=[1, 3, 9])


@fault("draft.fc_width", says="2 layers")
def fc_of_two_layers(run: Path) -> None:
    tensors(run, lambda t: t.update({"fc.weight": t["fc.weight"][:, :256]}))


@fault("draft.norms", says="a server skips the trained norm")
def norm_without_its_flag(run: Path) -> None:
    config(run, norm_before_fc=False)


@fault("draft.norms", says="there is no input_norm")
def flag_without_its_norm(run: Path) -> None:
    tensors(run, lambda t: t.pop("input_norm.weight"))


@fault("draft.norms", says="fc_norm is true")
def fc_norm_without_weights(run: Path) -> None:
    config(run, fc_norm=True)


@fault("draft.norms", says="fc_norm.* is there")
def fc_norm_without_its_flag(run: Path) -> None:
    tensors(run, lambda t: t.update({f"fc_norm.{k}.weight": torch.ones(128) for k in range(3)}))


@fault("draft.norm_before_residual", says="None")
def norm_before_residual_absent(run: Path) -> None:
    config(run, norm_before_residual=...)


@fault("draft.embedding", says="random")
def embedding_random(run: Path) -> None:
    tensors(run, lambda t: t.update({"embed_tokens.weight": torch.randn_like(t["embed_tokens.weight"])}))


@fault("draft.embedding", says="[1000, 128]")
def embedding_of_another_size(run: Path) -> None:
    tensors(run, lambda t: t.update({"embed_tokens.weight": t["embed_tokens.weight"][:1000]}))


@fault("draft.lm_head", says="random")
def lm_head_random(run: Path) -> None:
    tensors(run, lambda t: t.update({"lm_head.weight": torch.randn_like(t["lm_head.weight"])}))


@fault("draft.lm_head", says="50% of 512 rows")
def every_second_lm_head_row_random(run: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        t["lm_head.weight"][1::2] = torch.randn_like(t["lm_head.weight"][1::2])

    tensors(run, change)


@fault("draft.embedding", "draft.lm_head", says="rows are random")
def the_end_of_both_tables_random(run: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        for name in ("embed_tokens.weight", "lm_head.weight"):
            start = int(0.55 * len(t[name]))
            t[name][start:] = torch.randn_like(t[name][start:])

    tensors(run, change)


@fault("draft.lm_head", says="unmapped")
def lm_head_of_the_first_rows(run: Path) -> None:
    head = stage.verifier(run).weight("lm_head")
    tensors(run, lambda t: t.update({"lm_head.weight": head[: len(t["d2t"])].to(t["lm_head.weight"].dtype)}))


@fault("draft.lm_head", says="no lm_head")
def lm_head_missing(run: Path) -> None:
    tensors(run, lambda t: t.pop("lm_head.weight"))


@fault("draft.d2t", says="none, with")
def d2t_missing(run: Path) -> None:
    tensors(run, lambda t: t.pop("d2t"))


@fault("draft.d2t", says="another")
def d2t_of_another_mapping(run: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        t["d2t"] = t["d2t"].clone()
        t["d2t"][-1] += 1

    tensors(run, change)


@fault("draft.d2t", says="F32 [512]")
def d2t_of_floats(run: Path) -> None:
    tensors(run, lambda t: t.update({"d2t": t["d2t"].float()}))


@fault("draft.d2t", says="own t2d selects other tokens")
def t2d_of_another_build_in_the_checkpoint(run: Path) -> None:
    tensors(run, lambda t: t.update({"t2d": t["t2d"].roll(1)}))


@fault("draft.shapes", says="k_proj.weight [128, 256] instead of [64, 256]")
def queries_and_keys_in_each_others_place(run: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        q, k = (f"layers.0.self_attn.{name}_proj.weight" for name in "qk")
        t[q], t[k] = t[k], t[q]

    tensors(run, change)


@fault("draft.shapes", says="instead of")
def heads_of_another_config(run: Path) -> None:
    config(run, transformer_layer_config__num_attention_heads=4)


@fault("draft.zeros", says="norm.weight")
def a_norm_of_zeros(run: Path) -> None:
    tensors(run, lambda t: t["norm.weight"].zero_())


@fault("draft.zeros", says="fc.weight")
def a_matrix_of_zeros(run: Path) -> None:
    tensors(run, lambda t: t["fc.weight"].zero_())


@fault("draft.finite", says="fc.weight: 1 of")
def a_weight_that_is_nan(run: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        t["fc.weight"][3, 4] = torch.nan

    tensors(run, change)


@fault("draft.key_names", says="midlayer")
def keys_of_another_naming(run: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        for name in [n for n in t if n.startswith("layers.0.")]:
            t[re.sub(r"^layers\.0\.", "midlayer.", name)] = t.pop(name)

    tensors(run, change)


@fault("draft.key_names", says="missing")
def a_tensor_missing(run: Path) -> None:
    tensors(run, lambda t: t.pop("layers.0.self_attn.q_proj.weight"))


@fault("draft.sizes", says="vocab_size 2048")
def vocabulary_of_another_verifier(run: Path) -> None:
    config(run, transformer_layer_config__vocab_size=2048)


@fault("draft.rope_theta", says="500000")
def another_rope_theta(run: Path) -> None:
    config(run, transformer_layer_config__rope_parameters={"rope_type": "default", "rope_theta": 5e5})


@fault("draft.rope_scaling", says="linear")
def another_rope_scaling(run: Path) -> None:
    new = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    config(run, transformer_layer_config__rope_parameters=new)


@fault("draft.max_positions", says="512")
def fewer_positions(run: Path) -> None:
    config(run, transformer_layer_config__max_position_embeddings=512)


@fault("draft.rms_eps", says="1e-05")
def another_eps(run: Path) -> None:
    config(run, transformer_layer_config__rms_norm_eps=1e-5)


@fault("draft.tied_embeddings", says="reduced vocabulary")
def tied_embeddings(run: Path) -> None:
    config(run, tie_word_embeddings=True)


# ---- served --------------------------------------------------------------------------------------------------


@fault("served.predicted", says="far below")
def acceptance_far_below(run: Path) -> None:
    # figures of a draft that was served with a wrong layer: what validation said holds no more
    edit(stage.folder(run, "train") / "result.json", predicted_acceptance_by_position=[0.9, 0.85, 0.8])
    edit(stage.folder(run, "evaluate") / "result.json", acceptance_by_position=[0.2, 0.04, 0.01], drafts=5000)


@fault("served.lossless", says="responses identical")
def output_not_identical(run: Path) -> None:
    edit(stage.folder(run, "evaluate") / "result.json", lossless=False, identical_outputs=3)


@fault("served.coverage", "served.predicted", says="0.4")
def heldout_not_covered(run: Path) -> None:
    edit(stage.folder(run, "evaluate") / "result.json", draft_vocab_coverage=0.4)
    edit(stage.folder(run, "train") / "result.json", predicted_acceptance_by_position=[0.01, 0.01, 0.01])


@fault("served.useful", "served.predicted", says="1.00 tokens")
def never_accepted(run: Path) -> None:
    nothing = {"acceptance_length": 1.0, "acceptance_by_position": [0.0, 0.0, 0.0], "acceptance_by_prompt": [1.0] * 6}
    edit(stage.folder(run, "evaluate") / "result.json", **nothing)
    edit(stage.folder(run, "train") / "result.json", predicted_acceptance_by_position=[0.9, 0.8, 0.7])
