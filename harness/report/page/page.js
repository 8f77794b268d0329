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

  // A cell's text without its trailing marks; a figure that is not comparable is struck through.
  const cellText = (cell) => {
    const text = (cell.querySelector("button:not(.head)") ?? cell.querySelector(".long, s") ?? cell).firstChild;
    return (text?.data ?? text?.textContent ?? "").trim();
  };

  // A cell's number, as in 1,234.5, "12 (3)", "12 [11–13]" and "12 %"; <0.01 counts as 0.005; text is NaN.
  function number(text) {
    const match = /^(<?)\s*([-−+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(?:[%×‡†]|\(.*\)|\[.*\]|\s)*$/i.exec(text);
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
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      if (!head.textContent.trim()) return; // a button needs a name
      const button = create("button", { type: "button", className: "head" }, ...head.childNodes);
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
    }
    find.append(...saving(table), ...columns(table));
    if (find.children.length) table.closest(".table").prepend(find);
    show();
    tables.push(show);
  }

  // The columns that a table shows on demand.
  function columns(table) {
    const extra = (table.dataset.extra ?? "").split(" ").filter(Boolean).map(Number);
    if (!extra.length) return [];
    const button = create("button", { type: "button", ariaExpanded: "false" });
    const show = (shown) => {
      for (const row of table.rows) for (const column of extra) row.cells[column].hidden = !shown;
      button.textContent = shown ? "Fewer columns" : `${extra.length} more columns`;
      button.ariaExpanded = String(shown);
    };
    button.addEventListener("click", () => { show(button.ariaExpanded !== "true"); });
    show(false);
    return [button];
  }

  // --- Taking it along: tables as CSV and LaTeX, charts as SVG and PNG.

  function save(name, type, content) {
    const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
    create("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60000);
  }

  const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "table";

  const fileName = (text, suffix) => `${slug(DATA.name)}-${slug(text)}.${suffix}`;

  const action = (text, of, act) => {
    const button = create("button", { type: "button" }, text, create("span", { className: "unseen" }, ` of ${of}`));
    button.addEventListener("click", act);
    return button;
  };

  function saving(table) {
    const name = table.caption.textContent.trim();
    const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    const csv = () => [...table.rows].filter((row) => !row.hidden)
      .map((row) => [...row.cells].map((cell) => quoted(cellText(cell.querySelector("button.head") ?? cell))).join(","))
      .join("\r\n");
    const buttons = [action("CSV", name, () => save(fileName(name, "csv"), "text/csv", `${csv()}\r\n`))];
    if ("latex" in table.dataset)
      buttons.push(action("LaTeX", name, () => save(fileName("table", "tex"), "application/x-tex", DATA.latex)));
    return buttons;
  }

  function picturing(box) {
    const title = box.closest("figure").querySelector("figcaption").textContent;
    const chart = () => drawn.get(box);
    const svg = async () => { await chart().work; return chart().view.toSVG(); };
    const png = async () => {
      await chart().work;
      const canvas = await chart().view.toCanvas(3);
      const paper = create("canvas", { width: canvas.width, height: canvas.height });
      const context = paper.getContext("2d");
      context.fillStyle = getComputedStyle(document.body).backgroundColor;
      context.fillRect(0, 0, paper.width, paper.height);
      context.drawImage(canvas, 0, 0);
      return new Promise((resolve) => { paper.toBlob(resolve, "image/png"); });
    };
    return create("p", { className: "take" },
      action("SVG", title, async () => save(fileName(title, "svg"), "image/svg+xml", await svg())),
      action("PNG", title, async () => save(fileName(title, "png"), "image/png", await png())));
  }

  // --- Derivations: a figure of the comparison opens its arithmetic.

  function derivable(table, rows) {
    const keys = (table.dataset.keys ?? "").split(","); // some are empty
    const known = DATA.derivations;
    if (!known || keys.length < 2) return;
    const dialog = byId("derivation");
    rows.forEach((row, position) => keys.forEach((key, column) => {
      const derived = known.rows[position]?.[key];
      const cell = row.cells[column];
      if (!derived || !cellText(cell)) return;
      const target = cell.querySelector("s") ?? cell;
      const button = create("button", { type: "button", className: "why" }, target.firstChild);
      target.prepend(button);
      button.addEventListener("click", () => {
        const [rule, , , sentence, terms] = derived;
        const [run, figure] = [row.cells[0], table.tHead.rows[0].cells[column]].map((head) => head.textContent.trim());
        dialog.querySelector("h2").textContent = `${run}: ${figure}`;
        dialog.querySelector("p").textContent = [rule, sentence].map((place) => known.texts[place]).filter(Boolean).join(". ");
        dialog.querySelector("tbody").replaceChildren(...terms.map(([operator, value, unit, name, source]) => {
          const shown = typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 9 }) : value ?? "";
          const cells = [known.texts[operator], shown, known.texts[unit], known.texts[name], known.texts[source]];
          return create("tr", {}, ...cells.map((text, place) => create("td", { className: place === 1 ? "number" : "" }, String(text))));
        }));
        dialog.querySelector("table").hidden = !terms.length;
        dialog.showModal();
      });
    }));
  }

  // A table wider than its box scrolls in it, can be focused with Tab, and fades at the right as long as more follows.
  function scrollable(box) {
    const update = () => {
      const width = box.firstElementChild.offsetWidth - box.clientWidth;
      box.classList.toggle("fits", width <= 1);
      box.classList.toggle("more", box.scrollLeft < width - 1);
      if (width > 1) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    };
    const observer = new ResizeObserver(update);
    observer.observe(box);
    observer.observe(box.firstElementChild);
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
      drawn.forEach((chart, box) => {
        describe(chart, box);
        if (chart.view) hide(chart);
        else if (!chart.work && hidden.size) draw(box); // the picture that was there before scripts shows everything
      });
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

  // A chart is as wide as the page has space for, but no narrower than it was made: then its box scrolls.
  const WIDTH = 620;

  const BOLD = 7.5; // pixels of a title's character

  const LETTER = 6.2; // pixels of a character of the setting under a title

  function fitted(source, space) {
    const width = Math.max(space, WIDTH);
    const spec = { ...source };
    if (spec.title?.subtitle) {
      const { text, subtitle } = spec.title;
      spec.title = { ...spec.title, text: wrapped([text].flat(), width / BOLD), subtitle: wrapped(subtitle, width / LETTER) };
    }
    const wider = (cell) => ({ ...cell, width: cell.width + Math.floor((width - WIDTH) / spec.columns) });
    if (spec.spec) spec.spec = wider(spec.spec);
    spec.concat &&= spec.concat.map(wider);
    return spec;
  }

  function wrapped(lines, most) {
    const wrap = [""];
    for (const word of lines.join(" ").split(" ")) {
      if (wrap.at(-1) && wrap.at(-1).length + word.length >= most) wrap.push("");
      wrap[wrap.length - 1] += (wrap.at(-1) ? " " : "") + word;
    }
    return wrap;
  }

  // The equivalent of the width "container", for which Vega-Lite would warn of charts whose bars have a fixed height.
  function container(spec) {
    const { width, ...rest } = spec;
    const update = `isFinite(containerSize()[0]) ? max(containerSize()[0], ${WIDTH}) : ${Number(width) || WIDTH}`;
    const signal = { name: "width", init: update, on: [{ update, events: "window:resize" }] };
    return { ...rest, autosize: { type: "fit-x", contains: "padding" }, signals: [...(spec.signals ?? []), signal] };
  }

  // --- What is visible: the first bars of those that are not hidden, and the front of the points that are not.

  function last({ order, most } = {}) {
    let shown = 0;
    const end = order?.findIndex((strategy) => !hidden.has(strategy) && ++shown === most) ?? -1;
    return end < 0 ? Number.MAX_SAFE_INTEGER : end;
  }

  // From the smallest peak on, the ranked configurations that are certainly faster than all before them on the front, and
  // certainly slower than none before them at all: see `harness/report/ranking.py`.
  function front({ usermeta: { clearance, disjointRuns }, datasets: { rows } }) {
    const apart = (a, b) => (Math.min(a.runs, b.runs) >= disjointRuns ? 0 : clearance * Math.max(a.high - a.low, b.high - b.low));
    const leads = (a, b) => a.low - b.high > apart(a, b);
    const known = rows
      .filter(({ ranked, strategy }) => ranked && !hidden.has(strategy))
      .sort((a, b) => a.y - b.y || b.x - a.x || a.position - b.position);
    const chosen = [];
    known.forEach((point, place) => {
      const inGroup = ({ group }) => group === point.group;
      const isSlower = known.slice(0, place).filter(inGroup).some((other) => leads(other, point));
      if (!isSlower && chosen.filter(inGroup).every((other) => leads(point, other))) chosen.push(point);
    });
    return chosen.map(({ position }) => position);
  }

  function hide({ view, source }) {
    view.signal("hidden", [...hidden]);
    const meta = source.usermeta ?? {};
    if (meta.order) view.signal("last", last(meta));
    if (meta.clearance) view.signal("front", front(source));
    return view.runAsync();
  }

  // The caption of what is visible, from the table of exact values.
  function describe(chart, box) {
    const caption = byId(box.getAttribute("aria-describedby"));
    if (!chart.caption) return;
    if (!hidden.size) { caption.textContent = chart.caption; return; }
    const table = box.closest("figure").querySelector("table");
    const rows = [...table.tBodies[0].rows];
    const shown = rows.filter((row) => !hidden.has(row.dataset.strategy));
    let text = `${shown.length} of ${rows.length} rows belong to strategies that are shown.`;
    const values = chart.measure
      ? shown.map((row) => [number(cellText(row.cells[chart.measure])), cellText(row.cells[0])]).filter(([value]) => !Number.isNaN(value))
      : [];
    if (values.length) {
      values.sort(([a], [b]) => a - b);
      const end = ([value, label]) => `${value.toLocaleString("en", { maximumSignificantDigits: 5 })} (${label})`;
      text += ` ${cellText(table.tHead.rows[0].cells[chart.measure])}: from ${end(values[0])} to ${end(values.at(-1))}.`;
    }
    if (chart.source?.usermeta?.clearance) {
      const places = front(chart.source);
      const labels = new Map(Object.values(chart.source.datasets).flat().map((datum) => [datum.position, datum.label]));
      text += places.length ? ` The line joins ${places.map((place) => labels.get(place)).filter(Boolean).join(", ")}.` : " No line is drawn.";
    }
    caption.textContent = text;
  }

  // Drawn one after another: two overlapping drawings of a chart would both remain.
  function draw(box) {
    const chart = drawn.get(box);
    chart.dark = isDark();
    chart.work = (chart.work ?? Promise.resolve()).then(async () => {
      chart.view?.finalize();
      chart.view = null;
      const target = box.lastElementChild;
      try {
        const spec = fitted(chart.spec(), box.clientWidth);
        chart.width = box.clientWidth;
        const fluid = Boolean(spec.layer); // several plots have fixed widths
        const options = { ...OPTIONS, config: DATA.config[chart.dark ? 1 : 0], ...(fluid && { patch: container }) };
        chart.view = (await vegaEmbed(target, { ...spec, ...(fluid && { autosize: "pad" }) }, options)).view;
        if (hidden.size) await hide(chart);
      } catch (error) {
        const note = `This chart could not be drawn: ${error.message}`;
        target.replaceChildren(create("p", { className: "note" }, note));
      }
      if (target !== box.firstElementChild) box.firstElementChild.hidden = true; // the picture for pages without scripts
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
      const chart = DATA.charts[box.dataset.chart];
      const known = chart
        ? { spec: () => chart.spec, source: chart.spec, measure: chart.measure, caption: byId(box.getAttribute("aria-describedby")).textContent }
        : { spec: explorer(box), source: {} };
      drawn.set(box, known);
      box.append(create("div", { ariaHidden: "true" })); // assistive technology reads the box's description, not every tick
      box.after(picturing(box));
      if (hidden.size) describe(known, box);
      near.observe(box);
    }
    // Panels beside each other have fixed widths.
    let resizing;
    addEventListener("resize", () => {
      clearTimeout(resizing);
      resizing = setTimeout(() => drawn.forEach((chart, box) => {
        if (chart.work && (chart.source.concat || chart.source.spec) && chart.width !== box.clientWidth) draw(box);
      }), 150);
    });
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
      // All values of the column, so that colors do not change when some are hidden; strategies have those of all charts.
      const domain = [...new Set(rows.map((row) => row[color]))];
      const range = color === "strategy" && domain.every((name) => DATA.colors[name]) && domain.map((name) => DATA.colors[name]);
      const legend = { orient: "bottom", columns: Math.max(1, Math.floor(box.clientWidth / 170)), symbolLimit: 0 };
      const colors = { field: color, type: "nominal", title: texts[color], scale: { domain, ...(range && { range }) }, legend };
      const outline = { test: "datum.simulated", ...colors, legend: null };
      const simulated = rows.some((row) => row.simulated) && {
        stroke: { condition: outline, value: null }, strokeDash: { value: [3, 2] },
        fillOpacity: { condition: { test: "datum.simulated", value: 0.5 }, value: 1 },
      };
      // Labels beside the points, towards the middle of the chart, if there are few points.
      const ends = [Math.min, Math.max].map((end) => end(...known.map((row) => row[x])));
      const middle = logX ? Math.sqrt(ends[0] * ends[1]) : (ends[0] + ends[1]) / 2;
      const label = (align, dx, condition) => ({
        transform: [{ filter: { field: x, ...condition } }],
        mark: { type: "text", align, dx, limit: 160 }, encoding: { text: { field: "label" } },
      });
      const labels = known.length <= FEW ? [label("left", 8, { lte: middle }), label("right", -8, { gt: middle })] : [];
      return {
        width: 600, height: 360,
        data: { values: known },
        params: [{ name: "hidden", value: [] }],
        transform: [{ filter: "indexof(hidden, datum.strategy) < 0" }],
        encoding: { x: axis(x, logX), y: axis(y, logY) },
        layer: [
          { mark: { type: "point", filled: true, size: 90, opacity: 0.9 }, encoding: { color: colors, ...simulated, tooltip } },
          ...(known.length ? labels : []),
        ],
      };
    };
    spec(); // sets the caption and the description before the chart is drawn
    return spec;
  }

  // --- A plan's slider: what fits a device of so much memory, in words and in the table that follows.

  function memorySlider(form) {
    const entries = JSON.parse(form.dataset.entries); // GiB, label, tokens per second; the fastest first
    const [input, output] = [form.querySelector("input"), form.querySelector("output")];
    const rows = [...(form.parentElement.querySelector("table")?.tBodies[0].rows ?? [])];
    const show = () => {
      const limit = Number(input.value === input.defaultValue ? form.dataset.device : input.value);
      const fitting = entries.filter(([gib]) => gib <= limit);
      rows.forEach((row, place) => row.classList.toggle("away", entries[place][0] > limit));
      const [gib, label, speed] = fitting[0] ?? [];
      const found = fitting.length
        ? `${fitting.length} of ${entries.length} layouts fit; the fastest of them is ${label}, with ${Math.round(speed).toLocaleString("en")} tokens/s in ${gib.toFixed(1)} GiB.`
        : `nothing fits; the smallest layout needs ${Math.min(...entries.map(([size]) => size)).toFixed(1)} GiB.`;
      output.textContent = `${limit.toFixed(1)} GiB a device: ${found}`;
    };
    input.addEventListener("input", show);
    show();
  }

  // --- Printing: every chart is in light colors, and details are as the reader left them.

  function toPaper() {
    if (printing) return;
    printing = true;
    drawn.forEach((chart, box) => { if (chart.work ? chart.dark : !box.querySelector("img")) draw(box); });
  }

  function fromPaper() {
    printing = false;
    redraw();
  }

  // --- Start.

  for (const table of all("main table")) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length > 1) sortable(table, rows);
    filterable(table, rows);
    derivable(table, rows);
    scrollable(table.closest(".scroll"));
  }
  all("form.memory").forEach(memorySlider);
  themes();
  strategies();
  all(".scripted").forEach((element) => { element.hidden = false; });
  if (matchMedia("(min-width: 70rem)").matches) all(".side details").forEach((details) => { details.open = true; });
  document.querySelector("button[name=print]").addEventListener("click", () => print());
  // A link into what is folded opens it.
  const unfold = () => {
    const target = location.hash.length > 1 && byId(decodeURIComponent(location.hash.slice(1)));
    for (let at = target || null; at; at = at.parentElement) at.querySelector(":scope > details.folded")?.setAttribute("open", "");
  };
  addEventListener("hashchange", unfold);
  unfold();
  // Enter in a field of a form must not reload the page; a link to another view of this page must.
  addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", () => { if (location.hash.startsWith(PREFIX)) location.reload(); });
  addEventListener("DOMContentLoaded", charts);
  addEventListener("beforeprint", toPaper);
  addEventListener("afterprint", fromPaper);
  matchMedia("print").addEventListener("change", ({ matches }) => (matches ? toPaper() : fromPaper()));
})();
