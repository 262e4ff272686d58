// Keyboard shortcuts, and the dialog that lists them. What a shortcut does is given.

import { $, el } from "./dom.js";

const COMMAND = /Mac|iPhone|iPad/.test(navigator.platform) ? "⌘" : "Ctrl";
const SHORTCUTS = [
  { text: "Send the message", keys: ["Enter"] },
  { text: "New line", keys: ["Shift", "Enter"] },
  { text: "Stop the answer", keys: ["Escape"], name: "stop" },
  { text: "Edit the last message (when the prompt is empty)", keys: ["ArrowUp"], name: "edit" },
  { text: "New chat", keys: [COMMAND, "Shift", "O"], name: "renew" },
  { text: "Search conversations", keys: [COMMAND, "K"], name: "search" },
  { text: "Show this list", keys: [COMMAND, "/"], name: "help" },
];
const SPELLED = { ArrowUp: "↑", Escape: "Esc" };

function isMeant({ keys }, event) {
  const key = keys.at(-1);
  if (event.key.toLowerCase() !== key.toLowerCase() || event.altKey) return false;
  if ((event.ctrlKey || event.metaKey) !== keys.includes(COMMAND)) return false;
  // Some keyboards have the slash above a digit.
  return key === "/" || event.shiftKey === keys.includes("Shift");
}

/** @param does { stop, edit, renew, search }: each returns false where the key means something else */
export function setUpKeys(does) {
  const all = { ...does, help: () => openDialog("help") };
  $("help-open").addEventListener("click", all.help);
  $("help-list").append(...SHORTCUTS.flatMap(({ text, keys }) => [
    el("dt", {}, text),
    el("dd", {}, ...keys.flatMap((key) => [" ", el("kbd", {}, SPELLED[key] ?? key)])),
  ]));
  document.addEventListener("keydown", (event) => {
    if (event.isComposing || document.querySelector("dialog[open]")) return;
    const { name } = SHORTCUTS.find((one) => one.name && isMeant(one, event)) ?? {};
    if (name && all[name](event) !== false) event.preventDefault();
  });
}

/** Show a dialog until its button, Escape or a click beside it closes it. */
export function openDialog(id) {
  const dialog = $(id);
  dialog.querySelector(".close").onclick = () => dialog.close();
  dialog.onclick = ({ target }) => target === dialog && dialog.close();
  dialog.showModal();
}
