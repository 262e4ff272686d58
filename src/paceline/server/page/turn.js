// One turn of a conversation: what the user said, which can be edited, and the answers to it.
// Knows no server; what is to be done is told to the conversation by calls.

import { Answer } from "./answer.js";
import { copyButton, el, focusPrompt, sendOnEnter } from "./dom.js";

export class Turn {
  views = [];
  verdict = el("p", { className: "verdict", role: "status", hidden: true });
  #said = el("div", { className: "said" });
  #answers = el("div");
  #does;

  /** @param does { edit(turn, text), regenerate(turn), resume(turn) } */
  constructor(user, does) {
    this.user = user;
    this.#does = does;
    this.node = el("section", { className: "turn", "aria-label": "Turn" },
      this.#said, this.#answers, this.verdict);
    this.#showSaid();
  }

  /** The answer that later turns build on. */
  get answer() {
    return this.views[0];
  }

  /** Make room for answers with these headings; two are shown beside each other. */
  open(names, view) {
    const again = { label: "Regenerate", name: "again", run: () => this.#does.regenerate(this) };
    const resume = { label: "Continue", name: "resume", run: () => this.#does.resume(this) };
    this.views = names.map((name) => new Answer(name, {
      retry: again.run,
      view,
      actions: names.length > 1 ? [] : [again, resume],
    }));
    this.verdict.hidden = names.length < 2;
    this.#answers.className = names.length > 1 ? "pair" : "";
    this.#answers.replaceChildren(...this.views.map(({ node }) => node));
    return this.views;
  }

  /** What makes a comparison of the two answers pointless, which is said then; null where none. */
  get isIncomparable() {
    const problem = problemOf(...this.views);
    this.verdict.textContent = problem ?? "Measuring again…";
    return problem !== null;
  }

  /** Say how the arms compare: what the server made of their times in so many rounds. */
  judge({ speedup, sentence, rounds }, goesOn) {
    const over = `Over ${rounds} ${rounds === 1 ? "round" : "rounds"}: ${sentence}`;
    const told = speedup === null ? `Same text, and ${sentence}` : `Same text. ${over}`;
    this.verdict.textContent = `${told}.${goesOn ? " Measuring again…" : ""}`;
  }

  /** Say why there is no comparison. */
  giveUp(message) {
    this.verdict.textContent = `Cannot compare: ${message}.`;
  }

  /** What a conversation keeps of it. */
  get data() {
    const [answer, other] = this.views.map(({ data }) => data);
    const verdict = this.verdict.textContent.replace(/ ?Measuring again…$/, "");
    return { user: this.user, answer, other: other ?? null, verdict };
  }

  /** Show answers that were kept. */
  restore({ answer, other, verdict }, view) {
    const kept = other ? [answer, other] : [answer];
    this.open(kept.map(({ name }) => name), view).forEach((shown, place) => shown.restore(kept[place]));
    this.verdict.textContent = verdict;
  }

  remove() {
    for (const view of this.views) view.forget();
    this.node.remove();
  }

  #showSaid() {
    const edit = el("button", { type: "button", className: "action edit" }, "Edit");
    edit.onclick = () => this.edit();
    this.#said.replaceChildren(
      el("div", { className: "user", tabIndex: 0, role: "group", "aria-label": "You said" }, this.user),
      el("div", { className: "actions" }, copyButton(() => this.user, "Copy your message"), edit),
    );
  }

  /** Lets the user change the message; sending it drops the turns after it. */
  edit() {
    const area = el("textarea", { value: this.user, rows: 3, "aria-label": "Edit your message" });
    const cancel = el("button", { type: "button", className: "quiet" }, "Cancel");
    const send = el("button", { className: "primary" }, "Send again");
    const form = el("form", { className: "editor" }, area, el("div", { className: "row" }, cancel, send));
    const close = () => {
      this.#showSaid();
      focusPrompt();
    };
    cancel.onclick = close;
    form.onsubmit = (event) => {
      event.preventDefault();
      if (area.value.trim()) this.#does.edit(this, area.value);
    };
    form.onkeydown = (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close();
    };
    sendOnEnter(area);
    this.#said.replaceChildren(form);
    area.focus();
  }
}

/** Why two answers to the same prompt, the first with speculation, cannot be compared, or null. */
function problemOf(on, off) {
  if (on.failure || off.failure) return "Cannot compare: one of the answers failed.";
  if ([on, off].some(({ reason }) => reason === "abort")) return "Cannot compare: an answer was stopped.";
  if (on.text !== off.text) {
    let place = 0;
    while (on.text[place] === off.text[place]) place += 1;
    return `The texts differ from character ${place + 1} on.`;
  }
  return null;
}
