"use strict";
// The trees of forks: a row per trial, from the state that it starts from to its last iteration, below its parent's row.
const forks = (() => {
  const { byId } = draw, { state, now } = model, canvas = byId("forks");
  const TOP = 8, AXIS = 34, RIGHT = 16;
  let hits = [];

  const run = () => now.runs[state.run];
  const nameOf = (row) => model.ofRow(run(), row).id;

  function drawForks() {
    const lineages = run().forks, count = lineages.length;
    byId("forks-card").hidden = !count;
    hits = [];
    if (!count) return;
    const tall = Math.max(4, Math.min(22, Math.floor(640 / count))), bottom = TOP + count * tall;
    const { pen, width } = draw.begin(canvas, bottom + AXIS);
    canvas.setAttribute("aria-label", `Which trial of ${run().name} starts from whose state, over iterations`);
    const shared = lineages.filter(([row]) => model.ofRow(run(), row).shared).length;
    const forked = lineages.filter(([, parent, , , outside]) => parent >= 0 || outside).length;
    byId("forks-note").textContent = `${forked} of ${count} start from another's state` + (shared ? `; ${shared} in grey were run once for several trials` : "");
    const names = lineages.map(([row]) => nameOf(row)), every = Math.max(1, Math.ceil(12 / tall));
    const left = Math.min(width < 600 ? 90 : 200, 16 + Math.max(36, ...names.map((name) => pen.measureText(name).width)));
    const most = Math.max(1, ...lineages.map(([, , , last]) => last)), wide = Math.max(100, width - left - RIGHT);
    const x = (iteration) => left + (iteration / most) * wide, y = (place) => TOP + (place + 0.5) * tall;
    for (const tick of draw.numbers(0, most).marks(wide / 80).filter((mark) => Number.isInteger(mark) && mark >= 0 && mark <= most)) {
      draw.line(pen, x(tick), TOP, x(tick), bottom, "grid");
      draw.text(pen, String(tick), x(tick), bottom + 15, { align: "center" });
    }
    draw.text(pen, "iteration", left + wide, bottom + 29, { align: "right" });
    const place = new Map(lineages.map(([row], k) => [row, k])), kin = kinOf(lineages, place);
    const stands = (row) => {
      const trial = model.ofRow(run(), row);
      return kin ? kin.has(row) : trial.shared || (now.shown[trial.row] && (!model.leadersOnly() || now.leaders.has(trial.row)));
    };
    // Links first: rows are drawn above them.
    pen.lineWidth = 1;
    lineages.forEach(([row, parent, at, , outside], k) => {
      if (parent < 0 && !outside) return;
      pen.globalAlpha = stands(row) ? 0.9 : 0.15;
      pen.strokeStyle = draw.themeColour("muted");
      pen.setLineDash(outside ? [3, 3] : []);
      pen.beginPath();
      if (outside) { pen.moveTo(left, y(k)); pen.lineTo(x(at), y(k)); } else { pen.moveTo(x(at), y(place.get(parent))); pen.lineTo(x(at), y(k)); }
      pen.stroke();
    });
    pen.setLineDash([]);
    const thick = Math.max(2, Math.min(8, tall - 2));
    lineages.forEach(([row, , at, last], k) => {
      const trial = model.ofRow(run(), row), strong = stands(row), a = x(at), b = Math.max(a + 2, x(last));
      pen.globalAlpha = strong ? 1 : 0.15;
      pen.fillStyle = trial.shared ? draw.themeColour("nothing") : model.barColour(trial);
      pen.fillRect(a, y(k) - thick / 2, b - a, thick);
      if (trial.state === "failed") draw.dot(pen, b, y(k), Math.max(2.5, thick / 2), draw.themeColour("bad"), "card");
      if (trial === model.chosen()) { pen.strokeStyle = draw.themeColour("text"); pen.lineWidth = 1.5; pen.strokeRect(a, y(k) - thick / 2 - 1, b - a, thick + 2); }
      if (k % every === 0) draw.text(pen, names[k], left - 8, y(k) + 4, { align: "right", most: left - 12, colour: strong ? "muted" : "nothing" });
      hits.push([a, b, y(k) - tall / 2, y(k) + tall / 2, k]);
    });
    pen.globalAlpha = 1;
  }
  // The rows of the followed trial, of all from which it descends, and of all that descend from it; null if none is followed.
  function kinOf(lineages, place) {
    const chosen = model.chosen(), from = chosen && chosen.run === state.run ? chosen.row - run().first : -1;
    if (!place.has(from)) return null;
    const kin = new Set();
    for (let row = from; row >= 0; row = lineages[place.get(row)][1]) kin.add(row);
    const below = new Set([from]);
    for (const [row, parent] of lineages) if (below.has(parent)) below.add(row); // Parents come before their children.
    below.forEach((row) => kin.add(row));
    return kin;
  }

  // The row at a place: that whose bar is there, else the one at that height.
  function hitAt(event) {
    const [px, py] = draw.place(canvas, event), level = hits.filter(([, , top, bottom]) => py >= top && py < bottom);
    const found = level.find(([a, b]) => px >= a - 3 && px <= b + 3) || level[0];
    return found ? run().forks[found[4]] : null;
  }
  canvas.addEventListener("pointermove", (event) => {
    const found = hitAt(event);
    if (!found) return draw.hideTooltip();
    const [row, parent, at, last, outside] = found, lines = model.lines(model.ofRow(run(), row));
    const from = outside || (parent >= 0 ? nameOf(parent) : "");
    lines.splice(1, 0, from ? `from ${from} after ${at} iterations, to iteration ${last}` : `to iteration ${last}`);
    draw.showTooltip(event, lines.join("\n"));
  });
  canvas.addEventListener("pointerleave", draw.hideTooltip);
  canvas.addEventListener("click", (event) => {
    const found = hitAt(event), trial = found && model.ofRow(run(), found[0]);
    if (!trial || !trial.shared) page.choose(trial);
  });

  return { drawForks };
})();
