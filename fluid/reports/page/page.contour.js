"use strict";
// How good trials are over two chosen hyperparameters: their ranks, smoothed between them. The field is that of
// fluid/reports/plots/field.py, and a test compares the two.
const contour = (() => {
  const { byId, clear, html } = draw, { state, now } = model, canvas = byId("contour");
  //: Pixels of a cell of the field, most trials that it is made of, and its levels between the worst and the best.
  const CELL = 4, MOST = 1000, LEVELS = 12;
  //: Bandwidth of the kernel for one trial, in shares of an axis: the standard deviation of places spread evenly over it.
  const SPREAD = 0.29;
  //: A cell whose trials weigh less together has none near it, and stays empty.
  const LEAST_WEIGHT = 0.05;
  let marks = [];

  // The quality at each cell: a mean of those of the trials, weighted by a Gaussian kernel along axes of numbers (Scott's
  // rule); trials of other categories weigh nothing. `points` are [x, y, quality], in shares of the axes; `columns` and
  // `rows` count the cells, or are the categories of an axis that is not one of numbers. NaN where no trial is near.
  function field(points, columns, rows, numericAcross, numericUp) {
    const numeric = numericAcross + numericUp, bands = (numericAcross ? 1 : columns) * (numericUp ? 1 : rows);
    const width = SPREAD * Math.max(1, points.length / bands) ** (-1 / (4 + numeric));
    const along = (place, cells, isNumeric) => Array.from({ length: cells }, (_, k) => {
      const middle = (k + 0.5) / cells;
      return isNumeric ? Math.exp(-((middle - place) ** 2) / (2 * width * width)) : Number(Math.abs(middle - place) < 0.5 / cells);
    });
    const found = new Float64Array(columns * rows), weights = new Float64Array(columns * rows);
    for (const [x, y, quality] of points) {
      const across = along(x, columns, numericAcross), up = along(y, rows, numericUp);
      for (let row = 0; row < rows; row++) {
        if (up[row] < 1e-6) continue;
        for (let column = 0; column < columns; column++) {
          const weight = across[column] * up[row];
          weights[row * columns + column] += weight;
          found[row * columns + column] += weight * quality;
        }
      }
    }
    return found.map((sum, cell) => (weights[cell] < LEAST_WEIGHT ? NaN : sum / weights[cell]));
  }

  const differing = () => scatter.byImportance(now.parameters.filter((each) => !each.constant));
  const hide = () => { byId("contour-box").hidden = differing().length < 2 || !model.axis(""); };

  // The two hyperparameters: those chosen, else the most important ones.
  function axesNow(known) {
    const chosen = state.contour.map((name) => known.find((each) => each.name === name));
    const rest = known.filter((each) => !chosen.includes(each));
    return chosen.map((each) => each || rest.shift());
  }
  function drawContour() {
    if (byId("contour-box").hidden) return;
    const known = differing(), [across, up] = axesNow(known);
    [["contour-x", across], ["contour-y", up]].forEach(([id, axis]) => {
      const box = clear(byId(id));
      for (const each of known.slice().sort((a, b) => a.position - b.position)) html(box, "option", each.name).value = each.name;
      box.value = axis.name;
    });
    const { pen, width, height } = draw.begin(canvas, 330);
    canvas.setAttribute("aria-label", `${model.metricName()} over ${across.name} and ${up.name}`);
    const left = 58, right = 12, top = 10, bottom = 38, wide = width - left - right, tall = height - top - bottom;
    const x = (share) => left + share * wide, y = (share) => top + (1 - share) * tall;
    const ranked = now.order.filter((trial) => now.shown[trial.row] && model.quality(trial) !== null);
    const placed = ranked.filter((trial) => Number.isFinite(across.place(trial)) && Number.isFinite(up.place(trial)));
    const used = model.sample(placed, MOST);
    const columns = across.numeric ? Math.max(8, Math.round(wide / CELL)) : across.scale.names.length;
    const rows = up.numeric ? Math.max(8, Math.round(tall / CELL)) : up.scale.names.length;
    const points = used.map((trial) => [across.place(trial), up.place(trial), model.quality(trial)]);
    const cells = field(points, columns, rows, across.numeric, up.numeric);
    drawField(pen, cells, columns, rows, x, y, across.numeric, up.numeric);
    draw.line(pen, left, height - bottom, width - right, height - bottom, "rule");
    draw.line(pen, left, top, left, height - bottom, "rule");
    labels(pen, across, wide / 60, (share, label) => draw.text(pen, label, x(share), height - bottom + 16, { align: "center", most: across.numeric ? 60 : wide / columns - 4 }));
    labels(pen, up, tall / 40, (share, label) => draw.text(pen, label, left - 6, y(share) + 4, { align: "right", most: left - 8 }));
    draw.text(pen, across.name + (across.scale.log ? " (log)" : ""), width - right, height - 6, { align: "right", colour: "text", most: wide });
    const chosen = model.chosen(), many = used.length > 300;
    marks = [];
    for (const trial of used.slice().reverse()) {
      const strong = model.stands(trial), leader = now.leaders.has(trial.row), followed = trial === chosen;
      const px = x(across.place(trial)) + (across.numeric ? 0 : scatter.spread(trial.row) * 0.7 * (wide / columns));
      const py = y(up.place(trial)) + (up.numeric ? 0 : scatter.spread(trial.row + 7) * 0.7 * (tall / rows));
      pen.globalAlpha = strong ? 1 : 0.2;
      draw.dot(pen, px, py, followed ? 6 : leader ? 4 : many ? 2 : 3, model.metricColour(trial), many && !leader && !followed ? null : followed ? "text" : "card");
      if (strong || state.chosen !== null) marks.push([px, py, trial]);
    }
    pen.globalAlpha = 1;
    const missing = ranked.length - placed.length;
    byId("contour-note").textContent = "colours: from the best to the worst trial, smoothed" + (missing ? `; ${missing.toLocaleString("en-US")} trials without both are left out` : "");
  }
  // Fills the cells, those of one level in a row at once; each a little larger than it is, so that no seams are left. Cells of
  // categories are apart.
  function drawField(pen, cells, columns, rows, x, y, numericAcross, numericUp) {
    const levels = Array.from(cells, (quality) => (Number.isNaN(quality) ? -1 : Math.min(LEVELS - 1, Math.floor(quality * LEVELS))));
    for (let row = 0; row < rows; row++) for (let from = 0, to = 0; from < columns; from = to) {
      const level = levels[row * columns + from];
      for (to = from + 1; numericAcross && to < columns && levels[row * columns + to] === level;) to++;
      if (level < 0) continue;
      const top = y((row + 1) / rows), begin = x(from / columns);
      const above = numericUp ? Number(row < rows - 1) : -1, beside = numericAcross ? Number(to < columns) : -1;
      pen.fillStyle = draw.qualityColour((level + 0.5) / LEVELS);
      pen.fillRect(begin, top - above, x(to / columns) - begin + beside, y(row / rows) - top + above);
    }
  }
  // Labels an axis, as many marks of it as do not crowd.
  function labels(pen, axis, most, put) {
    for (const value of axis.scale.marks(Math.max(3, most))) put(axis.scale.at(value), axis.scale.label(value));
  }

  ["contour-x", "contour-y"].forEach((id, position) => {
    byId(id).onchange = (event) => {
      const [before, other] = [position, 1 - position].map((k) => byId(["contour-x", "contour-y"][k]).value);
      const shown = axesNow(differing()).map((each) => each.name);
      state.contour = shown;
      // The hyperparameter of the other axis changes places with the one that was here.
      if (before === other) state.contour[1 - position] = shown[position];
      state.contour[position] = event.target.value;
      draw.soon(drawContour);
    };
  });
  canvas.addEventListener("pointermove", (event) => {
    const mark = draw.nearest(marks, draw.place(canvas, event), 14);
    if (mark) draw.showTooltip(event, model.lines(mark[2]).join("\n")); else draw.hideTooltip();
  });
  canvas.addEventListener("pointerleave", draw.hideTooltip);
  canvas.addEventListener("click", (event) => { const mark = draw.nearest(marks, draw.place(canvas, event), 14); page.choose(mark ? mark[2] : null); });

  return { hide, field, drawContour };
})();
