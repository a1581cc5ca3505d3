// Reads the data and fills the page.

const WORST = 6;
const FINDINGS = 12; // how many are shown before the others are folded away
const PARTS = [
  ["output", "outputs"],
  ["weight", "weights"],
  ["input", "inputs"],
];
const KINDS = [
  ["weight", "weights"],
  ["input", "inputs"],
  ["output", "outputs"],
  ["q", "queries"],
  ["k", "keys"],
  ["v", "values"],
];

const nothing = (text) => element("p", "hint", text);

function readLayer(layer, place) {
  return {
    module: layer.module,
    place,
    output: numeric(layer.sqnr_db),
    weight: numeric(layer.weight_sqnr_db),
    input: numeric(layer.input_sqnr_db),
  };
}

function readSlot(slot, index) {
  return {
    name: slot.name,
    module: slot.module,
    kind: slot.kind,
    observer: slot.observer,
    format: slot.format,
    place: index + 1,
    tokens: numeric(slot.tokens),
    low: numeric(slot.low),
    high: numeric(slot.high),
    scaleMin: numeric(slot.scale_min),
    scaleMax: numeric(slot.scale_max),
    scaleCount: numeric(slot.scale_count),
    sqnr: numeric(slot.sqnr_db),
    distribution: slot.distribution,
    words: `${slot.name} ${slot.observer} ${slot.format}`.toLowerCase(),
  };
}

function readData() {
  const { report } = JSON.parse(byId("data").textContent);
  report.layers = report.layers.map(readLayer);
  report.slots = report.slots.map(readSlot);
  return report;
}

// Summary

function card(label, value, detail) {
  return element("li", "card", [
    element("p", "label", label),
    element("p", "value", value),
    element("p", "detail", detail),
  ]);
}

function sizeCard({ size_before: before, size_after: after }) {
  const ratio = formatNumber(Number((before / after).toPrecision(3)));
  const detail = before >= after ? `${ratio} times smaller` : "larger than before";
  return card(
    "Size",
    `${formatSize(before)} \u2192 ${formatSize(after)}`,
    after > 0 ? detail : "",
  );
}

function dataCard(report) {
  const padding = report.padding_tokens
    ? `, and ${formatCount(report.padding_tokens)} of padding`
    : "";
  return card(
    "Calibrated on",
    `${formatCount(report.tokens)} tokens`,
    `${formatCount(report.samples)} samples${report.data && ` of ${report.data}`}${padding}`,
  );
}

function timeCard({ stages, peak_memory: peak, tokens_per_second: rate }) {
  const seconds = stages.map((stage) => numeric(stage.seconds));
  const total = seconds.reduce((sum, value) => sum + value, 0);
  const longest = seconds.indexOf(Math.max(...seconds));
  const facts = [
    longest === -1 ? "" : `longest: ${stages[longest].name}, ${formatDuration(seconds[longest])}`,
    rate ? `${formatCount(Math.round(rate))} tokens per second` : "",
    peak ? `${formatSize(peak)} of memory at its peak` : "",
  ];
  return card(
    "Time",
    stages.length ? formatDuration(total) : MISSING,
    facts.filter(Boolean).join("; "),
  );
}

function changeText(change) {
  const [before, after, value] = [change.before, change.after, change.value].map(numeric);
  if (value !== null) return formatNumber(value);
  if (before === null && after === null) return MISSING;
  return `${formatNumber(before)} \u2192 ${formatNumber(after)}`;
}

const intervalText = ({ low, high }) =>
  `${formatNumber(numeric(low))} to ${formatNumber(numeric(high))}`;

/** Says in which intervals the numbers of a change may lie; empty if it has none. */
function intervalsText(change) {
  const given = [change.before_interval, change.after_interval, change.interval].filter(Boolean);
  return given.length ? `95% interval: ${given.map(intervalText).join(" \u2192 ")}` : "";
}

function changeCard([change]) {
  if (!change) return card("Output change", MISSING, "not measured");
  return card("Output change", changeText(change), `${change.name}, on held-out data`);
}

function fillSummary(report) {
  document.title = report.title;
  byId("title").textContent = report.title;
  const created = report.created.replace("T", " ").replace("+00:00", " UTC");
  const known = [report.model, report.scheme].filter((part) => !report.title.includes(part));
  byId("byline").textContent = [...known, created].filter(Boolean).join(" \u00b7 ");
  byId("cards").replaceChildren(
    sizeCard(report),
    changeCard(report.changes),
    dataCard(report),
    timeCard(report),
  );
}

function changeItem(change) {
  const lines = [change.name, change.explanation, intervalsText(change)].filter(Boolean);
  return element("li", "", [
    element(
      "div",
      "what",
      lines.map((line) => element("p", "", line)),
    ),
    element("p", "figure", changeText(change)),
  ]);
}

function fillChanges(changes) {
  const parts = changes.length
    ? [
        element("p", "hint", "Measured on data held out from calibration."),
        element("ul", "changes", changes.map(changeItem)),
      ]
    : [nothing("Not measured.")];
  byId("changes").replaceChildren(...parts);
}

function equalizedItem({ readers, parameters, strength, before, after }) {
  const [was, is] = [before, after].map((ratio) =>
    formatNumber(Number(Number(numeric(ratio)).toPrecision(3))),
  );
  const how = `with ${parameters.join(", ")}, strength ${formatNumber(numeric(strength))}`;
  return element("li", "", [
    element("div", "what", [element("p", "", readers.join(", ")), element("p", "", how)]),
    element("p", "figure", `${was} \u2192 ${is}`),
  ]);
}

function unequalizedItems(values) {
  const byReason = new Map();
  values.forEach(({ module, reason }) => {
    byReason.set(reason, [...(byReason.get(reason) ?? []), module]);
  });
  return [...byReason].map(([reason, modules]) =>
    element("li", "", `${modules.join(", ")}: ${reason}`),
  );
}

function compensatedItem({ module, before_db, after_db, damping, failed }) {
  const [was, is] = [before_db, after_db].map((ratio) => Number(numeric(ratio)).toFixed(1));
  const how = failed
    ? "rounded to nearest: its Hessian could not be factorized"
    : `damping ${formatNumber(numeric(damping))}`;
  return element("li", "", [
    element("div", "what", [element("p", "", module), element("p", "", how)]),
    element("p", "figure", `${was} \u2192 ${is}`),
  ]);
}

function fillCompensated({ compensated }) {
  byId("compensated-section").hidden = !compensated.length;
  const byResult = (a, b) => numeric(a.after_db) - numeric(b.after_db);
  byId("compensated").replaceChildren(
    ...changesList([...compensated].sort(byResult).map(compensatedItem)),
  );
}

function changesList(items) {
  const parts = [element("ul", "changes", items.slice(0, FINDINGS))];
  const rest = items.slice(FINDINGS);
  if (rest.length) {
    const summary = element("summary", "", `${formatCount(rest.length)} more`);
    parts.push(element("details", "", [summary, element("ul", "changes", rest)]));
  }
  return parts;
}

function fillEqualized({ equalized, unequalized }) {
  byId("equalized-section").hidden = !equalized.length && !unequalized.length;
  const byRatio = (a, b) => numeric(b.before) - numeric(a.before);
  const parts = changesList([...equalized].sort(byRatio).map(equalizedItem));
  if (unequalized.length) {
    const count = formatCount(unequalized.length);
    const summary = element("summary", "", `${count} inputs could not be equalized`);
    const reasons = element("ul", "", unequalizedItems(unequalized));
    parts.push(element("details", "", [summary, reasons]));
  }
  byId("equalized").replaceChildren(...parts);
}

/** Makes a link that finds the slots of a module, or one slot, in the table. */
function aboutLink(name) {
  const button = element("button", "link", name);
  button.type = "button";
  button.title = "Find in the table of slots";
  button.addEventListener("click", () => {
    byId("table-kind").value = "";
    byId("search").value = name;
    byId("search").dispatchEvent(new Event("input"));
    byId("slots-heading").scrollIntoView();
  });
  return button;
}

function findingItem({ severity, about, text }) {
  const lines = [element("p", "", text)];
  if (about) lines.unshift(element("p", "name", [aboutLink(about)]));
  return element("li", "", [
    element("span", `badge ${severity === "warning" ? "warning" : "note"}`, severity),
    element("div", "text", lines),
  ]);
}

function fillFindings(findings) {
  const isNote = ({ severity }) => severity !== "warning";
  const items = [...findings].sort((a, b) => isNote(a) - isNote(b)).map(findingItem);
  if (!items.length) {
    byId("findings").replaceChildren(nothing("None."));
    return;
  }
  const parts = [element("ul", "findings", items.slice(0, FINDINGS))];
  const rest = items.slice(FINDINGS);
  if (rest.length) {
    parts.push(
      element("details", "", [
        element("summary", "", `${formatCount(rest.length)} more`),
        element("ul", "findings", rest),
      ]),
    );
  }
  byId("findings").replaceChildren(...parts);
}

// Charts over depth

/** Groups entries by the kind of their module, in the order of kinds in the model. */
function groupByKind(entries, kinds) {
  const order = [...new Set(kinds.values())];
  return order
    .map((kind, index) => ({
      kind,
      index,
      entries: entries.filter((entry) => kinds.get(entry.module) === kind),
    }))
    .filter((group) => group.entries.length);
}

/** Returns the groups to draw, with their colours in the current light or dark mode. */
function shownGroups(groups, hidden) {
  return groups
    .filter(({ kind }) => !hidden.has(kind))
    .map((group) => ({ ...group, colour: kindColour(group.index) }));
}

/** Fills a legend with buttons that hide and show kinds. `hidden` holds the hidden kinds. */
function fillLegend(container, groups, hidden, redraw) {
  container.replaceChildren(
    ...groups.map(({ kind, index }) => {
      const swatch = element("span", "swatch");
      swatch.style.setProperty("--swatch", `var(--kind-${index % COLOURS})`);
      const button = element("button", "", [swatch, kind]);
      button.type = "button";
      button.setAttribute("aria-pressed", String(!hidden.has(kind)));
      button.addEventListener("click", () => {
        if (!hidden.delete(kind)) hidden.add(kind);
        button.setAttribute("aria-pressed", String(!hidden.has(kind)));
        redraw();
      });
      return button;
    }),
  );
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function errorsSection(layers, kinds) {
  const body = byId("errors-body");
  const parts = PARTS.filter(([part]) => layers.some((layer) => isDrawable(layer[part])));
  if (!parts.length) {
    body.replaceChildren(nothing("The error of layers was not measured."));
    return () => {};
  }
  const onlyWeights = parts.every(([part]) => part === "weight");
  const select = byId("errors-part");
  fillSelect(select, parts);
  const modules = layers.map((layer) => layer.module);
  const hidden = new Set();
  let groups = [];

  const drawShown = () => {
    const entries = groups.flatMap((group) => group.entries);
    const [worst] = lowest(entries);
    const what = select.selectedOptions[0].textContent;
    draw(
      byId("errors-chart"),
      `SQNR of ${what} in decibels over ${entries.length} layers in the order of depth. ` +
        `The lowest is ${formatDecibels(worst.value)} at ${worst.module}.`,
      errorsConfig(modules, shownGroups(groups, hidden), worst, `SQNR of ${what}, dB`),
    );
  };
  const choose = () => {
    const all = layers.map(({ module, place, [select.value]: value }) => ({ module, place, value }));
    const entries = all.filter(({ value }) => isDrawable(value));
    groups = groupByKind(entries, kinds);
    fillLegend(byId("errors-legend"), groups, hidden, drawShown);
    byId("errors-note").textContent = errorsNote(all, entries, onlyWeights);
    byId("worst").replaceChildren(
      ...lowest(entries).map(({ module, value }) =>
        element("li", "", [
          element("span", "name", module),
          element("span", "figure", withUnit(formatDecibels(value), "dB")),
        ]),
      ),
    );
    drawShown();
  };
  select.addEventListener("change", choose);
  choose();
  return drawShown;
}

const lowest = (entries) => [...entries].sort((a, b) => a.value - b.value).slice(0, WORST);

const ONLY_WEIGHTS =
  "No held-out data ran, so errors of inputs and outputs are unknown: pass data to see them.";

function errorsNote(all, drawn, onlyWeights) {
  const middle = withUnit(formatDecibels(median(drawn.map(({ value }) => value))), "dB");
  const exact = all.filter(({ value }) => value === Infinity).length;
  const unknown = all.length - drawn.length - exact;
  const parts = [`Half of the ${formatCount(drawn.length)} layers are above ${middle}.`];
  if (exact) parts.push(`${formatCount(exact)} without any error are not drawn.`);
  if (unknown) parts.push(`${formatCount(unknown)} without a value are not drawn.`);
  if (onlyWeights) parts.push(ONLY_WEIGHTS);
  return parts.join(" ");
}

/** Returns whether a few ranges are so wide that the others would look flat beside them. */
function isSkewed(entries) {
  const sizes = entries.map(({ low, high }) => Math.max(Math.abs(low), Math.abs(high)));
  return sizes.length > 0 && Math.max(...sizes) > 20 * median(sizes);
}

function rangesSection(slots, kinds) {
  const all = slots.filter(({ low, high }) => isDrawable(low) && isDrawable(high));
  const present = KINDS.filter(([kind]) => all.some((slot) => slot.kind === kind));
  if (!present.length) {
    byId("ranges-body").replaceChildren(nothing("No ranges were observed."));
    return () => {};
  }
  const [select, log] = [byId("ranges-kind"), byId("ranges-log")];
  fillSelect(select, present);
  // Ranges of activations are what calibration found; weights were known before.
  if (present.some(([kind]) => kind === "input")) select.value = "input";
  const hidden = new Set();
  let [groups, entries] = [[], []];
  let isAutomatic = true; // until the reader chooses

  const drawShown = () => {
    const shown = shownGroups(groups, hidden);
    const values = shown.flatMap((group) => group.entries.flatMap(({ low, high }) => [low, high]));
    const widest = entries.reduce((a, b) => (b.high - b.low > a.high - a.low ? b : a));
    draw(
      byId("ranges-chart"),
      `Observed ranges of ${entries.length} slots in the order of depth. The widest is ` +
        `${formatNumber(widest.low)} to ${formatNumber(widest.high)} at ${widest.name}.`,
      rangesConfig(entries.map(({ module }) => module), shown, valueScale(values, log.checked)),
    );
  };
  const choose = () => {
    entries = all
      .filter((slot) => slot.kind === select.value)
      .map((slot, place) => ({ ...slot, place }));
    groups = groupByKind(entries, kinds);
    if (isAutomatic) log.checked = isSkewed(entries);
    fillLegend(byId("ranges-legend"), groups, hidden, drawShown);
    const without = slots.filter((slot) => slot.kind === select.value).length - entries.length;
    byId("ranges-note").textContent = without
      ? `${formatCount(without)} slots without a range are not drawn.`
      : "";
    drawShown();
  };
  select.addEventListener("change", choose);
  log.addEventListener("change", () => {
    isAutomatic = false;
    drawShown();
  });
  choose();
  return drawShown;
}

// Distribution

function fact(term, text) {
  return element("div", "", [element("dt", "", term), element("dd", "", text)]);
}

function slotFacts(slot, density, [low, high]) {
  const clipped = low === null && high === null ? MISSING : clippedShare(density, low, high);
  const facts = [
    fact("Format", slot.format),
    fact("Observer", slot.observer),
    fact("SQNR", withUnit(formatDecibels(slot.sqnr), "dB")),
    fact("Observed range", `${formatNumber(slot.low)} to ${formatNumber(slot.high)}`),
    fact("Values", formatCount(density.total)),
    fact("Clipped", clipped === MISSING ? MISSING : formatShare(clipped)),
  ];
  for (const { from, count } of density.exact) {
    facts.push(fact(`Exactly ${formatNumber(from)}`, formatShare(count / density.total)));
  }
  return facts;
}

/** Returns whether nearly all values fill so little of the axis that they would be one line. */
function isConcentrated({ bins, total }) {
  if (!bins.length) return false;
  let [first, last, rest] = [0, bins.length - 1, 0.01 * total];
  while (first < last) {
    const isFirst = bins[first].count < bins[last].count;
    rest -= isFirst ? bins[first].count : bins[last].count;
    if (rest < 0) break;
    if (isFirst) first += 1;
    else last -= 1;
  }
  const width = (from, to) => bins[to].to - bins[from].from;
  return width(first, last) < 0.05 * width(0, bins.length - 1);
}

/** Fills the picker of slots, and draws the distribution of the chosen one. */
function distributionSection(slots) {
  const drawable = slots.filter((slot) => slot.distribution);
  if (!drawable.length) {
    byId("distribution-body").replaceChildren(nothing("No distributions were recorded."));
    return { redraw: () => {}, choose: () => {} };
  }
  const input = byId("slot");
  const worst = drawable.filter((slot) => isDrawable(slot.sqnr)).sort((a, b) => a.sqnr - b.sqnr);
  let chosen = worst[0] ?? drawable[0];
  let isAutomatic = true; // until the reader chooses

  const redraw = () => {
    const density = densityOf(chosen.distribution);
    const limits = [chosen.distribution.clip_low, chosen.distribution.clip_high]
      .map(numeric)
      .map((limit) => (isMissing(limit) ? null : limit));
    const options = { logDensity: byId("log-density").checked, logValues: byId("log-values").checked };
    draw(
      byId("distribution-chart"),
      `Density of the values of ${chosen.name}. They are clipped to ` +
        `${formatNumber(limits[0])} to ${formatNumber(limits[1])}.`,
      distributionConfig(density, limits, options),
    );
    byId("slot-facts").replaceChildren(...slotFacts(chosen, density, limits));
  };
  const choose = (slot) => {
    chosen = slot;
    input.value = slot.name;
    byId("slot-problem").textContent = "";
    if (isAutomatic) byId("log-values").checked = isConcentrated(densityOf(slot.distribution));
    redraw();
  };
  const step = (by) => {
    const next = drawable.indexOf(chosen) + by;
    choose(drawable[(next + drawable.length) % drawable.length]);
  };
  const named = new Map(drawable.map((slot) => [slot.name, slot]));
  const search = () => {
    const terms = termsOf(input.value);
    const found = drawable.find(({ name }) => hasTerms(name.toLowerCase(), terms));
    if (found) choose(named.get(input.value) ?? found);
    else byId("slot-problem").textContent = `No slot with a distribution is called ${input.value}.`;
  };

  fillNames(byId("slot-names"), drawable);
  // A choice from the list arrives as input, before the field is left.
  input.addEventListener("input", () => named.has(input.value) && choose(named.get(input.value)));
  input.addEventListener("change", search);
  input.addEventListener("focus", () => input.select());
  byId("slot-previous").addEventListener("click", () => step(-1));
  byId("slot-next").addEventListener("click", () => step(1));
  byId("log-density").addEventListener("change", redraw);
  byId("log-values").addEventListener("change", () => {
    isAutomatic = false;
    redraw();
  });
  choose(chosen);
  return { redraw, choose: (name) => choose(named.get(name)) };
}

function fillNames(list, slots) {
  list.replaceChildren(
    ...slots.map((slot) => {
      const option = element("option");
      option.value = slot.name;
      return option;
    }),
  );
}

// Table, stages and recipe

function slotsSection(slots, chooseSlot) {
  if (!slots.length) {
    byId("slots-body").replaceChildren(nothing("Nothing is quantized."));
    return;
  }
  const table = new SlotTable(byId("slots"), byId("slots-scroller"), slots, (name) => {
    chooseSlot(name);
    byId("distribution-heading").focus();
    byId("distribution-heading").scrollIntoView();
  });
  const [search, kind] = [byId("search"), byId("table-kind")];
  const present = KINDS.filter(([value]) => slots.some((slot) => slot.kind === value));
  fillSelect(kind, [["", "all"], ...present]);
  const apply = () => {
    table.search(search.value, kind.value);
    byId("slots-count").textContent =
      `${formatCount(table.shown.length)} of ${formatCount(slots.length)} slots`;
  };
  search.addEventListener("input", apply);
  kind.addEventListener("change", apply);
  apply();
}

function fillStages(stages, tiers) {
  const longest = Math.max(...stages.map((stage) => numeric(stage.seconds)).filter(isDrawable));
  const cells = stages.flatMap(({ name, seconds }) => {
    const bar = element("span");
    const share = numeric(seconds) / longest;
    bar.style.width = `${Number.isFinite(share) ? 100 * share : 0}%`;
    return [
      element("span", "stage", name),
      element("span", "bar", [bar]),
      element("span", "figure", formatSeconds(numeric(seconds))),
    ];
  });
  byId("stages").replaceChildren(
    stages.length ? element("div", "stages", cells) : nothing("Not measured."),
    ...tiers.map((tier) => element("p", "hint", tier)),
  );
}

function fillOrigin({ recipe, versions }) {
  byId("recipe").textContent = recipe;
  byId("versions").replaceChildren(
    ...Object.entries(versions).flatMap(([name, version]) => [
      element("dt", "", name),
      element("dd", "", version),
    ]),
  );
}

function main() {
  const report = readData();
  byId("report").hidden = false; // a chart has no size while it is hidden
  setChartDefaults();
  fillSummary(report);
  fillFindings(report.findings);
  fillChanges(report.changes);
  fillEqualized(report);
  fillCompensated(report);
  fillStages(report.stages, [...report.tracing, ...report.tiers]);
  fillOrigin(report);
  const kinds = kindsOf([...report.layers, ...report.slots].map(({ module }) => module));
  const distribution = distributionSection(report.slots);
  const redraws = [
    expertsSection(report.experts),
    errorsSection(report.layers, kinds),
    rangesSection(report.slots, kinds),
    distribution.redraw,
  ];
  slotsSection(report.slots, distribution.choose);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    setChartDefaults();
    redraws.forEach((redraw) => redraw());
  });
}

main();
