"use strict";

/* Draws the dashboard's charts, and gets the page anew every few seconds: quietly, not while nobody
   looks, and less and less often while it cannot be had. */
(() => {
  const LONGEST_PAUSE = 300;
  const root = document.getElementById("dl-refresh");
  const status = document.getElementById("dl-refresh-status");
  const button = document.getElementById("dl-pause");
  const interval = Number(root.dataset.seconds);
  let failures = 0;
  let timer = 0;
  let isPaused = sessionStorage.getItem("distlocks.paused") === "yes";
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
    try {
      const answer = await fetch(location.href, { credentials: "same-origin", cache: "no-store" });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
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
      failures += 1;
      tell(root.dataset.failed.replace("%s", String(seconds())));
    }
  }

  function seconds() {
    return Math.min(interval * 2 ** failures, Math.max(LONGEST_PAUSE, interval));
  }

  function schedule() {
    clearTimeout(timer);
    if (isPaused || isOver || document.hidden) return;
    timer = setTimeout(async () => {
      await refresh();
      schedule();
    }, seconds() * 1000);
  }

  function showPaused() {
    button.textContent = isPaused ? root.dataset.resume : root.dataset.pause;
    button.setAttribute("aria-pressed", String(isPaused));
  }

  button.hidden = false;
  button.addEventListener("click", async () => {
    isPaused = !isPaused;
    sessionStorage.setItem("distlocks.paused", isPaused ? "yes" : "no");
    showPaused();
    if (!isPaused && !isOver) await refresh();
    schedule();
  });
  document.addEventListener("visibilitychange", async () => {
    if (document.hidden || isPaused || isOver) return schedule();
    await refresh();
    return schedule();
  });
  showPaused();
  draw(document);
  schedule();
})();
