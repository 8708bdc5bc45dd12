// The playground: ask, watch the answer come token by token, and go back through its steps.

import { answer } from "./api.js";
import { byId, duration, make, oneDigit, percent, plural, showProblem, visible } from "./format.js";
import { Answer, hidePeek } from "./tokens.js";
import { lastStats } from "./live.js";

const SLOW_S = 4; // without a token, after which the page says why it may take so long
const PLAY_MS = 220; // a step, when they are played
const ALTERNATIVES = 5; // to each token, with their odds

const form = byId("ask");
const slider = byId("step");
let messages = []; // of the chat so far
let shown = null; // the answer that the slider is about
let sent = null; // the last request
let running = null; // its AbortController
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

/** What is asked for as the form stands, or was last if nothing is, without what only this page
 * wants. */
export function request() {
  if (!form.prompt.value && sent) return sent;
  const fields = Object.fromEntries(new FormData(form));
  const mode = form.mode.value; // which FormData leaves out while an answer comes
  const body = { model: info?.model };
  if (mode === "chat") {
    const system = fields.system ? [{ role: "system", content: fields.system }] : [];
    body.messages = [...system, ...messages, { role: "user", content: fields.prompt }];
  } else {
    body.prompt = fields.prompt;
  }
  body[mode === "chat" ? "max_completion_tokens" : "max_tokens"] = Number(fields.max_tokens);
  // What is left empty is the server's choice.
  for (const name of ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"])
    if (fields[name] !== "") body[name] = Number(fields[name]);
  if (fields.stop) body.stop = fields.stop;
  const speculation = draftsAsked(fields.drafts);
  if (fields.verification) speculation.verification = fields.verification;
  if (Object.keys(speculation).length) body.speculation = speculation;
  return { mode, body };
}

/** `speculation` for a choice of "Drafts a step". */
export function draftsAsked(choice) {
  if (choice === "") return {};
  return choice === "0" ? { enabled: false } : { num_speculative_tokens: Number(choice) };
}

async function send() {
  if (running || !form.reportValidity()) return;
  if (!form.prompt.value) return form.prompt.focus();
  sent = request();
  const { mode, body } = sent;
  const ask = { ...body, stream: true, speculation: { ...body.speculation, trace: true } };
  const most = Math.min(ALTERNATIVES, info?.max_logprobs ?? ALTERNATIVES);
  Object.assign(ask, mode === "chat" ? { logprobs: true, top_logprobs: most } : { logprobs: most });
  const prompt = form.prompt.value;
  const view = newTurn(mode, prompt);
  running = new AbortController();
  setRunning(true);
  showProblem(byId("problem"), null);
  const startS = performance.now() / 1000;
  let heardS = startS;
  const clock = setInterval(() => tellWait(view, startS, heardS), 500);
  const outcome = { word: "Done" };
  try {
    const steps = answer(mode, ask, running.signal);
    let next;
    while (!(next = await steps.next()).done) {
      heardS = performance.now() / 1000;
      const follows = view.shown === view.steps.length;
      view.add(next.value);
      if (follows) view.show(view.steps.length, { marks: false });
      if (shown === view) refreshSoon(follows);
    }
    if (mode === "chat") {
      messages.push({ role: "user", content: prompt }, { role: "assistant", content: next.value.text });
      form.prompt.value = "";
    }
    if (next.value.finishReason === "length") outcome.word = "Cut off at the most tokens";
  } catch (error) {
    outcome.word = running.signal.aborted ? "Stopped" : "Ended by an error";
    if (!running.signal.aborted) showProblem(byId("problem"), error);
  } finally {
    clearInterval(clock);
    running = null;
    setRunning(false);
    cancelAnimationFrame(nextFrame);
    nextFrame = null;
    view.end();
    view.element.after(make("p", { className: "unseen" }, `As text: ${view.text}`));
    byId("status").textContent = view.steps.length
      ? `${outcome.word}: ${plural(view.numTokens, "token")} in ${plural(view.steps.length, "step")}.`
      : `${outcome.word}, without an answer.`;
    if (shown === view && view.steps.length) refresh(view.shown);
  }
}

function newTurn(mode, prompt) {
  byId("empty").hidden = true;
  const view = new Answer({
    label: "Answer, token by token. Arrow keys move between tokens, up and down between steps.",
    onStep: (stepIndex) => select(view, stepIndex + 1),
  });
  view.element.id = `answer-${document.querySelectorAll(".answer").length}`;
  byId("transcript").append(
    make("section", { className: "turn", ariaLabel: "Question and answer" },
      make("h3", {}, mode === "chat" ? "You" : "Prompt"),
      make("p", { className: "said" }, prompt),
      make("h3", {}, mode === "chat" ? info?.model ?? "Answer" : "Continuation"),
      view.element));
  view.element.scrollIntoView({ block: "nearest" });
  byId("status").textContent = "Waiting for the first token …";
  shown = view;
  byId("steps").hidden = true;
  return view;
}

function tellWait(view, startS, heardS) {
  const nowS = performance.now() / 1000;
  if (view.steps.length && nowS - heardS < SLOW_S) {
    byId("status").textContent = `Answering: ${plural(view.numTokens, "token")} so far.`;
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
  for (const mode of form.querySelectorAll('[name="mode"]'))
    mode.disabled = isRunning || (mode.value === "chat" && info && !info.chats);
}

// ---- the steps

function select(view, numSteps) {
  if (shown && shown !== view) shown.show(shown.steps.length, { marks: false });
  shown = view;
  stopPlaying();
  refresh(numSteps);
}

/** The same, at most once a frame: steps may come faster than a screen shows them. */
function refreshSoon(follows) {
  nextFrame ??= requestAnimationFrame(() => {
    nextFrame = null;
    if (shown) refresh(follows ? shown.steps.length : Number(slider.value), { marks: !follows });
  });
}

/** Bring the panel to a step of the answer that it is about. */
function refresh(numSteps, { marks = true } = {}) {
  const { steps } = shown;
  byId("steps").hidden = false;
  slider.max = steps.length;
  slider.value = numSteps;
  byId("step-number").textContent = numSteps;
  byId("step-count").textContent = steps.length;
  shown.show(numSteps, { marks: marks });
  const step = steps[numSteps - 1];
  byId("anatomy").replaceChildren(...chips(step));
  byId("story").textContent = `${story(step)} ${when(steps, numSteps - 1)}`;
  slider.setAttribute("aria-valuetext", `step ${numSteps}. ${story(step)}`);
  byId("totals").textContent = totals(shown);
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
  if (tokens.length <= accepted) return `${guessed} The answer ended among those that stood.`;
  if (accepted === drafts.length)
    return `${guessed} ${accepted === 1 ? "It" : "All"} stood, and the target added ${written}.`;
  const dropped = drafts.length - accepted - 1;
  const stood = accepted ? `${accepted} stood; the` : "The";
  const rest = dropped ? `, and ${dropped} more ${dropped === 1 ? "was" : "were"} dropped with it` : "";
  return `${guessed} ${stood} target wrote ${written} in place of ` +
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
  let next = Number(slider.value) >= shown.steps.length ? 1 : Number(slider.value) + 1;
  const turn = () => {
    refresh(next++);
    if (next > shown.steps.length) stopPlaying();
  };
  playing = setInterval(turn, PLAY_MS);
  turn();
}

function onMode() {
  const isChat = form.mode.value === "chat";
  byId("system-field").hidden = !isChat;
  byId("prompt-label").textContent = isChat ? "Your message" : "Text to continue";
}

function clear() {
  running?.abort();
  stopPlaying();
  cancelAnimationFrame(nextFrame);
  nextFrame = null;
  hidePeek();
  messages = [];
  sent = shown = null;
  byId("transcript").replaceChildren(byId("empty"));
  byId("empty").hidden = false;
  byId("steps").hidden = true;
  byId("status").textContent = "";
  showProblem(byId("problem"), null);
  form.prompt.focus();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
});
form.addEventListener("change", onMode);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
});
slider.addEventListener("input", () => {
  stopPlaying();
  refresh(Number(slider.value));
});
byId("step-play").addEventListener("click", play);
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", clear);
