"""Word from a cloud that this machine will be taken away: asked for every few seconds, if UNISONO_SPOT says so.

AWS tells a spot instance two minutes before, Google Cloud thirty seconds, in a metadata service that only the machine
itself reaches. Where a cluster's agent drains the node instead, pods and jobs get SIGTERM, and nothing need be asked.
"""

from __future__ import annotations

import http.client
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable

__all__ = ["follow_notice"]

VARIABLE = "UNISONO_SPOT"  # aws, gcp; aws=http://127.0.0.1:8000 for another address of the service
_ADDRESSES = {"aws": "http://169.254.169.254", "gcp": "http://metadata.google.internal"}
_EVERY_S, _ANSWER_S = 5.0, 2.0
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would ask about its own machine


def follow_notice(tell: Callable[[], None], *, every_s: float = _EVERY_S) -> threading.Thread | None:
    """Call `tell()` once, when the cloud says so; None where nobody asked for it."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    cloud, _, address = text.partition("=")
    if cloud not in _ADDRESSES:
        raise ValueError(f"{VARIABLE}: got {text!r}; expected {' or '.join(_ADDRESSES)}")
    ask, place = _ask_aws if cloud == "aws" else _ask_gcp, address or _ADDRESSES[cloud]
    never = threading.Event()

    def watch() -> None:
        is_said = False
        while not (answer := ask(place)):
            if answer is None and not is_said:
                print(
                    f"unisono: {VARIABLE}={text}: {place} does not answer, so no notice is heard; on AWS, containers "
                    "need HttpPutResponseHopLimit 2",
                    file=sys.stderr,
                    flush=True,
                )
                is_said = True
            never.wait(every_s)
        tell()

    thread = threading.Thread(target=watch, name="unisono-spot-notice", daemon=True)
    thread.start()
    return thread


def _ask_aws(address: str) -> bool | None:
    """Whether an instance action is set, "not found" means that there is none; None if the service does not answer."""
    token = _read(f"{address}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, method="PUT")
    if not token:
        return None
    return bool(_read(f"{address}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}))


def _ask_gcp(address: str) -> bool | None:
    answer = _read(f"{address}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"})
    return answer == "TRUE" if answer else None


def _read(url: str, headers: dict[str, str], method: str = "GET") -> str:
    """The answer; "" where there is none, which is asked for again later."""
    request = urllib.request.Request(url, headers=headers, method=method)
    try:
        with _direct.open(request, timeout=_ANSWER_S) as answer:
            return str(answer.read().decode(errors="replace").strip())
    except urllib.error.HTTPError as error:
        error.close()
    except (OSError, http.client.HTTPException):
        pass
    return ""
