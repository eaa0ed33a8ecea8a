#!/usr/bin/env python3
"""Times llama.cpp on a GGUF file as llama-bench does, and prints one JSON object.

    python3 llama_cpp.py --model FILE.gguf [--threads N] [--repetitions 5]

The first run makes a virtual environment with llama-cpp-python, which compiles llama.cpp for this machine's own processor
(minutes); it is kept in target/peers/llama_cpp, or where IRONLOOM_PEER_VENV says. Only the C functions behind the
package are called, so no Python is inside the loops but one call per step.

Figures, all in tokens/s: `pp512` is a prompt of 512 random ids in one batch from an empty context; `tg128` is 128 steps of
one random id from an empty context. The last position's logits are computed, nothing is sampled, and one run of each is
not counted. Everything else is llama-bench's default: f16 keys and values, flash attention as the library decides.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
PROMPT = 512
NEW_TOKENS = 128
# How the library lays out weights. Repacked is its default; some virtual machines announce AMX, for which it then repacks,
# and trap its instructions, and there plain weights (with AVX-512 or AVX2) are what is left.
BUFFERS = ["repacked", "plain"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--measure-with", choices=BUFFERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    enter_environment()
    if arguments.measure_with:
        print(json.dumps(measure(arguments)))
        return
    for buffers in BUFFERS:
        report = subprocess.run([sys.executable, *sys.argv, "--measure-with", buffers], stdout=subprocess.PIPE)
        if report.returncode == 0:
            sys.stdout.buffer.write(report.stdout)
            return
        if report.returncode != -signal.SIGILL:
            sys.exit(f"the measurement failed ({report.returncode})")
        say(f"llama.cpp's {buffers} weights use an instruction that this machine announces and does not run")
    sys.exit("llama.cpp does not run on this machine")


def enter_environment():
    """Goes on as this script inside the environment that has the package, which is made where missing."""
    default = Path(__file__).resolve().parents[2] / "target" / "peers" / "llama_cpp"
    folder = Path(os.environ.get("IRONLOOM_PEER_VENV") or default)
    if Path(sys.prefix).resolve() == folder.resolve():
        return
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists() or not has_package(python):
        install(folder, python)
    os.execv(python, [str(python), *sys.argv])


def has_package(python):
    code = f"from importlib.metadata import version; raise SystemExit(version({PACKAGE!r}) != {VERSION!r})"
    return subprocess.run([python, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


def install(folder, python):
    say(f"building {PACKAGE} {VERSION} in {folder}: this takes minutes, once")
    run([sys.executable, "-m", "venv", folder])
    run([python, "-m", "pip", "install", "--quiet", "cmake", "ninja"])
    environment = dict(os.environ, CMAKE_ARGS="-DGGML_NATIVE=ON", PATH=f"{python.parent}{os.pathsep}{os.environ['PATH']}")
    # Always built here: a ready-made one would not use all of this processor's instructions.
    run([python, "-m", "pip", "install", "--quiet", "--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}"], environment)


def run(command, environment=None):
    # What pip prints belongs on the error stream: the output is the report alone.
    if subprocess.run(command, env=environment, stdout=sys.stderr).returncode != 0:
        sys.exit(f"failed: {' '.join(map(str, command))}")


def measure(arguments):
    path, threads, repetitions = arguments.model, arguments.threads, arguments.repetitions
    # This script has the package's name, and its folder comes first on the path.
    here = Path(__file__).resolve().parent
    sys.path = [place for place in sys.path if Path(place).resolve() != here]
    # The module of C functions, inside the package of that name.
    from llama_cpp import llama_cpp

    silence = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silence, None)
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.use_extra_bufts = arguments.measure_with == "repacked"
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        sys.exit(f"llama.cpp cannot load {path}")
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    figures = {
        "pp512": figure(llama_cpp, model, threads, repetitions, [random_ids(vocabulary, PROMPT)]),
        "tg128": figure(llama_cpp, model, threads, repetitions, [random_ids(vocabulary, 1) for _ in range(NEW_TOKENS)]),
    }
    llama_cpp.llama_model_free(model)
    return {
        "name": "llama.cpp",
        "version": f"{PACKAGE} {VERSION}",
        "model": path.name,
        "threads": threads,
        "weights": arguments.measure_with,
        "system": llama_cpp.llama_print_system_info().decode(errors="replace").strip(),
        "figures": figures,
    }


def figure(llama_cpp, model, threads, repetitions, batches):
    """Tokens/s of decoding the batches in order from an empty context, `repetitions` times after one that isn't counted."""
    tokens = sum(map(len, batches))
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = tokens
    parameters.n_batch = max(tokens, 512)
    parameters.n_ubatch = 512
    parameters.n_threads = parameters.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        sys.exit("llama.cpp makes no context")
    arrays = [(llama_cpp.llama_token * len(batch))(*batch) for batch in batches]
    values = []
    for _ in range(repetitions + 1):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        start = time.perf_counter()
        for array in arrays:
            if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(array))) != 0:
                sys.exit("llama_decode failed")
            llama_cpp.llama_synchronize(context)
        values.append(tokens / (time.perf_counter() - start))
    llama_cpp.llama_free(context)
    values = values[1:]
    return {"values": values, "best": max(values), "mean": sum(values) / len(values)}


def random_ids(vocabulary, count):
    generator = random.Random(29)
    return [generator.randrange(vocabulary) for _ in range(count)]


def say(text):
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
