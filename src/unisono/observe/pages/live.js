// The live page: takes the server's messages, keeps what they say, and draws it.
"use strict";
(() => {
  const { Chart, PARTS, bytes, clock, number, seconds } = LiveCharts;
  const $ = (id) => document.getElementById(id);
  const RANK = ["place", "rank", "state", "step", "last", "steps_s", ...PARTS, "bytes_s", "factor", "host", "pid", "device", "mesh"];
  const MARK = ["number", "kind", "tone", "time", "step", "rank", "text", "cause", "place", "times"];
  const METRIC_CHARTS = 8;

  const state = {
    now: 0, run: {}, ranks: new Map(), rows: [], metrics: new Map(), marks: new Map(),
    bins: { begin: 0, width: 1, first: 0, end: 0, rows: new Map() }, strips: new Map(), heat: new Map(),
    at(bin) { return this.bins.begin + bin * this.bins.width - this.begin(); },
    begin() { return this.run.started || this.bins.begin || 0; },
    binOf(time) { return Math.floor((time - this.bins.begin) / this.bins.width); },
    span() {
      const count = Math.max(this.bins.end - this.bins.first, 20);
      return { first: this.bins.first, end: this.bins.end, count };
    },
  };
  let view = "recent", metricX = "step", isOver = false, ahead = 0;

  // Messages -----------------------------------------------------------------------------------------------------------

  const toBytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const name = (names, values) => Object.fromEntries(names.map((n, i) => [n, values[i]]));

  function take(message) {
    if (message.all) {
      for (const map of [state.ranks, state.metrics, state.marks, state.bins.rows, state.strips, state.heat]) map.clear();
      state.rows = [];
    }
    if (message.now) { state.now = message.now; ahead = Date.now() / 1000 - message.now; }
    if (message.run) state.run = message.run;
    if (message.ranks) {
      const seen = new Set();
      for (const values of message.ranks) {
        const rank = name(RANK, values);
        rank.own = rank.compute == null ? null : rank.compute + rank.data;
        state.ranks.set(rank.place, rank);
        seen.add(rank.place);
      }
      for (const place of state.ranks.keys()) if (!seen.has(place)) state.ranks.delete(place);
    }
    for (const [key, more] of Object.entries(message.metrics || {})) {
      const old = state.metrics.get(key);
      const kept = old ? old.points.filter((p) => p[0] < more.from) : [];
      state.metrics.set(key, { how: more.how, points: kept.concat(more.points) });
    }
    for (const values of message.marks || []) state.marks.set(values[0], name(MARK, values));
    if (message.bins) takeBins(message);
  }

  function takeBins({ bins, strips, heat }) {
    const known = state.bins;
    known.begin = bins.begin ?? known.begin;
    known.width = bins.width;
    known.first = bins.first;
    known.end = Math.max(bins.from + bins.rows.length, bins.first);
    bins.rows.forEach((row, i) => known.rows.set(bins.from + i, row));
    state.rows = strips.places;
    strips.cells.forEach((cells, i) => {
      const all = toBytes(cells);
      state.strips.set(strips.from + i, new Map(strips.places.map((place, r) => [place, all.subarray(r * PARTS.length, (r + 1) * PARTS.length)])));
    });
    if (heat) heat.cells.forEach((cells, i) => state.heat.set(heat.from + i, toBytes(cells)));
    for (const map of [known.rows, state.strips, state.heat]) for (const bin of map.keys()) if (bin < known.first) map.delete(bin);
  }

  // The connection -----------------------------------------------------------------------------------------------------

  let source = null, retry = null, waits_ms = 500, heard = 0;
  function connect() {
    clearTimeout(retry);
    if (source) source.close();
    const mine = source = new EventSource(`events?view=${view}`);
    mine.onmessage = (event) => {
      if (mine !== source) return;
      heard = Date.now();
      waits_ms = 500;
      const message = JSON.parse(event.data);
      if (message.bye) {
        mine.close();
        source = null;
        isOver = true;
        lost(state.run.ended != null ? `The run is over, and this page's server has ended with it. Open it again with: unisono watch ${state.run.name}` : "This page's server was stopped.");
        return;
      }
      document.body.dataset.connected = "yes";
      $("notice").dataset.lost = "";
      take(message);
      plan();
    };
    mine.onerror = () => { if (mine === source) again(); };
  }
  function again() {
    if (isOver) return;
    if (source) source.close();
    source = null;
    document.body.dataset.connected = "no";
    lost("The server does not answer. The page shows what it knew, and tries again.");
    retry = setTimeout(connect, waits_ms);
    waits_ms = Math.min(5000, waits_ms * 2);
  }
  function lost(text) { $("notice").dataset.lost = text; drawHeader(); }
  setInterval(() => {
    if (source && heard && Date.now() - heard > 15000) again();
    drawHeader();
  }, 1000);

  // Drawing ------------------------------------------------------------------------------------------------------------

  // Drawing takes at most a quarter of this page's time, also where there are many ranks and little processor.
  let planned = false, drewAt = 0, took = 0;
  function plan() {
    if (planned) return;
    planned = true;
    setTimeout(() => requestAnimationFrame(() => {
      planned = false;
      const from = performance.now();
      draw();
      drewAt = performance.now();
      took = drewAt - from;
    }), Math.max(0, drewAt + 3 * took - performance.now()));
  }
  function draw() {
    drawHeader();
    drawTiles();
    drawLists();
    const marks = [...state.marks.values()].filter((m) => m.tone !== "quiet").slice(-120)
      .map((m) => ({ ...m, at: m.time - state.begin() }));
    drawCharts(marks);
    LiveRanks.update(state, marks);
    drawRanksNote();
    if ($("details").open) drawDetails();
    document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
  }

  const STATES = { running: ["running", "well live"], ok: ["ended well", "well"], starting: ["starting", "live"], failed: ["failed", "bad"],
    interrupted: ["interrupted", "warn"], preempted: ["preempted", "warn"], "launcher gone": ["launcher gone", "bad"], "no run.json": ["no run.json", "warn"] };
  function setText(element, text) { if (element.textContent !== text) element.textContent = text; }

  function drawHeader() {
    const run = state.run;
    if (!run.name) return;
    setText($("name"), run.name);
    document.title = `${run.name} · ${run.state}`;
    const [text, tone] = STATES[run.state] || [run.state, ""];
    setText($("state"), text);
    $("state").className = `badge ${tone}`;
    setText($("what"), run.command.join(" ") || run.folder);
    const end = run.ended ?? (run.state === "launcher gone" ? run.last : Date.now() / 1000 - ahead);
    const ranks = run.size ?? state.ranks.size;
    const facts = [
      `${ranks.toLocaleString("en")} rank${ranks === 1 ? "" : "s"}${run.hosts.length > 1 ? ` on ${run.hosts.length} hosts` : run.hosts.length ? ` on ${run.hosts[0]}` : ""}`,
      run.strategy, run.mesh ? `mesh ${run.mesh.join(" × ")}` : null, run.device, run.parameters ? `${Number(run.parameters.toPrecision(3)).toLocaleString("en")} parameters` : null,
      run.engine && run.engine !== "local" ? `engine ${run.engine}` : null,
      run.started ? `began ${new Date(run.started * 1000).toLocaleString()}` : null,
      run.started ? `${run.ended != null || run.state === "launcher gone" ? "took" : "for"} ${clock(Math.max(0, end - run.started))}` : null,
      run.versions.torch ? `torch ${run.versions.torch}` : null,
    ];
    setText($("where"), facts.filter(Boolean).join(" · "));
    const said = [];
    if ($("notice").dataset.lost) said.push($("notice").dataset.lost);
    if (run.state === "launcher gone") said.push("The launcher has ended without a word: it was killed, or its machine was. What its workers wrote until then is shown.");
    if (run.report) said.push(run.report);
    if (run.missing.length) said.push(`Not there: ${run.missing.join("; ")}`);
    if (run.unreadable) said.push(`${run.unreadable} lines could not be read`);
    $("notice").hidden = !said.length;
    $("notice").classList.toggle("bad", ["failed", "launcher gone"].includes(run.state));
    setText($("notice"), said.join("\n\n"));
  }

  function drawTiles() {
    const last = [...state.bins.rows.values()].filter((row) => row).slice(-10);
    const mean = (i) => last.reduce((sum, row) => sum + row[i], 0) / last.length;
    const step = Math.max(-1, ...[...state.ranks.values()].map((r) => r.step));
    const tiles = [["step", step < 0 ? "–" : step.toLocaleString("en")]];
    if (last.length) {
      const parts = PARTS.map((_, i) => mean(2 + i)), wall = parts.reduce((a, b) => a + b, 0);
      tiles.push(["steps/s", number(Number(mean(0).toPrecision(3)))], ["time per step", seconds(wall)],
        ["sent per second", bytes(mean(1))], ["of it waiting", `${Math.round(100 * parts[3] / (wall || 1))} %`]);
    }
    for (const [key, series] of [...state.metrics].slice(0, 2)) {
      const point = series.points[series.points.length - 1];
      if (point) tiles.push([key, number(point[2])]);
    }
    const counts = new Map();
    for (const rank of state.ranks.values()) counts.set(rank.state, (counts.get(rank.state) || 0) + 1);
    for (const [what, count] of [...counts].sort((a, b) => b[1] - a[1])) {
      const tone = ["lost", "failed", "gone"].includes(what) ? "bad" : ["silent", "slow"].includes(what) ? "warn" : "";
      tiles.push([`rank${count === 1 ? "" : "s"} ${what}`, count.toLocaleString("en"), tone]);
    }
    const place = $("tiles");
    while (place.children.length > tiles.length) place.lastChild.remove();
    tiles.forEach(([label, value, tone], i) => {
      let tile = place.children[i];
      if (!tile) {
        tile = document.createElement("div");
        tile.append(document.createElement("b"), document.createElement("span"));
        place.append(tile);
      }
      tile.className = `tile ${tone || ""}`;
      setText(tile.children[0], value);
      setText(tile.children[1], label);
    });
  }

  // Charts -------------------------------------------------------------------------------------------------------------

  const charts = new Map();
  function chart(key, spec) {
    const full = `${key}:${spec.x}`;
    let found = charts.get(key);
    if (found && found.full !== full) { found.figure.remove(); found = null; }
    if (!found) {
      found = new Chart($("charts"), spec);
      found.full = full;
      found.figure.style.order = spec.order ?? 100; // metrics first, whenever they come
      charts.set(key, found);
    }
    return found;
  }

  function drawCharts(marks) {
    [...state.metrics].slice(0, METRIC_CHARTS).forEach(([key, series], i) => drawMetric(key, series, i, marks));
    const span = state.span(), bins = [];
    // Of the newest, not all ranks have told yet.
    const until = span.end - (state.run.state !== "running" ? 0 : state.bins.width < 1 ? 2 : 1);
    for (let bin = span.first; bin < until; bin++) bins.push(bin);
    const xs = bins.map((bin) => state.at(bin + 0.5));
    const column = (get) => bins.map((bin) => { const row = state.bins.rows.get(bin); return row ? get(row) : null; });
    const latest = (values) => { // of the newest bins, one of which is not over yet
      const found = values.filter((value) => value != null).slice(-4);
      return found.length ? found.reduce((a, b) => a + b, 0) / found.length : null;
    };

    const parts = PARTS.map((_, i) => column((row) => row[2 + i]));
    const stack = PARTS.map((_, i) => column((row) => row.slice(2, 3 + i).reduce((a, b) => a + b, 0)));
    const cost = chart("cost", {
      title: "Time per step", x: "time", zero: true, clip: 1, show: seconds, keys: PARTS.map((part) => [part, part]),
      series: [...PARTS].reverse().map((part) => ({ label: part, colour: `--${part}`, fill: true, width: 0, stroke: null })),
      tip: (data, i) => PARTS.map((part, p) => [part, data[PARTS.length - p][i] == null ? null : data[PARTS.length - p][i] - (p ? data[PARTS.length - p + 1][i] : 0)]),
    });
    const total = latest(stack[PARTS.length - 1]);
    cost.update([xs, ...[...stack].reverse()], marks, total == null ? "" : `${seconds(total)}, ${Math.round(100 * latest(parts[0]) / (total || 1))} % compute`);

    const speed = column((row) => row[0]);
    chart("speed", { title: "Steps per second", x: "time", zero: true, series: [{ label: "steps/s", colour: "--c0" }] })
      .update([xs, speed], marks, latest(speed) == null ? "" : number(latest(speed)));
    const sent = column((row) => row[1]);
    chart("sent", { title: "Bytes per second, sent by all ranks", x: "time", zero: true, show: bytes, series: [{ label: "", colour: "--c6", fill: "33" }] })
      .update([xs, sent], marks, latest(sent) == null ? "" : `${bytes(latest(sent))}/s`);
    if (state.ranks.size > 4) {
      const [low, middle, high, most] = [7, 8, 9, 10].map((i) => column((row) => row[i]));
      chart("spread", {
        title: "A rank's own time per step (compute and data)", x: "time", zero: true, clip: 4, show: seconds, bands: [{ series: [3, 1], colour: "--c0" }],
        series: [{ label: "5 % of ranks below", colour: "--c0", width: 0.5 }, { label: "median", colour: "--c0" },
          { label: "95 % below", colour: "--c0", width: 0.5 }, { label: "slowest", colour: "--c1", width: 1.25 }],
      }).update([xs, low, middle, high, most], marks, latest(most) == null ? "" : `median ${seconds(latest(middle))}, slowest ${seconds(latest(most))}`);
    }
  }

  function drawMetric(key, series, i, marks) {
    const start = state.begin(), from = view === "recent" && metricX === "time" ? state.at(state.bins.first) : -Infinity;
    const points = series.points.filter((p) => p[1] - start >= from);
    const xs = metricX === "step" ? points.map((p) => p[0]) : points.map((p) => p[1] - start);
    const hasBand = series.how === "rank" && points.some((p) => p[4] > p[3]);
    const shown = chart(`metric ${key} ${hasBand}`, {
      title: key, x: metricX, order: i, bands: hasBand ? [{ series: [3, 2], colour: `--c${i % 8}` }] : undefined,
      series: [{ label: key, colour: `--c${i % 8}`, span: true }, ...(hasBand ? [{ label: "lowest", colour: `--c${i % 8}`, width: 0.5, span: true },
        { label: "highest", colour: `--c${i % 8}`, width: 0.5, span: true }] : [])],
    });
    if (hasBand && charts.has(`metric ${key} false`)) charts.get(`metric ${key} false`).figure.hidden = true;
    const values = points.map((p) => p[2]);
    shown.update([xs, values, ...(hasBand ? [points.map((p) => p[3]), points.map((p) => p[4])] : [])], marks, values.length ? number(values[values.length - 1]) : "");
  }

  // Lists --------------------------------------------------------------------------------------------------------------

  function rankLink(rank) {
    const found = [...state.ranks.values()].find((r) => r.rank === rank);
    const link = document.createElement(found ? "button" : "span");
    link.textContent = `rank ${rank}`;
    if (found) { link.type = "button"; link.className = "link"; link.addEventListener("click", () => openDetails(found.place)); }
    return link;
  }
  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text != null) element.textContent = text;
    return element;
  }
  const when = (mark) => clock(mark.time - state.begin());

  let listed = "";
  function drawLists() {
    const marks = [...state.marks.values()].sort((a, b) => a.time - b.time || a.number - b.number);
    const known = JSON.stringify([marks.length, marks.length && marks[marks.length - 1].number, state.begin(), marks.reduce((n, m) => n + m.times, 0), state.ranks.size]);
    if (known === listed) return;
    listed = known;
    const verdicts = marks.filter((m) => m.kind === "verdict" || m.kind === "hang").reverse();
    $("verdicts-section").hidden = !verdicts.length;
    $("verdicts").textContent = "";
    for (const mark of verdicts.slice(0, 30)) {
      const over = marks.find((m) => m.kind === "straggler over" && m.rank === mark.rank && m.time >= mark.time);
      const item = make("li", over ? "over" : "");
      const head = make("div", "head");
      head.append(make("b", "", mark.cause || mark.kind));
      if (mark.rank != null) head.append(rankLink(mark.rank));
      if (mark.place) head.append(make("code", "", mark.place));
      head.append(make("span", "", `${mark.step != null ? `step ${mark.step.toLocaleString("en")}, ` : ""}at ${when(mark)}${over ? `; over at ${when(over)}` : ""}`));
      item.append(head, make("div", "text", mark.text));
      $("verdicts").append(item);
    }
    drawEvents($("events"), marks.slice(-200).reverse(), "Nothing yet: world changes, faults, stragglers and verdicts will be listed here.");
  }
  function drawEvents(list, marks, none) {
    list.textContent = "";
    if (!marks.length) list.append(make("li", "none", none));
    for (const mark of marks) {
      const item = make("li");
      const text = make("span", "text", mark.text);
      item.append(make("span", "", when(mark)), make("span", mark.tone, mark.kind), text);
      list.append(item);
    }
  }
  function drawRanksNote() {
    const count = state.ranks.size;
    const note = !count ? "No rank has written anything yet."
      : state.run.many ? `${count.toLocaleString("en")} ranks: a row of pixels is ${count > 330 ? `the slowest of ${Math.ceil(count / 330)} ranks` : "a rank"}, coloured by its own time (compute and data) against the median of all; below, the slowest now. Click one for its details and its stack.`
        : "What each rank does, over time. Click one for its details and its stack.";
    setText($("ranks-note"), note);
  }

  // Details of a rank --------------------------------------------------------------------------------------------------

  let shownPlace = null;
  function openDetails(place) {
    shownPlace = place;
    if (!$("details").open) $("details").show();
    drawDetails();
    askStack();
    $("details-close").focus();
  }
  function drawDetails() {
    const rank = state.ranks.get(shownPlace);
    if (!rank) return;
    setText($("details-title"), LiveRanks.nameOf(rank));
    const facts = [["state", rank.state === "silent" ? `silent for ${clock(state.now - rank.last)}` : rank.state], ["host", rank.host], ["process", rank.pid], ["device", rank.device],
      ["step", rank.step < 0 ? null : rank.step.toLocaleString("en")], ["last heard", rank.last ? `at ${clock(rank.last - state.begin())}` : null],
      ["steps per second", rank.steps_s == null ? null : number(rank.steps_s)],
      ["time per step", rank.compute == null ? null : PARTS.filter((p) => rank[p] > 0).map((p) => `${p} ${seconds(rank[p])}`).join(", ")],
      ["own time", rank.factor == null ? null : `${rank.factor.toFixed(2)} times the median of all ranks`],
      ["sent", rank.bytes_s == null ? null : `${bytes(rank.bytes_s)} per second`]].filter(([, value]) => value != null);
    const list = $("details-facts");
    const text = JSON.stringify(facts);
    if (list.dataset.text !== text) {
      list.dataset.text = text;
      list.textContent = "";
      for (const [label, value] of facts) list.append(make("dt", "", label), make("dd", "", String(value)));
    }
    const mine = [...state.marks.values()].filter((m) => m.rank === rank.rank).reverse();
    const key = mine.map((m) => m.number).join();
    if ($("details-events").dataset.key !== key + shownPlace) {
      $("details-events").dataset.key = key + shownPlace;
      drawEvents($("details-events"), mine, "Nothing.");
    }
  }
  async function askStack() {
    const place = shownPlace, area = $("stack");
    area.className = "stack quiet";
    area.textContent = "asking…";
    let answer;
    try {
      const reply = await fetch(`stacks?place=${place}`);
      answer = reply.ok ? await reply.json() : { error: await reply.text() };
    } catch {
      answer = { error: "The server does not answer." };
    }
    if (place !== shownPlace) return;
    area.className = answer.text ? "stack" : "stack quiet";
    area.textContent = answer.text || answer.error;
  }
  function closeDetails() { $("details").close(); shownPlace = null; }
  $("details-close").addEventListener("click", closeDetails);
  $("stack-again").addEventListener("click", askStack);
  addEventListener("keydown", (event) => { if (event.key === "Escape" && $("details").open) closeDetails(); });
  $("find").addEventListener("submit", (event) => {
    event.preventDefault();
    const wanted = Number($("find-rank").value);
    const found = [...state.ranks.values()].find((r) => r.rank === wanted);
    if (found) openDetails(found.place);
  });
  LiveRanks.onOpen(openDetails);

  // Choices ------------------------------------------------------------------------------------------------------------

  function press(attribute, value) {
    for (const button of document.querySelectorAll(`[data-${attribute}]`)) button.setAttribute("aria-pressed", String(button.dataset[attribute] === value));
  }
  for (const button of document.querySelectorAll("[data-view]")) {
    button.addEventListener("click", () => {
      if (isOver || view === button.dataset.view) return;
      view = button.dataset.view;
      press("view", view);
      for (const one of charts.values()) one.zoomed = false;
      connect();
    });
  }
  for (const button of document.querySelectorAll("[data-x]")) {
    button.addEventListener("click", () => {
      metricX = button.dataset.x;
      press("x", metricX);
      for (const [key, one] of charts) if (key.startsWith("metric ")) { one.figure.remove(); charts.delete(key); }
      plan();
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    LiveRanks.drawKeys();
    for (const one of charts.values()) one.redraw();
    plan();
  });

  LiveRanks.drawKeys();
  connect();
})();
