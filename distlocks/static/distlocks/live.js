/* Keeps a part of a page up to date: [data-live] names the URL of its HTML. Durations count between
   two updates. What has focus or is selected stays so, and so does where the page is scrolled to. */
'use strict';
{
    const region = document.querySelector('[data-live]');
    // Seconds.
    const LONGEST_PAUSE = 60;
    // What a reader does with the page, which the server does not know.
    const OF_THE_READER = new Set(['open', 'hidden', 'disabled']);

    let updated = performance.now();

    /* Durations */

    function duration(seconds) {
        const whole = Math.max(Math.floor(seconds), 0);
        if (whole < 60) {
            return `${whole} s`;
        }
        if (whole < 3600) {
            return `${Math.floor(whole / 60)} min ${whole % 60} s`;
        }
        if (whole < 86400) {
            return `${Math.floor(whole / 3600)} h ${Math.floor(whole % 3600 / 60)} min`;
        }
        return `${Math.floor(whole / 86400)} d ${Math.floor(whole % 86400 / 3600)} h`;
    }

    function count() {
        const passed = (performance.now() - updated) / 1000;
        for (const [name, sign] of [['age', 1], ['left', -1]]) {
            for (const one of region.querySelectorAll(`[data-${name}]`)) {
                const text = duration(Number(one.dataset[name]) + sign * passed);
                if (one.textContent !== text) {
                    one.textContent = text;
                }
            }
        }
    }

    /* Making what is there like what should be there */

    const keyOf = node => node.nodeType === Node.ELEMENT_NODE ? node.dataset.key : undefined;

    function become(there, wanted) {
        for (const {name, value} of wanted.attributes) {
            if (there.getAttribute(name) !== value) {
                there.setAttribute(name, value);
            }
        }
        for (const {name} of [...there.attributes]) {
            if (!wanted.hasAttribute(name) && !OF_THE_READER.has(name)) {
                there.removeAttribute(name);
            }
        }
        const stays = new Set([...wanted.childNodes].map(keyOf));
        const known = new Map();
        for (const child of [...there.childNodes]) {
            const key = keyOf(child);
            if (key !== undefined) {
                if (stays.has(key)) {
                    known.set(key, child);
                } else {
                    child.remove();
                }
            }
        }
        let at = there.firstChild;
        for (const child of [...wanted.childNodes]) {
            const key = keyOf(child);
            let match = null;
            if (key !== undefined) {
                match = known.get(key) || null;
            } else if (at && keyOf(at) === undefined && at.nodeName === child.nodeName) {
                match = at;
            }
            if (!match) {
                there.insertBefore(child, at);
                continue;
            }
            if (match === at) {
                at = at.nextSibling;
            } else {
                there.insertBefore(match, at);
            }
            if (match.nodeType === Node.ELEMENT_NODE) {
                become(match, child);
            } else if (match.data !== child.data) {
                match.data = child.data;
            }
        }
        while (at) {
            const next = at.nextSibling;
            at.remove();
            at = next;
        }
    }

    function show(html) {
        const wanted = document.createElement('div');
        wanted.innerHTML = html;
        const results = wanted.querySelector('[data-live-results]');
        if (!results) {
            return false;
        }
        const focused = document.activeElement;
        become(region.querySelector('[data-live-results]'), results);
        if (document.activeElement !== focused && focused.isConnected) {
            focused.focus({preventScroll: true});
        }
        updated = performance.now();
        count();
        select();
        return true;
    }

    /* Selecting */

    function select() {
        const boxes = [...region.querySelectorAll('input.action-select')];
        const chosen = boxes.filter(box => box.checked).length;
        const all = region.querySelector('[data-live-all]');
        if (all) {
            all.checked = chosen > 0 && chosen === boxes.length;
            all.indeterminate = chosen > 0 && chosen < boxes.length;
        }
        const told = region.querySelector('[data-live-selected]');
        if (told) {
            const text = `${chosen} ${told.dataset.of}`;
            if (told.textContent !== text) {
                told.textContent = text;
            }
        }
        for (const button of region.querySelectorAll('[data-needs-selection]')) {
            button.disabled = chosen === 0;
        }
    }

    if (region) {
        region.addEventListener('change', event => {
            if (event.target.matches('[data-live-all]')) {
                for (const box of region.querySelectorAll('input.action-select')) {
                    box.checked = event.target.checked;
                }
            }
            select();
        });
        select();
        setInterval(count, 1000);
        distlocksRefresh({
            url: region.dataset.live,
            every: Number(region.dataset.liveEvery),
            longest: LONGEST_PAUSE,
            take: show,
        });
    }
}
