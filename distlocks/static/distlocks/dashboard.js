"use strict";

/* Draws the dashboard's charts, and gets the page anew every few seconds: quietly, not while nobody
   looks, and less and less often while it cannot be had. */
(() => {
  // Seconds.
  const LONGEST_PAUSE = 300;
  const LONGEST_ANSWER = 15;
  // As live.js has it: who pauses one page has paused all.
  const PAUSED = "distlocks.paused";
  const root = document.getElementById("dl-refresh");
  const status = document.getElementById("dl-refresh-status");
  const button = document.getElementById("dl-pause");
  const interval = Number(root.dataset.seconds);
  let failures = 0;
  let timer = 0;
  let asking = null;
  let isPaused = sessionStorage.getItem(PAUSED) === "1";
  let isOver = false;

  function draw(page) {
    distlocksCharts.draw(JSON.parse(page.getElementById("dl-drawn").textContent));
  }

  function tell(text) {
    if (status.textContent !== text) status.textContent = text;
  }

  /* What somebody is using stays as it is until the next time. */
  function isUsed(part) {
    const selection = getSelection();
    return (
      part.contains(document.activeElement) ||
      (!selection.isCollapsed && part.contains(selection.focusNode))
    );
  }

  function takeOver(page) {
    for (const part of document.querySelectorAll("[data-live]")) {
      const fresh = page.getElementById(part.id);
      if (!fresh || part.innerHTML === fresh.innerHTML || isUsed(part)) continue;
      const open = [...part.querySelectorAll("details")].map((one) => one.open);
      part.replaceChildren(...document.adoptNode(fresh).childNodes);
      part.querySelectorAll("details").forEach((one, index) => {
        one.open = Boolean(open[index]);
      });
    }
    draw(document);
  }

  async function refresh() {
    const mine = (asking = new AbortController());
    try {
      const given = AbortSignal.timeout(LONGEST_ANSWER * 1000);
      const answer = await fetch(location.href, {
        credentials: "same-origin",
        cache: "no-store",
        signal: AbortSignal.any ? AbortSignal.any([mine.signal, given]) : mine.signal,
      });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (mine.signal.aborted) return;
      if (answer.status === 403 || (answer.ok && !page.getElementById("dl-refresh"))) {
        isOver = true;
        tell(root.dataset.loggedOut);
        return;
      }
      if (!answer.ok) throw new Error(answer.statusText);
      failures = 0;
      tell("");
      takeOver(page);
    } catch {
      if (mine.signal.aborted) return;
      failures += 1;
      tell(root.dataset.failed.replace("%s", String(seconds())));
    }
    schedule();
  }

  /* No answer that is still to come is shown after a later one, or while it is paused. */
  function stop() {
    clearTimeout(timer);
    if (asking) asking.abort();
    asking = null;
  }

  function seconds() {
    return Math.min(interval * 2 ** failures, Math.max(LONGEST_PAUSE, interval));
  }

  function schedule() {
    clearTimeout(timer);
    if (isPaused || isOver || document.hidden) return;
    timer = setTimeout(refresh, seconds() * 1000);
  }

  function showPaused() {
    button.textContent = isPaused ? root.dataset.resume : root.dataset.pause;
    button.setAttribute("aria-pressed", String(isPaused));
  }

  button.hidden = false;
  button.addEventListener("click", () => {
    isPaused = !isPaused;
    sessionStorage.setItem(PAUSED, isPaused ? "1" : "");
    showPaused();
    stop();
    if (!isPaused && !isOver) refresh();
  });
  document.addEventListener("visibilitychange", () => {
    stop();
    if (!document.hidden && !isPaused && !isOver) refresh();
  });
  showPaused();
  draw(document);
  schedule();
})();
