"""A layout as an SVG: a lane for each worker, time to the right, and what is sent in numbered lines of text below."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from drawings.replay import Box, Layout, Passing

WIDTH, LEFT, RIGHT, TOP, PITCH, BOX = 480, 66, 12, 44, 54, 22
LINE, CHARS = 16, 66
LETTERS = {"forward": "F", "backward": "B", "step": "S"}
STYLE = """
.paper{fill:#fff;stroke:#d5dbe1}.t{fill:#1b2733}.m{fill:#5b6b7b}.lane{stroke:#aab4be;stroke-width:1}
.host{fill:#f2f5f8}.forward{fill:#dde5ed}.backward{fill:#b9cbde}.step{fill:#f0d9a8}.box{fill:#1b2733}
.gradients{stroke:#1668ad}.models{stroke:#a8480a}.momenta{stroke:#7a35a3}.small{stroke:#6b7785}
.f-gradients{fill:#1668ad}.f-models{fill:#a8480a}.f-momenta{fill:#7a35a3}.f-small{fill:#6b7785}
.n{fill:#fff}.w{fill:none;stroke-width:1.3}.window{stroke:#d5dbe1;stroke-dasharray:2 3}
@media (prefers-color-scheme:dark){.paper{fill:#161b22;stroke:#343c46}.t{fill:#e3e9ef}.m{fill:#9aa7b4}
.lane{stroke:#5a6570}.host{fill:#1e252e}.forward{fill:#3a4652}.backward{fill:#3f5b78}.step{fill:#7a622c}
.box{fill:#f2f5f8}.gradients{stroke:#62b0f4}.models{stroke:#f39b5a}.momenta{stroke:#cf9af0}.small{stroke:#93a0ad}
.f-gradients{fill:#62b0f4}.f-models{fill:#f39b5a}.f-momenta{fill:#cf9af0}.f-small{fill:#93a0ad}.n{fill:#161b22}
.window{stroke:#343c46}}
""".strip().replace("\n", "")


@dataclass
class Line:
    """What the number of a kind of message says."""

    number: int
    colour: str  # gradients, models, momenta or small
    text: str


@dataclass
class Picture:
    """What is drawn."""

    title: str
    layout: Layout
    lanes: Sequence[str]  # names
    kinds: Sequence[Line]  # of each message of the layout
    lines: Sequence[Line]
    notes: Sequence[str]  # below the lines
    hosts: Sequence[tuple[str, int, int]] = ()  # a name, the first and the last of its lanes
    writes: list[tuple[int, float, str]] = field(default_factory=list)  # into the memory of the last lane: who, when
    numbers_once: bool = False
    marks: list[tuple[int, float, str]] = field(default_factory=list)  # something that a worker does by itself


class Drawing:
    """Makes the text of an SVG."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._scale = (WIDTH - LEFT - RIGHT) / picture.layout.length
        self._parts: list[str] = []
        self._names = list(picture.lanes)

    def draw(self) -> str:
        picture, layout = self._picture, self._picture.layout
        bottom = TOP + PITCH * (len(self._names) - 1) + 34
        wrapped = [(line, textwrap.wrap(line.text, CHARS)) for line in picture.lines]
        notes = [one for note in picture.notes for one in textwrap.wrap(note, CHARS + 4)]
        height = bottom + 26 + LINE * (sum(len(rows) for _, rows in wrapped) + len(notes))
        self._text(LEFT, 18, "time →", "m", size=11)
        self._legend(18)
        for name, first, last in picture.hosts:
            y = self._y(first) - BOX / 2 - 10
            self._add(
                f'<rect class="host" x="4" y="{y:g}" width="{WIDTH - 8}" height="{PITCH * (last - first) + 42}"'
                ' rx="6"/>'
            )
            self._text(LEFT - 8, (self._y(first) + self._y(last)) / 2 + 4, name, "m", size=11, anchor="end")
        for lane, name in enumerate(self._names):
            y = self._y(lane)
            self._add(f'<line class="lane" x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}"/>')
            self._text(LEFT - 8, y + 4, name, "t", anchor="end")
        for passing, kind in zip(layout.passing, picture.kinds, strict=True):
            self._message(passing, kind.colour)
        for lane, at, colour in picture.writes:
            self._arrow(self._x(at), self._y(lane), self._x(at), self._y(len(self._names) - 1), colour)
        for box in layout.boxes:
            self._box(box)
        for lane, at, colour in picture.marks:
            x, y = self._x(at), self._y(lane)
            self._add(f'<path class="f-{colour}" d="M{x:.1f},{y - 15} l5,7 l-5,7 l-5,-7 z"/>')
        self._number_messages()
        y = bottom + 16
        for line, rows in wrapped:
            self._badge(20, y - 4, line)
            for row in rows:
                self._text(34, y, row, "t")
                y += LINE
        y += 4
        for row in notes:
            self._text(12, y, row, "m")
            y += LINE
        return self._wrap(height)

    def _wrap(self, height: float) -> str:
        picture = self._picture
        described = " ".join([f"({line.number}) {line.text}." for line in picture.lines] + list(picture.notes))
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="640" '
            f'height="{round(height * 640 / WIDTH)}" role="img" aria-labelledby="title about" font-family="system-ui,'
            '-apple-system,Segoe UI,Helvetica,Arial,DejaVu Sans,sans-serif" font-size="12">'
        )
        return "\n".join([
            head,
            f'<title id="title">{escape(picture.title)}</title>',
            f'<desc id="about">{escape(described)}</desc>',
            f"<style>{STYLE}</style>",
            f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}"/>',
            *self._parts,
            "</svg>",
            "",
        ])  # fmt: skip

    # Places ----------------------------------------------------------------------------------------------

    def _x(self, time: float) -> float:
        return LEFT + time * self._scale

    def _y(self, lane: int) -> int:
        return TOP + BOX // 2 + PITCH * lane

    def _edge(self, lane: int, time: float, towards: float) -> float:
        """Where an arrow meets a lane: at the edge of the box that is there, or at the line."""
        y = self._y(lane)
        inside = any(b.rank == lane and b.start - 1e-9 <= time < b.end - 1e-9 for b in self._picture.layout.boxes)
        if not inside or towards == y:
            return y
        return y + BOX / 2 if towards > y else y - BOX / 2

    # Parts -----------------------------------------------------------------------------------------------

    def _add(self, part: str) -> None:
        self._parts.append(part)

    def _text(self, x: float, y: float, text: str, colour: str, *, size: int = 12, anchor: str = "start") -> None:
        self._add(f'<text class="{colour}" x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">'
                  f"{escape(text)}</text>")  # fmt: skip

    def _legend(self, y: float) -> None:
        x = float(WIDTH - RIGHT)
        kinds = {box.kind for box in self._picture.layout.boxes}
        for kind in ("step", "backward", "forward"):
            if kind in kinds:
                x -= 6.1 * len(kind)
                self._text(x, y, kind, "m", size=11)
                x -= 18
                self._add(f'<rect class="{kind}" x="{x:.1f}" y="{y - 10}" width="14" height="12" rx="2"/>')
                x -= 10

    def _box(self, box: Box) -> None:
        x, width = self._x(box.start), (box.end - box.start) * self._scale
        y = self._y(box.rank)
        self._add(f'<rect class="{box.kind}" x="{x + 0.5:.1f}" y="{y - BOX // 2}" width="{width - 1:.1f}" '
                  f'height="{BOX}" rx="3"/>')  # fmt: skip
        if width >= 11:
            self._text(round(x + width / 2, 1), y + 4, LETTERS[box.kind], "box", size=11, anchor="middle")

    def _message(self, passing: Passing, colour: str) -> None:
        ranks, op = passing.message.ranks, passing.message.op
        if colour == "small":
            self._gate(passing)
        elif op == "all_reduce":
            self._mean(passing, colour)
        elif op == "broadcast":
            for other in ranks[1:]:
                self._way(passing, ranks[0], other, colour)
        elif op == "send":
            self._way(passing, *ranks, colour)
        else:
            for one in ranks:
                for other in ranks:
                    if one != other:
                        self._way(passing, one, other, colour)

    def _gate(self, passing: Passing) -> None:
        """All meet for a few bytes."""
        ranks = passing.message.ranks
        if passing.message.op == "send":
            return self._way(passing, *ranks, "small")
        x = self._x((passing.start + passing.end) / 2)
        first, last = self._y(min(ranks)), self._y(max(ranks))
        self._add(f'<line class="w small" stroke-dasharray="3 2" x1="{x:.1f}" y1="{first}" x2="{x:.1f}" y2="{last}"/>')
        for rank in ranks:
            self._add(f'<circle class="f-small" cx="{x:.1f}" cy="{self._y(rank)}" r="2.2"/>')
        return None

    def _mean(self, passing: Passing, colour: str) -> None:
        """From all to a point, and from there to all."""
        ranks = passing.message.ranks
        middle = self._x((passing.start + passing.end) / 2)
        y = (self._y(min(ranks)) + self._y(max(ranks))) / 2
        for rank in ranks:
            start, end = self._edge(rank, passing.start, y), self._edge(rank, passing.end, y)
            self._add(f'<line class="w {colour}" x1="{self._x(passing.start):.1f}" y1="{start:g}" x2="{middle:.1f}" '
                      f'y2="{y:g}"/>')  # fmt: skip
            self._arrow(middle, y, self._x(passing.end), end, colour)
        self._add(f'<circle class="f-{colour}" cx="{middle:.1f}" cy="{y:g}" r="4.5"/>')

    def _way(self, passing: Passing, one: int, other: int, colour: str) -> None:
        start = self._edge(one, passing.start, self._y(other))
        end = self._edge(other, passing.end, self._y(one))
        self._arrow(self._x(passing.start), start, self._x(passing.end), end, colour)

    def _arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str) -> None:
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        bx, by = x2 - 6 * dx, y2 - 6 * dy
        self._add(f'<line class="w {colour}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{bx:.1f}" y2="{by:.1f}"/>')
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (
            (x2, y2), (bx - 2.6 * dy, by + 2.6 * dx), (bx + 2.6 * dy, by - 2.6 * dx)))  # fmt: skip
        self._add(f'<polygon class="f-{colour}" points="{points}"/>')

    def _number_messages(self) -> None:
        """A number above each; of those that pass together, one."""
        done: list[tuple[int, float, int, int]] = []
        for passing, kind in zip(self._picture.layout.passing, self._picture.kinds, strict=True):
            ranks = passing.message.ranks
            first, last = (0, len(self._names)) if passing.message.op == "send" else (min(ranks), max(ranks))
            if self._picture.numbers_once and kind.number in [one[0] for one in done]:
                continue
            together = [one for one in done if one[:2] == (kind.number, round(passing.start, 6))]
            if all(last < top or first > bottom for _, _, top, bottom in together):
                done.append((kind.number, round(passing.start, 6), first, last))
                self._badge(self._x((passing.start + passing.end) / 2), self._y(first) - BOX / 2 - 9, kind)

    def _badge(self, x: float, y: float, line: Line) -> None:
        self._add(f'<circle class="f-{line.colour}" cx="{x:.1f}" cy="{y:g}" r="7"/>')
        self._add(f'<text class="n" x="{x:.1f}" y="{y + 3.6:g}" font-size="10" font-weight="bold" '
                  f'text-anchor="middle">{line.number}</text>')  # fmt: skip


def draw(picture: Picture) -> str:
    """The text of the file."""
    return Drawing(picture).draw()
