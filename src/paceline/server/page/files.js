// Text files that are put into a prompt: dropped, pasted or chosen. Knows no conversation.

import { $, announce, focusPrompt } from "./dom.js";

const MAX_FILES = 10; // at once
const MAX_KILOBYTES = 256; // of each; few contexts hold more
const HEAD_BYTES = 4096; // which tell what a file is
const TEXTS = "You can add text files such as plain text, Markdown, CSV, JSON, or source code.";

class Unusable extends Error {}

/** Raises Unusable, which says what is wrong with the file and what can be done instead. */
async function textOf(file) {
  const { name, size } = file;
  const head = await bytesOf(file.slice(0, HEAD_BYTES), name);
  const encoding = encodingOf(head);
  const problem = encoding ? "" : problemOf(file, head);
  if (problem) throw new Unusable(`${name} ${problem}`);
  if (size > MAX_KILOBYTES * 1000) {
    throw new Unusable(`${name} is ${Math.ceil(size / 1000)} kB; the limit is ${MAX_KILOBYTES} kB per file.`);
  }
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(await bytesOf(file, name));
    return text.replaceAll("\r\n", "\n");
  } catch (error) {
    if (error instanceof Unusable) throw error;
    throw new Unusable(`${name} is not encoded as UTF-8. Save it as UTF-8 and add it again.`);
  }
}

async function bytesOf(blob, name) {
  try {
    return new Uint8Array(await blob.arrayBuffer());
  } catch {
    throw new Unusable(`${name} cannot be read. If it is a folder, add its files instead.`);
  }
}

/** The encoding of a text by its first bytes; "" where they are no text. */
function encodingOf(head) {
  if (head[0] === 0xff && head[1] === 0xfe) return "utf-16le";
  if (head[0] === 0xfe && head[1] === 0xff) return "utf-16be";
  const isText = !startsWith(head, "%PDF-") && !head.some((byte) => byte < 9 || (byte > 13 && byte < 27));
  return isText ? "utf-8" : "";
}

const startsWith = (bytes, text) => [...text].every((letter, place) => bytes[place] === letter.charCodeAt(0));

/** What to say of a file that is no text, after its name. */
function problemOf({ name, type }, head) {
  if (type.startsWith("image/")) {
    return "is an image, and the model reads text only. Describe the image, or paste the text in it.";
  }
  if (startsWith(head, "%PDF-")) {
    return "is a PDF, which this page cannot read. Open it, copy the text that matters, and paste it here.";
  }
  if (/\.(docx?|odt|pptx?|odp|xlsx?|ods|pages|epub)$/i.test(name)) {
    return "is an office document. Export it as plain text or CSV and add that, or paste its text here.";
  }
  return `is not text. ${TEXTS}`;
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
    if (files.length > MAX_FILES) throw new Unusable(`You can add at most ${MAX_FILES} files at once.`);
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
