"""Train a character LSTM to continue a text, by default the sources of Python's standard library.

python examples/char_rnn.py --text book.txt
unisono run -n 2 examples/char_rnn.py
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import unisono as un


def read(path: str | None, limit: int = 1_000_000) -> bytes:
    """The bytes of the file at ``path``, or of the standard library's top modules in alphabetical order."""
    files = [Path(path)] if path else sorted(Path(os.__file__).parent.glob("*.py"))
    return b"".join(file.read_bytes() for file in files)[:limit]


class CharLSTM(nn.Module):
    def __init__(self, letters: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, letters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:  # (batch, time) to (batch, time, letters)
        return self.head(self.lstm(self.embed(text))[0])


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", help="a text file (default: the standard library's sources)")
    parser.add_argument("--strategy", default="allreduce", help="what workers exchange, and when")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=32, help="sequences of one step, over all workers")
    parser.add_argument("--length", type=int, default=64, help="characters of a sequence")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    world = un.join()
    torch.manual_seed(args.seed)
    letters, text = torch.tensor(list(read(args.text))).unique(return_inverse=True)
    rows = text[: len(text) // args.length * args.length].view(-1, args.length)
    held_out, rows = rows[::100], rows[torch.arange(len(rows)) % 100 != 0]
    model = CharLSTM(len(letters), args.width).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    un.parallel(model, optimizer, args.strategy)
    shard = un.shard(rows, batch_size=args.batch_size, seed=args.seed)

    for batch in shard.steps(args.steps):  # epoch after epoch
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        loss = loss_of(model, held_out.to(world.device))
    if world.rank == 0:
        print(f"final loss {loss.item():.6f} nats a character, on {held_out.numel()} held out")


if __name__ == "__main__":
    main()
