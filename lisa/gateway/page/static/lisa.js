// Refreshes the page, draws plots from the tables below them, and selects checkboxes.
"use strict";
(() => {
  const EVERY_MS = 2000;
  const banner = document.getElementById("banner");
  const beat = document.getElementById("beat");
  const live = () => document.querySelector("#live[hx-get]");
  let isLive = true;
  let isLoading = false;

  // One request at a time; none while the tab is hidden or live updates are off.
  function tick() {
    const target = live();
    if (target && isLive && !isLoading && !document.hidden) htmx.trigger(target, "tick");
  }

  function say(text) {
    if (banner.textContent !== text) banner.textContent = text;
  }

  // The badge says how old the content is while refreshes fail.
  const LIVE = beat?.textContent;
  let seen = document.querySelector("#live[data-empty]") ? null : new Date();
  function isAway(away, why = banner.dataset.away) {
    if (!away) seen = new Date();
    const text = !away ? LIVE : seen ? `as of ${seen.toISOString().slice(11, 19)}` : "no data";
    if (beat && beat.textContent !== text) beat.textContent = text;
    beat?.classList.toggle("away", away);
    say(away ? why : "");
  }

  document.addEventListener("htmx:before:request", () => { isLoading = true; });
  document.addEventListener("htmx:after:request", (event) => {
    const status = event.detail?.ctx?.response?.status;
    if (status && status < 400) isAway(false);
  });
  document.addEventListener("htmx:response:error", (event) => {
    const status = event.detail?.ctx?.response?.status;
    if (status >= 500 || status === 429) isAway(true);
  });
  document.addEventListener("htmx:error", () => { isLoading = false; isAway(true, banner.dataset.gone); });
  document.addEventListener("htmx:finally:request", () => { isLoading = false; });
  document.addEventListener("htmx:after:swap", draw);
  document.addEventListener("visibilitychange", tick);

  if (beat && live()) {
    beat.hidden = false;
    beat.addEventListener("click", () => {
      isLive = !isLive;
      beat.setAttribute("aria-pressed", String(isLive));
      if (isLive) tick();
    });
    setInterval(tick, EVERY_MS);
  }

  for (const button of document.querySelectorAll("button[data-tick]")) {
    const boxes = [...document.querySelectorAll(`input[name="${button.dataset.tick}"]`)];
    button.hidden = false;
    button.addEventListener("click", () => {
      const all = boxes.every((box) => box.checked);
      for (const box of boxes) box.checked = !all;
      button.textContent = all ? "Select all" : "Select none";
    });
  }

  // Buttons that copy the text of an element. Browsers allow it on HTTPS and on localhost.
  if (navigator.clipboard) {
    document.documentElement.classList.add("can-copy");
    document.addEventListener("click", async (event) => {
      const button = event.target.closest("button[data-copy]");
      if (!button) return;
      const name = button.dataset.name ??= button.textContent;
      const shown = document.querySelector(button.dataset.copy);
      await navigator.clipboard.writeText(shown.dataset.raw ?? shown.textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = name; }, 1500);
    });
  }

  // Plots. The data is in the table, which screen readers and browsers without scripts can use.
  const plots = new Map();
  const HEIGHT = 190;
  const cell = (one) => (one.dataset.v === "" ? null : Number(one.dataset.v));
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Labels differ in width, by value and by font, so an axis is as wide as the widest of its own.
  const FONT = "11px system-ui, sans-serif";
  const GAP = 4;
  const TICK = 8;
  const pen = document.createElement("canvas").getContext("2d");
  function widthOf(text) {
    pen.font = FONT;
    return Math.max(0, ...String(text).split("\n").map((line) => pen.measureText(line).width));
  }
  const widest = (_, labels) => Math.ceil(Math.max(0, ...(labels ?? []).map(widthOf))) + TICK + 2 * GAP;

  function read(figure) {
    // Within `details`, because uPlot's own legend is a table as well.
    const rows = [...figure.querySelectorAll("details tbody tr")];
    const all = [...figure.querySelectorAll("details thead th")];
    const heads = all.filter((head, column) => column === 0 || head.dataset.paint);
    return { heads, data: heads.map((head) => rows.map((row) => cell(row.children[all.indexOf(head)]))) };
  }

  function short(value) {
    for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= size) return `${+(value / size).toPrecision(3)}${unit}`;
    }
    return String(+value.toPrecision(3));
  }

  function spanOf(ms) {
    if (ms < 1000) return `${+ms.toPrecision(3)} ms`;
    return ms < 120000 ? `${+(ms / 1000).toPrecision(3)} s` : `${+(ms / 60000).toPrecision(3)} min`;
  }

  // Hours and minutes, at the first tick of each minute, and the date where it changes.
  function clock(_, ticks) {
    let before = [];
    return ticks.map((seconds) => {
      const [day, time] = new Date(seconds * 1000).toISOString().slice(0, 16).split("T");
      const [lastDay, lastTime] = before;
      before = [day, time];
      if (ticks.length > 1 && ticks[1] - ticks[0] >= 86400) return day.slice(5);
      if (day !== lastDay) return `${time}\n${day.slice(5)}`;
      return time === lastTime ? "" : time;
    });
  }

  // Vertical lines: now, and where the topic was paused or resumed.
  function mark(plot, figure) {
    const marks = (figure.dataset.marks ?? "").split(";").filter(Boolean)
      .map((one) => [Number(one.split(" ")[0]), one.slice(one.indexOf(" ") + 1), "--hue4"]);
    if (figure.dataset.now) marks.push([Number(figure.dataset.now), "now", "--soft"]);
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.font = FONT.replace("11", 11 * devicePixelRatio);
    ctx.textAlign = "right";
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const [at, label, hue] of marks) {
      const x = Math.round(plot.valToPos(at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width + 1) continue;
      ctx.strokeStyle = ctx.fillStyle = colour(hue);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const room = ctx.measureText(label).width + GAP * devicePixelRatio;
      ctx.textAlign = x - room < bbox.left ? "left" : "right";
      const gap = (ctx.textAlign === "left" ? GAP : -GAP) * devicePixelRatio;
      ctx.fillText(label, x + gap, bbox.top + 11 * devicePixelRatio);
    }
    ctx.restore();
  }

  const TELL = { ms: spanOf, rate: (value) => `${short(value)}/s` };

  function options(figure, heads, width) {
    const step = Number(figure.dataset.span ?? 0) / 1000;
    const tell = TELL[figure.dataset.unit] ?? short;
    const now = () => Number(figure.dataset.now ?? 0);
    const axis = {
      stroke: colour("--soft"), font: FONT, gap: GAP,
      grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1, size: TICK },
    };
    const log = figure.dataset.log === "1";
    return {
      width, height: HEIGHT,
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
      cursor: { y: false, drag: { x: false, y: false } },
      hooks: { draw: [(plot) => mark(plot, figure)] },
      scales: { x: { range: (_, low, high) => [low, Math.max(high + step, now())] }, y: log ? { distr: 3 } : { range: (_, low, high) => [0, Math.max(high * 1.08, 1)] } },
      axes: [{ ...axis, values: clock, space: () => 2 * widthOf("00:00") }, { ...axis, size: widest, values: (_, ticks) => ticks.map((one) => (one === null ? "" : tell(one))) }],
      series: [{ label: "UTC", value: "{YYYY}-{MM}-{DD} {HH}:{mm}" }, ...heads.slice(1).map((head) => {
        const hue = colour(`--hue${head.dataset.hue}`);
        const bars = head.dataset.paint === "bars";
        return {
          label: head.textContent, stroke: hue, width: bars ? 0 : 1.6,
          fill: bars ? `${hue}99` : undefined, spanGaps: false,
          paths: bars ? uPlot.paths.bars({ size: [0.86, 60], align: 1 }) : undefined,
          points: bars ? { show: false } : { size: 4 },
          value: (_, one) => (one === null || one === undefined ? "–" : tell(one)),
        };
      })],
    };
  }

  function draw() {
    if (!window.uPlot) return;
    for (const [id, plot] of plots) {
      if (!plot.root.isConnected) { plot.destroy(); plots.delete(id); }
    }
    for (const figure of document.querySelectorAll("figure.chart")) {
      const { heads, data } = read(figure);
      const box = figure.querySelector(".plot");
      if (!box) continue; // nothing to draw: the page says why
      const names = heads.map((head) => head.textContent).join();
      const known = plots.get(figure.id);
      const signature = JSON.stringify([data, figure.dataset.now, figure.dataset.marks]);
      if (known && known.lisaNames === names) {
        if (known.lisaSignature !== signature) known.setData(data);
        known.lisaSignature = signature;
        continue;
      }
      known?.destroy();
      const plot = new uPlot(options(figure, heads, box.clientWidth || 300), data, box);
      plot.lisaNames = names;
      plot.lisaSignature = signature;
      plots.set(figure.id, plot);
    }
  }

  function again() {
    for (const plot of plots.values()) plot.destroy();
    plots.clear();
    draw();
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  addEventListener("resize", () => {
    for (const plot of plots.values()) {
      plot.setSize({ width: plot.root.parentElement.clientWidth, height: HEIGHT });
    }
  });
  draw();
})();
