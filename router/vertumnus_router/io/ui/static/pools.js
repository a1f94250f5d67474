// The map: a pool is a row of ranks, and the ranks that serve together are one box.

import { bar, el } from "./dom.js";
import { count, percent, plural, seconds } from "./format.js";

//: Queues are drawn on one scale, so that boxes can be compared; it never shrinks below this.
const LEAST_SCALE_S = 2;

export function legend(pools) {
  const degrees = new Set(pools.flatMap((pool) => (pool.workers ?? []).map((one) => one.degree)));
  const boxes = [...degrees].sort((a, b) => a - b).map((degree) =>
    el("span", { class: `key degree-${degree}` }, `CP ${degree}`),
  );
  return [...boxes, boxes.length ? el("span", { class: "hint" }, "upper bar: queue · lower bars: KV of each rank") : null];
}

export function poolMap({ pools }) {
  const queues = pools.flatMap((pool) => (pool.workers ?? []).map((one) => one.queue_s));
  const scale_s = Math.max(LEAST_SCALE_S, ...queues);
  return pools.map((pool) => poolRow(pool, scale_s));
}

function poolRow(pool, scale_s) {
  const name = pool.pool ?? pool.url;
  if (pool.size === 0) {
    return el("article", { class: "pool away" },
      el("h3", {}, name),
      el("p", { class: "trouble" }, sign("lost"), ` ${pool.trouble ?? "not reached yet"}`),
    );
  }
  const covered = new Set(pool.workers.flatMap((one) => one.ranks));
  const boxes = pool.workers.map((one) => workerBox(one, pool, scale_s));
  for (let rank = 0; rank < pool.size; rank += 1) {
    if (!covered.has(rank)) boxes.push(deadRank(rank, pool));
  }
  return el("article", { class: "pool" },
    el("h3", {}, name,
      el("span", { class: "composition" }, pool.composition ?? "composition unknown"),
      pool.moving === null ? null : el("span", { class: "moving" }, `⇄ moving to ${pool.moving}`),
      el("span", { class: "epoch" }, `epoch ${pool.epoch}`),
      pool.prefill_only ? el("span", { class: "epoch" }, "prefill only") : null,
    ),
    el("div", { class: `ranks size-${pool.size}` }, boxes),
  );
}

function workerBox(worker, pool, scale_s) {
  const first = Math.min(...worker.ranks);
  const box = el("div", {
    class: `worker degree-${worker.degree} is-${worker.state}`,
    title: [worker.id, worker.reason ?? worker.resting].filter(Boolean).join(": "),
    "data-worker": worker.id,
  },
    el("p", { class: "head" },
      el("b", {}, `CP ${worker.degree}`),
      el("span", { class: "load" }, worker.requests ? `${worker.requests} req` : "idle"),
    ),
    bar(worker.queue_s / scale_s, `queue ${seconds(worker.queue_s)}`, "queue"),
    el("p", { class: "now" }, now(worker)),
    el("div", { class: "cells" }, worker.ranks.map((rank, place) =>
      rankCell(rank, worker.rank_kv_used_tokens[place], pool))),
  );
  box.style.gridColumn = `${first + 1} / span ${worker.degree}`;
  return box;
}

/** In words: that it does not serve, or what it still has to do. */
function now({ state, queue_s, breaker, resting }) {
  const queue = queue_s > 0 ? seconds(queue_s) : null;
  if (state === "serving" && breaker !== "closed") return el("span", { class: "held-back" }, `⊘ breaker ${breaker}`);
  if (state === "serving" && resting) return el("span", { class: "held-back" }, "resting");
  if (state === "serving") {
    return queue === null ? "\u00a0" : el("span", {}, queue, el("span", { class: "unit" }, " queued"));
  }
  return el("span", { class: "state" }, sign(state), ` ${state}`,
    queue === null ? null : el("span", { class: "unit" }, `, ${queue} queued`));
}

function rankCell(rank, used_tokens, pool) {
  const known = used_tokens !== null && pool.kv_capacity_tokens > 0;
  const share = known ? used_tokens / pool.kv_capacity_tokens : 0;
  const label = known
    ? `rank ${rank}: ${count(used_tokens)} tokens of KV, ${percent(share)}`
    : `rank ${rank}: KV not known`;
  return el("span", { class: "rank", "data-rank": `${pool.pool}/${rank}`, title: label },
    el("span", { class: "number" }, String(rank)), bar(share, label, "kv"));
}

function deadRank(rank, pool) {
  const box = el("div", { class: "worker is-lost alone", "data-rank": `${pool.pool}/${rank}` },
    el("p", { class: "head" }, el("b", {}, "rank")),
    el("p", { class: "now" }, el("span", { class: "state" }, sign("lost"), " no report")),
    el("div", { class: "cells" }, el("span", { class: "rank" }, el("span", { class: "number" }, String(rank)))),
  );
  box.style.gridColumn = `${rank + 1} / span 1`;
  return box;
}

export function decodeRows(decodes) {
  if (decodes.length === 0) return [];
  return [
    el("h2", {}, "Decode servers"),
    ...decodes.map((one) => el("div", { class: `decode is-${one.state}` },
      el("span", { class: "name" }, one.id),
      one.state === "serving"
        ? bar(one.load / Math.max(1, one.limit), `${one.load} of ${plural(one.limit, "room")}`, "queue")
        : el("span", { class: "state" }, sign(one.state), ` ${one.state}`),
      el("span", { class: "load" }, one.reason ?? `${one.load} of ${one.limit} requests`),
    )),
  ];
}

/** A sign beside the word and the pattern: colour is never the only difference. */
function sign(state) {
  return { draining: "⇄", forming: "…", refused: "⊘", lost: "✕" }[state] ?? "";
}
