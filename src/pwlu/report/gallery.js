// The gallery: keeps the selected layer, channel and moment, and draws them.

const ON_A_CARD = 24;
const BOX = { left: 46, right: 548, top: 12, bottom: 344 };
const ROOM_FOR_INPUTS = 0.22; // share of the height, along the lower edge

function read(data, buffer) {
  const bytes = new Bytes(buffer);
  const moments = data.moments.length;
  return data.layers.map((layer) => {
    const { channels, intervals } = layer;
    const read = { ...layer, steps: {} };
    for (const [name, columns] of Object.entries({ bounds: 2, heights: intervals + 1, slopes: 2 })) {
      ({ values: read[name], steps: read.steps[name] } = bytes.snapshots(moments, channels, columns));
    }
    read.classes = bytes.bytes(channels);
    for (const name of ["movement", "p5", "p95"]) read[name] = bytes.float16s(channels);
    for (const name of ["iou", "outside", "empty"]) read[name] = bytes.shares(channels);
    if (data.bars) {
      [read.low, read.high] = [bytes.float16s(channels), bytes.float16s(channels)];
      read.bars = bytes.bytes(channels * data.bars);
    }
    return read;
  });
}

function unitOf(layer, channel, moment) {
  const knots = layer.intervals + 1;
  return {
    left: layer.bounds[moment][2 * channel],
    right: layer.bounds[moment][2 * channel + 1],
    heights: layer.heights[moment].subarray(channel * knots, (channel + 1) * knots),
    leftSlope: layer.slopes[moment][2 * channel],
    rightSlope: layer.slopes[moment][2 * channel + 1],
  };
}

class Gallery {
  constructor(data, layers) {
    Object.assign(this, { data, layers, layer: 0, channel: 0, moment: data.moments.length - 1, channels: [], timer: null });
    this.at = (id) => document.getElementById(id);
    this.makeCards();
    this.connect();
    this.choose(0);
  }

  connect() {
    const time = this.at("time");
    time.max = this.data.moments.length - 1;
    this.at("time-control").hidden = this.data.moments.length < 2;
    time.addEventListener("input", () => (this.stop(), this.show(Number(time.value))));
    this.at("play").addEventListener("click", () => (this.timer ? this.stop() : this.play()));
    const channel = this.at("channel");
    channel.addEventListener("input", () => this.pick(this.channels[Number(channel.value)]));
    this.at("shape").addEventListener("change", () => this.filter());
    for (const link of document.querySelectorAll("a[data-layer]")) {
      link.addEventListener("click", () => this.choose(Number(link.dataset.layer)));
    }
    const note = this.at("left-out");
    note.hidden = !this.data.left_out.length;
    note.textContent = `To stay small, this page leaves out ${this.data.left_out.join(" and ")}.`;
  }

  // Selection.

  choose(layer) {
    this.layer = layer;
    this.cards[layer].radio.checked = true;
    const { channels, members } = this.layers[layer];
    const select = this.at("shape");
    const wanted = select.value;
    const options = this.data.classes.map((name, bit) => [bit, `${name} (${members[bit] ?? "–"})`, !members[bit]]);
    options.unshift(["", `all (${channels})`, false]);
    select.replaceChildren(...options.map(([value, text, disabled]) => html("option", text, { value, disabled })));
    select.value = wanted !== "" && members[wanted] ? wanted : "";
    this.filter();
  }

  filter() {
    const { channels, classes } = this.layers[this.layer];
    const bit = this.at("shape").value;
    const every = Array.from({ length: channels }, (_, channel) => channel);
    this.channels = bit === "" ? every : every.filter((channel) => classes[channel] & (1 << Number(bit)));
    const slider = this.at("channel");
    slider.max = this.channels.length - 1;
    const place = Math.max(0, this.channels.findIndex((channel) => channel >= this.channel));
    slider.value = place;
    this.at("channel-control").classList.toggle("alone", channels === 1);
    slider.disabled = this.channels.length < 2;
    this.pick(this.channels[place]);
  }

  pick(channel) {
    this.channel = channel;
    this.draw();
  }

  show(moment) {
    this.moment = moment;
    this.draw();
    this.drawCards();
  }

  play() {
    const last = this.data.moments.length - 1;
    if (this.moment === last) this.show(0);
    this.at("play").textContent = "Pause";
    this.timer = setInterval(() => {
      this.show(this.moment + 1);
      if (this.moment === last) this.stop();
    }, Math.max(120, 4000 / (last + 1)));
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
    this.at("play").textContent = "Play";
  }

  // Cards.

  makeCards() {
    this.cards = this.layers.map((layer, index) => {
      const label = document.createElement("label");
      const radio = html("input", "", { type: "radio", name: "layer", value: index });
      radio.addEventListener("change", () => this.choose(index));
      const drawing = element("svg", { viewBox: "0 0 120 72", "aria-hidden": "true" });
      const many = Math.min(ON_A_CARD, layer.channels);
      const paths = Array.from({ length: many }, () => drawing.appendChild(element("path", { class: "thin" })));
      const shown = paths.map((_, i) => (many > 1 ? Math.round((i * (layer.channels - 1)) / (many - 1)) : 0));
      const name = html("span", layer.name, { className: "layer-name", title: layer.name });
      const functions = layer.channels > 1 ? `${layer.channels} channels` : "1 function";
      const size = html("span", `${index + 1}: ${functions}`, { className: "size" });
      label.append(radio, drawing, name, size);
      this.at("layers").append(label);
      return { radio, paths, shown };
    });
    const many = this.layers.length;
    this.at("layers").classList.add(many < 4 ? "few" : many < 13 ? "some" : "many");
    this.drawCards();
  }

  drawCards() {
    this.cards.forEach(({ paths, shown }, index) => {
      paths.forEach((path, i) => {
        const unit = unitOf(this.layers[index], shown[i], this.moment);
        const [low, high] = withMargin([unit.left, unit.right], 0.12);
        const points = pointsOf(unit, low, high);
        const [bottom, top] = extent(points.map(([, y]) => y), [0, 1]);
        const place = (x, y) => [4 + (112 * (x - low)) / (high - low), 67 - (62 * (y - bottom)) / (top - bottom || 1)];
        path.setAttribute("d", pathOf(points, place));
      });
    });
  }

  // The selected function.

  draw() {
    const layer = this.layers[this.layer];
    const moments = this.data.moments.map((_, moment) => unitOf(layer, this.channel, moment));
    const unit = moments[this.moment];
    const seen = [layer.p5[this.channel], layer.p95[this.channel]];
    // The same axes for all moments, so that only the function moves.
    const x = withMargin(extent([...moments.flatMap((other) => [other.left, other.right]), ...seen], [-3, 3]), 0.12);
    const start = layer.start ? clipped(this.data.starts[layer.start], ...x) : null;
    const every = moments.map((other) => pointsOf(other, ...x));
    const heights = [...every.flat(), ...(start || [])].map((point) => point[1]);
    const y = withMargin(extent(heights, [0, 1]), 0.06);
    if (Number.isFinite(seen[0])) y[0] -= ROOM_FOR_INPUTS * (y[1] - y[0]);
    const place = (a, b) => [
      BOX.left + ((BOX.right - BOX.left) * (a - x[0])) / (x[1] - x[0]),
      BOX.bottom - ((BOX.bottom - BOX.top) * (b - y[0])) / (y[1] - y[0]),
    ];
    const parts = [...this.axes(x, y, place), ...this.inputs(layer, x, place)];
    if (start) parts.push(element("path", { class: "start", d: pathOf(start, place) }));
    parts.push(element("path", { class: "learned", id: "learned", d: pathOf(every[this.moment], place) }));
    for (const bound of [unit.left, unit.right]) {
      const [cx, cy] = place(bound, valueAt(unit, bound));
      if (Number.isFinite(cx) && Number.isFinite(cy)) parts.push(element("circle", { class: "bound", cx, cy, r: 4.5 }));
    }
    this.at("curve").replaceChildren(...parts);
    this.describe(layer, unit);
  }

  axes(x, y, place) {
    const parts = [];
    for (const tick of ticks(y)) {
      const [, at] = place(0, tick);
      parts.push(element("path", { class: tick ? "grid" : "zero", d: `M${BOX.left} ${at}H${BOX.right}` }));
      parts.push(element("text", { x: BOX.left - 7, y: at + 4, "text-anchor": "end" }, number(tick, 6)));
    }
    for (const tick of ticks(x, 8)) {
      const [at] = place(tick, 0);
      parts.push(element("path", { class: tick ? "grid" : "zero", d: `M${at} ${BOX.top}V${BOX.bottom}` }));
      parts.push(element("text", { x: at, y: BOX.bottom + 16, "text-anchor": "middle" }, number(tick, 6)));
    }
    parts.push(element("text", { class: "name", x: (BOX.left + BOX.right) / 2, y: 376, "text-anchor": "middle" }, "input"));
    return parts;
  }

  // Along the lower edge: the histogram, or the range from 5 % to 95 % if only quantiles are known.
  inputs(layer, x, place) {
    const room = ROOM_FOR_INPUTS * (BOX.bottom - BOX.top) * 0.9;
    const box = (from, to, height) => {
      const [left, right] = [from, to].map((edge) => place(Math.min(Math.max(edge, x[0]), x[1]), 0)[0]);
      return element("rect", { class: "inputs", x: left, y: BOX.bottom - height, width: Math.max(0, right - left), height });
    };
    const low = layer.low ? layer.low[this.channel] : NaN;
    if (Number.isFinite(low)) {
      const count = this.data.bars;
      const step = (layer.high[this.channel] - low) / count;
      const heights = layer.bars.subarray(this.channel * count, (this.channel + 1) * count);
      return Array.from(heights, (height, i) => box(low + i * step, low + (i + 1) * step, (room * height) / 255));
    }
    const known = Number.isFinite(layer.p5[this.channel]);
    return known ? [box(layer.p5[this.channel], layer.p95[this.channel], 9)] : [];
  }

  // Text.

  describe(layer, unit) {
    const { step, epoch, phase } = this.data.moments[this.moment];
    const phases = { 1: ", Phase I", 2: ", Phase II" };
    const named = (count) => (count === null ? "the end of training" : `step ${count.toLocaleString("en")}`);
    const when = named(step) + (epoch === null ? "" : `, epoch ${number(epoch)}`) + (phases[phase] || "");
    const which = layer.channels > 1 ? `channel ${this.channel} of ${layer.channels}` : "one function for the layer";
    const shapes = this.data.classes.filter((_, bit) => layer.classes[this.channel] & (1 << bit));
    const last = this.data.ended ? "at the end" : `at ${named(this.data.moments.at(-1).step)}`;
    const place = `${this.layer + 1} (${layer.name})`; // the number is the same in the table and in the chart
    this.at("caption").textContent = `Layer ${place}, ${which}, ${when}`;
    const spoken = `The function of layer ${place}, ${which}, at ${when}; ${last}: ${shapes.join(", ") || "no named shape"}`;
    this.at("curve").setAttribute("aria-label", spoken);
    this.at("time-name").textContent = when;
    this.at("time").value = this.moment;
    this.at("time").setAttribute("aria-valuetext", when);
    this.at("channel-name").textContent = layer.channels > 1 ? `${this.channel}` : "one for the layer";
    this.at("channel").setAttribute("aria-valuetext", which);
    const has = { start: layer.start, inputs: Number.isFinite(layer.p5[this.channel]) };
    for (const [name, there] of Object.entries(has)) this.at(`legend-${name}`).hidden = !there;
    this.at("legend-start").lastElementChild.textContent = `initial function: ${layer.start}`;
    this.at("legend-inputs").lastElementChild.textContent = this.data.bars ? "distribution of inputs" : "inputs, 5 % to 95 %";
    const rounded = (value, name) => number(value, 3, layer.steps[name][this.moment][this.channel]);
    const facts = {
      "bounds now": `${rounded(unit.left, "bounds")} to ${rounded(unit.right, "bounds")}`,
      "outer slopes": `${rounded(unit.leftSlope, "slopes")} and ${rounded(unit.rightSlope, "slopes")}`,
      [`shape ${last}`]: shapes.join(", ") || "no named shape",
      "distance from the initial function": number(layer.movement[this.channel], 2),
      "IOU with the inputs": number(layer.iou[this.channel], 2),
      "inputs outside": percent(layer.outside[this.channel]),
      "empty intervals": percent(layer.empty[this.channel], 0),
    };
    this.at("facts").replaceChildren(
      ...Object.entries(facts).map(([name, value]) => {
        const pair = document.createElement("div");
        pair.append(html("dt", name), html("dd", value));
        return pair;
      }),
    );
  }
}
