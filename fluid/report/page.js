"use strict";
// Draws the run from the data in the page. The user chose its names: they enter the page as text only, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const state = { from: 0, to: data.makespan || 1, chosen: -1, shown: data.trials.map(() => true) };

  function svg(parent, tag, attributes, text) {
    const node = document.createElementNS(SVG, tag);
    for (const name in attributes) node.setAttribute(name, attributes[name]);
    if (text !== undefined) node.textContent = text;
    parent.appendChild(node);
    return node;
  }
  function html(parent, tag, text, className) {
    const node = document.createElement(tag);
    if (text !== undefined) node.textContent = text;
    if (className) node.className = className;
    parent.appendChild(node);
    return node;
  }
  // Wheel events arrive faster than thousands of bars can be drawn, so each drawing runs at most once per frame.
  const waiting = new Set();
  function soon(draw) {
    if (waiting.has(draw)) return;
    waiting.add(draw);
    requestAnimationFrame(() => { waiting.delete(draw); draw(); });
  }
  const clear = (node) => { node.textContent = ""; return node; };

  // --- Axes

  const { unitFor, duration } = format;
  function niceStep(span, most) {
    const least = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * (1 - 1e-9));
  }
  const timeTicks = (from, to, most) => ticks(from, to, format.tickStep(to - from, most, to));
  function ticks(from, to, step) {
    const found = [];
    for (let k = Math.ceil(from / step - 1e-9); k * step <= to + step * 1e-9; k++) found.push(k * step);
    return found;
  }

  // --- The tooltip

  const tooltip = byId("tooltip");
  function showTooltip(event, text) {
    tooltip.hidden = false;
    tooltip.textContent = text;
    const box = tooltip.getBoundingClientRect();
    const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 10 : event.clientX + 14;
    tooltip.style.left = Math.max(4, left) + "px";
    tooltip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4)) + "px";
  }
  const hideTooltip = () => { tooltip.hidden = true; };

  // --- Devices over time

  const gantt = byId("gantt"), busy = byId("busy");
  const LANES = data.lanes.length;
  const LANE = Math.max(4, Math.min(52, Math.floor(620 / Math.max(1, LANES))));
  const several = new Set(data.hosts).size > 1;
  const laneName = (lane) => (several ? data.hosts[lane] + " " : "") + data.lanes[lane];
  const LEFT = Math.min(180, 14 + 6.5 * Math.max(6, ...data.lanes.map((_, lane) => laneName(lane).length)));
  const RIGHT = 14, TOP = 4, STRIP = 62, ROOF = 14;
  let plot = 600;

  const x = (seconds) => LEFT + ((seconds - state.from) / (state.to - state.from)) * plot;
  const secondsAt = (px) => state.from + ((px - LEFT) / plot) * (state.to - state.from);

  function drawTimeline() {
    plot = Math.max(100, gantt.clientWidth - LEFT - RIGHT);
    drawGantt();
    drawBusy();
  }

  function drawGantt() {
    clear(gantt);
    const height = TOP + LANES * LANE;
    gantt.setAttribute("height", height + 2);
    const clip = svg(svg(gantt, "defs", {}), "clipPath", { id: "plot" });
    svg(clip, "rect", { x: LEFT, y: 0, width: plot, height: height + 2 });
    const gap = LANE >= 10 ? 1.5 : LANE > 5 ? 0.5 : 0;
    const every = Math.max(1, Math.ceil(12 / LANE));
    for (let lane = 0; lane < LANES; lane++) {
      const y = TOP + lane * LANE;
      svg(gantt, "rect", { x: LEFT, y: y + gap, width: plot, height: LANE - 2 * gap, fill: "var(--lane)" });
      if (lane % every === 0) {
        let name = laneName(lane);
        if (name.length * 6.5 + 14 > LEFT) name = "\u2026" + name.slice(-Math.floor((LEFT - 20) / 6.5));
        svg(gantt, "text", { x: LEFT - 8, y: y + Math.max(LANE, 12) / 2 + 4, "text-anchor": "end" }, name);
      }
    }
    const inside = svg(gantt, "g", { "clip-path": "url(#plot)" });
    for (const tick of timeTicks(state.from, state.to, plot / 80)) {
      svg(inside, "line", { x1: x(tick), x2: x(tick), y1: TOP, y2: height, stroke: "var(--grid)" });
    }
    for (const [lane, from, to] of data.absent) {
      const size = { x: x(from), y: TOP + lane * LANE, width: x(to) - x(from), height: LANE };
      svg(svg(inside, "rect", { ...size, fill: "var(--absent)", opacity: 0.6 }), "title", {}, "device absent");
    }
    drawBlocks(inside, gap);
  }

  function drawBlocks(parent, gap) {
    const labels = [];
    for (const [position, lane, lanes, slot, slots] of data.blocks) {
      const [row, from, to, , pause] = data.segments[position];
      if (to < state.from || from > state.to) continue;
      const trial = data.trials[row];
      const tall = (lanes * LANE - 2 * gap) / slots;
      const left = x(from), right = x(to), top = TOP + lane * LANE + gap + slot * tall;
      const faded = !state.shown[row] || (state.chosen >= 0 && state.chosen !== row);
      const thin = Math.min(0.5, Math.max(0, (right - left) / 8));
      svg(parent, "rect", {
        x: left, y: top + (slots > 1 ? 0.4 : 0), width: Math.max(0.4, right - left - thin),
        height: Math.max(0.5, tall - (slots > 1 ? 0.8 : 0)), fill: trial.colour, rx: Math.min(2, tall / 6, (right - left) / 4),
        "data-s": position, class: state.chosen === row ? "on" : faded ? "dim" : "",
      });
      if (pause > 0 && x(from + pause) - left > 1) {
        svg(parent, "rect", { x: left, y: top, width: x(from + pause) - left, height: tall, fill: "var(--card)", opacity: 0.55, class: "label" });
      }
      if (!faded && tall >= 9) labels.push([Math.max(left, LEFT), Math.min(right, LEFT + plot), top + tall / 2, trial, position, tall]);
    }
    for (const [left, right, middle, trial, position, tall] of labels) {
      const size = Math.min(11, tall - 1), room = (right - left - 6) / (size * 0.58);
      const where = data.placements[data.segments[position][3]];
      const share = where.includes(" of ") ? "  " + where.split(" ")[0] : where.includes(":") ? "  x" + where.split(" ")[0] : "";
      const name = [trial.id + share, trial.id, trial.short].find((text) => text.length <= room);
      if (!name) continue;
      const style = `fill:${trial.ink};font-size:${size}px`;
      svg(parent, "text", { x: left + 4, y: middle + size * 0.36, style, class: "label" }, name);
    }
  }

  function drawBusy() {
    clear(busy);
    busy.setAttribute("height", STRIP + 34);
    const [times, shares] = data.busy;
    const y = (share) => ROOF + (1 - share) * (STRIP - ROOF);
    const clip = svg(svg(busy, "defs", {}), "clipPath", { id: "strip" });
    svg(clip, "rect", { x: LEFT, y: 0, width: plot, height: STRIP + 8 });
    const path = [];
    shares.forEach((share, k) => {
      if (times[k + 1] < state.from || times[k] > state.to) return;
      const a = Math.max(LEFT - 5, x(times[k])), b = Math.min(LEFT + plot + 5, x(times[k + 1]));
      path.push(`${path.length ? "L" : "M" + a.toFixed(1) + " " + STRIP + "L"}${a.toFixed(1)} ${y(share).toFixed(1)}L${b.toFixed(1)} ${y(share).toFixed(1)}`);
      path.last = b;
    });
    if (path.length) {
      const d = path.join("") + `L${path.last.toFixed(1)} ${STRIP}Z`;
      svg(busy, "path", { d, fill: "var(--busy)", "clip-path": "url(#strip)" });
    }
    for (const [share, name] of [[0, "0"], [0.5, "busy"], [1, "100 %"]]) {
      svg(busy, "text", { x: LEFT - 8, y: y(share) + 4, "text-anchor": "end" }, name);
      svg(busy, "line", { x1: LEFT, x2: LEFT + plot, y1: y(share), y2: y(share), stroke: "var(--rule)" });
    }
    const [unit, size] = unitFor(state.to);
    for (const tick of timeTicks(state.from, state.to, plot / 80)) {
      const label = String(Number((tick / size).toPrecision(6)));
      svg(busy, "text", { x: x(tick), y: STRIP + 16, "text-anchor": "middle" }, label);
    }
    svg(busy, "text", { x: LEFT + plot, y: STRIP + 30, "text-anchor": "end" }, `time (${unit})`);
  }

  function zoom(from, to) {
    const all = data.makespan || 1, span = Math.max(Math.min(to - from, all), all / 1e5);
    state.from = Math.max(0, Math.min(from, all - span));
    state.to = state.from + span;
    soon(drawTimeline);
  }
  const zoomAt = (middle, factor) => zoom(middle - (middle - state.from) * factor, middle + (state.to - middle) * factor);

  function pointerOf(event) {
    const px = event.clientX - gantt.getBoundingClientRect().left;
    return Math.max(LEFT, Math.min(LEFT + plot, px));
  }
  let drag = null;
  gantt.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = { at: pointerOf(event), shade: null };
  });
  addEventListener("pointermove", (event) => {
    if (!drag) return;
    const [a, b] = [drag.at, pointerOf(event)].sort((p, q) => p - q);
    if (b - a < 4 && !drag.shade) return;
    hideTooltip();
    drag.shade = drag.shade || svg(gantt, "rect", { y: 0, height: "100%", fill: "var(--accent)", opacity: 0.25 });
    drag.shade.setAttribute("x", a);
    drag.shade.setAttribute("width", b - a);
    drag.range = [a, b];
  });
  addEventListener("pointerup", (event) => {
    if (!drag) return;
    const { shade, range } = drag;
    drag = null;
    if (shade) {
      shade.remove();
      if (range[1] - range[0] > 4) zoom(secondsAt(range[0]), secondsAt(range[1]));
    } else {
      const position = event.target.getAttribute && event.target.getAttribute("data-s");
      choose(position === null || position === undefined ? -1 : data.segments[position][0]);
    }
  });
  gantt.addEventListener("pointermove", (event) => {
    const position = event.target.getAttribute("data-s");
    if (drag || position === null) { if (!drag) hideTooltip(); return; }
    const [row, from, to, where, pause] = data.segments[position];
    const lines = [data.trials[row].id, data.placements[where], `${duration(from)} to ${duration(to)}: ${duration(to - from)}`];
    if (pause > 0) lines.push(`including a resize of ${duration(pause)}`);
    showTooltip(event, lines.join("\n"));
  });
  gantt.addEventListener("pointerleave", hideTooltip);
  gantt.addEventListener("dblclick", () => zoom(0, data.makespan));
  gantt.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoomAt(secondsAt(pointerOf(event)), event.deltaY > 0 ? 1.25 : 0.8);
    } else if (event.deltaX) {
      const by = (event.deltaX / plot) * (state.to - state.from);
      if (state.to - state.from < data.makespan) { event.preventDefault(); zoom(state.from + by, state.to + by); }
    }
  }, { passive: false });
  byId("zoom-in").onclick = () => zoomAt((state.from + state.to) / 2, 0.5);
  byId("zoom-out").onclick = () => zoomAt((state.from + state.to) / 2, 2);
  byId("zoom-all").onclick = () => zoom(0, data.makespan);

  // --- Curves

  const curves = byId("curves"), metricBox = byId("metric"), overBox = byId("over"), logBox = byId("log"), lessBox = byId("less");
  let drawn = [];

  function drawCurves() {
    clear(curves);
    drawn = [];
    const metric = Number(metricBox.value), over = Number(overBox.value);
    const width = curves.clientWidth, height = 340, left = 64, right = 14, top = 8, bottom = 34;
    curves.setAttribute("height", height);
    const lines = [];
    data.trials.forEach((trial, row) => {
      if (!state.shown[row] || !trial.curves.length) return;
      const xs = trial.curves[metric][over], ys = trial.curves[metric][2];
      if (ys.length) lines.push([row, xs, ys]);
    });
    const log = logBox.checked;
    const usable = (value) => !log || value > 0;
    let lowX = 0, highX = -Infinity, low = Infinity, high = -Infinity;
    for (const [, xs, ys] of lines) ys.forEach((value, k) => {
      if (!usable(value)) return;
      low = Math.min(low, value); high = Math.max(high, value); highX = Math.max(highX, xs[k]);
    });
    if (!(high >= low)) {
      svg(curves, "text", { x: left, y: 40 }, data.metrics.length ? "No values to draw." : "The trials reported no numeric metrics.");
      return;
    }
    if (over === 0) lowX = Math.min(1, highX);
    if (highX <= lowX) highX = lowX + 1;
    const scale = log ? Math.log10 : (value) => value;
    let [a, b] = [scale(low), scale(high)];
    const margin = (b - a) * 0.05 || Math.abs(a) * 0.05 || 1;
    a -= margin; b += margin;
    const px = (value) => left + ((value - lowX) / (highX - lowX)) * (width - left - right);
    const py = (value) => top + (1 - (scale(value) - a) / (b - a)) * (height - top - bottom);
    drawCurveAxes({ a, b, lowX, highX, px, py, log, over, width, height, left, right, top, bottom });
    const dim = state.chosen >= 0 && state.shown[state.chosen];
    const group = svg(curves, "g", { class: "lines" + (lines.length > 60 ? " many" : "") + (dim ? " dim" : "") });
    const draw = ([row, xs, ys]) => {
      const points = [];
      ys.forEach((value, k) => { if (usable(value)) points.push([px(xs[k]), py(value), k]); });
      if (!points.length) return;
      const d = "M" + points.map((point) => point[0].toFixed(1) + " " + point[1].toFixed(1)).join("L");
      const chosen = row === state.chosen;
      svg(group, "path", { d, stroke: data.trials[row].colour, class: chosen ? "on" : "" });
      if (points.length === 1 || chosen) {
        for (const point of points.length === 1 ? points : points.slice(-1)) {
          svg(group, "circle", { cx: point[0], cy: point[1], r: 3, fill: data.trials[row].colour, class: chosen ? "on" : "" });
        }
      }
      drawn.push([row, points, xs, ys]);
    };
    lines.filter((line) => line[0] !== state.chosen).forEach(draw);
    lines.filter((line) => line[0] === state.chosen).forEach(draw);
  }

  function drawCurveAxes(axes) {
    const { a, b, lowX, highX, px, py, log, over, width, height, left, right, top, bottom } = axes;
    let values = ticks(a, b, niceStep(b - a, 6));
    if (log) {
      values = [];
      const factors = b - a > 3 ? [1] : [1, 2, 5];
      for (let power = Math.floor(a); power <= b; power++) for (const factor of factors) values.push(factor * 10 ** power);
      values = values.filter((value) => Math.log10(value) >= a && Math.log10(value) <= b);
    }
    for (const value of values) {
      svg(curves, "line", { x1: left, x2: width - right, y1: py(value), y2: py(value), stroke: "var(--grid)" });
      const label = String(Number(value.toPrecision(4)));
      svg(curves, "text", { x: left - 8, y: py(value) + 4, "text-anchor": "end" }, label);
    }
    const size = over ? unitFor(highX)[1] : 1, most = (width - left - right) / 80;
    const steps = over ? timeTicks(lowX, highX, most) : ticks(lowX, highX, Math.max(1, niceStep(highX - lowX, most)));
    for (const value of steps) {
      svg(curves, "text", { x: px(value), y: height - bottom + 18, "text-anchor": "middle" }, String(Number((value / size).toPrecision(6))));
    }
    svg(curves, "line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, stroke: "var(--rule)" });
    const name = over ? `time (${unitFor(highX)[0]})` : "iteration";
    svg(curves, "text", { x: width - right, y: height - 2, "text-anchor": "end" }, name);
  }

  function nearestCurve(event) {
    const box = curves.getBoundingClientRect(), cx = event.clientX - box.left, cy = event.clientY - box.top;
    let best = null, least = 30 * 30;
    for (const [row, points, xs, ys] of drawn) for (const [px, py, k] of points) {
      const distance = (px - cx) ** 2 + (py - cy) ** 2;
      if (distance < least) { least = distance; best = [row, xs[k], ys[k]]; }
    }
    return best;
  }
  curves.addEventListener("pointermove", (event) => {
    const near = nearestCurve(event);
    if (!near) return hideTooltip();
    const [row, at, value] = near;
    const when = Number(overBox.value) ? duration(at) : "iteration " + at;
    showTooltip(event, `${data.trials[row].id}\n${data.metrics[Number(metricBox.value)].name} ${value}\n${when}`);
  });
  curves.addEventListener("pointerleave", hideTooltip);
  curves.addEventListener("click", (event) => { const near = nearestCurve(event); choose(near ? near[0] : -1); });

  // --- Tables

  const table = byId("trials"), filter = byId("filter"), rows = Array.from(table.tBodies[0].rows);

  function fillMetric() {
    const metric = Number(metricBox.value);
    for (const row of rows) {
      const trial = data.trials[row.dataset.row], best = lessBox.checked ? trial.low : trial.high;
      for (const [name, values] of [["last", trial.last], ["best", best]]) {
        const cell = row.querySelector("." + name);
        cell.textContent = values.length ? values[metric] : "";
        cell.dataset.v = cell.textContent;
      }
    }
    const name = data.metrics.length ? data.metrics[metric].name : "metric";
    const heads = table.tHead.querySelectorAll("button");
    heads[heads.length - 2].textContent = "last " + name;
    heads[heads.length - 1].textContent = (lessBox.checked ? "least " : "greatest ") + name;
  }

  function sortBy(head) {
    const owner = head.closest("table"), column = Array.from(head.parentNode.children).indexOf(head);
    const up = head.getAttribute("aria-sort") !== "ascending", sign = up ? 1 : -1;
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const keyed = Array.from(owner.tBodies[0].rows).map((row) => {
      const cell = row.cells[column], figure = parseFloat(cell.dataset.v);
      return [Number.isNaN(figure) ? null : figure, cell.textContent, row];
    });
    keyed.sort(([figure, text], [otherFigure, otherText]) => {
      // Cells without a figure come last in either direction.
      if (figure === null && otherFigure === null) {
        if (!text !== !otherText) return text ? -1 : 1;
        return sign * text.localeCompare(otherText, "en", { numeric: true });
      }
      if (figure === null || otherFigure === null) return figure === null ? 1 : -1;
      return sign * (figure - otherFigure);
    });
    owner.tBodies[0].append(...keyed.map((entry) => entry[2]));
  }
  for (const head of document.querySelectorAll("th")) head.querySelector("button").onclick = () => sortBy(head);

  function applyFilter() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const row of rows) {
      const text = row.textContent.toLowerCase(), shown = words.every((word) => text.includes(word));
      row.hidden = !shown;
      state.shown[row.dataset.row] = shown;
      count += shown;
    }
    byId("shown").textContent = words.length ? `${count} of ${rows.length} trials` : "";
    drawTimeline();
    drawCurves();
  }

  function choose(row) {
    state.chosen = row === state.chosen ? -1 : row;
    for (const line of rows) line.classList.toggle("on", Number(line.dataset.row) === state.chosen);
    showDetail();
    drawTimeline();
    drawCurves();
  }

  function showDetail() {
    const box = clear(byId("detail"));
    box.hidden = state.chosen < 0;
    if (box.hidden) return;
    const trial = data.trials[state.chosen];
    html(box, "h3", trial.id);
    const columns = html(box, "div", undefined, "columns");
    const list = (entries) => {
      if (!entries.length) return;
      const found = html(columns, "dl");
      for (const [name, value] of entries) { html(found, "dt", name); html(found, "dd", value); }
    };
    if (trial.story.length) showStory(html(box, "details"), trial.story);
    list(Object.entries(trial.facts));
    list(Object.entries(trial.config));
    list(data.metrics.map((metric, k) => [metric.name, trial.last[k] && `${trial.last[k]}  (${trial.low[k]} to ${trial.high[k]})`])
      .filter((entry) => entry[1]));
  }

  function showStory(parent, story) {
    parent.open = true;
    html(parent, "summary", "What happened, and why");
    const body = html(html(parent, "table", undefined, "story"), "tbody");
    for (const [time, clock, text] of story) {
      const row = html(body, "tr");
      html(row, "td", time, "num");
      if (data.clocked) html(row, "td", clock, "num");
      html(row, "td", text, "text");
    }
  }

  for (const row of rows) {
    row.onclick = () => choose(Number(row.dataset.row));
    row.onkeydown = (event) => { if (event.key === "Enter") choose(Number(row.dataset.row)); };
  }
  addEventListener("keydown", (event) => { if (event.key === "Escape" && state.chosen >= 0) choose(-1); });

  // --- Begin

  data.metrics.forEach((metric, k) => { const option = html(metricBox, "option", metric.name); option.value = k; });
  function metricChosen() {
    if (data.metrics.length) lessBox.checked = data.metrics[Number(metricBox.value)].less;
    fillMetric();
    drawCurves();
  }
  metricBox.onchange = metricChosen;
  overBox.onchange = logBox.onchange = drawCurves;
  lessBox.onchange = fillMetric;
  filter.oninput = applyFilter;
  drawTimeline();
  metricChosen();
  addEventListener("resize", () => { soon(drawTimeline); soon(drawCurves); });
})();
