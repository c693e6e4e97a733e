"use strict";
// The page of all runs: a table that is filtered, sorted and kept up to date; and what is done with the runs that are ticked.
(() => {
  const byId = (id) => document.getElementById(id);
  const clear = (node) => { node.replaceChildren(); return node; };
  function html(parent, name, text, kind) {
    const node = document.createElement(name);
    if (text !== undefined && text !== null) node.textContent = text;
    if (kind) node.className = kind;
    parent.append(node);
    return node;
  }
  const count = (number, noun) => `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
  function size(bytes) {
    if (bytes < 1000) return `${bytes} B`;
    let power = 0;
    while (bytes >= 999.5 && power < 4) { bytes /= 1000; power += 1; }
    return `${format.number(bytes)} ${"KMGT"[power - 1]}B`;
  }
  const when = new Intl.DateTimeFormat("sv-SE", { dateStyle: "short", timeStyle: "short" });
  const began = (run) => (run.began === null ? "" : when.format(new Date(run.began * 1000)));
  const seconds = (run) => (run.state === "running" && run.began !== null ? Math.max(0, Date.now() / 1000 - run.began) : run.seconds);
  const took = (run) => (seconds(run) === null ? "" : format.duration(seconds(run)));
  const shows = (run) => run.state !== "damaged" && run.state !== "unreadable";

  const data = JSON.parse(byId("data").textContent);
  const runs = new Map(), rows = new Map(), ticked = new Set();
  const MORE = 300, MOST_COMPARED = 12, collator = new Intl.Collator("en", { numeric: true });
  const state = { sort: "began", up: false, filter: "", only: "", rows: MORE };

  // A column: what it sorts by, and its cell. Runs without a value come last in either direction.
  const columns = [
    { key: "run", title: "run", value: (run) => run.run, cell: runCell, kind: "run" },
    { key: "state", title: "state", value: (run) => run.state, cell: stateCell },
    { key: "best", title: "best", value: (run) => run.metric, cell: bestCell, kind: "best", compare: byBest },
    { key: "trials", title: "trials", value: (run) => run.trials, cell: trialsCell, kind: "num" },
    { key: "began", title: "began", value: (run) => run.began, cell: (cell, run) => { cell.textContent = began(run); } },
    { key: "took", title: "took", value: seconds, cell: (cell, run) => { cell.textContent = took(run); }, kind: "num narrow-hidden" },
    { key: "size", title: "size", value: (run) => run.bytes, cell: (cell, run) => { cell.textContent = size(run.bytes); }, kind: "num phone-hidden" },
  ];
  function runCell(cell, run) {
    const link = html(cell, shows(run) ? "a" : "span", run.run);
    if (shows(run)) link.href = `runs/${run.id}/`;
    cell.title = run.run;
    if (run.name !== run.run) html(cell, "small", run.name);
  }
  function stateCell(cell, run) { html(cell, "span", run.state, `state ${run.state}`); }
  function bestCell(cell, run) {
    if (run.why) { html(cell, "small", run.why).title = run.why; return; }
    if (run.value === null) return;
    html(cell, "b", format.figure(run.value));
    cell.append(` ${run.metric}`);
    html(cell, "small", run.direction);
  }
  function trialsCell(cell, run) {
    cell.textContent = shows(run) ? run.trials.toLocaleString("en-US") : "";
    cell.title = run.states;
    if (run.failed) html(cell, "small", `${run.failed.toLocaleString("en-US")} failed`);
  }
  // Values are compared within a metric only; the best of each comes first.
  function byBest(a, b) {
    const order = collator.compare(`${a.metric} ${a.mode}`, `${b.metric} ${b.mode}`);
    return order || (a.mode === "min" ? a.value - b.value : b.value - a.value);
  }

  function passing() {
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    return Array.from(runs.values()).filter((run) => {
      if (state.only && run.state !== state.only) return false;
      const text = `${run.run} ${run.name} ${run.state} ${run.metric || ""}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
  }
  function sorted(list) {
    const column = columns.find((each) => each.key === state.sort), sign = state.up ? 1 : -1;
    const empty = (value) => value === null || value === "";
    return list.sort((a, b) => {
      const x = column.value(a), y = column.value(b);
      if (empty(x) || empty(y)) return empty(x) - empty(y) || collator.compare(a.run, b.run);
      const order = column.compare ? column.compare(a, b) : typeof x === "number" ? x - y : collator.compare(x, y);
      return sign * order || collator.compare(b.run, a.run);
    });
  }

  function rowOf(run) {
    const row = document.createElement("tr");
    row.dataset.id = run.id;
    const box = html(html(row, "td"), "input");
    box.type = "checkbox";
    box.checked = ticked.has(run.id);
    box.setAttribute("aria-label", `choose ${run.run}`);
    row.classList.toggle("on", box.checked);
    box.onchange = () => {
      if (box.checked) ticked.add(run.id); else ticked.delete(run.id);
      row.classList.toggle("on", box.checked);
      drawActions();
    };
    for (const column of columns) column.cell(html(row, "td", null, column.kind), run);
    return row;
  }

  function drawHead() {
    const head = html(clear(byId("index").tHead), "tr");
    html(head, "th").setAttribute("aria-label", "chosen");
    for (const column of columns) {
      const cell = html(head, "th", null, (column.kind || "").replace(/^(run|best)$/, ""));
      cell.scope = "col";
      const active = column.key === state.sort;
      if (active) cell.setAttribute("aria-sort", state.up ? "ascending" : "descending");
      const button = html(cell, "button", column.title);
      button.onclick = () => {
        state.up = active ? !state.up : ["run", "state", "best"].includes(column.key);
        state.sort = column.key;
        drawHead();
        draw();
        byId("index").tHead.querySelectorAll("button")[columns.indexOf(column)].focus();
      };
    }
  }

  // Rows stay in the document as long as they are shown where they are, so that the focus stays, too.
  function draw() {
    const list = sorted(passing()), shown = list.slice(0, state.rows), body = byId("index").tBodies[0];
    const wanted = shown.map((run) => {
      if (!rows.has(run.id)) rows.set(run.id, rowOf(run));
      return rows.get(run.id);
    });
    if (!wanted.length) {
      const row = document.createElement("tr");
      html(row, "td", runs.size ? "No run passes the filter." : "There is no run yet.", "empty-list").colSpan = columns.length + 1;
      wanted.push(row);
    }
    if (wanted.length !== body.children.length || wanted.some((row, at) => body.children[at] !== row)) body.replaceChildren(...wanted);
    const running = list.filter((run) => run.state === "running").length, all = list.reduce((sum, run) => sum + run.bytes, 0);
    const which = list.length < runs.size ? `${list.length.toLocaleString("en-US")} of ${count(runs.size, "run")}` : count(runs.size, "run");
    byId("shown").textContent = [which, ...(running ? [`${running.toLocaleString("en-US")} running`] : []), size(all)].join(", ");
    const more = clear(byId("more"));
    more.hidden = list.length <= state.rows;
    if (!more.hidden) html(more, "button", `Show ${Math.min(MORE, list.length - state.rows)} more`).onclick = () => { state.rows += MORE; draw(); };
    drawStates();
    drawActions();
  }
  function drawStates() {
    const box = byId("state"), found = Array.from(new Set(Array.from(runs.values(), (run) => run.state))).sort();
    if (state.only && !found.includes(state.only)) found.push(state.only);
    if (found.join() === Array.from(box.options, (option) => option.value).slice(1).join()) return;
    while (box.options.length > 1) box.options[1].remove();
    for (const name of found) html(box, "option", name).value = name;
    box.value = state.only;
  }
  function drawActions() {
    const chosen = Array.from(ticked, (id) => runs.get(id)), compare = byId("compare"), remove = byId("delete");
    compare.textContent = chosen.length > 1 ? `Compare ${chosen.length}` : "Compare";
    compare.disabled = chosen.length < 2 || chosen.length > MOST_COMPARED || !chosen.every(shows);
    compare.title = compare.disabled ? `Tick from 2 to ${MOST_COMPARED} runs that can be read` : "";
    remove.textContent = chosen.length > 1 ? `Delete ${chosen.length}` : "Delete";
    remove.disabled = !chosen.length || chosen.some((run) => run.state === "running");
    remove.title = chosen.length && remove.disabled ? "A run that goes on is not deleted" : "";
  }

  function update(newer) {
    for (const run of newer.rows) {
      runs.set(run.id, run);
      const old = rows.get(run.id), focused = old && old.contains(document.activeElement) && document.activeElement.localName;
      const row = rowOf(run);
      rows.set(run.id, row);
      if (old && old.isConnected) old.replaceWith(row);
      if (focused) row.querySelector(focused)?.focus();
    }
    for (const id of newer.gone) { runs.delete(id); rows.delete(id); ticked.delete(id); }
    draw();
  }
  setInterval(() => {
    for (const [id, run] of runs) {
      const row = run.state === "running" && rows.get(id);
      if (row) row.children[6].textContent = took(run);
    }
  }, 1000);

  byId("home").textContent = data.home;
  byId("filter").oninput = (event) => { state.filter = event.target.value; draw(); };
  byId("state").onchange = (event) => { state.only = event.target.value; draw(); };
  byId("compare").onclick = () => { location.href = `runs/${Array.from(ticked).join("+")}/`; };
  byId("delete").onclick = () => {
    const chosen = Array.from(ticked, (id) => runs.get(id));
    byId("question").textContent = `Delete ${count(chosen.length, "run")}, ${size(chosen.reduce((sum, run) => sum + run.bytes, 0))}?`;
    const list = clear(byId("doomed"));
    for (const run of chosen) html(list, "li", run.run);
    byId("ask").showModal();
  };
  byId("keep").onclick = () => byId("ask").close();
  byId("really").onclick = async () => {
    const ids = Array.from(ticked);
    byId("ask").close();
    clear(byId("said"));
    let refused;
    try {
      const answer = await fetch("delete", { method: "POST", headers: { "X-Fluid-Key": data.key }, body: JSON.stringify({ runs: ids }) });
      if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
      ({ refused } = await answer.json());
    } catch (error) {
      html(byId("said"), "p", `Nothing was deleted: ${error.message}`, "note");
      return;
    }
    for (const [id, why] of Object.entries(refused)) html(byId("said"), "p", `${runs.has(id) ? runs.get(id).run : id} ${why}`, "note");
    update({ rows: [], gone: ids.filter((id) => !(id in refused)) });
  };

  // A browser has few connections to a server: a page that nobody sees gives its own up.
  let version = data.version, source = null;
  function listen() {
    if (source) { source.close(); source = null; }
    if (document.hidden) return;
    source = new EventSource(`events?after=${version}`);
    source.onopen = () => document.body.classList.remove("lost");
    source.onmessage = (event) => { version = Number(event.lastEventId); update(JSON.parse(event.data)); };
    source.onerror = () => document.body.classList.add("lost");
  }
  document.addEventListener("visibilitychange", listen);
  drawHead();
  update(data);
  listen();
})();
