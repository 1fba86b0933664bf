// Decodes what encoding.py wrote, to Float64Array; non-finite numbers become NaN.

class Bytes {
  constructor(buffer) {
    this.view = new DataView(buffer);
    this.place = 0;
  }

  take(count, width, read) {
    const values = new Float64Array(count);
    for (let i = 0; i < count; i++, this.place += width) values[i] = read(this.place);
    return values;
  }

  bytes(count) {
    return this.take(count, 1, (at) => this.view.getUint8(at));
  }

  shares(count) {
    return this.bytes(count).map((level) => (level === 255 ? NaN : level / 254));
  }

  float16s(count) {
    return this.take(count, 2, (at) => float16(this.view.getUint16(at, true)));
  }

  bfloat16s(count) {
    const word = new DataView(new ArrayBuffer(4));
    return this.take(count, 2, (at) => {
      word.setUint16(0, this.view.getUint16(at, true));
      return word.getFloat32(0);
    });
  }

  // values: [moment][channel * columns + column]; the last moment has 16 bits. steps: [moment][channel], the distance between
  // two levels: smaller differences are rounding.
  snapshots(moments, channels, columns) {
    const size = channels * columns;
    const scale = this.bfloat16s(2 * channels);
    const step = (top) => Float64Array.from({ length: channels }, (_, c) => (scale[2 * c + 1] - scale[2 * c]) / top);
    const [fine, coarse] = [step(65534), step(254)];
    const value = (level, top, steps, i) => {
      const channel = Math.floor(i / columns);
      return level > top ? NaN : scale[2 * channel] + steps[channel] * level;
    };
    const levels = this.take(size, 2, (at) => this.view.getUint16(at, true));
    const last = levels.map((level, i) => value(level, 65534, fine, i));
    const values = [];
    let current = new Float64Array(size);
    for (let moment = 0; moment < moments - 1; moment++) {
      const differences = this.bytes(size);
      current = current.map((level, i) => (level + differences[i]) & 255);
      values.push(current.map((level, i) => value(level, 254, coarse, i)));
    }
    return { values: [...values, last], steps: [...values.map(() => coarse), fine] };
  }
}

function float16(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : fraction * 2 ** -24);
}

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}
