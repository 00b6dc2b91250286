"""Train a character transformer with data, tensor and pipeline parallelism; the same file runs in one process.

python examples/hybrid.py
unisono run -n 4 examples/hybrid.py --tensor 2
unisono run -n 8 examples/hybrid.py --tensor 2 --pipeline 2 --strategy "powersgd(rank=4)"
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import unisono as un


class Transformer(nn.Module):
    def __init__(self, letters: int, width: int, length: int, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, letters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:  # (batch, time) to (batch, time, letters)
        past = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.head(self.blocks(self.embed(text) + self.position, past, is_causal=True))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--pipeline", type=int, default=1, help="ranks that share the layers")
    parser.add_argument("--strategy", default="allreduce", help="what the data axis exchanges, and when")
    parser.add_argument("--schedule", default="1F1B", help="of the pipeline's microbatches")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences of one step, over the data axis")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=32, help="characters of a sequence")
    parser.add_argument("--checkpoint", help="a folder to save to and resume from")
    args = parser.parse_args()

    mesh = un.mesh(tensor=args.tensor, pipeline=args.pipeline)  # the data axis has the ranks that remain
    source = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))[:400_000]
    letters, text = torch.tensor(list(source)).unique(return_inverse=True)
    rows = text[: len(text) // (args.length + 1) * (args.length + 1)].view(-1, args.length + 1)
    batches = un.shard(rows, batch_size=args.batch_size, world=mesh.data)

    torch.manual_seed(0)
    model = Transformer(len(letters), args.width, args.length)
    example = rows[: args.batch_size // mesh.data.size // 4, :-1]  # a microbatch
    pipe = mesh.pipe(model, example, loss_of, microbatches=4, schedule=args.schedule)
    optimizer = torch.optim.AdamW(pipe.module.parameters(), lr=2e-3)
    replica = un.parallel(pipe.module, optimizer, args.strategy, world=mesh.data)
    if args.checkpoint and Path(args.checkpoint).exists():
        un.load(args.checkpoint, replica)

    for batch in batches.steps(args.steps):
        optimizer.zero_grad()
        loss = pipe.step(batch[:, :-1], batch[:, 1:])
        mesh.clip_grad_norm_(pipe.module.parameters(), 1.0)
        optimizer.step()
    if args.checkpoint:
        un.save(args.checkpoint, replica)
    mesh.data.all_reduce(loss, "mean").wait()
    if mesh.world.rank == 0:
        print(f"{mesh}: final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
