// A request as a program: curl, Python, JavaScript.

import { base, key } from "./api.js";

// What OpenAI's Python client knows as arguments; the rest goes into extra_body.
const KNOWN = new Set(["model", "messages", "prompt", "max_tokens", "max_completion_tokens",
  "temperature", "top_p", "seed", "stop"]);

export function code(language, { mode, body }) {
  return { curl, python, javascript }[language](mode, body);
}

const address = (mode) => new URL(mode === "chat" ? "v1/chat/completions" : "v1/completions", base).href;

function curl(mode, body) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const auth = key.get() ? `  -H "authorization: Bearer $OUTRIDER_API_KEY" \\\n` : "";
  return `curl '${address(mode)}' \\\n  -H 'content-type: application/json' \\\n${auth}  -d '${json}'\n`;
}

function python(mode, body) {
  const entries = Object.entries(body).filter(([, value]) => value !== undefined);
  const extra = entries.filter(([name]) => !KNOWN.has(name));
  const args = entries.filter(([name]) => KNOWN.has(name)).map(([name, value]) => [name, value]);
  if (extra.length) args.push(["extra_body", Object.fromEntries(extra)]);
  const create = mode === "chat" ? "chat.completions" : "completions";
  const text = mode === "chat" ? "message.content" : "text";
  const secret = key.get() ? 'os.environ["OUTRIDER_API_KEY"]' : '"unused"';
  return `${key.get() ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${pythonValue(new URL("v1", base).href)}, api_key=${secret})
answer = client.${create}.create(
${args.map(([name, value]) => `    ${name}=${pythonValue(value, "    ")},`).join("\n")}
)
print(answer.choices[0].${text})
`;
}

/** JSON is Python but for three words, and lists and objects are laid out as people do. */
function pythonValue(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const deeper = `${indent}    `;
  if (Array.isArray(value)) {
    return `[\n${value.map((each) => `${deeper}${pythonValue(each, deeper)},\n`).join("")}${indent}]`;
  }
  const items = Object.entries(value).map(([name, each]) =>
    `${JSON.stringify(name)}: ${pythonValue(each, deeper)}`);
  return `{${items.join(", ")}}`;
}

function javascript(mode, body) {
  const auth = key.get() ? "\n    authorization: `Bearer ${process.env.OUTRIDER_API_KEY}`," : "";
  const text = mode === "chat" ? "message.content" : "text";
  const json = JSON.stringify(body, null, 2).replaceAll("\n", "\n  ");
  return `const response = await fetch(${JSON.stringify(address(mode))}, {
  method: "POST",
  headers: {
    "content-type": "application/json",${auth}
  },
  body: JSON.stringify(${json}),
});
const answer = await response.json();
console.log(answer.choices[0].${text});
`;
}
