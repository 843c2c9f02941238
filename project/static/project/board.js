/**
 * Keeps the board fresh: fetches /board.json each second and draws it.
 *
 * Between two fetches the times go on by this browser's own clock, counted from the moment at
 * which the server says it looked. All text is set as text, never as HTML.
 */

const FETCH_MS = 1000;
const DRAW_MS = 250;
const FETCH_TIMEOUT_MS = 4000;
const SHOWN_RUNS = 12;
const SHOWN_LANES = 8;
const SHOWN_ANSWERS = 8;
const PAST_SECONDS = 60;
const AHEAD_SECONDS = 12;

const byId = (id) => document.getElementById(id);
const { dataUrl, runUrl } = document.body.dataset;
const clock = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
});

/** The last data that arrived, and when by `performance.now()`. Kept when the server is gone. */
let board = null;
let arrived = 0;
/** The runs as they were last drawn. */
let drawnRuns = "";

// Elements

/** An element with classes and children; strings become text. */
function el(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** Sets custom properties through the CSSOM, which a strict content policy allows. */
function place(element, values) {
  for (const [name, value] of Object.entries(values)) {
    element.style.setProperty(`--${name}`, String(value));
  }
  return element;
}

const serverNames = [...document.querySelectorAll(".servers .server")].map(
  (link) => link.dataset.server,
);

/** The colour class of a server: by its place in the list of servers, new names behind them. */
function serverClass(name) {
  if (!serverNames.includes(name)) serverNames.push(name);
  return `s${serverNames.indexOf(name) % 4}`;
}

const serverLabel = (name) => el("span", `server ${serverClass(name)}`, name || "unknown");

for (const link of document.querySelectorAll(".servers .server")) {
  link.classList.add(serverClass(link.dataset.server));
}

// Time

/** Seconds since the server looked. */
const age = () => (performance.now() - arrived) / 1000;
/** The server's clock, now, in seconds since the epoch. */
const serverNow = () => Date.parse(board.now) / 1000 + age();
const at = (iso) => Date.parse(iso) / 1000;

function duration(seconds) {
  const whole = Math.max(seconds, 0);
  if (whole < 60) return `${whole.toFixed(1)} s`;
  return `${Math.floor(whole / 60)} min ${Math.floor(whole % 60)} s`;
}

// Drawing

const STATES = { running: "runs", waiting: "waits for its turn", cooling: "cools down" };

function heldRow(job, state) {
  const cooling = state === "cooling";
  const elapsed = serverNow() - at(job.since);
  const rest = Math.max(job.remaining - age(), 0);
  const whole = cooling ? job.interval : Math.max(board.lease_seconds, job.remaining);
  const bar = place(el("i", ""), { part: Math.min(rest / (whole || 1), 1) });
  const process = el("span", "detail", `pid ${job.pid} on ${job.host}`);
  const since = el("span", "detail", `since ${clock.format(at(job.since) * 1000)}`);
  const name = el("th", "", job.job);
  name.scope = "row";
  return el(
    "tr",
    `${state} ${serverClass(job.server)}`,
    name,
    el("td", "state", STATES[state], ...waitsFor(job)),
    el("td", "", serverLabel(job.server), process),
    el("td", "number", duration(elapsed), since),
    el(
      "td",
      "lease",
      el(
        "div",
        "rest",
        el("span", "bar", bar),
        el("span", "words", `${rest.toFixed(1)} s ${cooling ? "to wait" : "lease"}`),
      ),
    ),
  );
}

/** Whose end a job waits for: any of those that have a turn now. */
function waitsFor(job) {
  if (!job.waits_for) return [];
  const others = [...job.waits_for].sort().join(", ");
  return [el("span", "detail", others ? `until one of these ends: ${others}` : "which comes now")];
}

const OUTCOMES = {
  done: "done",
  running: "runs",
  waiting: "waits",
  failed: "failed",
  lost: "lost its lease",
  broken_off: "broken off",
};

function runRow(run) {
  const name = el("th", "", run.job);
  name.scope = "row";
  const took = run.finished_at
    ? duration(at(run.finished_at) - at(run.started_at))
    : run.outcome === "running" || run.outcome === "waiting"
      ? "…"
      : "unknown";
  return el(
    "tr",
    "",
    name,
    el("td", `outcome-${run.outcome}`, OUTCOMES[run.outcome] ?? run.outcome),
    el("td", "", serverLabel(run.server), el("span", "detail", ` pid ${run.pid}`)),
    el("td", "number", clock.format(at(run.started_at) * 1000)),
    el("td", "number", took),
    el("td", "number token", String(run.fencing_token)),
  );
}

/** One bar of the timeline between two moments, cut to what the chart shows. */
function bar(className, server, from, to) {
  const start = serverNow() - PAST_SECONDS;
  const span = PAST_SECONDS + AHEAD_SECONDS;
  const left = Math.max((from - start) / span, 0);
  const right = Math.min((to - start) / span, 1);
  if (right <= left) return null;
  return place(el("i", `${className} ${serverClass(server)}`), { from: left, part: right - left });
}

function lanesOf(data) {
  const lanes = new Map();
  const now = serverNow();
  const add = (job, moment, item) => {
    const lane = lanes.get(job) ?? { job, last: 0, bars: [] };
    lane.last = Math.max(lane.last, moment);
    if (item) lane.bars.push(item);
    lanes.set(job, lane);
  };
  for (const run of data.runs) {
    const from = at(run.started_at);
    const brokenOff = run.outcome === "broken_off";
    const to = run.finished_at ? at(run.finished_at) : brokenOff ? from + 0.6 : now;
    if (to < now - PAST_SECONDS) continue;
    const wrong = brokenOff || run.outcome === "lost" || run.outcome === "failed";
    const kind = wrong ? "broken" : run.outcome === "waiting" ? "wait" : "work";
    add(run.job, from, bar(kind, run.server, from, to));
  }
  for (const job of [...data.running, ...data.waiting]) {
    add(job.job, now, bar("ahead", job.server, now, now + job.remaining - age()));
  }
  for (const job of data.cooling) {
    const ended = data.runs.find((run) => run.run === job.run)?.finished_at;
    const from = ended ? at(ended) : now;
    add(job.job, now, bar("cool", job.server, from, now + job.remaining - age()));
  }
  return [...lanes.values()]
    .sort((a, b) => b.last - a.last)
    .slice(0, SHOWN_LANES)
    .sort((a, b) => a.job.localeCompare(b.job));
}

function drawLanes() {
  const lanes = lanesOf(board).map(({ job, bars }) => {
    const name = el("span", "name", job);
    name.title = job;
    return el("div", "lane", name, el("div", "track", ...bars));
  });
  const axis = el("div", "axis");
  for (let second = -PAST_SECONDS; second <= 0; second += 15) {
    const mark = el("b", second ? "" : "present", el("span", "", second ? `${second} s` : "now"));
    axis.append(place(mark, { from: (PAST_SECONDS + second) / (PAST_SECONDS + AHEAD_SECONDS) }));
  }
  byId("lanes").hidden = byId("legend").hidden = !lanes.length;
  byId("no-lanes").hidden = lanes.length > 0;
  byId("lanes").replaceChildren(axis, ...lanes);
}

function drawLegend() {
  const entry = (className, text) => el("li", "", el("i", className), text);
  byId("legend").replaceChildren(
    ...serverNames.map((name) => entry(`work ${serverClass(name)}`, `work on ${name}`)),
    entry("wait", "waits for its turn"),
    entry("ahead", "lease ahead, renewed while the job runs"),
    entry("cool", "cools down"),
    entry("broken", "failed, lost or broken off"),
  );
}

const NOW = { running: "running", waiting: "waiting" };

function drawCounts() {
  const { seconds, outcomes } = board.counts;
  const parts = Object.keys(OUTCOMES)
    .filter((name) => outcomes[name])
    .map((name) => `${outcomes[name]} ${NOW[name] ?? OUTCOMES[name]}`);
  byId("counts").textContent = `In the last ${seconds / 60} minutes: ${parts.join(", ") || "no runs"}.`;
}

function draw() {
  if (!board) return;
  const held = [
    ...board.running.map((job) => heldRow(job, "running")),
    ...board.waiting.map((job) => heldRow(job, "waiting")),
    // A minimum hold that has passed since the server looked is over.
    ...board.cooling.filter((job) => job.remaining > age()).map((job) => heldRow(job, "cooling")),
  ];
  byId("held").replaceChildren(...held);
  byId("held").parentElement.hidden = !held.length;
  byId("idle").hidden = held.length > 0;
  drawLanes();
  drawRuns();
}

/** Drawn anew only when it changes, so that a token can be selected and copied. */
function drawRuns() {
  const shown = board.runs.slice(0, SHOWN_RUNS);
  if (drawnRuns === JSON.stringify([shown, board.counts])) return;
  drawnRuns = JSON.stringify([shown, board.counts]);
  byId("runs").replaceChildren(...shown.map(runRow));
  byId("runs").parentElement.hidden = byId("counts").hidden = !shown.length;
  byId("no-runs").hidden = shown.length > 0;
  drawLegend();
  drawCounts();
}

/** Tells screen readers what changed, and only that. */
function announce(before, after) {
  if (!before) return;
  const jobs = (list) => new Map(list.map((job) => [job.run, job]));
  const [was, is] = [jobs(before.running), jobs(after.running)];
  const waited = jobs(before.waiting);
  const news = [];
  for (const [run, job] of is) if (!was.has(run)) news.push(`${job.job} runs on ${job.server}.`);
  for (const job of after.waiting) {
    if (!waited.has(job.run)) news.push(`${job.job} waits for its turn.`);
  }
  for (const [run, job] of was) if (!is.has(run)) news.push(`${job.job} has ended.`);
  if (news.length) byId("news").textContent = news.join(" ");
}

// Fetching

function showLink(state, text) {
  const link = byId("link");
  // Assigned only on a change: it is a live region.
  if (link.dataset.state !== state) link.dataset.state = state;
  if (link.textContent !== text) link.textContent = text;
}

function showTrouble(text) {
  const trouble = byId("trouble");
  if (trouble.textContent !== text) trouble.textContent = text;
  trouble.hidden = !text;
}

async function refresh() {
  try {
    const response = await fetch(dataUrl, { signal: AbortSignal.timeout(FETCH_TIMEOUT_MS) });
    const data = await response.json();
    if (!response.ok) throw new Refusal(data.detail);
    announce(board, data);
    [board, arrived] = [data, performance.now()];
    showLink("live", "Live");
    showTrouble("");
    draw();
  } catch (error) {
    const kept = board
      ? ` What stands here is from ${clock.format(Date.parse(board.now))}.`
      : " Nothing could be shown yet.";
    const what = error instanceof Refusal ? error.message : "This server does not answer.";
    showLink("down", "Not live");
    showTrouble(`${what}${kept} Trying again every second.`);
  }
}

/** The server answered, but not with a board. */
class Refusal extends Error {}

async function keepFresh() {
  if (!document.hidden) await refresh();
  setTimeout(keepFresh, FETCH_MS);
}

// Starting jobs

function answer(status, className, text) {
  const item = el("li", className, el("span", "code", status), el("span", "", text));
  byId("no-answers").hidden = true;
  byId("answers").prepend(item);
  while (byId("answers").children.length > SHOWN_ANSWERS) byId("answers").lastChild.remove();
  return item;
}

async function startJob(job, numbers) {
  const item = answer("…", "waiting", `${job}: sent`);
  const say = (status, className, text) => {
    item.className = className;
    item.replaceChildren(el("span", "code", status), el("span", "", text));
  };
  try {
    const response = await fetch(runUrl + encodeURIComponent(job), {
      method: "POST",
      body: numbers,
    });
    const body = await response.json();
    const status = String(response.status);
    if (response.ok) {
      const took = duration(at(body.finished_at) - at(body.started_at));
      say(status, "ok", `${job} is done after ${took}, with token ${body.fencing_token}.`);
    } else {
      const wait = response.headers.get("Retry-After");
      say(status, response.status === 409 ? "held" : "bad", body.detail + (wait ? ` Try again in ${wait} s.` : ""));
    }
  } catch {
    say("✕", "bad", `${job}: the server did not answer. Whether the job ran, the last runs tell.`);
  }
  refresh();
}

byId("start").addEventListener("submit", (event) => {
  event.preventDefault();
  const fields = new FormData(event.target);
  const numbers = new URLSearchParams({
    seconds: fields.get("seconds"),
    interval: fields.get("interval"),
  });
  const times = Number(event.submitter?.value || 1);
  for (let i = 0; i < times; i += 1) startJob(fields.get("job"), numbers);
});

setInterval(() => {
  // What is no longer live stands still.
  if (byId("link").dataset.state === "live" && !document.hidden) draw();
}, DRAW_MS);
keepFresh();
