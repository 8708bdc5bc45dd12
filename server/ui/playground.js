// The playground: ask, watch the answer come token by token, and go back through its steps.

import { answer } from "./api.js";
import * as conversation from "./conversation.js";
import { byId, count, duration, make, oneDigit, percent, plural, showProblem, visible } from "./format.js";
import { hidePeek } from "./tokens.js";
import { lastStats } from "./live.js";

const SETTINGS = "outrider-settings"; // kept in this browser
const SLOW_S = 4; // without a token, after which the page says why it may take so long
const PLAY_MS = 220; // a step, when they are played
const ALTERNATIVES = 5; // to each token, with their odds
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
  "frequency_penalty", "seed"];

const form = byId("ask");
const slider = byId("step");
const views = byId("views");
const reading = document.querySelector(".reading"); // answers, with the composer at their end
const { turns } = conversation;
let shown = null; // the turn that the slider is about
let edited = null; // the turn whose question is in the composer, to be asked again
let sent = null; // the last request
let running = null; // its AbortController
let isLeaving = false; // the page is left or reloaded, which ends the request
let playing = null;
let nextFrame = null;
let info = null;

export function start(served) {
  info = served;
  if (!info.chats) {
    form.mode.value = "completion";
    form.querySelector('[value="chat"]').disabled = true;
  }
  onMode();
}

/** What is asked for as the form is, or was last if nothing is, without what only this page
 * wants. */
export function request() {
  if (!form.prompt.value && sent) return sent;
  const body = asked(form.prompt.value, edited ? turns.slice(0, turns.indexOf(edited)) : turns);
  return { mode: form.mode.value, body };
}

/** The body of a request that asks this after some turns. */
function asked(prompt, before) {
  const fields = Object.fromEntries(new FormData(form));
  const isChat = form.mode.value === "chat"; // which FormData leaves out while an answer comes
  const body = { model: info?.model };
  if (isChat) {
    const system = fields.system ? [{ role: "system", content: fields.system }] : [];
    const last = { role: "user", content: prompt };
    body.messages = [...system, ...conversation.messages(before), last];
  } else {
    body.prompt = prompt;
  }
  body[isChat ? "max_completion_tokens" : "max_tokens"] = Number(fields.max_tokens);
  // What is left empty is the server's choice.
  for (const name of NUMBERS) if (fields[name] !== "") body[name] = Number(fields[name]);
  if (fields.stop) body.stop = fields.stop;
  const schema = parsed(fields.schema);
  if (schema)
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const speculation = draftsAsked(fields.drafts);
  if (fields.verification) speculation.verification = fields.verification;
  if (Object.keys(speculation).length) body.speculation = speculation;
  return body;
}

function parsed(schema) {
  let value = null;
  let problem = "";
  try {
    if (schema.trim()) value = JSON.parse(schema);
    if (value !== null && typeof value !== "object") problem = "A schema is an object in JSON.";
  } catch (error) {
    problem = `This is not JSON: ${error.message}`;
  }
  form.schema.setCustomValidity(problem);
  return problem ? null : value;
}

/** `speculation` for a choice of "Drafts a step". */
export function draftsAsked(choice) {
  if (choice === "") return {};
  return choice === "0" ? { enabled: false } : { num_speculative_tokens: Number(choice) };
}

// ---- asking

const on = {
  step: (turn, number) => select(turn, number),
  regenerate: () => ask(turns.at(-1).prompt, turns.at(-1)),
  resume: (turn) => resume(turn),
  edit(turn) {
    edited = turn;
    form.prompt.value = turn.prompt;
    onEdit();
    form.prompt.focus();
  },
};

/** Ask what the composer has. */
async function send() {
  if (!form.prompt.value) return form.prompt.focus();
  const { value } = form.prompt;
  if (await ask(value, edited) && form.mode.value === "chat" && form.prompt.value === value)
    form.prompt.value = "";
}

/** Ask in a new turn, which takes the place of `replaced`; returns whether it was sent. */
async function ask(prompt, replaced = null) {
  if (running) return false;
  if (!form.reportValidity()) return false;
  if (replaced) form.mode.value = replaced.mode;
  const mode = form.mode.value;
  if (replaced) {
    parkSteps();
    replaced.remove();
  }
  edited = null;
  onEdit();
  onMode();
  sent = { mode, body: asked(prompt, turns) };
  const turn = new conversation.Turn({ mode, prompt, model: info?.model }, on);
  showEnd();
  await run(turn, sent);
  return true;
}

/** Go on with an answer that was cut off or stopped. */
async function resume(turn) {
  if (running || !form.reportValidity()) return;
  form.mode.value = turn.mode;
  const body = asked(turn.prompt, turns.slice(0, -1));
  if (turn.mode === "chat") {
    body.messages.push({ role: "assistant", content: turn.text });
    Object.assign(body, { add_generation_prompt: false, continue_final_message: true });
  } else {
    body.prompt += turn.text;
  }
  sent = { mode: turn.mode, body };
  await run(turn, sent);
}

async function run(turn, { mode, body }) {
  const traced = {
    ...body,
    stream: true,
    return_progress: true,
    speculation: { ...body.speculation, trace: true },
  };
  const odds = Math.min(ALTERNATIVES, info?.max_logprobs ?? ALTERNATIVES);
  Object.assign(traced, mode === "chat" ? { logprobs: true, top_logprobs: odds } : { logprobs: odds });
  running = new AbortController();
  setRunning(true);
  showProblem(byId("problem"), null);
  turn.begin();
  select(turn, turn.tokens.steps.length);
  conversation.keep();
  const { numTokens } = turn.tokens;
  const numSteps = turn.tokens.steps.length;
  const startS = performance.now() / 1000;
  let heardS = startS;
  let progress = null;
  byId("status").textContent = "Waiting for the first token …";
  const clock = setInterval(() => showWait(turn.tokens.numTokens - numTokens, startS, heardS, progress), 500);
  let word = "Done";
  let isCut = false;
  try {
    for await (const part of answer(mode, traced, running.signal)) {
      progress = part.progress ?? progress;
      if (part.finishReason === "length") [word, isCut] = ["Cut off at the maximum number of tokens", true];
      if (part.steps.length) heardS = performance.now() / 1000;
      const follows = turn.tokens.shown === turn.tokens.steps.length;
      turn.add(part);
      if (follows) turn.tokens.show(turn.tokens.steps.length, { marks: false });
      if (shown === turn) refreshSoon(follows);
    }
  } catch (error) {
    isCut = true;
    word = running.signal.aborted ? "Stopped" : isLeaving ? "Interrupted" : "Ended by an error";
    if (word === "Ended by an error") showProblem(byId("problem"), error);
  } finally {
    clearInterval(clock);
    running = null;
    setRunning(false);
    cancelAnimationFrame(nextFrame);
    nextFrame = null;
    const { steps } = turn.tokens;
    byId("status").textContent = steps.length > numSteps
      ? `${word}: ${plural(turn.tokens.numTokens - numTokens, "token")} in ${plural(steps.length - numSteps, "step")}.`
      : `${word}, without an answer.`;
    turn.end(word === "Done" ? "" : `${word}.`, isCut);
    conversation.keep();
    if (shown === turn && steps.length) refresh(turn.tokens.shown);
  }
}

function showWait(numTokens, startS, heardS, progress) {
  const nowS = performance.now() / 1000;
  if (numTokens && nowS - heardS < SLOW_S) {
    byId("status").textContent = `Answering: ${plural(numTokens, "token")} so far.`;
  } else if (!numTokens && progress) {
    byId("status").textContent = `Reading the prompt: ${count(progress.processed)} of ` +
      `${plural(progress.total, "token")}, ${(nowS - startS).toFixed(0)} s`;
  } else if (nowS - heardS >= SLOW_S) {
    const { num_waiting: waiting = 0, state = "" } = lastStats() ?? {};
    const why = state && state !== "ready" ? ` The engine is ${state}.`
      : waiting ? ` ${plural(waiting, "request")} wait in the queue.` : " The server may be busy.";
    byId("status").textContent =
      `Nothing has come for ${Math.round(nowS - heardS)} s.${why} You can wait, or stop it.`;
  } else {
    byId("status").textContent = `Waiting for the first token: ${(nowS - startS).toFixed(1)} s`;
  }
}

function setRunning(isRunning) {
  byId("send").disabled = isRunning;
  byId("stop").hidden = !isRunning;
  byId("playground").classList.toggle("running", isRunning);
  for (const mode of form.querySelectorAll('[name="mode"]'))
    mode.disabled = isRunning || (mode.value === "chat" && info && !info.chats);
}

// ---- the steps

/** Make a turn the one that the steps are about: no other has marks. */
function select(turn, numSteps) {
  if (shown !== turn) {
    shown?.tokens.show(shown.tokens.steps.length, { marks: false });
    turn.element.append(byId("steps"));
  }
  shown = turn;
  stopPlaying();
  if (numSteps) refresh(numSteps);
  else byId("steps").hidden = true;
}

/** Take the steps out of the turn that they are about: it may be removed. */
function parkSteps() {
  byId("steps").hidden = true;
  byId("transcript").after(byId("steps"));
  shown = null;
}

/** The same as `refresh`, at most once a frame: steps may come faster than a screen shows them. */
function refreshSoon(follows) {
  nextFrame ??= requestAnimationFrame(() => {
    nextFrame = null;
    if (!shown) return;
    const isAtEnd = reading.getBoundingClientRect().bottom <= innerHeight + 1;
    if (views.querySelector(":checked").value === "text") shown.drawText();
    const { steps } = shown.tokens;
    if (steps.length) refresh(follows ? steps.length : Number(slider.value), { marks: !follows });
    if (isAtEnd) showEnd(); // whoever has scrolled up to read stays there
  });
}

const showEnd = () => reading.scrollIntoView({ block: "end" });

/** Bring the panel to a step of the answer that it is about. */
function refresh(numSteps, { marks = true } = {}) {
  const { steps } = shown.tokens;
  byId("steps").hidden = false;
  slider.max = steps.length;
  slider.value = numSteps;
  byId("step-number").textContent = numSteps;
  byId("step-count").textContent = steps.length;
  shown.tokens.show(numSteps, { marks });
  const step = steps[numSteps - 1];
  byId("anatomy").replaceChildren(...chips(step));
  byId("story").textContent = `${story(step)} ${when(steps, numSteps - 1)}`;
  slider.setAttribute("aria-valuetext", `step ${numSteps}. ${story(step)}`);
  byId("totals").textContent = totals(shown.tokens);
}

function chips(step) {
  const drafts = step.drafts.map((draft, i) => {
    const accepted = i < step.num_accepted;
    const word = accepted ? "accepted" : i === step.num_accepted ? "rejected" : "dropped";
    return make("span", { className: "chip" },
      make("span", { className: `token ${accepted ? "accepted" : "rejected"}` }, visible(draft.token)),
      make("small", {}, word));
  });
  const written = step.tokens.slice(step.num_accepted).map((token) =>
    make("span", { className: "chip" },
      make("span", { className: `token ${token.kind}` }, visible(token.text || token.token)),
      make("small", {}, token.kind)));
  const arrow = drafts.length && written.length ? [make("span", { className: "arrow" }, "→")] : [];
  return [...drafts, ...arrow, ...written];
}

/** What happened in a step, in a sentence or two. */
export function story(step) {
  const { drafts, num_accepted: accepted, tokens } = step;
  const last = tokens.at(-1);
  const written = `“${visible(last.text || last.token)}”`;
  if (!drafts.length) return `Nothing was drafted: the target wrote ${written}.`;
  const guessed = `The draft guessed ${plural(drafts.length, "token")}.`;
  if (tokens.length <= accepted) return `${guessed} The answer ended among those that were accepted.`;
  if (accepted === drafts.length)
    return `${guessed} ${accepted === 1 ? "It was" : "All were"} accepted, and the target added ${written}.`;
  const dropped = drafts.length - accepted - 1;
  const kept = accepted ? `${accepted} ${accepted === 1 ? "was" : "were"} accepted; the` : "The";
  const rest = dropped ? `, and ${dropped} more ${dropped === 1 ? "was" : "were"} dropped with it` : "";
  return `${guessed} ${kept} target wrote ${written} in place of ` +
    `“${visible(drafts[accepted].token)}”${rest}.`;
}

function when(steps, index) {
  const before = index ? `, ${duration(steps[index].atS - steps[index - 1].atS)} after the step before` : "";
  return `It came ${duration(steps[index].atS)} after you asked${before}.`;
}

function totals({ steps, numTokens }) {
  const drafted = steps.reduce((sum, step) => sum + step.drafts.length, 0);
  const accepted = steps.reduce((sum, step) => sum + step.num_accepted, 0);
  const elapsedS = steps.at(-1).atS - steps[0].atS;
  const parts = [
    plural(numTokens, "token"),
    plural(steps.length, "step"),
    `${(numTokens / steps.length).toFixed(2)} tokens a step`,
    drafted ? `${accepted} of ${drafted} drafts accepted (${percent(accepted / drafted)})` : "no drafts",
    `first token after ${duration(steps[0].atS)}`,
  ];
  const later = numTokens - steps[0].tokens.length;
  if (elapsedS > 0) parts.push(`then ${oneDigit(later / elapsedS)} tokens/s`);
  return parts.join(" · ");
}

function stopPlaying() {
  clearInterval(playing);
  playing = null;
  byId("step-play").textContent = "Play";
}

function play() {
  if (playing) return stopPlaying();
  byId("step-play").textContent = "Pause";
  let next = Number(slider.value) >= shown.tokens.steps.length ? 1 : Number(slider.value) + 1;
  const turn = () => {
    refresh(next++);
    if (next > shown.tokens.steps.length) stopPlaying();
  };
  playing = setInterval(turn, PLAY_MS);
  turn();
}

// ---- the form

function onMode() {
  const isChat = form.mode.value === "chat";
  byId("system-field").hidden = !isChat;
  if (!edited) byId("prompt-label").textContent = isChat ? "Your message" : "Text to continue";
}

function onEdit() {
  byId("edit-cancel").hidden = !edited;
  for (const turn of turns) turn.element.classList.toggle("edited", turn === edited);
  if (edited) byId("prompt-label").textContent = "The last question, changed";
  else onMode();
}

function cancelEdit() {
  edited = null;
  form.prompt.value = "";
  onEdit();
}

function onView() {
  const view = views.querySelector(":checked").value;
  byId("transcript").dataset.view = view;
  if (view === "text") for (const turn of turns) turn.drawText();
}

function keepSettings() {
  const fields = Object.fromEntries(new FormData(form));
  delete fields.prompt;
  fields.answers = views.querySelector(":checked").value;
  localStorage.setItem(SETTINGS, JSON.stringify(fields));
}

function restoreSettings() {
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch { /* not of this version */ }
  const { answers, drafts, ...fields } = kept;
  for (const [name, value] of Object.entries(fields)) if (form[name]) form[name].value = value;
  if (drafts) form.drafts.append(make("option", { value: drafts, selected: true }, drafts));
  for (const each of views.querySelectorAll("input"))
    if (each.value === answers) each.checked = true;
}

function clear() {
  running?.abort();
  stopPlaying();
  cancelAnimationFrame(nextFrame);
  nextFrame = null;
  hidePeek();
  sent = edited = null;
  parkSteps();
  conversation.forget();
  onEdit();
  byId("status").textContent = "";
  showProblem(byId("problem"), null);
  form.prompt.focus();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
form.prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
form.addEventListener("change", () => {
  onMode();
  parsed(form.schema.value);
  keepSettings();
});
form.schema.addEventListener("input", () => parsed(form.schema.value));
views.addEventListener("change", () => {
  onView();
  keepSettings();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (running) running.abort();
  else if (edited) cancelEdit();
});
addEventListener("pageshow", () => { isLeaving = false; });
addEventListener("pagehide", () => {
  isLeaving = true;
  if (running) conversation.keep();
});
slider.addEventListener("input", () => {
  stopPlaying();
  refresh(Number(slider.value));
});
byId("step-play").addEventListener("click", play);
byId("stop").addEventListener("click", () => running?.abort());
byId("edit-cancel").addEventListener("click", cancelEdit);
byId("clear").addEventListener("click", clear);

restoreSettings();
onMode();
const last = conversation.restore(on);
if (last) select(last, last.tokens.steps.length);
onView();
if (last) {
  history.scrollRestoration = "manual"; // the browser's place is one of a page without answers
  showEnd();
}
