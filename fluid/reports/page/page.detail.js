"use strict";
// The panel beside the page: all about the followed trial.
const detail = (() => {
  const { byId, clear, html } = draw, { state, now } = model, panel = byId("detail");

  function drawDetail() {
    const trial = model.chosen();
    const [kept, opened] = [panel.scrollTop, panel.dataset.key];
    clear(panel);
    panel.hidden = !trial;
    document.body.classList.toggle("following", !!trial);
    if (!trial) return;
    panel.dataset.key = trial.key;
    const bar = html(panel, "div", null, "bar");
    html(bar, "i", null, "swatch").style.background = model.colour(trial);
    html(bar, "h3", trial.id);
    const close = best.button(bar, "\u00d7", () => page.choose(null));
    close.title = "Stop following this trial (Escape)";
    close.setAttribute("aria-label", close.title);
    const value = model.valueOf(trial);
    if (value !== null) {
      const line = html(panel, "p", null, "figure");
      html(line, "span", model.metricName() + " ");
      html(line, "b", format.figure(value));
      html(line, "small", ` ${trial.rank + 1}${["st", "nd", "rd"][trial.rank] || "th"} of ${now.trials.length.toLocaleString("en-US")}, at iteration ${model.iterationOf(trial)}`);
    }
    facts(panel, trial);
    if (trial.failure) {
      html(panel, "h4", trial.state === "infeasible" ? "Infeasible" : "Failure");
      const [message, traceback, log] = trial.failure;
      html(panel, "p", message, "message");
      for (const [title, text] of [["traceback", traceback], ["end of output.log", log]]) {
        if (text === null) continue;
        const fold = html(panel, "details");
        html(fold, "summary", title);
        html(fold, "pre", text);
      }
    }
    const config = html(panel, "div", null, "bar");
    html(config, "h4", "Config");
    const copied = best.button(config, "copy config", () => best.copy(copied, JSON.stringify(model.config(trial), null, 2)));
    const list = html(panel, "dl", null, "config");
    for (const each of now.parameters) best.entry(list, each.name, model.text(each.value(trial)));
    metrics(panel, trial);
    story(panel, trial);
    panel.scrollTop = opened === trial.key ? kept : 0;
  }

  function facts(parent, trial) {
    const list = html(parent, "dl", null, "config");
    const run = now.runs[trial.run];
    if (now.runs.length > 1) best.entry(list, "run", run.name);
    if (!run.one_search) best.entry(list, "group", trial.group);
    best.entry(list, "state", trial.state);
    best.entry(list, "iterations", trial.budget === null ? String(trial.iterations) : `${trial.iterations}/${trial.budget}`);
    best.entry(list, "time", format.duration(trial.seconds));
    for (const [name, fact] of Object.entries(trial.facts)) best.entry(list, name, fact);
    const kept = model.keptOf(trial);
    if (kept) best.entry(list, `checkpoint ${kept.what}`, kept.path);
  }
  function metrics(parent, trial) {
    const known = now.data.metrics.map((metric, k) => [metric.name, trial.last[k], trial.best[k]])
      .filter(([, last], k) => last !== null && (!now.data.metrics[k].counts || k === now.metric));
    if (!known.length) return;
    html(parent, "h4", "Metrics");
    const table = html(html(parent, "div", null, "scroll"), "table"), head = html(html(table, "thead"), "tr"), body = html(table, "tbody");
    for (const title of ["", "last", "least", "greatest"]) html(head, "th", title, title ? "num" : "");
    for (const [name, last, extremes] of known) {
      const row = html(body, "tr");
      html(row, "td", name).title = name;
      html(row, "td", model.text(last), "num");
      for (const k of [0, 3]) html(row, "td", extremes ? format.figure(extremes[k]) : "", "num");
    }
  }
  function story(parent, trial) {
    if (!trial.story.length) return;
    const fold = html(parent, "details");
    fold.open = true;
    html(fold, "summary", "What happened, and why");
    const body = html(html(fold, "table", null, "story"), "tbody"), { clocked } = now.runs[trial.run];
    for (const [time, clock, text] of trial.story) {
      const row = html(body, "tr");
      const cell = html(row, "td", time, "num");
      if (clocked && clock) cell.title = clock;
      html(row, "td", text, "text");
    }
  }
  return { drawDetail };
})();
