// The view of one answer as it streams: coloured tokens, its figures, and how it ended.

import { el, figure, percent } from "./dom.js";
import { model, Tally, TARGET } from "./generate.js";
import { RenderedText } from "./rendered.js";

const NUM_STYLES = 5;
const seen = [];

/** The class of an origin: proposers in the server's order, then others as they appear. */
export function originClass(origin) {
  if (!origin || origin === TARGET) return "";
  if (!model.proposers.includes(origin) && !seen.includes(origin)) seen.push(origin);
  return `o${([...model.proposers, ...seen].indexOf(origin) % NUM_STYLES) + 1}`;
}

/** Keys of colours and underlines, for the proposers of this server. */
export function fillLegend(node) {
  const marks = model.proposers.map((name) =>
    el("span", { className: `mark ${originClass(name)}` }, name),
  );
  if (!marks.length) return node.replaceChildren("This server does not speculate.");
  node.replaceChildren("Drafted by ", ...marks, el("span", {}, "the rest by the model"));
}

const FINISHED = {
  stop: "",
  length: "Cut at the limit of tokens.",
  abort: "Stopped.",
  tool_calls: "The model asks for a tool.",
  error: "The answer failed.",
};

export class Answer {
  tally = new Tally();
  text = "";
  reason = null;
  failure = null;
  #channels = {};
  #figures = el("span", { className: "figures" }, "waiting");
  #body = el("div");
  #end = el("div", { className: "end" });
  #rendered = new RenderedText();
  #view;
  #retry;
  #toggle = el("button", { type: "button", className: "action toggle", hidden: true });

  /** @param name heading of the answer
   * @param retry called by the button after a failure
   * @param view "rendered" for Markdown, "tokens" for the text token by token
   */
  constructor(name, { retry = null, view = "tokens" } = {}) {
    this.#retry = retry;
    this.#view = view;
    this.#toggle.onclick = () => this.show(this.#view === "tokens" ? "rendered" : "tokens");
    const head = el("header", {}, el("strong", {}, name), this.#figures);
    const properties = { className: "answer", "aria-label": name, "aria-busy": true };
    this.node = el("article", properties, head, this.#body, this.#end);
    this.add("content", []); // Room for the first line, so that it moves nothing.
    this.#body.append(this.#rendered.node);
  }

  /** The request is accepted: what a model merely continues is no Markdown. */
  opened({ mode, schema }) {
    const isMarkdown = mode === "chat" && !schema;
    this.node.classList.toggle("mono", !isMarkdown);
    this.#toggle.hidden = !isMarkdown;
    return this.show(isMarkdown ? this.#view : "tokens");
  }

  /** Show the text as "rendered" Markdown or as "tokens". */
  async show(view) {
    this.#view = view;
    const isRendered = view === "rendered";
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
      if (channel !== "content") continue;
      this.text += text;
      this.#rendered.add(className, text);
    }
    if (this.tally.tokens) this.#showFigures();
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
      [rate === null ? unknown : figure(rate), "tok/s"],
      [acceptanceLength === null ? unknown : acceptanceLength.toFixed(2), "per step"],
      [figure(tokens), tokens === 1 ? "token" : "tokens"],
    ];
    if (firstAfter !== null) parts.push([figure(Math.round(firstAfter)), "ms to first"]);
    this.#figures.replaceChildren(
      ...parts.map(([value, unit]) => el("span", {}, el("b", {}, value), ` ${unit}`)),
    );
  }

  /** The share of tokens that were drafted, by proposer. */
  #shares() {
    const shares = [...this.tally.origins].filter(([origin]) => origin && origin !== TARGET);
    const counted = [...this.tally.origins.values()].reduce((sum, count) => sum + count, 0);
    return shares
      .sort((one, other) => other[1] - one[1])
      .map(([origin, count]) =>
        el("span", { className: "share" },
          el("span", { className: `mark ${originClass(origin)}` }, origin),
          ` ${percent(count / counted)}`),
      );
  }

  finish(reason) {
    this.reason = reason;
    this.node.removeAttribute("aria-busy");
    if (this.tally.tokens) this.#showFigures();
    else this.#figures.textContent = "";
    this.#end.append(...this.#shares());
    const remark = FINISHED[reason] ?? reason;
    if (remark) this.#end.append(el("span", { className: "remark" }, remark));
    this.#end.append(el("div", { className: "actions" }, this.#toggle));
    if (!this.#rendered.node.hidden) this.#rendered.draw();
  }

  /** An ApiFailure, shown under what had arrived. */
  fail(failure) {
    this.failure = failure;
    this.finish("");
    const where = failure.param ? ` (field ${failure.param})` : "";
    const box = el("div", { className: "failure", role: "alert" },
      el("strong", {}, failure.title),
      el("p", {}, failure.message + where),
    );
    if (failure.advice) box.append(el("p", { className: "hint" }, failure.advice));
    if (this.#retry) box.append(el("button", { type: "button", onclick: this.#retry }, "Try again"));
    this.node.append(box);
  }
}
