"""The live page in a browser: it loads, follows the run, marks the dead, opens stacks, and stays readable."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import Browser, find_chromium
from live_pages import serve
from simulated_run import SimulatedRun

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium here (chromium, google-chrome)")
STATE = "document.getElementById('state').textContent"
STEP = "Number(document.querySelector('#tiles .tile b').textContent.replaceAll(',', ''))"
DRAWN = "document.body.dataset.drawn > 0"
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Browser]:
    browser.set_size(1400, 900)
    browser.events.clear()
    yield browser
    browser.open("about:blank")


def find_row(rank: int) -> str:
    return f"document.querySelector('.timeline .row[data-place=\"{rank}\"]')"


def test_it_follows_a_run_from_its_course_to_its_end(page: Browser, tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, ranks=4, steps_s=20.0, began=time.time() - 20.0)
    run.write()
    with serve(run.folder) as served:
        page.open(served.url)
        page.wait_for(DRAWN)
        assert page.evaluate("document.getElementById('name').textContent") == "run"
        assert page.evaluate(STATE) == "running"
        assert page.evaluate("[...document.querySelectorAll('#charts figure:not([hidden])')].length") == 5
        assert page.evaluate("document.querySelectorAll('.timeline .row').length") == 4
        before = page.evaluate(STEP)
        assert before == run.step - 1

        run.write(time.time() + 5.0)  # live
        page.wait_for(f"{STEP} === {run.step - 1}")
        assert run.step - 1 > before

        text = "rank 1 is 3.1 times as slow as the others, in its input pipeline <b>(data.py:31)</b>"
        run.say(0, "verdict", rank=1, cause="slow input", place="data.py:31", text=text)
        page.wait_for(f"document.querySelector('#verdicts .text')?.textContent === {text!r}")
        page.wait_for(f"{find_row(1)}.lastChild.textContent === 'slow'")

        run.lose(2)
        run.write(time.time() + 6.0)
        page.wait_for(f"{find_row(2)}.classList.contains('lost')")
        assert page.evaluate(f"{find_row(2)}.lastChild.textContent") == "lost"
        assert "rank 2 was lost" in page.evaluate("document.getElementById('events').textContent")

        run.finish("failed", report="rank 2 was killed")
        page.wait_for(f"{STATE} === 'failed'")
        assert "rank 2 was killed" in page.evaluate("document.getElementById('notice').textContent")

        page.call("Page.reload")  # all of it is there again
        page.wait_for(DRAWN)
        page.wait_for(f"{STATE} === 'failed' && {STEP} === {run.step - 1}")
        assert page.evaluate("document.querySelectorAll('#verdicts li').length") == 1
        assert page.find_errors() == []


def test_a_click_on_a_rank_opens_its_stack(page: Browser, tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, ranks=3, steps_s=20.0, began=time.time() - 5.0)
    run.write()
    stacks = {rank: f'File "train.py", line {80 + rank} in forward <i>' for rank in range(3)}
    with serve(run.folder, stacks=lambda folder: stacks) as served:
        page.open(served.url)
        page.wait_for(f"{DRAWN} && {find_row(2)}")
        page.click(f"{find_row(2)}.querySelector('canvas')")
        page.wait_for(f"document.getElementById('stack').textContent === {stacks[2]!r}")
        assert page.evaluate("document.getElementById('details-title').textContent") == "rank 2"
        assert "10002" in page.evaluate("document.getElementById('details-facts').textContent")
        page.click(f"{find_row(0)}.querySelector('.name')")
        page.wait_for(f"document.getElementById('stack').textContent === {stacks[0]!r}")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape")
        page.wait_for("!document.getElementById('details').open")
        assert page.find_errors() == []


def test_a_broken_connection_is_taken_up_again(page: Browser, tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, ranks=2, steps_s=20.0, began=time.time() - 5.0)
    run.write()
    with serve(run.folder) as served:
        page.open(served.url)
        page.wait_for(DRAWN)
        (viewer,) = served.server._viewers
        served.loop.call_soon_threadsafe(viewer.transport.abort)
        page.wait_for("document.body.dataset.connected === 'no'")
        page.wait_for("document.body.dataset.connected === 'yes'")
        run.write(time.time() + 5.0)
        page.wait_for(f"{STEP} === {run.step - 1}")
    page.wait_for("document.getElementById('notice').textContent.includes('server was stopped')")


def test_a_thousand_ranks_stay_readable(page: Browser, tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, ranks=1000, steps_s=4.0, slow={500: 3.0}, began=time.time() - 8.0, hosts=100)
    run.write(time.time() - 3.0)
    run.lose(999)
    run.write()
    with serve(run.folder) as served:
        page.open(served.url)
        page.wait_for(DRAWN)
        rows = page.evaluate("[...document.querySelectorAll('.timeline .row')].map((r) => Number(r.dataset.place))")
        assert rows[:2] == [999, 500]  # the lost one, and the slow one
        assert len(rows) <= 24
        assert page.evaluate("document.querySelectorAll('*').length") < 1200
        assert page.evaluate("document.documentElement.scrollHeight") < 3000
        assert "1,000 ranks" in page.evaluate("document.getElementById('where').textContent")
        picture = "document.getElementById('heat').getContext('2d').getImageData(4, {row}, 4, 1).data.buffer"
        colours = f"[...new Uint32Array({picture})]"
        slow, usual = page.evaluate(colours.format(row=500 // 4)), page.evaluate(colours.format(row=10))
        assert 0 not in {*slow, *usual}
        assert set(slow).isdisjoint(usual)
        for width, dark in ((1400, True), (420, False), (420, True)):
            page.set_size(width, 900, dark=dark)
            page.wait_for(f"innerWidth === {width} && {FITS}")
        page.evaluate("document.getElementById('find-rank').value = '123'")
        page.click("document.querySelector('#find button')")
        page.wait_for("document.getElementById('details-title').textContent === 'rank 123'")
        assert page.find_errors() == []


def test_light_and_dark_follow_the_reader_and_narrow_screens_fit(page: Browser, tmp_path: Path) -> None:
    run = SimulatedRun(tmp_path, ranks=8, steps_s=20.0, began=time.time() - 5.0)
    run.write()
    with serve(run.folder) as served:
        page.open(served.url)
        page.wait_for(DRAWN)
        grounds = set()
        for dark in (False, True):
            page.set_size(380, 800, dark=dark)
            page.wait_for(f"innerWidth === 380 && {FITS}")
            grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(grounds) == 2
        for choice in ('[data-view="whole"]', '[data-x="time"]'):
            page.click(f"document.querySelector('{choice}')")
            page.wait_for(f"document.querySelector('{choice}').getAttribute('aria-pressed') === 'true'")
        run.write(time.time() + 5.0)
        page.wait_for(f"{STEP} === {run.step - 1}")
        assert page.find_errors() == []
