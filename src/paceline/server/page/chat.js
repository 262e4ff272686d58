// The conversation: what was said, the composer, the settings, and answers beside each other.

import { ApiFailure, watchServer } from "./api.js";
import { Answer, fillLegend } from "./answer.js";
import { $, announce, el, figure, recall, remember, sendOnEnter } from "./dom.js";
import { generate, model } from "./generate.js";

const EXAMPLES = {
  chat: ["Write a short poem about the wind.", "Explain binary search with an example."],
  completion: [
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(",
    "Once upon a time there was a little",
  ],
};
const NOTES = {
  chat: "Messages go through the model's chat template.",
  completion: "The text is continued as it stands.",
  fallback: "This model has no chat template: the text is continued as it stands.",
};
const CHOICES = ["mode", "temperature", "maxTokens", "seed"];
const SWITCHES = ["speculation", "compare", "colours", "rendered"];

let turns = []; // of { node, user, answer }: the answer is the one that later turns build on
let running = null; // the AbortController of the answer that streams
let follows = true; // whether the reader is at the end of the conversation

const fields = () => $("settings").elements;
const mode = () => fields().mode.value;

export function setUpChat() {
  const kept = JSON.parse(recall("settings") ?? "{}");
  for (const name of CHOICES) if (name in kept) fields()[name].value = kept[name];
  for (const name of SWITCHES) if (name in kept) fields()[name].checked = kept[name];
  $("settings").addEventListener("change", keepSettings);
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("composer").addEventListener("submit", submitted);
  sendOnEnter($("prompt"));
  $("stop").addEventListener("click", stopAnswer);
  $("new-chat").addEventListener("click", clear);
  $("settings-toggle").addEventListener("click", ({ target }) => {
    target.setAttribute("aria-expanded", target.getAttribute("aria-expanded") !== "true");
  });
  for (const kind of ["wheel", "touchmove", "keydown"]) {
    $("transcript").addEventListener(kind, () => requestAnimationFrame(noteScroll));
  }
  showMode();
}

/** What depends on the server: the legend, and the examples of its mode. */
export function modelLoaded() {
  fillLegend($("legend"));
  showMode();
}

export function stopAnswer() {
  running?.abort();
}

function keepSettings() {
  const kept = {};
  for (const name of CHOICES) kept[name] = fields()[name].value;
  for (const name of SWITCHES) kept[name] = fields()[name].checked;
  remember("settings", JSON.stringify(kept));
  showMode();
}

function showMode() {
  if (!model.hasTemplate) fields().mode.value = "completion";
  fields().mode[0].disabled = !model.hasTemplate;
  fields().speculation.disabled = fields().compare.checked;
  $("mode-note").textContent = NOTES[model.hasTemplate ? mode() : "fallback"];
  document.body.classList.toggle("uncoloured", !fields().colours.checked);
  const pick = ({ target }) => {
    $("prompt").value = target.textContent;
    $("prompt").focus();
  };
  const buttons = EXAMPLES[mode()].map((text) => el("button", { type: "button", onclick: pick }, text));
  $("examples").replaceChildren(...buttons);
  $("examples").classList.toggle("mono", mode() === "completion");
}

function submitted(event) {
  event.preventDefault();
  const text = $("prompt").value;
  if (!text.trim() || running || !$("settings").reportValidity()) return;
  $("prompt").value = "";
  ask(text);
}

function clear() {
  stopAnswer();
  turns = [];
  $("transcript").replaceChildren($("welcome"));
  $("welcome").hidden = false;
  $("prompt").focus();
}

// Answers

/** What is asked of the server for one answer. */
function jobFor(text, speculation, seed, salt) {
  const told = turns
    .filter(({ answer }) => answer.text)
    .flatMap(({ user, answer }) => [
      { role: "user", content: user },
      { role: "assistant", content: answer.text },
    ]);
  return {
    mode: mode(),
    messages: [...told, { role: "user", content: text }],
    temperature: fields().temperature.valueAsNumber,
    maxTokens: fields().maxTokens.valueAsNumber,
    seed,
    speculation,
    salt,
  };
}

async function ask(text) {
  const { signal } = (running = new AbortController());
  setBusy(true);
  const turn = { node: el("section", { className: "turn" }), user: text };
  const retry = () => {
    if (running) return;
    turn.node.remove();
    turns = turns.filter((other) => other !== turn);
    ask(text);
  };
  const isPair = fields().compare.checked;
  const on = fields().speculation.checked;
  const options = { retry, view: fields().rendered.checked ? "rendered" : "tokens" };
  const names = isPair
    ? ["Speculation on", "Speculation off"]
    : [on ? "Answer" : "Answer, speculation off"];
  const views = names.map((name) => new Answer(name, options));
  const verdict = el("p", { className: "verdict", role: "status", hidden: !isPair });
  turn.node.append(
    el("div", { className: "user" }, text),
    el("div", { className: isPair ? "pair" : "" }, ...views.map(({ node }) => node)),
    verdict,
  );
  $("welcome").hidden = true;
  $("transcript").append(turn.node);
  followEnd(true);

  // Both arms of a comparison get the same seed, and neither finds the other's prefix cached.
  const given = fields().seed.value;
  const seed = given || isPair ? Number(given || crypto.getRandomValues(new Uint32Array(1))[0]) : null;
  for (const view of views) {
    const salt = isPair ? crypto.getRandomValues(new Uint32Array(4)).join("-") : "";
    await answer(jobFor(text, isPair ? view === views[0] : on, seed, salt), view, signal);
  }
  if (isPair) verdict.textContent = compare(...views);
  turns.push(Object.assign(turn, { answer: views[0] }));
  running = null;
  setBusy(false);
  followEnd();
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

/** One sentence on two answers to the same prompt, the first with speculation. */
function compare(on, off) {
  if (on.failure || off.failure) return "No comparison: an answer failed.";
  if (off.reason === "abort") return "No comparison: stopped.";
  if (on.text !== off.text) {
    let place = 0;
    while (on.text[place] === off.text[place]) place += 1;
    return `The texts differ from character ${place + 1} on.`;
  }
  const [fast, plain] = [on, off].map(({ tally }) => tally.milliseconds / 1000);
  return `Same text, ${figure(plain / fast)}× the speed: ${figure(fast)} s against ${figure(plain)} s.`;
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
