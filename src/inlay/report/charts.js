// The three charts. A function for each returns the Chart.js configuration for its data.

const COLOURS = 8;
const TICK_SPACE = 30; // pixels a label of the depth axis needs

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const kindColour = (index) => css(`--kind-${index % COLOURS}`);

/** Draws a new chart into a canvas. A screen reader reads out the label. */
function draw(canvas, label, config) {
  Chart.getChart(canvas)?.destroy();
  canvas.setAttribute("aria-label", label);
  return new Chart(canvas, config);
}

function setChartDefaults() {
  const { defaults } = Chart;
  defaults.animation = false;
  defaults.maintainAspectRatio = false;
  defaults.font.family = getComputedStyle(document.body).fontFamily;
  defaults.font.size = 12;
  defaults.color = css("--muted");
  defaults.borderColor = css("--grid");
  defaults.plugins.legend.display = false;
  Object.assign(defaults.plugins.tooltip, {
    backgroundColor: css("--text"),
    titleColor: css("--ground"),
    bodyColor: css("--ground"),
    padding: 8,
    cornerRadius: 4,
    boxPadding: 4,
    usePointStyle: true,
  });
}

/** Breaks a long name into lines, since a tooltip does not wrap. */
function nameLines(name) {
  const lines = [""];
  for (const part of name.split(/(?<=\.)/)) {
    if (lines.at(-1) && (lines.at(-1) + part).length > 34) lines.push("");
    lines[lines.length - 1] += part;
  }
  return lines;
}

/** Returns the places of each block, from its first to its last module. */
function blockRuns(modules) {
  const runs = [];
  modules.map(blockOf).forEach((block, place) => {
    const run = runs.at(-1);
    if (run && run.block === block) run.last = place;
    else runs.push({ block, first: place, last: place });
  });
  return runs.filter(({ block }) => block !== null);
}

/** Returns the horizontal axis of charts over depth: one place per module, labelled by block. */
function depthAxis(modules) {
  const runs = blockRuns(modules);
  const middles = new Map(runs.map(({ block, first, last }) => [(first + last) / 2, block]));
  return {
    type: "linear",
    min: -0.8,
    max: Math.max(modules.length - 0.2, 0.8),
    title: { display: true, text: runs.length ? "block" : "order of depth" },
    grid: { display: false },
    border: { color: css("--line") },
    ticks: { autoSkip: false, maxRotation: 0, callback: (value) => middles.get(value) ?? "" },
    afterBuildTicks: (scale) => {
      const room = Math.max(2, scale.chart.width / TICK_SPACE);
      const step = [1, 2, 5, 10, 20, 50, 100].find((size) => runs.length / size <= room) ?? 200;
      const shown = [...middles].filter(([, block]) => block % step === 0);
      scale.ticks = shown.map(([value]) => ({ value }));
    },
  };
}

/** Shades every other block, where blocks are wide enough to tell them apart. */
const blocksPlugin = {
  id: "blocks",
  beforeDraw({ ctx, chartArea, scales }, _, { runs }) {
    if (chartArea.width / runs.length < 8) return;
    ctx.save();
    ctx.fillStyle = css("--band");
    for (const { first, last } of runs.filter(({ block }) => block % 2 === 1)) {
      const [from, to] = [first - 0.5, last + 0.5].map((x) => scales.x.getPixelForValue(x));
      ctx.fillRect(from, chartArea.top, to - from, chartArea.height);
    }
    ctx.restore();
  },
};

/** Formats a tick. Ticks are round numbers, so trailing zeros say nothing. */
function formatTick(value) {
  const size = Math.abs(value);
  if (size === 0 || (size >= 1e-3 && size < 1e5)) return formatNumber(value);
  return minus(Number(value.toPrecision(4)).toExponential());
}

/** Describes an axis of values: linear, or logarithmic on both sides of zero. */
function valueScale(values, logarithmic) {
  const largest = Math.max(...values.map(Math.abs));
  if (!logarithmic || !(largest > 0)) return { at: (value) => value, ticks: null };
  const unit = 10 ** (Math.floor(Math.log10(largest)) - 3);
  const at = (value) => Math.sign(value) * Math.log10(1 + Math.abs(value) / unit);
  const ticks = (powers) => {
    const values = powers.map((power) => unit * 10 ** power);
    return [...values.map((value) => -value).reverse(), 0, ...values];
  };
  return { at, ticks: ticks([1, 2, 3]), fewTicks: ticks([1, 3]) };
}

/** Returns the options of Chart.js for an axis that `valueScale` describes. */
function valueAxis(scale, title, limit) {
  const axis = {
    type: "linear",
    title: { display: true, text: title },
    border: { display: false },
    ticks: { maxTicksLimit: limit, maxRotation: 0, includeBounds: false, callback: formatTick },
  };
  if (scale.ticks === null) return axis;
  const names = new Map(scale.ticks.map((value) => [scale.at(value), formatTick(value)]));
  axis.ticks.callback = (place) => names.get(place) ?? "";
  axis.ticks.autoSkip = false;
  axis.afterBuildTicks = (drawn) => {
    const isTight = drawn.isHorizontal() && drawn.chart.width < 480;
    const places = (isTight ? scale.fewTicks : scale.ticks).map(scale.at);
    const inside = places.filter((place) => place >= drawn.min && place <= drawn.max);
    drawn.ticks = inside.map((value) => ({ value }));
  };
  return axis;
}

/** Returns the ends of an axis that shows these places, with a little room beyond them. */
function bounds(places) {
  const [min, max] = [Math.min(...places), Math.max(...places)];
  if (!(max > min)) return {};
  const margin = 0.03 * (max - min);
  return { min: min - margin, max: max + margin };
}

/** Returns the line of one kind over depth. `entries` have a module, a place and a value. */
function errorDataset(kind, entries, colour, worst, places) {
  // Points of neighbours must not run into each other.
  const radius = ({ chart }) => Math.min(2.5, Math.max(0, (0.5 * chart.width) / places - 0.5));
  return {
    label: kind,
    data: entries.map(({ place, value }) => ({ x: place, y: value })),
    names: entries.map(({ module }) => module),
    borderColor: colour,
    backgroundColor: colour,
    borderWidth: 1.5,
    pointRadius: (point) => (entries[point.dataIndex] === worst ? 5 : radius(point)),
    pointHoverRadius: 6,
    pointHoverBackgroundColor: colour,
  };
}

/** Configures SQNR over depth, with a line for each kind of layer. */
function errorsConfig(modules, groups, worst, title) {
  return {
    type: "line",
    data: {
      datasets: groups.map(({ kind, colour, entries }) =>
        errorDataset(kind, entries, colour, worst, modules.length),
      ),
    },
    plugins: [blocksPlugin],
    options: {
      interaction: { mode: "nearest", intersect: false },
      scales: {
        x: depthAxis(modules),
        y: {
          title: { display: true, text: title },
          border: { display: false },
          grace: "4%",
          ticks: { maxTicksLimit: 7 },
        },
      },
      plugins: {
        blocks: { runs: blockRuns(modules) },
        tooltip: {
          callbacks: {
            title: ([item]) => nameLines(item.dataset.names[item.dataIndex]),
            label: (item) => withUnit(formatDecibels(item.parsed.y), "dB"),
          },
        },
      },
    },
  };
}

/** Configures ranges over depth, with a bar from low to high for each slot. */
function rangesConfig(modules, groups, scale) {
  const ends = groups.flatMap(({ entries }) => entries.flatMap(({ low, high }) => [low, high]));
  return {
    type: "bar",
    data: {
      datasets: groups.map(({ kind, colour, entries }) => ({
        label: kind,
        data: entries.map(({ place, low, high }) => ({
          x: place,
          y: [scale.at(low), scale.at(high)],
        })),
        entries,
        grouped: false,
        backgroundColor: colour,
        minBarLength: 2,
        barPercentage: 0.8,
        categoryPercentage: 1,
        maxBarThickness: 18,
      })),
    },
    plugins: [blocksPlugin],
    options: {
      interaction: { mode: "nearest", axis: "x", intersect: false },
      scales: {
        x: { ...depthAxis(modules), offset: false },
        y: { ...valueAxis(scale, "value", 7), ...bounds(ends.map(scale.at)) },
      },
      plugins: {
        blocks: { runs: blockRuns(modules) },
        tooltip: {
          callbacks: {
            title: ([item]) => nameLines(item.dataset.entries[item.dataIndex].name),
            label: (item) => {
              const { low, high } = item.dataset.entries[item.dataIndex];
              return `${formatNumber(low)} to ${formatNumber(high)}`;
            },
          },
        },
      },
    },
  };
}

/** Returns bins with the density of their values, and apart from them bins without width. */
function densityOf(distribution) {
  const edges = distribution.edges.map(Number);
  const counts = distribution.counts.map((count) => (Number(count) > 0 ? Number(count) : 0));
  const total = counts.reduce((sum, count) => sum + count, 0);
  const all = counts.map((count, i) => ({ from: edges[i], to: edges[i + 1], count }));
  const bins = all.filter(({ from, to }) => isDrawable(from) && isDrawable(to) && to > from);
  for (const bin of bins) bin.density = total ? bin.count / (bin.to - bin.from) / total : 0;
  return { bins, exact: all.filter(({ from, to, count }) => from === to && count), all, total };
}

/** Returns the share of values beyond the clipping range, assuming even spread inside bins. */
function clippedShare({ all, total }, low, high) {
  const [least, most] = [low ?? -Infinity, high ?? Infinity];
  const outside = ({ from, to }) => {
    const width = to - from;
    const point = isDrawable(from) ? from : to; // of a bin without a width that can be divided
    if (!isDrawable(width) || width === 0) return point < least || point > most ? 1 : 0;
    return 1 - Math.max(0, Math.min(to, most) - Math.max(from, least)) / width;
  };
  return total ? all.reduce((sum, bin) => sum + bin.count * outside(bin), 0) / total : 0;
}

/** Returns the outline of the density: two points per bin, down to the floor at both ends. */
function outline(bins, scale, floor) {
  const points = bins.flatMap(({ from, to, density }) => {
    const y = Math.max(density, floor);
    return [{ x: scale.at(from), y }, { x: scale.at(to), y }];
  });
  if (!points.length) return points;
  return [{ x: points[0].x, y: floor }, ...points, { x: points.at(-1).x, y: floor }];
}

function densityAxis(logarithmic, floor) {
  const axis = {
    type: logarithmic ? "logarithmic" : "linear",
    title: { display: true, text: "density (share per unit)" },
    border: { display: false },
    ticks: { maxTicksLimit: 6, callback: formatTick },
  };
  if (!logarithmic) return { ...axis, beginAtZero: true };
  axis.min = floor;
  axis.afterBuildTicks = (scale) => {
    const first = Math.floor(Math.log10(scale.min));
    const powers = Math.ceil(Math.log10(scale.max)) - first + 1;
    const step = Math.ceil(powers / 6);
    const digits = powers > 4 ? [1] : [1, 2, 5];
    scale.ticks = Array.from({ length: powers }, (_, i) => first + i)
      .filter((power) => power % step === 0)
      .flatMap((power) => digits.map((digit) => ({ value: digit * 10 ** power })))
      .filter(({ value }) => value >= scale.min && value <= scale.max);
  };
  return axis;
}

/** Configures the density of a slot's values, with the clipping range. */
function distributionConfig({ bins }, limits, { logDensity, logValues }) {
  const drawn = limits.filter(isDrawable);
  const ends = bins.length ? [bins[0].from, bins.at(-1).to] : [];
  const scale = valueScale([...ends, ...drawn], logValues);
  const smallest = Math.min(...bins.map(({ density }) => density).filter((density) => density > 0));
  const isLog = logDensity && Number.isFinite(smallest);
  const floor = isLog ? smallest / 2 : 0;
  return {
    type: "line",
    data: {
      datasets: [
        {
          data: outline(bins, scale, floor),
          borderColor: css("--accent"),
          backgroundColor: css("--accent-soft"),
          borderWidth: 1.25,
          pointRadius: 0,
          pointHoverRadius: 3,
          fill: "start",
        },
      ],
    },
    plugins: [clippingPlugin],
    options: {
      layout: { padding: { top: 22 } },
      interaction: { mode: "nearest", axis: "x", intersect: false },
      scales: {
        x: { ...valueAxis(scale, "value", 9), ...bounds([...ends, ...drawn].map(scale.at)) },
        y: densityAxis(isLog, floor),
      },
      plugins: {
        clipping: { low: limits[0], high: limits[1], scale },
        tooltip: { displayColors: false, callbacks: distributionTooltip(bins) },
      },
    },
  };
}

function distributionTooltip(bins) {
  const binOf = (item) => bins[Math.min(Math.max(item.dataIndex - 1, 0) >> 1, bins.length - 1)];
  return {
    title: ([item]) => {
      const { from, to } = binOf(item);
      return `${formatNumber(from)} to ${formatNumber(to)}`;
    },
    label: (item) => {
      const { count, density } = binOf(item);
      return [`${formatCount(count)} values`, `density ${formatNumber(density)}`];
    },
  };
}

/** Shades the clipped ranges, and writes the limits above their lines. */
const clippingPlugin = {
  id: "clipping",
  beforeDatasetsDraw(chart, _, { low, high, scale }) {
    const { left, right } = chart.chartArea;
    if (isDrawable(low)) drawLimit(chart, low, scale.at(low), left, "right");
    if (isDrawable(high)) drawLimit(chart, high, scale.at(high), right, "left");
  },
};

function drawLimit(chart, limit, place, outer, align) {
  const { ctx, chartArea, scales } = chart;
  const x = scales.x.getPixelForValue(place);
  const text = `clip ${formatNumber(limit)}`;
  ctx.save();
  ctx.fillStyle = css("--clip-soft");
  ctx.fillRect(Math.min(x, outer), chartArea.top, Math.abs(outer - x), chartArea.height);
  ctx.strokeStyle = ctx.fillStyle = css("--clip");
  ctx.setLineDash([4, 3]);
  ctx.beginPath();
  ctx.moveTo(x, chartArea.top - 4);
  ctx.lineTo(x, chartArea.bottom);
  ctx.stroke();
  ctx.font = `12px ${Chart.defaults.font.family}`;
  // Write outside the limits if there is room, so that close limits do not overlap.
  const width = ctx.measureText(text).width;
  const fits = align === "right" ? x - width > 0 : x + width < chart.width;
  const inwards = align === "right" ? "left" : "right";
  ctx.textAlign = fits ? align : inwards;
  ctx.fillText(text, x, chartArea.top - 8);
  ctx.restore();
}
