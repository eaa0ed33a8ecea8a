"""How far the references' own bfloat16 passes are from their float32 logits: the measure for a device that computes in bfloat16.

For each folder of `models/`, and each of its prompts, weights and activations go to bfloat16 as a user of the reference would
do it (`dtype=torch.bfloat16`; norms, softmax and RoPE's phases compute in float32 inside, products round their results), and
    error = ‖logits - expected‖ / ‖expected‖        over all positions and the vocabulary
goes to `models/bf16_errors.json`. A parity case on such a device passes with at most twice that. Where the rounding makes a
router choose other experts, the error says little: `other_experts` counts those choices, of all tokens and layers.

Run `python models_bf16.py` after `models.py`: seconds, on the files that are there. The last digits depend on the CPU's matrix library.
"""

import json
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import reference_models
from models import PLAIN, ROOT, Reference
from reference_models import REFERENCES

SEQUENCES = ("short", "long")


def rmsnorm_in_float32(norm, x):
    """As transformers' models do it: only what comes in and goes out is rounded."""
    wide = x.float()
    return norm.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)).to(x.dtype)


def load(folder, dtype):
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] in REFERENCES:
        model = REFERENCES[config["model_type"]](config)
        model.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
        return Reference(model.to(dtype)), config
    with tempfile.TemporaryDirectory() as copy_of:
        # Without `expected.safetensors`, which transformers would take for a part of the weights.
        for name in ("config.json", "model.safetensors"):
            (Path(copy_of) / name).write_bytes((folder / name).read_bytes())
        return Reference(AutoModelForCausalLM.from_pretrained(copy_of, dtype=dtype, **PLAIN)), config


def chosen_experts(reference, config):
    """The set of experts of each token, layer after layer, in the pass just made."""
    count = config.get("num_experts_per_tok", config.get("moe_k", 0))
    rows = [row for logits in reference.router_logits for row in logits.float()]
    return [frozenset(row.topk(count).indices.tolist()) for row in rows]


def errors_of(folder):
    expected = load_file(folder / "expected.safetensors")
    (plain, config), (wide, _) = load(folder, torch.bfloat16), load(folder, torch.float32)
    found, other_experts = {}, 0
    for sequence in SEQUENCES:
        ids, logits = expected[f"{sequence}.input_ids"].long(), expected[f"{sequence}.logits"]
        error = (plain.logits(ids).float() - logits).norm() / logits.norm()
        found[sequence] = float(f"{error.item():.2e}")
        wide.logits(ids)
        pairs = zip(chosen_experts(plain, config), chosen_experts(wide, config), strict=True)
        other_experts += sum(ours != theirs for ours, theirs in pairs)
    if wide.router_logits:
        found["other_experts"] = other_experts
    return found


def main():
    disable_progress_bar()
    torch.set_num_threads(1)
    reference_models.RmsNorm.forward = rmsnorm_in_float32
    folders = sorted(path.parent for path in ROOT.glob("*/model.safetensors"))
    report = {
        "reference": f"transformers {transformers.__version__}, PyTorch {torch.__version__.split('+')[0]}, bfloat16 on the CPU",
        "errors": {},
    }
    for folder in folders:
        report["errors"][folder.name] = errors_of(folder)
        print(f"{folder.name}: {report['errors'][folder.name]}", flush=True)
    lines = json.dumps(report, indent=2)
    (ROOT / "bf16_errors.json").write_text(lines + "\n")


if __name__ == "__main__":
    main()
