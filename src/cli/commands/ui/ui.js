"use strict";
// Loads the content of a page again, and follows a log. All pages work without this script.
(() => {
  const LOG_LENGTH = 1000000;
  const NODE_LENGTH = 16384;
  const RETRY_MILLISECONDS = 3000;
  const MOST_TRIES = 20;
  const note = document.getElementById("note");
  const main = () => document.getElementById("main");
  // "isRoutine": a screen reader does not read it out.
  const show = (text, isRoutine) => {
    note.setAttribute("aria-live", isRoutine ? "off" : "polite");
    if (note.textContent !== text) note.textContent = text;
  };
  // What can have the focus, in a content or in its successor.
  const stops = (content) => [content, ...content.querySelectorAll("[tabindex], a")];

  async function load() {
    const selection = getSelection();
    if (document.hidden || (selection && !selection.isCollapsed)) return;
    try {
      const response = await fetch(location.pathname + location.search, { cache: "no-store" });
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      const next = page.getElementById("main");
      if (!next) throw new Error("no content");
      const old = main();
      const focus = document.activeElement;
      const place = stops(old).indexOf(focus);
      const columns = [...old.querySelectorAll(".scroll, pre")].map((part) => part.scrollLeft);
      old.replaceWith(document.adoptNode(next));
      main().querySelectorAll(".scroll, pre").forEach((part, index) => { part.scrollLeft = columns[index] || 0; });
      if (place >= 0) {
        // Links are found by their target, because rows may have moved.
        const target = focus.getAttribute("href");
        const all = stops(main());
        const same = target ? all.find((stop) => stop.getAttribute("href") === target) : all[place];
        if (same) same.focus({ preventScroll: true });
      }
      document.title = page.title;
      const node = page.getElementById("node");
      if (node) document.getElementById("node").textContent = node.textContent;
      document.body.classList.remove("old");
      show("Updated at " + new Date().toLocaleTimeString(), true);
      // A page about an agent that was away may have become that of a log.
      prepare();
    } catch {
      document.body.classList.add("old");
      show("Not updated: coracle ui has ended or cannot be reached.");
    }
  }

  function repeat() {
    const seconds = Number(main().dataset.refresh);
    if (seconds > 0) setTimeout(async () => { await load(); repeat(); }, seconds * 1000);
  }

  // Adds text to a log a few times per second, in nodes of some size: it may come in single bytes.
  function appender(log) {
    let pending = "";
    let length = 0;
    let timer = 0;
    const flush = () => {
      clearTimeout(timer);
      timer = 0;
      if (!pending) return;
      const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 30;
      const text = pending.slice(-LOG_LENGTH);
      pending = "";
      const last = log.lastChild;
      if (last && last.data.length + text.length <= NODE_LENGTH) {
        last.appendData(text);
      } else {
        for (let from = 0; from < text.length; from += NODE_LENGTH) {
          log.append(document.createTextNode(text.slice(from, from + NODE_LENGTH)));
        }
      }
      length += text.length;
      while (length > LOG_LENGTH && log.childNodes.length > 1) {
        length -= log.firstChild.data.length;
        log.firstChild.remove();
      }
      if (isAtEnd) log.scrollTop = log.scrollHeight;
    };
    const add = (text) => {
      pending += text;
      // Timers of a hidden page may wait for a minute.
      if (pending.length > 2 * LOG_LENGTH) pending = pending.slice(-LOG_LENGTH);
      if (!timer) timer = setTimeout(flush, 100);
    };
    return { add, flush };
  }

  // Follows a log until it ends. "tries": those since the log was followed. Returns the reason for the end,
  // whether another try can succeed, and whether there was a log.
  async function follow(log, signal, started, tries) {
    let response;
    try {
      response = await fetch(log.dataset.follow, { signal, cache: "no-store" });
      if (!response.ok) {
        const text = (await response.text()).trim() || "status " + response.status;
        // An agent that starts does not know its pods at first.
        const isStart = response.status === 404 && tries > 0 && tries < MOST_TRIES;
        const retry = isStart || response.status === 429 || response.status >= 500;
        return { reason: "Not following: " + text.replace(/\.?$/, "."), retry, found: false };
      }
    } catch {
      return { reason: "Not following: coracle ui has ended or cannot be reached.", retry: true, found: false };
    }
    show(started);
    const { add, flush } = appender(log);
    let begun = false;
    try {
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return { reason: "The log has ended.", retry: false, found: true };
        // Its last lines come again; a try without success leaves what is there.
        if (!begun) log.textContent = "";
        begun = true;
        add(value);
      }
    } catch {
      // The container runs on, or its state is not known: the body has no end.
      const reason = "The log was interrupted, as by the end of the agent.";
      return { reason, retry: true, found: true };
    } finally {
      flush();
    }
  }

  const pause = (signal) => new Promise((resolve) => {
    const end = () => { clearTimeout(timer); signal.removeEventListener("abort", end); resolve(); };
    const timer = setTimeout(end, RETRY_MILLISECONDS);
    signal.addEventListener("abort", end);
  });

  // Follows the log of the page, if it has one.
  function prepare() {
    const log = document.getElementById("log");
    if (!log || !log.dataset.follow) return;
    const button = document.createElement("button");
    let control = null;
    const change = async () => {
      if (control) { control.abort(); return; }
      control = new AbortController();
      const signal = control.signal;
      button.textContent = "Stop following";
      let started = "Following the log";
      let tries = 0;
      for (;;) {
        const { reason, retry, found } = await follow(log, signal, started, tries);
        tries = found ? 1 : tries + 1;
        if (!signal.aborted) show(retry ? reason + " Trying again." : reason);
        if (retry && !signal.aborted) await pause(signal);
        if (signal.aborted) show("Not following");
        if (signal.aborted || !retry) break;
        started = "Following the log. Before: " + reason;
      }
      control = null;
      button.textContent = "Follow";
    };
    button.addEventListener("click", change);
    log.before(button);
    log.scrollTop = log.scrollHeight;
    change();
  }

  prepare();
  repeat();
})();
