// An answer's text as Markdown while it grows: drawn at most once per frame, and seldom enough that
// the page leaves most of the time to others. Knows nothing of the stream.

import { pause } from "./dom.js";
import { loadMarkdown, Rendering } from "./markdown.js";
import { mark, Runs, unmark } from "./marks.js";

const REST = 3; // times as long as drawing took last
const FRAME_MS = 16;

export class RenderedText {
  #rendering = new Rendering();
  #runs = new Runs();
  #source = "";
  #isDue = false;
  #isShown = false;
  #cost = 0;
  node = this.#rendering.node;
  draws = 0;

  constructor() {
    this.node.hidden = true;
  }

  /** More text, in the class of who drafted it. */
  add(className, text) {
    this.#runs.add(className, text);
    this.#source += text;
    this.#schedule();
  }

  /** Show it or not; resolves when it is drawn. Raises TypeError where the libraries do not load. */
  async show(isShown) {
    this.#isShown = isShown;
    if (isShown) await this.draw();
    this.node.hidden = !this.#isShown;
  }

  async #schedule() {
    if (this.#isDue || this.node.hidden) return;
    this.#isDue = true;
    if (this.#cost * REST > FRAME_MS) await pause(this.#cost * REST);
    requestAnimationFrame(() => {
      this.#isDue = false;
      this.draw();
    });
  }

  /** Bring the document up to the text. */
  async draw() {
    await loadMarkdown();
    const began = performance.now();
    const { made, gone } = this.#rendering.update(this.#source);
    gone.forEach(unmark);
    for (const block of made) mark(block, this.#source, this.#runs);
    this.draws += 1;
    this.#cost = performance.now() - began;
  }

  /** The marks of an answer that leaves the document. */
  forget() {
    this.#rendering.blocks.forEach(unmark);
  }
}
