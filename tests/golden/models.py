"""Tiny random models of every family, with the logits and greedy ids that the reference implementations give for them.

Writes, for each case of `CASES`, a folder `models/<case>/` that looks like a checkpoint from the hub (`config.json`,
`model.safetensors`) with `expected.safetensors` beside it, and GGUF twins of the same weights through `gguf_twins.py`.
`README.md` lists every file and tensor. Run `python models.py` for all, or `python models.py llama qwen3` for some.

The weights come from NumPy's PCG64 seeded by the case's name, so they do not depend on PyTorch's generator. The prompts
are searched for, not fixed: the first seed is taken whose greedy steps and expert choices all have clear margins
(`GREEDY_MARGIN`, `ROUTER_MARGIN`), so a correct implementation in another order of sums cannot flip one, and whose
continuation does not settle on repeating itself (`DIFFERENT_IDS`).
"""

import copy
import json
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.logging import disable_progress_bar

import gguf_twins
from cases import CASES, FULL_SIZE, ROPE_TABLES
from reference_models import REFERENCES, parameter_counts

ROOT = Path(__file__).resolve().parent / "models"
GREEDY_STEPS = 24
GREEDY_MARGIN = 5e-3
DIFFERENT_IDS = 8
ROUTER_MARGIN = 1e-4
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}  # the written-out code, no fused kernels


def seeded(*words):
    return np.random.Generator(np.random.PCG64(zlib.crc32("/".join(words).encode())))


def fill(model, case, norm_centre, tied):
    """Gives every parameter values that matter: a norm, bias or router at its usual start would hide a missing one.

    A tied model favours its own last id as far as the embedding outweighs the layers; its embedding is small and its last
    norm large, so that the layers decide.
    """
    for name, parameter in sorted(model.named_parameters()):
        generator = seeded(case, name)
        shape = tuple(parameter.shape)
        values = generator.standard_normal(shape)
        if name == "model.norm.weight" and tied:
            values = norm_centre + 2.0 + 0.4 * values
        elif name.endswith("norm.weight"):
            values = norm_centre + 0.2 * values
        elif name.endswith("e_score_correction_bias"):
            values = 0.0 * values
        elif name.endswith(".bias"):
            values = 0.3 * values
        elif any(word in name for word in ("embed", "lm_head", "output.weight")):
            values = (0.06 if tied else 0.2) * values
        elif name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight", "shared_expert_gate.weight")):
            values = values * 2.0 / np.sqrt(shape[-1])
        else:
            values = values * 1.2 / np.sqrt(shape[-1])
        parameter.data.copy_(torch.from_numpy(values.astype(np.float32)))


def round_to_bfloat16(model):
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.to(torch.bfloat16).to(torch.float32))


class Reference:
    """A transformers model or one of `reference_models.py` behind one call: ids [n] -> logits [n, vocab]."""

    def __init__(self, model):
        self.model = model.eval()
        self.plain = type(model) in REFERENCES.values()
        self.router_logits = []
        for name, module in model.named_modules():
            if name.endswith((".gate", ".router")):
                module.register_forward_hook(self._keep_router_logits)

    def _keep_router_logits(self, _module, _inputs, output):
        logits = output[0] if isinstance(output, tuple) else output
        self.router_logits.append(logits.detach())

    @torch.no_grad()
    def logits(self, ids):
        self.router_logits.clear()
        if self.plain:
            return self.model(ids)
        return self.model(ids[None], use_cache=False).logits[0]

    def router_margin(self, chosen):
        """The smallest distance, in probability, between the last expert chosen and the first one left out."""
        margins = []
        for logits in self.router_logits:
            ordered = logits.softmax(dim=-1).sort(dim=-1, descending=True).values
            margins.append((ordered[:, chosen - 1] - ordered[:, chosen]).min().item())
        return min(margins, default=1.0)


def greedy(reference, ids, chosen_experts):
    """Continues `ids` by `GREEDY_STEPS` ids, each from a whole pass over the sequence, without a cache."""
    ids, continuation, top_two, router = ids.clone(), [], [], 1.0
    for _ in range(GREEDY_STEPS):
        last = reference.logits(ids)[-1]
        router = min(router, reference.router_margin(chosen_experts))
        best = last.topk(2)
        continuation.append(int(best.indices[0]))
        top_two.append(best.values)
        ids = torch.cat((ids, best.indices[:1]))
    return torch.tensor(continuation, dtype=torch.int32), torch.stack(top_two), router


def expect(reference, case, config, lengths):
    """The tensors of `expected.safetensors`, and the margins that hold for them."""
    chosen = config.get("num_experts_per_tok", config.get("moe_k", 0))
    tensors, report = {}, {}
    for sequence, length in lengths.items():
        for seed in range(200):
            prompt = seeded(case, sequence, str(seed)).integers(0, config["vocab_size"], length)
            ids = torch.from_numpy(prompt)
            logits = reference.logits(ids)
            router = reference.router_margin(chosen)
            continuation, top_two, router_later = greedy(reference, ids, chosen)
            gaps = top_two[:, 0] - top_two[:, 1]
            router = min(router, router_later)
            varied = len(set(continuation.tolist())) >= DIFFERENT_IDS
            if gaps.min() > GREEDY_MARGIN and router > ROUTER_MARGIN and varied:
                break
        else:
            raise SystemExit(f"{case}: no prompt with clear margins among 200 seeds")
        wide = Reference(copy.deepcopy(reference.model).double()).logits(ids)
        tensors[f"{sequence}.input_ids"] = ids.to(torch.int32)
        tensors[f"{sequence}.logits"] = logits.contiguous()
        tensors[f"{sequence}.greedy_ids"] = continuation
        tensors[f"{sequence}.greedy_top2"] = top_two.contiguous()
        tensors[f"{sequence}.greedy_gap"] = gaps.contiguous()
        report[f"{sequence}.prompt_seed"] = str(seed)
        report[f"{sequence}.smallest_greedy_gap"] = f"{gaps.min().item():.6f}"
        report[f"{sequence}.logits_std"] = f"{logits.std().item():.4f}"
        report[f"{sequence}.float32_against_float64"] = f"{(logits.double() - wide).abs().max().item():.3e}"
        if reference.router_logits:
            report[f"{sequence}.smallest_router_margin"] = f"{router:.6f}"
    return tensors, report


def rope_tensors(model):
    """Inverse frequencies and the factor on cos and sin, as the transformers model holds them."""
    rotary = getattr(getattr(model, "model", None), "rotary_emb", None)
    if rotary is None:
        return {}
    found = {}
    for name, buffer in rotary.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            prefix = name.removesuffix("inv_freq").removesuffix("_")
            label = f"rope.{prefix}." if prefix else "rope."
            scaling = getattr(rotary, f"{prefix}_attention_scaling" if prefix else "attention_scaling")
            found[f"{label}inv_freq"] = buffer.to(torch.float32).clone()
            found[f"{label}attention_factor"] = torch.tensor([float(scaling)], dtype=torch.float32)
    return found


def build(case, config):
    """An untrained model of this configuration with its weights filled in."""
    if config["model_type"] in REFERENCES:
        model = REFERENCES[config["model_type"]](config)
    else:
        parsed = AutoConfig.for_model(config["model_type"]).from_dict(copy.deepcopy(config))
        model = AutoModelForCausalLM.from_config(parsed, dtype=torch.float32, **PLAIN)
    gemma = config["model_type"].startswith("gemma")
    fill(model, case, norm_centre=0.0 if gemma else 1.0, tied=config.get("tie_word_embeddings", gemma))
    if config.get("torch_dtype") == "bfloat16":
        round_to_bfloat16(model)
    return model


def hub_state(model, config):
    """Tensors by their names on the hub: transformers fuses experts in memory and takes them apart again when saving."""
    if config["model_type"] in REFERENCES:
        state = model.state_dict()
    else:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, save_original_format=True)
            state = load_file(Path(folder) / "model.safetensors")
    return {name: tensor.detach().clone().contiguous() for name, tensor in sorted(state.items())}


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_tensors(path, tensors, report=None):
    # One metadata entry, for the order of several is not fixed and the file would differ from run to run.
    save_file(tensors, path, metadata={"report": json.dumps(report)} if report else {"format": "pt"})
    if path.stat().st_size >= 1_000_000:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes; golden files stay under 1 MB")


def reload_and_compare(folder, config_name, config, case, expected):
    """What was written must be a checkpoint that transformers itself reads back to the same logits."""
    if config["model_type"] in REFERENCES:
        model = REFERENCES[config["model_type"]](config)
        model.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    else:
        with tempfile.TemporaryDirectory() as copy_of:
            copy_of = Path(copy_of)
            (copy_of / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
            (copy_of / "config.json").write_text((folder / config_name).read_text())
            model = AutoModelForCausalLM.from_pretrained(copy_of, dtype=torch.float32, **PLAIN)
    reference = Reference(model)
    for sequence in ("short", "long"):
        again = reference.logits(expected[f"{sequence}.input_ids"].long())
        difference = (again - expected[f"{sequence}.logits"]).abs().max().item()
        if difference != 0.0:
            raise SystemExit(f"{case}/{config_name}: reloaded logits of {sequence} differ by {difference}")


def make(name, case):
    config = case["config"]
    folder = ROOT / name
    folder.mkdir(parents=True, exist_ok=True)
    model = build(case.get("weights_of", name), config)
    state = hub_state(model, config)
    stored = torch.bfloat16 if config.get("torch_dtype") == "bfloat16" else torch.float32
    write_tensors(folder / "model.safetensors", {key: tensor.to(stored) for key, tensor in state.items()})
    write_json(folder / "config.json", config)
    for file_name, content in case.get("files", {}).items():
        write_json(folder / file_name, content)

    expected, report = expect(Reference(model), name, config, case["lengths"])
    expected.update(rope_tensors(model))
    write_tensors(folder / "expected.safetensors", expected, report)
    for config_name in ["config.json", *case.get("same_answers", [])]:
        variant = json.loads((folder / config_name).read_text())
        reload_and_compare(folder, config_name, variant, name, expected)

    if case.get("twin"):
        gguf_twins.write_twin(folder / "model.gguf", config, state)
    if case.get("quantized_twin"):
        unpacked = gguf_twins.write_twin(folder / "model-q8_0.gguf", config, state, quantized=True)
        model.load_state_dict(unpacked)
        expected, report_quantized = expect(Reference(model), name, config, case["lengths"])
        write_tensors(folder / "expected-q8_0.safetensors", expected, report_quantized)
    if case.get("tokenizer"):
        gguf_twins.write_tokenizer(folder, config)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{name}: {size / 1024:.0f} KiB, {report}", flush=True)


def make_rope_tables():
    """Inverse frequencies, cos and sin of real configurations, where a whole model would be too large to keep."""
    folder = ROOT / "rope"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (config, positions) in ROPE_TABLES.items():
        parsed = AutoConfig.for_model(config["model_type"]).from_dict(copy.deepcopy(config))
        inverse, factor = ROPE_INIT_FUNCTIONS[parsed.rope_parameters["rope_type"]](parsed)
        phase = torch.tensor(positions, dtype=torch.float32)[:, None] * inverse[None, :]
        tensors[f"{name}.inv_freq"] = inverse
        tensors[f"{name}.attention_factor"] = torch.tensor([float(factor)])
        tensors[f"{name}.positions"] = torch.tensor(positions, dtype=torch.int32)
        tensors[f"{name}.cos"] = phase.cos() * factor
        tensors[f"{name}.sin"] = phase.sin() * factor
    write_json(folder / "cases.json", {name: config for name, (config, _) in ROPE_TABLES.items()})
    write_tensors(folder / "expected.safetensors", tensors)
    print(f"rope: {len(ROPE_TABLES)} tables")


def make_full_size_configs():
    """Configurations of the project's own models at full size, with the parameter counts they must have."""
    for name, (case, config, total, active) in FULL_SIZE.items():
        counted = parameter_counts(config)
        if counted != (total, active):
            raise SystemExit(f"{name}: counted {counted}, wanted {(total, active)}")
        write_json(ROOT / case / f"config.{name}.json", config)
        print(f"{name}: {total} parameters, {active} active")


def main():
    wanted = sys.argv[1:] or [*CASES, "rope", "full-size"]
    disable_progress_bar()
    torch.set_num_threads(1)  # one order of sums: the same bits whatever machine runs this
    for name in wanted:
        if name == "rope":
            make_rope_tables()
        elif name == "full-size":
            make_full_size_configs()
        else:
            make(name, CASES[name])


if __name__ == "__main__":
    main()
