// Tokens of one answer: which text each became, and their count. Knows no request and no view.

/** The token that ends a step is the target's own; the tokens before it were drafted. */
export const TARGET = "target";

/** Shares a stream's text among the tokens that it came from.
 *
 * A token's text can be held back, cut or never shown, so the two are matched as they come; text
 * that matches no token is nobody's.
 */
export class Splitter {
  #tokens = [];

  push(tokens) {
    this.#tokens.push(...tokens);
  }

  take(text) {
    const pieces = [];
    while (text && this.#tokens.length) {
      const token = this.#tokens[0];
      if (token.text && text.startsWith(token.text)) {
        pieces.push(this.#tokens.shift());
        text = text.slice(token.text.length);
      } else if (token.text && token.text.startsWith(text)) {
        pieces.push({ ...token, text });
        token.text = token.text.slice(text.length);
        text = "";
      } else {
        this.#tokens.shift();
      }
    }
    if (text) pieces.push({ id: null, text, origin: "" });
    return pieces;
  }
}

/** Tokens, steps and times of one stream, from which the ratios follow. Times in milliseconds. */
export class Tally {
  tokens = 0;
  steps = 0;
  origins = new Map();
  beganAt = null;
  firstAt = null;
  lastAt = null;
  #first = 0;
  #measured = null;
  #told = null;
  #before = 0;
  #kept = null;

  /** The request is being sent: the first, or one that continues what came. */
  begin(now = performance.now()) {
    this.#before = this.tokens;
    this.beganAt = now;
    this.firstAt = null;
    this.#measured = this.#told = null;
    this.#kept = null;
  }

  add(tokens, now = performance.now()) {
    if (!tokens.length) return;
    this.tokens += tokens.length;
    for (const { origin } of tokens) {
      this.origins.set(origin, (this.origins.get(origin) ?? 0) + 1);
      if (origin === TARGET) this.steps += 1;
    }
    if (this.firstAt === null) {
      this.firstAt = now;
      this.#first = this.tokens;
    }
    this.lastAt = now;
  }

  /** The server's own count, which replaces what was counted on the way. */
  close(usage) {
    if (!usage) return;
    this.tokens = this.#before + (usage.completion_tokens ?? this.tokens - this.#before);
    // Of an answer in parts the server has measured the last part only.
    if (!this.#before) this.#told = usage.metrics?.speculative_decoding ?? null;
    this.#measured = this.#told?.mean_acceptance_length ?? null;
  }

  /** Tokens per second after the first chunk; null while there is too little to tell. */
  get rate() {
    if (this.#kept !== null) return this.#kept;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return seconds > 0.1 ? (this.tokens - this.#first) / seconds : null;
  }

  /** Emitted tokens per step, the bonus token counted. */
  get acceptanceLength() {
    return this.#measured ?? (this.steps ? this.tokens / this.steps : null);
  }

  /** As the server counted them, where it did. */
  get serverSteps() {
    return this.#told?.num_steps ?? this.steps;
  }

  get drafted() {
    return this.#told?.num_draft_tokens ?? this.tokens - (this.origins.get(TARGET) ?? 0);
  }

  /** What a conversation keeps of it. */
  get data() {
    const { tokens, steps, rate, acceptanceLength } = this;
    return { tokens, steps, rate, acceptanceLength, origins: [...this.origins] };
  }

  static from({ tokens, steps, rate, acceptanceLength, origins }) {
    const tally = Object.assign(new Tally(), { tokens, steps, origins: new Map(origins) });
    tally.#measured = acceptanceLength;
    tally.#kept = rate;
    return tally;
  }

  get milliseconds() {
    return this.lastAt === null ? null : this.lastAt - this.beganAt;
  }

  get firstAfter() {
    return this.firstAt === null ? null : this.firstAt - this.beganAt;
  }
}
