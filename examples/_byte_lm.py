"""A small byte-level language model whose blocks hold three dtypes side by side."""

import pydoc_data.topics
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn, Tensor


VOCABULARY = 256  # one token per byte
DIM = 128
HEADS = 16
BLOCKS = 3
SEQUENCE_LENGTH = 128


class Block(nn.Module):
    """A gated linear recurrence, then an MLP, both on a residual stream in fp32.

    The dtypes are those of the Mamba family's checkpoints: large matrices in bf16,
    and what is small but sensitive, norm gains and the decay ``A_log``, in fp32.
    ``A_log`` is a bare parameter: no wrapping by submodule can set it apart from the
    matrices beside it. The projection that says how strongly each head writes is in
    fp16, so that one block holds three dtypes.
    """

    def __init__(self) -> None:
        super().__init__()
        bf16, fp16 = torch.bfloat16, torch.float16
        self.norm = nn.RMSNorm(DIM)
        self.in_proj = nn.Linear(DIM, 2 * DIM, bias=False, dtype=bf16)
        self.write_proj = nn.Linear(DIM, HEADS, bias=False, dtype=fp16)
        # From a memory of 50 tokens to one of hardly more than the current token.
        self.A_log = nn.Parameter(torch.linspace(-4.0, 1.5, HEADS))
        self.out_proj = nn.Linear(DIM, DIM, bias=False, dtype=bf16)
        self.mlp_norm = nn.RMSNorm(DIM)
        self.up_proj = nn.Linear(DIM, 2 * DIM, bias=False, dtype=bf16)
        self.down_proj = nn.Linear(2 * DIM, DIM, bias=False, dtype=bf16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(_apply(self.norm, x)).float()
        hidden = F.silu(_apply(self.up_proj, _apply(self.mlp_norm, x)))
        return x + _apply(self.down_proj, hidden).float()

    def mix(self, x: Tensor) -> Tensor:
        """Averages each head's past values, with weights that decay with age."""
        value, gate = _apply(self.in_proj, x).float().chunk(2, dim=-1)
        write = torch.sigmoid(_apply(self.write_proj, x).float())
        value = value.unflatten(-1, (HEADS, -1)) * write.unsqueeze(-1)
        weights = decay_weights(self.A_log, x.size(1)).float()
        mixed = torch.einsum("hts,bshd->bthd", weights, value).flatten(-2)
        return _apply(self.out_proj, mixed * F.silu(gate))


class ByteLM(nn.Module):
    """Predicts each byte of a text from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False, dtype=torch.bfloat16)
        nn.init.normal_(self.embedding.weight, std=0.1)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).float()
        for block in self.blocks:
            x = block(x)
        return _apply(self.head, _apply(self.norm, x)).float()


def decay_weights(A_log: Tensor, length: int) -> Tensor:
    """The recurrence ``y[t] = a * y[t-1] + (1 - a) * v[t]`` as one matrix per head.

    With ``a = exp(-exp(A_log))``, ``y = W @ v`` for the lower triangular
    ``W[t, s] = (1 - a) * a ** (t - s)``: one matrix product in place of a loop.
    """
    rate = A_log.exp().view(-1, 1, 1)
    position = torch.arange(length, device=A_log.device)
    age = position.unsqueeze(1) - position
    decay = torch.exp(-rate * age.clamp(min=0)).tril()
    return -torch.expm1(-rate) * decay


def text_batches(steps: int, batch_size: int) -> Iterator[Tensor]:
    """Yields the same ``steps`` global batches of tokens and the next to every caller.

    The text is the language reference that ``help()`` shows, and every CPython ships.
    """
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    windows = data.unfold(0, SEQUENCE_LENGTH + 1, 1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield windows[torch.randint(len(windows), (batch_size,), generator=generator)]


def _apply(layer: nn.Linear | nn.RMSNorm, x: Tensor) -> Tensor:
    """Applies ``layer`` in the dtype of its weight."""
    return layer(x.to(layer.weight.dtype))
