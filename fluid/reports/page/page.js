"use strict";
// The page: what the reader chooses, and update(data), which draws newer data and keeps all that was chosen.
const page = (() => {
  const { byId, clear, html, soon, drawCharts } = draw, { state, now } = model;

  draw.chart(byId("progress-card"), best.drawProgress);
  draw.chart(byId("curves-card"), curves.drawCurves);
  draw.chart(byId("parallel").parentNode, parallel.drawParallel);
  draw.chart(byId("scatters"), scatter.drawScatters);
  draw.chart(byId("contour-box"), contour.drawContour);
  draw.chart(byId("pareto"), scatter.drawPareto);
  draw.chart(byId("timeline"), timeline.drawTimeline);
  draw.chart(byId("forks-card"), forks.drawForks);

  function drawControls() {
    const { data } = now, metricBox = clear(byId("metric"));
    for (const metric of data.metrics) html(metricBox, "option", metric.name).value = metric.name;
    byId("metric-label").hidden = !data.metrics.length;
    if (now.metric >= 0) metricBox.value = state.metric;
    byId("mode").value = now.mode || "";
    byId("mode").options[0].hidden = !!now.mode;
    byId("log").checked = now.log;
    byId("leaders").checked = model.leadersOnly();
    byId("leaders").parentNode.hidden = now.trials.length <= model.LEADERS;
    const colours = clear(byId("colour"));
    for (const name of ["trial", "metric", ...(data.runs.length > 1 ? ["run"] : [])]) html(colours, "option", "by " + name).value = name;
    byId("colour").value = model.colouring();
    byId("over").value = String(state.over);
  }
  // All that depends on the metric, its mode or its scale.
  function ranked() {
    model.rank();
    drawControls();
    best.drawTop();
    parallel.hide();
    scatter.hide();
    contour.hide();
    scatter.drawImportances();
    tables.drawColumns();
    tables.drawTable();
    parallel.drawBrushes();
    detail.drawDetail();
    drawCharts();
  }
  function filtered() {
    model.filter();
    parallel.drawBrushes();
    tables.drawTable();
    drawCharts();
  }
  // Follows a trial, or none; the trial that is followed already is let go.
  function choose(trial, { focus = false } = {}) {
    state.chosen = !trial || trial.key === state.chosen ? null : trial.key;
    if (trial && state.chosen !== null && trial.run !== state.run) { state.run = trial.run; state.zoom = null; tables.drawSmall(); scatter.drawImportances(); }
    detail.drawDetail();
    tables.mark();
    drawCharts();
    if (focus && state.chosen !== null) byId("detail").querySelector("button").focus();
  }
  function update(data) {
    const focused = document.activeElement && document.activeElement.closest("tr.trial");
    const key = focused ? now.trials[focused.dataset.row].key : null;
    model.load(data.patch ? model.patched(data) : data);
    if (state.chosen !== null && !model.chosen()) state.chosen = null;
    ranked();
    tables.drawSmall();
    const again = key && now.trials.find((trial) => trial.key === key);
    const row = again && byId("trials").querySelector(`tr.trial[data-row="${again.row}"]`);
    if (row) row.focus({ preventScroll: true });
  }

  byId("metric").onchange = (event) => { state.metric = event.target.value; delete state.brushes[""]; ranked(); };
  byId("mode").onchange = (event) => { state.mode[state.metric] = event.target.value; ranked(); };
  byId("log").onchange = (event) => { state.log[state.metric] = event.target.checked; delete state.brushes[""]; ranked(); };
  byId("leaders").onchange = (event) => { state.leaders = event.target.checked; drawCharts(); };
  byId("colour").onchange = (event) => { state.colour = event.target.value; tables.drawTable(); best.drawTop(); detail.drawDetail(); drawCharts(); };
  byId("over").onchange = (event) => { state.over = Number(event.target.value); soon(curves.drawCurves); };
  byId("run").onchange = (event) => { state.run = Number(event.target.value); state.zoom = null; tables.drawSmall(); scatter.drawImportances(); drawCharts(); };
  let later = 0;
  byId("filter").oninput = (event) => { state.filter = event.target.value; clearTimeout(later); later = setTimeout(filtered, now.trials.length > 300 ? 120 : 0); };

  // Where a chart has the focus, arrows follow the next better or worse trial that passes the filter.
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      if (byId("columns").open) byId("columns").open = false;
      else if (state.chosen !== null) choose(null);
      return;
    }
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !event.target.matches || !event.target.matches("canvas")) return;
    event.preventDefault();
    const list = now.order.filter((trial) => now.shown[trial.row]), at = list.indexOf(model.chosen());
    const next = list[at < 0 ? 0 : Math.max(0, Math.min(list.length - 1, at + step))];
    if (next && next.key !== state.chosen) choose(next);
  });
  draw.whenColoursChange(ranked);
  new ResizeObserver(() => drawCharts()).observe(document.body);

  update(JSON.parse(byId("data").textContent));
  const { events } = document.body.dataset;
  if (events) {
    const source = new EventSource(events);
    source.onmessage = (event) => { document.body.classList.remove("lost"); update(JSON.parse(event.data)); };
    source.onerror = () => document.body.classList.add("lost");
  }
  return { update, choose, filtered };
})();
