"""What rounding does to a gradient, without training: the noise of each quantiser, and error feedback around it.

Gaussian numbers, one rank. Keys: noise_<reducer>: mean of |sent - v|^2 / |v|^2 over draws of v; feedback_<reducer>_<t>:
the norm of what error feedback keeps after t steps over that of a gradient. Feedback that `error_feedback` refuses is
worked out here by hand: it shows why.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import finish

NOISE = {
    "qsgd_4": "qsgd(bits=4)",
    "qsgd_8": "qsgd(bits=8)",
    "qsgd_4_block512": "qsgd(bits=4, block=512)",
    "qsgd_8_block512": "qsgd(bits=8, block=512)",
    "qsgd_4_block64": "qsgd(bits=4, block=64)",
    "nuqsgd_2": "nuqsgd(bits=2)",
    "nuqsgd_4": "nuqsgd(bits=4)",
    "nuqsgd_8": "nuqsgd(bits=8)",
    "nuqsgd_4_block512": "nuqsgd(bits=4, block=512)",
    "nuqsgd_2_block64": "nuqsgd(bits=2, block=64)",
    "bytegrad": "bytegrad",
}
FEEDBACK = ("qsgd_4", "qsgd_4_block64", "nuqsgd_4", "nuqsgd_2_block64", "bytegrad")
STEPS = (1, 5, 20, 40)


def sent(spec: str, v: Any, step: int) -> Any:
    """What a quantiser makes of a line: its code, read again."""
    from unisono.methods.kernels.noise import noise
    from unisono.methods.spec import build

    codec = build(spec, kind="reducer").codec
    return codec.decode(codec.encode(v, noise(0, step)), v.numel())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, default=65536)
    parser.add_argument("--draws", type=int, default=20)
    asked = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(asked.numbers, generator=generator) for _ in range(max(asked.draws, *STEPS))]
    results: dict[str, float] = {}
    for name, spec in NOISE.items():
        shares = [
            (sent(spec, v, t) - v).square().sum() / v.square().sum() for t, v in enumerate(gradients[: asked.draws])
        ]
        results[f"noise_{name}"] = float(torch.stack(shares).mean())
        print(f"{spec:<28} noise {results[f'noise_{name}']:.3g}", flush=True)
    for name in FEEDBACK:
        kept = torch.zeros(asked.numbers)
        for t, v in enumerate(gradients[: max(STEPS)], 1):
            p = v + kept
            kept = p - sent(NOISE[name], p, t)
            if t in STEPS:
                results[f"feedback_{name}_{t}"] = float(kept.norm() / v.norm())
        told = ", ".join(f"{results[f'feedback_{name}_{t}']:.3g} after {t}" for t in STEPS)
        print(f"feedback around {NOISE[name]:<28} {told}", flush=True)
    finish(results)


if __name__ == "__main__":
    main()
