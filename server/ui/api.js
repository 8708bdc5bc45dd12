// Talking to the server that this page came from.

const KEY = "outrider-api-key";
export const base = new URL("..", location.href.split("#")[0]);

/** What the server, or the way to it, says went wrong. `status` is 0 if no answer came. */
export class Problem extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

// In this tab only: whoever opens the next one must know the key.
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set(value) {
    value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY);
    document.dispatchEvent(new Event("key-changed"));
  },
};

async function ask(path, { body, signal } = {}) {
  const headers = key.get() ? { authorization: `Bearer ${key.get()}` } : {};
  const options = { headers, signal };
  if (body) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["content-type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(new URL(path, base), options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Problem("The server cannot be reached. Is it running?");
  }
  if (response.ok) return response;
  let reason;
  try {
    reason = (await response.json()).error.message;
  } catch {
    reason = `The server answered ${response.status} ${response.statusText}.`;
  }
  if (response.status === 401) document.dispatchEvent(new Event("key-refused"));
  throw new Problem(reason, response.status);
}

export const getJSON = async (path) => (await ask(path)).json();

/** The data of each server-sent event, parsed; comments, which keep a connection open, are passed
 * over. Throws if the stream breaks off before its end. */
export async function* events(path, { body, signal } = {}) {
  const response = await ask(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) throw new Problem("The answer broke off: the connection to the server was lost.");
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart()).join("\n");
        if (!data) continue;
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new Problem(event.error.message, 500);
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof Problem || signal?.aborted) throw error;
    throw new Problem("The answer broke off: the connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** An answer as it comes, in parts: {text, reasoning, steps, finishReason, progress}. A step is
 * {step, source, drafts, num_accepted, tokens, atS}, each token with its logprob and the most likely
 * ones beside it. `progress` is {processed, total}, in tokens of the prompt. */
export async function* answer(mode, body, signal) {
  const path = mode === "chat" ? "v1/chat/completions" : "v1/completions";
  const startS = performance.now() / 1000;
  for await (const chunk of events(path, { body, signal })) {
    const choice = chunk.choices?.[0] ?? {};
    const odds = logprobs(choice.logprobs);
    let position = 0;
    const steps = (choice.trace ?? []).map((step) => ({
      ...step,
      tokens: step.tokens.map((token) => ({ ...token, ...odds[position++] })),
      atS: performance.now() / 1000 - startS,
    }));
    yield {
      text: choice.delta?.content ?? choice.text ?? "",
      reasoning: choice.delta?.reasoning ?? "",
      steps,
      finishReason: choice.finish_reason ?? null,
      progress: chunk.prompt_progress ?? null,
    };
  }
}

function logprobs(given) {
  if (!given) return [];
  if (given.content) return given.content.map(({ logprob, top_logprobs: top }) => ({ logprob, top }));
  return given.token_logprobs.map((logprob, i) => ({
    logprob,
    top: Object.entries(given.top_logprobs[i] ?? {})
      .map(([token, own]) => ({ token, logprob: own }))
      .sort((a, b) => b.logprob - a.logprob),
  }));
}
