// Numbers and texts for people, and a short way to make elements.

const whole = new Intl.NumberFormat("en");

export const count = (number) => whole.format(number);
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
export const percent = (ratio) => `${(100 * ratio).toFixed(ratio > 0 && ratio < 0.01 ? 1 : 0)} %`;
export const oneDigit = (number) => number.toFixed(number < 100 ? 1 : 0);

export function duration(seconds) {
  if (seconds < 0.0995) return `${(1000 * seconds).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  return `${seconds.toFixed(2)} s`;
}

export function bytes(number) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; number >= 1024 && unit < units.length - 1; unit++) number /= 1024;
  return `${number.toFixed(unit && number < 100 ? 1 : 0)} ${units[unit]}`;
}

/** A token as one sees it: white space is marked, a part of a character named. */
export function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "␣") || "∅";
}

/** An element: make("p", {className: "note"}, "text", child, …). */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

export function showProblem(element, error) {
  element.hidden = !error;
  element.textContent = error ? error.message : "";
}

/** Copy a text to the clipboard. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // only pages on this machine, or over HTTPS, may use the clipboard
    const area = make("textarea", { className: "unseen", value: text });
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
