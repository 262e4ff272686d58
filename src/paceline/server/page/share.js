// A conversation as Markdown, for people. Knows no document.

const quote = (text) => text.replace(/^/gm, "> ");

function answerText({ name, text, reasoning }, isPair) {
  const parts = isPair ? [`### ${name}`] : [];
  if (reasoning) parts.push(`> **Thinking**\n>\n${quote(reasoning.trim())}`);
  return [...parts, text.trim()].join("\n\n");
}

/** @param kept as the browser keeps it: title, system, and turns */
export function markdownOf({ title, system, turns }, model) {
  const parts = [`# ${title}`, `Model: ${model}`];
  if (system.trim()) parts.push(`## System prompt\n\n${system.trim()}`);
  for (const { user, answer, other, verdict } of turns) {
    parts.push(`## You\n\n${user.trim()}`, "## Answer", answerText(answer, other));
    if (other) parts.push(answerText(other, true));
    if (verdict) parts.push(`*${verdict}*`);
  }
  return `${parts.join("\n\n")}\n`;
}

/** A name for its file, in letters and digits of any script. */
export const fileName = (title) =>
  `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 50) || "conversation"}.md`;
