"use strict";
// The table of trials, in order of the metric unless a header was chosen; and the tables of groups and measurements.
const tables = (() => {
  const { byId, clear, html } = draw, { state, now } = model;
  const table = byId("trials"), MORE = 200;

  // Cells without a value come last in either direction; failed trials come last in the order of the metric.
  function sorted() {
    const found = now.table.find((column) => column.key === state.sort.column);
    const rows = now.order.filter((trial) => now.shown[trial.row]);
    if (!found || found.metric) {
      if (state.sort.up) return rows;
      const ranked = (trial) => trial.state !== "failed" && model.valueOf(trial) !== null;
      return [...rows.filter(ranked).reverse(), ...rows.filter((trial) => !ranked(trial))];
    }
    const sign = state.sort.up ? 1 : -1, empty = (value) => value === null || value === undefined || value === "";
    const collator = new Intl.Collator("en", { numeric: true });
    const keyed = rows.map((trial) => [found.value(trial), trial]);
    keyed.sort(([a], [b]) => {
      if (empty(a) || empty(b)) return empty(a) - empty(b);
      if (typeof a === "number" && typeof b === "number") return sign * (a - b);
      return sign * collator.compare(model.text(a), model.text(b));
    });
    return keyed.map(([, trial]) => trial);
  }

  function drawTable() {
    const columns = now.table.filter(model.visible), rows = sorted();
    const head = html(clear(table.tHead), "tr");
    for (const column of columns) {
      const cell = html(head, "th", null, column.numeric ? "num" : "");
      cell.scope = "col";
      cell.dataset.title = column.title;
      const active = column.key === state.sort.column || (column.metric && state.sort.column === "rank");
      // In the order of the metric the best is first, be it the least or the greatest.
      const up = column.metric ? state.sort.up === now.less : state.sort.up;
      if (active) cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      const button = html(cell, "button", column.title);
      button.title = column.hint || column.title;
      button.dataset.column = column.key;
      button.onclick = () => {
        state.sort = { column: column.key, up: active ? !state.sort.up : true };
        drawTable();
        const again = Array.from(table.tHead.querySelectorAll("button")).find((each) => each.dataset.column === column.key);
        if (again) again.focus();
      };
    }
    const body = clear(table.tBodies[0]), shown = rows.slice(0, state.rows), part = document.createDocumentFragment();
    for (const trial of shown) drawRow(part, trial, columns);
    if (!shown.length) {
      const cell = html(html(part, "tr"), "td", now.trials.length ? "No trial passes the filter." : "No trial has been submitted.", "muted");
      cell.colSpan = columns.length;
    }
    body.append(part);
    drawMore(rows.length);
    drawConstants();
    byId("shown").textContent = now.problem ? now.problem : rows.length < now.trials.length ? `${rows.length.toLocaleString("en-US")} of ${now.trials.length.toLocaleString("en-US")} trials` : "";
    byId("shown").classList.toggle("problem", !!now.problem);
    byId("filter").setAttribute("aria-invalid", String(!!now.problem));
  }

  function drawRow(part, trial, columns) {
    const row = html(part, "tr", null, "trial" + (trial.key === state.chosen ? " on" : ""));
    row.tabIndex = 0;
    row.dataset.row = trial.row;
    for (const column of columns) {
      const value = column.value(trial), whole = column.text(trial), text = column.parameter && typeof value === "number" ? format.figure(value, 4) : whole;
      const cell = html(row, "td", null, typeof value === "number" && column.key !== "widths" ? "num" : "");
      if (column.key === "trial") html(cell, "i").style.background = model.colour(trial);
      if (column.key === "state") cell.className = "state " + trial.state;
      if (column.metric && trial === now.best) cell.classList.add("winner");
      cell.append(text.length > 60 ? text.slice(0, 59) + "\u2026" : text);
      if (whole.length > 24 || whole !== text) cell.title = whole;
    }
    if (trial.failure) drawFailure(html(part, "tr", null, "why"), trial, columns.length);
  }
  // Why a trial failed: its message, and folded below it the traceback and the end of what it printed.
  function drawFailure(row, trial, span) {
    const [message, traceback, log] = trial.failure, cell = html(row, "td");
    cell.colSpan = span;
    if (traceback === null && log === null) { html(cell, "div", message, "message"); return; }
    const fold = html(cell, "details");
    fold.open = !!state.open[trial.key];
    html(fold, "summary", message, "message");
    const fill = () => {
      if (!fold.open || fold.childElementCount > 1) return;
      if (traceback !== null) html(fold, "pre", traceback);
      if (log !== null) { html(fold, "h4", "The end of output.log"); html(fold, "pre", log); }
    };
    fold.ontoggle = () => { state.open[trial.key] = fold.open; fill(); };
    fill();
  }
  function drawMore(count) {
    const box = clear(byId("more")), left = count - state.rows;
    box.hidden = left <= 0;
    if (left <= 0) return;
    html(box, "span", `The first ${state.rows.toLocaleString("en-US")} of ${count.toLocaleString("en-US")}.`, "muted");
    if (left > MORE) best.button(box, `show ${MORE} more`, () => { state.rows += MORE; drawTable(); });
    best.button(box, "show all", () => { state.rows = Infinity; drawTable(); });
  }
  // Hyperparameters that all trials share have no column at first, but are named.
  function drawConstants() {
    const same = now.trials.length > 1 ? now.parameters.filter((each) => each.constant) : [];
    byId("constants").textContent = same.length ? "the same in all trials: " + same.map((each) => `${each.name} ${model.text(each.value(now.trials[0])) || "none"}`).join(", ") : "";
    byId("constants").title = byId("constants").textContent;
  }
  function drawColumns() {
    const list = clear(byId("column-list"));
    for (const column of now.table) {
      const label = html(list, "label"), box = html(label, "input");
      box.type = "checkbox";
      box.checked = model.visible(column);
      box.onchange = () => { state.hidden[column.key] = !box.checked; drawTable(); };
      label.append(" " + column.title);
    }
  }

  table.addEventListener("click", (event) => {
    const row = event.target.closest("tr.trial");
    if (row && !String(getSelection())) page.choose(now.trials[row.dataset.row]);
  });
  table.addEventListener("keydown", (event) => {
    if (!event.target.matches("tr.trial")) return;
    const trial = now.trials[event.target.dataset.row];
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); page.choose(trial, { focus: true }); }
    if (!step) return;
    event.preventDefault();
    let other = event.target[step];
    while (other && !other.matches("tr.trial")) other = other[step];
    if (other) other.focus();
  });
  function mark() {
    for (const row of table.querySelectorAll("tr.trial")) row.classList.toggle("on", now.trials[row.dataset.row].key === state.chosen);
  }

  // --- Groups and measurements

  function drawSmall() {
    const run = now.runs[state.run], none = (value) => (value === null ? "" : value);
    byId("groups-card").hidden = run.one_search || !run.groups.length;
    simple(byId("groups"), [["group"], ["trials", 1], ["states"], ...(run.groups.some((group) => group.said) ? [["terms"]] : []), ["iterations", 1], ["makespan", 1], ["device time", 1], ...(run.price === null ? [] : [["cost", 1]])],
      run.groups.map((group) => [group.name, group.trials, group.states, ...(run.groups.some((each) => each.said) ? [group.said] : []), group.iterations, format.duration(group.makespan), format.duration(group.device_seconds), ...(run.price === null ? [] : [format.dollars(model.dollarsFor(run, group.device_seconds))])]));
    byId("cohorts-card").hidden = !run.cohorts.length;
    simple(byId("cohorts"), [["profile key"], ["trials whose configs have"], ["predictions"]], run.cohorts);
    simple(byId("keys"), [["profile key"], ["alone, per iteration", 1], ["alpha (packing)", 1], ["c (best packing)", 1], ["beta (scaling)", 1], ["fusing"]],
      run.keys.map((key) => [key.key, key.seconds === null ? "" : format.duration(key.seconds), key.packed ? none(key.alpha).toFixed(3) : "-", key.packed ? none(key.c) : "-", none(key.beta).toFixed(3), key.fused.replace(/^, /, "") || "-"]),
      "No measurements: the profile is written when the session ends.");
  }
  function simple(owner, heads, rows, empty) {
    const head = html(clear(owner.tHead), "tr"), body = clear(owner.tBodies[0]);
    heads.forEach(([title, numeric]) => { html(head, "th", title, numeric ? "num" : "").scope = "col"; });
    for (const cells of rows) {
      const row = html(body, "tr");
      cells.forEach((text, k) => { html(row, "td", typeof text === "number" ? text.toLocaleString("en-US") : text, heads[k][1] ? "num" : "").title = text; });
    }
    if (!rows.length && empty) html(html(body, "tr"), "td", empty, "muted").colSpan = heads.length;
  }

  return { drawTable, drawColumns, drawSmall, mark };
})();
