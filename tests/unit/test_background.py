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


def test_a_job_that_nobody_waits_for_is_run_soon() -> None:
    queue, ran = SerialQueue("test queue"), [threading.Event() for _ in range(3)]
    for event in ran:  # the first calls the thread, the others find it awake
        queue.submit(event.set, wakes="soon")
        assert event.wait(60)
    queue.close()


def test_who_waits_for_such_a_job_runs_it_in_order() -> None:
    queue, order = SerialQueue("test queue"), []
    queue._is_alert = True  # as if the thread slept for long
    handles = [queue.submit(lambda i=i: order.append((i, threading.get_ident())), wakes="soon") for i in range(5)]
    handles[-1].wait()
    assert order == [(i, threading.get_ident()) for i in range(5)]
    queue.close()


def test_a_job_is_run_at_once_where_none_is_queued_and_it_is_allowed() -> None:
    queue, order = SerialQueue("test queue"), []
    assert queue.try_run(lambda: order.append("at once"), when=lambda: True)
    assert not queue.try_run(lambda: order.append("no"), when=lambda: False)
    queued = queue.submit(lambda: order.append("queued"), wakes=False)
    assert not queue.try_run(lambda: order.append("no"), when=lambda: True)
    queued.wait()
    assert order == ["at once", "queued"]
    queue.close()
    assert not queue.try_run(lambda: order.append("no"), when=lambda: True)


def test_a_thread_that_waits_for_several_jobs_runs_them_all_itself() -> None:
    queue, ran = SerialQueue("test"), []
    handles = [queue.submit(lambda: ran.append(threading.get_ident()), wakes=False) for _ in range(3)]
    for handle in handles:
        handle.wait()
    assert ran == [threading.get_ident()] * 3
    assert queue._thread is None
    queue.close()
