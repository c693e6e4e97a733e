"use strict";
// Durations and ticks of axes, for what the page formats while it is zoomed or hovered over. The rules are those of
// fluid/display/format.py, and a test compares the two; everything else comes into the page formatted.
const format = {
  // The unit for times up to so many seconds: its name, the seconds in it, and the steps between ticks, in units.
  unitFor(seconds) {
    if (seconds <= 300) return ["s", 1, [1, 2, 5, 10, 15, 30, 60]];
    if (seconds <= 10800) return ["min", 60, [1, 2, 5, 10, 15, 30, 60]];
    return ["h", 3600, [1, 2, 3, 6, 12, 24, 48]];
  },
  number(value) {
    const size = Math.abs(value);
    if (size >= 100) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(size < 0.001 ? 2 : 3)));
  },
  // A value of a metric or of a hyperparameter, to five digits, which distinguish 0.9312 and 0.9318.
  figure(value, digits = 5) {
    if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value);
    const size = Math.abs(value), short = Number(value.toPrecision(digits));
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return short.toExponential().replace("e+", "e");
    return String(short);
  },
  duration(seconds) {
    if (seconds > 0 && seconds < 0.1) return format.number(seconds * 1000) + " ms";
    const [name, size] = format.unitFor(seconds);
    return format.number(seconds / size) + " " + name;
  },
  // US dollars; of amounts below a cent, two digits.
  dollars(value) {
    const size = Math.abs(value), digits = size > 0 && size < 0.01 ? Math.min(8, 1 - Math.floor(Math.log10(size))) : 2;
    return (value < 0 ? "-$" : "$") + size.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  },
  // Seconds between ticks for an axis of `span` seconds with room for `most` ticks, labelled in the unit for `longest`.
  tickStep(span, most, longest = span) {
    if (span <= 0) return 1;
    const [, size, units] = format.unitFor(longest);
    const least = span / Math.max(most, 1);
    let steps = units.map((count) => count * size);
    const shortest = steps[0], last = steps[steps.length - 1];
    if (least > last || least < shortest) {
      const base = least < shortest ? shortest : last;
      const scale = 10 ** Math.floor(Math.log10(least / base)) * base;
      steps = [1, 2, 5, 10].map((factor) => factor * scale);
    }
    return steps.find((step) => step >= least * (1 - 1e-9)) || steps[steps.length - 1];
  },
};
