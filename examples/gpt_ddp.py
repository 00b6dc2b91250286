"""Train a small GPT with DistributedDataParallel, as nanoGPT does, in plain PyTorch; one word selects our backend.

torchrun --nproc-per-node 2 examples/gpt_ddp.py            # gloo
torchrun --nproc-per-node 2 examples/gpt_ddp.py unisono    # our backend
"""

import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

backend = sys.argv[1] if len(sys.argv) > 1 else "gloo"
steps, batch_size, block, width, heads, layers = 30, 8, 64, 64, 4, 2
learning_rate, accumulate, clip = 1e-3, 2, 1.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, heads, -1).transpose(1, 2) for y in self.attend(self.norms[0](x)).split(width, 2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, width)
        x = x + self.project(seen)
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(letters, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*[Block() for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen = self.blocks(self.token(x) + self.place(torch.arange(x.shape[1])))
        return F.cross_entropy(self.head(self.norm(seen)).flatten(0, 1), y.flatten())


def main() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1337 + rank)
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    letters, text = torch.tensor(list(b"".join(f.read_bytes() for f in files)[:300_000])).unique(return_inverse=True)
    generator = torch.Generator().manual_seed(rank)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - block - 1, (batch_size,), generator=generator).tolist()
        rows = torch.stack([text[s : s + block + 1] for s in starts])
        return rows[:, :-1], rows[:, 1:]

    model = DistributedDataParallel(GPT(len(letters)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 5) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for micro in range(accumulate):
            model.require_backward_grad_sync = micro == accumulate - 1
            loss = model(*batch()) / accumulate
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    total = loss.detach() * accumulate / size
    dist.all_reduce(total)
    if rank == 0:
        print(f"{backend}: final loss {total.item():.4f}")


if __name__ == "__main__":
    dist.init_process_group(backend)
    main()
    dist.destroy_process_group()
