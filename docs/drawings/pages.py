"""Which drawing each page has: what is trained for it, and what its messages are called."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any

from drawings import special
from drawings.causes import RANKS, Atom, Causes, Course, Message, watch
from drawings.replay import Layout, Passing, replay
from drawings.svg import Line, Picture, draw
from unisono.facts import Sizes

FOLDER = Path(__file__).parents[1] / "methods"
PAIRS = ("a", "a", "b", "b")
ONE = ("a", "a", "a", "a")
USED = ("which parameters had a gradient", "small")
OPS = {
    "all_reduce": "their {how} to all",
    "all_gather": "to all others",
    "reduce_scatter": "of each part, the mean to its owner",
    "all_to_all": "part r to worker r",
    "broadcast": "to the rest of the host",
    "send": "{way}",
}
SMALL = {
    *("", "barrier", "used", "drop", "decay", "agree", "accordion", "what leaders kept", "means are there", "auto"),
    "rates",
    *("optimizer.step() of window", "the end of a step", "ask", "answer"),
}


@dataclass(frozen=True)
class Page:
    """A drawing. `names`: what each kind of message is, in the order in which they first come, and its colour."""

    course: Course
    names: Sequence[tuple[str, str]]
    note: str = ""
    speeds: Mapping[int, float] = field(default_factory=dict)
    lanes: Sequence[str] = tuple(f"worker {r}" for r in range(RANKS))
    hosts: Sequence[tuple[str, int, int]] = ()
    change: Callable[[Causes], None] | None = None  # before it is laid out
    around: Callable[[], Any] | None = None  # a context in which it is trained
    adorn: Callable[[Picture, Causes], None] | None = None
    leaves_out: Sequence[str] = ()  # tags of messages
    numbers_once: bool = False  # only the first message of a kind has its number beside it
    kind: Callable[[Message], Any] = lambda message: _kind(message)


def _reducer(spec: str, *names: tuple[str, str], note: str = "", **settings: Any) -> Page:
    return Page(Course(spec, **settings), [*names, USED], note)


G, M = "gradients", "models"
HOSTS = (("host a", 0, 1), ("host b", 2, 3))

PAGES: dict[str, Page] = {
    "dense": _reducer(
        "allreduce(bucket_bytes=4096)",
        ("gradients of the last layer in full", G),
        ("of the first layer", G),
        note="Drawn with buckets so small that there are two: the first leaves while backward goes on.",
    ),
    "casts": _reducer("bf16", ("gradients in 16 bits", G)),
    "topk": _reducer("topk(k=0.01)", ("biases in full", G), ("the largest 1 % of each matrix, with their places", G)),
    "cocktail": _reducer(
        "cocktail(random=0.2, k=0.1, chunk=4096)",
        ("biases in full", G),
        ("of numbers that all drew the largest tenth: places and 4 bits", G),
    ),
    "demo": _reducer("demo(k=32)", ("the strongest frequencies of momenta, with their places", G)),
    "randomk": _reducer("randomk(k=0.01)", ("biases, and the same 1 % of each matrix on all workers", G)),
    "powersgd": _reducer("powersgd(rank=1)", ("P = M Q, and the biases", G), ("Q = Mᵀ P", G)),
    "qsgd": _reducer("qsgd(bits=4)", ("4 bits a number", G), ("the means, rounded to 4 bits again", G)),
    "nuqsgd": _reducer("nuqsgd(bits=4)", ("4 bits a number", G), ("the means, rounded to 4 bits again", G)),
    "bytegrad": _reducer("bytegrad", ("a byte a number", G), ("the means, a byte a number again", G)),
    "signsgd": _reducer("signsgd", ("signs, a bit a number", G), ("the majority's signs, 2 bits a number", G)),
    "onebit": _reducer("onebit", ("signs, and a size for each tensor", G)),
    "fp8": _reducer("fp8", ("8-bit floats, and a scale a row", G), ("the means, in 8 bits again", G)),
    "loco": _reducer(
        "loco",
        ("g + e, 4 bits a number", G),
        ("the means, rounded to 4 bits again", G),
        note="e follows what 4 bits leave out, and is not sent.",
    ),
    "ef21": Page(
        Course("ef21(topk(k=0.01, feedback=False))"),
        [
            ("first: gradients in full", G),
            USED,
            ("then how far momenta are from what all know of them: biases in full", "momenta"),
            ("the largest 1 % of each matrix, with their places", "momenta"),
        ],
    ),
    "error_feedback": _reducer(
        "error_feedback(bytegrad)",
        ("g + e, a byte a number", G),
        ("the means, a byte a number again", G),
        note="Before (1) each worker adds e, what it has kept; after it, e is what the bytes left out; e is not sent.",
    ),
    "warmup": Page(
        Course("warmup(powersgd(rank=1), steps=1)"),
        [
            ("exact for the first steps: gradients in full", G),
            USED,
            ("then the inner reducer, here PowerSGD: P and the biases", G),
            ("Q", G),
        ],
        "Drawn with steps=1. All workers change over in the same step.",
    ),
    "masked": _reducer(
        "masked(powersgd(rank=1), min_size=1024)",
        ("the large matrix by the inner reducer: P, and later Q", G),
        ("the small tensors in full", G),
    ),
    "hierarchical": Page(
        Course("hierarchical(topk(k=0.01))", skip=1, hosts=PAIRS),
        [
            ("inside a host: gradients in full", G),
            ("between the hosts' first workers: biases in full", G),
            ("the largest 1 % of the host's mean, with their places", G),
            ("the result", G),
            USED,
        ],
        hosts=HOSTS,
    ),
    "accordion": Page(
        Course("accordion(low=powersgd(rank=4), high=powersgd(rank=1), every=1)", skip=1),
        [
            ("low compression, here rank 4: P and the biases", G),
            ("Q", G),
            ("norms of the gradients' sums, for the next decision", "small"),
            USED,
            ("high compression, here rank 1: P and the biases", G),
            ("Q", G),
        ],
        "Drawn with every=1, from the second step on: norms changed by less than half, so in the third step all "
        "tensors go with high compression.",
    ),
    "local_sgd": Page(
        Course("local_sgd(every=2, start=0)", windows=4),
        [("how far each model has moved since the last exchange", M)],
        "Drawn with every=2. All go on from the mean.",
    ),
    "diloco": Page(
        Course("diloco(every=4, fragments=2, delay=1)", windows=5, skip=1),
        [
            ("whether the program wrote to parameters, or a learning rate fell", "small"),
            ("how far some of the tensors have moved", M),
            ("how far the others have", M),
        ],
        "Drawn with every=4, fragments=2, delay=1: each fragment goes every 4 steps, behind the next step, and the "
        "outer optimizer steps after that one.",
    ),
    "sparseloco": Page(
        Course("sparseloco(every=2)", windows=4),
        [
            ("whether the program wrote to parameters, or a learning rate fell", "small"),
            ("biases: how far they have moved", M),
            ("the largest differences of each chunk, in 2 bits", M),
        ],
        "Drawn with every=2. All go on from the last agreed model less the mean of what was sent.",
    ),
    "sparta": Page(
        Course("sparta(share=0.05)", windows=3),
        [("a twentieth of the parameters, drawn anew in each step", M)],
        "Drawn with share=0.05. The numbers of a step's beginning travel behind it.",
    ),
    "crossbow": Page(
        Course("crossbow"),
        [("how far each learner is from the central model", M), ("whether a learning rate fell", "small")],
        "The sum goes behind forward and backward: it is that of the models from before the step.",
    ),
    "gossip": Page(
        Course("gossip(exponential)", windows=3, skip=1),
        [("the model", M), ("in the next exchange", M)],
        "Drawn with the exponential graph. The models of a step's beginning travel behind it and are mixed in before "
        "S.",
    ),
    "async_average": Page(
        Course("async_average(every_s=0.0)", windows=4, until=lambda replica: replica.rounds >= 3),
        [("whether all go on", "small"), ("copies of the models", M)],
        "Behind the programs, which wait for nobody; worker 3 is drawn slower. Rounds follow the clock: here two of "
        "them. A diamond: where a worker adds what the last round found.",
        speeds={1: 0.9, 3: 0.6},
        change=special.keep_rounds,
        adorn=special.mark_additions,
    ),
    "parameter_server": Page(
        Course("parameter_server(staleness=0, place=own)", skip=1),
        [
            ("what is asked", "small"),
            ("push: gradients", G),
            ("how far the workers are", "small"),
            ("pull: the new parameters", M),
        ],
        "Drawn with staleness=0 and a server of its own, which steps when all have pushed.",
        lanes=("worker 0", "worker 1", "worker 2", "server"),
        change=special.serve,
    ),
    "parameter_server-1": Page(
        Course("parameter_server(staleness=1, place=own)", windows=3),
        [("push: gradients", G), ("pull: the new parameters", M)],
        "Drawn with staleness=1 and pushes in an order as when worker 2 is slow. The server steps for each push. Who "
        "is then more than one step ahead of the slowest gets its answer when that one has pushed. Left out: the small "
        "messages.",
        speeds={2: 0.3},
        lanes=("worker 0", "worker 1", "worker 2", "server"),
        around=special.in_turns,
        change=special.serve_in_turns,
        leaves_out=("ask", "answer"),
        numbers_once=True,
    ),
    "async_diloco": Page(
        Course("async_diloco(every=2, pace=False)", windows=4),
        [("how far it has moved", M), ("the outer model", M)],
        "Workers are drawn with different speeds, and none waits for another. Worker 0 has the server beside its "
        "program, which takes in each difference when it comes. Left out: the small messages.",
        speeds={1: 0.8, 3: 0.55},
        change=special.serve_beside,
        leaves_out=("ask", "answer"),
        numbers_once=True,
    ),
    "hogwild": Page(
        Course("hogwild", windows=3, hosts=ONE),
        [],
        "Nothing is sent. Each S writes into the one model that all read (arrows), whenever a worker gets there; "
        "workers are drawn with different speeds.",
        speeds={0: 1.0, 1: 0.8, 2: 1.15, 3: 0.7},
        lanes=(*(f"worker {r}" for r in range(RANKS)), "memory"),
        adorn=special.mark_writes,
    ),
    "shared": Page(
        Course("shared", hosts=PAIRS),
        [
            USED,
            ("means over a host of half of the gradients each, between hosts", G),
            ("all means are there", "small"),
            ("nobody of this host reads parameters any more", "small"),
            ("all of this host have stepped", "small"),
        ],
        "Each S steps half of its host's one model, in memory that both workers see. On one host (2) and (3) do not "
        "happen: no gradient is sent.",
        hosts=HOSTS,
        kind=lambda message: _tag(message),
    ),
    "qadam": Page(
        Course("qadam(warmup=1)", optimizer="AdamW"),
        [
            ("warm-up: gradients in full", G),
            USED,
            ("then momenta, a byte a number", "momenta"),
            ("the means, a byte a number again", "momenta"),
        ],
        "Drawn with warmup=1.",
    ),
    "zero_one_adam": Page(
        Course("zero_one_adam(warmup=1, start=1, every=2)", windows=3, optimizer="AdamW"),
        [
            ("warm-up: gradients in full", G),
            USED,
            ("v is frozen on all", "small"),
            ("how far each worker stepped", "small"),
            ("whether the program wrote to parameters, or a learning rate fell", "small"),
            ("sums of momenta, a bit a number", "momenta"),
            ("the means, a bit a number again", "momenta"),
        ],
        "Drawn with warmup=1, start=1 and every=2: nothing is sent in the second step.",
    ),
    "zero": Page(
        Course("zero(stage=2)"),
        [("gradients", G), USED, ("the stepped parameters, a part from each worker", M)],
        "Stage 2, on different hosts. Each S steps a quarter of the model. Where all workers are on one host and on "
        "CPUs, (3) does not happen: they have one model.",
    ),
    "zero-3": Page(
        Course("zero(stage=3, unit_bytes=16640)", windows=1, skip=1, widths=(64, 64, 64, 64)),
        [
            ("parameters of layer 1", M),
            ("of layer 2", M),
            ("of layer 3", M),
            ("gradients of layer 3", G),
            ("of layer 2", G),
            ("of layer 1", G),
            USED,
        ],
        "Stage 3: no worker keeps whole layers. The next layer is on its way while one computes; backward has layers 2 "
        "and 1 come again. Each S steps a quarter of each layer.",
    ),
    "auto": Page(
        Course("auto(among=[allreduce, bf16, powersgd(rank=1)], trial_steps=1, check_every=2)", windows=6),
        [
            ("PowerSGD, predicted to be the fastest, trains first: P and the biases", G),
            ("Q", G),
            ("times and bytes of the last steps; from these all decide alike", "small"),
            ("bf16, the next, is tried: gradients in 16 bits", G),
        ],
        "Drawn with three candidates and trial_steps=1, with times of a link of 8 Mbit/s. allreduce is not tried, as "
        "it is predicted to take more than twice as long; PowerSGD was faster and goes on. Left out: the small "
        "messages after each exchange, and the check that all ranks change to the same method.",
        around=special.fixed_times,
        leaves_out=("used", "", "barrier"),
    ),
}


def make(name: str) -> str:
    """The text of a drawing's file."""
    page = PAGES[name]
    with special.nothing() if page.around is None else page.around():
        causes = watch(page.course)
    if page.change is not None:
        page.change(causes)
    for lane, atoms in causes.atoms.items():
        causes.atoms[lane] = [atom for atom in atoms if not _is_left_out(causes, atom, page.leaves_out)]
    layout = replay(causes, SMALL, page.speeds)
    kinds, lines = _name(name, layout, page.names, page.kind)
    who = "3 workers and a server" if page.lanes[-1] == "server" else "4 workers"
    title = f"{page.course.spec}: who sends what when, in {_count(page.course.windows, 'step')} of {who}"
    notes = [_sum_up(page, layout), *([page.note] if page.note else [])]
    picture = Picture(title, layout, page.lanes, kinds, lines, notes, page.hosts, numbers_once=page.numbers_once)
    if page.adorn is not None:
        page.adorn(picture, causes)
    return draw(picture)


def show(name: str, text: str) -> str:
    """The line of Markdown by which a page shows a drawing, with all its words for those who cannot see it."""
    [title], [about] = re.findall(r"<title.*?>(.*?)</title>", text), re.findall(r"<desc.*?>(.*?)</desc>", text)
    words = unescape(f"{title}. {about}").translate(str.maketrans("[]", "()"))
    return f"![{words}]({name}.svg)"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _is_left_out(causes: Causes, atom: Atom, tags: Sequence[str]) -> bool:
    return atom.what in ("begin", "wait") and atom.about in causes.messages and causes.messages[atom.about].tag in tags


def _name(
    name: str, layout: Layout, names: Sequence[tuple[str, str]], kind_of: Callable[[Message], Any]
) -> tuple[list[Line], list[Line]]:
    """Of each message its line, and all lines."""
    known: dict[Any, Line] = {}
    kinds = []
    for passing in layout.passing:
        key = kind_of(passing.message)
        if key not in known:
            if len(known) == len(names):
                raise ValueError(f"{name}: a kind of message without a name: {key}")
            what, colour = names[len(known)]
            if (colour == "small") != (passing.message.tag in SMALL):
                raise ValueError(f"{name}: {what!r} does not fit {key}")
            known[key] = Line(len(known) + 1, colour, what)
        kinds.append(known[key])
    for key, line in known.items():
        line.text += _say([p for p in layout.passing if kind_of(p.message) == key])
    if len(known) < len(names):
        raise ValueError(f"{name}: named, but not sent: {names[len(known) :]}")
    return kinds, list(known.values())


def _kind(message: Message) -> Any:
    """Messages of one kind have one number."""
    if message.op == "send":
        return message.op, message.tag, (message.ranks[1] - message.ranks[0]) % RANKS if message.tag == "gossip" else 0
    if message.tag in SMALL:
        return message.op, message.tag, 0
    return message.op, message.tag, max(message.sent.values())


def _tag(message: Message) -> Any:
    """The same where parts of one whole have different sizes."""
    return message.op, message.tag


def _say(passing: Sequence[Passing]) -> str:
    message = passing[0].message
    way = f"to worker r + {_kind(message)[2]}" if message.tag == "gossip" else ""
    how = OPS[message.op].format(how=message.how, way=way) if message.tag not in SMALL else ""
    who = "the host's first worker sends" if message.op == "broadcast" else "each sends"
    if message.tag in ("answer", "pull"):
        who = "to each"
    sizes = sorted({max(p.message.sent.values()) for p in passing})
    size = (
        f"{sizes[0]:,}\N{NO-BREAK SPACE}B" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}\N{NO-BREAK SPACE}B"
    )
    return f"{', ' + how if how else ''}: {who} {size}"


def _sum_up(page: Page, layout: Layout) -> str:
    """How many bytes all this is."""
    course, sums, across = page.course, dict.fromkeys(range(RANKS), 0), dict.fromkeys(page.course.hosts, 0)
    for passing in layout.passing:
        message = passing.message
        for rank, sent in message.sent.items():
            sums[rank] += sent
            if len({course.hosts[one] for one in message.ranks}) > 1:
                across[course.hosts[rank]] += sent
    shapes = [tuple(p.shape) for p in course.make_model().parameters()]
    sizes = Sizes(shapes, RANKS, 0)
    dense = course.windows * (sizes.all_reduce(4 * sizes.numbers) + sizes.all_reduce(len(shapes) + 1))
    server = page.lanes[-1] == "server"
    each = sorted({sent for rank, sent in sums.items() if not (server and rank == RANKS - 1)})
    said = f"A worker sends {' or '.join(f'{one:,}' for one in each)} B in {_count(course.windows, 'step')}"
    if server:
        said += f", the server {sums[RANKS - 1]:,} B"
    elif len(across) < RANKS and len(set(across.values())) == 1 and len(across) > 1:
        said += f"; from the workers of a host together {across[course.hosts[0]]:,} B go to the other"
    count = sum(math.prod(shape) for shape in shapes)
    return f"{count:,} parameters. {said}. With exact gradients, a worker sends {dense:,} B."
