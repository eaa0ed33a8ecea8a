"""Gradients of single operations by PyTorch's autograd: `training/operations/<operation>.safetensors`, by `training.py`.

An operation is a function of named tensors below, written as its formula. Every case draws its inputs and the gradient of
the output in float32, computes in float64, and rounds what comes out to float32, so that the files hold the right answer
to the last bit and an implementation is charged with its own rounding alone. Tensors of a file:

    <case>.<input>          what goes in, F32 or I32
    <case>.out              what comes out
    <case>.out_gradient     the gradient of the loss by `out`
    <case>.<input>_gradient the gradient of the loss by an input

The metadata entry `cases` is a JSON object: for each case its options, and `float32_error`, the error of PyTorch's own
float32 pass for each result, as the largest difference over the root mean square of the right answer.
"""

import math

import torch
from torch.nn import functional as F

# --- the operations -----------------------------------------------------------------------------------------------------


def rmsnorm(x, weight, epsilon):
    """Over runs of the weight's length; a row may hold several."""
    runs = x.view(x.shape[0], -1, weight.shape[0])
    return (weight * runs * torch.rsqrt(runs.pow(2).mean(-1, keepdim=True) + epsilon)).view(x.shape)


def rope(x, phases, head_width):
    """Element i of a head turns with element i + half; what lies past 2 half stays. phases: half cosines, half sines."""
    half = phases.shape[1] // 2
    cos, sin = phases[:, None, :half], phases[:, None, half:]
    heads = x.view(x.shape[0], -1, head_width)
    low, high, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1).view(x.shape)


def gated_activation(gate, up, activation):
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated * up


def linear(x, weight, bias=None, residual=None):
    out = F.linear(x, weight, bias)
    return out if residual is None else residual + out


def linear_many(x, query, key, value):
    """Three products of one input, side by side."""
    return torch.cat((x @ query.T, x @ key.T, x @ value.T), dim=1)


def embedding(table, ids, scale):
    return table[ids.long()] * scale


def attention(q, k, v, heads, kv_heads, documents, key_documents, mask, scale, window=None):
    """q: [n, heads * w]; k, v: [m, kv_heads * w]. A document's queries see its own keys alone."""
    width = q.shape[1] // heads
    seen = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    row, column = 0, 0
    for queries, keys in zip(documents, key_documents, strict=True):
        position, key = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
        part = key <= position if mask == "causal" else torch.ones(queries, keys, dtype=torch.bool)
        if window is not None:
            part = part & (key > position - window)
        seen[row : row + queries, column : column + keys] = part
        row, column = row + queries, column + keys
    q = q.view(-1, heads, width).transpose(0, 1)
    k = k.view(-1, kv_heads, width).transpose(0, 1).repeat_interleave(heads // kv_heads, dim=0)
    v = v.view(-1, kv_heads, width).transpose(0, 1).repeat_interleave(heads // kv_heads, dim=0)
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
    return (scores.softmax(dim=-1) @ v).transpose(0, 1).reshape(-1, heads * width)


def chosen_experts(probabilities, per_row):
    return probabilities.topk(per_row, dim=-1).indices.sort(dim=-1).values


def route_experts(logits, per_row, normalize):
    """The weights of the chosen experts, in ascending order of the expert."""
    probabilities = logits.softmax(dim=-1)
    weights = probabilities.gather(1, chosen_experts(probabilities, per_row))
    return weights / weights.sum(dim=-1, keepdim=True) if normalize else weights


def routed_experts(x, residual, weights, experts, gate, up, down, activation):
    """residual + sum over slots of weight * down_e(act(gate_e x) * up_e x); gate, up: [experts, inner, width]."""
    slots = []
    for slot in range(experts.shape[1]):
        e = experts[:, slot].long()
        inner = gated_activation(
            torch.einsum("eiw,ew->ei", gate[e], x), torch.einsum("eiw,ew->ei", up[e], x), activation
        )
        slots.append(weights[:, slot, None] * torch.einsum("ewi,ei->ew", down[e], inner))
    return residual + sum(slots)


def routed_layer(x, residual, router, gate, up, down, per_row, normalize, activation):
    """Router, choice and experts together: x gets gradients by both ways."""
    logits = x @ router.T
    experts = chosen_experts(logits.softmax(dim=-1), per_row)
    return routed_experts(x, residual, route_experts(logits, per_row, normalize), experts, gate, up, down, activation)


def load_balancing(logits, counted, per_row):
    """experts * sum over e of f_e P_e (Switch Transformer, (4)-(6)) over the counted rows: f_e is e's share of all their
    choices, so that it sums to 1 for any `per_row`; P_e is its mean probability. 1 where the load is even."""
    probabilities = logits[counted.bool()].softmax(dim=-1)
    rows, experts = probabilities.shape
    choices = chosen_experts(probabilities, per_row).flatten()
    share = torch.bincount(choices, minlength=experts).to(logits.dtype) / (rows * per_row)
    return (experts * (share * probabilities.mean(dim=0)).sum()).view(1)


def router_z_loss(logits, counted):
    """The mean over the counted rows of logsumexp(logits)^2 (ST-MoE)."""
    return logits[counted.bool()].logsumexp(dim=-1).pow(2).mean().view(1)


def cross_entropy(x, head, targets, z_weight, normalizer):
    """sum over the rows with a target of (lse - logit_target + z_weight lse^2), over `normalizer`; logits = x headᵀ."""
    kept = targets != -100
    logits = x[kept] @ head.T
    lse = logits.logsumexp(dim=-1)
    of_target = logits.gather(1, targets[kept].long()[:, None])[:, 0]
    return ((lse - of_target + z_weight * lse.pow(2)).sum() / normalizer).view(1)


def tied_cross_entropy(table, weight, ids, targets, scale, epsilon, z_weight, normalizer):
    """The smallest model with a tied head: the table's gradient comes from the look-up and from the head."""
    return cross_entropy(rmsnorm(embedding(table, ids, scale), weight, epsilon), table, targets, z_weight, normalizer)


def residual_sums(x, matrix, first, second, epsilon):
    """h = x + matrix rmsnorm(x), out = h + rmsnorm(h): each of x and h is read twice."""
    h = x + rmsnorm(x, first, epsilon) @ matrix.T
    return h + rmsnorm(h, second, epsilon)


def gated_rows(residual, y, gate):
    """residual + sigmoid(gate_i) y_i, gate: [n, 1] (the shared expert of Qwen2-MoE)."""
    return residual + gate.sigmoid() * y


# --- their cases --------------------------------------------------------------------------------------------------------
# case: (inputs, options). An input is a shape, a (shape, factor, offset) of the normal draws, or a list of whole numbers.


def phases(positions, half, factor=1.0, base=10000.0):
    """Cosines and sines as one more input: float32, whatever computed them."""
    inverse_frequency = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.tensor(positions, dtype=torch.float64)[:, None] * inverse_frequency
    return (torch.cat((angle.cos(), angle.sin()), dim=1) * factor).float()


def norm_weight(*shape):
    return (shape, 0.3, 1.0)


def attention_case(width, heads, kv_heads, documents, key_documents=None, mask="causal", window=None, size=1.0):
    key_documents = key_documents or documents
    n, m = sum(documents), sum(key_documents)
    options = {"heads": heads, "kv_heads": kv_heads, "documents": documents, "key_documents": key_documents}
    options |= {"mask": mask, "scale": float(torch.tensor(1 / math.sqrt(width)))}
    if window is not None:
        options["window"] = window
    return {"q": ((n, heads * width), size, 0.0), "k": (m, kv_heads * width), "v": (m, kv_heads * width)}, options


def experts_case(width, inner, experts, choices, activation="silu"):
    rows = len(choices)
    matrices = {name: ((experts, inner, width), 1 / math.sqrt(width), 0.0) for name in ("gate", "up")}
    matrices["down"] = ((experts, width, inner), 1 / math.sqrt(inner), 0.0)
    inputs = {"x": (rows, width), "residual": (rows, width), "weights": ((rows, len(choices[0])), 0.2, 0.5)}
    return inputs | {"experts": choices} | matrices, {"activation": activation}


def layer_case(rows, width, inner, experts, **options):
    inputs, _ = experts_case(width, inner, experts, [[0]] * rows)
    del inputs["weights"], inputs["experts"]
    return inputs | {"router": ((experts, width), 2 / math.sqrt(width), 0.0)}, {"activation": "silu", **options}


def loss_case(rows, width, vocabulary, targets, z_weight=0.0, size=1.0):
    inputs = {"x": (rows, width), "head": ((vocabulary, width), size / math.sqrt(width), 0.0), "targets": targets}
    return inputs, {"z_weight": z_weight, "normalizer": float(max(1, sum(target != -100 for target in targets)))}


IDS = [3, 0, 3, 6, 3, 1, 0, 6, 6, 2]
NEXT = [0, 3, -100, 3, 1, 0, 6, -100, 2, 4]
Z_WEIGHT = 2.0**-10  # the same number in float32 and float64
SCALE = float(torch.tensor(math.sqrt(12)))
EPSILON, SMALL_EPSILON = (float(torch.tensor(value)) for value in (1e-5, 1e-6))

OPERATIONS = {
    rmsnorm: {
        "plain": ({"x": (5, 16), "weight": norm_weight(16)}, {"epsilon": EPSILON}),
        "heads": ({"x": (6, 32), "weight": norm_weight(8)}, {"epsilon": SMALL_EPSILON}),
        "wide": ({"x": (3, 64), "weight": norm_weight(64)}, {"epsilon": EPSILON}),
        "odd": ({"x": (4, 7), "weight": norm_weight(7)}, {"epsilon": EPSILON}),
        # Rows so small that epsilon is most of the denominator.
        "small_rows": ({"x": ((5, 12), 2e-3, 0.0), "weight": norm_weight(12)}, {"epsilon": EPSILON}),
    },
    rope: {
        "whole": ({"x": (7, 24), "phases": phases([0, 1, 2, 3, 4, 5, 6], 4)}, {"head_width": 8}),
        "partial": ({"x": (5, 32), "phases": phases([3, 4, 0, 1, 2], 4)}, {"head_width": 16}),
        "factor": ({"x": (4, 64), "phases": phases([100, 101, 0, 7], 32, factor=1.25)}, {"head_width": 64}),
    },
    gated_activation: {
        "silu": ({"gate": ((7, 16), 2.0, 0.0), "up": (7, 16)}, {"activation": "silu"}),
        "gelu_tanh": ({"gate": ((7, 16), 2.0, 0.0), "up": (7, 16)}, {"activation": "gelu_tanh"}),
        "silu_far": ({"gate": ((5, 9), 20.0, 0.0), "up": (5, 9)}, {"activation": "silu"}),
        "gelu_tanh_far": ({"gate": ((5, 9), 6.0, 0.0), "up": (5, 9)}, {"activation": "gelu_tanh"}),
    },
    linear: {
        "plain": ({"x": (9, 33), "weight": (17, 33)}, {}),
        "bias": ({"x": (5, 12), "weight": (7, 12), "bias": (7,)}, {}),
        "one_row": ({"x": (1, 16), "weight": (4, 16), "bias": (4,)}, {}),
        "residual": ({"x": (6, 24), "weight": (20, 24), "bias": (20,), "residual": (6, 20)}, {}),
        "many_rows": ({"x": (70, 10), "weight": (36, 10)}, {}),
    },
    linear_many: {"grouped": ({"x": (7, 16), "query": (24, 16), "key": (8, 16), "value": (8, 16)}, {})},
    embedding: {
        "plain": ({"table": (8, 12), "ids": IDS}, {"scale": 1.0}),
        "scaled": ({"table": (7, 12), "ids": IDS}, {"scale": SCALE}),
    },
    attention: {
        "causal": attention_case(8, 2, 2, [9]),
        "causal_4": attention_case(4, 3, 3, [17]),
        "causal_64": attention_case(64, 2, 1, [20]),
        "grouped": attention_case(16, 4, 2, [19]),
        "one_kv_head": attention_case(24, 3, 1, [18]),
        "windowed": attention_case(16, 4, 2, [21], window=4),
        "window_1": attention_case(8, 2, 1, [6], window=1),
        "bidirectional": attention_case(32, 2, 2, [18], mask="bidirectional"),
        "packed": attention_case(16, 4, 2, [1, 11, 5, 8]),
        "packed_windowed": attention_case(8, 2, 1, [7, 2, 18], window=5),
        "packed_bidirectional": attention_case(12, 4, 2, [4, 1, 9], mask="bidirectional"),
        "cross": attention_case(16, 4, 2, [13], [21], mask="bidirectional"),
        "cross_packed": attention_case(8, 4, 2, [5, 3], [2, 17], mask="bidirectional"),
        # Past 64 queries and 256 keys, where an implementation takes the next block.
        "long": attention_case(4, 2, 1, [70, 270]),
        "long_windowed": attention_case(4, 2, 2, [140], window=33),
        "long_cross": attention_case(4, 2, 1, [67, 3], [20, 259], mask="bidirectional"),
        # Scores in the tens: most probabilities are 0 or 1.
        "sharp": attention_case(16, 2, 2, [16], size=12.0),
    },
    route_experts: {
        "one": ({"logits": (9, 5)}, {"per_row": 1, "normalize": False}),
        # The weight is 1 whatever the logits are, so nothing reaches them.
        "one_normalized": ({"logits": (9, 5)}, {"per_row": 1, "normalize": True}),
        "two": ({"logits": (11, 6)}, {"per_row": 2, "normalize": False}),
        "two_normalized": ({"logits": (11, 6)}, {"per_row": 2, "normalize": True}),
        "all_normalized": ({"logits": (4, 3)}, {"per_row": 3, "normalize": True}),
    },
    routed_experts: {
        # No row chooses expert 3, and every row expert 1.
        "two": experts_case(8, 12, 5, [[0, 1], [1, 2], [1, 4], [0, 1], [1, 4], [1, 2], [0, 1]]),
        "one": experts_case(16, 8, 4, [[2], [0], [2], [3], [3], [2], [0], [1], [2]]),
        "gelu": experts_case(8, 8, 3, [[0, 2], [1, 2], [0, 1], [0, 2]], activation="gelu_tanh"),
    },
    routed_layer: {
        "normalized": layer_case(13, 16, 8, 4, per_row=2, normalize=True),
        "not_normalized": layer_case(13, 16, 8, 4, per_row=2, normalize=False),
        "one_not_normalized": layer_case(10, 8, 8, 4, per_row=1, normalize=False),
        # Two or more experts have no row.
        "few_rows": layer_case(3, 8, 4, 8, per_row=2, normalize=True),
        "gelu": layer_case(9, 8, 4, 4, per_row=2, normalize=True, activation="gelu_tanh"),
    },
    load_balancing: {
        "all_rows": ({"logits": (12, 5), "counted": [1] * 12}, {"per_row": 2}),
        "padding": ({"logits": (12, 5), "counted": [1] * 7 + [0] * 2 + [1] * 2 + [0]}, {"per_row": 2}),
        "one_choice": ({"logits": ((10, 4), 2.0, 0.0), "counted": [1] * 10}, {"per_row": 1}),
    },
    router_z_loss: {
        "all_rows": ({"logits": ((12, 5), 3.0, 0.0), "counted": [1] * 12}, {}),
        "padding": ({"logits": ((12, 5), 3.0, 0.0), "counted": [1] * 7 + [0] * 2 + [1] * 2 + [0]}, {}),
    },
    cross_entropy: {
        "plain": loss_case(6, 12, 29, [0, 28, 5, 5, 17, 3]),
        "ignored": loss_case(9, 16, 40, [1, -100, 39, 0, -100, -100, 7, 7, -100]),
        "all_ignored": loss_case(3, 8, 10, [-100, -100, -100]),
        "z_loss": loss_case(7, 16, 40, [1, -100, 39, 0, 12, -100, 7], z_weight=Z_WEIGHT),
        "large_logits": loss_case(6, 16, 33, [1, 2, 32, 0, -100, 9], z_weight=Z_WEIGHT, size=25.0),
        "vocabulary": loss_case(10, 8, 1100, [0, 1099, 512, 1023, 1024, -100, 5, 700, 255, 256]),
    },
    tied_cross_entropy: {
        "plain": (
            {"table": (7, 12), "weight": norm_weight(12), "ids": IDS, "targets": NEXT},
            {"scale": SCALE, "epsilon": EPSILON, "z_weight": Z_WEIGHT, "normalizer": 8.0},
        ),
    },
    residual_sums: {
        "plain": (
            {
                "x": (6, 12),
                "matrix": ((12, 12), 1 / math.sqrt(12), 0.0),
                "first": norm_weight(12),
                "second": norm_weight(12),
            },
            {"epsilon": EPSILON},
        ),
    },
    gated_rows: {"plain": ({"residual": (6, 8), "y": (6, 8), "gate": ((6, 1), 2.0, 0.0)}, {})},
}


def draw(specification, generator):
    """An input of a case as a tensor."""
    if isinstance(specification, torch.Tensor):
        return specification
    if isinstance(specification, list):
        return torch.tensor(specification, dtype=torch.int32)
    shape, factor, offset = specification if isinstance(specification[0], tuple) else (specification, 1.0, 0.0)
    return torch.from_numpy(generator.standard_normal(shape) * factor + offset).float()


def evaluate(operation, inputs, options, gradient, dtype):
    """The output and the inputs' gradients with everything in `dtype`."""
    leaves = {
        name: value.to(dtype, copy=True).requires_grad_() if value.is_floating_point() else value
        for name, value in inputs.items()
    }
    out = operation(**leaves, **options)
    results = {"out": out.detach()}
    out.backward(gradient(out.shape).to(dtype))
    for name, leaf in leaves.items():
        if leaf.is_floating_point() and name != "phases":
            results[f"{name}_gradient"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return results


def relative_error(found, right):
    size = right.double().pow(2).mean().sqrt().item()
    return (found.double() - right).abs().max().item() / size if size > 0 else 0.0


def exact_zeros(results):
    """What is zero but for float64's rounding (the weight of a single expert divided by itself) as zero."""
    return {name: value if value.abs().max() > 1e-12 else torch.zeros_like(value) for name, value in results.items()}


def operation_files(seeded):
    """name: (tensors, {case: options and errors}) of every operation; `seeded(*words)` makes a generator."""
    for operation, cases in OPERATIONS.items():
        name, tensors, report = operation.__name__, {}, {}
        for case, (specifications, options) in cases.items():
            inputs = {key: draw(value, seeded("training", name, case, key)) for key, value in specifications.items()}

            def gradient(shape, name=name, case=case):
                return draw(tuple(shape), seeded("training", name, case, "out_gradient"))

            right = exact_zeros(evaluate(operation, inputs, options, gradient, torch.float64))
            single = evaluate(operation, inputs, options, gradient, torch.float32)
            error = {key: float(f"{relative_error(single[key], value):.1e}") for key, value in right.items()}
            report[case] = {**options, "float32_error": error}
            rounded = {key: value.float() for key, value in right.items()}
            rounded["out_gradient"] = gradient(right["out"].shape)
            for key, value in {**inputs, **rounded}.items():
                tensors[f"{case}.{key}"] = value.contiguous()
            if operation is route_experts:
                experts = chosen_experts(inputs["logits"].double().softmax(dim=-1), options["per_row"])
                tensors[f"{case}.experts"] = experts.to(torch.int32)
        yield name, tensors, report
