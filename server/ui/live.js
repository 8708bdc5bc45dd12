// The strip: what the server does now, from the differences between events of /stats/stream.

import { events } from "./api.js";
import { byId, count, duration, make, oneDigit, percent } from "./format.js";

const RECENT_S = 5; // over which rates are taken
const KEPT_S = 60; // over which shares and times are taken, and which the line shows
const MOST_POSITIONS = 8; // that there is room for
const RETRY_S = [1, 2, 4, 8];

let kept = []; // events of the last minute
export const lastStats = () => kept.at(-1);

export async function start() {
  for (let failures = 0; ; ) {
    try {
      for await (const stats of events("stats/stream")) {
        failures = 0;
        take(stats);
      }
      setState("stopped");
    } catch (error) {
      if (error.status === 401) {
        setState("needs a key");
        await new Promise((next) => document.addEventListener("key-changed", next, { once: true }));
        continue;
      }
      setState("out of reach");
    }
    kept = [];
    const waitS = RETRY_S[Math.min(failures++, RETRY_S.length - 1)];
    await new Promise((next) => setTimeout(next, 1000 * waitS));
  }
}

function setState(state) {
  const element = byId("state");
  if (element.dataset.state === state) return;
  element.dataset.state = element.textContent = state;
  document.dispatchEvent(new CustomEvent("server-state", { detail: state }));
}

function take(stats) {
  // Counters went back: the server has restarted.
  if (kept.length && stats.steps < kept.at(-1).steps) kept = [];
  kept.push(stats);
  while (stats.time_s - kept[0].time_s > KEPT_S) kept.shift();
  setState(stats.state);
  draw(stats);
}

function draw(now) {
  const recent = kept.find((each) => now.time_s - each.time_s <= RECENT_S);
  const minute = kept[0];
  const elapsedS = now.time_s - recent.time_s;
  byId("live-rate").textContent = elapsedS
    ? oneDigit((now.generation_tokens - recent.generation_tokens) / elapsedS) : "–";
  drawLine();
  drawDrafts(now, minute);
  byId("live-queue").replaceChildren(count(now.num_running), make("small", {}, " running"));
  byId("live-queue-note").textContent = `${count(now.num_waiting)} waiting`;
  byId("live-pages").textContent = percent(now.pages_total ? now.pages_used / now.pages_total : 0);
  byId("live-pages-note").textContent = `${count(now.pages_used)} of ${count(now.pages_total)}`;
  drawLatency("live-first", "time_to_first_token", now, minute);
  drawLatency("live-token", "inter_token_latency", now, minute);
}

function drawLine() {
  const rates = kept.slice(1).map((each, i) =>
    (each.generation_tokens - kept[i].generation_tokens) / (each.time_s - kept[i].time_s));
  const most = Math.max(1, ...rates);
  const last = kept.at(-1).time_s;
  const points = rates.map((rate, i) =>
    `${(120 * (1 - (last - kept[i + 1].time_s) / KEPT_S)).toFixed(1)},${(27 - (26 * rate) / most).toFixed(1)}`);
  byId("live-spark").firstElementChild.setAttribute("points", points.join(" "));
}

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);

function drawDrafts(now, minute) {
  // In a minute in which nothing was drafted, what there was before says more than nothing.
  const since = sum(now.drafted_per_position) > sum(minute.drafted_per_position) ? minute : null;
  const gained = (name) => now[name].map((total, i) => total - (since?.[name][i] ?? 0));
  const drafted = gained("drafted_per_position");
  const accepted = gained("accepted_per_position");
  const generated = now.generation_tokens - (since?.generation_tokens ?? 0);
  const turns = generated - sum(accepted); // steps of a sequence: each writes one token of the target
  byId("live-k").replaceChildren(turns > 0 ? oneDigit(sum(drafted) / turns) : "–",
    make("small", {}, ` of ${drafted.length}`));
  byId("live-k-note").textContent = turns > 0 ? `${(generated / turns).toFixed(2)} tokens a step` : "";
  byId("live-accepted").textContent = sum(drafted) ? percent(sum(accepted) / sum(drafted)) : "–";
  byId("live-source").textContent = now.source ?? "no drafts";
  const numPositions = Math.min(drafted.findLastIndex((number) => number > 0) + 1, MOST_POSITIONS);
  byId("live-positions").replaceChildren(...drafted.slice(0, numPositions).map((number, i) => {
    const ratio = number ? accepted[i] / number : 0;
    const bar = make("b");
    bar.style.height = `${100 * ratio}%`;
    const text = `Position ${i + 1}: ${percent(ratio)} of ${count(number)}`;
    return make("li", { title: text },
      make("i", { ariaHidden: "true" }, bar), make("span", { ariaHidden: "true" }, i + 1),
      make("span", { className: "unseen" }, text));
  }));
}

function drawLatency(id, name, now, minute) {
  const latest = now.latencies[name];
  const before = minute.latencies[name];
  const since = latest.count > before.count ? before : null;
  const counted = latest.count - (since?.count ?? 0);
  if (!counted) return;
  const buckets = latest.buckets.map(([bound, number], i) => [bound, number - (since?.buckets[i][1] ?? 0)]);
  byId(id).textContent = duration((latest.sum_s - (since?.sum_s ?? 0)) / counted);
  byId(`${id}-note`).textContent = `95 % within ${duration(quantile(buckets, counted, 0.95))}`;
}

/** The bound of the bucket that the quantile falls into, made finer by taking it as evenly filled. */
function quantile(buckets, counted, share) {
  let [low, below] = [0, 0];
  for (const [bound, number] of buckets) {
    if (number >= share * counted) {
      return low + ((bound - low) * (share * counted - below)) / (number - below);
    }
    [low, below] = [bound, number];
  }
  return low;
}
