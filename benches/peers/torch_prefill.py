#!/usr/bin/env python3
"""A prompt in PyTorch: tokens/s of one pass over it, random weights of the Qwen2.5-3B shape in bf16.

    python3 torch_prefill.py [--json] [--lengths 512,4096]

The whole pass: embedding, layers, keys and values written to a cache, head and argmax of the last position. Benchmarks
`prefill-3b-bf16-LENGTH`. Tried are eager parts and parts compiled by Inductor, attention by the flash kernel and by cuDNN's,
each captured as one CUDA graph so that the host is out of the way; the best counts. About a minute on an H200.
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

EPSILON = 1e-6
NAME = "3b"


class Layer(NamedTuple):
    norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    out: torch.Tensor
    feed_forward_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def make_layer(shape):
    return Layer(
        norm=ones(shape.width),
        qkv=random_weight(shape.qkv, shape.width),
        qkv_bias=random_weight(shape.qkv),
        out=random_weight(shape.width, shape.heads * shape.head_width),
        feed_forward_norm=ones(shape.width),
        gate_up=random_weight(2 * shape.inner, shape.width),
        down=random_weight(shape.width, shape.inner),
    )


def layer_function(shape):
    """x [n, width] and what the layer before adds to it -> the same of this layer. Keys and values go to the cache."""
    heads, kv_heads, head_width = shape.heads, shape.kv_heads, shape.head_width

    def turn(x, cos, sin):
        low, high = x.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def run(x, added, cos, sin, layer, keys, values):
        n = x.shape[0]
        x = x + added
        y = F.linear(F.rms_norm(x, (shape.width,), layer.norm, EPSILON), layer.qkv, layer.qkv_bias)
        q, k, v = y.view(n, heads + 2 * kv_heads, head_width).split([heads, kv_heads, kv_heads], 1)
        q, k, v = turn(q, cos, sin).transpose(0, 1), turn(k, cos, sin).transpose(0, 1), v.transpose(0, 1)
        keys.copy_(k)
        values.copy_(v)
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
        x = x + F.linear(mixed[0].transpose(0, 1).reshape(n, heads * head_width), layer.out)
        gate, up = F.linear(F.rms_norm(x, (shape.width,), layer.feed_forward_norm, EPSILON), layer.gate_up).chunk(2, -1)
        return x, F.linear(F.silu(gate) * up, layer.down)

    return run


class Prompt:
    """Weights, a prompt of `length` and its cache."""

    def __init__(self, shape, layers, embedding, length):
        self.shape, self.layers, self.embedding, self.length = shape, layers, embedding, length
        self.norm = ones(shape.width)
        cache = (shape.kv_heads, length, shape.head_width)
        self.caches = [(random_weight(*cache), random_weight(*cache)) for _ in layers]
        half = torch.arange(0, shape.head_width, 2, device=measure.device()).float()
        phase = torch.arange(length, device=measure.device()).float()[:, None] * shape.theta ** (-half / shape.head_width)
        self.cos, self.sin = phase.cos().to(torch.bfloat16)[:, None], phase.sin().to(torch.bfloat16)[:, None]
        self.ids = torch.randint(0, shape.vocabulary, (length,), device=measure.device())

    def run(self, layer, last):
        x = self.embedding[self.ids]
        added = torch.zeros_like(x)
        for weights, (keys, values) in zip(self.layers, self.caches):
            x, added = layer(x, added, self.cos, self.sin, weights, keys, values)
        return last(x, added, self.norm, self.embedding)

    def measure(self, compile_parts, cudnn):
        """Tokens/s of each pass. Which attention kernel runs is a setting of the whole process."""
        torch.backends.cuda.enable_flash_sdp(not cudnn)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_math_sdp(False)

        def last(x, added, norm, head):
            y = F.rms_norm(x[-1:] + added[-1:], (self.shape.width,), norm, EPSILON)
            return F.linear(y, head).argmax(-1)

        parts = [layer_function(self.shape), last]
        if compile_parts:
            parts = [measure.compiled(part) for part in parts]
        replay = measure.capture(lambda: self.run(*parts))
        # Several passes a measurement: one of 512 positions is a few milliseconds.
        passes = max(1, 8192 // self.length)

        def run():
            for _ in range(passes):
                replay()

        return [passes * self.length / time for time in measure.seconds(run)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--lengths", default="512,4096", help="lengths of prompts, with commas between")
    arguments = parser.parse_args()
    try:
        lengths = [int(length) for length in arguments.lengths.split(",")]
    except ValueError:
        parser.error(f"--lengths is a list of numbers such as 512,4096, not {arguments.lengths}")
    measure.needs_cuda()
    torch.manual_seed(0)
    shape = SHAPES[NAME]
    with torch.no_grad():
        layers = [make_layer(shape) for _ in range(shape.layers)]
        embedding = random_weight(shape.vocabulary, shape.width)
    for length in lengths:
        with torch.no_grad():
            prompt = Prompt(shape, layers, embedding, length)
        ways = {
            "compiled, flash attention": lambda: prompt.measure(compile_parts=True, cudnn=False),
            "compiled, cuDNN attention": lambda: prompt.measure(compile_parts=True, cudnn=True),
            "eager, flash attention": lambda: prompt.measure(compile_parts=False, cudnn=False),
        }
        values, way, notes = measure.best_of(ways)
        bench = f"prefill-{NAME}-bf16-{length}"
        if values is None:
            measure.say(f"{bench}: every way failed")
            continue
        measure.report(arguments.json, f"PyTorch bf16, {way}, CUDA graph", bench, values, "tokens/s", notes)


if __name__ == "__main__":
    main()
