"use strict";
// Parallel coordinates: an axis per hyperparameter and one for the metric, a line per trial. Ranges of axes can be kept.
const parallel = (() => {
  const { byId, clear, html } = draw, { state, now } = model, canvas = byId("parallel");
  const TOP = 34, TALL = 250, BOTTOM = 24, SIDE = 46;
  //: Most lines that are drawn: of more, no eye tells one from the others.
  const MOST = 400;
  //: Most axes: canvases have a largest width. The most important hyperparameters are kept.
  const MOST_AXES = 40, MOST_PRINTED = 12;
  let axes = [], marks = [], drag = null, wide = 0;

  function drawParallel() {
    const differing = scatter.byImportance(now.parameters.filter((each) => !each.constant));
    const goal = model.axis("");
    if (byId("parallel-card").hidden) return;
    const chosen = differing.length ? differing : now.parameters, kept = chosen.slice(0, draw.isPrinting() ? MOST_PRINTED : MOST_AXES);
    kept.sort((a, b) => a.position - b.position);
    axes = [...kept, ...(goal ? [goal] : [])];
    const room = canvas.parentNode.clientWidth, least = SIDE * 2 + (axes.length - 1) * 78;
    const { pen, width } = draw.begin(canvas, TOP + TALL + BOTTOM, draw.isPrinting() ? room : Math.max(room, least));
    wide = width;
    canvas.setAttribute("aria-label", "Hyperparameters and metric of every trial, in parallel coordinates");
    axes.forEach((axis, k) => { axis.x = SIDE + (axes.length > 1 ? (k * (width - 2 * SIDE)) / (axes.length - 1) : 0); });
    drawLines(pen);
    drawAxes(pen, axes.length > 1 ? (width - 2 * SIDE) / (axes.length - 1) : width - 2 * SIDE);
    drawLegend();
  }
  // A hidden chart is never near the window, so what decides about it is not part of its drawing.
  const hide = () => { byId("parallel-card").hidden = !now.parameters.length || !now.trials.length; };
  const yOf = (share) => TOP + (1 - share) * TALL;

  function drawLines(pen) {
    marks = [];
    const chosen = model.chosen();
    // From the worst to the best, so that the best lie on top; those that are filtered out lie below all.
    const shown = now.order.filter((trial) => now.shown[trial.row]), drawn = model.sample(shown, MOST);
    const hidden = model.sample(now.order.filter((trial) => !now.shown[trial.row]), MOST / 4);
    const missing = now.parameters.filter((each) => !each.constant).length - axes.filter((axis) => axis.name !== "").length;
    byId("parallel-note").textContent = missing > 0 ? `${missing} hyperparameters of little importance have no axis` : drawn.length < shown.length ? `${drawn.length.toLocaleString("en-US")} lines and at most ${scatter.MOST_DOTS.toLocaleString("en-US")} dots, from the best to the worst of ${shown.length.toLocaleString("en-US")}` : "";
    const order = [...hidden.reverse(), ...drawn.slice().reverse().filter((trial) => trial !== chosen), ...drawn.filter((trial) => trial === chosen)];
    for (const trial of order) {
      const passes = now.shown[trial.row], strong = passes && model.stands(trial), leader = now.leaders.has(trial.row);
      pen.strokeStyle = passes ? model.markColour(trial) : draw.themeColour("faint");
      pen.globalAlpha = !passes ? 0.5 : !strong ? 0.06 : trial === chosen || leader ? 1 : Math.max(0.07, Math.min(0.65, 45 / drawn.length));
      pen.lineWidth = trial === chosen ? 3 : leader && strong ? 2 : 1.1;
      pen.beginPath();
      let before = null;
      for (const axis of axes) {
        const share = axis.place(trial);
        if (!Number.isFinite(share)) { before = null; continue; }
        const y = yOf(share);
        if (before && order.length > 300) pen.lineTo(axis.x, y);
        else if (before) {
          const middle = (before[0] + axis.x) / 2;
          pen.bezierCurveTo(middle, before[1], middle, y, axis.x, y);
        } else pen.moveTo(axis.x, y);
        before = [axis.x, y];
        if (strong) marks.push([axis.x, y, trial]);
      }
      pen.stroke();
    }
    pen.globalAlpha = 1;
  }

  function drawAxes(pen, gap) {
    axes.forEach((axis, k) => {
      const x = axis.x, name = axis.name === "" ? model.metricName() : axis.name;
      draw.line(pen, x, TOP, x, TOP + TALL, "text");
      pen.font = axis.name === "" ? "bold " + pen.font.replace("bold ", "") : pen.font;
      draw.text(pen, name, x, 14 + (gap < 120 && k % 2 ? 12 : 0), { align: "center", colour: "text", most: gap < 120 ? gap * 1.7 : gap - 8 });
      pen.font = pen.font.replace("bold ", "");
      if (axis.scale.log) draw.text(pen, "log", x, TOP + TALL + 18, { align: "center" });
      let free = Infinity;
      for (const value of axis.scale.marks(axis.numeric ? 6 : 14)) {
        const y = yOf(axis.scale.at(value));
        if (y > free) continue;
        free = y - 13;
        const label = draw.fitted(pen, axis.scale.label(value), gap - 16);
        draw.line(pen, x - 3, y, x + 3, y, "text");
        // A plate below the label keeps it legible above the lines.
        const size = pen.measureText(label).width, left = k === axes.length - 1 && axes.length > 1 ? x - 8 - size : x + 7;
        pen.fillStyle = draw.themeColour("plate");
        pen.fillRect(left - 2, y - 7, size + 4, 14);
        draw.text(pen, label, left, y + 4, { colour: "text" });
      }
      const kept = drag && drag.axis === axis && drag.range ? drag.range : state.brushes[axis.name];
      if (kept) {
        pen.fillStyle = draw.themeColour("accent");
        pen.globalAlpha = 0.3;
        pen.fillRect(x - 8, yOf(kept[1]), 16, Math.max(2, yOf(kept[0]) - yOf(kept[1])));
        pen.globalAlpha = 1;
        pen.strokeStyle = draw.themeColour("accent");
        pen.strokeRect(x - 8, yOf(kept[1]), 16, Math.max(2, yOf(kept[0]) - yOf(kept[1])));
      }
    });
  }

  function drawLegend() {
    const legend = clear(byId("legend"));
    if (model.colouring() === "run" && now.runs.length > 1) {
      now.runs.forEach((run, number) => { const item = html(legend, "span"); html(item, "i").style.background = draw.runColour(number); item.append(run.name); });
      return;
    }
    if (now.metric < 0) return;
    const values = now.ranked;
    if (!values.length) return;
    html(legend, "span", `best ${format.figure(values[0])}`);
    const bar = html(legend, "b", `median ${format.figure(values[values.length >> 1])}`);
    bar.style.background = `linear-gradient(to right, ${[1, 0.75, 0.5, 0.25, 0].map(draw.qualityColour).join(",")})`;
    html(legend, "span", `worst ${format.figure(values[values.length - 1])}`);
  }

  // What the kept ranges say, each with a button that ends it.
  function drawBrushes() {
    const box = clear(byId("brushes"));
    for (const name of Object.keys(state.brushes)) {
      const axis = model.axis(name), [low, high] = state.brushes[name];
      if (!axis) continue;
      const title = name === "" ? model.metricName() : name;
      const inside = axis.numeric ? `${format.figure(Number(axis.scale.value(low).toPrecision(3)))} to ${format.figure(Number(axis.scale.value(high).toPrecision(3)))}`
        : axis.scale.names.filter((each) => { const share = axis.scale.at(each); return share >= low - 1e-9 && share <= high + 1e-9; }).join(", ") || "nothing";
      const chip = best.button(box, `${title}: ${inside} \u00d7`, () => { delete state.brushes[name]; page.filtered(); });
      chip.title = "Show all values again";
      chip.className = "chip";
    }
  }

  const axisNear = (x) => axes.reduce((near, axis) => (Math.abs(axis.x - x) < (near ? Math.abs(near.x - x) : 14) ? axis : near), null);
  const shareAt = (y) => Math.max(0, Math.min(1, 1 - (y - TOP) / TALL));
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const [x, y] = draw.place(canvas, event), axis = axisNear(x);
    drag = axis ? { axis, from: shareAt(y), range: null } : null;
    if (drag) canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = draw.place(canvas, event);
    canvas.style.cursor = axisNear(x) ? "ns-resize" : "pointer";
    if (drag) {
      const to = shareAt(y);
      if (Math.abs(to - drag.from) * TALL > 4) { drag.range = [Math.min(drag.from, to), Math.max(drag.from, to)]; draw.soon(drawParallel); }
      return draw.hideTooltip();
    }
    const mark = draw.nearest(marks, [x, y], 14);
    if (mark) draw.showTooltip(event, model.lines(mark[2]).join("\n")); else draw.hideTooltip();
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag) {
      const { axis, range } = drag, had = axis.name in state.brushes;
      drag = null;
      if (range) state.brushes[axis.name] = range;
      else delete state.brushes[axis.name];
      if (range || had) return page.filtered();
    }
    const mark = draw.nearest(marks, draw.place(canvas, event), 14);
    page.choose(mark ? mark[2] : null);
  });
  canvas.addEventListener("pointercancel", () => { drag = null; draw.soon(drawParallel); });
  canvas.addEventListener("pointerleave", draw.hideTooltip);

  return { hide, drawParallel, drawBrushes, placeOf: (name) => { const axis = axes.find((each) => each.name === name); return axis && { x: axis.x, top: TOP, tall: TALL, wide }; } };
})();
