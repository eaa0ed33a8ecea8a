"""What the PyTorch peers share: the shapes that are measured, steps as CUDA graphs, timing, and the lines they print.

A peer prints one JSON object a line with `--json`, in the form of `llama_cpp.py`, its figures named as our benchmarks are:

    {"name": "PyTorch bf16, compiled", "version": "2.11.0+cu130", "device": "NVIDIA H200",
     "figures": {"decode-3b-bf16-1": {"values": [...], "best": 0.0, "mean": 0.0}}, "unit": "tokens/s", "notes": "..."}

What is compared with us should be PyTorch at its best, so a peer tries several ways and reports the best; the others are in
`notes`. The parts of a model are functions of tensors, not modules: one compilation then serves every layer, which takes
seconds where compiling a whole model takes a minute, and the step that calls them is captured as one CUDA graph, so that
the host is out of the way as in the mode "reduce-overhead".
"""

import json
import sys
import time
from dataclasses import dataclass

import torch

RUNS = 5


@dataclass(frozen=True)
class Shape:
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    tied: bool
    biased: bool  # q, k and v have a bias
    theta: float = 1e6
    # Of routed layers: how many of the layers there are (the last ones), and their experts. The shared expert has no gate.
    routed: int = 0
    experts: int = 0
    chosen: int = 0
    expert_inner: int = 0

    @property
    def qkv(self):
        return (self.heads + 2 * self.kv_heads) * self.head_width


SHAPES = {
    "3b": Shape(151936, 2048, 36, 16, 2, 128, 11008, tied=True, biased=True),
    "14b": Shape(152064, 5120, 48, 40, 8, 128, 13824, tied=False, biased=True),
    "moe55m": Shape(
        32000, 512, 8, 8, 2, 64, 1408, tied=True, biased=False, theta=1e4, routed=6, experts=8, chosen=2, expert_inner=352
    ),
}


def random_weight(*shape, scale=0.02):
    return torch.empty(shape, dtype=torch.bfloat16, device=device()).normal_(0.0, scale)


def ones(*shape):
    return torch.ones(shape, dtype=torch.bfloat16, device=device())


def device():
    return torch.device("cuda")


def compiled(function):
    return torch.compile(function, fullgraph=True, dynamic=False)


def capture(step):
    """A function that replays `step` as one CUDA graph. The step may touch only tensors that stay where they are."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds(run, before=lambda: None, runs=RUNS):
    """How long each of `runs` calls of `run` took to its end on the device, after one that isn't counted."""
    times = []
    for _ in range(runs + 1):
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[1:]


def best_of(ways):
    """(values, name) of the best of `{name: function that gives values, the higher the better}`, and notes on the others.

    A way that fails is said and left out: not every version of PyTorch has every kernel.
    """
    found, notes = [], []
    for name, measure in ways.items():
        try:
            torch._dynamo.reset()
            with torch.no_grad():
                values = measure()
        except Exception as error:
            notes.append(f"{name}: failed, {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}")
            say(notes[-1])
        else:
            notes.append(f"{name}: {max(values):.5g}")
            say(notes[-1])
            found.append((values, name))
        torch.cuda.empty_cache()
    if not found:
        return None, None, "; ".join(notes)
    values, name = max(found, key=lambda way: max(way[0]))
    return values, name, "; ".join(notes)


def report(as_json, name, bench, values, unit, notes="", version=torch.__version__, **more):
    figure = {"values": values, "best": max(values), "mean": sum(values) / len(values)} | more
    line = {
        "name": name,
        "version": version,
        "device": torch.cuda.get_device_name(),
        "figures": {bench: figure},
        "unit": unit,
        "notes": notes,
    }
    print(json.dumps(line) if as_json else f"{bench}: {name}, {figure['best']:.5g} {unit} ({notes})", flush=True)


def chosen_cases(parser, named, known):
    """The cases of a comma-separated list, or an error that names those there are."""
    cases = [case.strip() for case in named.split(",") if case.strip()]
    for case in cases:
        if case not in known:
            parser.error(f"no case {case}; there are: {', '.join(known)}")
    return cases


def needs_cuda():
    if not torch.cuda.is_available():
        sys.exit("PyTorch sees no CUDA device: this peer runs on a machine with one")


def say(text):
    print(text, file=sys.stderr, flush=True)
