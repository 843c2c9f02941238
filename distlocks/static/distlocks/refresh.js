/* Gets a page's news every few seconds: quietly, not while nobody looks or it is paused, and less and
   less often while they cannot be had. The controls are those of updates.html. */
'use strict';

/* `take(text)`: show what has come; false, or an error, if that is not what was asked for. `every` and
   `longest`: seconds between two questions, ordinarily and while there is no answer. */
function distlocksRefresh({url, every, longest, take}) {
    const controls = document.querySelector('[data-updates]');
    const status = controls.querySelector('[role=status]');
    const button = controls.querySelector('button');
    // Seconds.
    const LONGEST_ANSWER = 15;
    // Who pauses one page has paused all.
    const PAUSED = 'distlocks.paused';

    let failures = 0;
    let timer = null;
    let asking = null;
    let isOver = false;
    let isPaused = sessionStorage.getItem(PAUSED) === '1';

    function say(text) {
        if (status.textContent !== text) {
            status.textContent = text;
        }
    }

    function later() {
        clearTimeout(timer);
        if (isPaused || isOver || document.hidden) {
            return;
        }
        const seconds = Math.min(every * 2 ** failures, Math.max(every, longest));
        timer = setTimeout(ask, seconds * 1000);
        if (failures) {
            say(controls.dataset.failed.replace('%s', String(seconds)));
        }
    }

    async function ask() {
        const mine = asking = new AbortController();
        let isThere = false;
        try {
            const given = AbortSignal.timeout(LONGEST_ANSWER * 1000);
            const response = await fetch(url, {
                credentials: 'same-origin',
                cache: 'no-store',
                signal: AbortSignal.any ? AbortSignal.any([mine.signal, given]) : mine.signal,
            });
            const text = await response.text();
            if (mine.signal.aborted) {
                return;
            }
            if (response.redirected || response.status === 403) {
                isOver = true;
                say(controls.dataset.over);
                return;
            }
            isThere = response.ok && take(text);
        } catch {
            if (mine.signal.aborted) {
                return;
            }
        }
        failures = isThere ? 0 : failures + 1;
        if (isThere) {
            say('');
        }
        later();
    }

    /* No answer that is still to come is shown after a later one, or while it is paused. */
    function stop() {
        clearTimeout(timer);
        if (asking) {
            asking.abort();
            asking = null;
        }
    }

    function goOn() {
        stop();
        if (!isPaused && !isOver && !document.hidden) {
            ask();
        }
    }

    function showPaused() {
        button.setAttribute('aria-pressed', String(isPaused));
        button.textContent = isPaused ? button.dataset.resume : button.dataset.pause;
    }

    button.addEventListener('click', () => {
        isPaused = !isPaused;
        sessionStorage.setItem(PAUSED, isPaused ? '1' : '');
        showPaused();
        if (!isOver) {
            failures = 0;
            say('');
        }
        goOn();
    });
    document.addEventListener('visibilitychange', goOn);
    button.hidden = false;
    showPaused();
    later();
}
