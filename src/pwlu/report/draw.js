// Helpers for drawing: points of functions, axes, SVG elements.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function html(name, text, attributes = {}) {
  const made = Object.assign(document.createElement(name), attributes);
  made.textContent = text;
  return made;
}

// y = f(x), as pwlu.reference defines it.
function valueAt(unit, x) {
  const { left, right, heights, leftSlope, rightSlope } = unit;
  const last = heights.length - 1;
  if (x < left) return heights[0] + (x - left) * leftSlope;
  if (x >= right) return heights[last] + (x - right) * rightSlope;
  const place = ((x - left) / (right - left)) * last;
  const k = Math.min(Math.floor(place), last - 1);
  return heights[k] + (place - k) * (heights[k + 1] - heights[k]);
}

// Points [x, y] from low to high; straight lines between them are exact.
function pointsOf(unit, low, high) {
  const { left, right, heights } = unit;
  const knots = Array.from(heights, (_, k) => left + ((right - left) * k) / (heights.length - 1));
  const before = left - 1e-9 * Math.abs(right - left); // if the bounds have crossed, the function jumps here
  const xs = [low, before, ...knots, high].filter((x) => x >= low && x <= high).sort((a, b) => a - b);
  return xs.map((x) => [x, valueAt(unit, x)]);
}

// The part of a polyline between low and high.
function clipped([xs, ys], low, high) {
  const at = (x) => {
    const i = Math.max(1, xs.findIndex((other) => other >= x));
    return ys[i - 1] + ((ys[i] - ys[i - 1]) * (x - xs[i - 1])) / (xs[i] - xs[i - 1]);
  };
  const inside = xs.map((x, i) => [x, ys[i]]).filter(([x]) => x > low && x < high);
  return [[low, at(low)], ...inside, [high, at(high)]];
}

function pathOf(points, place) {
  const known = points.filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
  return known.map(([x, y], i) => (i ? "L" : "M") + place(x, y).map((p) => p.toFixed(1)).join(" ")).join("");
}

function extent(values, otherwise) {
  const known = values.filter(Number.isFinite);
  if (!known.length) return otherwise;
  let [low, high] = [Infinity, -Infinity];
  for (const value of known) [low, high] = [Math.min(low, value), Math.max(high, value)];
  return [low, high];
}

function withMargin([low, high], share) {
  const more = share * (high - low) || 1;
  return [low - more, high + more];
}

// Round numbers from low to high that are 1, 2 or 5 times a power of ten apart.
function ticks([low, high], about = 6) {
  const rough = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.7);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(Number((k * step).toPrecision(10)));
  return found;
}

// Format with at most this many digits. `step`: the precision of the value, rounded up to a power of ten.
function number(value, digits = 3, step = 0) {
  if (!Number.isFinite(value)) return "–";
  const unit = 10 ** Math.ceil(Math.log10(step));
  const known = step ? Math.round(value / unit) * unit : value;
  return Number(known.toPrecision(digits)).toString().replace("-", "−");
}

const percent = (share, digits = 1) => (Number.isFinite(share) ? `${(100 * share).toFixed(digits)} %` : "–");
