// The live page's line charts, drawn with uPlot in the colours of page.css and live.css; marks stand in all of them.
"use strict";
const LiveCharts = (() => {
  const PARTS = ["compute", "compression", "communication", "waiting", "data"];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const HEIGHT = 210;

  function number(v) {
    if (v == null) return "–";
    const size = Math.abs(v);
    if (size >= 1e6 || (size < 1e-3 && size > 0)) return v.toExponential(2);
    if (size >= 1e4) return Math.round(v).toLocaleString("en");
    return String(Number(v.toPrecision(4)));
  }
  function clock(s) {
    const sign = s < 0 ? "-" : "";
    s = Math.round(Math.abs(s));
    const parts = [Math.floor(s / 3600), Math.floor(s / 60) % 60, s % 60];
    if (!parts[0]) parts.shift();
    return sign + parts.map((p, i) => (i ? String(p).padStart(2, "0") : p)).join(":");
  }
  function bytes(v) {
    const names = ["B", "kB", "MB", "GB", "TB"];
    let i = 0;
    while (v >= 1000 && i < names.length - 1) { v /= 1000; i++; }
    return `${Number(v.toPrecision(3))} ${names[i]}`;
  }
  function seconds(v) {
    if (v == null) return "–";
    return v < 1e-3 ? `${number(v * 1e6)} µs` : v < 1 ? `${Number((v * 1e3).toPrecision(3))} ms` : `${Number(v.toPrecision(3))} s`;
  }

  const tip = document.getElementById("tip");
  function showTip(text, x, y) {
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - box.width - 8))}px`;
    tip.style.top = `${y + 14 + box.height > innerHeight ? y - box.height - 10 : y + 14}px`;
  }

  // A chart: `spec` has title, axes ("time" or "step"), series [{label, colour, fill, dash, width}], values formatter.
  class Chart {
    constructor(parent, spec) {
      this.spec = spec;
      this.figure = document.createElement("figure");
      const caption = document.createElement("figcaption");
      caption.append(spec.title);
      this.now = document.createElement("span");
      this.now.className = "now";
      caption.append(this.now);
      this.figure.append(caption);
      if (spec.keys) {
        const keys = document.createElement("div");
        keys.className = "keys";
        for (const [name, text] of spec.keys) keys.append(makeKey(name, text));
        this.figure.append(keys);
      }
      this.place = document.createElement("div");
      this.place.className = "chart";
      this.figure.append(this.place);
      parent.append(this.figure);
      this.marks = [];
      this.data = null;
      this.zoomed = false;
      new ResizeObserver(() => {
        if (this.plot && this.place.clientWidth && this.place.clientWidth !== this.plot.width) {
          this.plot.setSize({ width: this.place.clientWidth, height: HEIGHT });
        }
      }).observe(this.place);
    }

    update(data, marks, now) {
      this.marks = marks;
      this.now.textContent = now || "";
      this.figure.hidden = !data[0].length;
      this.data = data;
      if (this.figure.hidden) return;
      if (!this.plot) this.draw();
      else this.plot.setData(data, !this.zoomed);
      if (this.zoomed) this.plot.redraw();
      if (this.cut) this.now.textContent += `; peaks to ${(this.spec.show || number)(this.cut)} are cut off`;
    }

    draw() {
      const spec = this.spec;
      const axis = (more) => ({
        font: "12px system-ui, sans-serif", stroke: colour("--quiet"), grid: { stroke: colour("--rule"), width: 1 },
        ticks: { stroke: colour("--rule"), width: 1, size: 4 }, ...more,
      });
      const isTime = spec.x === "time";
      const options = {
        width: this.place.clientWidth || 400, height: HEIGHT,
        legend: { show: false },
        cursor: { points: { size: 6 }, drag: { x: true, y: false } },
        scales: {
          x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
          y: { range: spec.zero ? (u, low, high) => [0, spec.clip ? this.clip(u, high) : (high || 1) * 1.06] : (u, low, high) => pad(low, high) },
        },
        axes: [
          axis({
            size: 28, space: 70, values: isTime ? (u, vs) => vs.map(clock) : (u, vs) => vs.map((v) => v.toLocaleString("en")),
            incrs: isTime ? [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 28800, 86400, 172800] : undefined,
          }),
          axis({ size: 58, values: (u, vs) => vs.map(spec.show || number) }),
        ],
        series: [{}, ...spec.series.map((s) => ({
          label: s.label, width: s.width ?? 1.75, stroke: s.stroke === null ? "transparent" : colour(s.colour),
          fill: s.fill ? (s.fill === true ? colour(s.colour) : colour(s.colour) + s.fill) : undefined,
          dash: s.dash, points: { show: (u, i, from, to) => to - from < 3, size: 6 }, spanGaps: !!s.span,
        }))],
        bands: spec.bands ? spec.bands.map((b) => ({ series: b.series, fill: colour(b.colour) + "33" })) : undefined,
        hooks: {
          draw: [(u) => this.drawMarks(u)],
          setCursor: [(u) => this.point(u)],
          setSelect: [(u) => { if (u.select.width > 0) this.zoomed = true; }],
        },
      };
      this.place.textContent = "";
      this.plot = new uPlot(options, this.data, this.place);
      this.plot.over.addEventListener("dblclick", () => { this.zoomed = false; });
      this.plot.over.addEventListener("mouseleave", () => showTip(""));
    }

    // A step in which the world changed, or a model was compiled, would press all others flat.
    clip(u, high) {
      const [from, to] = u.series[0].idxs || [0, u.data[0].length - 1];
      const tops = u.data[this.spec.clip].slice(from, to + 1).filter((v) => v != null).sort((a, b) => a - b);
      const usual = tops[Math.floor(tops.length * 0.75)] || 0;
      this.cut = tops.length > 10 && high > 5 * usual ? high : null;
      return (this.cut ? 2.5 * usual : high || 1) * 1.06;
    }

    redraw() {
      if (this.plot) { this.plot.destroy(); this.draw(); }
    }

    position(mark) { return this.spec.x === "time" ? mark.at : mark.step; }

    drawMarks(u) {
      const { ctx } = u;
      const { left, top, width, height } = u.bbox;
      ctx.save();
      for (const mark of this.marks) {
        const value = this.position(mark);
        if (value == null) continue;
        const x = Math.round(u.valToPos(value, "x", true));
        if (x < left || x > left + width) continue;
        ctx.strokeStyle = ctx.fillStyle = colour(mark.tone === "bad" ? "--bad" : "--warn");
        ctx.globalAlpha = 0.75;
        ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
        ctx.beginPath();
        ctx.moveTo(x, top);
        ctx.lineTo(x, top + height);
        ctx.stroke();
        ctx.globalAlpha = 1;
        const size = 4 * devicePixelRatio;
        ctx.beginPath();
        ctx.moveTo(x - size, top);
        ctx.lineTo(x + size, top);
        ctx.lineTo(x, top + 1.6 * size);
        ctx.fill();
      }
      ctx.restore();
    }

    point(u) {
      const { left, top, idx } = u.cursor;
      if (left == null || left < 0 || idx == null) return;
      const near = this.marks.filter((m) => this.position(m) != null && Math.abs(u.valToPos(this.position(m), "x") - left) < 6);
      const x = u.data[0][idx];
      const show = this.spec.show || number;
      const lines = [this.spec.x === "time" ? clock(x) : `step ${x.toLocaleString("en")}`];
      const values = this.spec.tip ? this.spec.tip(u.data, idx) : this.spec.series.map((s, i) => [s.label, u.data[i + 1][idx]]);
      for (const [label, value] of values) if (label && value != null) lines.push(`${label} ${show(value)}`);
      const box = u.over.getBoundingClientRect();
      showTip(near.length ? near.map((m) => m.text).join("\n") : lines.join("  ·  "), box.left + left, box.top + top);
    }
  }

  function pad(low, high) {
    if (low == null) return [0, 1];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  }

  function makeKey(name, text) {
    const key = document.createElement("span");
    key.className = `key ${name}`;
    key.append(document.createElement("i"), text);
    return key;
  }

  return { Chart, PARTS, bytes, clock, colour, makeKey, number, seconds, showTip };
})();
