// Markdown as nodes of the document, built one by one from a parser's tokens: no string is ever
// parsed as markup, HTML in an answer is text, and nothing is fetched. Knows no answer.

import { copyButton, el } from "./dom.js";
import { addMath, mathNode } from "./math.js";

const TAGS = new Set(
  "p ul ol li blockquote table thead tbody tr th td em strong s hr".split(" "),
);
const LINK = /^(https?:\/\/|mailto:)/i;
const MAX_NESTING = 40;
const MAX_HIGHLIGHTED = 30_000; // characters of a code block
let loading = null;
let libraries = null;

/** The libraries, which only an answer needs; resolves at once when they are here. */
export function loadMarkdown() {
  loading ??= import("./vendor/libraries.js").then(({ MarkdownIt, hljs, temml }) => {
    const parser = new MarkdownIt({ html: false, linkify: true, breaks: true, maxNesting: MAX_NESTING });
    parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
    parser.validateLink = (url) => LINK.test(url.trim());
    addMath(parser);
    libraries = { parser, hljs, temml };
  });
  return loading;
}

/** A document that grows: only blocks whose source has changed are made again. */
export class Rendering {
  node = el("div", { className: "markdown" });
  blocks = []; // of { key, start, end, node }
  #references = "";

  /** Show `source`; returns the blocks that are new, as { start, end, node }, and those gone. */
  update(source) {
    const env = {};
    const tokens = libraries.parser.parse(source, env);
    const wanted = blocksOf(tokens, source);
    const references = JSON.stringify(env.references ?? {});
    let same = 0;
    if (references === this.#references) {
      while (same < wanted.length && wanted[same].key === this.blocks[same]?.key) same += 1;
    }
    this.#references = references;
    const gone = this.blocks.splice(same);
    for (const { node } of gone) node.remove();
    const made = wanted.slice(same).map((block) => ({ ...block, node: nodesOf(block.tokens) }));
    this.node.append(...made.map(({ node }) => node));
    this.blocks.push(...made);
    return { made, gone };
  }
}

/** The top level's tokens in groups, each with its range of the source. */
function blocksOf(tokens, source) {
  // The parser leaves out what is nested deeper: such a text is shown as it stands.
  if (tokens.some(({ level }) => level >= MAX_NESTING - 1)) {
    const plain = { type: "plain", nesting: 0, content: source };
    return [{ key: source, start: 0, end: source.length, tokens: [plain] }];
  }
  const starts = [0];
  for (let at = source.indexOf("\n"); at >= 0; at = source.indexOf("\n", at + 1)) starts.push(at + 1);
  const blocks = [];
  let first = 0;
  tokens.forEach((token, place) => {
    if (token.level > 0 || token.nesting > 0) return;
    const [from, to] = tokens[first].map;
    const start = starts[from];
    const end = starts[to] ?? source.length;
    const key = `${tokens[first].type} ${start} ${source.slice(start, end).trimEnd()}`;
    blocks.push({ key, start, end, tokens: tokens.slice(first, place + 1) });
    first = place + 1;
  });
  return blocks;
}

/** One element with everything that a block's tokens say. */
function nodesOf(tokens) {
  const root = el("div", { className: "block" });
  const open = [root];
  for (const token of tokens) addToken(open, token);
  return root;
}

/** Adds a token to the innermost open element; `open` is the stack of them. */
function addToken(open, token) {
  const here = open.at(-1);
  if (token.type === "inline") token.children.forEach((child) => addToken(open, child));
  else if (token.nesting < 0) open.pop();
  else if (token.nesting > 0) {
    const node = elementOf(token);
    here.append(token.tag === "table" ? el("div", { className: "wide", tabIndex: 0 }, node) : node);
    open.push(node);
  } else here.append(...leafOf(token));
}

function elementOf(token) {
  // Lists that are tight have no paragraphs of their own.
  if (token.hidden) return el("span");
  if (token.type === "link_open") return linkTo(token.attrGet("href"));
  const heading = token.type === "heading_open" && Number(token.tag.slice(1));
  // The page has headings above those of an answer.
  if (heading) return el(`h${Math.min(heading + 2, 6)}`, { className: `h${heading}` });
  const node = el(TAGS.has(token.tag) ? token.tag : "span");
  const start = Number(token.attrGet("start"));
  if (token.tag === "ol" && start > 1) node.start = start;
  const side = /text-align:(right|center)/.exec(token.attrGet("style") ?? "")?.[1];
  if (side) node.className = side;
  return node;
}

function leafOf(token) {
  switch (token.type) {
    case "softbreak":
    case "hardbreak": return [el("br")];
    case "hr": return [el("hr")];
    case "code_inline": return [el("code", {}, token.content)];
    case "fence":
    case "code_block": return [codeBlock(token.content, token.info.trim().split(/\s/)[0])];
    case "math": return [formula(token)];
    case "image": return [imageLink(token)];
    case "plain": return [el("p", { className: "plain" }, token.content)];
    default: return [token.content];
  }
}

function linkTo(url, ...children) {
  if (!LINK.test(url ?? "")) return el("span", {}, ...children);
  return el("a", { href: url, rel: "noopener noreferrer", target: "_blank" }, ...children);
}

/** An image is named, never fetched: fetching tells its server who reads this. */
function imageLink(token) {
  return linkTo(token.attrGet("src"), token.content || "image");
}

function formula({ content, meta }) {
  const node = mathNode(libraries.temml, content, meta.display);
  const shown = node ?? el("code", {}, meta.source);
  const properties = meta.display ? { className: "formula wide", tabIndex: 0 } : { className: "formula" };
  return Object.assign(el("span", properties, shown), { source: meta.source });
}

function codeBlock(code, language) {
  const text = el("code", {}, ...highlighted(code, language));
  return el("div", { className: "code-block" },
    el("div", { className: "code-head" },
      el("span", {}, language || "text"), copyButton(() => code, "Copy the code")),
    el("pre", { tabIndex: 0 }, text));
}

/** Code as strings and spans with the highlighter's classes. */
function highlighted(code, language) {
  const { hljs } = libraries;
  if (!hljs.getLanguage(language) || code.length > MAX_HIGHLIGHTED) return [code];
  const convert = (node) =>
    typeof node === "string"
      ? node
      : el("span", { className: scopeClass(node.scope) }, ...node.children.map(convert));
  const { _emitter: emitter } = hljs.highlight(code, { language, ignoreIllegals: true });
  return emitter.rootNode.children.map(convert);
}

const scopeClass = (scope) => (scope ? `hl-${scope.split(/[.:]/)[0]}` : "");
