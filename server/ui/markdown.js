// An answer as text: Markdown, with a button to copy each block of code.

import markdownIt from "./markdown-it.js";
import { copyText, make } from "./format.js";

// Raw HTML stays text, links open elsewhere, and images are not loaded: a model wrote this.
const markdown = markdownIt({ html: false, linkify: false, breaks: true }).disable("image");

/** Show Markdown in an element, in place of what it shows. */
export function showMarkdown(element, text) {
  element.innerHTML = markdown.render(text);
  for (const link of element.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const block of element.querySelectorAll("pre")) {
    const button = make("button", { type: "button", className: "quiet" }, "Copy");
    button.addEventListener("click", async () => {
      await copyText(block.textContent);
      button.textContent = "Copied";
    });
    const box = make("div", { className: "code" });
    block.replaceWith(box);
    block.tabIndex = 0; // so that a keyboard can scroll it
    box.append(button, block);
  }
}
