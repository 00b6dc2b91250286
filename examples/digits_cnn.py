"""Train a small CNN on scikit-learn's handwritten digits; each worker's batch has the class mix of the dataset.

python examples/digits_cnn.py            # one worker
unisono run -n 2 examples/digits_cnn.py  # two local workers; the same losses up to rounding
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import unisono as un


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    raw = load_digits()
    images = torch.tensor(raw.data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return images, torch.tensor(raw.target)


def cnn(width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(2 * width * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def evaluate(model: nn.Module, x: torch.Tensor, y: torch.Tensor, world: un.World) -> tuple[float, float]:
    """Loss and accuracy over all workers: each scores its own stride of the samples."""
    mine = slice(world.rank, None, world.size)
    with torch.no_grad():
        scores, target = model(x[mine].to(world.device)), y[mine].to(world.device)
        loss = F.cross_entropy(scores, target, reduction="sum")
        sums = torch.stack([loss, (scores.argmax(1) == target).sum()]).double()
    loss, correct = (world.all_reduce(sums, "sum").wait() / len(y)).tolist()
    return loss, correct


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="allreduce", help="what workers exchange, and when")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=128, help="samples of one step, over all workers")
    parser.add_argument("--width", type=int, default=32, help="channels of the first layer")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    world = un.join()
    torch.manual_seed(args.seed)
    x, y = digits()
    test = torch.arange(len(y)) % 6 == 0
    model = cnn(args.width).to(world.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    un.parallel(model, optimizer, args.strategy)
    shard = un.shard((x[~test], y[~test]), batch_size=args.batch_size, stratify=y[~test], seed=args.seed)

    for images, labels in shard.steps(args.steps):  # epoch after epoch
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    loss, accuracy = evaluate(model, x[test], y[test], world)
    if world.rank == 0:
        print(f"final loss {loss:.6f}, accuracy {accuracy:.4f} on {len(y[test])} held-out digits")


if __name__ == "__main__":
    main()
