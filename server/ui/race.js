// The race: one prompt and seed, without drafts and with them; two clocks, one text.

import { answer } from "./api.js";
import { byId, make, oneDigit, plural, showProblem } from "./format.js";
import { draftsAsked } from "./playground.js";
import { tokenSpan } from "./tokens.js";

const form = byId("race-form");
const text = byId("race-text");
let info = null;
let running = null;
let lanes = null; // {plain, drafts}, as they ran
let spans = []; // of what both texts have in common
let frame = 0;

export function start(served) {
  info = served;
}

class Lane {
  constructor(name) {
    this.element = byId(`lane-${name}`);
    this.steps = [];
    this.tokens = [];
    this.endS = 0;
    this.isOver = false;
    this.draw(0, 0);
    this.element.querySelector(".note").textContent = "waits";
    this.element.classList.remove("ahead");
  }

  add(step) {
    this.steps.push(step);
    this.tokens.push(...step.tokens.map((token) => ({ ...token, atS: step.atS })));
    this.endS = step.atS;
  }

  /** How many of its tokens had come by then. */
  reached(atS) {
    const index = this.tokens.findIndex((token) => token.atS > atS);
    return index < 0 ? this.tokens.length : index;
  }

  draw(atS, most) {
    const reached = this.reached(atS);
    this.element.querySelector(".clock").textContent = `${atS.toFixed(2)} s`;
    this.element.querySelector("progress").value = most ? reached / most : 0;
    const rate = atS > 0 ? `, ${oneDigit(reached / atS)} tokens/s` : "";
    this.element.querySelector(".note").textContent = `${plural(reached, "token")}${rate}`;
  }
}

async function run() {
  if (running || !form.reportValidity()) return;
  const fields = Object.fromEntries(new FormData(form));
  const most = Number(fields.max_tokens);
  running = new AbortController();
  cancelAnimationFrame(frame);
  lanes = { plain: new Lane("plain"), drafts: new Lane("drafts") };
  text.hidden = false;
  text.replaceChildren();
  spans = [];
  setRunning(true);
  showProblem(byId("race-problem"), null);
  try {
    byId("verdict").textContent = "First without drafts …";
    await runLane(lanes.plain, body(fields, { enabled: false }), most);
    byId("verdict").textContent = "Now with drafts …";
    await runLane(lanes.drafts, body(fields, draftsAsked(fields.drafts)), most);
    judge();
  } catch (error) {
    byId("verdict").textContent = "";
    if (!running.signal.aborted) showProblem(byId("race-problem"), error);
  } finally {
    running = null;
    setRunning(false);
  }
}

function body(fields, speculation) {
  const prompt = info?.chats
    ? { messages: [{ role: "user", content: fields.prompt }], max_completion_tokens: Number(fields.max_tokens) }
    : { prompt: fields.prompt, max_tokens: Number(fields.max_tokens) };
  return {
    model: info?.model,
    ...prompt,
    temperature: Number(fields.temperature),
    seed: Number(fields.seed),
    stream: true,
    // Neither shall find the prompt in the cache because of the other.
    cache_salt: crypto.getRandomValues(new Uint32Array(4)).join("-"),
    speculation: { ...speculation, verification: "match", trace: true },
  };
}

async function runLane(lane, ask, most) {
  const startS = performance.now() / 1000;
  const tick = () => {
    if (lane.isOver || !running) return;
    lane.draw(performance.now() / 1000 - startS, most);
    requestAnimationFrame(tick);
  };
  tick();
  text.classList.add("waiting");
  try {
    for await (const { steps } of answer(info?.chats ? "chat" : "completion", ask, running.signal)) {
      for (const step of steps) lane.add(step);
      drawText(Infinity);
    }
  } finally {
    lane.isOver = true;
    text.classList.remove("waiting");
    lane.draw(lane.endS, lane.tokens.length);
  }
}

/** Where the two texts part; -1 if they are the same. */
function parting(plain, drafts) {
  const length = Math.max(plain.length, drafts.length);
  for (let i = 0; i < length; i++) if (plain[i]?.token_id !== drafts[i]?.token_id) return i;
  return -1;
}

function judge() {
  const { plain, drafts } = lanes;
  const ratio = plain.endS / drafts.endS;
  const faster = ratio >= 1;
  (faster ? drafts : plain).element.classList.add("ahead");
  const at = parting(plain.tokens, drafts.tokens);
  const same = at < 0 ? `: the same ${plural(plain.tokens.length, "token")}` : "";
  const differ = at < 0 ? "" : ` The texts differ from token ${at + 1} on, as they can if the ` +
    "target's rounding depends on the batch.";
  const speed = faster
    ? `With drafts it was ${ratio.toFixed(2)} times as fast`
    : `With drafts it took ${(1 / ratio).toFixed(2)} times as long`;
  byId("verdict").textContent = `${speed}${same}, in ${plural(drafts.steps.length, "step")} instead ` +
    `of ${plain.steps.length}.${differ}`;
  byId("race-replay").hidden = false;
}

/** The text as it stood at a time: faint where neither had come, coloured where drafts had, and a
 * bar behind the last token of plain decoding. */
function drawText(atS) {
  const { plain, drafts } = lanes;
  const numCommon = commonLength();
  const numPlain = plain.reached(atS);
  const numDrafts = drafts.reached(atS);
  for (let i = 0; i < numCommon; i++) {
    const token = drafts.tokens[i] ?? plain.tokens[i];
    let looks = `token ${token.kind}`;
    if (i >= numDrafts) looks += i < numPlain ? " uncoloured" : " unread";
    if (i === numPlain - 1 && numPlain < plain.tokens.length) looks += " cursor";
    spans[i] ??= text.appendChild(tokenSpan(token));
    // Only what changes: a text may have thousands of tokens.
    if (looks !== spans[i].looks) spans[i].className = spans[i].looks = looks;
  }
  if (drafts.isOver && numCommon < Math.max(plain.tokens.length, drafts.tokens.length)) {
    spans.splice(numCommon).forEach((span) => span.remove());
    text.querySelectorAll("h3, p").forEach((each) => each.remove());
    text.append(
      make("h3", {}, "Without drafts it went on"),
      make("p", {}, ...plain.tokens.slice(numCommon, numPlain).map(tokenSpan)),
      make("h3", {}, "With drafts it went on"),
      make("p", {}, ...drafts.tokens.slice(numCommon, numDrafts).map(tokenSpan)));
  }
}

/** How long both texts are the same, as far as is known. */
function commonLength() {
  const { plain, drafts } = lanes;
  if (!drafts.tokens.length) return plain.tokens.length;
  const at = parting(plain.tokens.slice(0, drafts.tokens.length), drafts.tokens);
  return at < 0 ? plain.tokens.length : at;
}

function replay() {
  cancelAnimationFrame(frame);
  const startS = performance.now() / 1000;
  const { plain, drafts } = lanes;
  const endS = Math.max(plain.endS, drafts.endS);
  const most = Math.max(plain.tokens.length, drafts.tokens.length);
  let drawn = -1;
  byId("race-hint").hidden = false;
  const tick = () => {
    const atS = Math.min(performance.now() / 1000 - startS, endS);
    for (const lane of [plain, drafts]) lane.draw(Math.min(atS, lane.endS), most);
    const reached = plain.reached(atS) + drafts.reached(atS);
    if (reached !== drawn) drawText(atS);
    drawn = reached;
    if (atS < endS) frame = requestAnimationFrame(tick);
  };
  tick();
}

function setRunning(isRunning) {
  byId("race-start").disabled = isRunning;
  byId("race-stop").hidden = !isRunning;
  if (isRunning) byId("race-replay").hidden = byId("race-hint").hidden = true;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("race-stop").addEventListener("click", () => running?.abort());
byId("race-replay").addEventListener("click", replay);
