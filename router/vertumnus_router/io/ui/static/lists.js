// What has happened, and what is where: moves, prefixes, the controller.

import { el } from "./dom.js";
import { age, bytes, count, percent, plural, seconds, shortHash } from "./format.js";

export function moveList(moves) {
  if (moves.length === 0) {
    return el("p", { class: "empty" }, "None yet. A move shows here while it happens.");
  }
  return el("ul", { class: "moves" }, moves.map((move) =>
    el("li", { class: move.outcome === null ? "going-on" : `was-${move.outcome}` },
      el("span", { class: "age" }, age(move.age_s)),
      el("span", { class: "kind" }, move.kind),
      el("span", { class: "what" }, `${move.pool}  ${move.from} → ${move.to}`),
      el("span", { class: "end", title: details(move) }, ending(move)),
    )));
}

function ending(move) {
  if (move.outcome === null) return `for ${seconds(move.age_s)}`;
  if (move.outcome === "committed") return seconds(move.took_s);
  return `✕ ${move.outcome}${move.reason ? `: ${move.reason}` : ""}`;
}

function details(move) {
  const stages = Object.entries(move.stages_ms ?? {}).map(([name, ms]) => `${name} ${Math.round(ms)} ms`);
  return [move.reason, stages.join(", ")].filter(Boolean).join("; ") || null;
}

/** Who holds what: a row of squares for each pool, full where the rank holds the prefix. */
export function hotTable({ hot, pools }) {
  if (hot.length === 0) {
    return el("p", { class: "empty" }, "None yet: prefixes show here after the first scan that finds them in use.");
  }
  const head = ["prefix", "tokens", pools.map(poolName), "hits", "missed"].map((text) => el("th", {}, text));
  return el("table", { class: "hot" }, el("thead", {}, el("tr", {}, head)),
    el("tbody", {}, hot.map((prefix) => el("tr", { tabindex: "0", "data-ranks": prefix.ranks.join(" ") },
      el("td", { class: "hash", title: prefix.tip }, shortHash(prefix.tip)),
      el("td", { class: "number" }, count(prefix.tokens)),
      el("td", { title: prefix.ranks.join(", ") || "no rank" }, pools.map((pool) => minimap(pool, new Set(prefix.ranks)))),
      el("td", {}, byDegree(prefix.accesses, count)),
      el("td", {}, byDegree(prefix.missed_s, seconds)),
    ))));
}

/** Above its squares. */
function poolName({ pool, size }) {
  const name = el("span", { title: `held by ranks of pool ${pool}` }, pool);
  name.style.width = `${7 * size - 1}px`;
  return el("span", { class: "minimap names" }, name);
}

function minimap({ pool, size }, ranks) {
  const squares = Array.from({ length: size }, (_, rank) =>
    el("i", { class: ranks.has(`${pool}/${rank}`) ? "held" : "" }));
  return el("span", { class: "minimap" }, squares);
}

function byDegree(figures, words) {
  const parts = Object.entries(figures).filter(([, value]) => value >= 0.05)
    .map(([degree, value]) => `CP${degree} ${words(value)}`);
  return parts.join("  ") || "–";
}

export function controllerLine({ mode, last }) {
  if (last === null) return `controller ${mode}`;
  const used = last.utilisation === null ? "" : `, ${percent(last.utilisation)} of capacity used`;
  return el("span", { title: last.detail }, `controller ${mode}: ${last.action} (${last.reason.replaceAll("_", " ")})${used}`);
}

export function prefixLine({ mode, pull, index_bytes, transfers }) {
  const moving = transfers.length ? `, ${plural(transfers.length, "copy", "copies")} under way` : "";
  return `manager ${mode}, pull ${pull ? "on" : "off"}, index ${bytes(index_bytes)}${moving}`;
}
