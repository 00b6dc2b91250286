// Draws the charts of a page from the JSON in it, in the colours of page.css; again when size or colours change.
(() => {
  "use strict";
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (v) => {
    if (v == null) return "";
    const size = Math.abs(v);
    if (size >= 1e6 || (size < 1e-3 && size > 0)) return v.toExponential(2);
    return String(Number(v.toPrecision(4)));
  };

  function draw(place) {
    const spec = charts[Number(place.dataset.chart)];
    const tables = spec.series.map((s) => [s.xs, s.ys]);
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    const axis = (label, more) => ({
      label, labelSize: 22, labelFont: "13px system-ui, sans-serif", font: "12px system-ui, sans-serif",
      stroke: colour("--quiet"), grid: { stroke: colour("--rule"), width: 1 },
      ticks: { stroke: colour("--rule"), width: 1, size: 5 }, ...more,
    });
    const xs = data[0];
    const from = xs[0], to = xs[xs.length - 1];
    const doubled = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024];
    const tens = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8].flatMap((n) => [n, 2 * n, 5 * n]);
    const whole = spec.whole ? { incrs: to - from < 100 ? doubled : tens } : {};
    const room = spec.whole ? Math.max(0.2, (to - from) * 0.05) : 0;
    const options = {
      width: place.clientWidth, height: 300,
      scales: {
        x: { time: false, range: spec.whole ? () => [from - room, to + room] : undefined },
        y: { range: spec.zero ? (u, low, high) => [0, (high || 1) * 1.08] : undefined },
      },
      axes: [axis(spec.x, { size: 34, ...whole }), axis(spec.y, { size: 52 })],
      legend: {
        markers: {
          width: 2, dash: (u, i) => (spec.series[i - 1].dashed ? "dashed" : "solid"),
          fill: (u, i) => (spec.series[i - 1].dashed ? "transparent" : colour(`--c${spec.series[i - 1].colour}`)),
        },
      },
      cursor: { points: { size: 6 }, drag: { x: true, y: false } },
      series: [
        { label: spec.x, value: (u, v) => number(v) },
        ...spec.series.map((s) => ({
          label: s.name, stroke: colour(`--c${s.colour}`), width: 2, spanGaps: true, value: (u, v) => number(v),
          dash: s.dashed ? [6, 5] : undefined, points: { show: s.dots, size: 7, fill: colour(`--c${s.colour}`) },
        })),
      ],
    };
    place.textContent = "";
    place._chart = new uPlot(options, data, place);
  }

  const places = [...document.querySelectorAll(".chart")];
  places.forEach(draw);
  const resize = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (target._chart && target.clientWidth !== target._chart.width) {
        target._chart.setSize({ width: target.clientWidth, height: 300 });
      }
    }
  });
  places.forEach((place) => resize.observe(place));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => places.forEach(draw));
})();
