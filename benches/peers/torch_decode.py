#!/usr/bin/env python3
"""Greedy decoding in PyTorch: tokens/s over all sequences, 128 new tokens after 512, random weights of the true shape.

    python3 torch_decode.py [--json] [--cases decode-3b-bf16-1,decode-3b-nf4-16] [--prompt 512] [--new 128]

Cases are named as our benchmarks: `decode-SHAPE-WEIGHTS-SEQUENCES`. A step is embedding, layers, head and argmax of every
sequence; keys and values lie in a static cache of exactly prompt + new positions, all of which are attended and masked. The
step is one CUDA graph, so no time of the host is in it. The default cases take about a minute on an H200.

Ways that are tried, of which the best counts:
  bf16  layers compiled by Inductor, attention as one call or as two batched products; for one sequence also with Inductor's
        own kernels for the products of one row (`coordinate_descent_tuning`)
  nf4   bitsandbytes' 4-bit products (0.50 or newer, where it can be imported), the rest compiled, and all of it eager
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from torch.nn import functional as F

import torch_measure as measure
from torch_measure import SHAPES, ones, random_weight

KNOWN = [
    *[f"decode-{shape}-bf16-{n}" for shape in SHAPES for n in (1, 16)],
    *[f"decode-{shape}-nf4-{n}" for shape in ("3b", "14b") for n in (1, 16)],
]
DEFAULT = "decode-3b-bf16-1,decode-3b-nf4-1,decode-moe55m-bf16-1"
EPSILON = 1e-6


class Matrix(NamedTuple):
    """A weight [out, in]: as it is, or as bitsandbytes packs it (codes and the absolute maxima of blocks of 64)."""

    values: torch.Tensor
    absmax: torch.Tensor | None


class Layer(NamedTuple):
    norm: torch.Tensor
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    out: Matrix
    feed_forward_norm: torch.Tensor
    gate_up: Matrix  # of a routed layer: the shared expert's
    down: Matrix
    router: torch.Tensor | None
    experts_gate_up: torch.Tensor | None  # [experts, 2 * inner, width]
    experts_down: torch.Tensor | None  # [experts, width, inner]


def linear(x, matrix, outputs):
    if matrix.absmax is None:
        return F.linear(x, matrix.values)
    return torch.ops.bitsandbytes.gemm_4bit.default(
        x, matrix.values, [outputs, x.shape[-1]], matrix.absmax, 64, "nf4"
    )


def matrix(outputs, inputs, weights):
    values = random_weight(outputs, inputs)
    if weights == "bf16":
        return Matrix(values, None)
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4")
    return Matrix(codes, state.absmax)


def make_layer(shape, weights, routed):
    width = shape.width
    inner = shape.expert_inner if routed else shape.inner
    return Layer(
        norm=ones(width),
        qkv=matrix(shape.qkv, width, weights),
        qkv_bias=random_weight(shape.qkv) if shape.biased else None,
        out=matrix(width, shape.heads * shape.head_width, weights),
        feed_forward_norm=ones(width),
        gate_up=matrix(2 * inner, width, weights),
        down=matrix(width, inner, weights),
        router=random_weight(shape.experts, width) if routed else None,
        experts_gate_up=random_weight(shape.experts, 2 * inner, width) if routed else None,
        experts_down=random_weight(shape.experts, width, inner) if routed else None,
    )


def layer_function(shape, attention):
    """x and what the layer before adds to it -> x with that added, and what this layer adds: sums fuse with the norms."""
    heads, kv_heads, head_width = shape.heads, shape.kv_heads, shape.head_width
    group = heads // kv_heads

    def attend(q, keys, values, mask):
        # The queries of a group share a key head: they stand where the positions of a prompt would.
        if attention == "one call":
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        scores = (q @ keys.transpose(-1, -2)).float() * head_width**-0.5 + mask
        return scores.softmax(-1).to(q.dtype) @ values

    def turn(x, cos, sin):
        low, high = x.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def feed_forward(x, gate_up, down, inner):
        gate, up = linear(x, gate_up, 2 * inner).chunk(2, -1)
        return linear(F.silu(gate) * up, down, shape.width)

    def experts(x, layer):
        weights, chosen = F.linear(x, layer.router).float().softmax(-1).topk(shape.chosen, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        n = x.shape[0]
        if n * shape.chosen <= shape.experts:
            # Few rows: only the chosen experts' weights are read.
            gate, up = torch.einsum("nkfd,nd->nkf", layer.experts_gate_up[chosen], x).chunk(2, -1)
            each = torch.einsum("nkdf,nkf->nkd", layer.experts_down[chosen], F.silu(gate) * up)
            return (each * weights[..., None]).sum(1)
        # Many rows choose nearly all: every expert computes every row, and those not chosen weigh nothing.
        gate, up = (x @ layer.experts_gate_up.transpose(1, 2)).chunk(2, -1)
        each = (F.silu(gate) * up) @ layer.experts_down.transpose(1, 2)
        spread = torch.zeros(n, shape.experts, dtype=x.dtype, device=x.device).scatter(1, chosen, weights)
        return (each * spread.t()[..., None]).sum(0)

    def run(x, added, position, cos, sin, mask, layer, keys, values):
        n = x.shape[0]
        x = x + added
        y = linear(F.rms_norm(x, (shape.width,), layer.norm, EPSILON), layer.qkv, shape.qkv)
        if layer.qkv_bias is not None:
            y = y + layer.qkv_bias
        q, k, v = y.view(n, heads + 2 * kv_heads, 1, head_width).split([heads, kv_heads, kv_heads], 1)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        keys[:, :, position] = k
        values[:, :, position] = v
        mixed = attend(q.reshape(n, kv_heads, group, head_width), keys, values, mask)
        x = x + linear(mixed.reshape(n, heads * head_width), layer.out, shape.width)
        y = F.rms_norm(x, (shape.width,), layer.feed_forward_norm, EPSILON)
        if layer.router is None:
            return x, feed_forward(y, layer.gate_up, layer.down, shape.inner)
        return x, feed_forward(y, layer.gate_up, layer.down, shape.expert_inner) + experts(y, layer)

    return run


class Decoder:
    """Weights, cache and the step. `way` says how the step runs."""

    def __init__(self, shape, weights, sequences, positions):
        self.shape, self.sequences = shape, sequences
        first_routed = shape.layers - shape.routed
        self.layers = [make_layer(shape, weights, index >= first_routed) for index in range(shape.layers)]
        self.embedding = random_weight(shape.vocabulary, shape.width)
        self.norm = ones(shape.width)
        # bitsandbytes packs the head too; a tied one then lies in memory twice, as in its own models.
        plain = shape.tied and weights == "bf16"
        self.head = Matrix(self.embedding, None) if plain else matrix(shape.vocabulary, shape.width, weights)
        cache = (sequences, shape.kv_heads, positions, shape.head_width)
        self.caches = [(random_weight(*cache), random_weight(*cache)) for _ in self.layers]
        half = torch.arange(0, shape.head_width, 2, device=measure.device()).float()
        self.inverse = shape.theta ** (-half / shape.head_width)
        self.places = torch.arange(positions, device=measure.device())
        self.token = torch.randint(0, shape.vocabulary, (sequences,), device=measure.device())
        self.position = torch.zeros(1, dtype=torch.long, device=measure.device())

    def functions(self, attention):
        """First part, layer and last part of a step."""
        shape = self.shape

        def first(token, position, embedding, inverse, places):
            phase = position.float() * inverse
            mask = torch.where(places <= position, 0.0, float("-inf")).to(torch.bfloat16)[None, None, None]
            return embedding[token], phase.cos().to(torch.bfloat16), phase.sin().to(torch.bfloat16), mask

        def last(x, added, norm, head):
            y = F.rms_norm(x + added, (shape.width,), norm, EPSILON)
            return linear(y, head, shape.vocabulary).argmax(-1)

        return first, layer_function(shape, attention), last

    def step(self, first, layer, last):
        x, cos, sin, mask = first(self.token, self.position, self.embedding, self.inverse, self.places)
        added = torch.zeros_like(x)
        for weights, (keys, values) in zip(self.layers, self.caches):
            x, added = layer(x, added, self.position, cos, sin, mask, weights, keys, values)
        self.token.copy_(last(x, added, self.norm, self.head))
        self.position.add_(1)

    def measure(self, attention, compile_parts, tuned, prompt, new):
        """Tokens/s of each run of `new` steps after `prompt` positions."""
        torch._inductor.config.coordinate_descent_tuning = tuned
        parts = self.functions(attention)
        if compile_parts:
            parts = [measure.compiled(part) for part in parts]
        self.position.fill_(prompt)
        replay = measure.capture(lambda: self.step(*parts))

        def run():
            for _ in range(new):
                replay()

        times = measure.seconds(run, before=lambda: self.position.fill_(prompt))
        return [self.sequences * new / time for time in times]


def ways(decoder, weights, prompt, new):
    def way(attention, compile_parts=True, tuned=False):
        return lambda: decoder.measure(attention, compile_parts, tuned, prompt, new)

    found = {"compiled, attention in one call": way("one call"), "compiled, attention by products": way("products")}
    if weights == "bf16" and decoder.sequences == 1:
        found["compiled and tuned, attention by products"] = way("products", tuned=True)
    if weights == "nf4":
        found["eager"] = way("one call", compile_parts=False)
    return found


def run_case(case, prompt, new, as_json):
    _, name, weights, sequences = case.split("-")
    if weights == "nf4":
        try:
            import bitsandbytes
        except ImportError:
            measure.say(f"{case}: skipped, bitsandbytes is not installed")
            return
        program, version = "bitsandbytes NF4", f"{bitsandbytes.__version__}, PyTorch {torch.__version__}"
    else:
        program, version = "PyTorch bf16", torch.__version__
    torch.manual_seed(0)
    with torch.no_grad():
        decoder = Decoder(SHAPES[name], weights, int(sequences), prompt + new)
    held = torch.cuda.memory_allocated() / 2**20
    values, way, notes = measure.best_of(ways(decoder, weights, prompt, new))
    if values is None:
        measure.say(f"{case}: every way failed")
        return
    notes = f"{notes}; weights and cache {held:.0f} MiB"
    measure.report(as_json, f"{program}, {way}, CUDA graph", case, values, "tokens/s", notes, version)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--cases", default=DEFAULT, help=f"of {', '.join(KNOWN)}")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    arguments = parser.parse_args()
    cases = measure.chosen_cases(parser, arguments.cases, KNOWN)
    measure.needs_cuda()
    for case in cases:
        run_case(case, arguments.prompt, arguments.new, arguments.json)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
