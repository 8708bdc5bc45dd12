// The turns of a conversation: a question and its answer, as tokens and as text. They are kept in
// this browser until a new chat begins.

import { byId, copyText, make } from "./format.js";
import { showMarkdown } from "./markdown.js";
import { Answer } from "./tokens.js";

const KEPT = "outrider-conversation";

export const turns = [];

/** One question and its answer. `outcome` says how it ended, in words for people. */
export class Turn {
  /** `on` has what the page does: step(turn, number), regenerate(), resume(turn), edit(turn). */
  constructor({ mode, prompt, model }, on) {
    Object.assign(this, { mode, prompt, model });
    this.text = this.reasoning = "";
    this.outcome = null; // until it ends
    this.isCut = true; // until the model has ended it: it can be continued
    this.numSteps = 0; // before the request that runs now
    this.startS = 0; // of that request, after the first one
    this.tokens = new Answer({
      label: "Answer, token by token. Arrow keys move between tokens, up and down between steps.",
      onStep: (index) => on.step(this, index + 1),
    });
    this.tokens.element.id = `answer-${turns.length}`;
    this.thoughts = make("div", { className: "prose" });
    this.folded = make("details", { className: "reasoning", hidden: true },
      make("summary", {}, "Reasoning"), this.thoughts);
    this.prose = make("div", { className: "prose" });
    this.note = make("p", { className: "note" });
    const button = (text, className, act) => {
      const made = make("button", { type: "button", className: `quiet ${className}` }, text);
      made.addEventListener("click", act);
      return made;
    };
    this.buttons = make("div", { className: "actions" },
      button("Copy", "", () => copyText(this.text)),
      button("Regenerate", "last", () => on.regenerate()),
      button("Continue", "last resume", () => on.resume(this)),
      button("Edit", "last", () => on.edit(this)));
    const isChat = mode === "chat";
    this.element = make("section", { className: "turn", ariaLabel: "Question and answer" },
      make("h3", {}, isChat ? "You" : "Prompt"),
      make("p", { className: "said" }, prompt),
      make("h3", {}, isChat ? model ?? "Answer" : "Continuation"),
      this.tokens.element,
      make("div", { className: "as-text" }, this.folded, this.prose),
      this.note, this.buttons);
    this.buttons.hidden = true;
    turns.push(this);
    byId("empty").hidden = true;
    byId("transcript").append(this.element);
  }

  /** A request for this turn begins: the first, or one that continues the answer. */
  begin() {
    this.numSteps = this.tokens.steps.length;
    this.startS = this.tokens.steps.at(-1)?.atS ?? 0;
    Object.assign(this, { outcome: null, isCut: true });
    this.buttons.hidden = true;
    this.note.textContent = "";
    this.tokens.element.classList.add("waiting");
  }

  add({ text, reasoning, steps }) {
    this.text += text;
    this.reasoning += reasoning;
    for (const step of steps)
      this.tokens.add({ ...step, step: step.step + this.numSteps, atS: step.atS + this.startS });
  }

  end(outcome, isCut) {
    Object.assign(this, { outcome, isCut });
    this.tokens.end();
    this.note.textContent = outcome;
    this.buttons.hidden = false;
    this.element.classList.toggle("cut", isCut && this.text !== "");
    this.drawText();
  }

  drawText() {
    this.folded.hidden = !this.reasoning;
    showMarkdown(this.thoughts, this.reasoning);
    showMarkdown(this.prose, this.text);
  }

  remove() {
    turns.splice(turns.indexOf(this), 1);
    this.element.remove();
  }
}

/** What was said in some turns, as the messages of a chat. A question that got no answer is left
 * out: it may be why, as one that is too long. */
export const messages = (some) => some.filter(isAnswered).flatMap((turn) => [
  { role: "user", content: turn.prompt },
  { role: "assistant", content: turn.text },
]);

const isAnswered = ({ mode, text, isCut }) => mode === "chat" && (text !== "" || !isCut);

/** Keep the conversation in this browser: with its steps, or only the text if they take too much. */
export function keep() {
  for (const withSteps of [true, false]) {
    const kept = turns.map(({ mode, prompt, model, text, reasoning, outcome, isCut, tokens }) => ({
      mode, prompt, model, text, reasoning, isCut,
      outcome: outcome ?? "Interrupted.",
      steps: withSteps ? tokens.steps.map(withoutOdds) : [],
    }));
    try {
      return localStorage.setItem(KEPT, JSON.stringify(kept));
    } catch { /* it is full */ }
  }
  localStorage.removeItem(KEPT);
}

const withoutOdds = (step) => ({ ...step, tokens: step.tokens.map(({ top: _, ...token }) => token) });

/** Show the conversation that was kept; returns its last turn. */
export function restore(on) {
  let kept = [];
  try {
    kept = JSON.parse(localStorage.getItem(KEPT)) ?? [];
  } catch { /* not of this version */ }
  for (const { text, reasoning, steps, outcome, isCut, ...asked } of kept) {
    const turn = new Turn(asked, on);
    turn.add({ text, reasoning, steps });
    // Its steps did not fit: one colourless token with all of it.
    if (text && !steps.length) turn.tokens.element.textContent = text;
    turn.tokens.show(steps.length, { marks: false });
    turn.end(outcome, isCut);
  }
  return turns.at(-1) ?? null;
}

export function forget() {
  turns.splice(0);
  localStorage.removeItem(KEPT);
  byId("transcript").replaceChildren(byId("empty"));
  byId("empty").hidden = false;
}
