"""A Llama of 0.3 M parameters: RMSNorm, rotary attention with grouped keys, SwiGLU, untied embeddings and output.

Its dims are uneven on purpose: 97 features, 171 FFN rows and 257 tokens divide by no world size. Only the heads do.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_LAYERS, DIM, FFN_DIM, VOCAB = 3, 97, 171, 257
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(DIM, NUM_HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(DIM, NUM_KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(DIM, NUM_KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(NUM_HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # -1 heads: all of them, or under TP those of this rank.
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.wo(attended.transpose(1, 2).flatten(2))


def rotate(heads: Tensor) -> Tensor:
    """Rotary position embedding of queries or keys, shaped (batch, heads, positions, HEAD_DIM)."""
    frequencies = 10_000 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(heads.shape[-2]), frequencies)
    pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, FFN_DIM, bias=False)
        self.w2 = nn.Linear(FFN_DIM, DIM, bias=False)
        self.w3 = nn.Linear(DIM, FFN_DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(DIM), Attention()
        self.ffn_norm, self.ffn = nn.RMSNorm(DIM), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class TinyLlama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor, *, targets: Tensor) -> Tensor:
        """Mean loss of the next token. Both arguments are int64, shaped (batch, positions)."""
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
