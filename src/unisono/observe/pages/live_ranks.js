// What each rank does, over time: a strip a rank, and a heat map of all where there are many.
"use strict";
const LiveRanks = (() => {
  const { PARTS, clock, colour, makeKey, seconds, showTip } = LiveCharts;
  const STRIP = 18; // pixels of a strip
  const timeline = document.getElementById("timeline");
  const heat = document.getElementById("heat");
  const rows = new Map();
  const ruler = document.getElementById("ruler");
  const ABOVE = timeline.children.length; // what stands above the strips
  let open = () => {};
  let state = null;

  function parse(text) {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 1;
    const ctx = canvas.getContext("2d");
    ctx.fillStyle = text;
    ctx.fillRect(0, 0, 1, 1);
    const [r, g, b] = ctx.getImageData(0, 0, 1, 1).data;
    return (255 << 24) | (b << 16) | (g << 8) | r;
  }
  let palette = {};
  function readColours() {
    palette = { parts: PARTS.map((part) => parse(colour(`--${part}`))), bad: parse(colour("--bad")) };
    const mix = (a, b, t) => [0, 8, 16].reduce((all, s) => {
      const from = (a >> s) & 255, to = (b >> s) & 255;
      return all | (Math.round(from + (to - from) * t) << s);
    }, 255 << 24);
    const ground = parse(colour("--panel")), slow = parse(colour("--c1")), fast = parse(colour("--c0"));
    // 128 is the median of all; 160 takes twice as long, 96 half as long. What differs by less than a sixth is noise.
    palette.heat = [...Array(256).keys()].map((level) => {
      const share = Math.min(1, Math.max(0, Math.abs(level - 128) - 7) / 30);
      return level === 0 ? 0 : mix(ground, level > 128 ? slow : fast, share);
    });
  }

  const BADGES = { lost: "bad", failed: "bad", gone: "bad", silent: "warn", slow: "warn", training: "well" };
  function badge(element, text, rank) {
    element.className = `badge ${BADGES[text] || ""}`;
    element.textContent = text === "silent" ? `silent ${clock(Math.max(0, state.now - rank.last))}` : text;
  }

  function makeRow(place) {
    const row = document.createElement("div");
    row.className = "row";
    row.dataset.place = place;
    const name = document.createElement("button");
    name.type = "button";
    name.className = "name";
    const canvas = document.createElement("canvas");
    canvas.height = STRIP;
    const numbers = document.createElement("span");
    numbers.className = "numbers";
    const mark = document.createElement("span");
    row.append(name, canvas, numbers, mark);
    row.addEventListener("click", () => open(place));
    canvas.addEventListener("mousemove", (event) => pointStrip(event, place));
    canvas.addEventListener("mouseleave", () => showTip(""));
    return { row, name, canvas, numbers, mark };
  }

  function pointStrip(event, place) {
    const span = state.span();
    const box = event.target.getBoundingClientRect();
    const bin = span.first + Math.floor((event.clientX - box.left) / box.width * span.count);
    const cells = state.strips.get(bin)?.get(place);
    const total = cells ? cells.reduce((a, b) => a + b, 0) : 0;
    const when = clock(state.at(bin));
    const shares = cells && total ? PARTS.map((part, i) => [part, cells[i] / total]).filter(([, s]) => s > 0.004)
      .map(([part, s]) => `${part} ${Math.round(s * 100)} %`).join(", ") : "nothing reported";
    showTip(`${nameOf(state.ranks.get(place))} at ${when}: ${shares}`, event.clientX, event.clientY);
  }

  function nameOf(rank) {
    if (!rank) return "";
    const name = rank.place === rank.rank ? `rank ${rank.rank}` : `worker ${rank.place}`;
    return rank.mesh ? `${name}: ${rank.mesh}` : name;
  }

  function drawStrip(row, place, rank, span) {
    const { canvas } = row;
    if (canvas.width !== span.count) canvas.width = span.count;
    const ctx = canvas.getContext("2d");
    const image = ctx.createImageData(span.count, STRIP);
    const pixels = new Uint32Array(image.data.buffer);
    const dead = ["lost", "failed", "gone"].includes(rank.state) ? state.binOf(rank.last) : Infinity;
    for (let i = 0; i < span.count; i++) {
      const bin = span.first + i;
      const cells = state.strips.get(bin)?.get(place);
      let total = 0;
      if (cells) for (const cell of cells) total += cell;
      if (!total || (total < 16 && bin >= span.end - 3)) { // of the newest there may be too little to show yet
        if (bin > dead && bin <= dead + Math.max(1, span.count / 200)) for (let y = 0; y < STRIP; y++) pixels[y * span.count + i] = palette.bad;
        continue;
      }
      // A bin that is nearly covered, and the newest, which is not over yet, are drawn full.
      const full = total > 120 || bin >= span.end - 3 ? STRIP : STRIP * total / 200;
      let from = STRIP, sum = 0;
      for (let part = 0; part < PARTS.length; part++) {
        sum += cells[part];
        const to = Math.round(STRIP - full * sum / total);
        for (let y = to; y < from; y++) pixels[y * span.count + i] = palette.parts[part];
        from = Math.min(from, to);
      }
    }
    ctx.putImageData(image, 0, 0);
  }

  function drawRuler(span, marks) {
    ruler.textContent = "";
    const width = ruler.clientWidth || 400;
    const seconds = span.count * state.bins.width;
    const every = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400].find((s) => seconds / s * 64 < width) || 86400;
    const from = state.at(span.first);
    for (let t = Math.ceil(from / every) * every; t < from + seconds; t += every) {
      const label = document.createElement("span");
      label.textContent = clock(t);
      label.style.left = `${(t - from) / seconds * 100}%`;
      if ((t - from) / seconds < 0.94) ruler.append(label);
    }
    for (const mark of marks) {
      const share = (mark.at - from) / seconds;
      if (share < 0 || share > 1) continue;
      const pointer = document.createElement("span");
      pointer.className = `pointer ${mark.tone}`;
      pointer.style.left = `${share * 100}%`;
      pointer.addEventListener("mousemove", (event) => showTip(mark.text, event.clientX, event.clientY));
      pointer.addEventListener("mouseleave", () => showTip(""));
      ruler.append(pointer);
    }
  }

  function update(newState, marks) {
    state = newState;
    const span = state.span();
    const places = state.rows.filter((place) => state.ranks.has(place));
    timeline.classList.toggle("tight", places.length > 16);
    drawRuler(span, marks);
    for (const [place, row] of rows) if (!places.includes(place)) { row.row.remove(); rows.delete(place); }
    places.forEach((place, i) => {
      let row = rows.get(place);
      if (!row) rows.set(place, row = makeRow(place));
      if (timeline.children[i + ABOVE] !== row.row) timeline.insertBefore(row.row, timeline.children[i + ABOVE] || null);
      const rank = state.ranks.get(place);
      row.row.classList.toggle("lost", ["lost", "failed", "gone"].includes(rank.state));
      row.name.textContent = nameOf(rank);
      row.numbers.textContent = rank.steps_s == null ? "" : `step ${rank.step.toLocaleString("en")} · own ${seconds(rank.own)}` +
        (Math.abs(rank.factor - 1) >= 0.1 ? ` · ×${rank.factor.toFixed(rank.factor < 10 ? 1 : 0)}` : "");
      badge(row.mark, rank.state, rank);
      drawStrip(row, place, rank, span);
    });
    for (const id of ["heat", "heat-ends", "heat-keys", "find"]) document.getElementById(id).hidden = !state.run.many;
    if (state.run.many) drawHeat(span);
  }

  // The heat map -----------------------------------------------------------------------------------------------------

  function countPlaces() { return Math.max(-1, ...state.ranks.keys()) + 1; }  // one that never wrote leaves a gap
  function groupSize(count) { return Math.max(1, Math.ceil(count / 330)); }

  function drawHeat(span) {
    const ranks = [...state.ranks.values()];
    const [top, bottom] = document.getElementById("heat-ends").children;
    top.textContent = nameOf(ranks[0]);
    bottom.textContent = nameOf(ranks[ranks.length - 1]);
    const count = countPlaces(), group = groupSize(count), height = Math.ceil(count / group);
    if (heat.width !== span.count) heat.width = span.count;
    if (heat.height !== height) heat.height = height;
    const ctx = heat.getContext("2d");
    const image = ctx.createImageData(span.count, height);
    const pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < span.count; i++) {
      const levels = state.heat.get(span.first + i);
      if (!levels) continue;
      for (let y = 0; y < height; y++) {
        let worst = 0, last = Math.min(levels.length, (y + 1) * group);
        for (let place = y * group; place < last; place++) if (levels[place] > worst) worst = levels[place];
        pixels[y * span.count + i] = palette.heat[worst];
      }
    }
    for (const rank of ranks) {
      if (!["lost", "failed", "silent", "gone"].includes(rank.state)) continue;
      const y = Math.floor(rank.place / group);
      for (let i = Math.max(0, state.binOf(rank.last) + 1 - span.first); i < span.count; i++) pixels[y * span.count + i] = palette.bad;
    }
    ctx.putImageData(image, 0, 0);
  }

  function findHeat(event) {
    const span = state.span();
    const box = heat.getBoundingClientRect();
    const bin = span.first + Math.floor((event.clientX - box.left) / box.width * span.count);
    const count = countPlaces(), group = groupSize(count);
    const y = Math.floor((event.clientY - box.top) / box.height * Math.ceil(count / group));
    const levels = state.heat.get(bin);
    let worst = null;
    for (let place = y * group; place < Math.min((y + 1) * group, count); place++) {
      const rank = state.ranks.get(place);
      if (!rank) continue;
      const isDead = ["lost", "failed", "silent", "gone"].includes(rank.state) && bin > state.binOf(rank.last);
      const level = isDead ? 999 : levels ? levels[place] || 0 : 0;
      if (!worst || level > worst.level) worst = { place, level, rank };
    }
    return { ...worst, bin };
  }
  heat.addEventListener("mousemove", (event) => {
    const found = findHeat(event);
    if (!found.rank) return showTip("");
    const factor = 2 ** ((found.level - 128) / 32);
    const what = found.level === 999 ? found.rank.state : found.level ? `${factor.toFixed(2)} times the median` : "nothing reported";
    showTip(`${nameOf(found.rank)} at ${clock(state.at(found.bin))}: ${what}`, event.clientX, event.clientY);
  });
  heat.addEventListener("mouseleave", () => showTip(""));
  heat.addEventListener("click", (event) => { const found = findHeat(event); if (found.rank) open(found.place); });

  function drawKeys() {
    readColours();
    const keys = document.getElementById("keys");
    keys.textContent = "";
    for (const part of PARTS) keys.append(makeKey(part, part));
    keys.append(makeKey("silent", "nothing reported"), makeKey("lost", "lost"));
    const place = document.getElementById("heat-keys");
    place.textContent = "";
    const hex = (value) => `rgb(${value & 255},${(value >> 8) & 255},${(value >> 16) & 255})`;
    for (const [level, text] of [[105, "faster"], [128, "as the median rank"], [147, "1.5 times as slow"], [168, "twice and more"]]) {
      const key = document.createElement("span"), sample = document.createElement("i");
      sample.style.background = hex(palette.heat[level]);
      key.append(sample, text);
      place.append(key);
    }
    const key = document.createElement("span"), sample = document.createElement("i");
    sample.style.background = hex(palette.bad);
    key.append(sample, "lost or silent");
    place.append(key);
  }

  return { update, drawKeys, nameOf, badge, onOpen: (fn) => { open = fn; } };
})();
