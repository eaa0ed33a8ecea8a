"""Writes tests/golden/quant/: packed blocks with the values other implementations read from them.

    python -m venv venv && venv/bin/pip install numpy==2.4.6 gguf==0.19.0 llama-cpp-python==0.3.36
    venv/bin/python tests/golden/quant.py

`read/TYPE.packed` holds blocks of random bits with sane scales and `read/TYPE.f32` what the gguf package's numpy code
dequantizes them to. `pack/values.f32` holds weights of several distributions and `pack/TYPE.packed` what ggml's C code
(`ggml_quantize_chunk`, inside llama-cpp-python) packs them into; `pack/numpy-TYPE.packed` is the gguf package's version,
for the types it can pack. `rows/NAME.codes`, `.absmax` and `.f32` are int4 and NF4 of the first 4000 weights as 40 rows of
100, with the NF4 levels computed from quantiles as the QLoRA paper builds them. All little endian. llama-cpp-python may live in another environment: give its site-packages
folder as the only argument.
"""

import ctypes
import pathlib
import statistics
import sys

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

HERE = pathlib.Path(__file__).parent / "quant"
TYPES = gguf.GGMLQuantizationType
READ = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K".split()
NUMPY_PACKS = "BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0".split()
GGML_PACKS = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q6_K".split()
# Byte offsets of the FP16 factors of a block: random bits there would often be infinite.
FACTORS = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}


def random_blocks(name, rng):
    block, size = gguf.GGML_QUANT_SIZES[TYPES[name]]
    if block == 1:
        values = rng.standard_normal(1024).astype(np.float32)
        if name == "F16":
            # Every FP16 exponent, subnormals and both zeros among them.
            bits = rng.integers(0, 0x7C00, 1024).astype(np.uint16) | (rng.integers(0, 2, 1024) << 15).astype(np.uint16)
            bits[:4] = [0x0000, 0x8000, 0x0001, 0x83FF]
            return bits.view(np.uint8)
        if name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.view(np.uint8)
    blocks = rng.integers(0, 256, (8192 // block, size), dtype=np.uint8)
    for offset in FACTORS[name]:
        factors = (rng.standard_normal(len(blocks)) * 10.0 ** rng.uniform(-4, 1, len(blocks))).astype(np.float16)
        factors[:3] = [0.0, -0.0, 6e-8]
        blocks[:, offset:offset + 2] = factors.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def weights(rng):
    """16384 weights: blocks of normals, Laplace, shifted normals, outliers, one sign, and odd cases."""
    values = np.concatenate([
        rng.standard_normal(8192),
        rng.laplace(0.0, 0.02, 4096),
        rng.normal(0.5, 0.3, 1024),
        rng.standard_normal(1024) * np.where(rng.uniform(size=1024) < 0.01, 20.0, 0.05),
        np.abs(rng.standard_normal(512)),
        -np.abs(rng.standard_normal(512)),
        np.zeros(256),
        np.full(256, 0.3),
        np.full(256, -0.7),
        rng.uniform(-1e-6, 1e-6, 256),
    ])
    return values.astype(np.float32)


def code_book(name):
    """Sixteen levels: sevenths, or quantiles of a normal distribution, seven below zero and eight above."""
    if name == "int4":
        return (np.arange(16) - 8) / 7.0
    quantile = statistics.NormalDist().inv_cdf
    outermost = 0.9677083
    below = [-quantile(outermost + (0.5 - outermost) * i / 7) for i in range(7)]
    above = [quantile(outermost + (0.5 - outermost) * i / 8) for i in range(8)]
    return np.array(sorted(below + [0.0] + above)) / quantile(outermost)


def pack_blocks_of_64(name, rows):
    """Codes [rows, blocks, 32], absmax [rows, blocks] and the values read back [rows, columns]."""
    count, columns = rows.shape
    padded = np.pad(rows, ((0, 0), (0, -columns % 64))).reshape(count, -1, 64)
    absmax = np.abs(padded).max(axis=2, keepdims=True)
    levels = code_book(name)
    codes = np.abs((padded / absmax)[..., None] - levels).argmin(axis=-1).astype(np.uint8)
    read = (levels[codes] * absmax).reshape(count, -1)[:, :columns]
    return codes[..., :32] | codes[..., 32:] << 4, absmax[..., 0], read.astype(np.float32)


def ggml_library(site_packages):
    """ggml's shared library out of llama-cpp-python, without starting llama.cpp."""
    lib = ctypes.CDLL(str(site_packages / "llama_cpp/lib/libggml-base.so"))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    return lib


def ggml_pack(lib, name, values):
    block, size = gguf.GGML_QUANT_SIZES[TYPES[name]]
    packed = np.zeros(values.size // block * size, dtype=np.uint8)
    lib.ggml_quantize_chunk(TYPES[name].value, values.ctypes.data, packed.ctypes.data, 0, values.size // 256, 256, None)
    return packed


def main():
    site_packages = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else np.__path__[0] + "/..")
    for folder in ("read", "pack", "rows"):
        (HERE / folder).mkdir(parents=True, exist_ok=True)
    rng = np.random.Generator(np.random.PCG64(20260))
    for name in READ:
        packed = random_blocks(name, rng)
        packed.tofile(HERE / "read" / f"{name}.packed")
        dequantize(packed, TYPES[name]).astype("<f4").tofile(HERE / "read" / f"{name}.f32")
    values = weights(rng)
    values.tofile(HERE / "pack/values.f32")
    for name in ("int4", "nf4"):
        codes, absmax, read = pack_blocks_of_64(name, values[:4000].reshape(40, 100))
        codes.tofile(HERE / "rows" / f"{name}.codes")
        absmax.tofile(HERE / "rows" / f"{name}.absmax")
        read.tofile(HERE / "rows" / f"{name}.f32")
    for name in NUMPY_PACKS:
        quantize(values, TYPES[name]).tofile(HERE / "pack" / f"numpy-{name}.packed")
    lib = ggml_library(site_packages)
    for name in GGML_PACKS:
        packed = ggml_pack(lib, name, values)
        packed.tofile(HERE / "pack" / f"{name}.packed")
        error = dequantize(packed, TYPES[name]) - values
        print(f"{name}: ggml's RMS error {np.sqrt(np.mean(error.astype(np.float64) ** 2)):.6f}")


if __name__ == "__main__":
    main()
