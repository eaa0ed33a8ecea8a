#!/usr/bin/env python3
"""Training steps in PyTorch on a card: tokens/s and memory of its fastest way: compiled with CUDA graphs, compiled, or eager.

    python3 torch_train.py [--json] [--cases train-dense-102m-4x1024,...] [--ways reduce-overhead,compile,eager] [--runs 3] [--steps 10]

The models and batches of our benchmarks of the same names: bfloat16 by autocast over weights in single precision, fused AdamW, attention by
`scaled_dot_product_attention`, experts by the grouped product over sorted rows, a tied head with its cross entropy. No norm of the gradient
is taken, which ours has. The memory is what the card has in use more than before, and the driver's own part: PyTorch's own counter leaves
out what graphs hold.

The way that was the fastest on an H200 comes first, and those after it run only where it failed, as compiling takes up to a minute: for
steps of 4 x 1,024 tokens CUDA graphs ("reduce-overhead"), 1.5 (dense-102m) to 2.5 times (moe-55m) as fast as compiled alone; for larger ones
compiled alone, where graphs gained 1%. Eager steps came to 23% (moe-55m, 4 x 1,024) to 69% (dense-102m, 32 x 1,024) of the fastest. `--ways`
names ways that all run, the best of which counts.
"""

import argparse
import gc
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch import nn
from torch.nn import functional as F

import torch_measure as measure

DENSE_102M = measure.Shape(32000, 768, 16, 12, 4, 64, 1408, tied=True, biased=False, theta=1e4)
DENSE_1B2 = measure.Shape(32000, 2048, 16, 32, 8, 64, 8192, tied=True, biased=False, theta=1e4)
CASES = {  # the model, documents and their length
    "train-dense-102m-4x1024": (DENSE_102M, 4, 1024),
    "train-dense-102m-32x1024": (DENSE_102M, 32, 1024),
    "train-moe-55m-4x1024": (measure.SHAPES["moe55m"], 4, 1024),
    "train-moe-55m-32x1024": (measure.SHAPES["moe55m"], 32, 1024),
    "train-dense-1.2b-8x2048": (DENSE_1B2, 8, 2048),
}
WAYS = ("reduce-overhead", "compile", "eager")  # large steps leave the first out
SMALL = 4 * 1024  # tokens of a step
WARM_UP = 4


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-5)


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.heads = [shape.heads, shape.kv_heads, shape.kv_heads]
        self.width = shape.head_width
        self.qkv = linear(shape.width, shape.qkv)
        self.out = linear(shape.heads * shape.head_width, shape.width)

    def forward(self, x, cosines, sines):
        rows, length, _ = x.shape
        parts = self.qkv(x).split([heads * self.width for heads in self.heads], -1)
        q, k, v = (part.view(rows, length, -1, self.width) for part in parts)

        def turned(x):
            a, b = x.chunk(2, -1)
            return torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1)

        q, k, v = (x.transpose(1, 2) for x in (turned(q), turned(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, -1))


class Gated(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate_up = linear(width, 2 * inner)
        self.down = linear(inner, width)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Routed(nn.Module):
    def __init__(self, shape):
        super().__init__()
        experts, width, inner = shape.experts, shape.width, shape.expert_inner
        self.chosen = shape.chosen
        self.router = linear(width, experts)
        self.gate_up = nn.Parameter(torch.randn(experts, width, 2 * inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)
        self.shared = Gated(width, inner)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        weights, experts = F.softmax(self.router(rows).float(), -1).topk(self.chosen, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(torch.bfloat16)
        experts = experts.flatten()
        order = experts.argsort(stable=True)
        ends = F.one_hot(experts, self.gate_up.shape[0]).sum(0).cumsum(0).to(torch.int32)
        sources = order // self.chosen
        inner = torch._grouped_mm(rows[sources].to(torch.bfloat16), self.gate_up.to(torch.bfloat16), offs=ends)
        gate, up = inner.chunk(2, -1)
        y = torch._grouped_mm(F.silu(gate) * up, self.down.to(torch.bfloat16), offs=ends)
        y = y * weights.flatten()[order].unsqueeze(-1)
        out = torch.zeros_like(rows, dtype=torch.bfloat16).index_add(0, sources, y)
        return out.view_as(x) + self.shared(x)


class Model(nn.Module):
    def __init__(self, shape, length):
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        layers = range(shape.layers)
        self.norms = nn.ModuleList(Norm(shape.width) for _ in range(2 * shape.layers + 1))
        self.attention = nn.ModuleList(Attention(shape) for _ in layers)
        first = shape.layers - shape.routed
        self.inner = nn.ModuleList(Routed(shape) if i >= first else Gated(shape.width, shape.inner) for i in layers)
        angles = torch.outer(torch.arange(length), shape.theta ** (-torch.arange(0, shape.head_width, 2) / shape.head_width))
        self.register_buffer("cosines", angles.cos()[:, None].to(torch.bfloat16))
        self.register_buffer("sines", angles.sin()[:, None].to(torch.bfloat16))

    def forward(self, ids, targets):
        x = self.embedding(ids).to(torch.bfloat16)
        for layer, (attention, inner) in enumerate(zip(self.attention, self.inner)):
            x = x + attention(self.norms[2 * layer](x), self.cosines, self.sines)
            x = x + inner(self.norms[2 * layer + 1](x))
        logits = F.linear(self.norms[-1](x), self.embedding.weight.to(torch.bfloat16))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def used_mib():
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**20


def rates(case, way, runs, steps):
    """Tokens/s of each run, and what the card had in use more than before in MiB."""
    shape, documents, length = CASES[case]
    before = used_mib()
    torch.manual_seed(0)
    model = Model(shape, length).to(measure.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    mode = None if way == "compile" else way
    forward = model if way == "eager" else torch.compile(model, mode=mode)
    ids = torch.randint(0, shape.vocabulary, (documents, length + 1), device=measure.device())
    ids, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = forward(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(WARM_UP):
        step()
    values = []
    for _ in range(runs):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        torch.cuda.synchronize()
        values.append(steps * documents * length / (time.perf_counter() - start))
    if not torch.isfinite(loss):
        raise ValueError(f"the loss is {loss.item()}")
    return values, used_mib() - before


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--cases", default=",".join(CASES), help="with commas between")
    parser.add_argument("--ways", help=f"of {', '.join(WAYS)}, with commas between")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of a run")
    arguments = parser.parse_args()
    cases = measure.chosen_cases(parser, arguments.cases, CASES)
    ways = measure.chosen_cases(parser, arguments.ways, WAYS) if arguments.ways else None
    measure.needs_cuda()
    torch.set_float32_matmul_precision("high")
    torch.zeros(1, device=measure.device())
    of_driver = used_mib()
    for case in cases:
        _, documents, length = CASES[case]
        found, notes = [], []
        for way in ways or (WAYS if documents * length <= SMALL else WAYS[1:]):
            if found and not ways:
                break
            start = time.perf_counter()
            try:
                values, mib = rates(case, way, arguments.runs, arguments.steps)
            except Exception as error:
                notes.append(f"{way}: failed, {type(error).__name__}: {str(error)[:120]}")
            else:
                found.append((max(values), values, way, of_driver + mib))
                notes.append(f"{way}: {max(values):.0f}, {of_driver + mib:.0f} MiB")
            measure.say(f"{case} {notes[-1]} ({time.perf_counter() - start:.0f} s)")
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
        if found:
            _, values, way, mib = max(found)
            notes = "; ".join(notes)
            measure.report(arguments.json, f"PyTorch {way}", case, values, "tokens/s", notes, memory_mib=mib)


if __name__ == "__main__":
    main()
