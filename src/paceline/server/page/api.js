// Calls to the server: the key, typed failures, server-sent events, and waiting for a server that
// has gone away. Knows no view but the banner and the dialog for the key.

import { $, pause, recall, remember } from "./dom.js";

// Relative to the page, so that it also works behind a proxy that adds a path; without
// credentials, which a page opened as http://user:key@host would otherwise hand on.
const BASE = location.origin + location.pathname.replace(/[^/]*$/, "");

const KEPT = "The text received so far is kept.";

/** What went wrong: `kind` is "refused", "busy", "failed", "lost" or "key". */
export class ApiFailure extends Error {
  constructor(kind, message, { status = 0, code = null, param = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { kind, status, code, param, retryAfter });
  }

  get title() {
    return {
      refused: "The request was refused",
      busy: "The server is busy",
      failed: "The server could not finish this answer",
      lost: "The connection was lost",
      key: "The key was not accepted",
    }[this.kind];
  }

  get advice() {
    if (this.kind === "busy") {
      return this.retryAfter ? `Try again in ${this.retryAfter} s.` : "Try again in a moment.";
    }
    return { failed: KEPT, lost: KEPT }[this.kind] ?? "";
  }
}

const lost = () => new ApiFailure("lost", "The server stopped responding.");

async function failureOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Not our error body: a proxy's page, perhaps.
  }
  const { status } = response;
  const kind =
    status === 401 ? "key" : status === 429 ? "busy" : status >= 500 ? "failed" : "refused";
  const message = error.message ?? `The server answered ${status} ${response.statusText}`.trim();
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  return new ApiFailure(kind, message, { ...error, status, retryAfter });
}

const recallKey = () => recall("key", sessionStorage);

async function send(path, { body, signal, key = recallKey() } = {}) {
  const headers = { "X-Paceline-Page": "1" };
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  try {
    return await fetch(BASE + path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw lost();
  }
}

/** A good response; asks for the key where the server wants one. Raises ApiFailure, AbortError. */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const key = recallKey();
    const response = await send(path, { body, signal, key });
    if (response.ok) return response;
    const failure = await failureOf(response);
    if (failure.kind !== "key") throw failure;
    // Another request may have asked for the key while this one was under way.
    if (key === recallKey() && !(await askKey(failure.message))) throw failure;
  }
}

export async function getJson(path) {
  return (await request(path)).json();
}

let asking = null;

/** Ask once, whoever asks; resolves to whether a key was given. */
function askKey(reason) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    let given = false;
    $("key-reason").textContent = reason;
    $("key").value = "";
    $("key-form").onsubmit = (event) => {
      event.preventDefault();
      remember("key", $("key").value.trim(), sessionStorage);
      given = true;
      dialog.close();
    };
    $("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => {
      asking = null;
      // Chromium gives the focus back to a field but not the caret; focusing again does.
      const { activeElement } = document;
      activeElement.blur();
      activeElement.focus();
      resolve(given);
    };
    dialog.showModal();
  });
  return asking;
}

/** The JSON documents of an event stream. Raises ApiFailure when it breaks off or reports one. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw lost();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        const document = JSON.parse(data);
        if (document.error) throw new ApiFailure("failed", document.error.message, document.error);
        yield document;
      }
    }
  } catch (error) {
    throw error instanceof TypeError ? lost() : error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

let watching = false;

/** After a failure: say so at the top of the page and wait until the server is ready again. */
export async function watchServer() {
  if (watching) return;
  watching = true;
  for (let wait = 500; !(await ready()); wait = Math.min(2 * wait, 8000)) await pause(wait);
  watching = false;
  if ($("banner").hidden) return;
  $("banner").textContent = "The server is back.";
  $("banner").classList.add("good");
  await pause(3000);
  if (!watching) $("banner").hidden = true;
}

async function ready() {
  try {
    const response = await send("health");
    if (response.ok) return true;
    showBanner("The engine is not ready; it may be restarting. Waiting for it…");
  } catch {
    showBanner("The server cannot be reached. Waiting for it to come back…");
  }
  return false;
}

function showBanner(text) {
  const banner = $("banner");
  if (banner.textContent !== text) banner.textContent = text;
  banner.classList.remove("good");
  banner.hidden = false;
}
