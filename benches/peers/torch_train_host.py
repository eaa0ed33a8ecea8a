#!/usr/bin/env python3
"""Training steps in PyTorch on the processor, single precision: tokens/s, eager and compiled.

    python3 torch_train_host.py [--json] [--cases train-host,train-host-moe] [--threads 0]

The models and the batch of our benchmarks of the same names: 4 x 256 random ids, forward, backward, a clipped norm and fused AdamW;
attention by `scaled_dot_product_attention`, experts one after the other on the rows that chose them. The best way is reported, the
others are in `notes`. A minute or two, most of it compiling.
"""

import argparse
import json
import time

import torch
from torch import nn
from torch.nn import functional as F

ROWS, LENGTH, STEPS, RUNS = 4, 256, 3, 5
VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD, INNER = 4096, 256, 6, 4, 2, 64, 704
EXPERTS, CHOSEN, EXPERT_INNER, DENSE_LAYERS = 8, 2, 176, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x, cosines, sines):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], -1)
        q, k, v = (part.view(rows, length, -1, HEAD).transpose(1, 2) for part in (q, k, v))

        def turned(x):
            a, b = x.chunk(2, -1)
            return torch.cat((a * cosines - b * sines, b * cosines + a * sines), -1)

        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, -1))


class Gated(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * inner, bias=False)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Gated(EXPERT_INNER) for _ in range(EXPERTS))
        self.shared = Gated(EXPERT_INNER)

    def forward(self, x):
        rows = x.reshape(-1, WIDTH)
        weights, chosen = F.softmax(self.router(rows), -1).topk(CHOSEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = self.shared(rows)
        for number, expert in enumerate(self.experts):
            row, slot = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(rows[row]) * weights[row, slot, None])
        return out.view_as(x)


class Model(nn.Module):
    def __init__(self, routed):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)
        layers = range(LAYERS)
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2 * LAYERS + 1))
        self.attention = nn.ModuleList(Attention() for _ in layers)
        self.inner = nn.ModuleList(Routed() if routed and i >= DENSE_LAYERS else Gated(INNER) for i in layers)
        angles = torch.outer(torch.arange(LENGTH), 10_000.0 ** (-torch.arange(0, HEAD, 2) / HEAD))
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def forward(self, ids, targets):
        x = self.embedding(ids)
        for layer in range(LAYERS):
            x = x + self.attention[layer](self.norms[2 * layer](x), self.cosines, self.sines)
            x = x + self.inner[layer](self.norms[2 * layer + 1](x))
        logits = self.norms[-1](x) @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rates(routed, compiled):
    torch.manual_seed(7)
    model = Model(routed)
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1))

    def step():
        optimizer.zero_grad(set_to_none=True)
        forward(ids[:, :-1], ids[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    found = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        found.append(STEPS * ROWS * LENGTH / (time.perf_counter() - start))
    return found[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", default="train-host,train-host-moe")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    figures, notes = {}, []
    for case in options.cases.split(","):
        ways = {"eager": rates(case.endswith("-moe"), False)}
        try:
            ways["compiled"] = rates(case.endswith("-moe"), True)
        except Exception as error:  # a machine without a C++ compiler
            notes.append(f"{case}: not compiled ({type(error).__name__})")
        best = max(ways, key=lambda way: max(ways[way]))
        values = ways[best]
        figures[case] = {"values": values, "best": max(values), "mean": sum(values) / len(values)}
        notes += [f"{case} {way}: {max(values):.0f}" for way, values in ways.items()]
    report = {
        "name": "PyTorch f32",
        "version": torch.__version__,
        "figures": figures,
        "unit": "tokens/s",
        "notes": "; ".join(notes),
    }
    print(json.dumps(report) if options.json else report["notes"])


if __name__ == "__main__":
    main()
