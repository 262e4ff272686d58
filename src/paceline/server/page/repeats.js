// Whether an answer repeats an earlier one, from which it could be drafted. Knows no document.

/** How much of a text an earlier one begins with too: "whole", "part" for half or more, or "". */
export function repetition(text, earlier) {
  let most = 0;
  for (const other of earlier) {
    let same = 0;
    while (same < text.length && text[same] === other[same]) same += 1;
    most = Math.max(most, same);
  }
  if (!text || 2 * most < text.length) return "";
  return most === text.length ? "whole" : "part";
}

/** What is said of the speed of an answer that repeats another and was drafted from it. */
export const SPEED = {
  whole: "It was drafted from an earlier answer with the same text, so its speed is no guide to new text.",
  part: "Much of it was drafted from an earlier answer that begins the same way, so its speed is no guide to new text.",
};

/** Why a prompt that is asked again gets the same answer; "" where it need not.
 *
 * @param given what the request says of sampling
 * @param unstated the model's own values, for what it does not
 * @param seed of the request, or null
 */
export function whySame(given, unstated, seed) {
  const { temperature, top_k: topK } = { ...unstated, ...given };
  if (temperature === 0 || topK === 1) {
    return "Same answer as before: without randomness, the same prompt always gets the same answer. "
      + "Raise the temperature for a different one.";
  }
  if (seed === null) return "";
  return "Same answer as before: with a fixed seed, the same prompt always gets the same answer. "
    + "Clear the seed for a different one.";
}
