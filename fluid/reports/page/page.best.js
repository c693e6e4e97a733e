"use strict";
// The top of the page: the best trial, the figures of the run or the table of runs; and the best value so far over time.
const best = (() => {
  const { byId, clear, html } = draw, { state, now } = model;

  function drawTop() {
    const { data } = now;
    byId("title").textContent = data.title;
    document.title = data.title + " - Fluid";
    const single = data.runs.length === 1 ? data.runs[0] : null;
    const live = clear(byId("live"));
    if (data.live) {
      const running = data.runs.filter((run) => run.running).length, each = single ? "the session" : "all sessions";
      const what = !running ? each + (single ? " has ended" : " have ended") : single ? "running" : `${running} of ${data.runs.length} running`;
      html(live, "span", what, running ? "live" : "live ended");
    }
    const notes = clear(byId("notes"));
    for (const run of data.runs) for (const note of run.notes) html(notes, "p", single ? note : `${run.name}: ${note}`, "note");
    const top = clear(byId("top"));
    if (single) { drawBest(html(top, "section", null, "card hero"), now.best); drawTiles(html(top, "div", null, "tiles"), single); }
    else { drawRuns(html(top, "section", null, "card")); if (now.best || !now.mode) drawBest(html(top, "section", null, "card hero"), now.best); }
    drawAbout(single);
  }
  // What is of interest to those who look into the engine stays folded; of a run that goes on, when it will have ended does not.
  function drawAbout(single) {
    byId("about").hidden = !single;
    const about = clear(byId("session"));
    if (!single) return;
    const facts = html(about, "p", null, "session");
    single.facts.forEach(([name, value], k) => { if (k) facts.append(" \u00a0\u00b7\u00a0 "); facts.append(name + " "); html(facts, "b", value); });
    for (const line of single.forecasts) html(single.running ? byId("top") : about, "p", line, "session forecast");
  }

  function drawBest(card, trial) {
    if (!trial) {
      html(card, "h2", "Best trial");
      const missing = now.mode ? "No trial has reported a value of this metric." : `${model.metricName()} may mean either: choose below whether the least or the greatest value is best.`;
      html(card, "p", now.data.metrics.length ? missing : "The trials reported no numeric metrics.", "muted");
      return;
    }
    card.id = "best";
    const left = html(card, "div", null, "verdict");
    html(left, "h2", trial.state === "failed" ? "Best trial (all failed)" : "Best trial");
    html(left, "p", now.runs.length > 1 ? `${trial.id} of ${now.runs[trial.run].name}` : trial.id, "name");
    const figure = html(left, "p", null, "figure");
    html(figure, "span", model.metricName() + " ");
    html(figure, "b", format.figure(model.valueOf(trial)));
    html(figure, "small", now.less ? " less is better" : " more is better", "muted");
    const when = `iteration ${model.iterationOf(trial)}${trial.budget ? " of " + trial.budget : ""}, after ${format.duration(model.timeOf(trial))} of the makespan`;
    html(left, "p", when, "muted");
    const kept = model.keptOf(trial);
    if (kept) html(html(left, "p", `checkpoint ${kept.what} `, "muted"), "code", kept.path);
    const actions = html(left, "p", null, "actions");
    button(actions, "copy config", () => copy(actions.firstChild, JSON.stringify(model.config(trial), null, 2)));
    button(actions, "follow", () => page.choose(trial));
    const right = html(card, "dl", null, "config");
    for (const each of now.parameters) entry(right, each.name, model.text(each.value(trial), 4), model.text(each.value(trial)));
    if (!now.parameters.length) html(right, "dd", "It has no hyperparameters.", "muted");
  }
  function entry(list, name, shown, whole = shown) {
    if (!shown) return;
    const pair = html(list, "div");
    html(pair, "dt", name).title = name;
    html(pair, "dd", shown).title = whole;
  }
  function button(parent, name, action) { const made = html(parent, "button", name); made.type = "button"; made.onclick = action; return made; }
  // Pages that were opened from a disk may not have the clipboard; then the text is selected in a box.
  async function copy(from, text) {
    try {
      await navigator.clipboard.writeText(text);
      from.textContent = "copied";
      setTimeout(() => { from.textContent = "copy config"; }, 1500);
    } catch {
      const box = html(from.parentNode, "textarea");
      box.value = text; box.readOnly = true; box.rows = 6;
      box.select();
      box.onblur = () => box.remove();
    }
  }

  function drawTiles(parent, run) {
    const tile = (name, value, more, title) => {
      const box = html(parent, "div", null, "tile");
      html(box, "span", name); html(box, "b", value); html(box, "small", more || "");
      if (title) box.title = title;
    };
    tile("makespan", format.duration(run.makespan), run.wall === null ? "" : `wall time ${format.duration(run.wall)}`,
      "makespan: from the first start of an iteration to the last end; wall time: of the session, start-up included");
    tile("devices busy", run.busy_text, "of " + run.devices_text, "share of the makespan in which trials held the devices");
    const [held, ...rest] = run.costs.join("; ").split("; ");
    if (held) tile(...(run.cost === null ? ["device time", held, rest.join("; ")] : ["cost", run.cost, [held, ...rest].join("; ")]),
      "of all devices from their arrival to their loss or to the end of the session");
    tile("trials", run.trials.toLocaleString("en-US"), run.states);
    tile("iterations", run.iterations.toLocaleString("en-US"), run.resizes);
  }

  function drawRuns(card) {
    html(card, "h2", "Runs");
    const table = html(html(card, "div", null, "scroll"), "table");
    table.id = "runs";
    const name = model.metricName();
    const heads = ["run", name && now.mode ? `${now.less ? "least" : "greatest"} ${name}` : "best", "by trial", "reached after", "trials", "states", "makespan", "wall time", "devices busy", "cost", "devices", "best config"];
    const numbers = new Set([1, 3, 4, 6, 7, 8, 9]);
    const head = html(html(table, "thead"), "tr");
    heads.forEach((title, k) => { const cell = html(head, "th", title, numbers.has(k) ? "num" : ""); cell.scope = "col"; });
    const body = html(table, "tbody"), winner = now.best;
    now.runs.forEach((run, number) => {
      const trial = now.order.find((each) => each.run === number && model.valueOf(each) !== null);
      const row = html(body, "tr", null, winner && winner.run === number ? "winner" : "");
      const first = html(row, "td");
      html(first, "i").style.background = draw.runColour(number);
      first.append(run.name);
      first.title = run.path;
      html(row, "td", trial ? format.figure(model.valueOf(trial)) : "", "num value");
      const by = html(row, "td");
      if (trial) button(by, trial.id, () => page.choose(trial));
      html(row, "td", trial ? format.duration(model.timeOf(trial)) : "", "num");
      html(row, "td", run.trials.toLocaleString("en-US"), "num");
      html(row, "td", run.states);
      html(row, "td", format.duration(run.makespan), "num");
      html(row, "td", run.wall === null ? "" : format.duration(run.wall), "num");
      html(row, "td", run.busy_text, "num");
      html(row, "td", run.cost === null ? "" : run.cost, "num").title = run.costs.join("; ");
      html(row, "td", run.devices_text);
      const shown = trial ? now.parameters.filter((each) => !each.constant).map((each) => [each.name, model.text(each.value(trial), 4)]).filter(([, value]) => value) : [];
      const last = html(row, "td", shown.map(([key, value]) => `${key} ${value}`).join(", "));
      last.title = shown.map(([key, value]) => `${key}: ${value}`).join("\n");
    });
  }

  // --- The best value so far

  let marks = [];
  function drawProgress() {
    const canvas = byId("progress"), { pen, width, height } = draw.begin(canvas, 300);
    marks = [];
    const steps = now.metric < 0 || !now.mode ? [] : now.runs.map((run) => run.progress[now.metric] && run.progress[now.metric][now.less ? "min" : "max"]);
    const drawn = steps.map((each, run) => [run, each]).filter(([, each]) => each && each[0].length);
    canvas.setAttribute("aria-label", `The best ${model.metricName()} so far over the makespan`);
    if (!drawn.length) { draw.text(pen, "No values to draw.", 60, 40); return; }
    const ends = now.trials.filter((trial) => now.shown[trial.row] && trial.state !== "failed" && model.valueOf(trial) !== null);
    // First values and trials far from the best would flatten the lines: the axis leaves out what is beyond three quarters
    // of the trials.
    const sorted = ends.map(model.valueOf).sort((a, b) => (now.less ? a - b : b - a));
    const values = sorted.length < 8 ? drawn.flatMap(([, each]) => each[1]) : [sorted[Math.floor((sorted.length - 1) * 0.75)]];
    values.push(...drawn.map(([, each]) => each[1][each[1].length - 1]));
    const low = Math.min(...values), high = Math.max(...values);
    const log = now.log && low > 0;
    const across = Math.max(...now.runs.map((run) => run.makespan)) || 1;
    const frame = axes(pen, { width, height, across, scale: draw.numbers(low, high, { log, margin: 0.06 }), time: true });
    pen.save();
    pen.beginPath();
    pen.rect(frame.left - 4, frame.top - 6, frame.wide + 10, frame.tall + 12);
    pen.clip();
    for (const trial of ends) {
      const x = frame.x(model.timeOf(trial)), y = frame.y(model.valueOf(trial));
      pen.globalAlpha = model.chosen() === trial ? 1 : 0.4;
      draw.dot(pen, x, y, model.chosen() === trial ? 4.5 : 2.2, model.markColour(trial));
      if (y < frame.top + frame.tall) marks.push([x, y, trial]);
    }
    pen.globalAlpha = 1;
    for (const [run, [times, bests, rows]] of drawn) {
      pen.strokeStyle = now.runs.length > 1 ? draw.runColour(run) : draw.themeColour("accent");
      pen.lineWidth = 2.2;
      pen.beginPath();
      bests.forEach((value, k) => {
        const x = frame.x(times[k]), y = frame.y(value);
        if (k) { pen.lineTo(x, frame.y(bests[k - 1])); pen.lineTo(x, y); } else pen.moveTo(x, y);
      });
      pen.lineTo(frame.x(now.runs[run].makespan), frame.y(bests[bests.length - 1]));
      pen.stroke();
      bests.forEach((value, k) => {
        const x = frame.x(times[k]), y = frame.y(value);
        draw.dot(pen, x, y, bests.length > 30 ? 2.2 : 3.2, now.runs.length > 1 ? draw.runColour(run) : draw.themeColour("accent"), bests.length > 30 ? null : "card");
        marks.push([x, y, now.trials[now.runs[run].first + rows[k]], value, times[k]]);
      });
    }
    pen.restore();
    byId("progress-note").textContent = now.runs.length > 1 ? "a line per run; dots are trials" : "dots are the trials' best values";
  }

  // Draws the axes of a chart of numbers over time or iterations; returns the functions that place points in it.
  function axes(pen, { width, height, across, from = 0, scale, time, title, left = 58 }) {
    const right = 16, top = 10, bottom = 34, wide = width - left - right, tall = height - top - bottom;
    const x = (at) => left + ((at - from) / (across - from || 1)) * wide, y = (value) => top + (1 - scale.at(value)) * tall;
    for (const value of scale.marks(6)) {
      draw.line(pen, left, y(value), width - right, y(value), "grid");
      draw.text(pen, scale.label(value), left - 8, y(value) + 4, { align: "right", most: left - 10 });
    }
    const [unit, size] = time ? format.unitFor(across) : ["", 1], most = wide / 80;
    const steps = time ? draw.timeTicks(from, across, most) : draw.ticks(from, across, Math.max(1, draw.numbers(from, across).marks(most).reduce((step, _, k, all) => (k ? all[1] - all[0] : step), 1)));
    for (const at of steps) draw.text(pen, String(Number((at / size).toPrecision(6))), x(at), height - bottom + 17, { align: "center" });
    draw.line(pen, left, height - bottom, width - right, height - bottom, "rule");
    draw.text(pen, title || (time ? `time (${unit})` : "iteration"), width - right, height - 3, { align: "right" });
    return { x, y, left, top, wide, tall, right, bottom };
  }

  const progress = byId("progress");
  progress.addEventListener("pointermove", (event) => {
    const mark = draw.nearest(marks, draw.place(progress, event));
    if (!mark) return draw.hideTooltip();
    const [, , trial, value, at] = mark, lines = model.lines(trial);
    if (value !== undefined) lines.splice(1, 0, `best so far: ${format.figure(value)} after ${format.duration(at)}`);
    draw.showTooltip(event, lines.join("\n"));
  });
  progress.addEventListener("pointerleave", draw.hideTooltip);
  progress.addEventListener("click", (event) => { const mark = draw.nearest(marks, draw.place(progress, event)); page.choose(mark ? mark[2] : null); });

  return { drawTop, drawProgress, axes, copy, button, entry };
})();
