"use strict";
// Draws the charts of #data. Each run has a color, each line of a chart a dash pattern.
(() => {
  const { runs, charts } = JSON.parse(document.getElementById("data").textContent);
  const DASHES = [[], [7, 4], [2, 3]];
  const SHOWN_IN_TIP = 10;
  const hidden = new Set();
  const smooth = document.getElementById("smooth"), time = document.getElementById("time");
  const views = [];

  const element = (parent, name, className = "", text = "") => {
    const made = document.createElement(name);
    made.className = className;
    made.textContent = text;
    return parent.appendChild(made);
  };
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const checkbox = (parent, checked, changed) => {
    const box = element(parent, "input");
    box.type = "checkbox";
    box.checked = checked;
    box.addEventListener("change", () => changed(box.checked));
    return box;
  };

  // Factor and name of the display unit.
  const scaled = (unit, largest) => {
    if (unit === "bytes") return largest >= 2 ** 30 ? [2 ** -30, "GiB"] : largest >= 2 ** 20 ? [2 ** -20, "MiB"] : [2 ** -10, "KiB"];
    if (unit === "seconds") return largest >= 1 ? [1, "s"] : [1e3, "ms"];
    if (unit === "milliseconds") return largest >= 1e3 ? [1e-3, "s"] : [1, "ms"];
    return unit === "fraction" ? [100, "%"] : [1, unit];
  };
  const elapsed = (largest) => (largest >= 2 * 3600 ? [1 / 3600, "hours"] : largest >= 120 ? [1 / 60, "minutes"] : [1, "seconds"]);
  const number = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    return value.toLocaleString("en", { maximumSignificantDigits: size >= 1e4 ? 7 : 4 });
  };
  const tick = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential().replace("e+", "e");
    return value.toLocaleString("en", { maximumFractionDigits: 6 });
  };
  const most = (lines, key) => lines.reduce((high, line) => line[key].reduce((a, b) => Math.max(a, Math.abs(b)), high), 0);

  function series(chart) {
    const found = [], x = time.checked ? "t" : "x";
    const visible = chart.lines.filter((line) => !hidden.has(line.run) && line[x]);
    const xScale = time.checked && visible.length ? elapsed(most(visible, "t")) : [1, "step"];
    const yScale = scaled(chart.unit, most(chart.lines, "y"));
    const add = (line, points, look) =>
      found.push({
        line, ...look,
        x: points[x].map((value) => value * xScale[0]),
        y: points.y.map((value) => (chart.log && value <= 0 ? null : value * yScale[0])),
      });
    for (const line of visible) {
      const smoothing = smooth.checked && line.smooth;
      add(line, line, smoothing ? { alpha: 0.28, width: 1, told: false } : { alpha: 1, width: 1.5, told: true });
      if (smoothing) add(line, line.smooth, { alpha: 1, width: 2, told: true });
    }
    return { found, xName: xScale[1] };
  }

  // Runs log at different steps, so the tip shows the point of each run that is nearest to the cursor, unless that is far away.
  function nearest(plot, index, at) {
    const xs = plot.data[0], ys = plot.data[index];
    let low = at, high = at;
    while (low >= 0 && ys[low] == null) low--;
    while (high < ys.length && ys[high] == null) high++;
    const x = plot.posToVal(plot.cursor.left, "x"), away = (place) => Math.abs(x - (xs[place] ?? Infinity));
    const place = away(low) <= away(high) ? low : high;
    const between = low >= 0 && high < ys.length;
    return between || away(place) < (plot.scales.x.max - plot.scales.x.min) / 30 ? place : null;
  }

  function tell(plot, tip, chart, found, xName) {
    const { left, top, idx } = plot.cursor;
    tip.hidden = left < 0 || idx == null;
    if (tip.hidden) return;
    tip.textContent = "";
    const rows = [];
    found.forEach((one, place) => {
      const at = one.told ? plot.cursor.idxs[place + 1] : null;
      if (at != null) rows.push({ one, y: plot.data[place + 1][at], away: Math.abs(plot.valToPos(plot.data[place + 1][at], "y") - top) });
    });
    rows.sort((a, b) => a.away - b.away).splice(SHOWN_IN_TIP);
    rows.sort((a, b) => b.y - a.y);
    const x = plot.posToVal(left, "x");
    element(tip, "span", "", xName === "step" ? `step ${Math.round(x)}` : `${number(x)} ${xName}`);
    for (const { one, y } of rows) {
      const row = element(tip, "div");
      element(row, "i").style.background = runs[one.line.run].colour;
      const names = [runs.length > 1 && runs[one.line.run].label, chart.names.length > 1 && chart.names[one.line.line]];
      element(row, "span", "", names.filter(Boolean).join(", "));
      element(row, "b", "", number(y));
    }
    const room = plot.root.clientWidth - tip.offsetWidth, beside = left > plot.over.clientWidth / 2 ? -tip.offsetWidth - 14 : 14;
    tip.style.left = `${Math.max(0, Math.min(plot.over.offsetLeft + left + beside, room))}px`;
    tip.style.top = `${Math.max(0, Math.min(top - 10, plot.over.clientHeight - tip.clientHeight))}px`;
  }

  function draw(view) {
    const { chart, figure, box, tip } = view;
    view.plot?.destroy();
    view.plot = null;
    tip.hidden = true;
    const { found, xName } = series(chart);
    figure.hidden = !found.length;
    if (figure.hidden) return;
    const axis = { stroke: style("--faint"), grid: { stroke: style("--grid"), width: 1 }, ticks: { stroke: style("--grid"), width: 1 } };
    const ticks = (plot, splits) => splits.map((value) => (value == null ? "" : tick(value)));
    view.plot = new uPlot(
      {
        width: box.clientWidth,
        height: 250,
        legend: { show: false },
        scales: { x: { time: false }, y: { distr: chart.log ? 3 : 1 } },
        cursor: { dataIdx: nearest, points: { size: 7 }, y: false, drag: { x: true, y: false } },
        axes: [
          { ...axis, values: ticks, label: xName, labelSize: 18, labelFont: "12px system-ui", size: 32 },
          { ...axis, values: ticks, size: (plot, values) => 18 + 6.5 * Math.max(3, ...(values ?? []).map((text) => text.length)) },
        ],
        series: [
          {},
          ...found.map((one) => ({
            stroke: runs[one.line.run].colour,
            width: one.width,
            alpha: one.alpha,
            dash: DASHES[one.line.line],
            points: { show: one.x.length <= 16, size: 5, fill: runs[one.line.run].colour, ...(one.told ? {} : { size: 0 }) },
          })),
        ],
        hooks: { setCursor: [(plot) => tell(plot, tip, chart, found, xName)] },
      },
      uPlot.join(found.map((one) => [one.x, one.y])),
      box,
    );
  }
  const media = document.querySelectorAll("[data-run]");
  const drawAll = () => {
    views.forEach(draw);
    media.forEach((figure) => (figure.hidden = hidden.has(Number(figure.dataset.run))));
  };

  const choice = document.getElementById("runs");
  runs.forEach((run, index) => {
    const label = element(choice, "label");
    checkbox(label, true, (checked) => {
      checked ? hidden.delete(index) : hidden.add(index);
      drawAll();
    });
    element(label, "i").style.background = run.colour;
    label.append(run.label);
  });
  smooth.addEventListener("change", drawAll);
  time.addEventListener("change", drawAll);
  document.getElementById("over").hidden = !charts.some((chart) => chart.lines.some((line) => line.t));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

  const sized = new ResizeObserver((entries) => {
    for (const { target, contentRect } of entries) {
      const view = views.find(({ box }) => box === target);
      if (view.plot && view.plot.width !== contentRect.width) view.plot.setSize({ width: contentRect.width, height: 250 });
    }
  });
  const main = document.getElementById("charts");
  for (const chart of charts) {
    const figure = element(main, "figure"), caption = element(figure, "figcaption");
    const unit = scaled(chart.unit, most(chart.lines, "y"))[1];
    element(element(caption, "h3", "", chart.title), "span", "", unit && `, ${unit}`);
    const key = element(caption, "div", "key");
    if (chart.names.length > 1)
      chart.names.forEach((name, place) => {
        if (!chart.lines.some((line) => line.line === place)) return;
        const item = element(key, "span", "", name), dashes = DASHES[place].join(" ");
        item.insertAdjacentHTML("afterbegin",
          `<svg width="22" height="6"><path d="M0 3h22" stroke="currentColor" stroke-width="2" stroke-dasharray="${dashes}"/></svg>`);
      });
    const box = element(figure, "div", "plot");
    const view = { chart, figure, box, tip: element(box, "div", "tip"), plot: null };
    const positive = chart.lines.some((line) => line.y.some((value) => value > 0));
    if (positive) {
      const label = element(key, "label");
      checkbox(label, chart.log, (checked) => {
        chart.log = checked;
        draw(view);
      });
      label.append(" log");
    }
    chart.log &&= positive;
    views.push(view);
    sized.observe(box);
  }
  drawAll();
})();
