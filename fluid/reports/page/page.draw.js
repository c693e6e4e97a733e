"use strict";
// What all charts share: elements, canvases, scales of axes, colours and the tooltip.
const draw = (() => {
  const byId = (id) => document.getElementById(id);
  const clear = (node) => { node.textContent = ""; return node; };
  function html(parent, tag, text, className) {
    const node = document.createElement(tag);
    if (text !== undefined && text !== null) node.textContent = text;
    if (className) node.className = className;
    parent.appendChild(node);
    return node;
  }
  // Events arrive faster than thousands of marks can be drawn, so each drawing runs at most once per frame.
  const waiting = new Set();
  function soon(task) {
    if (waiting.has(task)) return;
    waiting.add(task);
    requestAnimationFrame(() => { waiting.delete(task); task(); });
  }

  // Charts near the window are drawn at once, the others when the browser has nothing else to do, one after the other: so a
  // picture of the whole page has them all.
  const charts = new Map();
  const nearness = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      const chart = charts.get(target);
      chart.near = isIntersecting;
      if (chart.near && chart.stale) redraw(target);
    }
    whenIdle(drawNext);
  }, { rootMargin: "400px" });
  const whenIdle = (task) => (window.requestIdleCallback ? requestIdleCallback(task) : setTimeout(task, 200));
  function drawNext() {
    const chart = Array.from(charts.values()).find((each) => each.stale);
    if (!chart) return;
    chart.stale = false;
    chart.task();
    whenIdle(drawNext);
  }
  function redraw(node) {
    const chart = charts.get(node);
    chart.stale = !chart.near;
    if (chart.near) soon(chart.task);
  }
  function chart(node, task) { charts.set(node, { task, near: false, stale: true }); nearness.observe(node); }
  // Whether a chart has not been drawn yet.
  const waits = () => waiting.size > 0 || Array.from(charts.values()).some((each) => each.stale);
  function drawCharts() {
    charts.forEach((_, node) => redraw(node));
    whenIdle(drawNext);
  }

  // --- Printing: all charts at the width of paper, in the light colours; tables that are wider than that are made smaller.

  const root = document.documentElement;
  const isPrinting = () => root.classList.contains("printing");
  //: The least scale of a table, whose text can still be read when a PDF is enlarged; of one that is wider still, cells break
  //: their lines.
  const LEAST_SCALE = 0.33;
  function fitTables() {
    for (const table of document.querySelectorAll("table")) {
      const room = table.parentNode.clientWidth, scale = room / Math.max(1, table.scrollWidth);
      if (!room || scale >= 1) continue;
      table.style.zoom = Math.max(LEAST_SCALE, scale);
      table.classList.toggle("crowded", scale < LEAST_SCALE);
    }
  }
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    recolour();
    charts.forEach((each) => each.task());
    fitTables();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    for (const table of document.querySelectorAll("table")) { table.style.zoom = ""; table.classList.remove("crowded"); }
    recolour();
    charts.forEach((each) => each.task());
  });

  // --- Colours. Those of the theme are CSS variables, which are read once until the theme changes.

  let theme = {};
  function themeColour(name) {
    if (!(name in theme)) theme[name] = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
    return theme[name];
  }
  const darkness = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => darkness.matches && !isPrinting();
  let recolour = () => {};
  // Calls a function whenever all has to be drawn in other colours.
  function whenColoursChange(task) {
    recolour = () => { theme = {}; task(); };
    darkness.addEventListener("change", () => recolour());
  }

  // Viridis, which is perceptually uniform. The best is the end that is farthest from the background.
  const VIRIDIS = [
    [68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140], [40, 174, 128], [94, 201, 98], [173, 220, 48],
    [253, 231, 37],
  ];
  // The colour of a share of quality: 0 for the worst, 1 for the best; in as many steps as an eye tells apart.
  const STEPS = 48, qualities = new Map();
  function qualityColour(share) {
    const step = Math.round(share * STEPS), key = isDark() ? step : -1 - step;
    if (!qualities.has(key)) qualities.set(key, viridis(isDark() ? 0.22 + (0.78 * step) / STEPS : 0.9 - (0.9 * step) / STEPS));
    return qualities.get(key);
  }
  function viridis(share) {
    const place = share * (VIRIDIS.length - 1), k = Math.min(VIRIDIS.length - 2, Math.floor(place)), rest = place - k;
    return `rgb(${VIRIDIS[k].map((part, c) => Math.round(part + (VIRIDIS[k + 1][c] - part) * rest)).join(",")})`;
  }
  const RUNS = {
    light: ["#0072b2", "#d55e00", "#009e73", "#b5589a", "#a67c00", "#5e4fa2", "#17808c", "#7f3b08"],
    dark: ["#56b4e9", "#ff9d57", "#3ddcab", "#f0a3d2", "#f0e442", "#b3a5f0", "#7fd4dd", "#e0b48a"],
  };
  const runColour = (run) => { const list = RUNS[isDark() ? "dark" : "light"]; return list[run % list.length]; };

  // --- Canvases

  // Sizes a canvas for its place in the page and returns its context, empty, with one unit per CSS pixel.
  function begin(canvas, height, width) {
    if (width) canvas.style.width = width + "px";
    canvas.style.height = height + "px";
    const sharp = isPrinting() ? 2 : Math.min(3, devicePixelRatio || 1), wide = width || canvas.clientWidth || 300;
    const size = [Math.round(wide * sharp), Math.round(height * sharp)];
    if (canvas.width !== size[0]) canvas.width = size[0];
    if (canvas.height !== size[1]) canvas.height = size[1];
    const pen = canvas.getContext("2d");
    pen.setTransform(sharp, 0, 0, sharp, 0, 0);
    pen.clearRect(0, 0, wide, height);
    pen.font = "11px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";
    pen.lineJoin = "round";
    return { pen, width: wide, height };
  }
  function text(pen, string, x, y, { align = "left", colour = "muted", most } = {}) {
    pen.fillStyle = themeColour(colour);
    pen.textAlign = align;
    pen.fillText(most ? fitted(pen, string, most) : string, x, y);
  }
  // A text without its middle, if it is wider than so many pixels.
  function fitted(pen, string, most) {
    if (pen.measureText(string).width <= most) return string;
    let [low, high] = [0, string.length];
    const cut = (kept) => string.slice(0, Math.ceil(kept / 2)) + "\u2026" + string.slice(string.length - Math.floor(kept / 2));
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (pen.measureText(cut(middle)).width <= most) low = middle; else high = middle - 1;
    }
    return low ? cut(low) : "";
  }
  function line(pen, x1, y1, x2, y2, colour) {
    pen.strokeStyle = themeColour(colour);
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.lineTo(x2, y2);
    pen.stroke();
  }
  // Small dots are squares, which are drawn many times as fast.
  function dot(pen, x, y, radius, colour, ring) {
    if (radius < 2.5 && !ring) {
      pen.fillStyle = colour;
      pen.fillRect(x - radius * 0.9, y - radius * 0.9, radius * 1.8, radius * 1.8);
      return;
    }
    pen.beginPath();
    pen.arc(x, y, radius, 0, 2 * Math.PI);
    pen.fillStyle = colour;
    pen.fill();
    if (ring) { pen.strokeStyle = themeColour(ring); pen.lineWidth = 1.5; pen.stroke(); }
  }

  // --- Scales: of numbers, linear or logarithmic, and of categories. at() gives a share of the axis, value() its inverse.

  function niceStep(span, most) {
    const least = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(least));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least * (1 - 1e-9));
  }
  function ticks(from, to, step) {
    const found = [];
    for (let k = Math.ceil(from / step - 1e-9); k * step <= to + step * 1e-9; k++) found.push(k * step);
    return found;
  }
  const timeTicks = (from, to, most) => ticks(from, to, format.tickStep(to - from, most, to));
  // `values` are the only ones that occur, if they are few: the axis names them.
  function numbers(low, high, { log = false, margin = 0, values = null } = {}) {
    const warp = log ? Math.log10 : (value) => value;
    let [a, b] = [warp(low), warp(high)];
    if (!(b > a)) { const room = log ? 0.5 : Math.abs(a) * 0.05 || 1; a -= room; b += room; }
    const extra = (b - a) * margin;
    a -= extra; b += extra;
    function marks(most) {
      if (values && values.length > 1 && values.length <= most + 3) return values;
      if (!log) return ticks(a, b, niceStep(b - a, most));
      const every = Math.max(1, Math.ceil((b - a) / Math.max(1, most))), found = [];
      const factors = b - a < 1.2 ? [1, 2, 3, 5, 7] : b - a < 2.5 && most > 4 ? [1, 2, 5] : [1];
      for (let power = Math.floor(a); power <= b; power++) {
        if (power % every === 0) for (const factor of factors) found.push(factor * 10 ** power);
      }
      const kept = found.filter((value) => warp(value) >= a - 1e-9 && warp(value) <= b + 1e-9);
      return kept.length > 1 ? kept : ticks(10 ** a, 10 ** b, niceStep(10 ** b - 10 ** a, most));
    }
    return {
      log, marks, low: a, high: b,
      at: (value) => (typeof value !== "number" || (log && value <= 0) ? NaN : (warp(value) - a) / (b - a)),
      value: (share) => (log ? 10 ** (a + share * (b - a)) : a + share * (b - a)),
      label: (value) => format.figure(value),
    };
  }
  function categories(names) {
    const places = new Map(names.map((name, k) => [name, (k + 0.5) / names.length]));
    return {
      names,
      at: (name) => (places.has(name) ? places.get(name) : NaN),
      marks: (most) => names.filter((_, k) => k % Math.max(1, Math.ceil(names.length / most)) === 0),
      label: (name) => name,
    };
  }
  // Whether numbers are better seen on a logarithmic scale: they span two decades, as do learning rates, or are a few such
  // as 16, 32, 64 and 128; and their median is about the middle there.
  function isLogarithmic(values) {
    const sorted = values.slice().sort((a, b) => a - b), low = sorted[0], high = sorted[sorted.length - 1];
    if (!sorted.length || low <= 0 || high / low < 8) return false;
    const median = sorted[sorted.length >> 1], place = Math.log(median / low) / Math.log(high / low);
    if (high / low >= 100) return place > 0.15 && place < 0.85;
    return new Set(values).size <= 10 && (median - low) / (high - low) < 0.4;
  }

  // --- The tooltip, and the mark that is nearest to the pointer

  const tooltip = byId("tooltip");
  function showTooltip(event, string) {
    tooltip.hidden = false;
    tooltip.textContent = string;
    const box = tooltip.getBoundingClientRect();
    const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 10 : event.clientX + 14;
    tooltip.style.left = Math.max(4, left) + "px";
    tooltip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 4)) + "px";
  }
  const hideTooltip = () => { tooltip.hidden = true; };
  function place(canvas, event) {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }
  // The entry of [x, y, ...] that is nearest to a place, within so many pixels.
  function nearest(marks, [x, y], within = 26) {
    let best = null, least = within * within;
    for (const mark of marks) {
      const distance = (mark[0] - x) ** 2 + (mark[1] - y) ** 2;
      if (distance < least) { least = distance; best = mark; }
    }
    return best;
  }

  return {
    byId, clear, html, soon, chart, drawCharts, waits, themeColour, whenColoursChange, isPrinting, qualityColour, runColour, begin, text, fitted, line, dot,
    ticks, timeTicks, numbers, categories, isLogarithmic, showTooltip, hideTooltip, place, nearest,
  };
})();
