// How two arms compare: short answers are repeated out of sight, the arms by turns, until the server
// can say it. Knows no view.

import { request } from "./api.js";

const PATIENCE_MS = 20_000;
const MOST_ROUNDS = 12;

/** What an arm did, as the server takes it; null where it failed or was stopped. */
export function armOf({ milliseconds, serverSteps, drafted }) {
  if (!milliseconds || !serverSteps) return null;
  return { seconds: milliseconds / 1000, steps: serverSteps, drafted };
}

/** Measure on until the speed-up is certain or the time is up.
 *
 * @param first { plain, speculative } of the round that was seen, by its arms
 * @param again(isSpeculative) resolves to the arm of one more answer
 * @param tell(found, goesOn) is called with what can be said so far, of how many rounds
 * @param load of the machine before, or null
 * @param plainFirst whether the plain arm began the first round
 */
export async function compareOn(first, again, tell, load, plainFirst) {
  const rounds = [first];
  let spent = secondsOf(first);
  for (;;) {
    const body = load ? { rounds, load } : { rounds };
    const found = { ...(await (await request("speedup", { body })).json()), rounds: rounds.length };
    const isOver = (spent * (1 + 1 / rounds.length)) * 1000 > PATIENCE_MS;
    const goesOn = !found.is_certain && !isOver && rounds.length < MOST_ROUNDS;
    tell(found, goesOn);
    if (!goesOn) return;
    const begins = rounds.length % 2 ? plainFirst : !plainFirst; // is the speculative arm first?
    const arms = [await again(begins), await again(!begins)];
    const [speculative, plain] = begins ? arms : arms.reverse();
    if (!speculative || !plain) return tell(found, false);
    rounds.push({ plain, speculative });
    spent += secondsOf(rounds.at(-1));
  }
}

const secondsOf = ({ plain, speculative }) => plain.seconds + speculative.seconds;
