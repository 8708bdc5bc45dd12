// Puts the page together: views, theme, key, and what they all need to know of the server.

import { getJSON, key } from "./api.js";
import { code } from "./code.js";
import { byId, copyText, make, showProblem } from "./format.js";
import * as live from "./live.js";
import * as pair from "./pair.js";
import * as playground from "./playground.js";
import * as race from "./race.js";

const THEME = "outrider-theme";
const THEMES = ["system", "light", "dark"];
const VIEWS = ["playground", "race", "pair"];

// ---- views, each with an address of its own

function showView() {
  const wanted = location.hash.slice(1);
  if (wanted === "main") return; // the link past the top
  const view = VIEWS.includes(wanted) ? wanted : VIEWS[0];
  for (const each of VIEWS) {
    byId(each).hidden = each !== view;
    const link = document.querySelector(`nav a[href="#${each}"]`);
    each === view ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
}

// ---- theme

function setTheme(theme) {
  localStorage.setItem(THEME, theme);
  theme === "system" ? delete document.documentElement.dataset.theme
    : (document.documentElement.dataset.theme = theme);
  byId("theme-button").textContent = `Theme: ${theme}`;
}

byId("theme-button").addEventListener("click", () => {
  const now = THEMES.indexOf(localStorage.getItem(THEME) ?? "system");
  setTheme(THEMES[(now + 1) % THEMES.length]);
});

// ---- key

const keyDialog = byId("key-dialog");
const KEY_REASON = byId("key-reason").textContent;

function askForKey(reason) {
  if (keyDialog.open) return;
  byId("key-reason").textContent = reason;
  byId("key").value = key.get();
  keyDialog.returnValue = "";
  keyDialog.showModal();
  byId("key").select();
}

byId("key-button").addEventListener("click", () => askForKey(KEY_REASON));
keyDialog.addEventListener("close", () => {
  if (keyDialog.returnValue === "save") key.set(byId("key").value.trim());
});
document.addEventListener("key-refused", () => askForKey(key.get()
  ? "The server did not take this key. Check it, and try again."
  : "This server asks for a key. It is kept in this tab only, and sent to this server only."));

// ---- a request as code

const codeDialog = byId("code-dialog");
let request = null;

function showCode() {
  const language = codeDialog.querySelector("[name=language]:checked").value;
  byId("code").textContent = code(language, request);
  byId("code-state").textContent = "";
}

async function copy() {
  await copyText(byId("code").textContent);
  byId("code-state").textContent = "Copied.";
}

byId("copy-as").addEventListener("click", () => {
  request = playground.request();
  showCode();
  codeDialog.showModal();
});
codeDialog.addEventListener("change", showCode);
byId("code-copy").addEventListener("click", copy);
byId("code-close").addEventListener("click", () => codeDialog.close());

// ---- what is served

function fillDrafts(select, most, first) {
  const option = (value, text) => make("option", { value }, text);
  const chosen = select.value;
  select.replaceChildren(option("", first),
    ...Array.from({ length: most }, (_, i) => option(String(i + 1), String(i + 1))));
  if (select.form.id === "ask") select.options[0].after(option("0", "None: decode plainly"));
  if ([...select.options].some((each) => each.value === chosen)) select.value = chosen;
}

async function learn() {
  let info;
  try {
    info = await getJSON("info");
    showProblem(byId("pair-problem"), null);
  } catch (error) {
    showProblem(byId("pair-problem"), error);
    return;
  }
  byId("model").textContent = info.model;
  document.title = `${info.model} – Outrider`;
  const most = info.engine?.speculation.num_speculative_tokens ?? 0;
  for (const form of ["ask", "race-form"]) fillDrafts(byId(form).drafts, most, "Server’s choice");
  pair.draw(info);
  playground.start(info);
  race.start(info);
}

addEventListener("hashchange", showView);
document.addEventListener("key-changed", learn);
document.addEventListener("server-state", ({ detail }) => {
  if (detail === "ready") learn(); // it may have come up, or back with another pair
});
setTheme(localStorage.getItem(THEME) ?? "system");
showView();
learn();
live.start();
