"use strict";
// The devices over time: which trial ran where and when, and the share of busy devices, as far as they were drawn.
const timeline = (() => {
  const { byId, clear, html } = draw, { state, now } = model;
  const gantt = byId("gantt"), busy = byId("busy");
  const RIGHT = 14, TOP = 4, STRIP = 62, ROOF = 14;
  let left = 80, plot = 600, lane = 20, hits = [], drag = null;

  const run = () => now.runs[state.run];
  const range = () => (state.zoom ? state.zoom : [0, run().drawn || 1]);
  const trialOf = (row) => model.ofRow(run(), row);
  // The trials of a bar: one, or those of a fused pack.
  const trialsOf = (segment) => (segment[5] || [segment[0]]).map(trialOf);
  const x = (seconds) => { const [from, to] = range(); return left + ((seconds - from) / (to - from)) * plot; };
  const secondsAt = (px) => { const [from, to] = range(); return from + ((px - left) / plot) * (to - from); };
  const laneName = (position) => {
    const { hosts, lanes } = run();
    return (new Set(hosts).size > 1 ? hosts[position] + " " : "") + lanes[position];
  };

  function drawTimeline() {
    const box = clear(byId("run"));
    now.runs.forEach((each, number) => { html(box, "option", each.name).value = number; });
    box.value = state.run;
    byId("run-label").hidden = now.runs.length < 2;
    drawGantt();
    drawBusy();
    const idle = clear(byId("idle"));
    if (run().drawn < run().makespan) idle.append(`Drawn up to ${format.duration(run().drawn)}; devices are drawn less often than trials. `);
    if (run().idle.length) idle.append("unused device time: ");
    run().idle.forEach(([name, figure], k) => { if (k) idle.append(" \u00a0\u00b7\u00a0 "); idle.append(name + " "); html(idle, "b", figure); });
  }

  function drawGantt() {
    const count = run().lanes.length;
    lane = Math.max(4, Math.min(52, Math.floor(620 / Math.max(1, count))));
    const height = TOP + count * lane + 2, { pen, width } = draw.begin(gantt, Math.max(12, height));
    gantt.setAttribute("aria-label", `Trials on each device of ${run().name} over time`);
    const names = run().lanes.map((_, position) => laneName(position));
    left = Math.min(width < 600 ? 90 : 180, 16 + Math.max(36, ...names.map((name) => pen.measureText(name).width)));
    plot = Math.max(100, width - left - RIGHT);
    const gap = lane >= 10 ? 1.5 : lane > 5 ? 0.5 : 0, every = Math.max(1, Math.ceil(12 / lane));
    names.forEach((name, position) => {
      const y = TOP + position * lane;
      pen.fillStyle = draw.themeColour("lane");
      pen.fillRect(left, y + gap, plot, lane - 2 * gap);
      if (position % every === 0) draw.text(pen, name, left - 8, y + Math.max(lane, 12) / 2 + 4, { align: "right", most: left - 12 });
    });
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, plot, height);
    pen.clip();
    const [from, to] = range();
    for (const tick of draw.timeTicks(from, to, plot / 80)) draw.line(pen, x(tick), TOP, x(tick), height, "grid");
    pen.globalAlpha = 0.6;
    pen.fillStyle = draw.themeColour("absent");
    for (const [position, start, end] of run().absent) pen.fillRect(x(start), TOP + position * lane, x(end) - x(start), lane);
    pen.globalAlpha = 1;
    drawBlocks(pen, gap, from, to);
    if (drag && drag.range) {
      pen.fillStyle = draw.themeColour("accent");
      pen.globalAlpha = 0.25;
      pen.fillRect(drag.range[0], 0, drag.range[1] - drag.range[0], height);
      pen.globalAlpha = 1;
    }
    pen.restore();
  }

  function drawBlocks(pen, gap, from, to) {
    hits = [];
    const labels = [], { segments, blocks, placements } = run(), chosen = model.chosen();
    const only = chosen && chosen.run === state.run ? chosen : null;
    for (const [position, first, lanes, slot, slots] of blocks) {
      const [, start, end, , pause] = segments[position];
      if (end < from || start > to) continue;
      const trials = trialsOf(segments[position]), within = only && trials.includes(only);
      const stands = (each) => (each.shared ? !only && !model.leadersOnly() : now.shown[each.row] && (only ? only === each : !model.leadersOnly() || now.leaders.has(each.row)));
      const trial = within ? only : trials.find(stands) || trials[0], tall = (lanes * lane - 2 * gap) / slots;
      const a = x(start), b = x(end), top = TOP + first * lane + gap + slot * tall;
      const faded = !trials.some(stands);
      const wide = Math.max(0.4, b - a - Math.min(0.5, Math.max(0, (b - a) / 8)));
      const y = top + (slots > 1 ? 0.4 : 0), high = Math.max(0.5, tall - (slots > 1 ? 0.8 : 0));
      pen.globalAlpha = faded ? 0.13 : 1;
      pen.fillStyle = model.barColour(trial);
      pen.fillRect(a, y, wide, high);
      if (only === trial && wide > 4) { pen.strokeStyle = draw.themeColour("text"); pen.lineWidth = 1.5; pen.strokeRect(a + 0.75, y + 0.75, wide - 1.5, high - 1.5); }
      if (pause > 0 && x(start + pause) - a > 1) {
        pen.globalAlpha = faded ? 0.1 : 0.55;
        pen.fillStyle = draw.themeColour("card");
        pen.fillRect(a, y, x(start + pause) - a, high);
      }
      hits.push([a, Math.max(b, a + 1), y, y + high, position]);
      if (!faded && tall >= 9 && b - a > 14) labels.push([Math.max(a, left), Math.min(b, left + plot), top + tall / 2, trial, position, tall]);
    }
    pen.globalAlpha = 1;
    const font = pen.font;
    for (const [a, b, middle, trial, position, tall] of labels) {
      const size = Math.min(11, tall - 1), room = (b - a - 6) / (size * 0.58), where = placements[segments[position][3]];
      const share = where.includes(" of ") ? "  " + where.split(" ")[0] : where.includes(":") ? "  x" + where.split(" ")[0] : "";
      const pack = segments[position][5], fused = pack && pack.length + " fused";
      const name = (pack ? [fused + share, fused, String(pack.length)] : [trial.id + share, trial.id, trial.short]).find((text) => text.length <= room);
      if (!name) continue;
      pen.font = font.replace("11px", size + "px");
      pen.fillStyle = inkOn(model.barColour(trial));
      pen.textAlign = "left";
      pen.fillText(name, a + 4, middle + size * 0.36);
    }
    pen.font = font;
  }
  // Black or white, whichever is more legible on a colour.
  const inks = new Map();
  function inkOn(colour) {
    if (!inks.has(colour)) {
      const parts = colour.startsWith("#") ? [1, 3, 5].map((k) => parseInt(colour.slice(k, k + 2), 16)) : colour.match(/\d+/g).map(Number);
      inks.set(colour, 0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2] > 120 ? "#000000" : "#ffffff");
    }
    return inks.get(colour);
  }

  function drawBusy() {
    const { pen, width } = draw.begin(busy, STRIP + 34), [times, shares] = run().busy, [from, to] = range();
    busy.setAttribute("aria-label", `Share of busy devices of ${run().name} over time: ${run().busy_text} of the makespan`);
    const y = (share) => ROOF + (1 - share) * (STRIP - ROOF);
    pen.save();
    pen.beginPath();
    pen.rect(left, 0, plot, STRIP + 8);
    pen.clip();
    pen.fillStyle = draw.themeColour("busy");
    pen.beginPath();
    let begun = false, last = left;
    shares.forEach((share, k) => {
      if (times[k + 1] < from || times[k] > to) return;
      const a = Math.max(left - 5, x(times[k])), b = Math.min(left + plot + 5, x(times[k + 1]));
      if (!begun) { pen.moveTo(a, STRIP); begun = true; }
      pen.lineTo(a, y(share));
      pen.lineTo(b, y(share));
      last = b;
    });
    if (begun) { pen.lineTo(last, STRIP); pen.fill(); }
    pen.restore();
    for (const [share, name] of [[0, "0"], [0.5, "busy"], [1, "100 %"]]) {
      draw.text(pen, name, left - 8, y(share) + 4, { align: "right" });
      draw.line(pen, left, y(share), left + plot, y(share), "rule");
    }
    const [unit, size] = format.unitFor(to);
    for (const tick of draw.timeTicks(from, to, plot / 80)) draw.text(pen, String(Number((tick / size).toPrecision(6))), x(tick), STRIP + 16, { align: "center" });
    draw.text(pen, `time (${unit})`, Math.min(width - 4, left + plot), STRIP + 30, { align: "right" });
  }

  function zoom(from, to) {
    const all = run().drawn || 1, span = Math.max(Math.min(to - from, all), all / 1e5);
    const start = Math.max(0, Math.min(from, all - span));
    // The whole run stays the whole run while it goes on.
    state.zoom = span >= all ? null : [start, start + span];
    draw.soon(drawTimeline);
  }
  const zoomAt = (middle, factor) => { const [from, to] = range(); zoom(middle - (middle - from) * factor, middle + (to - middle) * factor); };
  const pointer = (event) => Math.max(left, Math.min(left + plot, draw.place(gantt, event)[0]));
  // The last block that was drawn at a place lies above the others.
  function hitAt(event) {
    const [px, py] = draw.place(gantt, event);
    for (let k = hits.length - 1; k >= 0; k--) {
      const [a, b, top, bottom, position] = hits[k];
      if (px >= a && px <= b && py >= top && py <= bottom) return position;
    }
    return -1;
  }
  gantt.addEventListener("pointerdown", (event) => { if (event.button === 0) drag = { at: pointer(event), range: null }; });
  addEventListener("pointermove", (event) => {
    if (!drag) return;
    const [a, b] = [drag.at, pointer(event)].sort((p, q) => p - q);
    if (b - a < 4 && !drag.range) return;
    draw.hideTooltip();
    drag.range = [a, b];
    draw.soon(drawGantt);
  });
  addEventListener("pointerup", (event) => {
    if (!drag) return;
    const { range: kept } = drag;
    drag = null;
    if (kept) {
      if (kept[1] - kept[0] > 4) zoom(secondsAt(kept[0]), secondsAt(kept[1])); else draw.soon(drawGantt);
    } else if (event.target === gantt) {
      const position = hitAt(event);
      const trial = position < 0 ? null : trialAt(event, position);
      if (!trial || !trial.shared) page.choose(trial);
    }
  });
  gantt.addEventListener("pointermove", (event) => {
    if (drag) return;
    const position = hitAt(event);
    if (position < 0) return draw.hideTooltip();
    const [, from, to, where, pause, pack] = run().segments[position];
    const lines = model.lines(trialAt(event, position)), host = new Set(run().hosts).size > 1 ? run().hosts[lanesOf(position)] + " " : "";
    lines.splice(1, 0, `${host}${run().placements[where]}: ${format.duration(from)} to ${format.duration(to)}, ${format.duration(to - from)}`);
    if (pause > 0) lines.splice(2, 0, `including a resize of ${format.duration(pause)}`);
    if (pack) lines.splice(1, 0, `one of ${pack.length} fused trials, from top to bottom of the bar`);
    draw.showTooltip(event, lines.join("\n"));
  });
  // The trial at a place of a bar: those of a fused pack lie one below the other, thinner than a line.
  function trialAt(event, position) {
    const trials = trialsOf(run().segments[position]), py = draw.place(gantt, event)[1];
    const [, , top, bottom] = hits.find((hit) => hit[4] === position && py >= hit[2] && py <= hit[3]);
    return trials[Math.min(trials.length - 1, Math.floor((trials.length * (py - top)) / Math.max(1e-9, bottom - top)))];
  }
  const lanesOf = (position) => run().blocks.find((block) => block[0] === position)[1];
  gantt.addEventListener("pointerleave", draw.hideTooltip);
  gantt.addEventListener("dblclick", () => zoom(0, run().drawn || 1));
  gantt.addEventListener("wheel", (event) => {
    const [from, to] = range();
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      zoomAt(secondsAt(pointer(event)), event.deltaY > 0 ? 1.25 : 0.8);
    } else if (event.deltaX && state.zoom) {
      event.preventDefault();
      const by = (event.deltaX / plot) * (to - from);
      zoom(from + by, to + by);
    }
  }, { passive: false });
  const middle = () => (range()[0] + range()[1]) / 2;
  byId("zoom-in").onclick = () => zoomAt(middle(), 0.5);
  byId("zoom-out").onclick = () => zoomAt(middle(), 2);
  byId("zoom-all").onclick = () => zoom(0, run().drawn || 1);

  return { drawTimeline };
})();
