"use strict";
// The data of the page and what the reader chose: columns, ranks, the trials that pass the filter, and their colours.
const model = (() => {
  // What the reader chose. It outlives newer data, so it names metrics, columns and trials, never by their position.
  const state = {
    metric: null, mode: {}, log: {}, filter: "", brushes: {}, sort: { column: "rank", up: true }, hidden: {}, chosen: null,
    leaders: null, colour: null, over: 0, run: 0, zoom: null, rows: 100, open: {}, pareto: [null, null], contour: [null, null],
  };
  const now = {
    data: null, trials: [], runs: [], metric: -1, less: true, log: false, columns: [], parameters: [], order: [], shown: [],
    passes: () => true, problem: "", leaders: new Set(), ranked: [],
  };
  const LEADERS = 10;
  // A row of a run's timeline, or of its forks: a trial, or what Fluid has added to run iterations once for several trials,
  // which stands in no table and cannot be followed.
  const ofRow = (run, row) => (row < run.trials ? now.trials[run.first + row] : run.shared[row - run.trials]);
  const keyOf = (trial) => trial.run + "\u0000" + trial.group + "\u0000" + trial.id;

  function text(value, digits) {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return format.figure(value, digits);
    return typeof value === "string" ? value : JSON.stringify(value);
  }
  // A category: what stands on an axis that is not one of numbers.
  const category = (value) => (value === null || value === undefined ? "none" : typeof value === "number" ? String(value) : text(value));

  // --- New data

  // All of the data, with what a patch changes in it.
  function patched(patch) {
    const { data } = now, rows = data.runs.map(() => []);
    for (const trial of data.trials) rows[trial.run].push(trial);
    for (const [run, row, trial] of patch.trials) rows[run][row] = trial;
    return { ...data, trials: rows.flat(), runs: data.runs.map((run, k) => ({ ...run, ...patch.runs[k] })) };
  }
  function load(data) {
    now.data = data;
    now.runs = data.runs;
    now.trials = data.trials;
    const counts = data.runs.map(() => 0);
    let first = 0;
    for (const run of data.runs) { run.first = first; first += run.trials; }
    data.trials.forEach((trial, row) => {
      trial.row = row;
      trial.at = counts[trial.run]++;
      trial.key = keyOf(trial);
      if (trial.failure) trial.failure = trial.failure.map((part) => (typeof part === "number" ? data.texts[part] : part));
      let shared = null;
      for (const curve of trial.curves) {
        if (!curve) continue;
        if (!curve[1].length && shared) { curve[0] = shared[0]; curve[1] = shared[1]; }
        if (!curve[0].length) curve[0] = curve[2].map((_, k) => k + 1);
        shared = shared || (curve === trial.curves[0] ? curve : null);
      }
    });
    now.parameters = data.parameters.map((name, position) => parameter(name, position));
    if (!data.metrics.some((metric) => metric.name === state.metric)) state.metric = data.metrics.length ? data.metrics[0].name : null;
    if (state.run >= data.runs.length) state.run = 0;
    rank();
  }

  // A hyperparameter: whether its values are numbers, whether all trials have the same, and its scale.
  function parameter(name, position) {
    const values = now.trials.map((trial) => trial.config[position]);
    const known = values.filter((value) => value !== null && value !== undefined);
    const numeric = known.length > 0 && known.every((value) => typeof value === "number");
    const texts = new Set(values.map(category));
    const found = { name, position, numeric, constant: texts.size < 2, value: (trial) => trial.config[position] };
    if (numeric) {
      const low = Math.min(...known), high = Math.max(...known), few = Array.from(new Set(known)).sort((a, b) => a - b);
      found.scale = draw.numbers(low, high, { log: draw.isLogarithmic(known), margin: low === high ? 0 : 0.03, values: few.length <= 10 && (few.every(Number.isInteger) || few.length * 2 <= known.length) ? few : null });
      found.place = (trial) => found.scale.at(trial.config[position]);
    } else {
      const places = Array.from(texts).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
      found.scale = draw.categories(places);
      found.place = (trial) => found.scale.at(category(trial.config[position]));
    }
    return found;
  }

  // --- The metric

  // What an infeasible trial has reported does not count.
  const valueOf = (trial) => { const best = now.metric < 0 || !now.mode || trial.state === "infeasible" ? null : trial.best[now.metric]; return best ? best[now.less ? 0 : 3] : null; };
  const iterationOf = (trial) => { const best = now.metric < 0 ? null : trial.best[now.metric]; return best ? best[now.less ? 1 : 4] : null; };
  const timeOf = (trial) => { const best = now.metric < 0 ? null : trial.best[now.metric]; return best ? best[now.less ? 2 : 5] : null; };
  // The checkpoint of the best iteration; if that one was not kept, the newest: with its path and what it is of.
  function keptOf(trial) {
    const kept = trial.checkpoints || [];
    const found = kept.find(([iteration]) => iteration === iterationOf(trial)) || kept[kept.length - 1];
    return found ? { path: found[1], what: found[0] === iterationOf(trial) ? "" : `of iteration ${found[0]}` } : null;
  }
  const checkpointOf = (trial) => { const found = keptOf(trial); return found ? found.path : null; };
  const dollarsFor = (run, seconds) => (run.price === null ? null : (run.price * seconds) / 3600);
  const costOf = (trial) => dollarsFor(now.runs[trial.run], trial.device_seconds);
  const lastOf = (trial) => (now.metric < 0 ? null : trial.last[now.metric]);

  // Ranks the trials by the metric: the best first, then those without a value, failed ones last.
  function rank() {
    now.metric = now.data.metrics.findIndex((metric) => metric.name === state.metric);
    const metric = now.data.metrics[now.metric];
    // Neither the sweep nor the name of some metrics says which values are best: then none is, until the reader chooses.
    now.mode = metric ? state.mode[metric.name] || metric.mode : "min";
    now.less = now.mode === "min";
    const sign = now.less ? 1 : -1;
    const class_ = (trial) => (trial.state === "failed" ? 2 : 0) + (valueOf(trial) === null ? 1 : 0);
    now.order = now.trials.slice().sort((a, b) => class_(a) - class_(b) || sign * (valueOf(a) - valueOf(b)) || a.row - b.row);
    now.order.forEach((trial, place) => { trial.rank = place; });
    const ranked = now.order.filter((trial) => trial.state !== "failed" && valueOf(trial) !== null);
    now.leaders = new Set(ranked.slice(0, LEADERS).map((trial) => trial.row));
    now.best = ranked[0] || (now.order.length && valueOf(now.order[0]) !== null ? now.order[0] : null);
    if (state.leaders === null) now.few = now.trials.length <= 24;
    const values = ranked.map(valueOf);
    now.log = metric && metric.name in state.log ? state.log[metric.name] && values.some((value) => value > 0) : draw.isLogarithmic(values);
    // Colours are by rank, so that they tell trials apart wherever the values crowd. Equal values have one colour.
    now.ranked = values;
    now.qualities = new Map();
    values.forEach((value, k) => { if (!now.qualities.has(value)) now.qualities.set(value, values.length > 1 ? 1 - k / (values.length - 1) : 1); });
    columns();
    filter();
  }

  function quality(trial) {
    if (trial.state === "failed") return null;
    const share = now.qualities.get(valueOf(trial));
    return share === undefined ? null : share;
  }
  const colouring = () => state.colour || (now.runs.length > 1 ? "run" : now.trials.length <= 24 ? "trial" : "metric");
  function metricColour(trial) {
    const share = quality(trial);
    return share === null ? draw.themeColour("nothing") : draw.qualityColour(share);
  }
  function colour(trial) {
    const by = colouring();
    return by === "run" ? draw.runColour(trial.run) : by === "trial" ? trial.colour : metricColour(trial);
  }
  // A run's devices run that run's trials only.
  const barColour = (trial) => (colouring() === "metric" ? metricColour(trial) : trial.colour);
  // For charts in which a trial is a mark among others' marks, colours by trial tell nothing.
  const markColour = (trial) => (colouring() === "run" ? draw.runColour(trial.run) : metricColour(trial));

  // --- Columns, for the table and the filter

  function columns() {
    const { data } = now, metric = data.metrics[now.metric];
    const names = (...given) => given.map((name) => name.toLowerCase());
    const list = [{ key: "trial", title: "trial", names: names("trial", "id"), value: (trial) => trial.id }];
    if (data.runs.length > 1) list.push({ key: "run", title: "run", names: names("run"), value: (trial) => data.runs[trial.run].name });
    if (data.runs.some((run) => !run.one_search && run.groups.length > 1)) {
      list.push({ key: "group", title: "group", names: names("group"), value: (trial) => trial.group });
    }
    list.push({ key: "state", title: "state", names: names("state"), value: (trial) => trial.state });
    if (metric) {
      if (now.mode) {
        const word = now.less ? "least" : "greatest";
        list.push({ key: "rank", title: `${word} ${metric.name}`, names: names(metric.name, "metrics/" + metric.name, "best"), numeric: true, value: valueOf, metric: true });
        list.push({ key: "at", title: "at iteration", names: names("at"), numeric: true, value: iterationOf });
      }
      list.push({ key: "last", title: `last ${metric.name}`, names: names("last", "last/" + metric.name), value: lastOf, numeric: true });
    }
    now.parameters.forEach((each) => {
      list.push({ key: "config/" + each.name, title: each.name, names: names(each.name, "config/" + each.name), numeric: each.numeric, value: each.value, off: each.constant && now.trials.length > 1, parameter: true });
    });
    data.metrics.forEach((other, k) => {
      if (k === now.metric) return;
      const mode = state.mode[other.name] || other.mode, word = { min: "least", max: "greatest" }[mode] || "last";
      const value = (trial) => (mode ? (trial.best[k] ? trial.best[k][mode === "min" ? 0 : 3] : null) : trial.last[k]);
      list.push({ key: "metrics/" + other.name, title: other.name, names: names(other.name, "metrics/" + other.name), numeric: true, value, off: other.counts || (!other.goal && k > 2), hint: `${word} ${other.name}` });
    });
    list.push({ key: "iterations", title: "iterations", names: names("iterations", "iteration"), numeric: true, value: (trial) => trial.iterations, text: (trial) => (trial.budget === null ? String(trial.iterations) : `${trial.iterations}/${trial.budget}`) });
    if (now.trials.some((trial) => trial.from)) list.push({ key: "from", title: "from", names: names("from", "parent"), value: (trial) => trial.from || null });
    list.push({ key: "seconds", title: "time", names: names("time", "seconds"), numeric: true, value: (trial) => trial.seconds, text: (trial) => format.duration(trial.seconds) });
    list.push({ key: "device_seconds", title: "device time", names: names("device_time", "device time"), numeric: true, value: (trial) => trial.device_seconds, text: (trial) => format.duration(trial.device_seconds), off: true, hint: "device time: of devices that trials shared, the trial's part" });
    if (data.runs.some((run) => run.price !== null)) {
      list.push({ key: "cost", title: "cost", names: names("cost"), numeric: true, value: costOf, text: (trial) => (costOf(trial) === null ? "" : format.dollars(costOf(trial))), hint: "US dollars for the device time that the trial's iterations used" });
    }
    list.push({ key: "widths", title: "widths", names: names("widths", "width"), value: (trial) => trial.widest, text: (trial) => trial.widths });
    if (now.trials.some((trial) => trial.checkpoints)) {
      list.push({ key: "checkpoint", title: "checkpoint", names: names("checkpoint"), value: checkpointOf });
    }
    // A hyperparameter's name goes before a metric's: the other is still found by its long name.
    list.sort((a, b) => !!b.parameter - !!a.parameter || 0);
    for (const column of list) column.text = column.text || ((trial) => text(column.value(trial)));
    now.columns = list;
    const place = (column) => ["trial", "run", "group", "state", "rank", "at", "last"].indexOf(column.key);
    now.table = list.slice().sort((a, b) => (place(a) < 0) - (place(b) < 0) || (place(a) >= 0 ? place(a) - place(b) : 0));
  }
  const visible = (column) => (column.key in state.hidden ? !state.hidden[column.key] : !column.off);

  // --- The filter, and the ranges kept on axes

  function filter() {
    try {
      now.passes = filters.compile(state.filter, now.columns);
      now.problem = "";
    } catch (problem) {
      now.problem = problem.message; // The last filter that could be read stays.
    }
    const kept = Object.entries(state.brushes).map(([name, range]) => [axis(name), range]).filter(([found]) => found);
    now.shown = now.trials.map((trial) => now.passes(trial) && kept.every(([found, [low, high]]) => {
      const share = found.place(trial);
      return share >= low - 1e-9 && share <= high + 1e-9;
    }));
  }
  // An axis of the parallel coordinates: a hyperparameter, or the metric, whose name is empty.
  function axis(name) {
    if (name !== "") return now.parameters.find((each) => each.name === name);
    if (now.metric < 0) return null;
    if (!now.ranked.length) return null;
    const values = now.ranked.filter((value) => !now.log || value > 0);
    const scale = draw.numbers(Math.min(...values), Math.max(...values), { log: now.log, margin: 0.02 });
    // Where a failed trial got to says nothing about its hyperparameters.
    const place = (trial) => { const value = valueOf(trial); return value === null || trial.state === "failed" ? NaN : scale.at(value); };
    return { name: "", numeric: true, scale, value: valueOf, place };
  }

  const chosen = () => (state.chosen === null ? null : now.trials.find((trial) => trial.key === state.chosen) || null);
  const leadersOnly = () => (state.leaders === null ? false : state.leaders);
  // Whether a trial stands out: the followed one if there is one, else one of the best if only they are wanted.
  function stands(trial) {
    if (state.chosen !== null) return trial.key === state.chosen;
    return leadersOnly() ? now.leaders.has(trial.row) : true;
  }
  // At most so many of the trials, evenly chosen from the best to the worst; the leaders and the followed one are kept.
  function sample(trials, most) {
    if (trials.length <= most) return trials;
    const kept = new Set(Array.from({ length: most }, (_, k) => Math.round((k * (trials.length - 1)) / (most - 1))));
    return trials.filter((trial, k) => kept.has(k) || now.leaders.has(trial.row) || trial.key === state.chosen);
  }
  function config(trial) {
    if (trial.nested) return trial.nested;
    return Object.fromEntries(now.parameters.map((each) => [each.name, each.value(trial)]).filter(([, value]) => value !== null && value !== undefined));
  }
  const metricName = () => (now.metric < 0 ? "" : now.data.metrics[now.metric].name);
  // The lines of a tooltip about a trial, with the metric, and its config.
  function lines(trial) {
    const found = [now.runs.length > 1 ? `${trial.id} of ${now.runs[trial.run].name}` : trial.id];
    const value = valueOf(trial);
    if (value !== null) found.push(`${metricName()} ${format.figure(value)} at iteration ${iterationOf(trial)}`);
    if (trial.failure) found.push(`${trial.state}: ${trial.failure[0]}`);
    const differing = now.parameters.filter((each) => !each.constant || now.trials.length === 1);
    const entries = differing.map((each) => [each.name, text(each.value(trial))]).filter(([, shown]) => shown);
    for (const [name, shown] of entries.slice(0, 14)) found.push(`${name}  ${shown.length > 50 ? shown.slice(0, 49) + "\u2026" : shown}`);
    if (entries.length > 14) found.push(`and ${entries.length - 14} more`);
    return found;
  }

  return {
    state, now, load, patched, ofRow, rank, filter, axis, text, category, valueOf, iterationOf, timeOf, lastOf, keptOf, colour, barColour, markColour, metricColour, quality,
    colouring, visible, chosen, leadersOnly, stands, sample, config, metricName, lines, dollarsFor, LEADERS,
  };
})();
