"use strict";
// The metric of every trial, over iterations or time.
const curves = (() => {
  const { byId } = draw, { state, now } = model, canvas = byId("curves");
  //: Most curves that are drawn: of more, no eye tells one from the others.
  const MOST = 600;
  let drawn = [];

  function drawCurves() {
    const { pen, width, height } = draw.begin(canvas, 300);
    drawn = [];
    canvas.setAttribute("aria-label", `${model.metricName()} of every trial`);
    const lines = [];
    const known = now.metric < 0 ? [] : now.order.filter((trial) => now.shown[trial.row] && trial.curves[now.metric]);
    for (const trial of model.sample(known, MOST)) lines.push([trial, trial.curves[now.metric][state.over], trial.curves[now.metric][2]]);
    const notes = known.length > lines.length ? [`${lines.length.toLocaleString("en-US")} of ${known.length.toLocaleString("en-US")} curves`] : [];
    const usable = (value) => !now.log || value > 0;
    let across = -Infinity, low = Infinity, high = -Infinity;
    const all = [];
    const failed = (trial) => trial.state === "failed", every = lines.every(([trial]) => failed(trial));
    for (const [trial, xs, ys] of lines) ys.forEach((value, k) => {
      if (!usable(value) || (failed(trial) && !every)) return;
      all.push(value);
      low = Math.min(low, value); high = Math.max(high, value); across = Math.max(across, xs[k]);
    });
    if (!(high >= low)) {
      byId("curves-note").textContent = "";
      draw.text(pen, now.data.metrics.length ? "No values to draw." : "The trials reported no numeric metrics.", 60, 40);
      return;
    }
    // One trial that diverged must not flatten the others: the axis leaves out the worst fiftieth if that doubles its scale.
    if (now.mode && !now.log && all.length > 50) {
      all.sort((a, b) => a - b);
      const [bottom, top] = [all[Math.floor(all.length * 0.02)], all[Math.ceil(all.length * 0.98) - 1]];
      if (now.less && high - low > 2 * (top - low)) high = top;
      if (!now.less && high - low > 2 * (high - bottom)) low = bottom;
      if (high === top || low === bottom) notes.push("the axis leaves out the worst 2 % of the values");
    }
    byId("curves-note").textContent = notes.join("; ");
    const from = state.over ? 0 : Math.min(1, across);
    if (across <= from) across = from + 1;
    const frame = best.axes(pen, { width, height, across, from, scale: draw.numbers(low, high, { log: now.log, margin: 0.05 }), time: state.over === 1 });
    pen.save();
    pen.beginPath();
    pen.rect(frame.left - 4, frame.top - 6, frame.wide + 10, frame.tall + 12);
    pen.clip();
    const many = lines.length > 60, chosen = model.chosen(), crowd = now.trials.length > 24;
    // The best are drawn last, above the others, and the followed one above all.
    lines.sort((a, b) => (a[0] === chosen) - (b[0] === chosen) || b[0].rank - a[0].rank);
    for (const [trial, xs, ys] of lines) {
      const leader = now.leaders.has(trial.row), strong = model.stands(trial);
      const points = [];
      ys.forEach((value, k) => { if (usable(value)) points.push([frame.x(xs[k]), frame.y(value), trial, xs[k], value]); });
      if (!points.length) continue;
      const colour = model.colour(trial);
      pen.globalAlpha = !strong ? (many ? 0.07 : 0.16) : crowd && !leader && trial !== chosen ? Math.max(0.12, Math.min(0.6, 60 / lines.length)) : 1;
      pen.lineWidth = trial === chosen ? 3.2 : crowd ? (leader ? 2 : 1) : 1.6;
      pen.strokeStyle = colour;
      pen.beginPath();
      points.forEach(([x, y], k) => (k ? pen.lineTo(x, y) : pen.moveTo(x, y)));
      pen.stroke();
      const end = points[points.length - 1];
      if (points.length === 1 || trial === chosen || (strong && leader)) draw.dot(pen, end[0], end[1], trial === chosen ? 4 : 2.4, colour);
      if (strong || state.chosen === null) drawn.push(...points);
    }
    pen.restore();
  }

  canvas.addEventListener("pointermove", (event) => {
    const mark = draw.nearest(drawn, draw.place(canvas, event), 30);
    if (!mark) return draw.hideTooltip();
    const lines = model.lines(mark[2]);
    lines.splice(1, 0, `${model.metricName()} ${format.figure(mark[4])} at ${state.over ? format.duration(mark[3]) : "iteration " + mark[3]}`);
    draw.showTooltip(event, lines.filter((line, k) => k !== 2 || line !== lines[1]).join("\n"));
  });
  canvas.addEventListener("pointerleave", draw.hideTooltip);
  canvas.addEventListener("click", (event) => { const mark = draw.nearest(drawn, draw.place(canvas, event), 30); page.choose(mark ? mark[2] : null); });

  return { drawCurves };
})();
