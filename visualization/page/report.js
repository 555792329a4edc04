"use strict";
const GIB = 2 ** 30;
const text = getComputedStyle(document.body).getPropertyValue("--text").trim();
const line = getComputedStyle(document.body).getPropertyValue("--line").trim();

// Timelines: drag to zoom, double-click to zoom out; the values under the pointer stand below the picture
for (const place of document.querySelectorAll(".timeline")) {
  const curves = JSON.parse(place.querySelector("script").textContent);
  const data = uPlot.join(curves.map((curve) => [curve.t, curve.y]));
  const axis = { stroke: text, grid: { stroke: line }, ticks: { stroke: line } };
  const shown = (value) => (value == null ? "" : value.toFixed(3));
  const plot = new uPlot(
    {
      width: Math.max(300, place.clientWidth),
      height: 340,
      scales: { x: { time: false }, y: { range: (u, low, high) => [0, (high || 1) * 1.05] } },
      axes: [{ ...axis, label: place.dataset.clock }, { ...axis, label: place.dataset.measure, size: 64 }],
      series: [
        { label: "s", value: (u, value) => (value == null ? "" : value.toFixed(2)) },
        ...curves.map((curve) => ({
          label: curve.name,
          stroke: curve.colour === "#000000" ? text : curve.colour,
          dash: curve.dash,
          width: 1.5,
          spanGaps: true,
          value: (u, value) => shown(value),
        })),
      ],
      legend: { live: true },
    },
    data,
    place,
  );
  place.plot = plot;
  addEventListener("resize", () => plot.setSize({ width: Math.max(300, place.clientWidth), height: 340 }));
  // The legend's rows switch arms on and off by mouse; these boxes do by keyboard, too
  const boxes = place.previousElementSibling;
  boxes.addEventListener("change", (event) => {
    plot.setSeries(Number(event.target.value), { show: event.target.checked });
  });
}

// Tables: a column's heading sorts by it, first upwards, then downwards. Numbers by size, what is none last.
const numeric = (cell) => {
  const found = cell.textContent.replaceAll(",", "").match(/-?\d+(\.\d+)?(e[-+]?\d+)?/i);
  return found && /^[^a-z]*$/i.test(cell.textContent.slice(0, found.index)) ? Number(found[0]) : null;
};
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.querySelectorAll("thead th")];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const body = table.tBodies[0];
      const rows = [...body.rows].map((row) => [row, row.cells[column], numeric(row.cells[column])]);
      const some = rows.some(([, , number]) => number !== null);
      rows.sort(([, a, x], [, b, y]) => {
        if (some && (x === null || y === null)) return (x === null) - (y === null);
        const order = some ? x - y : a.textContent.localeCompare(b.textContent);
        return down ? -order : order;
      });
      body.append(...rows.map(([row]) => row));
    });
  });
}

// Runs: only those whose name or outcome has all the words
const search = document.querySelector("#find");
search?.addEventListener("input", () => {
  const words = search.value.toLowerCase().split(/\s+/);
  for (const run of document.querySelectorAll("details.run")) {
    const about = run.querySelector("summary").textContent.toLowerCase();
    run.hidden = !words.every((word) => about.includes(word));
  }
});
