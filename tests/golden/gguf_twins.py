"""GGUF twins of the tiny checkpoints: the same weights in the layout that llama.cpp's converters give each family.

What changes on the way, besides names:
  llama, mixtral, internlm2   the rows of q and k are reordered within each head, from RoPE over halves (i, i + d/2) to RoPE
                              over neighbours (2i, 2i + 1); qwen* and gemma3 keep theirs
  internlm2                   the fused wqkv is taken apart
  gemma3                      1 is added to every norm weight
  mixtral, qwen*_moe          the experts of a layer become one tensor [experts, rows, columns]
  llama3 RoPE scaling         becomes a tensor `rope_freqs.weight` of divisors, one for each pair; no key tells of it
  YaRN, linear RoPE scaling   become `rope.scaling.*` keys

Shapes below are outermost first; the file stores them reversed. The tokenizer is byte-level: 256 bytes, 12 merges, 4
special tokens.
"""

import json
import math
import re

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "internlm2": "internlm2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
PRE_TOKENIZERS = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "qwen2", "qwen2_moe": "qwen2", "qwen3_moe": "qwen2"}
MERGES = ["Ġ t", "h e", "i n", "a n", "Ġt he", "e r", "o n", "r e", "Ġ a", "l l", "o u", "Ġ s"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.tok_embeddings.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "output.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "attention_norm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "attention.wo": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "ffn_norm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
EXPERT_PARTS = {
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}


def byte_alphabet():
    """GPT-2's visible character for each byte: itself where printable, else the next code point from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    characters, next_free = {}, 256
    for byte in range(256):
        if byte in printable:
            characters[byte] = chr(byte)
        else:
            characters[byte] = chr(next_free)
            next_free += 1
    return [characters[byte] for byte in range(256)]


def vocabulary():
    return byte_alphabet() + [merge.replace(" ", "") for merge in MERGES] + SPECIAL


def write_tokenizer(folder, config):
    """The twins' tokenizer as `tokenizer.json`, so that the folder answers to text as its GGUF twin does."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    words = vocabulary()[: 256 + len(MERGES)]
    model = models.BPE(
        vocab={word: index for index, word in enumerate(words)},
        merges=[tuple(merge.split(" ")) for merge in MERGES],
        ignore_merges=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[0],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": config["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def neighbours_from_halves(rows, heads):
    """Reorders the rows of each head: row i of its first half to 2i, row i of its second half to 2i + 1."""
    pairs = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def converted(config, state):
    """Hub tensors -> {GGUF name: array}."""
    family = config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    permuted = family in ("llama", "mixtral", "internlm2")
    arrays, experts = {}, {}
    for name, tensor in state.items():
        array = tensor.float().numpy()
        if family == "gemma3_text" and name.endswith("norm.weight"):
            array = array + np.float32(1.0)
        if name in NAMES:
            arrays[NAMES[name]] = array
            continue
        layer, part, suffix = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name).groups()
        if found := re.fullmatch(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)", part):
            experts.setdefault(f"blk.{layer}.{EXPERT_PARTS[found[2]]}.weight", {})[int(found[1])] = array
            continue
        if part == "attention.wqkv":
            group = heads // kv_heads
            packed = array.reshape(kv_heads, group + 2, config["hidden_size"] // heads, -1)
            columns = packed.shape[-1]
            arrays[f"blk.{layer}.attn_q.weight"] = neighbours_from_halves(packed[:, :group].reshape(-1, columns), heads)
            arrays[f"blk.{layer}.attn_k.weight"] = neighbours_from_halves(packed[:, group].reshape(-1, columns), kv_heads)
            arrays[f"blk.{layer}.attn_v.weight"] = packed[:, group + 1].reshape(-1, columns)
            continue
        if permuted and part.endswith("q_proj"):
            array = neighbours_from_halves(array, heads)
        if permuted and part.endswith("k_proj"):
            array = neighbours_from_halves(array, kv_heads)
        if part == "mlp.shared_expert_gate":
            array = array.reshape(-1)  # [1, hidden] in the checkpoint, a vector in the file
        target = LAYER_NAMES[part]
        if family == "gemma3_text" and part == "post_attention_layernorm":
            target = "post_attention_norm"  # after attention here; in every other family it stands before the feed-forward
        arrays[f"blk.{layer}.{target}.{suffix}"] = array
    for name, parts in experts.items():
        arrays[name] = np.stack([parts[index] for index in range(len(parts))])
    return arrays


def llama3_divisors(config):
    """By how much llama3 scaling divides each pair's frequency, as `rope_freqs.weight` holds it."""
    scaling = config["rope_scaling"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original = scaling["original_max_position_embeddings"]
    longest, shortest = original / scaling["low_freq_factor"], original / scaling["high_freq_factor"]
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * pair / head_dim)
        if wavelength < shortest:
            divisors.append(1.0)
        elif wavelength > longest:
            divisors.append(scaling["factor"])
        else:
            kept = (original / wavelength - scaling["low_freq_factor"]) / (
                scaling["high_freq_factor"] - scaling["low_freq_factor"]
            )
            divisors.append(1.0 / ((1.0 - kept) / scaling["factor"] + kept))
    return np.array(divisors, dtype=np.float32)


def add_settings(writer, config, file_type):
    family = config["model_type"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(f"tiny random {family}")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if ARCHITECTURES[family] == "llama":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(head_dim)
    if family == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def add_tokenizer(writer, config):
    words = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZERS.get(config["model_type"], "gpt-2"))
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(words) - len(SPECIAL)) + [gguf.TokenType.CONTROL] * len(SPECIAL))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(words.index(SPECIAL[0]))
    eos = config["eos_token_id"]
    writer.add_eos_token_id(eos[0] if isinstance(eos, list) else eos)
    writer.add_pad_token_id(words.index(SPECIAL[3]))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def stored_type(name, array, quantized):
    """The mixed file: embedding and attention in Q8_0, feed-forward and head in F16, vectors in F32."""
    if not quantized or array.ndim == 1:
        return Type.F32
    if name == "token_embd.weight" or ".attn_" in name:
        return Type.Q8_0
    return Type.F16


def write_twin(path, config, state, quantized=False):
    """Writes the twin. Returns the hub tensors as the file holds them, which differ from `state` only when packed."""
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]])
    add_settings(writer, config, gguf.LlamaFileType.MOSTLY_Q8_0 if quantized else gguf.LlamaFileType.ALL_F32)
    add_tokenizer(writer, config)
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config))
    for name, array in converted(config, state).items():
        kind = stored_type(name, array, quantized)
        packed = gguf.quants.quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if path.stat().st_size >= 1_000_000:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes; golden files stay under 1 MB")
    # Q8_0 blocks run along rows, so packing before or after the reordering of rows is the same.
    unpacked = {}
    for name, tensor in state.items():
        array = tensor.float().numpy()
        target = next(iter(converted(config, {name: tensor}))) if quantized else name
        kind = stored_type(target, array, quantized)
        unpacked[name] = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind).copy())
    return unpacked
