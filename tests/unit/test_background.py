"""A serial queue runs its jobs in order, whoever runs them."""

from __future__ import annotations

import threading

import pytest

from unisono.background import SerialQueue


def test_jobs_run_in_order_whoever_waits() -> None:
    queue = SerialQueue("test queue")
    order: list[int] = []
    handles = [queue.submit(lambda i=i: order.append(i)) for i in range(200)]
    for handle in reversed(handles):
        handle.wait()
    assert order == list(range(200))
    queue.close()
    with pytest.raises(RuntimeError, match="closed"):
        queue.submit(lambda: None)


def test_ctrl_c_reaches_the_thread_that_runs_the_job_and_is_nobodys_result() -> None:
    queue = SerialQueue("test queue")
    queue._thread = threading.current_thread()  # no thread of its own: who waits runs the queue

    def interrupted() -> None:
        raise KeyboardInterrupt

    queue.submit(interrupted)
    later = queue.submit(lambda: "fine")
    with pytest.raises(KeyboardInterrupt):
        later.wait()
    assert later.wait() == "fine"
