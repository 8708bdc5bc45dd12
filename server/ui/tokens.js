// An answer, token by token: coloured by kind, with what is known of each on hover and focus.

import { byId, make, percent, visible } from "./format.js";

const peek = byId("peek");


/** One answer. It is a list of which one token is active: arrow keys, Home and End move there. */
export class Answer {
  constructor({ label, onStep = () => {} }) {
    this.steps = [];
    this.tokens = []; // {span, token, step, stepIndex, position}
    this.spans = []; // of each step
    this.shown = 0; // steps up to which tokens are shown
    this.marked = -1; // the step whose tokens stand out
    this.active = -1;
    this.onStep = onStep;
    this.element = make("div", { className: "answer waiting", tabIndex: -1 });
    this.element.setAttribute("aria-label", label);
    this.element.addEventListener("keydown", (event) => this.#onKey(event));
    this.element.addEventListener("pointerover", (event) => this.#onPointer(event));
    this.element.addEventListener("pointerleave", () => this.#hidePeek());
    this.element.addEventListener("click", (event) => this.#onClick(event));
    this.element.addEventListener("focus", () => {
      if (this.element.matches(":focus-visible")) this.activate(Math.max(this.active, 0));
    });
    this.element.addEventListener("blur", () => this.activate(-1));
  }

  get numTokens() {
    return this.tokens.length;
  }

  add(step) {
    const stepIndex = this.steps.push(step) - 1;
    this.spans.push([]);
    step.tokens.forEach((token, position) => {
      const span = tokenSpan(token);
      span.classList.add("later");
      this.spans[stepIndex].push(span);
      span.id = `${this.element.id || "answer"}-${this.tokens.length}`;
      span.setAttribute("role", "option");
      span.setAttribute("aria-selected", "false");
      span.dataset.index = this.tokens.length;
      this.tokens.push({ span, token, step, stepIndex, position });
      this.element.append(span);
    });
    if (this.steps.length === 1) {
      this.element.setAttribute("role", "listbox");
      this.element.tabIndex = 0;
    }
  }

  end() {
    this.element.classList.remove("waiting");
  }

  /** Show the answer as it was after so many steps, and mark what the last of them brought. */
  show(numSteps, { marks = true } = {}) {
    // Only what changes: an answer may have thousands of tokens.
    const toggle = (step, name, on) => this.spans[step]?.forEach((each) => each.classList.toggle(name, on));
    for (let i = this.shown; i < numSteps; i++) toggle(i, "later", false);
    for (let i = numSteps; i < this.shown; i++) toggle(i, "later", true);
    toggle(this.marked, "now", false);
    this.shown = numSteps;
    this.marked = marks ? numSteps - 1 : -1;
    toggle(this.marked, "now", true);
  }

  activate(index) {
    this.tokens[this.active]?.span.classList.remove("active");
    this.tokens[this.active]?.span.setAttribute("aria-selected", "false");
    this.active = index;
    const entry = this.tokens[index];
    if (!entry) {
      this.element.removeAttribute("aria-activedescendant");
      hidePeek();
      return;
    }
    entry.span.classList.add("active");
    entry.span.setAttribute("aria-selected", "true");
    entry.span.setAttribute("aria-label", describe(entry));
    this.element.setAttribute("aria-activedescendant", entry.span.id);
    entry.span.scrollIntoView({ block: "nearest" });
    showPeek(entry);
  }

  #onKey(event) {
    const last = this.tokens.length - 1;
    const moves = {
      ArrowRight: this.active + 1,
      ArrowLeft: this.active - 1,
      ArrowDown: this.#stepAfter(1),
      ArrowUp: this.#stepAfter(-1),
      Home: 0,
      End: last,
    };
    if (event.key in moves && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      this.activate(Math.min(Math.max(moves[event.key], 0), last));
    } else if (event.key === "Enter" && this.active >= 0) {
      this.onStep(this.tokens[this.active].stepIndex);
    } else if (event.key === "Escape" && !peek.hidden) {
      event.stopPropagation();
      hidePeek();
    }
  }

  /** The first token of the next step, or of the one before. */
  #stepAfter(direction) {
    const stepIndex = (this.tokens[this.active]?.stepIndex ?? -1) + direction;
    const index = this.tokens.findIndex((entry) => entry.stepIndex === stepIndex);
    return index < 0 ? this.active : index;
  }

  #entry(event) {
    return this.tokens[event.target.closest(".token")?.dataset.index];
  }

  #onPointer(event) {
    const entry = this.#entry(event);
    entry ? showPeek(entry, event) : this.#hidePeek();
  }

  #onClick(event) {
    const entry = this.#entry(event);
    if (!entry) return;
    this.activate(Number(entry.span.dataset.index));
    this.onStep(entry.stepIndex);
  }

  #hidePeek() {
    const active = this.tokens[this.active];
    active ? showPeek(active) : hidePeek();
  }
}

/** A token of an answer. One that adds no text is named instead. */
export function tokenSpan(token) {
  const span = make("span", { className: `token ${token.kind}` }, token.text);
  if (token.text === "") {
    span.dataset.name = token.token.includes("\ufffd") ? "·" : token.token;
    span.ariaLabel = token.token.includes("\ufffd") ? "part of a character" : token.token;
  }
  if (/^\s*\n\s*$/.test(token.text)) span.dataset.breaks = "";
  return span;
}

function describe({ token, step, position }) {
  const odds = token.logprob == null ? "" : `, logprob ${token.logprob.toFixed(2)}`;
  return `${visible(token.text || token.token)}, ${token.kind}, step ${step.step}, ` +
    `token ${position + 1} of ${step.tokens.length}${odds}`;
}

export function hidePeek() {
  peek.hidden = true;
}

function showPeek({ span, token, step, position }, pointer) {
  const rejected = step.drafts.slice(step.num_accepted);
  const lines = [
    make("div", { className: "head" },
      make("code", {}, visible(token.text || token.token)), make("small", {}, `id ${token.token_id}`)),
    make("p", {}, make("b", {}, token.kind), `, token ${position + 1} of step ${step.step}`),
    make("p", {}, step.source ? `Drafts by ${step.source}: ${step.num_accepted} of ` +
      `${step.drafts.length} accepted` : "Nothing was drafted"),
  ];
  if (rejected.length) {
    const line = make("p", {}, "Rejected: ");
    rejected.forEach((draft) =>
      line.append(make("span", { className: "token rejected" }, visible(draft.token)), " "));
    lines.push(line);
  }
  if (token.logprob != null) {
    lines.push(make("p", {}, `Logprob ${token.logprob.toFixed(3)}, so ` +
      `${percent(Math.exp(token.logprob))} before temperature and filters`));
  }
  if (token.top?.length) {
    const odds = make("div", { className: "odds" });
    for (const { token: text, logprob } of token.top) {
      const chance = Math.exp(logprob);
      odds.append(make("code", {}, visible(text)), make("meter", { value: chance, ariaHidden: "true" }),
        make("span", {}, percent(chance)));
    }
    lines.push(odds);
  }
  peek.replaceChildren(...lines);
  peek.hidden = false;
  place(span, pointer);
}

/** Below the line of the token that is pointed at, or above it if there is no room. */
function place(span, pointer) {
  const boxes = [...span.getClientRects()];
  const box = boxes.find((b) => pointer && pointer.clientY >= b.top && pointer.clientY <= b.bottom) ??
    boxes[0] ?? span.getBoundingClientRect();
  const { width, height } = peek.getBoundingClientRect();
  const left = Math.min(Math.max(box.left, 8), innerWidth - width - 8);
  const below = box.bottom + 8;
  peek.style.left = `${Math.max(left, 8)}px`;
  peek.style.top = `${below + height < innerHeight ? below : Math.max(8, box.top - height - 8)}px`;
}

addEventListener("scroll", hidePeek, { passive: true });
