// Small tools for the document and for what the browser remembers. Text goes in as text only:
// nothing in this page parses a string as markup.

export const $ = (id) => document.getElementById(id);

/** An element with properties (or attributes, for names with a dash and for SVG) and children. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

export function svg(tag, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
}

/** Put the caret into the prompt, except where that would call up a keyboard on the screen. */
export function focusPrompt() {
  if (!matchMedia("(pointer: coarse)").matches) $("prompt").focus();
}

/** Tell a screen reader, without moving the focus. */
export function announce(text) {
  $("announce").textContent = text;
}

export function remember(name, value, storage = localStorage) {
  try {
    storage.setItem(`paceline-${name}`, value);
  } catch {
    // Storage can be full or switched off; the page works without a memory.
  }
}

export function recall(name, storage = localStorage) {
  try {
    return storage.getItem(`paceline-${name}`);
  } catch {
    return null;
  }
}

/** Enter sends a form from its text area; with Shift it breaks the line. */
export function sendOnEnter(area) {
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    area.form.requestSubmit();
  });
}

/** A number with as many decimals as help: 0.012, 3.45, 67.8, 9,012. */
export function figure(value) {
  const size = Math.abs(value);
  const digits = size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 3;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}%`;

export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** A button that copies what `text()` gives, and says so. */
export function copyButton(text, label = "Copy") {
  const button = el("button", { type: "button", className: "action copy", "aria-label": label }, "Copy");
  button.onclick = async () => {
    const done = await copy(text());
    button.textContent = done ? "Copied" : "Not copied";
    announce(button.textContent);
    await pause(1500);
    button.textContent = "Copy";
  };
  return button;
}

/** Whether it worked: browsers give pages the clipboard only over HTTPS and on this machine. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = el("textarea", { className: "sr", value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

/** Give the user a file. */
export function download(text, name, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
