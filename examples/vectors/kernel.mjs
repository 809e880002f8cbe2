// Two kernels, one of which is wrong, judged by files of vectors/:
//
//     node examples/vectors/kernel.mjs right vectors/llama.*.json    prints the count alone
//     node examples/vectors/kernel.mjs wrong vectors/llama.*.json    prints a line for each output that is wrong
import { BITS, tests } from "./reader.mjs";

function even(v) { // the nearest integer, ties to even
  const low = Math.floor(v), rest = v - low;
  return rest > 0.5 || (rest === 0.5 && low % 2 !== 0) ? low + 1 : low;
}

function rounded(v, dtype) { // in a format of 16 or 32 bits
  if (dtype === "float32" || v === 0 || !Number.isFinite(v)) return Math.fround(v);
  const half = dtype === "float16", exponent = Math.floor(Math.log2(Math.abs(v))) + 1;
  const step = 2 ** (Math.max(exponent, half ? -13 : -125) - BITS[dtype]), result = even(v / step) * step;
  return Math.abs(result) >= 2 ** (half ? 16 : 128) ? Math.sign(v) * Infinity : result;
}

function rmsNorm({ n, eps, offset, norm, inputs: { x, scale, residual }, outputs }, epsOutside) {
  const y = [], inverses = []; // an output that is not returned is not judged
  for (let start = 0; start < x.length; start += n) {
    let row = x.slice(start, start + n);
    if (residual) row = row.map((a, i) => rounded(a + residual[start + i], outputs.h.dtype));
    const mean = row.reduce((sum, h) => sum + h * h, 0) / n;
    const inverse = 1 / (epsOutside ? Math.sqrt(mean) + eps : Math.sqrt(mean + eps));
    inverses.push(Math.fround(inverse));
    row.forEach((h, j) => {
      const normed = norm === "none" ? h * inverse : rounded(h * inverse, norm);
      y.push(rounded(Math.fround(normed * (offset + scale[j])), outputs.y.dtype));
    });
  }
  return { y, inverse_rms: inverses };
}

function isWrong({ block, lo, hi }, got) {
  return lo.some((low, j) => {
    const own = got.slice(j * block, (j + 1) * block); // one element, where block is 1
    const value = own.reduce((sum, a, i) => sum + (i + 1) * a, 0);
    return Number.isNaN(low) ? !Number.isNaN(value) : !(low <= value && value <= hi[j]);
  });
}

function main(kernel, ...paths) {
  if (!["right", "wrong"].includes(kernel) || !paths.length)
    throw new Error("usage: kernel.mjs right|wrong vectors/VARIANT.DTYPE.json ...");
  let count = 0, judged = 0, wrong = 0;
  for (const path of paths)
    for (const test of tests(path)) {
      count++;
      for (const [name, got] of Object.entries(rmsNorm(test, kernel === "wrong"))) {
        if (!test.outputs[name]) throw new Error(`test ${test.id} has no ${name}`);
        judged++;
        if (!isWrong(test.outputs[name], got)) continue;
        console.log(test.file, test.id, test.flags.join(), name);
        wrong++;
      }
    }
  console.error(`${count} tests, ${judged} outputs judged, ${wrong} wrong`);
  return judged ? Number(wrong > 0) : 2;
}

try {
  process.exitCode = main(...process.argv.slice(2));
} catch (error) { // of a file, too
  console.error(error.message);
  process.exitCode = 2;
}
