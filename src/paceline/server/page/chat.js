// The conversation: its turns, the composer, and answers beside each other.

import { ApiFailure, getJson, watchServer } from "./api.js";
import { armOf, compareOn } from "./compare.js";
import { $, announce, download, el, focusPrompt, recall, remember, sendOnEnter } from "./dom.js";
import { setUpFiles } from "./files.js";
import { generate, model } from "./generate.js";
import { changed as noteChange, fresh, keptAnswers, keptOf, setUpHistory, showDrawer, titleOf } from "./history.js";
import { fillLegend } from "./origins.js";
import { repetition, whySame } from "./repeats.js";
import { fields, mode, sampling, setUpSettings } from "./settings.js";
import { fileName, markdownOf } from "./share.js";
import { Tally } from "./tally.js";
import { Turn } from "./turn.js";

const EXAMPLES = {
  chat: ["Give me three tips for learning a language.", "Explain binary search with an example."],
  completion: [
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(",
    "Once upon a time there was a little",
  ],
};
const NOTES = {
  chat: "Messages are formatted with the model's chat template.",
  completion: "The model continues the text as it is, without a chat template.",
  fallback: "This model has no chat template, so it continues the text as it is.",
};
const PLACEHOLDERS = { chat: "Write a message…", completion: "Write the beginning of a text…" };

let turns = [];
let conversation = fresh(); // as it is kept
let running = null; // the AbortController of the answer that streams
let follows = true; // whether the reader is at the end of the conversation
let comparisons = 0; // the arm that begins alternates
let isDrawn = true; // whether the settings' view of answers is what is shown

export function setUpChat() {
  setUpSettings(showMode);
  setUpHistory(openConversation, () => conversation.id);
  addEventListener("renamed", ({ detail }) => Object.assign(conversation, { title: detail }));
  $("composer").addEventListener("submit", submitted);
  sendOnEnter($("prompt"));
  $("stop").addEventListener("click", stopAnswer);
  for (const button of document.querySelectorAll(".new-chat")) button.addEventListener("click", newChat);
  $("save").addEventListener("click", saveFile);
  setUpFiles(() => mode() === "completion");
  for (const kind of ["wheel", "touchmove", "keydown"]) {
    $("transcript").addEventListener(kind, () => requestAnimationFrame(noteScroll));
  }
  // A page that is left in the middle of an answer is opened again with what had arrived.
  addEventListener("pagehide", () => running && keep());
  isDrawn = fields().rendered.checked;
  showMode();
  focusPrompt();
}

/** What depends on the server: the legend, the examples of its mode, and the colours of answers. */
export function modelLoaded() {
  if (!turns.length) openConversation(keptOf(recall("conversation", sessionStorage)) ?? conversation);
  fillLegend($("legend"));
  showMode();
}

export function stopAnswer() {
  running?.abort();
}

function showMode() {
  if (!model.hasTemplate) fields().mode.value = "completion";
  fields().mode[0].disabled = !model.hasTemplate;
  fields().speculation.disabled = fields().compare.checked;
  fields().system.disabled = mode() !== "chat";
  $("prompt").placeholder = PLACEHOLDERS[mode()];
  $("mode-note").textContent = NOTES[model.hasTemplate ? mode() : "fallback"];
  document.body.classList.toggle("uncoloured", !fields().colours.checked);
  $("legend").hidden = !fields().colours.checked;
  if (isDrawn !== fields().rendered.checked) {
    isDrawn = fields().rendered.checked;
    for (const { views } of turns) for (const view of views) view.show(viewKind());
  }
  const pick = ({ target }) => {
    $("prompt").value = target.textContent;
    focusPrompt();
  };
  const buttons = EXAMPLES[mode()].map((text) => el("button", { type: "button", onclick: pick }, text));
  $("examples").replaceChildren(...buttons);
  $("examples").classList.toggle("mono", mode() === "completion");
}

const viewKind = () => (fields().rendered.checked ? "rendered" : "tokens");

function submitted(event) {
  event.preventDefault();
  const text = $("prompt").value;
  if (!text.trim() || running || !$("settings").reportValidity()) return;
  $("prompt").value = "";
  ask(text);
}

// Conversations

export function newChat() {
  openConversation(fresh());
  showDrawer(false);
  focusPrompt();
}

function openConversation(opened) {
  if (running) keep(); // What has arrived.
  stopAnswer();
  dropFrom(0);
  conversation = opened;
  remember("conversation", opened.id, sessionStorage); // for this tab, when it is loaded again
  if (opened.turns.length) fields().system.value = opened.system;
  $("transcript").replaceChildren($("welcome"), ...opened.turns.map(restoredTurn));
  $("welcome").hidden = turns.length > 0;
  noteChange();
  followEnd(true);
}

function restoredTurn(kept) {
  const turn = new Turn(kept.user, DOES);
  turns.push(turn);
  turn.restore(kept, viewKind());
  return turn.node;
}

/** Shows the last message for editing; only from a prompt in which nothing is written. */
export function editLast({ target }) {
  const turn = turns.at(-1);
  if (target !== $("prompt") || target.value || running || !turn) return false;
  turn.edit();
}

/** Keep what was said so far. */
function keep() {
  conversation.system = fields().system.value;
  conversation.turns = turns.filter(({ answer }) => answer.text).map(({ data }) => data);
  if (conversation.turns.length) noteChange(fields().keep.checked ? conversation : null);
}

/** Give the user the conversation as a file of Markdown. */
function saveFile() {
  if (running) keep(); // What has arrived.
  const { turns: kept } = conversation;
  if (!kept.length) return announce("There is no answer to save yet.");
  const title = conversation.title || titleOf(kept[0].user);
  download(markdownOf({ ...conversation, title }, model.id), fileName(title), "text/markdown");
  announce("Saved.");
}

function dropFrom(place) {
  for (const turn of turns.splice(place)) turn.remove();
}

// Answers

const DOES = {
  regenerate: (turn) => askAgain(turn, turn.user),
  edit: askAgain,
  resume: (turn) => running || stream(turn, [turn.answer]),
};

/** Ask in place of a turn; those after it are gone then. */
function askAgain(turn, text) {
  if (running || !turns.includes(turn)) return;
  const former = text === turn.user ? turn.answer.text : null;
  dropFrom(turns.indexOf(turn));
  ask(text, former);
}

/** What is asked of the server for one answer. */
function jobFor(turn, view, speculation, seed, salt) {
  const before = turns.slice(0, turns.indexOf(turn)).filter(({ answer }) => answer.text);
  const messages = before.flatMap(({ user, answer }) => [
    { role: "user", content: user },
    { role: "assistant", content: answer.text },
  ]);
  messages.push({ role: "user", content: turn.user });
  if (view.text) messages.push({ role: "assistant", content: view.text });
  const system = fields().system.value.trim();
  if (system) messages.unshift({ role: "system", content: system });
  return { mode: mode(), messages, sampling: sampling(), seed, speculation, salt };
}

/** @param former the answer that the new one replaces, or null */
function ask(text, former = null) {
  const on = fields().speculation.checked;
  const names = fields().compare.checked
    ? ["Speculation on", "Speculation off"]
    : [on ? "Answer" : "Answer (speculation off)"];
  const turn = new Turn(text, DOES);
  turns.push(turn);
  const views = turn.open(names, viewKind());
  $("welcome").hidden = true;
  $("transcript").append(turn.node);
  followEnd(true);
  return stream(turn, views, former);
}

/** Fill views one after the other: new ones, or one that is continued. */
async function stream(turn, views, former = null) {
  const { signal } = (running = new AbortController());
  setBusy(true);
  const isPair = views.length > 1;
  // Both arms of a comparison get the same seed, and neither finds the other's prefix cached.
  const given = fields().seed.value;
  const seed = given || isPair ? Number(given || crypto.getRandomValues(new Uint32Array(1))[0]) : null;
  const plainFirst = isPair && comparisons++ % 2 === 1;
  const load = isPair ? await loadNow() : null;
  for (const view of plainFirst ? [...views].reverse() : views) {
    const on = isPair ? view === views[0] : fields().speculation.checked;
    const isNew = view.reason === null;
    if (!isNew) view.resume();
    const job = jobFor(turn, view, on, seed, isPair ? newSalt() : "");
    await answer(job, view, signal);
    if (isNew && !isPair) noteRepetition(job, turn, former);
  }
  if (isPair && !turn.isIncomparable) await compare(turn, { seed, load, plainFirst, signal });
  running = null;
  setBusy(false);
  if (turns.includes(turn)) keep();
  followEnd();
}

/** Say so where an answer repeats one that the server has seen, and why it may have to. */
function noteRepetition({ sampling: given, seed }, turn, former) {
  const { answer: view } = turn;
  const shown = turns.filter((other) => other !== turn).map(({ answer: { text } }) => text);
  const why = view.text && view.text === former ? whySame(given, model.card?.sampling, seed) : "";
  view.noteRepetition(repetition(view.text, [former ?? "", ...shown, ...keptAnswers()]), why);
}

const newSalt = () => crypto.getRandomValues(new Uint32Array(4)).join("-");

/** How busy the machine is, where the server says so. */
const loadNow = () => getJson("stats").then(({ load }) => load ?? null, () => null);

/** Say how the arms compare, after as many more rounds as that takes. */
async function compare(turn, { seed, load, plainFirst, signal }) {
  const unseen = { text: "", opened() {}, add() {} };
  const again = async (on) => {
    const view = { ...unseen, tally: new Tally() };
    await generate(jobFor(turn, view, on, seed, newSalt()), view, signal);
    return armOf(view.tally);
  };
  const [speculative, plain] = turn.views.map(({ tally }) => armOf(tally));
  let said = null;
  const tell = (found, goesOn) => turn.judge((said = found), goesOn);
  try {
    if (!plain || !speculative) throw new Error("nothing could be timed");
    await compareOn({ plain, speculative }, again, tell, load, plainFirst);
  } catch (error) {
    if (said) turn.judge(said, false);
    else turn.giveUp(error.message);
  }
}

/** Stream one answer into its view; failures end up in the view. */
async function answer(job, view, signal) {
  if (signal.aborted) return view.finish("abort");
  const changes = new MutationObserver(() => followEnd());
  changes.observe(view.node, { childList: true, subtree: true });
  announce("Answering");
  await settle(view, generate(job, view, signal));
  changes.disconnect();
  showMode();
}

/** Wait for a generation and show its end, good or bad, in its view; returns whether it was good. */
export async function settle(view, generation) {
  try {
    view.finish(await generation);
    announce(`Done: ${view.tally.tokens} tokens`);
    return true;
  } catch (error) {
    if (error.name === "AbortError") {
      view.finish("abort");
      announce("Stopped");
      return false;
    }
    view.fail(error instanceof ApiFailure ? error : new ApiFailure("failed", String(error)));
    if (["lost", "failed"].includes(view.failure.kind)) watchServer();
    return false;
  }
}

function setBusy(busy) {
  $("send").hidden = busy;
  $("stop").hidden = !busy;
}

function noteScroll() {
  const { scrollHeight, scrollTop, clientHeight } = $("transcript");
  follows = scrollHeight - scrollTop - clientHeight < 60;
}

/** Keep the end in view, unless the reader has scrolled away from it. */
function followEnd(force = false) {
  follows ||= force;
  if (follows) requestAnimationFrame(() => $("transcript").scrollTo(0, $("transcript").scrollHeight));
}
