"use strict";
// A scatter of the metric per hyperparameter, the hyperparameters' importances, and the Pareto set of several goals.
const scatter = (() => {
  const { byId, clear, html } = draw, { state, now } = model;
  //: Most scatters that are drawn at once; a button shows the others.
  const MOST = 24;
  //: Most dots of one scatter.
  const MOST_DOTS = 1000;
  let every = false;
  const panels = new Map();

  function drawScatters() {
    const box = byId("scatters"), goal = model.axis("");
    box.parentNode.hidden = !goal;
    const wanted = goal ? byImportance(now.parameters.filter((each) => !each.constant)) : [];
    const kept = every ? wanted : wanted.slice(0, MOST), names = kept.map((each) => each.name).join("\n");
    if (box.dataset.names !== names) {
      clear(box);
      panels.clear();
      for (const each of kept) panels.set(each.name, panel(box, each.name));
      if (kept.length < wanted.length) best.button(box, `show ${wanted.length - kept.length} more`, () => { every = true; drawScatters(); });
      box.dataset.names = names;
    }
    for (const each of kept) drawScatter(panels.get(each.name), each, goal);
  }
  // Hyperparameters, the most important first; those of which it is not known in their order.
  function byImportance(parameters) {
    const shares = importancesNow(), order = Array.isArray(shares) ? new Map(shares.map(([name], k) => [name, k])) : new Map();
    const place = (each) => (order.has(each.name) ? order.get(each.name) : Infinity);
    return parameters.sort((a, b) => (place(a) === place(b) ? a.position - b.position : place(a) - place(b)));
  }
  function panel(box, name) {
    const figure = html(box, "figure");
    html(figure, "figcaption", name).title = name;
    const canvas = html(figure, "canvas"), found = { canvas, marks: [] };
    canvas.setAttribute("role", "img");
    listen(found);
    return found;
  }
  function listen(found) {
    const { canvas } = found;
    canvas.addEventListener("pointermove", (event) => {
      const mark = draw.nearest(found.marks, draw.place(canvas, event), 14);
      if (!mark) return draw.hideTooltip();
      const lines = model.lines(mark[2]);
      if (mark[3]) lines.splice(1, 0, `iteration ${mark[3].iteration}: ${state.pareto.map((name, k) => `${name} ${format.figure(mark[3].values[k])}`).join(", ")}`);
      draw.showTooltip(event, lines.join("\n"));
    });
    canvas.addEventListener("pointerleave", draw.hideTooltip);
    canvas.addEventListener("click", (event) => { const mark = draw.nearest(found.marks, draw.place(canvas, event), 14); page.choose(mark ? mark[2] : null); });
  }

  // The same values are spread a little, the same way each time.
  const spread = (row) => ((row * 0.6180339887) % 1) - 0.5;

  function drawScatter(found, parameter, goal) {
    const { pen, width, height } = draw.begin(found.canvas, 168);
    found.canvas.setAttribute("aria-label", `${model.metricName()} against ${parameter.name}`);
    const left = 46, right = 10, top = 8, bottom = 24, wide = width - left - right, tall = height - top - bottom;
    const y = (share) => top + (1 - share) * tall;
    for (const value of goal.scale.marks(4)) {
      draw.line(pen, left, y(goal.scale.at(value)), width - right, y(goal.scale.at(value)), "grid");
      draw.text(pen, goal.scale.label(value), left - 6, y(goal.scale.at(value)) + 4, { align: "right", most: left - 8 });
    }
    const inner = parameter.numeric ? 0 : Math.min(30, wide / (2 * parameter.scale.names.length)), x = (share) => left + share * wide;
    const labels = parameter.scale.marks(parameter.numeric ? Math.max(3, wide / 40) : 8), each = wide / Math.max(1, labels.length);
    let free = 0;
    for (const value of labels) {
      const at = parameter.scale.at(value), label = draw.fitted(pen, parameter.scale.label(value), parameter.numeric ? 60 : each - 4);
      const half = pen.measureText(label).width / 2, middle = Math.max(left + half - 8, Math.min(width - half - 1, x(at)));
      if (middle - half < free) continue;
      free = middle + half + 6;
      draw.text(pen, label, middle, height - bottom + 16, { align: "center" });
    }
    draw.line(pen, left, height - bottom, width - right, height - bottom, "rule");
    found.marks = [];
    const chosen = model.chosen(), many = now.trials.length > 300;
    const drawn = model.sample(now.order.filter((trial) => now.shown[trial.row]), MOST_DOTS);
    for (let k = drawn.length - 1; k >= 0; k--) if (drawn[k] !== chosen) mark(pen, found, drawn[k], parameter, goal, x, y, inner, many);
    if (chosen && now.shown[chosen.row]) mark(pen, found, chosen, parameter, goal, x, y, inner, many);
    pen.globalAlpha = 1;
  }
  function mark(pen, found, trial, parameter, goal, x, y, inner, many) {
    const across = parameter.place(trial), up = goal.place(trial), chosen = trial.key === state.chosen;
    if (!Number.isFinite(across) || !Number.isFinite(up)) return;
    const strong = model.stands(trial), leader = now.leaders.has(trial.row);
    const at = [x(across) + (parameter.numeric ? 0 : spread(trial.row) * inner * 0.9), y(up)];
    pen.globalAlpha = strong ? (leader || chosen || !many ? 0.95 : 0.6) : 0.15;
    draw.dot(pen, at[0], at[1], chosen ? 5.5 : leader ? 3.8 : many ? 2 : 3, model.markColour(trial), chosen ? "text" : leader && strong ? "card" : null);
    if (strong || state.chosen !== null) found.marks.push([...at, trial]);
  }

  // --- Importances

  function importancesNow() {
    const run = now.runs[state.run];
    return run ? run.importances[model.metricName()] : undefined;
  }
  function drawImportances() {
    const box = clear(byId("importances")), shares = importancesNow();
    box.hidden = shares === undefined;
    if (box.hidden) return;
    const run = now.runs[state.run];
    html(box, "h3", `Importance for ${model.metricName()}${now.runs.length > 1 ? " in " + run.name : ""}`);
    if (typeof shares === "string") { html(box, "p", shares, "muted"); return; }
    const most = Math.max(...shares.map(([, share]) => share), 1e-9);
    const list = html(box, "div", null, "shares");
    for (const [name, share] of shares) {
      html(list, "span", name).title = name;
      const bar = html(list, "span", null, "share");
      html(bar, "i").style.width = `${Math.max(0.5, (100 * share) / most)}%`;
      html(list, "span", `${Math.round(100 * share)} %`, "num");
    }
  }

  // --- The Pareto set

  const pareto = { canvas: byId("pareto"), marks: [] };
  listen(pareto);
  const goalsNow = () => now.data.metrics.map((metric, k) => [metric, k]).filter(([metric]) => metric.goal);
  const hide = () => { byId("pareto-card").hidden = goalsNow().length < 2 || !now.runs.some((run) => run.pareto.length); };
  function drawPareto() {
    const goals = goalsNow();
    const card = byId("pareto-card");
    if (card.hidden) return;
    const axesOf = ["pareto-x", "pareto-y"].map((id, position) => {
      const box = byId(id), known = goals.some(([metric]) => metric.name === state.pareto[position]);
      if (!known) state.pareto[position] = goals[position][0].name;
      clear(box);
      for (const [metric] of goals) html(box, "option", metric.name).value = metric.name;
      box.value = state.pareto[position];
      return goals.find(([metric]) => metric.name === state.pareto[position])[1];
    });
    // The points of the set, iterations of trials: x, y and the trial; and the last iterations of the others.
    const front = now.runs.flatMap((run) => run.pareto.map((point) => {
      const valueOf = (k) => point[2 + run.goals.indexOf(now.data.metrics[k].name)];
      return { trial: now.trials[run.first + point[0]], iteration: point[1], values: axesOf.map(valueOf) };
    })).filter((point) => now.shown[point.trial.row]);
    const others = now.trials.filter((trial) => trial.state !== "failed" && now.shown[trial.row] && axesOf.every((k) => typeof trial.last[k] === "number"))
      .map((trial) => ({ trial, iteration: trial.iterations, values: axesOf.map((k) => trial.last[k]) }));
    const points = [...others, ...front];
    const { pen, width, height } = draw.begin(pareto.canvas, 320);
    pareto.canvas.setAttribute("aria-label", `${state.pareto[1]} against ${state.pareto[0]}, with the Pareto set`);
    byId("pareto-note").textContent = `${front.length} iterations that no other one beats in ${goals.map(([metric]) => metric.name).join(" and ")}; the other dots are last iterations`;
    pareto.marks = [];
    if (!points.length) return;
    const scales = [0, 1].map((k) => {
      const values = points.map((point) => point.values[k]), low = Math.min(...values), high = Math.max(...values);
      return draw.numbers(low, high, { log: draw.isLogarithmic(values), margin: 0.05 });
    });
    const left = 64, right = 20, top = 12, bottom = 40, x = (share) => left + share * (width - left - right), y = (share) => top + (1 - share) * (height - top - bottom);
    for (const value of scales[1].marks(6)) {
      draw.line(pen, left, y(scales[1].at(value)), width - right, y(scales[1].at(value)), "grid");
      draw.text(pen, scales[1].label(value), left - 8, y(scales[1].at(value)) + 4, { align: "right" });
    }
    for (const value of scales[0].marks(width / 90)) draw.text(pen, scales[0].label(value), x(scales[0].at(value)), height - bottom + 16, { align: "center" });
    draw.text(pen, state.pareto[0], width - right, height - 6, { align: "right", colour: "text" });
    draw.text(pen, state.pareto[1], 4, 10, { colour: "text" });
    const at = (point) => [x(scales[0].at(point.values[0])), y(scales[1].at(point.values[1])), point.trial, point];
    const chosen = model.chosen(), best = new Set(front), tint = (run) => (now.runs.length > 1 ? draw.runColour(run) : draw.themeColour("accent"));
    if (goals.length === 2) now.runs.forEach((run, number) => {
      const line = front.filter((point) => point.trial.run === number).map(at).sort((a, b) => a[0] - b[0]);
      pen.strokeStyle = tint(number);
      pen.lineWidth = 1.5;
      pen.setLineDash([5, 4]);
      pen.beginPath();
      line.forEach(([px, py], k) => (k ? pen.lineTo(px, py) : pen.moveTo(px, py)));
      pen.stroke();
      pen.setLineDash([]);
    });
    for (const point of points) {
      const [px, py] = at(point), on = best.has(point), followed = point.trial === chosen;
      pen.globalAlpha = chosen && !followed ? 0.3 : on ? 1 : 0.5;
      draw.dot(pen, px, py, followed ? 6 : on ? 4.5 : 2.6, on ? tint(point.trial.run) : draw.themeColour("nothing"), on ? "card" : null);
      pareto.marks.push(at(point));
    }
    pen.globalAlpha = 1;
  }
  for (const [position, id] of ["pareto-x", "pareto-y"].entries()) byId(id).onchange = (event) => { state.pareto[position] = event.target.value; drawPareto(); };

  return { MOST_DOTS, hide, spread, byImportance, drawScatters, drawImportances, drawPareto };
})();
