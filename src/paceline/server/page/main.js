// Starts the page: tabs, theme, what shortcuts do, and what the server says about its model.

import { watchServer } from "./api.js";
import { setUpCard } from "./card.js";
import { editLast, modelLoaded, newChat, setUpChat, stopAnswer } from "./chat.js";
import { $, remember } from "./dom.js";
import { loadModel, model } from "./generate.js";
import { searchConversations, showDrawer } from "./history.js";
import { setUpKeys } from "./keys.js";
import { showLive } from "./live.js";
import { loadMarkdown } from "./markdown.js";
import { setUpSchema, stopSchema } from "./schema.js";
import { showModelSampling } from "./settings.js";

const VIEWS = ["chat", "live", "schema"];

function show(view) {
  for (const name of VIEWS) {
    const tab = $(`tab-${name}`);
    tab.setAttribute("aria-selected", name === view);
    tab.tabIndex = name === view ? 0 : -1;
    $(name).hidden = name !== view;
  }
  if (view === "live") showLive();
}

function open(view) {
  history.replaceState(null, "", `#${view}`);
  show(view);
}

function setUpTabs() {
  VIEWS.forEach((name, place) => {
    const tab = $(`tab-${name}`);
    tab.addEventListener("click", () => open(name));
    tab.addEventListener("keydown", ({ key }) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
      if (!step) return;
      const next = VIEWS[(place + step + VIEWS.length) % VIEWS.length];
      open(next);
      $(`tab-${next}`).focus();
    });
  });
  const follow = () => show(VIEWS.find((name) => location.hash === `#${name}`) ?? "chat");
  addEventListener("hashchange", follow);
  document.addEventListener("visibilitychange", () => $("live").hidden || showLive());
  follow();
}

function setUpTheme() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const mark = () => $("theme").setAttribute("aria-pressed", isDark());
  $("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember("theme", root.dataset.theme);
    mark();
  });
  system.addEventListener("change", mark);
  mark();
}

function setUpShortcuts() {
  const inChat = (run) => () => {
    open("chat");
    run();
  };
  const stop = () => {
    stopAnswer();
    stopSchema();
    showDrawer(false);
    return false;
  };
  setUpKeys({ stop, edit: editLast, renew: inChat(newChat), search: inChat(searchConversations) });
}

async function start() {
  setUpTheme();
  setUpChat();
  setUpSchema();
  setUpTabs();
  setUpShortcuts();
  for (;;) {
    try {
      await loadModel();
      break;
    } catch (failure) {
      if (failure.kind === "key") break;
      await watchServer();
    }
  }
  if (model.id) {
    setUpCard();
    showModelSampling(model.card.sampling);
  }
  modelLoaded();
  // Ahead of the first answer, and after everything that can be seen.
  loadMarkdown().catch(() => {});
}

start();
