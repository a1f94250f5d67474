// Ten minutes as lines, oldest left.

import { svg, el } from "./dom.js";
import { percent, seconds } from "./format.js";

const WIDTH = 600;
const LEFT = 44;
const RIGHT = 4;
const TOP = 6;
const BOTTOM = 18;

/** TTFT: two lines on one scale. `facts`: {step_s, p50, p90}. */
export function ttftChart({ step_s, p50, p90 }) {
  const known = [...p50, ...p90].filter((value) => value !== null);
  if (known.length === 0) return empty("No streamed request in the last ten minutes.");
  const top = nice(Math.max(...known, 0.1));
  return frame(150, top, seconds, step_s, p50.length,
    [...line(p90, top, 150, "p90"), ...line(p50, top, 150, "p50")],
    `Time to first token over ten minutes, now p50 ${seconds(last(p50))}, p90 ${seconds(last(p90))}`);
}

/** SLO attainment between 0 and 1, and below it the requests that failed. */
export function sloChart({ step_s, slo, failed }) {
  if (slo.every((value) => value === null)) return empty("Nothing to judge yet.");
  const height = 96;
  const most = Math.max(...failed);
  const marks = failed.flatMap((number, place) => number === 0 ? [] : [svg("line", {
    class: "failed", x1: x(place, failed.length), x2: x(place, failed.length),
    y1: height - BOTTOM, y2: height - BOTTOM - 4 - 16 * (number / most),
  }, svg("title", {}, `${number} failed`))]);
  return frame(height, 1, percent, step_s, slo.length, [...marks, ...line(slo, 1, height, "slo")],
    `Share of prompt tokens whose first token came in time, now ${percent(last(slo))}`);
}

function frame(height, top, words, step_s, steps, drawn, label) {
  const floor = height - BOTTOM;
  const rules = [0, 0.5, 1].map((part) => {
    const at = floor - part * (floor - TOP);
    return [
      svg("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at }),
      svg("text", { class: "axis", x: LEFT - 6, y: at + 4, "text-anchor": "end" }, part ? words(part * top) : "0"),
    ];
  });
  const minutes = (steps * step_s) / 60;
  const times = [[0, `−${minutes} min`, "start"], [0.5, `−${minutes / 2} min`, "middle"], [1, "now", "end"]];
  const below = times.map(([part, text, anchor]) => svg("text", {
    class: "axis", x: LEFT + part * (WIDTH - LEFT - RIGHT), y: height - 4, "text-anchor": anchor,
  }, text));
  return svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label },
    ...rules.flat(), ...below, ...drawn);
}

function x(place, steps) {
  return LEFT + ((WIDTH - LEFT - RIGHT) * place) / (steps - 1);
}

/** A path with gaps where nothing is known; a value alone is a dot. */
function line(values, top, height, kind) {
  const floor = height - BOTTOM;
  const known = (place) => (values[place] ?? null) !== null;
  const dots = [];
  let path = "";
  values.forEach((value, place) => {
    if (value === null) return;
    const cx = x(place, values.length).toFixed(1);
    const cy = (floor - (floor - TOP) * Math.min(1, value / top)).toFixed(1);
    path += `${known(place - 1) ? "L" : "M"}${cx} ${cy}`;
    if (!known(place - 1) && !known(place + 1)) dots.push(svg("circle", { class: `dot ${kind}`, cx, cy, r: 2.5 }));
  });
  return [svg("path", { class: `line ${kind}`, d: path }), ...dots];
}

function nice(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * unit).find((step) => step >= value);
}

function last(values) {
  return values.findLast((value) => value !== null) ?? null;
}

function empty(text) {
  return el("p", { class: "empty" }, text);
}
