// Formulae in Markdown: where they begin and end, and their MathML. Knows no document but what it
// makes. `$a$`, `$$a$$`, `\(a\)` and `\[a\]` are formulae; a price in dollars is not.

const PAIRS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];
const MAX_LENGTH = 4000;
const MAX_DEPTH = 60; // of elements: browsers lay out deep trees by recursion
const NAMESPACE = "http://www.w3.org/1998/Math/MathML";

/** The formula at `start`, as { body, end, display }, or null. */
function formulaAt(text, start) {
  const pair = PAIRS.find(([opening]) => text.startsWith(opening, start));
  if (!pair) return null;
  const [opening, closing, display] = pair;
  const from = start + opening.length;
  const to = closingAt(text, closing, from);
  const body = to < 0 ? "" : text.slice(from, to);
  if (!body.trim()) return null;
  // As in Pandoc: "$5 and $6" are prices.
  const end = to + closing.length;
  if (opening === "$" && (/^\s|\s$/.test(body) || /\d/.test(text[end] ?? ""))) return null;
  return { body, end, display };
}

/** Where a formula ends; a dollar sign after a backslash belongs to it. */
function closingAt(text, closing, from) {
  let place = text.indexOf(closing, from);
  while (closing[0] === "$" && place > 0 && text[place - 1] === "\\") {
    place = text.indexOf(closing, place + 1);
  }
  return place;
}

function inlineRule(state, silent) {
  const found = formulaAt(state.src, state.pos);
  if (!found) return false;
  if (!silent) {
    const token = state.push("math", "", 0);
    token.content = found.body;
    token.meta = { display: found.display, source: state.src.slice(state.pos, found.end) };
  }
  state.pos = found.end;
  return true;
}

/** Formulae of several lines, whatever their lines begin with. */
function blockRule(state, first, last, silent) {
  const text = state.getLines(first, last, state.blkIndent, false);
  if (!/^(\$\$|\\\[)/.test(text)) return false;
  const found = formulaAt(text, 0);
  if (!found || !/^[ \t]*(\n|$)/.test(text.slice(found.end))) return false;
  if (silent) return true;
  state.line = first + text.slice(0, found.end).split("\n").length;
  const token = state.push("math", "", 0);
  token.block = true;
  token.map = [first, state.line];
  token.content = found.body;
  token.meta = { display: true, source: text.slice(0, found.end) };
  return true;
}

/** Teaches a markdown-it parser formulae: tokens of type "math". */
export function addMath(parser) {
  parser.inline.ruler.before("escape", "math", inlineRule);
  const alt = ["paragraph", "reference", "blockquote", "list"];
  parser.block.ruler.before("fence", "math", blockRule, { alt });
}

function depthOf(root) {
  let depth = 0;
  for (let level = [root]; level.length; depth += 1) level = level.flatMap((node) => [...node.children]);
  return depth;
}

/** Only MathML stays, without anything that leads elsewhere or runs. */
function isHarmless(root) {
  return [root, ...root.querySelectorAll("*")].every((node) =>
    node.namespaceURI === NAMESPACE
    && node.getAttributeNames().every((name) => !/^on|href|^src$/i.test(name)));
}

/** The MathML of a formula, or null where there is none that is safe to show. */
export function mathNode(temml, body, display) {
  if (body.length > MAX_LENGTH) return null;
  const holder = document.createElement("span");
  try {
    const options = { displayMode: display, throwOnError: true, trust: false, maxExpand: 500 };
    temml.render(body, holder, options);
  } catch {
    return null; // Not a formula, or one that is not complete yet: its source is shown.
  }
  const node = holder.firstElementChild;
  return node && depthOf(node) <= MAX_DEPTH && isHarmless(node) ? node : null;
}
