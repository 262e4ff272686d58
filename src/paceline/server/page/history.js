// The list of conversations that this browser keeps: search, open, rename, delete, files.

import { $, announce, download, el, focusPrompt } from "./dom.js";
import { fileOf, newId, parseFile, search, Store } from "./store.js";

let store = null;
let open = null;
let current = () => "";

/** A conversation without a turn. */
export const fresh = () => ({ id: newId(), title: "", updated: 0, system: "", turns: [] });

/** @param openConversation shows one; @param currentId tells which is shown */
export function setUpHistory(openConversation, currentId) {
  store = new Store();
  open = openConversation;
  current = currentId;
  $("search").addEventListener("input", draw);
  $("history-toggle").addEventListener("click", () => showDrawer(!isOpen()));
  // A drawer covers its button; a press beside it closes it, and does nothing else.
  document.addEventListener("click", (event) => {
    if (!isOpen() || event.target.closest("#history, #history-toggle")) return;
    event.stopPropagation();
    event.preventDefault();
    showDrawer(false);
  }, true);
  $("export").addEventListener("click", () =>
    download(fileOf(store.all), "paceline-conversations.json", "application/json"));
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", importFile);
  addEventListener("storage", ({ key }) => {
    if (key !== null && !key.startsWith("paceline-conversation-")) return;
    store.load();
    draw();
  });
  draw();
}

const isOpen = () => $("history-toggle").getAttribute("aria-expanded") === "true";

/** The texts of all answers that are kept. */
export const keptAnswers = () => store.all.flatMap(({ turns }) => turns.map(({ answer }) => answer.text));

/** A conversation as it is kept; null where it is not. */
export const keptOf = (id) => store.get(id);

/** On narrow windows the list is a drawer. */
export function showDrawer(isShown) {
  $("history-toggle").setAttribute("aria-expanded", isShown);
  $("history").classList.toggle("open", isShown);
  if (isShown) $("new-chat").focus();
  else if ($("history").contains(document.activeElement)) $("history-toggle").focus();
}

export function searchConversations() {
  if (!$("search").checkVisibility()) showDrawer(true);
  $("search").select();
}

/** What is shown has changed; `kept` is stored, null stores nothing. */
export function changed(kept = null) {
  if (kept) {
    kept.title ||= titleOf(kept.turns[0].user);
    kept.updated = Date.now();
    if (!store.save(kept)) announceStatus("There is not enough space to save this conversation.");
  }
  draw();
}

export const titleOf = (text) => text.trim().replace(/\s+/g, " ").slice(0, 60);

function announceStatus(text) {
  $("history-status").textContent = text;
}

function draw() {
  const found = search(store.all, $("search").value);
  $("history-list").replaceChildren(...found.map(rowOf));
  const isEmpty = $("search").value ? "No conversations found." : "Conversations are saved only in this browser.";
  $("history-empty").textContent = found.length ? "" : isEmpty;
}

function rowOf(conversation) {
  const { id, title, updated } = conversation;
  const pick = el("button", { type: "button", className: "pick", title: new Date(updated).toLocaleString() }, title);
  if (id === current()) pick.setAttribute("aria-current", "true");
  pick.onclick = () => {
    open(store.get(id));
    showDrawer(false);
    focusPrompt();
  };
  const row = el("li", {}, pick);
  const rename = el("button", { type: "button", className: "action rename", "aria-label": `Rename: ${title}` }, "✎");
  rename.onclick = () => startRenaming(row, conversation);
  const remove = el("button", { type: "button" });
  remove.onclick = () => confirmDeletion(remove, conversation);
  remove.onblur = () => calm(remove, title);
  calm(remove, title);
  row.append(rename, remove);
  return row;
}

function startRenaming(row, conversation) {
  const field = el("input", { value: conversation.title, maxLength: 200, "aria-label": "New name" });
  const finish = (isKept) => {
    field.onblur = null;
    const title = field.value.trim();
    if (isKept && title && title !== conversation.title) rename(conversation.id, title);
    draw();
  };
  field.onkeydown = (event) => {
    if (!["Enter", "Escape"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    finish(event.key === "Enter");
  };
  // Later, since a field that is taken out of the document loses the focus meanwhile.
  field.onblur = () => setTimeout(() => field.onblur && finish(true));
  row.replaceChildren(field);
  field.select();
}

/** Renames what is stored; what is shown takes the name with its next change. */
function rename(id, title) {
  const kept = store.get(id); // It may have grown, or gone, since its row was drawn.
  if (kept) store.save({ ...kept, title });
  if (id === current()) dispatchEvent(new CustomEvent("renamed", { detail: title }));
}

/** The first press asks, the second one deletes. */
function confirmDeletion(button, { id, title }) {
  if (button.textContent === "Delete?") {
    if (id === current()) open(fresh()); // Before, since this keeps what has arrived of an answer.
    store.remove(id);
    announce(`Deleted: ${title}`);
    return draw();
  }
  button.textContent = "Delete?";
  button.classList.add("danger");
  button.setAttribute("aria-label", `Delete permanently: ${title}`);
}

/** A button that has not been pressed yet. */
function calm(button, title) {
  button.textContent = "✕";
  button.className = "action delete";
  button.setAttribute("aria-label", `Delete: ${title}`);
}

async function importFile() {
  const [file] = $("import-file").files;
  $("import-file").value = "";
  if (!file) return;
  try {
    const number = store.add(parseFile(await file.text()));
    announceStatus(`${number} ${number === 1 ? "conversation" : "conversations"} added.`);
  } catch (error) {
    announceStatus(`Nothing was added: ${error.message}.`);
  }
  draw();
}
