// The table of slots. Rows are made as the reader scrolls: laying out thousands takes long.

const ROWS_AT_ONCE = 100;

const COLUMNS = [
  { title: "#", value: (slot) => slot.place, format: formatCount },
  { title: "Slot", value: (slot) => slot.name, isText: true },
  { title: "Observer", value: (slot) => slot.observer, isText: true },
  { title: "Format", value: (slot) => slot.format, isText: true },
  { title: "SQNR", unit: "dB", value: (slot) => slot.sqnr, format: formatDecibels },
  { title: "Low", value: (slot) => slot.low, format: formatFigure },
  { title: "High", value: (slot) => slot.high, format: formatFigure },
  { title: "Scales", value: (slot) => slot.scaleCount, format: formatCount },
  { title: "Scale min", value: (slot) => slot.scaleMin, format: formatFigure },
  { title: "Scale max", value: (slot) => slot.scaleMax, format: formatFigure },
  { title: "Tokens", value: (slot) => slot.tokens, format: formatCount },
];

const collator = new Intl.Collator("en", { numeric: true });

/** Compares by column; missing values come last in either direction. */
function compareBy(column, direction) {
  return (a, b) => {
    const [x, y] = [column.value(a), column.value(b)];
    if (column.isText) return direction * collator.compare(x, y);
    if (isMissing(x) || isMissing(y)) return isMissing(x) - isMissing(y);
    return x === y ? 0 : direction * (x < y ? -1 : 1);
  };
}

class SlotTable {
  /** `scroller` is the box that the table scrolls in. */
  constructor(table, scroller, slots, onChoose) {
    this.body = table.tBodies[0];
    this.scroller = scroller;
    this.slots = slots;
    this.shown = slots;
    this.column = COLUMNS[0];
    this.direction = 1;
    this.terms = [];
    this.kind = "";
    this.headers = COLUMNS.map((column) => this.header(column));
    table.tHead.replaceChildren(element("tr", "", this.headers));
    table.setAttribute("aria-rowcount", slots.length + 1);
    scroller.addEventListener("scroll", () => this.showMore());
    // One listener for all rows.
    this.body.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) onChoose(button.textContent);
    });
    this.show();
  }

  header(column) {
    const unit = column.unit ? [element("span", "unit", ` ${column.unit}`)] : [];
    const button = element("button", "", [column.title, ...unit]);
    button.type = "button";
    button.addEventListener("click", () => this.sortBy(column));
    const header = element("th", column.isText ? "" : "figure", [button]);
    header.scope = "col";
    return header;
  }

  sortBy(column) {
    this.direction = column === this.column ? -this.direction : 1;
    this.column = column;
    this.show();
  }

  search(text, kind) {
    this.terms = termsOf(text);
    this.kind = kind;
    this.show();
  }

  show() {
    COLUMNS.forEach((column, i) => {
      const order = this.direction === 1 ? "ascending" : "descending";
      this.headers[i].setAttribute("aria-sort", column === this.column ? order : "none");
    });
    this.shown = this.slots
      .filter((slot) => !this.kind || slot.kind === this.kind)
      .filter((slot) => hasTerms(slot.words, this.terms))
      .sort(compareBy(this.column, this.direction));
    this.body.replaceChildren();
    this.scroller.scrollTop = 0;
    this.showMore();
  }

  /** Adds rows while the end of the table is within reach. */
  showMore() {
    const { scroller, body } = this;
    const done = body.rows.length;
    const below = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
    if (done === this.shown.length || (done && below > scroller.clientHeight)) return;
    body.append(...this.shown.slice(done, done + ROWS_AT_ONCE).map(slotRow));
  }
}

function slotRow(slot) {
  return element("tr", "", COLUMNS.map((column) => slotCell(slot, column)));
}

function slotCell(slot, column) {
  if (column.title === "Slot") return nameCell(slot);
  const value = column.value(slot);
  if (column.isText) return element("td", "", value);
  return element("td", "figure", column.format(value));
}

/** Makes the cell of a name, which is a button if the slot has a distribution to show. */
function nameCell(slot) {
  if (!slot.distribution) return element("td", "name", slot.name);
  const button = element("button", "link", slot.name);
  button.type = "button";
  button.title = "Show the distribution";
  return element("td", "name", [button]);
}
