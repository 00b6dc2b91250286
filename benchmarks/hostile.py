"""10,000 messages of strangers to every control port of a run (launcher, store) while two workers train.

Keys: hostile_sent, hostile_refused (the port closed the connection, and had told nothing), training_went_on (to its
end, with the store as it was), weights_equal (on both ranks, and to plain PyTorch on all rows). Fails unless all were
refused and the rest is true.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hostile_ports import attack_training


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args()
    found = attack_training(settings.messages, seed=settings.seed, wait=True)
    print(json.dumps(found))
    went_well = found["hostile_sent"] == found["hostile_refused"] and found["training_went_on"]
    return 0 if went_well and found["weights_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
