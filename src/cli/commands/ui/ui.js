"use strict";
// Loads the content of a page again, and follows a log. All pages work without this script.
(() => {
  const LOG_LENGTH = 1000000;
  const note = document.getElementById("note");
  const main = () => document.getElementById("main");
  const show = (text) => { if (note.textContent !== text) note.textContent = text; };

  async function load() {
    const selection = getSelection();
    if (document.hidden || (selection && !selection.isCollapsed)) return;
    try {
      const response = await fetch(location.pathname + location.search, { cache: "no-store" });
      const next = new DOMParser().parseFromString(await response.text(), "text/html").getElementById("main");
      if (!next) throw new Error("no content");
      const old = main();
      const focus = old.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      const columns = [...old.querySelectorAll(".scroll, pre")].map((part) => part.scrollLeft);
      old.replaceWith(document.adoptNode(next));
      main().querySelectorAll(".scroll, pre").forEach((part, index) => { part.scrollLeft = columns[index] || 0; });
      if (focus) {
        const same = [...main().querySelectorAll("a")].find((link) => link.getAttribute("href") === focus);
        if (same) same.focus({ preventScroll: true });
      }
      document.body.classList.remove("old");
      show("Updated at " + new Date().toLocaleTimeString());
    } catch {
      document.body.classList.add("old");
      show("Not updated: coracle ui has ended or cannot be reached.");
    }
  }

  function repeat() {
    const seconds = Number(main().dataset.refresh);
    if (seconds > 0) setTimeout(async () => { await load(); repeat(); }, seconds * 1000);
  }

  async function follow(log, signal) {
    const response = await fetch(log.dataset.follow, { signal, cache: "no-store" });
    if (!response.ok) throw new Error(await response.text());
    log.textContent = "";
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let length = 0;
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 30;
      log.append(document.createTextNode(value));
      length += value.length;
      while (length > LOG_LENGTH && log.childNodes.length > 1) {
        length -= log.firstChild.data.length;
        log.firstChild.remove();
      }
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    }
  }

  const log = document.getElementById("log");
  if (log && log.dataset.follow) {
    const button = document.createElement("button");
    let control = null;
    const change = async () => {
      if (control) { control.abort(); return; }
      control = new AbortController();
      button.textContent = "Stop following";
      show("Following the log");
      try {
        await follow(log, control.signal);
        show("The log has ended.");
      } catch (error) {
        show(control.signal.aborted ? "Not following" : "Not following: " + error.message);
      }
      control = null;
      button.textContent = "Follow";
    };
    button.addEventListener("click", change);
    log.before(button);
    log.scrollTop = log.scrollHeight;
    change();
  }
  repeat();
})();
