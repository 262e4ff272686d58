// Who drafted a token, as a colour and an underline. Knows the model's proposers and no answer.

import { el } from "./dom.js";
import { model } from "./generate.js";
import { TARGET } from "./tally.js";

const NUM_STYLES = 5;
const seen = [];

/** The class of an origin: proposers in the server's order, then others as they appear. */
export function originClass(origin) {
  if (!origin || origin === TARGET) return "";
  if (!model.proposers.includes(origin) && !seen.includes(origin)) seen.push(origin);
  return `o${([...model.proposers, ...seen].indexOf(origin) % NUM_STYLES) + 1}`;
}

/** A proposer's name in its colour. */
export const markOf = (origin) =>
  el("span", { className: `mark ${originClass(origin)}` }, origin);

/** Keys of colours and underlines, for the proposers of this server. */
export function fillLegend(node) {
  if (!model.proposers.length) return node.replaceChildren("Speculation is off on this server.");
  const rest = el("span", {}, "unmarked text by the model itself");
  node.replaceChildren("Drafted by ", ...model.proposers.map(markOf), rest);
}
