// Ask the router once a second and show what it says; say so when it does not answer.

import { el, show } from "./dom.js";
import { NONE, count, percent, seconds } from "./format.js";
import { sloChart, ttftChart } from "./charts.js";
import { controllerLine, hotTable, moveList, prefixLine } from "./lists.js";
import { decodeRows, legend, poolMap } from "./pools.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 5000;
const MOST_ALERTS = 6;
const URL_OF_STATE = new URL("state", import.meta.url);

let heard = null; // when the last answer came, null before the first
let pointed = new Set(); // ranks that hold the prefix that is pointed at

async function poll() {
  try {
    const answer = await fetch(URL_OF_STATE, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) throw new Error(`the router answers ${answer.status} ${answer.statusText}`);
    render(await answer.json());
    heard = new Date();
    document.body.classList.remove("stale");
  } catch (error) {
    stale(error);
  }
  setTimeout(poll, EVERY_MS);
}

function stale(error) {
  document.body.classList.add("stale");
  const since = heard ? `What you see is of ${heard.toLocaleTimeString()}.` : "Nothing has been heard of it yet.";
  show("ready", "stale", () => [el("span", { class: "dot bad" }, "✕"), " no answer"]);
  alerts([{ text: `No answer from the router (${error.message}). ${since}`, bad: true }]);
}

function render(state) {
  document.title = `${state.model ?? "no model"} · vertumnus`;
  show("what", [state.model, state.policy], ([model, policy]) =>
    [el("b", {}, model ?? "no model yet"), ` · policy ${policy}`]);
  show("ready", state.not_ready.length === 0, (ready) => ready
    ? [el("span", { class: "dot good" }, "●"), " ready"]
    : [el("span", { class: "dot bad" }, "▲"), " not ready"]);
  alerts(troubles(state));
  show("figures", figures(state), (all) => all.map(figure));
  const { timeline } = state;
  show("legend", state.pools, legend);
  show("pools", { pools: state.pools }, poolMap);
  show("decodes", state.decodes, decodeRows);
  show("ttft", { step_s: timeline.step_s, p50: timeline.ttft_p50_s, p90: timeline.ttft_p90_s }, ttftChart);
  show("ttft-legend", 0, () => [el("span", { class: "swatch p50" }, "p50"), el("span", { class: "swatch p90" }, "p90")]);
  show("slo", { step_s: timeline.step_s, slo: timeline.slo, failed: timeline.failed }, sloChart);
  show("slo-legend", state.slo_ttft_s, ([short, medium, long]) =>
    `targets ${seconds(short)}, ${seconds(medium)} from 8K tokens, ${seconds(long)} from 32K`);
  show("moves", state.moves, moveList);
  show("controller", state.controller, controllerLine);
  show("hot", { hot: state.prefixes.hot, pools: state.pools.filter((one) => one.size).map(({ pool, size }) => ({ pool, size })) }, hotTable);
  show("prefix-manager", state.prefixes, prefixLine);
  markRanks();
}

/** What an operator should look at first. */
function troubles(state) {
  const found = state.not_ready.map((text) => ({ text: `Not ready: ${text}`, bad: true }));
  const told = (name) => state.not_ready.some((text) => text.includes(name));
  for (const pool of state.pools) {
    if (pool.size === 0 && !told(pool.url)) found.push({ text: `Pool ${pool.url} is away: ${pool.trouble}`, bad: true });
    for (const worker of pool.workers ?? []) {
      if ((worker.state === "lost" || worker.state === "refused") && !told(worker.id)) {
        found.push({ text: `Worker ${worker.id} is ${worker.state}: ${worker.reason}`, bad: true });
      }
    }
  }
  for (const one of state.decodes) {
    if (one.state !== "serving" && !told(one.id)) {
      found.push({ text: `Decode server ${one.id} is ${one.state}: ${one.reason}`, bad: true });
    }
  }
  const failures = Object.entries(state.timeline.now.failures).sort((a, b) => b[1] - a[1]);
  if (failures.length > 0) {
    const reasons = failures.map(([reason, number]) => `${number} × ${reason}`).join(", ");
    found.push({ text: `Requests that failed in the last minute: ${reasons}`, bad: false });
  }
  return found;
}

function alerts(found) {
  document.getElementById("alerts").hidden = found.length === 0;
  const more = found.length - MOST_ALERTS;
  const listed = found.slice(0, more > 1 ? MOST_ALERTS : found.length);
  if (more > 1) listed.push({ text: `and ${more} more, marked below`, bad: true });
  show("alerts", listed, (all) => all.map(({ text, bad }) =>
    el("p", { class: bad ? "bad" : "note" }, el("span", { class: "sign" }, bad ? "✕" : "!"), ` ${text}`)));
}

function figures({ queued, pending, timeline: { now } }) {
  const failed = Object.values(now.failures).reduce((sum, number) => sum + number, 0);
  const predicted = now.cached_predicted === null ? null : `predicted ${percent(now.cached_predicted)}`;
  return [
    ["queued", count(queued), "at the router", queued > 0 ? "note" : ""],
    ["in flight", count(pending - queued), "at workers"],
    ["requests/s", count(now.finished / now.over_s), "last minute"],
    ["failed", count(failed), "last minute", failed ? "bad" : ""],
    ["TTFT p50", seconds(now.ttft_p50_s), null],
    ["TTFT p90", seconds(now.ttft_p90_s), null],
    ["SLO attainment", percent(now.slo), now.slo === null ? null : "of prompt tokens", now.slo !== null && now.slo < 0.9 ? "bad" : ""],
    ["found in cache", percent(now.cached), predicted],
  ];
}

function figure([name, value, more, kind]) {
  return el("div", { class: `figure ${kind ?? ""}` },
    el("p", { class: "name" }, name),
    el("p", { class: `value${value === NONE ? " none" : ""}` }, value),
    el("p", { class: "more" }, more ?? "\u00a0"),
  );
}

/** Point at a prefix, and the map shows where it lives. */
function pointAt(event) {
  const row = event.type === "pointerout" ? null : event.target.closest?.("[data-ranks]");
  pointed = new Set(row ? row.dataset.ranks.split(" ") : []);
  markRanks();
}

function markRanks() {
  for (const cell of document.querySelectorAll("[data-rank]")) {
    cell.classList.toggle("pointed-at", pointed.has(cell.dataset.rank));
  }
}

for (const kind of ["pointerover", "pointerout", "focusin"]) document.addEventListener(kind, pointAt);
poll();
