"use strict";

/* Draws charts of numbers over time in the theme's colours, anew when these change. */
const distlocksCharts = (() => {
  const HEIGHT = 220;
  // Told apart by more than their colour.
  const DASHES = { good: [], warn: [7, 4], bad: [2, 3], other: [12, 4], more: [8, 3, 2, 3] };
  const NOTHING = "–";
  const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((zeros) =>
    [1, 2, 5].map((digit) => digit * 10 ** zeros),
  );

  const number = (value) =>
    new Intl.NumberFormat(document.documentElement.lang || undefined, {
      maximumSignificantDigits: 3,
    }).format(value);

  const WRITE = {
    rate: number,
    count: number,
    duration(value) {
      if (value < 0.9995) return `${number(value * 1000)} ms`;
      if (value < 60) return `${number(value)} s`;
      if (value < 3600) return `${number(value / 60)} min`;
      return `${number(value / 3600)} h`;
    },
  };

  function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  }

  /* Formats of moments, in the site's time zone if the browser knows it. */
  function calendar(timeZone) {
    const formats = (zone) => {
      const make = (options) =>
        new Intl.DateTimeFormat("sv", { ...options, hourCycle: "h23", timeZone: zone });
      return {
        day: make({ month: "2-digit", day: "2-digit" }),
        time: make({ hour: "2-digit", minute: "2-digit" }),
        whole: make({ dateStyle: "short", timeStyle: "short" }),
      };
    };
    let known = timeZone;
    let made;
    try {
      made = formats(known);
    } catch {
      known = undefined;
      made = formats(known);
    }
    const write = (format) => (at) => format.format(new Date(at * 1000));
    return {
      zone: known,
      day: write(made.day),
      time: write(made.time),
      whole: write(made.whole),
    };
  }

  function options(chart, drawn, range, width) {
    const when = calendar(drawn.timeZone);
    const write = WRITE[chart.unit];
    const font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const axis = {
      font,
      stroke: colour("--body-quiet-color"),
      grid: { stroke: colour("--dl-grid"), width: 1 },
      ticks: { stroke: colour("--dl-grid"), width: 1 },
    };
    const isDuration = chart.unit === "duration";
    // On the logarithmic scale of durations, there are lines for what is labelled only.
    const tens = (_, splits) =>
      splits.map((value) => (Number.isInteger(Math.round(Math.log10(value) * 1e6) / 1e6) ? value : null));
    const filter = isDuration ? { filter: tens } : {};
    return {
      width,
      height: HEIGHT,
      tzDate: (at) =>
        when.zone ? uPlot.tzDate(new Date(at * 1000), when.zone) : new Date(at * 1000),
      cursor: { drag: { x: false, y: false }, sync: { key: "distlocks" } },
      scales: {
        x: { range },
        y: isDuration
          ? { distr: 3 }
          : { range: (_, low, high) => [0, Math.max(high === null ? 1 : high * 1.1, 1)] },
      },
      axes: [
        {
          ...axis,
          space: 60,
          values: (_, splits, __, ___, step) =>
            splits.map((at) => {
              const time = when.time(at);
              return step >= 86400 || time === "00:00" ? when.day(at) : time;
            }),
        },
        {
          ...axis,
          ...filter,
          grid: { ...axis.grid, ...filter },
          ticks: { ...axis.ticks, ...filter },
          size: 64,
          values: (_, splits) => splits.map((value) => (value === null ? "" : write(value))),
          // Of things that are counted there are no halves.
          ...(chart.unit === "count" ? { incrs: WHOLE } : {}),
        },
      ],
      series: [
        { label: drawn.when, value: (_, at) => (at === null ? NOTHING : when.whole(at)) },
        ...chart.lines.map((line) => ({
          label: line.label,
          stroke: colour(`--dl-${line.colour}`),
          width: 2,
          dash: DASHES[line.colour],
          value: (_, value) => (value === null || value === undefined ? NOTHING : write(value)),
        })),
      ],
    };
  }

  class Charts {
    constructor() {
      this.plots = new Map();
      this.drawn = null;
      this.sizes = new ResizeObserver((entries) => {
        for (const { target } of entries) {
          const plot = this.plots.get(target);
          const width = Math.floor(target.clientWidth);
          if (plot && width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
        }
      });
      this.range = () => [this.drawn.since, this.drawn.until];
      const again = () => {
        for (const plot of this.plots.values()) plot.destroy();
        this.plots.clear();
        if (this.drawn) this.draw(this.drawn);
      };
      new MutationObserver(again).observe(document.documentElement, {
        attributeFilter: ["data-theme"],
      });
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    }

    /* Draw these numbers instead of the last. */
    draw(drawn) {
      this.drawn = drawn;
      for (const place of document.querySelectorAll("[data-chart]")) {
        const chart = drawn.charts[place.dataset.chart];
        document.querySelector(`[data-empty="${place.dataset.chart}"]`).hidden = !chart.empty;
        place.hidden = chart.empty;
        let plot = this.plots.get(place);
        if (chart.empty) {
          plot?.destroy();
          this.plots.delete(place);
          continue;
        }
        const data = [drawn.x, ...chart.lines.map((line) => line.values)];
        if (plot) {
          // Whoever points at it goes on reading.
          plot.setData(data);
          continue;
        }
        const width = Math.floor(place.clientWidth) || 600;
        plot = new uPlot(options(chart, drawn, this.range, width), data, place);
        this.plots.set(place, plot);
        this.sizes.observe(place);
        place.dataset.drawn = colour("--body-quiet-color");
      }
    }
  }

  return new Charts();
})();
