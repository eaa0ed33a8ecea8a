"""Plain PyTorch references for the models that transformers has no class for.

InternLM2 keeps its model code beside its checkpoints, and `ironloom_moe` / `ironloom_dense` are this project's own. Both
are the pre-norm decoder written out below, in float32, without a cache: what is computed is meant to be read at a glance.

    h_0     = embedding[ids]
    h'      = h + attention(rmsnorm(h))
    h_(l+1) = h' + feed_forward(rmsnorm(h'))
    logits  = head(rmsnorm(h_L))

RoPE turns element i of a head with element i + head_dim / 2 (the layout of Hugging Face checkpoints), scores are scaled by
1 / sqrt(head_dim) and masked causally, and query head h reads key/value head h // (heads / kv_heads).
Parameters carry the names of the checkpoint, so that `state_dict()` is the file.
"""

import torch
from torch import nn
from torch.nn import functional as F


class RmsNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rope(x, theta):
    """x: [heads, positions, head_dim] -> the same, each pair (i, i + head_dim / 2) turned by position * theta^(-2i/head_dim)."""
    half = x.shape[-1] // 2
    inverse_frequency = 1.0 / theta ** (torch.arange(half, dtype=torch.float32) * 2 / x.shape[-1])
    phase = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * inverse_frequency[None, :]
    cos, sin = phase.cos().to(x.dtype), phase.sin().to(x.dtype)
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def causal_attention(q, k, v, theta):
    """q: [heads, n, d]; k, v: [kv_heads, n, d] -> [n, heads * d]."""
    group = q.shape[0] // k.shape[0]
    q, k = rope(q, theta), rope(k, theta)
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
    return (probabilities @ v).transpose(0, 1).reshape(q.shape[1], -1)


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


# --- InternLM2 ----------------------------------------------------------------------------------------------------------


class InternLm2Attention(nn.Module):
    """q, k and v in one matrix: for each key/value head its group of query heads, then its key head, then its value head."""

    def __init__(self, config):
        super().__init__()
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["hidden_size"] // self.heads
        self.theta = config["rope_theta"]
        self.wqkv = linear(config["hidden_size"], (self.heads + 2 * self.kv_heads) * self.head_dim)
        self.wo = linear(self.heads * self.head_dim, config["hidden_size"])

    def forward(self, x):
        group = self.heads // self.kv_heads
        packed = self.wqkv(x).view(x.shape[0], self.kv_heads, group + 2, self.head_dim)
        q = packed[:, :, :group].reshape(x.shape[0], self.heads, self.head_dim)
        k, v = packed[:, :, group], packed[:, :, group + 1]
        return self.wo(causal_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), self.theta))


class InternLm2FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.w1 = linear(config["hidden_size"], config["intermediate_size"])
        self.w3 = linear(config["hidden_size"], config["intermediate_size"])
        self.w2 = linear(config["intermediate_size"], config["hidden_size"])

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class InternLm2Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = RmsNorm(config["hidden_size"], config["rms_norm_eps"])
        self.attention = InternLm2Attention(config)
        self.ffn_norm = RmsNorm(config["hidden_size"], config["rms_norm_eps"])
        self.feed_forward = InternLm2FeedForward(config)

    def forward(self, h):
        h = h + self.attention(self.attention_norm(h))
        return h + self.feed_forward(self.ffn_norm(h))


class InternLm2(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.model = nn.Module()
        self.model.tok_embeddings = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.model.layers = nn.ModuleList(InternLm2Block(config) for _ in range(config["num_hidden_layers"]))
        self.model.norm = RmsNorm(config["hidden_size"], config["rms_norm_eps"])
        self.output = linear(config["hidden_size"], config["vocab_size"])

    def forward(self, ids):
        h = self.model.tok_embeddings(ids)
        for layer in self.model.layers:
            h = layer(h)
        return self.output(self.model.norm(h))


# --- ironloom_moe and ironloom_dense --------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config["hidden_size"]
        self.heads, self.kv_heads, self.head_dim = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
        )
        self.theta = config["rope_theta"]
        self.q_proj = linear(width, self.heads * self.head_dim)
        self.k_proj = linear(width, self.kv_heads * self.head_dim)
        self.v_proj = linear(width, self.kv_heads * self.head_dim)
        self.o_proj = linear(self.heads * self.head_dim, width)

    def forward(self, x):
        n = x.shape[0]
        q = self.q_proj(x).view(n, self.heads, self.head_dim).transpose(0, 1)
        k = self.k_proj(x).view(n, self.kv_heads, self.head_dim).transpose(0, 1)
        v = self.v_proj(x).view(n, self.kv_heads, self.head_dim).transpose(0, 1)
        return self.o_proj(causal_attention(q, k, v, self.theta))


class SwiGlu(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj = linear(width, inner)
        self.up_proj = linear(width, inner)
        self.down_proj = linear(inner, width)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RoutedExperts(nn.Module):
    """y = shared(x) + sum over the chosen experts of p_e / (sum of the chosen p) * expert_e(x), p = softmax(router(x)).

    The softmax runs over all experts, the chosen are its `num_experts_per_tok` largest, and the shared expert has no gate.
    """

    def __init__(self, config):
        super().__init__()
        width = config["hidden_size"]
        self.chosen = config["num_experts_per_tok"]
        self.gate = linear(width, config["num_experts"])
        self.experts = nn.ModuleList(
            SwiGlu(width, config["moe_intermediate_size"]) for _ in range(config["num_experts"])
        )
        self.shared_expert = SwiGlu(width, config["shared_expert_intermediate_size"])

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(dim=-1).topk(self.chosen, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        routed = torch.stack(
            [
                sum(weight * self.experts[int(expert)](row) for weight, expert in zip(row_weights, row_chosen))
                for row, row_weights, row_chosen in zip(x, weights, chosen)
            ]
        )
        return self.shared_expert(x) + routed


class Block(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        dense = "num_experts" not in config or index in config["mlp_only_layers"]
        self.input_layernorm = RmsNorm(width, eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(width, eps)
        self.mlp = SwiGlu(width, config["intermediate_size"]) if dense else RoutedExperts(config)

    def forward(self, h):
        h = h + self.self_attn(self.input_layernorm(h))
        return h + self.mlp(self.post_attention_layernorm(h))


class Ironloom(nn.Module):
    """The head is the embedding: the models of this project are tied, and the file holds no `lm_head.weight`."""

    def __init__(self, config):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.model.layers = nn.ModuleList(Block(config, index) for index in range(config["num_hidden_layers"]))
        self.model.norm = RmsNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, ids):
        h = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            h = layer(h)
        return self.model.norm(h) @ self.model.embed_tokens.weight.T


def parameter_counts(config):
    """(all, active per token) of an `ironloom_*` configuration, counted without allocating it."""
    with torch.device("meta"):
        model = Ironloom(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(sizes.values())
    if "num_experts" not in config:
        return total, total
    experts = sum(size for name, size in sizes.items() if ".mlp.experts." in name)
    idle_share = (config["num_experts"] - config["num_experts_per_tok"]) / config["num_experts"]
    return total, total - round(experts * idle_share)


REFERENCES = {"internlm2": InternLm2, "ironloom_moe": Ironloom, "ironloom_dense": Ironloom}
