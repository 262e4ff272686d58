// Conversations in the browser's storage: bounded, and valid whatever a file or the storage holds.
// Knows no document. The oldest go when there are too many, or when they take too much room.

const PREFIX = "paceline-conversation-";
export const FORMAT = "paceline-conversations";
const VERSIONS = [1, 2, 3]; // since 2 with both answers of a comparison, since 3 with repetitions
const MAX_CONVERSATIONS = 200;
const MAX_CHARACTERS = 4_000_000; // browsers allow about 5 million
const MAX_FILE_BYTES = 20_000_000;
const MAX_TEXT = 2_000_000;
const MAX_LIST = 20_000;
const REASONS = ["", "stop", "length", "abort", "tool_calls", "error"];

export class InvalidFile extends Error {}

// What a value has to be: each check returns the value or raises InvalidFile.

function fail(where, wanted) {
  throw new InvalidFile(`${where} is not ${wanted}`);
}

const text = (max) => (value, where) =>
  typeof value === "string" && value.length <= max ? value : fail(where, `a text of at most ${max} characters`);
const count = (value, where) => (Number.isFinite(value) && value >= 0 ? value : fail(where, "a number from 0 on"));
const orNull = (check) => (value, where) => (value === null ? null : check(value, where));
const added = (check, before) => (value, where) => (value === undefined ? before : check(value, where));
const oneOf = (allowed) => (value, where) =>
  allowed.includes(value) ? value : fail(where, `one of ${JSON.stringify(allowed)}`);
const list = (check) => (value, where) =>
  Array.isArray(value) && value.length <= MAX_LIST
    ? value.map((item, place) => check(item, `${where}[${place}]`))
    : fail(where, `a list of at most ${MAX_LIST} items`);

const object = (checks) => (value, where) => {
  if (value === null || typeof value !== "object" || Array.isArray(value)) fail(where, "an object");
  const unknown = Object.keys(value).find((name) => !Object.hasOwn(checks, name));
  if (unknown !== undefined) fail(`${where}.${unknown}`, `a field; there are ${Object.keys(checks).join(", ")}`);
  return Object.fromEntries(
    Object.entries(checks).map(([name, check]) => [name, check(value[name], `${where}.${name}`)]),
  );
};
const named = (value, where) => {
  if (!Array.isArray(value) || value.length !== 2) fail(where, "a name and a number");
  return [text(100)(value[0], `${where}[0]`), count(value[1], `${where}[1]`)];
};

const tally = object({
  tokens: count, steps: count, rate: orNull(count), acceptanceLength: orNull(count), origins: list(named),
});
const answer = object({
  name: text(100), text: text(MAX_TEXT), reasoning: text(MAX_TEXT), reason: oneOf(REASONS),
  repeats: added(oneOf(["", "part", "whole"]), ""), isMarkdown: oneOf([true, false]), pieces: list(named), tally,
});
const turn = object({
  user: text(MAX_TEXT), answer, other: added(orNull(answer), null), verdict: added(text(500), ""),
});
const conversation = object({
  id: (value, where) => (/^[\w-]{1,64}$/.test(value) ? value : fail(where, "an id")),
  title: text(200), updated: count, system: text(MAX_TEXT), turns: list(turn),
});

/** The conversations of a file's text. Raises InvalidFile, which says what is wrong and where. */
export function parseFile(source) {
  if (source.length > MAX_FILE_BYTES) fail("the file", "one of at most 20 MB");
  let document;
  try {
    document = JSON.parse(source);
  } catch (error) {
    fail("the file", `JSON: ${error.message}`);
  }
  const checks = { format: oneOf([FORMAT]), version: oneOf(VERSIONS), conversations: list(conversation) };
  return object(checks)(document, "the file").conversations;
}

export const fileOf = (conversations) =>
  JSON.stringify({ format: FORMAT, version: VERSIONS.at(-1), conversations }, null, 1);

export const newId = () => [...crypto.getRandomValues(new Uint32Array(3))].map((n) => n.toString(36)).join("-");

export class Store {
  #storage;
  #texts = new Map(); // by id, what the storage holds

  constructor(storage = localStorage) {
    this.#storage = storage;
    this.load();
  }

  /** Read everything again, as after a change in another tab. */
  load() {
    this.#texts.clear();
    try {
      for (const key of Object.keys(this.#storage)) {
        if (key.startsWith(PREFIX)) this.#texts.set(key.slice(PREFIX.length), this.#storage.getItem(key));
      }
    } catch {
      // Storage can be switched off; the page works without a memory.
    }
  }

  /** All that are valid, the latest first. */
  get all() {
    const found = [...this.#texts.keys()].map((id) => this.get(id)).filter(Boolean);
    return found.sort((one, other) => other.updated - one.updated);
  }

  get(id) {
    try {
      return conversation(JSON.parse(this.#texts.get(id)), "conversation");
    } catch {
      return null; // Of another version, perhaps: left alone until room is needed.
    }
  }

  /** Keep a conversation, at the cost of the oldest others; returns whether there was room. */
  save(kept) {
    const source = JSON.stringify(kept);
    if (source.length > MAX_CHARACTERS) return false;
    this.#texts.delete(kept.id);
    const others = this.all;
    const size = () => [...this.#texts.values()].reduce((sum, { length }) => sum + length, source.length);
    while (others.length && (this.#texts.size >= MAX_CONVERSATIONS || size() > MAX_CHARACTERS)) {
      this.remove(others.pop().id);
    }
    while (!this.#write(kept.id, source)) {
      if (!others.length) return false;
      this.remove(others.pop().id);
    }
    return true;
  }

  #write(id, source) {
    try {
      this.#storage.setItem(PREFIX + id, source);
      this.#texts.set(id, source);
      return true;
    } catch {
      return false;
    }
  }

  remove(id) {
    this.#texts.delete(id);
    try {
      this.#storage.removeItem(PREFIX + id);
    } catch {
      // Switched off: there was nothing.
    }
  }

  /** Add conversations of a file: those that are here already are not doubled; returns how many. */
  add(conversations) {
    const fresh = conversations.filter((one) => JSON.stringify(this.get(one.id)) !== JSON.stringify(one));
    const saved = fresh.map((one) => this.save(this.#texts.has(one.id) ? { ...one, id: newId() } : one));
    return saved.filter(Boolean).length;
  }
}

/** Those in which every word is found, in the title or in what was said. */
export function search(conversations, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  return conversations.filter(({ title, turns }) => {
    const said = [title, ...turns.flatMap(({ user, answer: { text: given } }) => [user, given])];
    const all = said.join("\n").toLowerCase();
    return words.every((word) => all.includes(word));
  });
}
