// The view of one answer as it streams: coloured tokens or Markdown, its figures, how it ended, and
// what can be done with it.

import { costLine, guesses } from "./cost.js";
import { copyButton, el, figure } from "./dom.js";
import { markOf, originClass } from "./origins.js";
import { RenderedText } from "./rendered.js";
import { SPEED } from "./repeats.js";
import { Tally } from "./tally.js";

const FINISHED = {
  "": "The answer was interrupted.",
  stop: "",
  length: "Stopped at the token limit or the end of the context.",
  abort: "Stopped.",
  tool_calls: "The model wants to call a tool.",
  error: "The answer failed.",
};
const CAN_GO_ON = ["", "length", "abort"];

export class Answer {
  tally = new Tally();
  text = "";
  reasoning = "";
  reason = null;
  failure = null;
  repeats = ""; // an earlier answer, its drafts' source: "whole" or "part"
  #remark = "";
  #pieces = []; // of [origin, length], of neighbours with one origin together
  #channels = {};
  #figures = el("span", { className: "figures" }, "waiting…");
  #body = el("div", { "aria-live": "polite" });
  #end = el("div", { className: "end" });
  #rendered = new RenderedText();
  #isMarkdown = false;
  #view;
  #retry;
  #actions;
  #toggle = el("button", { type: "button", className: "action toggle", hidden: true });

  /** @param name heading of the answer
   * @param retry called by the button after a failure
   * @param view "rendered" for Markdown, "tokens" for the text token by token
   * @param actions of { label, name, run }: buttons under it; "resume" only where that makes sense
   */
  constructor(name, { retry = null, view = "tokens", actions = [] } = {}) {
    Object.assign(this, { name });
    this.#retry = retry;
    this.#view = view;
    this.#actions = actions;
    this.#toggle.onclick = () => this.show(this.#view === "tokens" ? "rendered" : "tokens");
    const head = el("header", {}, el("strong", {}, name), this.#figures);
    const properties = { className: "answer", "aria-label": name, "aria-busy": true };
    this.node = el("article", properties, head, this.#body, this.#end);
    this.add("content", []); // Room for the first line, so that it moves nothing.
    this.#body.append(this.#rendered.node);
  }

  /** The request is accepted: what a model merely continues is no Markdown. */
  opened({ mode, schema }) {
    this.#isMarkdown = mode === "chat" && !schema;
    this.node.classList.toggle("mono", !this.#isMarkdown);
    this.#toggle.hidden = !this.#isMarkdown;
    return this.show(this.#view);
  }

  /** Show the text as "rendered" Markdown or as "tokens". */
  async show(view) {
    this.#view = view;
    const isRendered = view === "rendered" && this.#isMarkdown;
    await this.#rendered.show(isRendered).catch(() => {}); // Without the libraries tokens serve.
    this.#channels.content.hidden = !this.#rendered.node.hidden;
    this.#toggle.textContent = isRendered ? "Show tokens" : "Show Markdown";
  }

  /** Text of a channel, "content" or "reasoning", in pieces of { id, text, origin }. */
  add(channel, pieces) {
    const target = (this.#channels[channel] ??= this.#open(channel));
    for (const { id, text, origin } of pieces) {
      const title = origin ? `${origin}${id === null ? "" : `, token ${id}`}` : "";
      const className = originClass(origin);
      target.append(el("span", { className, title, textContent: text }));
      if (channel === "content") this.#keep(text, origin, className);
      else this.reasoning += text;
    }
    if (this.tally.tokens) this.#showFigures();
  }

  #keep(text, origin, className) {
    this.text += text;
    this.#rendered.add(className, text);
    const last = this.#pieces.at(-1);
    if (last?.[0] === origin) last[1] += text.length;
    else this.#pieces.push([origin, text.length]);
  }

  #open(channel) {
    const node = el("div", { className: "text" });
    if (channel === "content") this.#body.append(node);
    else {
      const details = el("details", { open: true }, el("summary", {}, "Thinking"), node);
      this.#body.prepend(details);
    }
    return node;
  }

  #showFigures() {
    const { rate, acceptanceLength, tokens, firstAfter } = this.tally;
    const unknown = this.reason === null ? "…" : "–";
    const parts = [
      [rate === null ? unknown : figure(rate), this.repeats ? "tok/s, repeating" : "tok/s"],
      [acceptanceLength === null ? unknown : acceptanceLength.toFixed(2), "per step"],
      [figure(tokens), tokens === 1 ? "token" : "tokens"],
    ];
    if (firstAfter !== null) parts.push([figure(Math.round(firstAfter)), "ms to first token"]);
    this.#figures.replaceChildren(
      ...parts.map(([value, unit]) => el("span", {}, el("b", {}, value), ` ${unit}`)),
    );
  }

  finish(reason) {
    this.reason = reason;
    this.node.removeAttribute("aria-busy");
    this.#showEnd();
    if (!this.#rendered.node.hidden) this.#rendered.draw();
  }

  #showEnd() {
    if (this.tally.tokens) this.#showFigures();
    else this.#figures.textContent = "";
    const { reason, text, repeats } = this;
    const ended = reason || text ? (FINISHED[reason] ?? reason) : "";
    const remarks = [ended, this.#remark, repeats && SPEED[repeats]].filter(Boolean).join(" ");
    this.#end.replaceChildren(
      costLine(this.tally, markOf) ?? "",
      remarks ? el("span", { className: "remark" }, remarks) : "",
      this.#buttons(),
    );
  }

  /** It repeats an earlier answer, "whole" or in "part"; @param why it does, or "". */
  noteRepetition(repeats, why) {
    this.repeats = guesses(this.tally).length ? repeats : "";
    this.#remark = why;
    this.#showEnd();
  }

  #buttons() {
    const buttons = this.#actions
      .filter(({ name }) => name !== "resume" || (this.text && CAN_GO_ON.includes(this.reason)))
      .map(({ label, name, run }) =>
        el("button", { type: "button", className: `action ${name}`, onclick: run }, label));
    if (this.text) buttons.unshift(copyButton(() => this.text, "Copy the answer"));
    return el("div", { className: "actions" }, ...buttons, this.#toggle);
  }

  /** More text is to come after what is here. */
  resume() {
    this.reason = null;
    this.failure = null;
    this.node.setAttribute("aria-busy", true);
    this.node.querySelector(".failure")?.remove();
    this.#end.replaceChildren();
  }

  /** An ApiFailure, shown under what had arrived. */
  fail(failure) {
    this.finish("");
    this.failure = failure;
    const where = failure.param ? ` (field ${failure.param})` : "";
    const box = el("div", { className: "failure", role: "alert" },
      el("strong", {}, failure.title),
      el("p", {}, failure.message + where),
    );
    if (failure.advice) box.append(el("p", { className: "hint" }, failure.advice));
    if (this.#retry) box.append(el("button", { type: "button", onclick: this.#retry }, "Try again"));
    this.node.append(box);
  }

  /** What a conversation keeps of it. */
  get data() {
    const { name, text, reasoning, tally, repeats } = this;
    const reason = this.reason ?? "abort";
    return {
      name, text, reasoning, reason, repeats, isMarkdown: this.#isMarkdown,
      pieces: this.#pieces.map((piece) => [...piece]), tally: tally.data,
    };
  }

  /** Show an answer that was kept. */
  restore({ text, reasoning, reason, repeats, isMarkdown, pieces, tally }) {
    this.tally = Tally.from(tally);
    this.repeats = repeats;
    if (reasoning) this.add("reasoning", [{ id: null, text: reasoning, origin: "" }]);
    let place = 0;
    this.add("content", pieces.map(([origin, length]) => {
      place += length;
      return { id: null, text: text.slice(place - length, place), origin };
    }));
    this.finish(reason);
    return this.opened({ mode: isMarkdown ? "chat" : "completion" });
  }

  /** It leaves the document. */
  forget() {
    this.#rendered.forget();
  }
}
