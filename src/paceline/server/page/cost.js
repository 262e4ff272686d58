// What speculation saved in one answer, in words: tokens per step of the model, and who guessed them.

import { el, figure } from "./dom.js";
import { TARGET } from "./tally.js";

/** Guessed tokens by proposer, the most first: [[origin, tokens], ...]. */
export function guesses(tally) {
  return [...tally.origins]
    .filter(([origin]) => origin && origin !== TARGET)
    .sort((one, other) => other[1] - one[1]);
}

/** "3.1 tokens per step: 412 of 640 tokens were guessed by suffix", as nodes; `mark` makes a name. */
export function costLine(tally, mark) {
  const length = tally.acceptanceLength;
  if (!tally.tokens || length === null) return null;
  const found = guesses(tally);
  const total = found.reduce((sum, [, count]) => sum + count, 0);
  const pace = `${length.toFixed(1)} tokens per step`;
  if (!total) return el("span", { className: "cost" }, `${pace}: no tokens were guessed`);
  const of = `${figure(total)} of ${figure(tally.tokens)} tokens were guessed`;
  const who = found.flatMap(([origin, count], place) => [
    place === 0 ? " " : place === found.length - 1 ? " and " : ", ",
    found.length > 1 ? `${figure(count)} by ` : "by ",
    mark(origin),
  ]);
  return el("span", { className: "cost" }, `${pace}: ${of}${found.length > 1 ? "," : ""}`, ...who);
}
