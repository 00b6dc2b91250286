"""`unisono doctor`: what is installed, which transports and devices work here, what limits them, and what to do."""

from __future__ import annotations

from unisono.observe.doctor.examination import examine
from unisono.observe.doctor.findings import Finding, worst_of

__all__ = ["Finding", "examine", "worst_of"]
