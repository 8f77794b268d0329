"use strict";
// The page's themes, sorting, filters and charts. Without this script text and tables remain readable.
// It runs before Vega is parsed, so that tables respond immediately; charts wait for DOMContentLoaded.
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);
  const create = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const hidden = new Set(); // strategies not shown

  // The only live region: with a count beside every table, all would be announced when a strategy is hidden.
  const announce = (text) => { byId("status").textContent = text; };

  // --- The view is stored in the address, so that a link shares it: #view?hide=ddp&x=… Other fragments are not changed.

  const PREFIX = "#view?";
  const parameters = new URLSearchParams(location.hash.startsWith(PREFIX) ? location.hash.slice(PREFIX.length) : "");

  function updateAddress() {
    try {
      history.replaceState(null, "", parameters.size ? PREFIX + parameters : location.pathname + location.search);
    } catch { /* A browser may refuse this for local files or frequent changes: the address then stays as it is. */ }
  }

  // --- Theme: auto, light or dark. Printed pages are always light.

  function isDark() {
    const theme = document.documentElement.dataset.theme;
    return !printing && (theme === "auto" ? dark.matches : theme === "dark");
  }

  function themes() {
    let stored = null;
    try { stored = localStorage.getItem("report-theme"); } catch { /* Local files may have no storage. */ }
    if (!["light", "dark"].includes(stored)) stored = "auto";
    const choose = (theme) => { document.documentElement.dataset.theme = theme; };
    for (const input of all("input[name=theme]")) {
      input.checked = input.value === stored;
      input.addEventListener("change", () => {
        choose(input.value);
        try { localStorage.setItem("report-theme", input.value); } catch { /* As above. */ }
        redraw();
      });
    }
    choose(stored);
    dark.addEventListener("change", redraw);
  }

  // --- Tables.

  const MANY = 5; // tables with more rows have a text filter
  const tables = [];

  // A cell's text without its trailing marks.
  const cellText = (cell) => (cell.querySelector(".long") ?? cell).firstChild?.data?.trim() ?? "";

  // A cell's number, as in 1,234.5, "12 (3)" and "12 %"; <0.01 counts as 0.005; text is NaN.
  function number(text) {
    const match = /^(<?)\s*([-−+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(?:[%×]|\(.*\)|\s)*$/i.exec(text);
    if (!match) return NaN;
    const value = Number(match[2].replaceAll(",", "").replace("−", "-"));
    return match[1] ? value / 2 : value;
  }

  const collator = new Intl.Collator("en", { numeric: true });

  function sorted(rows, column, descending) {
    const texts = new Map(rows.map((row) => [row, cellText(row.cells[column])]));
    const filled = rows.filter((row) => texts.get(row) !== "");
    const numbers = new Map(filled.map((row) => [row, number(texts.get(row))]));
    // Numbers precede text in both directions, and empty cells come last; sort() is stable.
    filled.sort((a, b) => {
      const [m, n] = [numbers.get(a), numbers.get(b)];
      if (Number.isNaN(m) !== Number.isNaN(n)) return Number.isNaN(m) ? 1 : -1;
      return (descending ? -1 : 1) * (Number.isNaN(m) ? collator.compare(texts.get(a), texts.get(b)) : m - n);
    });
    return [...filled, ...rows.filter((row) => texts.get(row) === "")];
  }

  function sortable(table, rows) {
    const heads = all("thead th", table);
    heads.forEach((head, column) => {
      if (!head.textContent.trim()) return; // a button needs a name
      const button = create("button", { type: "button" }, ...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const next = { none: "ascending", ascending: "descending" }[head.ariaSort ?? "none"];
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        if (next) head.setAttribute("aria-sort", next);
        table.tBodies[0].append(...(next ? sorted(rows, column, next === "descending") : rows));
        announce(`${button.textContent}: ${next ?? "in the original order"}`);
      });
    });
  }

  // `show` applies the text and the strategies to the rows.
  function filterable(table, rows) {
    const texts = rows.map((row) => row.textContent.toLowerCase());
    const input = create("input", { type: "search", autocomplete: "off", spellcheck: false });
    const count = create("span", { className: "count" });
    const find = create("div", { className: "find" });
    const show = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, i) => {
        row.hidden = hidden.has(row.dataset.strategy) || !words.every((word) => texts[i].includes(word));
        shown += !row.hidden;
      });
      find.classList.toggle("some", shown < rows.length);
      count.textContent = shown === rows.length ? `${shown} rows` : `${shown} of ${rows.length} rows`;
    };
    input.addEventListener("input", () => { show(); announce(count.textContent); });
    if (rows.length > MANY) {
      const name = create("span", { className: "unseen" }, ` in ${table.caption.textContent}`);
      const label = create("label", {}, create("span", {}, "Filter rows", name), input);
      find.append(label, count);
      table.closest(".table").prepend(find);
    }
    show();
    tables.push(show);
  }

  // A box that scrolls sideways can be focused with Tab, and fades at the right as long as more follows.
  function scrollable(box) {
    const update = () => {
      const width = box.scrollWidth - box.clientWidth;
      box.classList.toggle("more", box.scrollLeft < width - 1);
      if (width > 1) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    };
    new ResizeObserver(update).observe(box);
    box.addEventListener("scroll", update, { passive: true });
  }

  // --- Strategies.

  function strategies() {
    const form = byId("filter");
    if (!form) return;
    const boxes = all("input[name=strategy]", form);
    const apply = () => {
      hidden.clear();
      boxes.filter((box) => !box.checked).forEach((box) => hidden.add(box.value));
      tables.forEach((show) => show());
      drawn.forEach(({ view }) => view && hide(view));
      byId("left-out").textContent = `Hidden strategies: ${[...hidden].join(", ")}.`;
      byId("left-out").hidden = hidden.size === 0;
    };
    const changed = () => {
      apply();
      parameters.delete("hide");
      hidden.forEach((strategy) => parameters.append("hide", strategy));
      updateAddress();
      announce(`${boxes.length - hidden.size} of ${boxes.length} strategies shown`);
    };
    form.addEventListener("change", changed);
    for (const [name, checked] of [["all", true], ["none", false]]) {
      form.elements[name].addEventListener("click", () => {
        boxes.forEach((box) => { box.checked = checked; });
        changed();
      });
    }
    boxes.forEach((box) => { box.checked = !parameters.getAll("hide").includes(box.value); });
    apply();
  }

  // --- Charts. `drawn` has the specification of every chart and, once it is drawn, its view.

  const drawn = new Map();
  let printing = false;

  const OPTIONS = {
    mode: "vega-lite",
    renderer: "svg",
    actions: false,
    ast: true, // expressions by Vega's interpreter: the page's policy allows no eval
    defaultStyle: false, // page.css has it; the policy allows no other style
    tooltip: { disableDefaultStyle: true },
    logLevel: 1, // errors only: Vega warns of axes without extent where all strategies are hidden
  };

  // On narrower screens a legend is one column above or below the chart.
  const NARROW = 500;

  function fitted(spec, width) {
    if (width >= NARROW) return spec;
    const legend = (options) => ({ ...options, columns: 1, orient: options.orient === "top" ? "top" : "bottom" });
    return JSON.parse(JSON.stringify(spec), (key, value) => {
      if (key === "legend" && value) return legend(value);
      if (key === "color" && value?.field && value.legend === undefined) return { ...value, legend: legend({}) };
      return value;
    });
  }

  // The equivalent of the width "container", for which Vega-Lite would warn of charts whose bars have a fixed height.
  function container(spec) {
    const { width, ...rest } = spec;
    const update = `isFinite(containerSize()[0]) ? containerSize()[0] : ${Number(width) || 400}`;
    const signal = { name: "width", init: update, on: [{ update, events: "window:resize" }] };
    return { ...rest, autosize: { type: "fit-x", contains: "padding" }, signals: [...(spec.signals ?? []), signal] };
  }

  const hide = (view) => view.signal("hidden", [...hidden]).runAsync();

  // Drawn one after another: two overlapping drawings of a chart would both remain.
  function draw(box) {
    const chart = drawn.get(box);
    chart.dark = isDark();
    chart.work = (chart.work ?? Promise.resolve()).then(async () => {
      chart.view?.finalize();
      chart.view = null;
      try {
        const spec = fitted(chart.spec(), box.clientWidth);
        const fluid = spec.usermeta?.fluid;
        const options = { ...OPTIONS, config: DATA.config[chart.dark ? 1 : 0], ...(fluid && { patch: container }) };
        chart.view = (await vegaEmbed(box.firstChild, { ...spec, ...(fluid && { autosize: "pad" }) }, options)).view;
        if (hidden.size) await hide(chart.view);
      } catch (error) {
        const note = `This chart could not be drawn: ${error.message}`;
        box.firstChild.replaceChildren(create("p", { className: "note" }, note));
      }
    });
  }

  function redraw() {
    drawn.forEach((chart, box) => { if (chart.work && chart.dark !== isDark()) draw(box); });
  }

  function charts() {
    const near = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) if (isIntersecting && !drawn.get(target).work) draw(target);
    }, { rootMargin: "800px" });
    for (const box of all(".chart")) {
      const spec = DATA.charts[box.dataset.chart];
      drawn.set(box, { spec: spec ? () => spec : explorer(box) });
      box.hidden = false;
      box.append(create("div", { ariaHidden: "true" })); // assistive technology reads the box's description, not every tick
      // Reserve the height, so that the text does not jump when a chart above it is drawn.
      if (Number.isFinite(spec?.height)) box.style.minHeight = `${spec.height + 40}px`;
      near.observe(box);
    }
  }

  // --- The custom chart.

  const FEW = 16; // charts with at most this many points have labels

  function explorer(box) {
    const { rows, texts, numbers } = DATA.explorer;
    const form = document.querySelector(".axes");
    const controls = [...form.elements];
    const value = (control) => (control.type === "checkbox" ? control.checked : control.value);
    const chosen = () => Object.fromEntries(controls.map((control) => [control.name, value(control)]));
    form.elements.x.selectedIndex = 1;
    for (const control of controls) {
      const setting = parameters.get(control.name);
      if (control.type === "checkbox") control.checked = setting !== null;
      else if ([...control.options].some((option) => option.value === setting)) control.value = setting;
    }
    form.addEventListener("change", () => {
      for (const [name, setting] of Object.entries(chosen())) setting ? parameters.set(name, setting) : parameters.delete(name);
      updateAddress();
      draw(box);
      drawn.get(box).work.then(() => announce(byId("axes-description").textContent));
    });

    const spec = () => {
      const { x, y, color, "log-x": logX, "log-y": logY } = chosen();
      const drawable = (number, log) => number !== null && (!log || number > 0);
      const known = rows.filter((row) => drawable(row[x], logX) && drawable(row[y], logY));
      byId("axes-caption").textContent = `${numbers[y]} by ${numbers[x]}`;
      byId("axes-description").textContent =
        `${known.length} of ${rows.length} rows have both values${logX || logY ? " and can be drawn" : ""}.`;
      const axis = (field, log) => ({
        field, type: "quantitative", title: numbers[field], scale: log ? { type: "log" } : { zero: false, padding: 12 },
      });
      const exact = (field) => ({ field, type: "quantitative", format: ",.6~r", title: numbers[field] });
      const tooltip = [{ field: "label", title: "run" }, { field: color, title: texts[color] }, exact(x), exact(y)];
      // All values of the column, so that colors do not change when some are hidden.
      const domain = [...new Set(rows.map((row) => row[color]))];
      const legend = { orient: "bottom", columns: Math.max(1, Math.floor(box.clientWidth / 170)), symbolLimit: 0 };
      const colors = { field: color, type: "nominal", title: texts[color], scale: { domain }, legend };
      // Labels beside the points, towards the middle of the chart, if there are few points.
      const ends = [Math.min, Math.max].map((end) => end(...known.map((row) => row[x])));
      const middle = logX ? Math.sqrt(ends[0] * ends[1]) : (ends[0] + ends[1]) / 2;
      const label = (align, dx, condition) => ({
        transform: [{ filter: { field: x, ...condition } }],
        mark: { type: "text", align, dx, limit: 160 }, encoding: { text: { field: "label" } },
      });
      const labels = known.length <= FEW ? [label("left", 8, { lte: middle }), label("right", -8, { gt: middle })] : [];
      return {
        usermeta: { fluid: true }, width: 600, height: 360,
        data: { values: known },
        params: [{ name: "hidden", value: [] }],
        transform: [{ filter: "indexof(hidden, datum.strategy) < 0" }],
        encoding: { x: axis(x, logX), y: axis(y, logY) },
        layer: [
          { mark: { type: "point", filled: true, size: 90, opacity: 0.9 }, encoding: { color: colors, tooltip } },
          ...(known.length ? labels : []),
        ],
      };
    };
    spec(); // sets the caption and the description before the chart is drawn
    return spec;
  }

  // --- Printing: everything is open, and every chart is drawn in light colors.

  const opened = [];

  function toPaper() {
    if (printing) return;
    printing = true;
    opened.push(...all("details:not([open])"));
    opened.forEach((details) => { details.open = true; });
    drawn.forEach((chart, box) => { if (!chart.work || chart.dark) draw(box); });
  }

  function fromPaper() {
    printing = false;
    opened.splice(0).forEach((details) => { details.open = false; });
    redraw();
  }

  // --- Start.

  for (const table of all("main table")) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length > 1) sortable(table, rows);
    filterable(table, rows);
    scrollable(table.closest(".scroll"));
  }
  themes();
  strategies();
  all(".scripted").forEach((element) => { element.hidden = false; });
  if (matchMedia("(max-width: 69.99rem)").matches) all(".side details").forEach((details) => { details.open = false; });
  // Enter in a field of a form must not reload the page; a link to another view of this page must.
  addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", () => { if (location.hash.startsWith(PREFIX)) location.reload(); });
  addEventListener("DOMContentLoaded", charts);
  addEventListener("beforeprint", toPaper);
  addEventListener("afterprint", fromPaper);
  matchMedia("print").addEventListener("change", ({ matches }) => (matches ? toPaper() : fromPaper()));
})();
