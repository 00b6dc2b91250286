"""What an engine starts on a worker's host, by file and without torch: `python start.py agent` (or `host`)."""

from __future__ import annotations

import os
import sys

__all__: list[str] = []

_HERE = os.path.dirname(os.path.abspath(__file__))


def main(what: str) -> int:
    """Run the agent of a worker (agent.py), or the helper of a host (engines/ssh.py)."""
    if sys.path and os.path.abspath(sys.path[0]) == _HERE:  # this folder's files are not modules of their own
        del sys.path[0]
    root = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
    if root not in sys.path:
        sys.path.append(root)
    if what == "host":
        from unisono.launchers.engines.ssh import serve_host

        return serve_host()
    from unisono.launchers.worker.agent import serve_worker

    return serve_worker()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
