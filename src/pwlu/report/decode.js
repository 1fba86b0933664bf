// Reads what encoding.py wrote. All numbers come out as Float64Array; what is not finite as NaN.

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

  halves(count) {
    return this.take(count, 2, (at) => half(this.view.getUint16(at, true)));
  }

  bfloats(count) {
    const word = new DataView(new ArrayBuffer(4));
    return this.take(count, 2, (at) => {
      word.setUint16(0, this.view.getUint16(at, true));
      return word.getFloat32(0);
    });
  }

  // values: [moment][channel * columns + column], the last moment being that of 16 bits; steps: [moment][channel], the distance
  // from one level to the next, below which a difference is rounding
  growth(moments, channels, columns) {
    const size = channels * columns;
    const scale = this.bfloats(2 * channels);
    const step = (top) => Float64Array.from({ length: channels }, (_, c) => (scale[2 * c + 1] - scale[2 * c]) / top);
    const [fine, rough] = [step(65534), step(254)];
    const value = (level, top, steps, i) => {
      const channel = Math.floor(i / columns);
      return level > top ? NaN : scale[2 * channel] + steps[channel] * level;
    };
    const levels = this.take(size, 2, (at) => this.view.getUint16(at, true));
    const last = levels.map((level, i) => value(level, 65534, fine, i));
    const values = [];
    let coarse = new Float64Array(size);
    for (let moment = 0; moment < moments - 1; moment++) {
      const differences = this.bytes(size);
      coarse = coarse.map((level, i) => (level + differences[i]) & 255);
      values.push(coarse.map((level, i) => value(level, 254, rough, i)));
    }
    return { values: [...values, last], steps: [...values.map(() => rough), fine] };
  }
}

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : fraction * 2 ** -24);
}

async function inflated(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}
