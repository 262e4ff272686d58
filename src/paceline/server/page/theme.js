// Runs before the first paint, so that a remembered theme does not flash the other one.
"use strict";
try {
  const theme = localStorage.getItem("paceline-theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // Storage can be switched off; the system's theme serves then.
}
