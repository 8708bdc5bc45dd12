// The pair's card: what is served, and how it is set.

import { byId, bytes, count, duration, make } from "./format.js";

export function draw(info) {
  const engine = info.engine;
  if (!engine) {
    byId("pair-card").replaceChildren(card("The engine is not up yet", `It is ${info.state}.`, []));
    return;
  }
  const { target, draft, speculation, cache } = engine;
  const k = speculation.num_speculative_tokens;
  byId("pair-card").replaceChildren(
    card("Target", "The large model. Answers are its own, with drafts or without.", [
      ["Model", target.model ?? info.model],
      ["Served as", info.model],
      ["Numbers", target.dtype],
      ["Vocabulary", `${count(engine.vocab_size)} tokens`],
      ["Chat template", info.chats ? "yes" : "no"],
    ]),
    draft
      ? card("Draft", "The small model. It runs ahead and guesses what the target will say.", [
        ["Model", draft.model ?? "–"],
        ["Numbers", draft.dtype],
      ])
      : card("Draft", speculation.proposer
        ? `No draft model: ${speculation.proposer} finds the guesses.`
        : "None: the target decodes plainly.", []),
    card("Speculation", k
      ? "In each step the target checks all guesses at once, and keeps those that it accepts."
      : "Off.", k ? [
      ["Source of drafts", speculation.proposer],
      ["Max drafts a step", k],
      ["Fewer if that pays more", yes(speculation.adaptive)],
      ["Verification rule", speculation.verification ?? "–"],
    ] : []),
    card("Memory", "Pages of the cache hold what both models computed of each sequence.", [
      ["Pages", count(cache.num_pages)],
      ["Tokens a page", cache.page_size_tokens],
      ["Memory of all pages", bytes(cache.bytes)],
      ["Longest sequence", `${count(engine.max_model_len)} tokens`],
      ["Sequences at once", engine.max_num_seqs],
    ]),
    card("Server", "It answers OpenAI’s clients at this address.", [
      ["Address", new URL("../v1", location.href.split("#")[0]).href],
      ["Runs on", engine.device],
      ["Loaded in", duration(engine.load_s)],
      ["Version", info.version],
    ]),
  );
}

const yes = (value) => (value == null ? "–" : value ? "yes" : "no");

function card(title, words, rows) {
  const list = rows.length ? [make("dl", {}, ...rows.flatMap(([name, value]) =>
    [make("dt", {}, name), make("dd", {}, String(value))]))] : [];
  return make("section", { className: "card" }, make("h2", {}, title), make("p", {}, words), ...list);
}
