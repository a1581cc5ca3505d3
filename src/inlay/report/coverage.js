// Maps of layers and experts

const CELL = { least: 4, most: 20, width: 880 };

/**
 * Draws a map with a row for each layer and a column for each expert, and says what is under the
 * pointer. Each row has `strengths` from 0 to 1, numbers of `framed` columns, and `texts`.
 */
function expertMap(id, rows, summary) {
  const [canvas, note] = [byId(`${id}-chart`), byId(`${id}-note`)];
  const columns = rows.reduce((most, { strengths }) => Math.max(most, strengths.length), 1);
  const cell = Math.max(CELL.least, Math.min(CELL.most, Math.floor(CELL.width / columns)));
  canvas.setAttribute("aria-label", `${rows.length} layers with experts. ${summary}`);
  note.textContent = summary;

  const redraw = () => {
    [canvas.width, canvas.height] = [columns * cell, rows.length * cell];
    const context = canvas.getContext("2d");
    const [colour, frame] = [kindColour(0), css("--warning")];
    rows.forEach(({ strengths, framed }, row) => {
      context.fillStyle = colour;
      strengths.forEach((strength, column) => {
        context.globalAlpha = 0.06 + 0.94 * Math.min(1, strength);
        context.fillRect(column * cell, row * cell, cell - 1, cell - 1);
      });
      context.globalAlpha = 1;
      context.strokeStyle = frame;
      framed.forEach((column) => {
        context.strokeRect(column * cell + 0.5, row * cell + 0.5, cell - 2, cell - 2);
      });
    });
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows.length);
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    note.textContent = rows[row]?.texts(column) ?? summary;
  });
  canvas.addEventListener("pointerleave", () => {
    note.textContent = summary;
  });
  redraw();
  return redraw;
}

function tokensMap(layers) {
  const starved = layers.reduce((sum, layer) => sum + layer.starved.length, 0);
  const all = layers.reduce((sum, { tokens }) => sum + tokens.length, 0);
  const rows = layers.map(({ module, tokens, starved: framed }) => {
    const share = tokens.reduce((sum, count) => sum + count, 0) / tokens.length || 1;
    return {
      framed,
      strengths: tokens.map((count) => count / share / 2),
      texts: (column) =>
        column < tokens.length
          ? `${module}.${column}: ${formatCount(tokens[column])} tokens`
          : null,
    };
  });
  const summary = `${formatCount(starved)} of ${formatCount(all)} experts saw no tokens, or few.`;
  return expertMap("experts", rows, summary);
}

const DECIBELS_SHOWN = 24; // from the faintest colour to the strongest

function errorsMap(layers) {
  const errors = layers.map(({ sqnr_db: ratios }) => ratios.map(numeric));
  const known = errors.flat().filter(isDrawable);
  const middle = known.length ? median(known) : 0;
  // The median is in the middle of the colours.
  const strength = (ratio) =>
    isDrawable(ratio) ? Math.max(0, 0.5 - (ratio - middle) / DECIBELS_SHOWN) : 0;
  const rows = layers.map(({ module }, row) => ({
    framed: errors[row].flatMap((ratio, column) => (ratio === null ? [column] : [])),
    strengths: errors[row].map(strength),
    texts: (column) => {
      if (column >= errors[row].length) return null;
      const ratio = errors[row][column];
      const text = ratio === null ? "no data" : withUnit(formatDecibels(ratio), "dB");
      return `${module}.${column}: ${text}`;
    },
  }));
  const [worst] = rows
    .flatMap(({ texts }, row) => errors[row].map((ratio, column) => ({ ratio, texts, column })))
    .filter(({ ratio }) => isDrawable(ratio))
    .sort((a, b) => a.ratio - b.ratio);
  const half = `Half of the experts are above ${withUnit(formatDecibels(middle), "dB")}.`;
  const summary = worst ? `${half} The worst is ${worst.texts(worst.column)}.` : "Not measured.";
  return expertMap("experts-errors", rows, summary);
}

function expertsSection(layers) {
  const maps = [
    ["experts-tokens", layers.filter(({ tokens }) => tokens.length), tokensMap],
    ["experts-errors", layers.filter(({ sqnr_db: ratios }) => ratios.length), errorsMap],
  ].filter(([, shown]) => shown.length);
  byId("experts-section").hidden = !maps.length;
  const redraws = maps.map(([id, shown, map]) => {
    byId(id).hidden = false;
    return map(shown);
  });
  return () => redraws.forEach((redraw) => redraw());
}

