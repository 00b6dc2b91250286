"""What was measured in the user's own loop, as plain values: for the plan, for JSON, and for the simulation."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from unisono.methods.facts import Convergence
from unisono.predict.costs import Anatomy, Link, Network, sent_share
from unisono.predict.planner.learning import NOT_MEASURED, Learning

DDP = "torch:ddp"


@dataclass(frozen=True)
class MeasuredMethod:
    """One method of a plan. `anatomy` is None if its step was not taken apart; `why` says why not."""

    spec: str
    convergence: Convergence
    anatomy: Anatomy | None = None
    memory_bytes: int = 0  # the most that a worker held in a step
    why: str = ""
    verified_s: float | None = None  # its step as measured for real
    learning: Learning = NOT_MEASURED

    @property
    def bytes_sent(self) -> float:
        """What a rank sends in a step, in the mean over steps."""
        if self.anatomy is None:
            return 0.0
        sent = sum(sent_share(o.op, self.anatomy.ranks) * o.nbytes for o in self.anatomy.operations)
        return sent / self.anatomy.every


@dataclass
class Measured:
    """Everything that a plan measured, as plain values."""

    ranks: int
    hosts: list[str]
    own: str  # the program's own method
    parameters: int
    gradient_bytes: int
    compute_s: float = 0.0
    bare_samples_s: list[float] = field(default_factory=list)
    memory_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int | None = None
    learning_rate: float | None = None
    optimizer: str = ""
    batch: int | None = None
    network: Network | None = None
    links: list[dict[str, Any]] = field(default_factory=list)
    encryption: dict[str, Any] = field(default_factory=dict)  # of probe.EncryptionCost; empty for one host
    methods: list[MeasuredMethod] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    unfinished: str = ""  # what was still to be measured when the program ended
    settings: list[str] = field(default_factory=list)  # of `un.memory`, that fit, where memory is short
    stages: dict[str, Any] = field(default_factory=dict)  # of a pipeline, as measured on rank 0 (see `meshes`)
    noise_batches: float | None = None  # the gradient noise scale, in global batches
    tensor: dict[str, Any] = field(default_factory=dict)  # of a tensor axis, likewise

    @property
    def per_host(self) -> int:
        """Workers of the host that has the most."""
        return max(self.hosts.count(host) for host in self.hosts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        plain = asdict(self)
        plain["methods"] = [
            {**asdict(m), "anatomy": None if m.anatomy is None else m.anatomy.to_dict()} for m in self.methods
        ]
        if self.network is not None:
            plain["network"] = {
                **asdict(self.network),
                "between": list(self.network.between),
                "inside": None if self.network.inside is None else list(self.network.inside),
            }
        return plain

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Measured:
        """Read what `to_dict` wrote, also after a round trip through JSON."""
        methods = [
            MeasuredMethod(
                **{
                    **m,
                    "convergence": Convergence(**m["convergence"]),
                    "learning": Learning(**m.get("learning", {})),  # earlier plans have none
                    "anatomy": None if m["anatomy"] is None else Anatomy.from_dict(m["anatomy"]),
                }
            )
            for m in plain["methods"]
        ]
        network = None
        if (found := plain["network"]) is not None:
            inside = None if found["inside"] is None else Link(*found["inside"])
            fitted = {op: (line[0], line[1]) for op, line in found["fitted"].items()}
            curves = {op: [(p[0], p[1]) for p in points] for op, points in found["curves"].items()}
            network = Network(
                **{**found, "between": Link(*found["between"]), "inside": inside, "fitted": fitted, "curves": curves}
            )
        return cls(**{**plain, "methods": methods, "network": network})
