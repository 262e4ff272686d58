// Drafted tokens in rendered Markdown: ranges of text in their proposers' colours, which the
// browser draws over the nodes (CSS.highlights). Knows no parser; finds text in its source in order.

const FENCE = /^[\s>*+\-\d.)]*(`{3,}|~{3,})[^\n]*\n/;

/** Who drafted which characters of a text: [class, start, end], in order. */
export class Runs {
  list = [];
  length = 0;

  add(className, text) {
    const last = this.list.at(-1);
    const start = this.length;
    this.length += text.length;
    if (className) {
      if (last && last[0] === className && last[2] === start) last[2] = this.length;
      else this.list.push([className, start, this.length]);
    }
  }

  /** Runs that reach into [start, end). */
  between(start, end) {
    let low = 0;
    let high = this.list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.list[middle][2] <= start) low = middle + 1;
      else high = middle;
    }
    const found = [];
    for (; low < this.list.length && this.list[low][1] < end; low += 1) found.push(this.list[low]);
    return found;
  }
}

function layer(className) {
  if (!CSS.highlights.has(className)) CSS.highlights.set(className, new Highlight());
  return CSS.highlights.get(className);
}

const isSkipped = (node) => node.classList?.contains("code-head");

/** Text nodes of a block with their places in the source, as [node, offset, place, length]. */
function* placesOf(block, source) {
  let cursor = block.start;
  const find = (text) => {
    const place = source.indexOf(text, cursor);
    if (place < 0 || place + text.length > block.end) return -1;
    cursor = place + text.length;
    return place;
  };
  const walker = document.createTreeWalker(block.node, NodeFilter.SHOW_ALL, (node) =>
    isSkipped(node) || node.parentNode.source ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.source) find(node.source);
    if (node.nodeName === "PRE") cursor += FENCE.exec(source.slice(cursor, block.end))?.[0].length ?? 0;
    if (node.nodeType !== Node.TEXT_NODE) continue;
    let offset = 0;
    // Line by line: lists and quotes take the indentation of code away.
    for (const line of node.data.split("\n")) {
      const place = line ? find(line) : -1;
      if (place >= 0) yield [node, offset, place, line.length];
      offset += line.length + 1;
    }
  }
}

/** Mark what was drafted in a block, { start, end, node }, that shows a part of `source`. */
export function mark(block, source, runs) {
  if (!globalThis.CSS?.highlights) return;
  block.marks = [];
  for (const [node, offset, place, length] of placesOf(block, source)) {
    for (const [className, start, end] of runs.between(place, place + length)) {
      const range = new StaticRange({
        startContainer: node,
        startOffset: offset + Math.max(start - place, 0),
        endContainer: node,
        endOffset: offset + Math.min(end - place, length),
      });
      layer(className).add(range);
      block.marks.push([className, range]);
    }
  }
}

/** Forget the marks of a block that is shown no more. */
export function unmark(block) {
  for (const [className, range] of block.marks ?? []) layer(className).delete(range);
}
