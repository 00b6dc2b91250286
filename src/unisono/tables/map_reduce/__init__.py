"""MapReduce: broadcast a state, map it on every worker's own part of the data, reduce what they found.

Client-server, message passing, bulk synchronous. Dean and Ghemawat, 2004, with the state of an iterative program
broadcast each round.
"""

from __future__ import annotations

from unisono.tables.map_reduce.map_reduce import Ask, MapReduce, mapreduce, run

__all__ = ["Ask", "MapReduce", "mapreduce", "run"]
