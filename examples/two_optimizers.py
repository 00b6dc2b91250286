"""Train a small GPT with two optimizers, like nanochat: Muon for the hidden matrices, AdamW for the rest.

python examples/two_optimizers.py --text book.txt
unisono run -n 2 examples/two_optimizers.py
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unisono as un


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        q, k, v = self.qkv(F.rms_norm(x, x.shape[-1:])).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(F.rms_norm(x, x.shape[-1:]))).square())


class GPT(nn.Module):
    def __init__(self, width: int, length: int, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:  # the loss of each next byte
        x = self.embed(text[:, :-1]) + self.position.weight[: text.shape[1] - 1]
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", help="a text file (default: a part of the standard library's sources)")
    parser.add_argument("--strategy", default="allreduce", help="what workers exchange, and when")
    for name, value in (("steps", 150), ("batch-size", 32), ("length", 64), ("width", 128), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()

    world = un.join()
    torch.manual_seed(args.seed)
    files = [Path(args.text)] if args.text else sorted(Path(os.__file__).parent.glob("*.py"))
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)[:1_000_000]))
    rows = text[: len(text) // args.length * args.length].view(-1, args.length)
    held_out, rows = rows[::100], rows[torch.arange(len(rows)) % 100 != 0]

    model = GPT(args.width, args.length).to(world.device)
    hidden = list(model.blocks.parameters())
    rest = [*model.embed.parameters(), *model.position.parameters(), *model.head.parameters()]
    optimizers = [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=3e-3)]
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=args.steps) for o in optimizers]
    un.parallel(model, optimizers, args.strategy)

    for batch in un.shard(rows, batch_size=args.batch_size, seed=args.seed).steps(args.steps):
        model(batch).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    with torch.no_grad():
        loss = model(held_out.to(world.device))
    if world.rank == 0:
        print(f"final loss {loss.item():.6f} nats a byte, on {held_out.numel()} held out")


if __name__ == "__main__":
    main()
