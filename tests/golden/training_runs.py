"""Training runs of tiny models by the reference implementations: `training/runs/`, `training/adapters/`, by `training.py`.

A step sums the cross-entropy of its micro-batches' documents over all targets that are not -100, divides by their number in
the whole step (so that micro-batches equal one batch), clips the gradients' global norm, and takes a step of
`torch.optim.AdamW`. Everything is float32, on one thread; the same run in float64 says how much of it is rounding.

Ids follow a fixed random successor most of the time, so that there is something to learn. Where there are experts, a step
takes the first draw of its data at which no choice of an expert is closer than `ROUTER_MARGIN`.
"""

import copy
import json
import math
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from cases import GEMMA3_PATTERN, IRONLOOM_MOE, QWEN2_MOE, QWEN3_MOE, changed, llama
from models import PLAIN, Reference, build, hub_state, seeded, write_json, write_tensors
from training_operations import load_balancing, router_z_loss

ROUTER_MARGIN = 1e-4
ADAMW = {"learning_rate": 1e-3, "betas": [0.9, 0.95], "epsilon": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0}
SMALL = {"vocab_size": 96, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32"}

MODELS = {
    "llama": llama(),
    "llama-tied": llama(tie_word_embeddings=True),
    # With a padding id, torch's embedding would hand that id no gradient, also where it is a token of the text.
    "gemma3": changed(
        GEMMA3_PATTERN, {**SMALL, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": None, "num_hidden_layers": 2}
    ),
    "qwen2_moe": changed(QWEN2_MOE, {**SMALL, "num_experts": 5}),
    "qwen3_moe": changed(QWEN3_MOE, {**SMALL, "num_experts": 5}),
    "qwen3_moe-not-normalized": changed(QWEN3_MOE, {**SMALL, "norm_topk_prob": False, "num_experts": 5}),
    "qwen3_moe-one-routed": changed(QWEN3_MOE, {**SMALL, "num_experts": 5, "mlp_only_layers": [0]}),
    "ironloom_moe": changed(IRONLOOM_MOE, {**SMALL, "mlp_only_layers": [0], "num_experts": 5, "num_hidden_layers": 3}),
}

# Of five fillings the one whose steps amplify rounding least: AdamW's first steps are signs, also of gradients near zero.
WEIGHTS = {"ironloom_moe": "training-3-ironloom_moe"}

ONE_BATCH = [[32, 32]]
RAGGED = [[32, 17], [9, 25, 1]]
PACKED = [[13, 32, 1, 18]]

# run: model, the documents of each micro-batch, and what differs from the plain way.
RUNS = {
    "llama": {"model": "llama", "documents": ONE_BATCH},
    "llama-tied": {"model": "llama-tied", "documents": ONE_BATCH},
    "llama-micro-batches": {"model": "llama", "documents": RAGGED, "ignored": 0.3},
    "llama-packed": {"model": "llama", "documents": PACKED, "packed": True},
    "gemma3": {"model": "gemma3", "documents": ONE_BATCH},
    "qwen2_moe": {"model": "qwen2_moe", "documents": ONE_BATCH},
    "qwen3_moe": {"model": "qwen3_moe", "documents": ONE_BATCH},
    "qwen3_moe-not-normalized": {"model": "qwen3_moe-not-normalized", "documents": ONE_BATCH},
    "qwen3_moe-balanced": {"model": "qwen3_moe-one-routed", "documents": ONE_BATCH, "auxiliary": "transformers"},
    "ironloom_moe": {"model": "ironloom_moe", "documents": ONE_BATCH},
    "ironloom_moe-balanced": {"model": "ironloom_moe", "documents": ONE_BATCH, "auxiliary": "formulas"},
}
STEPS = 20
BALANCE, ROUTER_Z, HEAD_Z = 0.05, 0.01, 0.001


# --- data ---------------------------------------------------------------------------------------------------------------


def make_step(run, step, attempt, vocabulary):
    """A step's micro-batches: `documents` (lengths), `ids` and `targets`, flat. A document's last target is the id after it."""
    follows = seeded("training", "successors").permutation(vocabulary)
    generator = seeded("training", "data", str(step), str(attempt))
    micro_batches = []
    for documents in run["documents"]:
        ids, targets = [], []
        for length in documents:
            text = [int(generator.integers(vocabulary))]
            while len(text) <= length:
                kept = generator.random() < 0.8
                text.append(int(follows[text[-1]] if kept else generator.integers(vocabulary)))
            ids += text[:-1]
            targets += [-100 if generator.random() < run.get("ignored", 0.0) else target for target in text[1:]]
        micro_batches.append({"documents": documents, "ids": ids, "targets": targets})
    return micro_batches


def clear_step(reference, run, config, step):
    """The first draw of a step in which every choice of an expert has a margin."""
    for attempt in range(200):
        made = make_step(run, step, attempt, config["vocab_size"])
        reference.router_logits.clear()
        with torch.no_grad():
            for batch in made:
                logits_of(reference, batch, run.get("packed", False))
        margin = reference.router_margin(config.get("num_experts_per_tok", 0))
        if margin > ROUTER_MARGIN:
            return made, margin
    raise SystemExit(f"step {step}: no data with clear choices of experts among 200 draws")


# --- a step -------------------------------------------------------------------------------------------------------------


def logits_of(reference, batch, packed):
    """Logits of all rows of a micro-batch: each document by itself, or all in one row with a mask that keeps them apart."""
    ids = torch.tensor(batch["ids"])
    if not packed:
        parts = ids.split(batch["documents"])
        return torch.cat([reference.model(ids=part) if reference.plain else apart(reference, part) for part in parts])
    document = torch.repeat_interleave(torch.arange(len(batch["documents"])), torch.tensor(batch["documents"]))
    positions = torch.cat([torch.arange(length) for length in batch["documents"]])
    seen = (document[:, None] == document[None, :]) & (positions[None, :] <= positions[:, None])
    dtype = next(reference.model.parameters()).dtype
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf"))[None, None]
    return reference.model(
        input_ids=ids[None], attention_mask=mask, position_ids=positions[None], use_cache=False
    ).logits[0]


def apart(reference, ids):
    return reference.model(input_ids=ids[None], use_cache=False).logits[0]


def auxiliary_loss(reference, run, config, rows):
    """What is added to the mean cross-entropy of a step of one micro-batch, from the router logits that it left behind."""
    if "auxiliary" not in run:
        return 0.0
    per_row = config["num_experts_per_tok"]
    # A document's pass leaves the logits of its layers one after the other.
    layers = len(reference.router_logits) // len(run["documents"][0])
    by_layer = [torch.cat(reference.router_logits[layer::layers]) for layer in range(layers)]
    if run["auxiliary"] == "transformers":
        # Its own function, whose shares sum to `per_row` and whose means run over the rows of all layers.
        return BALANCE / per_row * load_balancing_loss_func(tuple(by_layer), config["num_experts"], per_row)
    counted = torch.ones(rows, dtype=torch.int32)
    balance = sum(load_balancing(logits, counted, per_row) for logits in by_layer)
    z_loss = sum(router_z_loss(logits, counted) for logits in by_layer)
    return (BALANCE * balance + ROUTER_Z * z_loss).squeeze()


def head_z_weight(run):
    return HEAD_Z if run.get("auxiliary") == "formulas" else 0.0


class TrainedReference(Reference):
    """The reference with its router logits kept as parts of the graph."""

    def _keep_router_logits(self, _module, _inputs, output):
        self.router_logits.append(output[0] if isinstance(output, tuple) else output)


class Trained:
    """What a run leaves, a number a step."""

    def __init__(self):
        self.cross_entropies, self.losses, self.norms, self.steps = [], [], [], []
        self.first_gradients = {}
        self.margin = 1.0


def train(model, config, run, parameters, options, steps):
    """Takes `steps`: a number of them, for which it then draws the data, or the steps of another run."""
    reference = TrainedReference(model)
    matrices = [parameter for _, parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for _, parameter in parameters if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": options["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        groups, lr=options["learning_rate"], betas=options["betas"], eps=options["epsilon"], foreach=False
    )
    trained = Trained()
    for index in range(steps) if isinstance(steps, int) else range(len(steps)):
        if isinstance(steps, int):
            step, margin = clear_step(reference, run, config, index)
            trained.margin = min(trained.margin, margin)
        else:
            step = steps[index]
        kept = sum(target != -100 for batch in step for target in batch["targets"])
        cross_entropy, loss = 0.0, 0.0
        for batch in step:
            reference.router_logits.clear()
            logits = logits_of(reference, batch, run.get("packed", False))
            targets = torch.tensor(batch["targets"])
            part = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / kept
            whole = part + auxiliary_loss(reference, run, config, len(targets))
            if head_z_weight(run) > 0:
                whole = whole + HEAD_Z * logits[targets != -100].logsumexp(dim=-1).pow(2).sum() / kept
            whole.backward()
            cross_entropy, loss = cross_entropy + part.item(), loss + whole.item()
        if index == 0:
            trained.first_gradients = {
                name: torch.zeros_like(value) if value.grad is None else value.grad.clone() for name, value in parameters
            }
        norm = torch.nn.utils.clip_grad_norm_([value for _, value in parameters], options["clip_norm"], foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        trained.cross_entropies.append(cross_entropy)
        trained.losses.append(loss)
        trained.norms.append(norm.item())
        trained.steps.append(step)
    return trained


def largest_difference(left, right):
    return max(abs(a - b) for a, b in zip(left, right, strict=True))


def report_of(run, options, single, double):
    report = {
        "model": run["model"],
        "optimizer": options,
        "cross_entropy": single.cross_entropies,
        "gradient_norm": single.norms,
        "float32_against_float64": {
            "cross_entropy": largest_difference(single.cross_entropies, double.cross_entropies),
            "gradient_norm": largest_difference(single.norms, double.norms),
        },
    }
    if "auxiliary" in run:
        report["loss"] = single.losses
        report["load_balancing_weight"] = BALANCE
        report["router_z_weight"] = ROUTER_Z if run["auxiliary"] == "formulas" else 0.0
        report["head_z_weight"] = head_z_weight(run)
    if single.margin < 1.0:
        report["smallest_router_margin"] = single.margin
    report["steps"] = single.steps
    return report


def write_report(path, report):
    """Indented, but a list of numbers a line: a step's ids are not a line each."""
    steps = report.pop("steps")
    text = json.dumps(report, indent=2)[:-2]
    lines = ",\n".join("    " + json.dumps(step, separators=(",", ":")) for step in steps)
    path.write_text(f'{text},\n  "steps": [\n{lines}\n  ]\n}}\n')


# --- runs of whole models -----------------------------------------------------------------------------------------------


def unfused(named):
    """Gradients under the names of the checkpoint: transformers holds a layer's experts as two tensors."""
    split = {}
    for name, value in named.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                gate, up = both.chunk(2)
                split[f"{name.removesuffix('gate_up_proj')}{expert}.gate_proj.weight"] = gate
                split[f"{name.removesuffix('gate_up_proj')}{expert}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(value):
                split[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = down
        else:
            split[name] = value
    return {name: value.float().contiguous().clone() for name, value in sorted(split.items())}


def make_model(name, folder):
    """A model's folder, and the untrained model."""
    config = MODELS[name]
    model = build(WEIGHTS.get(name, f"training-{name}"), config)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_tensors(folder / "model.safetensors", hub_state(model, config))
    size = (folder / "model.safetensors").stat().st_size
    if size > 200_000:
        raise SystemExit(f"{folder} has {size} bytes; these models stay under 200 KB")
    return config, model.eval()


def run_once(model, config, run, dtype, steps):
    copied = copy.deepcopy(model).to(dtype)
    return train(copied, config, run, list(copied.named_parameters()), ADAMW, steps)


def make_run(name, root):
    run = RUNS[name]
    config, model = make_model(run["model"], root / "models" / run["model"])
    single = run_once(model, config, run, torch.float32, STEPS)
    double = run_once(model, config, run, torch.float64, single.steps)
    if run.get("packed"):
        apart_again = run_once(model, config, {**run, "packed": False}, torch.float32, single.steps)
        print(f"{name}: packed against apart {largest_difference(single.losses, apart_again.losses):.1e}")
    report = report_of(run, ADAMW, single, double)
    (root / "runs").mkdir(exist_ok=True)
    write_report(root / "runs" / f"{name}.json", report)
    gradients = unfused(double.first_gradients)
    names = set(load_file(root / "models" / run["model"] / "model.safetensors"))
    if set(gradients) != names:
        raise SystemExit(f"{name}: the gradients and the checkpoint differ in {sorted(set(gradients) ^ names)}")
    write_tensors(root / "runs" / f"{name}.gradients.safetensors", gradients)
    print(
        f"{name}: {single.losses[0]:.4f} to {single.losses[-1]:.4f}, norms {single.norms[0]:.2f} to "
        f"{single.norms[-1]:.2f}, {report['float32_against_float64']}, margin {single.margin:.1e}",
        flush=True,
    )


# --- an adapter ---------------------------------------------------------------------------------------------------------

ADAPTER = {"model": "llama", "documents": ONE_BATCH}
ADAPTER_STEPS = 10
ADAPTER_OPTIONS = {**ADAMW, "learning_rate": 1e-2, "weight_decay": 0.0}


def save_adapter(adapted, folder):
    """PEFT's own files, without what belongs to this machine."""
    with tempfile.TemporaryDirectory() as place:
        adapted.save_pretrained(place)
        settings = json.loads((Path(place) / "adapter_config.json").read_text())
        tensors = load_file(Path(place) / "adapter_model.safetensors")
    settings["base_model_name_or_path"] = None
    settings["target_modules"] = sorted(settings["target_modules"])
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "adapter_config.json", settings)
    write_tensors(folder / "adapter_model.safetensors", dict(sorted(tensors.items())))


def adapter_name(name):
    """As `adapter_model.safetensors` has it: without the adapter's own name."""
    return name.replace(".default.", ".")


def adapt(model, dtype, targets=("q_proj", "v_proj", "down_proj")):
    settings = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=list(targets), task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(copy.deepcopy(model).to(dtype), settings)
    parameters = [(name, value) for name, value in adapted.named_parameters() if value.requires_grad]
    for name, value in parameters:
        # B is not zero, as it would be by default, so that both factors have a gradient from the first step on.
        size = 1 / math.sqrt(value.shape[1]) if ".lora_A." in name else 0.1
        drawn = seeded("training", "adapter", adapter_name(name)).standard_normal(tuple(value.shape)) * size
        value.data.copy_(torch.from_numpy(drawn).float())
    return adapted, parameters


def make_adapter(root):
    config, model = make_model(ADAPTER["model"], root / "models" / ADAPTER["model"])
    folder = root / "adapters" / "llama"
    adapted, parameters = adapt(model, torch.float32)
    save_adapter(adapted, folder / "initial")
    single = train(adapted, config, ADAPTER, parameters, ADAPTER_OPTIONS, ADAPTER_STEPS)
    wide, wide_parameters = adapt(model, torch.float64)
    double = train(wide, config, ADAPTER, wide_parameters, ADAPTER_OPTIONS, single.steps)
    save_adapter(adapted, folder / "trained")

    ids = torch.tensor(single.steps[0][0]["ids"][:32])
    with torch.no_grad():
        trained = adapted(input_ids=ids[None], use_cache=False).logits[0]
        again = PeftModel.from_pretrained(copy.deepcopy(model), folder / "trained")
        read_back = again(input_ids=ids[None], use_cache=False).logits[0]
        merged_model = again.merge_and_unload()
        merged = merged_model(input_ids=ids[None], use_cache=False).logits[0]
        base = model(input_ids=ids[None], use_cache=False).logits[0]
    if not torch.equal(read_back, trained):
        raise SystemExit("the adapter that was written is not the one that was trained")
    largest = torch.tensor([(merged - trained).abs().max().item()])
    tensors = {"input_ids": ids.to(torch.int32), "base.logits": base, "merged.logits": merged}
    tensors |= {"adapted.logits": trained, "merged.largest_change": largest}
    merged_weights = hub_state(merged_model, config)
    original = load_file(root / "models" / ADAPTER["model"] / "model.safetensors")
    tensors |= {f"merged.{name}": value for name, value in merged_weights.items() if not torch.equal(value, original[name])}
    tensors |= {f"gradients.{adapter_name(name)}": value.float() for name, value in sorted(double.first_gradients.items())}
    write_tensors(folder / "expected.safetensors", {name: value.contiguous() for name, value in tensors.items()})
    report = report_of(ADAPTER, ADAPTER_OPTIONS, single, double)
    write_report(folder / "run.json", report)
    print(
        f"adapter: {single.losses[0]:.4f} to {single.losses[-1]:.4f}, {report['float32_against_float64']}, "
        f"merged against adapted {largest.item():.1e}, against base {(merged - base).abs().max().item():.2f}"
    )


def make_rotated_adapter(root):
    """An adapter of a family whose q and k rotate neighbours, on the model of `models/`: what it adds has rows in that order too."""
    case = "ernie4_5_moe"
    base = root.parent / "models" / case
    with tempfile.TemporaryDirectory() as copy_of:
        # Without `expected.safetensors`, which transformers would take for a part of the weights.
        for name in ("config.json", "model.safetensors"):
            (Path(copy_of) / name).write_bytes((base / name).read_bytes())
        model = AutoModelForCausalLM.from_pretrained(copy_of, dtype=torch.float32, **PLAIN).eval()
    folder = root / "adapters" / case
    adapted, _ = adapt(model, torch.float32, ("q_proj", "k_proj", "v_proj", "o_proj"))
    save_adapter(adapted.eval(), folder)
    ids = load_file(base / "expected.safetensors")["long.input_ids"]
    with torch.no_grad():
        logits = adapted(input_ids=ids.long()[None], use_cache=False).logits[0]
    write_tensors(folder / "expected.safetensors", {"input_ids": ids, "adapted.logits": logits.contiguous()})
    print(f"adapter of {case}: {sum(file.stat().st_size for file in folder.iterdir())} bytes")
