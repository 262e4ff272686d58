// Text files that are put into a prompt: dropped, pasted or chosen. Knows no conversation.

import { $, announce, focusPrompt } from "./dom.js";

const MAX_FILES = 10; // at once
const MAX_KILOBYTES = 256; // of each; few contexts hold more

class Unusable extends Error {}

/** Raises Unusable, which says what is wrong with the file and what is allowed. */
async function textOf(file) {
  if (file.size > MAX_KILOBYTES * 1000) {
    const size = Math.ceil(file.size / 1000);
    throw new Unusable(`${file.name} has ${size} kB; a file may have at most ${MAX_KILOBYTES} kB.`);
  }
  let text = "\0";
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    // A folder, or other bytes than UTF-8: told below.
  }
  if (text.includes("\0")) throw new Unusable(`${file.name} is not a text file in UTF-8.`);
  return text.replaceAll("\r\n", "\n");
}

/** The text under the file's name, between fences that it does not contain. */
function quoted(name, text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map(({ length }) => length));
  const fence = "`".repeat(longest + 1);
  const language = name.match(/\.(\w+)$/)?.[1] ?? "";
  return `${name}:\n\n${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}\n`;
}

/** Append files to the prompt, or none of them and the reason. */
async function add(files, isVerbatim) {
  const show = (problem) => {
    $("attach-problem").textContent = problem;
    $("attach-problem").hidden = !problem;
  };
  try {
    if (files.length > MAX_FILES) throw new Unusable(`At most ${MAX_FILES} files can be added at once.`);
    const texts = await Promise.all(files.map(textOf));
    const parts = isVerbatim ? texts : texts.map((text, place) => quoted(files[place].name, text));
    const before = $("prompt").value;
    $("prompt").value = [...(before.trim() ? [before.replace(/\n*$/, "\n")] : []), ...parts].join("\n");
    show("");
    announce(`Added: ${files.map(({ name }) => name).join(", ")}`);
  } catch (error) {
    if (!(error instanceof Unusable)) throw error;
    show(error.message);
  }
  focusPrompt();
}

/** @param isVerbatim tells whether texts are put in as they are, as for a completion */
export function setUpFiles(isVerbatim) {
  const take = (files) => files?.length && !$("chat").hidden && add([...files], isVerbatim());
  $("attach").addEventListener("click", () => $("attach-file").click());
  $("attach-file").addEventListener("change", async ({ target }) => {
    await take(target.files);
    target.value = "";
  });
  $("prompt").addEventListener("paste", (event) => {
    if (take(event.clipboardData.files)) event.preventDefault();
  });
  // Wherever a file is dropped: the browser would leave the page for it.
  const isFile = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
  const mark = (isOver) => $("composer").classList.toggle("dropping", isOver);
  addEventListener("dragover", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    mark(true);
  });
  addEventListener("dragleave", ({ relatedTarget }) => relatedTarget || mark(false));
  addEventListener("drop", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    mark(false);
    take(event.dataTransfer.files);
  });
}
