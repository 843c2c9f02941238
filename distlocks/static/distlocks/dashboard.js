/* Draws the dashboard's charts, and takes over its news: see refresh.js. */
'use strict';
{
    const root = document.getElementById('dl-refresh');
    // Seconds.
    const LONGEST_PAUSE = 300;

    function draw() {
        distlocksCharts.draw(JSON.parse(document.getElementById('dl-drawn').textContent));
    }

    /* What somebody is using stays as it is until the next time. */
    function isUsed(part) {
        const selection = getSelection();
        return part.contains(document.activeElement)
            || (!selection.isCollapsed && part.contains(selection.focusNode));
    }

    function takeOver(text) {
        const page = new DOMParser().parseFromString(text, 'text/html');
        if (!page.getElementById('dl-refresh')) {
            return false;
        }
        for (const part of document.querySelectorAll('[data-live]')) {
            const fresh = page.getElementById(part.id);
            if (!fresh || part.innerHTML === fresh.innerHTML || isUsed(part)) {
                continue;
            }
            const open = [...part.querySelectorAll('details')].map(one => one.open);
            part.replaceChildren(...document.adoptNode(fresh).childNodes);
            part.querySelectorAll('details').forEach((one, index) => {
                one.open = Boolean(open[index]);
            });
        }
        draw();
        return true;
    }

    draw();
    distlocksRefresh({
        url: location.href,
        every: Number(root.dataset.seconds),
        longest: LONGEST_PAUSE,
        take: takeOver,
    });
}
